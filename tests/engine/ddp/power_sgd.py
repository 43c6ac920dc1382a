# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's powerSGD_hook on two ranks. usage: power_sgd.py FILE. Writes rank 0's results as float32: for each of CASES, each
pass and each bucket. power_sgd_test.cc does the same with Weft's hook. Exits with 77 without torch."""

import os
import sys
import tempfile
import types

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(error)
    sys.exit(77)

CASES = [(1, True, 0.0), (2, False, 0.0), (3, True, 0.0), (2, True, 1e-3)]  # rank of the matrices, warm start, epsilon
SHAPES = [[(12, 20), (12,), (5, 3, 4, 4)], [(30, 16), (16,), (2, 2)]]  # by bucket
PASSES = 6


class RandomState:
    """numpy.random.RandomState.randint, where numpy is not installed: MT19937, and numbers above the limit are drawn again."""

    def __init__(self, seed):
        self.state, self.index = [seed & 0xFFFFFFFF], 624
        for i in range(1, 624):
            before = self.state[-1]
            self.state.append((1812433253 * (before ^ (before >> 30)) + i) & 0xFFFFFFFF)

    def word(self):
        if self.index == 624:
            self.index, s = 0, self.state
            for i in range(624):
                y = (s[i] & 0x80000000) | (s[(i + 1) % 624] & 0x7FFFFFFF)
                s[i] = s[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
        y = self.state[self.index]
        self.index += 1
        y ^= y >> 11
        y ^= (y << 7) & 0x9D2C5680
        y ^= (y << 15) & 0xEFC60000
        return y ^ (y >> 18)

    def randint(self, limit):
        mask = (1 << (limit - 1).bit_length()) - 1
        while (number := self.word() & mask) >= limit:
            pass
        return number


class Bucket:
    """What the hook asks of a dist.GradBucket, which Python cannot make."""

    def __init__(self, index, gradients):
        self._index, self._buffer = index, torch.cat([gradient.view(-1) for gradient in gradients])
        parts = self._buffer.split([gradient.numel() for gradient in gradients])
        self._gradients = [part.view(gradient.shape) for part, gradient in zip(parts, gradients)]

    def index(self):
        return self._index

    def buffer(self):
        return self._buffer

    def gradients(self):
        return self._gradients

    def is_last(self):
        return self._index + 1 == len(SHAPES)


def gradient(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(rank, rendezvous, file):
    try:
        import numpy  # noqa: F401
    except ImportError:
        assert RandomState(0).randint(2**31 - 1) == 209652396, "not what numpy draws"
        sys.modules["numpy"] = types.SimpleNamespace(random=types.SimpleNamespace(RandomState=RandomState))
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    results = []
    for matrix_rank, warm_start, epsilon in CASES:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2, warm_start=warm_start,
            orthogonalization_epsilon=epsilon, random_seed=7,
        )
        for number in range(PASSES):
            for index, shapes in enumerate(SHAPES):
                gradients = [gradient(shape, 1000 * number + 100 * index + 10 * i + rank) for i, shape in enumerate(shapes)]
                future = powerSGD_hook.powerSGD_hook(state, Bucket(index, gradients))
                value = future.wait()
                results.append((value[0] if isinstance(value, list) else value).clone())
    if rank == 0:
        with open(file, "wb") as out:
            out.write(bytes(torch.cat(results).view(torch.uint8).tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        run(1 if child == 0 else 0, os.path.join(folder, "rendezvous"), sys.argv[1])
        if child == 0:
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

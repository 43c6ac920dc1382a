# SPDX-License-Identifier: Apache-2.0
"""The peer of autograd_bench: the same iterations by Python's torch.distributed.autograd, on the same torch.

usage: autograd_python.py CASE ITERATIONS SAMPLES, started with RANK, LOCAL_RANK, … as torchrun sets them. Rank 0 prints
the seconds that each iteration took, one value a sample. Cases: "listing", "kept", "two stages".
"""

import os
import sys
import time

rank = int(os.environ["RANK"])
os.sched_setaffinity(0, {rank % os.cpu_count()})

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

case = sys.argv[1]
iterations, samples = (int(text) for text in sys.argv[2:4])


def random_tensor():
    return torch.rand((3, 3), requires_grad=True)


def iterate(kept):
    with dist_autograd.context() as context:
        first, second = kept[:2] if kept else (rpc.remote("worker1", random_tensor), rpc.remote("worker1", random_tensor))
        loss = first.to_here() + second.to_here()
        dist_autograd.backward(context, [loss.sum()])
        optimizer = kept[2] if kept else DistributedOptimizer(optim.SGD, [first, second], lr=0.05)
        optimizer.step(context)


def make_stage():
    return nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())


class LastStage:
    def __init__(self):
        self.net = make_stage()

    def loss(self, x):
        return self.net(x).sum()


def iterate_stages(first, last, batch):
    with dist_autograd.context() as context:
        outs = [last.rpc_async().loss(first(batch)) for _ in range(8)]
        dist_autograd.backward(context, [torch.stack([out.wait() for out in outs]).sum()])


torch.set_num_threads(1)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    kept = None
    iteration = lambda: iterate(kept)
    if case == "two stages":
        first, last, batch = make_stage(), rpc.remote("worker1", LastStage), torch.rand((64, 512))
        iteration = lambda: iterate_stages(first, last, batch)
    if case == "kept":
        tensors = [rpc.remote("worker1", random_tensor) for _ in range(2)]
        kept = (*tensors, DistributedOptimizer(optim.SGD, tensors, lr=0.05))
    for sample in range(-2, samples):
        start = time.monotonic()
        for _ in range(iterations):
            iteration()
        if sample >= 0:
            print(f"{(time.monotonic() - start) / iterations:.9f}", end=" ", flush=True)
    print(flush=True)
    kept = tensors = last = None
rpc.shutdown()

# SPDX-License-Identifier: Apache-2.0
"""Every operation of torch.distributed gives on "weft" what it gives on "gloo"."""

import unittest

import torch
import torch.distributed as dist
import torch_weft
from ranks import RanksTest, join, release

OPERATORS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
BITWISE = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]


def values(rank, *shape, dtype=torch.float32):
    count = torch.tensor(shape).prod().item() if shape else 1
    return (torch.arange(count) % 5 + rank + 1).reshape(shape).to(dtype)


def gathered(rank, size):
    for dtype in [*DTYPES, torch.bool, torch.complex64]:
        outputs = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, values(rank, 2, 3, dtype=dtype))
        yield f"all_gather {dtype}", outputs
    for shape in [(), (0,), (2, 0)]:
        outputs = [torch.zeros(shape) for _ in range(size)]
        dist.all_gather(outputs, values(rank, *shape))
        yield f"all_gather {shape}", outputs
    into = torch.zeros(size * 2, 3)
    dist.all_gather_into_tensor(into, values(rank, 2, 3))
    yield "all_gather_into_tensor", into
    columns = torch.zeros(3, size)
    dist.all_gather([columns[:, i : i + 1] for i in range(size)], values(rank, 3, 1))
    yield "all_gather to columns", columns
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [values(rank, 2), values(rank, 3)])
    yield "all_gather_coalesced", lists
    outputs = [torch.zeros(4) for _ in range(size)] if rank == 1 else None
    dist.gather(values(rank, 4), outputs, dst=1)
    yield "gather", outputs
    one = torch.zeros(3)
    dist.scatter(one, [values(i, 3) for i in range(size)] if rank == 0 else None, src=0)
    yield "scatter", one


def reduced(rank, size):
    for dtype in DTYPES:
        for operator in OPERATORS:
            tensor = values(rank, 7, dtype=dtype)
            dist.all_reduce(tensor, operator)
            yield f"all_reduce {dtype} {operator}", tensor
    for operator in BITWISE:
        tensor = values(rank, 7, dtype=torch.int32)
        dist.all_reduce(tensor, operator)
        yield f"all_reduce {operator}", tensor
    tensor = torch.complex(values(rank, 4), values(rank + 1, 4))
    dist.all_reduce(tensor)
    yield "all_reduce complex", tensor
    for shape in [(), (0,)]:
        tensor = values(rank, *shape)
        dist.all_reduce(tensor)
        yield f"all_reduce {shape}", tensor
    tensor = values(rank, 5)
    dist.reduce(tensor, 1)
    yield "reduce", tensor if rank == 1 else None
    output = torch.zeros(2)
    dist.reduce_scatter(output, [values(rank + i, 2) for i in range(size)])
    yield "reduce_scatter", output
    dist.reduce_scatter_tensor(output, values(rank, size * 2))
    yield "reduce_scatter_tensor", output
    tensors = [values(rank, 2), values(rank, 3)]
    dist.all_reduce_coalesced(tensors)
    yield "all_reduce_coalesced", tensors
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (size + 2,))
    dist.all_reduce(sparse)
    yield "all_reduce sparse", sparse.to_dense()


def exchanged(rank, size):
    output = torch.zeros(size * 2)
    dist.all_to_all_single(output, values(rank, size * 2))
    yield "all_to_all_single", output
    splits = [1 + (rank + i) % 2 for i in range(size)]
    output = torch.zeros(sum(splits), 2)
    dist.all_to_all_single(output, values(rank, sum(splits), 2), splits, splits)
    yield "all_to_all_single with splits", output
    if release() >= (2, 15):  # Gloo of older ones has only all_to_all_single
        outputs = [torch.zeros(3) for _ in range(size)]
        dist.all_to_all(outputs, [values(rank * size + i, 3) for i in range(size)])
        yield "all_to_all", outputs
    right, left = (rank + 1) % size, (rank - 1) % size
    took = torch.zeros(2, 2)
    pending = dist.isend(values(rank, 2, 2), right, tag=3)
    sender = dist.recv(took, None if rank == 0 else left, tag=3)
    pending.wait()
    yield "send and recv", [took, torch.tensor(sender)]
    batch = [dist.P2POp(dist.isend, values(rank, 3), right), dist.P2POp(dist.irecv, took3 := torch.zeros(3), left)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    yield "batch_isend_irecv", took3
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    yield "all_gather_object", objects
    texts = ["a", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(texts, 0)
    yield "broadcast_object_list", texts
    if release() >= (2, 15):  # older ones let gloo alone have it
        dist.monitored_barrier()


def run_all(rank, size, folder, backend):
    join(rank, size, folder, name=backend, backend=backend)
    results = {}
    for part in [gathered, reduced, exchanged]:
        results.update(part(rank, size))
    dist.destroy_process_group()
    return results


def run_only_on_weft(rank, size, folder):
    join(rank, size, folder)
    results = {}
    for dtype in [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint64]:
        tensor = (torch.arange(1.0, 5.0) * (rank == 0)).to(dtype)
        dist.broadcast(tensor, 0)
        results[str(dtype)] = tensor.to(torch.float32).tolist()
    tensor = values(rank, 3)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    results["avg"] = tensor.tolist()
    tensor = values(rank, 3)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    results["premul"] = tensor.tolist()
    outputs = [torch.zeros(i + 1) for i in range(size)]
    dist.all_gather(outputs, values(rank, rank + 1))
    results["uneven"] = [output.tolist() for output in outputs]
    one, two = values(rank, 2), values(rank, 3)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(one)
        dist.all_reduce(two)
    manager.wait()
    results["coalesced"] = [one.tolist(), two.tolist()]
    outs = [torch.zeros(size * 2), torch.zeros(size)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(outs[0], values(rank, 2))
        dist.all_gather_into_tensor(outs[1], values(rank, 1))
    results["coalesced gathers"] = [out.tolist() for out in outs]
    into = [torch.zeros(1), torch.zeros(2)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(into[0], values(rank, size))
        dist.reduce_scatter_tensor(into[1], values(rank, size * 2))
    results["coalesced scatters"] = [out.tolist() for out in into]
    dist.destroy_process_group()
    return results


def refused(call):
    """Returns the text of the CallerError that the call raises."""
    try:
        call()
    except torch_weft.CallerError as error:
        return str(error)
    raise AssertionError("the call was not refused")


def reduce_layouts(rank, size, folder):
    """The order of elements in memory differs between the ranks."""
    join(rank, size, folder)

    def laid_out(tensor):
        return tensor if rank == 0 else tensor.t().contiguous().t()

    all_reduced, reduced, sent = (laid_out(values(rank, 2, 3)) for _ in range(3))
    dist.all_reduce(all_reduced)
    dist.reduce(reduced, 1)
    dist.broadcast(sent, 0)
    dist.destroy_process_group()
    return all_reduced.tolist(), reduced.tolist() if rank == 1 else None, sent.tolist()


def refuse_shared_elements(rank, size, folder):
    join(rank, size, folder)
    own, shared = values(rank, 3), torch.zeros(1).expand(3)
    calls = {
        "all_reduce": lambda: dist.all_reduce(shared),
        "broadcast": lambda: dist.broadcast(shared, 0),
        "all_gather": lambda: dist.all_gather([shared, torch.zeros(3)], own),
        "all_gather_into": lambda: dist.all_gather_into_tensor(torch.zeros(1).expand(3 * size), own),
        "reduce_scatter_into": lambda: dist.reduce_scatter_tensor(shared, values(rank, 3 * size)),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(1).expand(4), values(rank, 4)),
        "recv": lambda: dist.recv(shared, 1 - rank),
    }
    texts = {name: refused(call) for name, call in calls.items()}
    dist.destroy_process_group()
    return texts


def use_inference_tensors(rank, size, folder):
    join(rank, size, folder)
    with torch.inference_mode():
        outputs = [torch.zeros(i + 1) for i in range(size)]
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
        dist.all_reduce(sparse)
    dist.all_gather(outputs, values(rank, rank + 1))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # all_gather() itself compares types
    text = refused(lambda: backend.allgather([outputs], [values(rank, rank + 1, dtype=torch.float64)]))
    dist.destroy_process_group()
    return [output.tolist() for output in outputs], sparse.to_dense().tolist(), text


def coalesce_after_an_error(rank, size, folder):
    """c10d does not end its coalescing after an exception."""
    join(rank, size, folder)
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    text = refused(lambda: dist.recv(torch.zeros(1).expand(2), 1 - rank))
    try:
        group._end_coalescing(torch.device("cpu"))
        ended = "well"
    except RuntimeError as error:
        ended = str(error)
    tensor = values(rank, 2)
    with dist._coalescing_manager():
        dist.all_reduce(tensor)
    dist.destroy_process_group()
    return text, ended, tensor.tolist()


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


class Operations(RanksTest):
    size = 2

    def test_equal_those_of_gloo(self):
        theirs = self.ranks.run(run_all, "gloo")
        ours = self.ranks.run(run_all, "weft")
        for rank in range(self.size):
            self.assertEqual(list(ours[rank]), list(theirs[rank]))
            for name, value in theirs[rank].items():
                self.assertTrue(equal(ours[rank][name], value), f"rank {rank}, {name}: {ours[rank][name]}, and gloo {value}")

    def test_that_gloo_lacks(self):
        for rank, results in enumerate(self.ranks.run(run_only_on_weft)):
            for dtype in ["float8_e4m3fn", "float8_e5m2", "uint16", "uint64"]:
                self.assertEqual(results[f"torch.{dtype}"], [1.0, 2.0, 3.0, 4.0])
            self.assertEqual(results["torch.float8_e8m0fnu"][:2], [1.0, 2.0])
            self.assertEqual(results["avg"], [1.5, 2.5, 3.5])
            self.assertEqual(results["premul"], [1.5, 2.5, 3.5])
            self.assertEqual(results["uneven"], [[1.0], [2.0, 3.0]])
            self.assertEqual(results["coalesced"], [[3.0, 5.0], [3.0, 5.0, 7.0]])
            self.assertEqual(results["coalesced gathers"], [[1.0, 2.0, 2.0, 3.0], [1.0, 2.0]])
            self.assertEqual(results["coalesced scatters"], [[[3.0], [5.0]][rank], [[3.0, 5.0], [7.0, 9.0]][rank]])

    def test_do_not_depend_on_strides(self):
        zero, one = self.ranks.run(reduce_layouts)
        total, first = [[3.0, 5.0, 7.0], [9.0, 11.0, 3.0]], [[1.0, 2.0, 3.0], [4.0, 5.0, 1.0]]
        self.assertEqual(zero, (total, None, first))
        self.assertEqual(one, (total, total, first))

    def test_refuse_elements_that_share_memory(self):
        for texts in self.ranks.run(refuse_shared_elements):
            for name, text in texts.items():
                self.assertTrue(text.startswith(name + ": elements of this tensor share memory"), text)

    def test_change_inference_tensors(self):
        for outputs, sparse, text in self.ranks.run(use_inference_tensors):
            self.assertEqual((outputs, sparse), ([[1.0], [2.0, 3.0]], [1.0, 1.0]))
            self.assertIn("this rank's must have the shape and type of its input", text)

    def test_end_coalescing_when_one_is_refused(self):
        for text, ended, reduced in self.ranks.run(coalesce_after_an_error):
            self.assertIn("share memory", text)
            self.assertIn("coalescing ends, but it has not begun", ended)
            self.assertEqual(reduced, [3.0, 5.0])


if __name__ == "__main__":
    unittest.main()

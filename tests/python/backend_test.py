# SPDX-License-Identifier: Apache-2.0
"""The backend "weft" of torch.distributed: joins, carries, ends."""

import pickle
import unittest

import torch
import torch.distributed as dist
from ranks import RanksTest, join


def reduce_and_broadcast(rank, size, folder):
    join(rank, size, folder)
    sums = torch.full((5,), rank + 1.0)
    dist.all_reduce(sums)
    rows = torch.full((3, 2), float(rank))
    dist.broadcast(rows, 1)
    dist.barrier()
    name = dist.get_backend()
    dist.destroy_process_group()
    return sums.tolist(), rows.tolist(), name


def reduce_async(rank, size, folder):
    join(rank, size, folder)
    tensor = torch.tensor([rank + 1])
    work = dist.all_reduce(tensor, async_op=True)
    value = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    work.wait()
    dist.destroy_process_group()
    return value.item(), work.is_completed(), work.result()[0].item()


def reduce_columns(rank, size, folder):
    join(rank, size, folder)
    table = torch.full((2, 4), rank + 1.0)
    dist.all_reduce(table[:, ::2])
    dist.broadcast(table[:, 1], 1)
    dist.reduce(table[:, 3], 0)
    pair = torch.full((2, 2), rank + 1.0)
    dist.all_reduce_coalesced([pair[:, 0], pair[:, 1]])
    dist.destroy_process_group()
    return table[:, :3].tolist(), table[0, 3].item(), pair.tolist()


def refuse_shared(rank, size, folder):
    join(rank, size, folder)
    import torch_weft

    try:
        dist.all_reduce(torch.zeros(1).expand(4))
    except torch_weft.CallerError as error:
        caught = error
    transposed = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(transposed)
    dist.destroy_process_group()
    is_one = isinstance(caught, (dist.DistBackendError,)) and isinstance(caught, ValueError)
    copy = pickle.loads(pickle.dumps(caught))
    return is_one, str(copy), copy.operation, transposed.tolist()


class Backend(RanksTest):
    def test_reduces_and_broadcasts(self):
        for sums, rows, name in self.ranks.run(reduce_and_broadcast):
            self.assertEqual(sums, [3.0] * 5)
            self.assertEqual(rows, [[1.0, 1.0]] * 3)
            self.assertEqual(name, "weft")

    def test_completes_futures(self):
        self.assertEqual(self.ranks.run(reduce_async), [(6, True, 3)] * 2)

    def test_changes_columns_in_place(self):
        results = self.ranks.run(reduce_columns)
        for table, _, pair in results:
            self.assertEqual(table, [[3.0, 2.0, 3.0]] * 2)
            self.assertEqual(pair, [[3.0, 3.0]] * 2)
        self.assertEqual(results[0][1], 3.0)

    def test_refuses_tensors_whose_elements_share_memory(self):
        for is_one, text, operation, transposed in self.ranks.run(refuse_shared):
            self.assertTrue(is_one)
            self.assertIn("share memory", text)
            self.assertEqual(operation, "all_reduce")
            self.assertEqual(transposed, [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]])


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Groups of groups: new_group, split_group, shrink_group, _reconfigure, several at once."""

import datetime
import time
import unittest

import torch
import torch.distributed as dist
from ranks import RanksTest, join, release


def total(group, value):
    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def make_groups(rank, size, folder):
    join(rank, size, folder)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    everyone = dist.new_group(timeout=datetime.timedelta(seconds=30))
    other = dist.new_group(backend="gloo")
    sums = [total(pair, rank + 1) if rank in ranks else None for pair, ranks in zip(pairs, [[0, 2], [1, 2]])]
    sums += [total(everyone, rank + 1), total(other, rank + 1)]
    local = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    sums.append(total(local, rank + 1) if local else None)
    roots = torch.tensor([rank])
    if rank in (1, 2):
        dist.broadcast(roots, 2, group=pairs[1])
    dist.destroy_process_group(pairs[0])
    sums.append(total(None, 1))
    dist.destroy_process_group()
    return sums, roots.item()


def split(rank, size, folder):
    join(rank, size, folder)
    part = dist.split_group(split_ranks=[[0, 2], [1]])
    result = dist.get_process_group_ranks(part), total(part, rank + 1)
    dist.destroy_process_group()
    return result


def make_with_a_device(rank, size, folder):
    join(rank, size, folder, device_id=torch.device("cpu:0"))
    pair = dist.new_group([0, 2])
    result = total(pair, rank + 1) if rank != 1 else None
    dist.destroy_process_group()
    return result


def make_in_gloo_world(rank, size, folder):
    join(rank, size, folder, backend="gloo")
    group = dist.new_group([0, 2], backend="weft")
    result = total(group, rank + 1) if rank != 1 else None
    dist.destroy_process_group()
    return result


def shrink(rank, size, folder):
    join(rank, size, folder)
    total(None, 1)
    if rank == 1:
        dist.destroy_process_group()
        return None
    smaller = dist.shrink_group([1])
    result = smaller.size(), total(smaller, rank + 1)
    dist.destroy_process_group()
    return result


def reconfigure(rank, size, folder):
    if not hasattr(dist.distributed_c10d, "_reconfigure"):
        return None
    join(rank, size, folder, enable_reconfigure=True)
    store = dist.FileStore(folder + "/handles", size)
    handle = dist.distributed_c10d._get_reconfigure_handle()
    store.set(str(rank), handle)
    handles = [store.get(str(other)).decode() for other in range(size)]
    dist.distributed_c10d._reconfigure(uuid=1, handles=handles).wait()
    first = dist.get_world_size(), total(None, rank + 1)
    if rank == 0:
        dist.destroy_process_group()
        return first
    dist.distributed_c10d._reconfigure(uuid=2, handles=set(handles[1:])).wait()
    second = dist.get_rank(), dist.get_world_size(), total(None, rank + 1)
    dist.destroy_process_group()
    return first, second


def reconfigure_without_one(rank, size, folder):
    join(rank, size, folder, enable_reconfigure=True)
    store = dist.FileStore(folder + "/handles", size)
    store.set(str(rank), dist.distributed_c10d._get_reconfigure_handle())
    handles = [store.get(str(other)).decode() for other in range(2)]
    told = None
    if rank == 0:
        try:
            dist.distributed_c10d._reconfigure(uuid=1, handles=handles, timeout=datetime.timedelta(milliseconds=100))
        except dist.DistBackendError as error:
            told = type(error).__name__, error.ranks
    dist.destroy_process_group()
    return told


def detail(rank, size, folder):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    join(rank, size, folder)
    result = total(None, rank)
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    return result


def leave_early(rank, size, folder):
    join(rank, size, folder)
    total(None, 1)
    if rank == 2:
        time.sleep(0.3)  # the others wait by then
        dist.destroy_process_group()
        return None
    begin = time.monotonic()
    try:
        total(None, 1)
    except dist.DistBackendError as error:
        told = type(error).__name__, error.ranks, time.monotonic() - begin < 1.5
    dist.destroy_process_group()
    return told


def abort(rank, size, folder):
    join(rank, size, folder)
    total(None, 1)
    if rank == 1:
        dist.distributed_c10d._abort_process_group()
        return None
    try:
        total(None, 1)
    except dist.DistBackendError as error:
        told = error.ranks, "rank 1 aborted the group" in str(error)
    dist.destroy_process_group()
    return told


def outlast_the_world(rank, size, folder):
    """The group's own limit is PyTorch's default; the world's is shorter."""
    join(rank, size, folder, timeout=datetime.timedelta(seconds=5))
    group = dist.new_group(timeout=datetime.timedelta(minutes=30))
    if rank == 1:
        time.sleep(6)
    result = total(group, 1)
    dist.destroy_process_group()
    return result


class Groups(RanksTest):
    size = 3

    def test_hold_any_ranks(self):
        zero, one, two = self.ranks.run(make_groups)
        self.assertEqual(zero, ([4.0, None, 6.0, 6.0, 3.0, 3.0], 0))
        self.assertEqual(one, ([None, 5.0, 6.0, 6.0, 3.0, 3.0], 2))
        self.assertEqual(two, ([4.0, 5.0, 6.0, 6.0, None, 3.0], 2))

    @unittest.skipUnless(release() >= (2, 15), "this torch takes an accelerator as device_id only")
    def test_are_made_where_the_first_names_a_device(self):
        self.assertEqual(self.ranks.run(make_with_a_device), [4.0, None, 4.0])

    @unittest.skipUnless(release() >= (2, 15), "this torch splits groups of GPUs only")
    def test_split(self):
        self.assertEqual(self.ranks.run(split), [([0, 2], 4.0), ([1], 2.0), ([0, 2], 4.0)])

    def test_are_made_beside_another_backend(self):
        self.assertEqual(self.ranks.run(make_in_gloo_world), [4.0, None, 4.0])

    @unittest.skipUnless(release() >= (2, 15), "this torch shrinks groups of GPUs only")
    def test_shrink(self):
        self.assertEqual(self.ranks.run(shrink), [(2, 4.0), None, (2, 4.0)])

    @unittest.skipUnless(hasattr(dist.distributed_c10d, "_reconfigure"), "this torch has no _reconfigure")
    def test_are_reconfigured(self):
        self.assertEqual(self.ranks.run(reconfigure), [(3, 6.0), ((3, 6.0), (0, 2, 5.0)), ((3, 6.0), (1, 2, 5.0))])

    @unittest.skipUnless(hasattr(dist.distributed_c10d, "_reconfigure"), "this torch has no _reconfigure")
    def test_name_the_rank_that_does_not_come_to_a_reconfiguration(self):
        self.assertEqual(self.ranks.run(reconfigure_without_one), [("Timeout", [1]), None, None])

    def test_tell_all_who_left_early(self):
        self.assertEqual(self.ranks.run(leave_early), [("PeerLost", [2], True)] * 2 + [None])

    def test_name_the_rank_that_aborts(self):
        self.assertEqual(self.ranks.run(abort), [([1], True), None, ([1], True)])

    def test_keep_a_limit_that_equals_the_default(self):
        self.assertEqual(self.ranks.run(outlast_the_world), [3.0] * 3)

    def test_work_under_the_wrapper_of_the_debug_level(self):
        self.assertEqual(self.ranks.run(detail), [3.0] * 3)


if __name__ == "__main__":
    unittest.main()

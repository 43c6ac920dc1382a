# SPDX-License-Identifier: Apache-2.0
"""Waits of Python programs: Ctrl-C ends them, other threads run on, limits hold, profilers see them."""

import datetime
import os
import signal
import threading
import time
import unittest

import torch
import torch.distributed as dist
from ranks import RanksTest, join, release

SECOND = datetime.timedelta(seconds=1)


def interrupted(call):
    """Presses Ctrl-C while the call waits. Returns the seconds that the call took."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - begin
    raise AssertionError("the wait ended without KeyboardInterrupt")


def interrupt(rank, size, folder):
    if rank == 1:
        join(rank, size, folder, "first")
        dist.recv(torch.zeros(1), 0)  # nothing else; stays until rank 0 has been interrupted
        dist.destroy_process_group()
        return []
    took = [interrupted(lambda: join(0, 2, folder, "never", timeout=10 * SECOND))]
    dist.distributed_c10d._world.group_count = 0  # c10d has counted the group that was not made
    join(rank, size, folder, "first")
    tensor = torch.zeros(1)
    took.append(interrupted(lambda: dist.recv(torch.zeros(1), 1)))
    took.append(interrupted(lambda: dist.all_reduce(tensor)))
    took.append(interrupted(dist.barrier))
    if release() >= (2, 15):  # older ones let gloo alone have it
        took.append(interrupted(lambda: dist.monitored_barrier(timeout=10 * SECOND)))
    dist.send(torch.ones(1), 1)
    dist.distributed_c10d._abort_process_group()
    return took


def count_meanwhile(rank, size, folder):
    join(rank, size, folder)
    counted = 0
    if rank == 1:
        time.sleep(0.5)
        dist.all_reduce(torch.zeros(1))
    else:
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        while waiter.is_alive():
            counted += 1
    dist.destroy_process_group()
    return counted


def chain_futures(rank, size, folder):
    """A callback that itself waits for an operation, as PowerSGD's do."""
    join(rank, size, folder)
    group = dist.new_group()  # for the callbacks, which run beside the program's own calls

    def again(future):
        tensor = future.value()[0]
        return dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]

    futures = [dist.all_reduce(torch.full((3,), float(i)), async_op=True).get_future().then(again) for i in range(8)]
    result = [future.wait()[0].item() for future in futures]
    dist.destroy_process_group()
    return result


def pass_limits(rank, size, folder):
    import torch_weft

    join(rank, size, folder, timeout=30 * SECOND)
    caught = []
    if rank == 0:
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        begin = time.monotonic()
        try:
            work.wait(datetime.timedelta(milliseconds=300))
        except torch_weft.Timeout as error:
            caught.append((str(error), time.monotonic() - begin < 5))
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(torch.zeros(1))
    if release() < (2, 15):  # _set_pg_timeout() of older ones passes over other backends than PyTorch's
        dist.destroy_process_group()
        return caught
    dist.distributed_c10d._set_pg_timeout(0.5 * SECOND)
    begin = time.monotonic()
    try:
        if rank == 0:
            dist.all_reduce(torch.zeros(1))
        else:
            time.sleep(2)
    except torch_weft.Timeout as error:
        caught.append((str(error), time.monotonic() - begin < 5))
    dist.destroy_process_group()
    return caught


def profile(rank, size, folder):
    join(rank, size, folder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.zeros(4))
        dist.all_reduce(torch.zeros(4), async_op=True).wait()
        dist.broadcast(torch.zeros(4), 0)
    dist.destroy_process_group()
    return sorted(event.name for event in profiler.events() if event.name.startswith("weft:"))


def train(rank, size, folder):
    join(rank, size, folder)
    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + step))).sum().backward()
        optimizer.step()
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()
    dist.destroy_process_group()
    return weights


def fork(rank, size, folder):
    join(rank, size, folder)
    dist.all_reduce(torch.zeros(1))
    begin = time.monotonic()
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=1, batch_size=4)
    read = sum(batch.sum().item() for batch in loader)
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return read, status, tensor.item(), time.monotonic() - begin < 300


class Waits(RanksTest):
    def test_end_at_ctrl_c(self):
        took = self.ranks.run(interrupt)[0]
        self.assertGreaterEqual(len(took), 4)
        self.assertLess(max(took), 5, took)

    def test_leave_the_interpreter_to_other_threads(self):
        self.assertGreater(self.ranks.run(count_meanwhile)[0], 1000)

    def test_may_be_nested_in_callbacks(self):
        self.assertEqual(self.ranks.run(chain_futures), [[4.0 * i for i in range(8)]] * 2)

    def test_end_at_their_limits(self):
        caught = self.ranks.run(pass_limits)[0]
        self.assertEqual([is_soon for _, is_soon in caught], [True] * (2 if release() >= (2, 15) else 1))
        for text, _ in caught:
            self.assertIn("all_reduce", text)

    def test_are_seen_by_the_profiler(self):
        self.assertEqual(self.ranks.run(profile), [["weft:all_reduce", "weft:all_reduce", "weft:broadcast"]] * 2)

    def test_of_ddp_give_one_model(self):
        one, other = self.ranks.run(train)
        self.assertEqual(one, other)

    def test_are_the_parents_after_a_fork(self):
        self.assertEqual(self.ranks.run(fork), [(28, 3, 2.0, True)] * 2)


if __name__ == "__main__":
    unittest.main()

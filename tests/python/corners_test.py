# SPDX-License-Identifier: Apache-2.0
"""Corners of the backend: columns as outputs, threads that wait at the end, Ctrl-C beside an error."""

import datetime
import os
import signal
import threading
import time
import unittest

import torch
import torch.distributed as dist
from lifetime_test import run
from ranks import RanksTest, join


def exchange_columns(rank, size, folder):
    join(rank, size, folder, timeout=datetime.timedelta(seconds=10))
    other = 1 - rank
    results = []
    table = torch.zeros(3, 2)
    pending = dist.irecv(table[:, 1], other)
    dist.send(torch.full((3,), rank + 1.0), other)
    pending.wait()
    results.append(table.tolist())
    table = torch.zeros(3, 2)
    batch = [dist.P2POp(dist.irecv, table[:, 0], other), dist.P2POp(dist.isend, torch.full((3,), rank + 1.0), other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    results.append(table.tolist())
    columns = torch.zeros(3, 2)
    parts = [columns[:, i : i + 1] for i in range(size)]
    future = dist.all_gather(parts, torch.full((3, 1), rank + 1.0), async_op=True).get_future()
    results.append(future.then(lambda done: columns.tolist()).wait())
    columns.zero_()
    work = dist.all_gather(parts, torch.full((3, 1), rank + 1.0), async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    results.append(columns.tolist())
    with torch.inference_mode():
        columns = torch.zeros(3, 2)
        dist.all_gather([columns[:, i : i + 1] for i in range(size)], torch.full((3, 1), rank + 1.0))
        results.append(columns.tolist())
    dist.destroy_process_group()
    return results


def name_limit(rank, size, folder):
    join(rank, size, folder)
    text = ""
    if rank == 0:
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        try:
            work.wait(datetime.timedelta(milliseconds=250))
        except RuntimeError as error:
            text = str(error)
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    return text


def interrupt_beside_error(rank, size, folder):
    join(rank, size, folder)
    name = ""
    if rank == 0:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            # A future's wait does not look for signals, so the error comes with the Ctrl-C.
            dist.all_reduce(torch.zeros(1), async_op=True).get_future().wait()
        except BaseException as error:
            name = type(error).__name__
    else:
        time.sleep(0.5)
        try:
            dist.barrier()
        except RuntimeError:
            pass
    try:
        dist.distributed_c10d._abort_process_group()
    except RuntimeError:
        pass
    return name


def gather_into_negated_views(rank, size, folder):
    """Views whose memory holds the negatives of their values."""
    join(rank, size, folder)
    outputs = [torch.imag(torch.tensor([1j]).conj()) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor([rank + 1.0]))
    dist.destroy_process_group()
    return [output.is_neg() for output in outputs], [output.item() for output in outputs]


def communicate_in_callbacks(rank, size, folder, gathers):
    """A callback may go on with the group while the program waits, and not while it goes on too."""
    join(rank, size, folder)
    results = []

    def communicate(tensor):
        if gathers:
            into = torch.zeros(size)
            dist.all_gather_into_tensor(into, tensor)
            return into.sum().item()
        dist.all_reduce(tensor)
        return tensor.item()

    def again(future):
        try:
            return communicate(future.value()[0])
        except dist.DistError as error:  # the future's wait raises a RuntimeError in its place
            results.append(type(error).__name__)
            raise

    def begin():
        if rank == 1:
            dist.recv(torch.zeros(1), 0)  # rank 0's operation cannot end before
        return dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again)

    future = begin()
    if rank == 0:
        dist.send(torch.zeros(1), 1)
    results.append(future.wait())
    if rank == 0:
        future = begin()
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        dist.send(torch.zeros(1), 1)
        try:
            future.wait()
        except Exception as error:
            results.append(str(error))
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(torch.zeros(1))
        dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    return results


class Corners(RanksTest):
    def test_columns_are_outputs_that_block_nobody(self):
        one, other = self.ranks.run(exchange_columns)
        gathered = [[1.0, 2.0]] * 3
        self.assertEqual(one, [[[0.0, 2.0]] * 3, [[2.0, 0.0]] * 3, gathered, gathered, gathered])
        self.assertEqual(other, [[[0.0, 1.0]] * 3, [[1.0, 0.0]] * 3, gathered, gathered, gathered])

    def test_a_wait_names_its_own_limit(self):
        self.assertIn("was not done within 250 ms", self.ranks.run(name_limit)[0])

    def test_ctrl_c_beside_an_error_is_not_lost(self):
        self.assertEqual(self.ranks.run(interrupt_beside_error)[0], "KeyboardInterrupt")

    def test_negated_views_receive_values(self):
        self.assertEqual(self.ranks.run(gather_into_negated_views), [([True, True], [1.0, 2.0])] * 2)

    def test_a_callback_is_refused_where_its_order_is_open(self):
        for gathers, name in ((False, "all_reduce"), (True, "all_gather_into")):
            one, other = self.ranks.run(communicate_in_callbacks, gathers)
            self.assertEqual((one[0], other), (4.0, [4.0]))
            self.assertEqual(one[1], "CallerError")
            self.assertIn(f"{name}: the callback of a future (operation 4 of the group)", one[2])
            self.assertIn("other ranks may issue these in another order", one[2])

    def test_a_waiting_thread_does_not_break_the_end(self):
        program = "threading.Thread(target=lambda: dist.recv(torch.ones(2), 1 - rank, tag=7), daemon=True).start()\n"
        program += "time.sleep(0.2)\ndist.barrier()\nif rank == 1: dist.destroy_process_group()\n"
        results, _ = run(program)
        self.assertEqual([status for status, _, _ in results], [0, 0], results)

    def test_a_callback_that_waits_does_not_hold_up_the_end(self):
        program = "def again(future):\n    time.sleep(rank)\n    dist.barrier()\n    print('waited', flush=True)\n"
        program += "dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again)\n"
        program += "time.sleep(0.3 if rank == 0 else 1.5)\n"
        results, _ = run(program)
        self.assertEqual([out for _, out, _ in results], ["waited\n"] * 2, results)

    def test_a_callback_that_runs_does_not_break_the_end(self):
        program = "def slow(future):\n    time.sleep(0.7)\n    print('called')\n"
        program += "dist.all_reduce(torch.ones(1), async_op=True).get_future().then(slow)\n"
        results, _ = run(program)
        self.assertEqual([one[:2] for one in results], [(0, "called\n")] * 2, results)

    def test_recorder_of_pytorch_is_attached_only_on_request(self):
        if not hasattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS"):
            self.skipTest("this release of torch records no backends from elsewhere")
        program = "print(len(dist.distributed_c10d._world.pg_flight_recorder_hooks))\n"
        for size, hooks in ((None, "0\n"), ("10", "1\n")):
            environment = {"TORCH_FR_BUFFER_SIZE": size} if size else {}
            results, _ = run(program, size=1, environment=environment)
            self.assertEqual([one[:2] for one in results], [(0, hooks)], results)


if __name__ == "__main__":
    unittest.main()

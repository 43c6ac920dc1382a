# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: processes that stay, and run functions of a test's module together."""

import datetime
import multiprocessing
import os
import signal
import tempfile
import traceback
import unittest
from pathlib import Path


def release():
    """The release of torch, as (2, 15). Older ones keep some calls to backends of their own."""
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def join(rank, size, folder, name="0", backend="weft", **options):
    """Joins the default group over a file store. To be called on the ranks."""
    import torch.distributed as dist

    options.setdefault("timeout", datetime.timedelta(seconds=60))
    store = dist.FileStore(str(Path(folder) / name), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)


def _serve(rank, size, connection):
    while True:
        task = connection.recv()
        if task is None:
            return
        function, folder, arguments = task
        try:
            connection.send((True, function(rank, size, folder, *arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Ranks:
    """`size` processes. Their functions take rank, size, a folder of the call, and its arguments."""

    def __init__(self, size):
        self.size = size
        self._start()

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, theirs))
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)

    def run(self, function, *arguments, seconds=100):
        """Runs the function on all ranks, and returns what they return. None for a rank that died."""
        with tempfile.TemporaryDirectory() as folder:
            for connection in self.connections:
                connection.send((function, folder, arguments))
            try:
                return [self._result(rank, seconds) for rank in range(self.size)]
            except AssertionError:
                self._kill()
                self._start()  # the next call has ranks that are in step
                raise

    def _result(self, rank, seconds):
        if not self.connections[rank].poll(seconds):
            raise AssertionError(f"rank {rank} did not end within {seconds} s")
        try:
            is_well, result = self.connections[rank].recv()
        except EOFError:
            return None
        if not is_well:
            raise AssertionError(f"rank {rank}: {result}")
        return result

    def _kill(self):
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def close(self):
        for connection, process in zip(self.connections, self.processes):
            try:
                connection.send(None)
            except OSError:
                pass
            process.join(20)
        self._kill()


class RanksTest(unittest.TestCase):
    """Tests that share `size` processes."""

    size = 2

    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks(cls.size)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()

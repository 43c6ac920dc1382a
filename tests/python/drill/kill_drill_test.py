# SPDX-License-Identifier: Apache-2.0
"""A rank is killed in the middle of collectives: the others learn of it at once, and nothing stays.

Each moment is a seed, which chooses the rank, the time and the calls. The everyday run has five; with
WEFT_ALL_SETTINGS, which ./dev test --all sets, there are fifty. WEFT_DRILL_SEED=N repeats one.
"""

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import unittest
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP needs it, and takes seconds to import it: once here, not in every rank
import torch.distributed as dist
import torch_weft
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 3
# Seconds from the moment at which the kernel has told a rank of the death, by a pipe of which only
# the killed rank held the other end, until Weft has. A machine that does much else delays both.
KNOWN_WITHIN = 1.0
STARTED_WITHIN = 60.0
ENDED_WITHIN = 20.0
SHARED_MEMORY = Path("/dev/shm")


class Calls:
    """What the ranks call again and again; a seed chooses one."""

    NAMES = ("collectives", "large", "asynchronous", "messages", "training", "subgroups")

    def __init__(self, name, rank):
        self._rank, self._group = rank, None
        self.round = getattr(self, name)
        if name == "training":
            net = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
            self._model = DistributedDataParallel(net)
        if name == "subgroups":
            self._group = dist.new_group(backend="weft")

    def collectives(self):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 1)
        dist.all_gather([torch.empty(1000) for _ in range(RANKS)], tensor)
        dist.barrier()

    def large(self):
        dist.all_reduce(torch.ones(4 << 20))

    def asynchronous(self):
        works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(8)]
        for work in works:
            work.wait()

    def messages(self):
        # Every rank hears of the death, also one that waits for a rank that lives.
        behind, ahead = (self._rank - 1) % RANKS, (self._rank + 1) % RANKS
        received = torch.empty(10_000)
        works = [dist.isend(torch.ones(10_000), ahead), dist.irecv(received, behind)]
        for work in works:
            work.wait()

    def training(self):
        self._model(torch.randn(8, 300)).sum().backward()

    def subgroups(self):
        dist.all_reduce(torch.ones(100), group=self._group)
        dist.all_reduce(torch.ones(100))


def end_with_parent():
    """The kernel kills this process if the test ends before it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Lives:
    """A pipe for each rank, of which only the rank keeps the writing end."""

    def __init__(self):
        self._pipes = [os.pipe() for _ in range(RANKS)]

    def keep_only(self, rank=None):
        for other, (_, end) in enumerate(self._pipes):
            if other != rank:
                os.close(end)

    def close(self):
        for end, _ in self._pipes:
            os.close(end)

    def watch(self, rank):
        """Starts a thread that ends with the rank's life; a function that waits for it and returns
        the time."""
        seen = []

        def wait():
            os.read(self._pipes[rank][0], 1)
            seen.append(time.monotonic())

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()

        def end_of_life():
            thread.join()
            return seen[0]

        return end_of_life


def run_rank(rank, calls, folder, end_of_victim):
    end_with_parent()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(
        "weft", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    rounds = Calls(calls, rank)
    rounds.round()
    Path(folder, f"ready{rank}").touch()
    try:
        while True:
            rounds.round()
    except Exception as error:
        at = time.monotonic()
        told = {
            "seconds": at - end_of_victim(),
            "class": type(error).__name__,
            "is": [isinstance(error, kind) for kind in (torch_weft.PeerLost, dist.DistBackendError)],
            "text": str(error),
            "ranks": getattr(error, "ranks", None),
        }
    del rounds
    gc.collect()
    dist.destroy_process_group()
    Path(folder, f"told{rank}").write_text(json.dumps(told))


def start(rank, calls, folder, lives, victim):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        lives.keep_only(rank)
        run_rank(rank, calls, folder, lives.watch(victim))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_until(condition, seconds):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def all_ready(pids, folder):
    """Whether all ranks have made their first calls; False as soon as one has ended instead."""

    def settled():
        return ready() or any(
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids
        )

    def ready():
        return all(Path(folder, f"ready{rank}").exists() for rank in range(RANKS))

    return wait_until(settled, STARTED_WITHIN) and ready()


def ended(pids):
    """The exit codes of processes that end in time; those that do not are killed: None."""
    codes = {}

    def all_ended():
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        return len(codes) == len(pids)

    wait_until(all_ended, ENDED_WITHIN)
    for pid in set(pids) - set(codes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def shared_memory_of(pids):
    """Entries of shared memory that name one of these processes, or that one has mapped."""
    names = {path.name for path in SHARED_MEMORY.iterdir() if "weft" in path.name}
    return {name for name in names if any(str(pid) in name for pid in pids)}


def children():
    """The children of this process that have not been waited for."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


class KilledRank(unittest.TestCase):
    def drill(self, seed):
        choose = random.Random(seed)
        # In turns, so that few moments have all kinds of calls too.
        calls = Calls.NAMES[seed % len(Calls.NAMES)]
        victim, moment = choose.randrange(RANKS), choose.uniform(0, 0.15)
        before = {path.name for path in SHARED_MEMORY.iterdir() if "weft" in path.name}
        with tempfile.TemporaryDirectory(prefix="weft-drill-") as folder:
            lives = Lives()
            pids = [start(rank, calls, folder, lives, victim) for rank in range(RANKS)]
            lives.keep_only()
            ready = all_ready(pids, folder)
            time.sleep(moment if ready else 0)
            os.kill(pids[victim], signal.SIGKILL)
            codes = ended(pids)
            lives.close()
            what = f"seed {seed}: {calls}, rank {victim} killed after {moment * 1e3:.0f} ms"
            outputs = "".join(
                f"\nrank {rank}:\n{Path(folder, f'output{rank}').read_text()[-3000:]}"
                for rank in range(RANKS)
            )
            self.assertTrue(ready, what + ": the ranks did not start" + outputs)
            expected = [-signal.SIGKILL if rank == victim else 0 for rank in range(RANKS)]
            self.assertEqual(codes, expected, what + outputs)
            for rank in set(range(RANKS)) - {victim}:
                told = json.loads(Path(folder, f"told{rank}").read_text())
                self.assertEqual(told["is"], [True, True], f"{what}: {told}")
                self.assertEqual(told["ranks"], [victim], f"{what}: {told}")
                self.assertRegex(told["text"], rf"\brank {victim}\b", what)
                self.assertLess(told["seconds"], KNOWN_WITHIN, f"{what}: {told}")
        self.assertEqual(shared_memory_of(pids) - before, set(), what)
        self.assertEqual(children(), [], what)

    def test_others_get_peer_lost_naming_it(self):
        seeds = range(50 if "WEFT_ALL_SETTINGS" in os.environ else 5)
        if "WEFT_DRILL_SEED" in os.environ:
            seeds = [int(os.environ["WEFT_DRILL_SEED"])]
        for seed in seeds:
            with self.subTest(seed=seed):
                self.drill(seed)


if __name__ == "__main__":
    unittest.main(verbosity=2)

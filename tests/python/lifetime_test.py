# SPDX-License-Identifier: Apache-2.0
"""Programs that end, in every way: no rank hangs, nothing stays behind, losses are named at once."""

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

BEGIN = """
import datetime, os, signal, sys, threading, time, torch, torch.distributed as dist
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def join():
    store = dist.FileStore(folder + "/store", size)
    dist.init_process_group("weft", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    dist.all_reduce(torch.zeros(1))
join()
"""

RAISES = """
if rank == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    raise KeyError("mine")
dist.recv(torch.zeros(1), 0)
"""

# A thread that is no daemon keeps rank 0 alive, and itself waits for rank 1.
RAISES_BESIDE_A_THREAD = """
if rank == 0:
    threading.Thread(target=lambda: dist.recv(torch.zeros(1), 1, tag=5)).start()
    raise KeyError("mine")
dist.recv(torch.zeros(1), 0)
"""

AGAIN = """
for i in range(5):
    dist.destroy_process_group()
    folder += "/again"
    os.makedirs(folder, exist_ok=True)
    join()
"""

OTHER_RELEASE = """
import torch, torch.distributed as dist, torch_weft._build as build
build.TORCH = "2.1.0"
print("imported")
dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
"""

IMPORTS = """
import torch, torch.distributed as dist
maps = open("/proc/self/maps").read()
print("weft" in dist.Backend.backend_list, "libweft" in maps, torch.cuda.is_initialized())
import torch_weft
print(torch_weft.PeerLost.__mro__[1].__name__, torch_weft.version)
"""

PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("weft")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""

# Rank 2 is killed. A forked child holds its descriptors.
KILLED = """
import json, torch_weft
if rank == 2:
    if os.fork() == 0:
        time.sleep(8)
        os._exit(0)
    dist.barrier()
    time.sleep(0.3)
    open(folder + "/killed", "w").write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
told = []
dist.barrier()
for call in [lambda: dist.all_reduce(torch.zeros(1)), lambda: dist.barrier()]:
    try:
        call()
    except torch_weft.PeerLost as error:
        late = time.time() - float(open(folder + "/killed").read())
        told.append([str(error), error.ranks, error.operation, late, isinstance(error, dist.DistNetworkError)])
smaller = dist.shrink_group([2]) if int(torch.__version__.split(".")[1]) >= 15 else None
if smaller:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    told.append(tensor.item())
print(json.dumps(told))
"""


# Joins only.
LATE = """
import datetime, sys, torch.distributed as dist
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("weft", store=store, rank=int(sys.argv[1]), world_size=2, timeout=datetime.timedelta(minutes=5))
"""


def run(program, size=2, seconds=60, environment=None):
    """Returns each rank's exit status, what it printed, what it said, and the files it left."""
    with tempfile.TemporaryDirectory() as folder:
        before = set(os.listdir("/dev/shm"))
        environment = {**os.environ, **(environment or {})}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", BEGIN + program, str(rank), str(size), folder],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder,
            )
            for rank in range(size)
        ]
        results = []
        try:
            for process in ranks:
                out, said = process.communicate(timeout=seconds)
                results.append((process.returncode, out, said))
        finally:
            for process in ranks:
                process.kill()
        left = {name for name in set(os.listdir("/dev/shm")) - before if "weft" in name}
        return results, left


class Lifetime(unittest.TestCase):
    def test_ends_without_destroy(self):
        results, left = run("work = dist.all_reduce(torch.ones(1), async_op=True)\n")
        self.assertEqual([(status, "rror" in said) for status, _, said in results], [(0, False)] * 2, results)
        self.assertEqual(left, set())

    def test_an_exception_ends_the_others_at_once(self):
        begin = time.monotonic()
        (mine, theirs), left = run(RAISES)
        self.assertEqual(mine[0], 1)
        self.assertIn("KeyError", mine[2])
        self.assertEqual(theirs[0], 1)
        self.assertIn("torch_weft.errors.PeerLost: recv", theirs[2])
        self.assertLess(time.monotonic() - begin, 40)
        self.assertEqual(left, set())

    def test_an_exception_beside_a_thread_ends_the_others_too(self):
        (mine, theirs), _ = run(RAISES_BESIDE_A_THREAD)
        self.assertEqual((mine[0], theirs[0]), (1, 1))
        self.assertIn("KeyError", mine[2])
        self.assertIn("PeerLost: recv", theirs[2])
        self.assertIn("rank 0 left the group by an exception", theirs[2])

    def test_a_killed_rank_is_known_in_a_second(self):
        results, _ = run(KILLED, size=3)
        self.assertEqual(results[2][0], -9)
        for status, out, said in results[:2]:
            self.assertEqual(status, 0, said)
            told = json.loads(out)
            total = told.pop() if len(told) > 2 else 2.0  # older ones shrink groups of GPUs only
            for text, ranks, operation, late, is_network_error in told:
                self.assertEqual(ranks, [2])
                self.assertIn(operation, text)
                self.assertIn("rank 2", text)
                self.assertLess(late, 1 if os.getloadavg()[0] < 2 * os.cpu_count() else 5)
                self.assertTrue(is_network_error)
            self.assertEqual([one[2] for one in told], ["all_reduce", "barrier"])
            self.assertEqual(total, 2.0)

    def test_a_rank_killed_before_rank_0_arrives_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            early = subprocess.Popen([sys.executable, "-c", LATE, "1", str(store)])
            while not store.exists() or b"weft/member/1" not in store.read_bytes():
                time.sleep(0.01)
            early.kill()
            early.wait()
            ended = subprocess.run([sys.executable, "-c", LATE, "0", str(store)], capture_output=True, text=True, timeout=120)
            self.assertIn("PeerLost: init_process_group: ", ended.stderr)
        # The watch over members or the first connection finds it first.
        self.assertRegex(ended.stderr, "rank 1 is lost: its process ended|connection with rank 1 has ended")

    def test_is_made_again_and_again(self):
        results, _ = run(AGAIN)
        self.assertEqual([status for status, _, _ in results], [0, 0], results)

    def test_another_release_is_refused_with_a_sentence(self):
        ended = subprocess.run([sys.executable, "-c", OTHER_RELEASE], capture_output=True, text=True, timeout=60)
        self.assertEqual(ended.stdout, "imported\n")
        self.assertIn("was built for torch 2.1, and torch", ended.stderr)

    def test_import_loads_no_library(self):
        ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60)
        self.assertEqual(ended.stdout.splitlines()[0], "True False False", ended.stderr)
        self.assertTrue(ended.stdout.splitlines()[1].startswith("Error 0."), ended)

    def test_registers_where_torch_calls_no_entry_points(self):
        program = "import torch, torch_weft; torch_weft.register(); print(torch.distributed.is_backend_available('weft'))"
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
        self.assertEqual(ended.stdout, "True\n", ended.stderr)

    def test_a_job_of_torchrun_writes_one_timeline(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "program.py"
            program.write_text(PLAIN)
            timeline = Path(folder) / "timeline.json"
            environment = {**os.environ, "WEFT_TIMELINE": str(timeline), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            text = timeline.read_text()
            self.assertIn("all_reduce", text)
            json.loads(text)


if __name__ == "__main__":
    unittest.main()

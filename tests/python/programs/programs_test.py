# SPDX-License-Identifier: Apache-2.0
"""Ordinary programs of torch.distributed end with the same bits on "weft" as on "gloo"."""

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401  ranks are forked, with these modules loaded

HERE = Path(__file__).resolve().parent
BACKENDS = os.environ.get("WEFT_PROGRAMS_BACKENDS", "gloo,weft").split(",")
RANKS, LIMIT = 2, 60  # seconds for one program on one backend


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_rank(program, arguments, rank, port):
    """Runs a program as torchrun starts it, in a fork of this process; returns its exit code."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    sys.argv = [str(program), *map(str, arguments)]
    code = 1
    try:
        runpy.run_path(str(program), run_name="__main__")
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def end(ranks):
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_forked(program, backend, folder):
    """The exit codes of a program's ranks; None for one that did not end."""
    port, waiting, codes = free_port(), {}, {}
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            os._exit(run_rank(program, [backend, folder], rank, port))
        waiting[pid] = rank
    until = time.monotonic() + LIMIT
    while waiting and time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in waiting:
            codes[waiting.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    codes.update(dict.fromkeys(waiting.values()))
    end(waiting)
    return [codes[rank] for rank in range(RANKS)]


def run_torchrun(program, backend, folder):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
        "--max-restarts", "1", "--monitor-interval", "0.1", "--standalone",
        program, backend, folder,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        # Else its second life meets the keys of the first in torchrun's store, and does not connect.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        command, env=environment, timeout=3 * LIMIT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def bits(value):
    return value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()


class SameBitsAsOnGloo(unittest.TestCase):
    def compare(self, folders):
        results = {
            backend: [torch.load(folders[backend] / f"{rank}.pt") for rank in range(RANKS)]
            for backend in BACKENDS
        }
        expected, found = (results[backend] for backend in BACKENDS)
        for rank in range(RANKS):
            self.assertEqual(list(expected[rank]), list(found[rank]))
            for name, value in expected[rank].items():
                self.assertEqual(bits(value), bits(found[rank][name]), f"{name} of rank {rank}")
        return expected

    def folders(self):
        whole = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="weft-programs-")))
        made = {backend: whole / f"{place}" for place, backend in enumerate(BACKENDS)}
        for folder in made.values():
            folder.mkdir()
        return made

    def same(self, name):
        folders = self.folders()
        for backend, folder in folders.items():
            self.assertEqual(
                run_forked(HERE / f"{name}.py", backend, folder), [0] * RANKS, f"{name} on {backend}"
            )
        self.compare(folders)

    def test_ddp(self):
        self.same("ddp")

    def test_fully_shard(self):
        self.same("sharded")

    def test_tensor_parallel(self):
        self.same("tensor_parallel")

    def test_checkpoints(self):
        self.same("checkpoints")

    def test_pipeline(self):
        self.same("pipeline")

    def test_zero(self):
        self.same("zero")

    def test_torchrun_with_a_restart(self):
        folders = self.folders()
        for backend, folder in folders.items():
            code, output = run_torchrun(HERE / "restarts.py", backend, folder)
            self.assertEqual(code, 0, f"on {backend}:\n{output[-4000:]}")
        for ended in self.compare(folders):
            self.assertEqual((ended["life"].item(), ended["begin"].item()), (1, 3))


if __name__ == "__main__":
    unittest.main(verbosity=2)

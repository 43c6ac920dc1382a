#!/usr/bin/env python3
"""overlap.py against tables as nsys exports them, made by hand.

usage: overlap_test.py OVERLAP_PY
"""

import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

overlap = sys.argv[1]


def run(path):
    return subprocess.run([sys.executable, overlap, str(path)], capture_output=True, text=True)


for option, code in (("--help", 0), ("--bogus", 2)):
    result = run(option)
    if result.returncode != code or "usage: overlap.py" not in result.stdout + result.stderr:
        sys.exit(f"{option}: exit {result.returncode}\n{result.stdout}{result.stderr}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "run.sqlite"
    if "there is no" not in run(path).stderr:
        sys.exit("a file that is missing is not named")
    garbage = Path(folder) / "garbage.sqlite"
    garbage.write_text("no database" * 100)
    if "garbage.sqlite is no export of nsys" not in run(garbage).stderr:
        sys.exit("a file of another kind is not named")
    process = 77 << 24
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (globalPid INTEGER, deviceId INTEGER, start INTEGER, end INTEGER, demangledName INTEGER)")
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (globalPid INTEGER, deviceId INTEGER, start INTEGER, end INTEGER, copyKind INTEGER)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "gemm"), (2, "ncclDevKernel_AllReduce")])
        # Compute 0 to 10 ms and 20 to 30 ms; communication 5 to 25 ms, in two kernels that overlap, and a copy between devices.
        ms = 1_000_000
        rows = [(0, 10, 1), (20, 30, 1), (5, 15, 2), (12, 25, 2)]
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, 0, ?, ?, ?)", [(process, begin * ms, end * ms, name) for begin, end, name in rows])
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, 0, ?, ?, ?)", [(process, 30 * ms, 34 * ms, 10), (process, 40 * ms, 50 * ms, 1)])
    result = run(path)
    fields = result.stdout.splitlines()[-1].split()
    expected = ["77", "0", "20.000", "24.000", "10.000", "14.000", "41.7", "%"]
    if result.returncode != 0 or fields != expected:
        sys.exit(f"expected {expected}, got {fields}\n{result.stderr}")

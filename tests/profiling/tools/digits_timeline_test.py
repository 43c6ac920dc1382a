#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the digits on two processes with WEFT_TIMELINE and checks the timeline: it has arrows between the ranks, and its exposed
communication agrees with the waiting time that the program measures. Then checks the timeline of a job of remote calls.

usage: digits_timeline_test.py FOLDER_OF_PROGRAMS
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

programs = Path(sys.argv[1])
IMAGES = 1438  # in an epoch


def run(*command, **environment):
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100, env={**variables, **environment})
    if result.returncode != 0:
        sys.exit(f"{command[0]}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout, result.stderr


def slices_of(events):
    """{row: (begin, end) of each slice, in microseconds}."""
    rows, open_ = {}, {}
    for event in events:
        row = (event["pid"], event.get("tid"))
        if event["ph"] == "X":
            rows.setdefault(row, []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "B":
            open_.setdefault(row, []).append(event["ts"])
        elif event["ph"] == "E":
            if not open_.get(row):
                sys.exit(f"row {row}: an end without a beginning at {event['ts']}")
            rows.setdefault(row, []).append((open_[row].pop(), event["ts"]))
    if any(open_.values()):
        sys.exit(f"slices that do not end: {open_}")
    return rows


def check_structure(events):
    """Checks what Perfetto and chrome://tracing require: slices of a row nest, and both tips of an arrow lie in a slice."""
    close = 0.002  # times have three decimals
    rows = slices_of(events)
    for row, slices in rows.items():
        ends = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while ends and ends[-1] <= begin + close:
                ends.pop()
            if ends and end > ends[-1] + close:
                sys.exit(f"row {row}: the slice from {begin} to {end} begins in one that ends at {ends[-1]}")
            ends.append(end)
    arrows = [event for event in events if event["ph"] in "sf"]
    for event in arrows:
        slices = rows.get((event["pid"], event["tid"]), [])
        if not any(begin - close <= event["ts"] <= end + close for begin, end in slices):
            sys.exit(f"an arrow's tip lies in no slice: {event}")
    for one in {event["id"] for event in arrows}:
        tips = [event for event in arrows if event["id"] == one]
        if sorted(event["ph"] for event in tips) != ["f", "s"]:
            sys.exit(f"an arrow without both ends: {tips}")
    print(f"{sum(map(len, rows.values()))} slices in {len(rows)} rows, {len(arrows) // 2} arrows")


def check_status(text):
    """Checks that the last line of weft-run --status counts both ranks."""
    for rank in 0, 1:
        found = re.search(rf"rank {rank}: step (\d+), ([\d.]+) steps/s, ([\d.]+) operations/s, ([\d.]+) MB/s", text.splitlines()[-1])
        if not found or min(float(number) for number in found.groups()) <= 0:
            sys.exit(f"weft-run --status has not counted rank {rank}:\n{text}")


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "run.json"
    printed, status = run(programs / "weft-run", "--nproc-per-node", "2", "--no-prefix", "--status", programs / "digits", "--epochs", "1",
                  "--checkpoint", f"{folder}/digits.pt", WEFT_TIMELINE=str(file))
    share = float(re.search(r"waiting for others\s+([\d.]+) %", printed).group(1)) / 100
    seconds = IMAGES / float(re.search(r"throughput\s+(\d+) samples/s", printed).group(1))
    if (Path(folder) / "run.json.parts").exists():
        sys.exit("both ranks have ended in good order, and their parts are still there")
    events = json.loads(file.read_text())["traceEvents"]
    check_structure(events)
    check_status(status)
    starts = {event["id"]: event["pid"] for event in events if event["ph"] == "s"}
    between = [event for event in events if event["ph"] == "f" and {starts[event["id"]], event["pid"]} == {0, 1}]
    if len(between) < 20:
        sys.exit(f"{len(between)} arrows go from one rank to the other")
    summary = json.loads(run(programs / "weft-timeline", "summary", "--json", file)[0])
    steps = [step["ranks"]["0"] for step in summary["steps"]]
    waits = [step["exposed_us"] / 1e6 for step in steps]
    # The last step extends to the end of the program, so part of its waits do not belong to
    # training.
    least, most = sum(waits[:-1]), sum(waits)
    print(f"waited: {least:.3f} to {most:.3f} s in the timeline, {share:.1%} of {seconds:.3f} s by the program's own clock")
    if not least - 0.05 * seconds <= share * seconds <= most + 0.05 * seconds:
        sys.exit("they differ by more than 5 % of the time")
    page = Path(folder) / "report.html"
    run(programs / "weft-timeline", "html", file, "-o", page)
    if "all_reduce" not in page.read_text():
        sys.exit("the page shows no all_reduce")

    # The main thread of each worker only waits: threads that run incoming calls do the computing.
    calls = Path(folder) / "calls.json"
    run(programs / "weft-run", "--nproc-per-node", "3", programs / "parameter_server", WEFT_TIMELINE=str(calls))
    ranks = json.loads(run(programs / "weft-timeline", "summary", "--json", calls)[0])["ranks"]
    print("a parameter server and its trainers compute", ", ".join(f"{times['compute_us'] / 1e3:.3f} ms" for times in ranks.values()), "a step")
    idle = [rank for rank, times in ranks.items() if not 0 < times["compute_us"] < times["total_us"]]
    if len(ranks) != 3 or idle:
        sys.exit(f"rank {', '.join(idle)} of {len(ranks)} computes nothing, or does nothing else: {ranks}")

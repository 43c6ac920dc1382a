#!/usr/bin/env python3
"""Trains the digits on two processes with WEFT_TIMELINE and looks at what came of it: arrows between the ranks, and exposed
communication that agrees with what the program itself says it waited.

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
IMAGES = 1438  # of an epoch


def run(*command, **environment):
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100, env={**variables, **environment})
    if result.returncode != 0:
        sys.exit(f"{command[0]}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "run.json"
    printed = run(programs / "weft-run", "--nproc-per-node", "2", "--no-prefix", programs / "digits", "--epochs", "1",
                  "--checkpoint", f"{folder}/digits.pt", WEFT_TIMELINE=str(file))
    share = float(re.search(r"waiting for others\s+([\d.]+) %", printed).group(1)) / 100
    seconds = IMAGES / float(re.search(r"throughput\s+(\d+) samples/s", printed).group(1))
    if (Path(folder) / "run.json.parts").exists():
        sys.exit("both ranks have ended in good order, and their parts are still there")
    events = json.loads(file.read_text())["traceEvents"]
    starts = {event["id"]: event["pid"] for event in events if event["ph"] == "s"}
    between = [event for event in events if event["ph"] == "f" and {starts[event["id"]], event["pid"]} == {0, 1}]
    if len(between) < 20:
        sys.exit(f"{len(between)} arrows go from one rank to the other")
    summary = json.loads(run(programs / "weft-timeline", "summary", "--json", file))
    steps = [step["ranks"]["0"] for step in summary["steps"]]
    waits = [step["exposed_us"] / 1e6 for step in steps]
    # The last step reaches to the end of the program: part of its waits are not those of training.
    least, most = sum(waits[:-1]), sum(waits)
    print(f"waited: {least:.3f} to {most:.3f} s in the timeline, {share:.1%} of {seconds:.3f} s by the program's own clock")
    if not least - 0.05 * seconds <= share * seconds <= most + 0.05 * seconds:
        sys.exit("they differ by more than 5 % of the time")
    page = Path(folder) / "report.html"
    run(programs / "weft-timeline", "html", file, "-o", page)
    if "all_reduce" not in page.read_text():
        sys.exit("the page shows no all_reduce")

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""For wrong command lines and files, weft-debug and weft-timeline say what is wrong and exit with 2. --version prints VERSION.

usage: command_line_test.py FOLDER_OF_PROGRAMS VERSION
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

programs = Path(sys.argv[1])
version = sys.argv[2]
failures = []


def check(said, *command, code=2, stdout=subprocess.PIPE, without=()):
    result = subprocess.run([str(programs / command[0]), *map(str, command[1:])], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    text = (result.stdout or "") + result.stderr
    wrong = [] if result.returncode == code else [f"exit {result.returncode}, not {code}"]
    wrong += [f"does not say: {part}" for part in said if part not in text]
    wrong += [f"says: {part}" for part in ("json.exception", *without) if part in text]
    if wrong:
        failures.append(f"{' '.join(map(str, command))}: {'; '.join(wrong)}\n{text}")


def event(phase, name, begin, **more):
    return {"ph": phase, "name": name, "cat": "engine", "pid": 0, "tid": 1, "ts": begin, **more}


RANK = {"rank": 0, "machine": "here", "pid": 1, "clock_error_ns": 0, "events_lost": 0, "ended_in_order": True}
SPAN = event("X", "all_reduce", 100, dur=900, args={"rank": 0, "group": "default", "state": "done", "sequence": 1, "bytes": 4})
RUN = {"displayTimeUnit": "ms", "traceEvents": [SPAN], "otherData": {"weft": "timeline 1", "job_ranks": 1, "ranks": [RANK]}}

with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "run.json"
    page = Path(folder) / "page.html"
    whole = json.dumps(RUN)

    for program in ("weft-timeline", "weft-debug"):
        check(["Exit code", "--version"], program, "--help", code=0)
        check([f"{program} {version}\n"], program, "--version", code=0)
        check(["'foo'", "analyze" if program == "weft-debug" else "summary, html, merge"], program, "foo")
        check(["'foo'"], program, "foo", "run.json")
        check(["--bogus"], program, "--bogus")
        check(["subcommand"], program)
    check(["dumps"], "weft-debug", "analyze")
    check(["--older-than is 'soon'"], "weft-debug", "analyze", "--older-than", "soon", run)
    check(["file"], "weft-timeline", "summary")
    check(["run.json' cannot be read"], "weft-timeline", "summary", run)

    run.write_text(whole)
    check(["1 rank, 0 collectives", "no steps are marked", "run ms"], "weft-timeline", "summary", run, code=0, without=["step ms", "1 steps"])
    check(["page.html"], "weft-timeline", "html", run, "-o", page, "--from", "0.2", "--to", "0.5", code=0)
    page.unlink()
    check(["--from is -5"], "weft-timeline", "html", run, "-o", page, "--from", "-5", "--to", "-1")
    check(["--from is nan"], "weft-timeline", "html", run, "-o", page, "--from", "nan")
    check(["--to is inf"], "weft-timeline", "html", run, "-o", page, "--to", "inf")
    check(["--from is 7", "ended after 1"], "weft-timeline", "html", run, "-o", page, "--from", "7")
    check(["no time between"], "weft-timeline", "html", run, "-o", page, "--from", "0.5", "--to", "0.2")
    check(["--steps", "-1"], "weft-timeline", "summary", run, "--steps", "-1", without=["00000"])
    check(["would take the place of the timeline", "-o names another file"], "weft-timeline", "html", run, "-o", run)
    if run.read_text() != whole:
        failures.append("a timeline was overwritten by its page")
    run.write_text(json.dumps({**RUN, "traceEvents": []}))
    check(["the run is empty"], "weft-timeline", "html", run, "-o", page)
    run.write_text(whole)
    if page.exists():
        failures.append("a page was written for invalid times")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            check(["output cannot be written"], "weft-timeline", "summary", run, stdout=full)

    run.write_text(whole[: len(whole) // 2])
    check(["run.json' ends in the middle"], "weft-timeline", "summary", run)
    run.write_text(json.dumps({**RUN, "otherData": {"weft": 7}}))
    check(["run.json' is not a timeline of Weft"], "weft-timeline", "summary", run)
    run.write_text(whole.replace('"name": "all_reduce"', '"name": 3'))
    check(["run.json' is damaged: its field 'name' is not a text"], "weft-timeline", "summary", run)
    run.write_text(whole.replace("timeline 1", "timeline 2"))
    check(["run.json' is of another version of Weft: it is a 'timeline 2'"], "weft-timeline", "summary", run)
    run.write_text('{"weft":"flight recorder 2","pid":1}')
    check(["run.json' is of another version of Weft: it is a 'flight recorder 2'"], "weft-debug", "analyze", run)
    run.write_text('{"weft":"flight recorder 1","pid":1}')
    check(["run.json' is damaged: its field 'host' is missing"], "weft-debug", "analyze", run)
    run.write_text('{"weft":"flight recorder 1","pid":')
    check(["run.json' ends in the middle"], "weft-debug", "analyze", run)
    run.write_text('{"weft":1}')
    check(["run.json' is not a dump"], "weft-debug", "analyze", run)

    dumps = Path(folder) / "dumps"
    dumps.mkdir()
    check(["dumps' has no dumps", "attempt_N"], "weft-debug", "analyze", dumps)
    for process in (1, 2):
        (dumps / f"dump-{process}-abc-1.json").write_text(json.dumps({
            "weft": "flight recorder 1", "host": "h", "pid": process, "time": 0, "wall_clock": 0, "reason": "", "parties": [], "records": []}))
    (dumps / "notes.txt").write_text("of a person")
    check(["2 processes"], "weft-debug", "analyze", dumps, code=0)

sys.exit("\n".join(failures) or 0)

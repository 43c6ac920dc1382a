# SPDX-License-Identifier: Apache-2.0
"""Runs the tests and benches of ./dev gpu within a time limit."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from .checkout import BUILD
from .console import Stop, say

SANITIZED = "cuda_kernels_gpu_test"  # small, but launches every kernel
SANITIZER_RUN = f"{SANITIZED} under compute-sanitizer"
GPU_SECONDS = 8 * 60
LEAST_GPU_SECONDS = 20  # reserved for each later program
MOST_GPU_SECONDS = 120  # the most for a program that is not the last
SLOWEST = "communicator_gpu_test"  # runs last, in the time that is left

# Each case is a process of its own: if one fails, the figures of the others are kept.
GPU_BENCHES = [
    ("gpu_bench", "stream to stream"),
    ("gpu_bench", "nccl all_reduce"),
    ("gpu_bench", "training step"),
    ("gpu_bench", "exposed communication"),
    ("gpu_bench", "rpc tensor argument"),
    ("transport_bench", "cuda_ipc"),
    ("kernels_bench", "gpu"),
    ("optim_bench", "gpu step"),
    ("fsdp_bench", "gpu blocks"),
]
GPU_BENCH_OPTIONS = {"cuda_ipc": ["--runs", "2"]}  # a run takes 20 s
GPU_PROGRAMS = [*dict.fromkeys(name for name, _ in GPU_BENCHES), "fsdp_gpu_worker", "weft-timeline"]


class GpuTime:
    """Divides the time among programs, so that one that hangs leaves time for the others."""

    def __init__(self, programs, seconds=GPU_SECONDS):
        self.programs = programs
        self.deadline = time.monotonic() + seconds

    def share(self):
        """Seconds for the next program; 0 if the time is over."""
        left = max(0, self.deadline - time.monotonic())
        self.programs -= 1
        if self.programs == 0:
            return left
        spare = left - LEAST_GPU_SECONDS * self.programs
        return min(left, max(LEAST_GPU_SECONDS, min(spare, MOST_GPU_SECONDS)))


def run_gpu_program(path, arguments, environment, seconds):
    """(exit code, output) of a program; the code is None if it did not run or end in time."""
    if seconds <= 0:
        return None, "not run: the time for all programs was over"
    try:  # the program has a session of its own, so that its ranks can be ended with it
        process = subprocess.Popen(
            [str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return 127, f"cannot be started: {error}"
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        end_session(process)
    except BaseException:  # ./dev is interrupted
        end_session(process)
        raise
    try:
        output, _ = process.communicate(timeout=10)
    except subprocess.TimeoutExpired as late:  # a child left the session and keeps the pipe open
        output = (late.stdout or b"").decode(errors="replace")
    return None, f"ended after {seconds:.0f} s, its share of the time\n{output}"


def end_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_figures(path, arguments, environment, seconds, launcher=()):
    """Runs a test program; counts passed tests, also by setting; lists failed and skipped ones."""
    report = BUILD / "gpu-tests.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    first, *rest = [*launcher, path, f"--gtest_output=xml:{report}", *arguments]
    code, output = run_gpu_program(first, [str(part) for part in rest], environment, seconds)
    figures = {
        "program": Path(path).name,
        "exit_code": code,
        "passed": 0,
        "passed_by_setting": {},
        "failed": [],
        "skipped": {},
    }
    if report.exists():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            skipped = case.find("skipped")
            if case.find("failure") is not None:
                figures["failed"].append(name)
            elif skipped is not None or case.get("result") == "skipped":
                figures["skipped"][name] = (
                    skipped.get("message") if skipped is not None else None
                ) or "no reason given"
            else:
                count_passed(figures, name)
    else:  # it was ended before it wrote its report: read its output
        for result, name in re.findall(
            r"(?m)^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+).*\(\d+ ms\)$", output
        ):
            if result == "OK":
                count_passed(figures, name)
            elif result == "FAILED":
                figures["failed"].append(name)
            else:
                figures["skipped"][name] = "no reason given"
    if code != 0:
        first, _, rest = output.partition("\n")
        figures["output"] = f"{first}\n{rest[-4000:]}" if code is None else output[-4000:]
    return figures


def count_passed(figures, test):
    figures["passed"] += 1
    if setting := setting_of(test):
        figures["passed_by_setting"][setting] = figures["passed_by_setting"].get(setting, 0) + 1


def setting_of(test):
    """The setting of a conformance test: "NcclProcesses" of "Gpu/Claims.OfSums/NcclProcesses"."""
    name = test.split(".", 1)[-1]
    return name.split("/", 1)[1] if "/" in name else None


def rows_of(file):
    """The rows that a bench wrote with --json FILE: one object a line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


class GpuRun:
    """One run of ./dev gpu: runs its programs and collects their results."""

    def __init__(self, environment, time_left):
        self.environment = environment
        self.time_left = time_left
        self.result = {
            "tests": [],
            "sanitizer": None,
            "rows": [],
            "not_run": {},
            "failed_benches": {},
        }

    def tested(self, what, path, launcher=()):
        say(what)
        figures = test_figures(path, [], self.environment, self.time_left.share(), launcher)
        if figures["exit_code"] is None:
            self.result["not_run"][what] = figures["output"].splitlines()[0]
        return figures

    def test(self, path):
        self.result["tests"].append(self.tested(path.name, path))

    def sanitize(self, checker, path):
        if checker is None:
            self.result["not_run"][SANITIZER_RUN] = (
                "no compute-sanitizer on PATH, among the Python packages "
                "(nvidia-cuda-sanitizer-api), in CUDA_HOME or /usr/local/cuda"
            )
        elif path is None:
            self.result["not_run"][SANITIZER_RUN] = "it is not among the tests"
        else:
            # Weft probes the driver, so an error that the driver returns is no finding; the tests
            # fail on errors that Weft does not expect.
            checked = [checker, "--error-exitcode", "9", "--tool", "memcheck"]
            checked += ["--report-api-errors", "no"]
            self.result["sanitizer"] = self.tested(SANITIZER_RUN, path, checked)

    def bench(self, what, path, case):
        say(what)
        rows = BUILD / "gpu-rows.json"
        rows.parent.mkdir(exist_ok=True)
        rows.unlink(missing_ok=True)
        arguments = ["--case", case, *GPU_BENCH_OPTIONS.get(case, []), "--json", str(rows)]
        code, output = run_gpu_program(path, arguments, self.environment, self.time_left.share())
        if code is None:
            self.result["not_run"][what] = output.splitlines()[0]
            return  # a bench writes its rows when it ends
        figures = rows_of(rows) if rows.exists() else []
        self.result["rows"] += figures
        if code != 0:
            self.result["failed_benches"][what] = f"ended with {code}: {output[-1000:]}"
        elif not figures:
            self.result["failed_benches"][what] = f"gave no figure: {output[-1000:]}"


def gpu_results(tests, programs, checker, environment, seconds, only=None):
    """Runs the tests, one of them again under compute-sanitizer, and the benches.

    The result also names what was not run or did not end, with the reason.
    """
    begun = time.monotonic()
    benches = {f"{name} --case '{case}'": (name, case) for name, case in GPU_BENCHES}
    all_names = [*(path.name for path in tests), SANITIZER_RUN, *benches]
    names = [name for name in all_names if only is None or only in name]
    if not names:
        raise Stop(
            f"no program of ./dev gpu has '{only}' in its name; it runs {', '.join(all_names)}"
        )
    sanitized = next((path for path in tests if path.name == SANITIZED), None)
    checks = checker is not None and sanitized is not None
    gpu_run = GpuRun(
        environment, GpuTime(len(names) - (SANITIZER_RUN in names and not checks), seconds)
    )
    if only is not None:
        gpu_run.result["only"] = only
    tests = [path for path in tests if path.name in names]
    # One at a time: the driver creates contexts one after the other, so several take longer.
    for path in tests:
        if path.name != SLOWEST:
            gpu_run.test(path)
    if SANITIZER_RUN in names:
        gpu_run.sanitize(checker, sanitized)
    for what, (name, case) in benches.items():
        if what in names:
            gpu_run.bench(what, programs / name, case)
    for path in tests:
        if path.name == SLOWEST:
            gpu_run.test(path)
    for what, why in gpu_run.result["failed_benches"].items():
        say(f"{what} {why}")
    gpu_run.result["seconds"] = round(time.monotonic() - begun)
    return gpu_run.result


def failures_of(result):
    """Names everything that failed or showed nothing; a missing compute-sanitizer is no failure."""
    ran = [*result["tests"], *filter(None, [result["sanitizer"]])]
    failed = [*result["failed_benches"], *(test for one in ran for test in one["failed"])]
    failed += [one["program"] for one in result["tests"] if one["exit_code"] != 0]
    failed += [
        f"{one['program']}, which skipped all its tests: {next(iter(one['skipped'].values()))}"
        for one in result["tests"]
        if one["skipped"] and not one["passed"] and not one["failed"]
    ]
    if result["sanitizer"] and result["sanitizer"]["exit_code"] != 0:
        failed.append(SANITIZER_RUN)
    return failed + [what for what in result["not_run"] if "--case" in what]

# SPDX-License-Identifier: Apache-2.0
"""The tables of GPUs in docs/benchmarks.md, made from the results of ./dev gpu."""

import json
import shlex

from .checkout import ROOT
from .gpu_run import SANITIZER_RUN, setting_of


def largest_row(rows, case, metric, peer):
    """The row with the most bytes among those whose case begins with `case`; None if none does."""
    found = [
        row
        for row in rows
        if row["case"].startswith(case) and row["metric"] == metric and row["peer"] == peer
    ]
    return max(found, key=lambda row: row["bytes"], default=None)


# Each of these makes a function that reads one figure from the rows of a result. The function
# returns None if the figure was not measured.


def value(case, metric, peer):
    def read(rows):
        row = largest_row(rows, case, metric, peer)
        return row and f"{row['p50']:.4g} {row['unit']}"

    return read


def of_two(case, metric, peer, other, text):
    def read(rows):
        row, against = largest_row(rows, case, metric, peer), largest_row(rows, case, metric, other)
        return row and against and text(row["p50"], against["p50"], row["unit"])

    return read


def ratio(case, metric, peer, other):
    return of_two(
        case,
        metric,
        peer,
        other,
        lambda one, two, unit: f"{one / two:.2g} ({one:.4g} against {two:.4g} {unit})",
    )


def difference(case, metric, peer, other):
    return of_two(
        case,
        metric,
        peer,
        other,
        lambda one, two, unit: f"{one - two:.2g} {unit} ({one:.4g} over {two:.4g})",
    )


def share_of_copy(case):
    def read(rows):
        best = largest_row(rows, case, "bandwidth", "weft")
        copy = best and largest_row(rows, best["case"], "bandwidth", "device copy")
        return (
            copy
            and f"{100 * best['p50'] / copy['p50']:.0f} % ({best['p50']:.0f} {best['unit']})"
        )

    return read


# These read it from the tests of a result.


def of_setting(setting):
    """Counts the conformance tests of a setting that passed, failed and were skipped."""

    def read(result):
        tests = result["tests"]
        passed = sum(one.get("passed_by_setting", {}).get(setting, 0) for one in tests)
        failed, skipped = (
            [name for one in tests for name in one[kind] if setting_of(name) == setting]
            for kind in ("failed", "skipped")
        )
        if not passed and not failed:
            return None
        counts = [f"{passed} passed", f"{len(failed)} failed"]
        if skipped:
            counts.append(f"{len(skipped)} skipped")
        if any(
            one.get("exit_code", 0) is None
            for one in tests
            if setting in one.get("passed_by_setting", {})
        ):
            counts.append("not all were run")
        return ", ".join(counts)

    return read


def sanitizer_said(result):
    figures = result.get("sanitizer")
    if not figures or figures["exit_code"] is None:
        return None
    errors = (
        "no error" if figures["exit_code"] == 0 else f"errors (exit code {figures['exit_code']})"
    )
    return f"{figures['passed']} passed, {len(figures['failed'])} failed, {errors}"


# The figures to show for a GPU: (name, aim, function that reads it from the rows).
GPU_FIGURES = [
    ("bucket pack, share of a copy's bandwidth", "90 %", share_of_copy("gpu pack")),
    ("bucket unpack, share of a copy's bandwidth", "90 %", share_of_copy("gpu unpack")),
    ("reduce, share of a copy's bandwidth", "90 %", share_of_copy("gpu reduce")),
    ("`FusedAdamW::step()`, share of a copy's bandwidth", "90 %",
     share_of_copy("gpu step: adamw")),
    ("`FusedAdamW::step()`, times libtorch's speed", "–",
     ratio("gpu step: adamw", "bandwidth", "weft", "libtorch")),
    ("`FusedSGD::step()` with momentum, share of a copy's bandwidth", "90 %",
     share_of_copy("gpu step: sgd momentum")),
    ("`FusedSGD::step()` with momentum, times libtorch's speed", "–",
     ratio("gpu step: sgd momentum", "bandwidth", "weft", "libtorch")),
    ("NCCL with one rank, a communicator's call over raw NCCL", "2 µs",
     difference("nccl all_reduce", "time", "weft communicator", "NCCL")),
    ("NCCL with one rank, `ProcessGroup`'s call over raw NCCL", "–",
     difference("nccl all_reduce", "time", "weft ProcessGroup", "NCCL")),
    ("stream to stream, stream memory operations", "6 µs",
     value("stream to stream", "time", "weft")),
    ("stream to stream, times faster than host callbacks", "3",
     ratio("stream to stream", "time", "host function", "weft")),
    ("CUDA IPC, 1 MiB, bandwidth over a copy's", "–",
     ratio("cuda_ipc stream 1048576", "bandwidth", "weft", "floor: device copy")),
    ("CUDA IPC, 256 MiB, bandwidth over a copy's", "–",
     ratio("cuda_ipc stream 268435456", "bandwidth", "weft", "floor: device copy")),
    ("RPC with a CUDA tensor of 64 B", "20 µs", value("rpc tensor argument 64", "time", "weft")),
    ("RPC with a CUDA tensor of 1 MiB", "60 µs",
     value("rpc tensor argument 1048576", "time", "weft")),
    ("RPC with a CUDA tensor of 256 MiB, a copy's time over the call's", "0.85",
     ratio("rpc tensor argument 268435456", "time", "device copy", "weft")),
    ("RPC with a CUDA tensor of 1 MiB, times faster than torch.distributed.rpc", "–",
     ratio("rpc tensor argument 1048576", "time", "torch.distributed.rpc", "weft")),
    ("RPC with a CUDA tensor of 256 MiB, times faster than torch.distributed.rpc", "–",
     ratio("rpc tensor argument 268435456", "time", "torch.distributed.rpc", "weft")),
    ("DDP, exposed communication of two ranks on one GPU", "–",
     value("exposed communication", "share of the step", "weft-timeline summary")),
    ("captured training step, host time over eager", "0.5",
     ratio("training step", "host time", "captured", "eager")),
    ("sharded step over NCCL with one rank, time over the plain module's", "1.02",
     ratio("gpu blocks step", "time", "weft nccl", "plain")),
    ("the same, both captured", "1.02",
     ratio("gpu blocks step", "time", "weft nccl captured", "plain captured")),
]

# The same for a result's tests.
GPU_CHECKS = [
    ("two ranks on one GPU: tests of NCCL in two processes", "all pass",
     of_setting("NcclProcesses")),
    ("two ranks on one GPU: tests through pinned memory, two threads", "all pass",
     of_setting("GlooOnGpu")),
    (SANITIZER_RUN, "no error", sanitizer_said),
]


def with_part(whole, part):
    """The result `whole` in which those of a later run with --only replace the earlier ones."""
    programs = [one["program"] for one in part["tests"]]
    cases = {(row["bench"], row["case"]) for row in part["rows"]}
    merged = {
        **whole,
        "tests": [one for one in whole["tests"] if one["program"] not in programs] + part["tests"],
        "rows": [row for row in whole["rows"] if (row["bench"], row["case"]) not in cases]
        + part["rows"],
        "not_run": {
            **{what: why for what, why in whole["not_run"].items() if part["only"] not in what},
            **part["not_run"],
        },
        "parts": [*whole.get("parts", []), part],
    }
    if part["sanitizer"]:
        merged["sanitizer"] = part["sanitizer"]
    return merged


def newest_gpu_results():
    """{GPU: its newest complete result, updated by later runs with --only}."""
    newest = {}
    results = [
        json.loads(file.read_text()) for file in (ROOT / "profiling" / "results").glob("gpu-*.json")
    ]
    for result in sorted(results, key=lambda result: result["date"]):
        name = result["devices"][0]["name"]
        newest[name] = (
            with_part(newest[name], result) if "only" in result and name in newest else result
        )
    return newest


def summary_of(result):
    """The lines in front of a GPU's table: the device, its counts, and later runs with --only."""
    device = result["devices"][0]
    passed = sum(one["passed"] for one in result["tests"])
    failed = sum(len(one["failed"]) for one in result["tests"])
    seconds = f", in {result['seconds']} s with the benches" if "seconds" in result else ""
    lines = [
        f"{device['name']}, driver {device['driver_version']}, "
        f"SM clock at most {device['clocks.max.sm']}, "
        f"{result['date'][:10]}, commit {result['commit']}; "
        f"{passed} tests passed, {failed} failed{seconds}.",
        "",
    ]
    for part in result.get("parts", []):
        programs = [one["program"] for one in part["tests"]]
        cases = sorted({row["case"] for row in part["rows"]})
        lines += [
            f"Of these, by `./dev gpu --only {shlex.quote(part['only'])}` on {part['date'][:10]}, "
            f"commit {part['commit']}: {', '.join(programs + cases)}.",
            "",
        ]
    return lines


def gpu_table(result):
    """The lines of the table of one GPU's result; without a result, every figure is not measured."""
    rows = result["rows"] if result else []
    figures = [(what, aim, read(rows)) for what, aim, read in GPU_FIGURES]
    figures += [(what, aim, result and read(result)) for what, aim, read in GPU_CHECKS]
    lines = ["| | aim | measured |", "|---|---|---|"]
    for what, aim, figure in figures:
        lines.append(f"| {what} | {aim} | {figure or 'not measured'} |")
    return [*lines, ""]


def gpu_tables():
    """A summary and a table of GPU_FIGURES and GPU_CHECKS for each GPU's newest result."""
    results = newest_gpu_results().values()
    if not results:
        no_run = "No run of `./dev gpu` has been committed to `profiling/results/` yet."
        return [no_run, "", *gpu_table(None)[:-1]]
    lines = []
    for result in results:
        lines += [*summary_of(result), *gpu_table(result)]
        not_run = [f"Not run: {what}: {why}." for what, why in result.get("not_run", {}).items()]
        lines += [*not_run, ""] if not_run else []
    return lines[:-1]

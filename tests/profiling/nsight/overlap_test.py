#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests overlap.py with handmade tables in the form of nsys's exports, and nsys.sh and ncu.sh with stand-ins for the tools.

usage: overlap_test.py OVERLAP_PY
"""

import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

OVERLAP = Path(sys.argv.pop()).resolve()
ROOT = OVERLAP.parents[2]
MS = 1_000_000
PROCESS = 77
HOST_TO_DEVICE, DEVICE_TO_HOST, ON_DEVICE, PEER_TO_PEER = 1, 2, 8, 10

TABLES = {
    "StringIds": "id INTEGER, value TEXT",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER, domainId INTEGER, text TEXT, textId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, "
                                  "demangledName INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, "
                                  "copyKind INTEGER, graphNodeId INTEGER",
    "CUDA_GRAPH_NODE_EVENTS": "start INTEGER, globalTid INTEGER, graphNodeId INTEGER, originalGraphNodeId INTEGER",
}


class Run:
    """The tables of a run. Times are in ms. As with nsys, a table exists only once it has a row."""

    def __init__(self, path):
        self.database = sqlite3.connect(path)
        self.texts = {}
        self.correlation = 0
        self.domains = {}
        self.make("StringIds")

    def make(self, table):
        self.database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({TABLES[table]})")

    def put(self, table, *row):
        self.make(table)
        self.database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def text(self, text):
        if text not in self.texts:
            self.texts[text] = len(self.texts) + 1
            self.put("StringIds", self.texts[text], text)
        return self.texts[text]

    @staticmethod
    def thread(number, process=PROCESS):
        return process << 24 | number

    def range(self, domain, text, begin, end, thread=1, process=PROCESS, registered=True):
        if (process, domain) not in self.domains:
            self.domains[process, domain] = 1 + sum(1 for known, _ in self.domains if known == process)  # each process numbers its domains
            self.put("NVTX_EVENTS", 0, None, 75, self.thread(1, process), self.domains[process, domain], domain, None)
        self.put("NVTX_EVENTS", begin * MS, None if end is None else end * MS, 59, self.thread(thread, process), self.domains[process, domain],
                 None if registered else text, self.text(text) if registered else None)

    def call(self, name, at, thread=1, process=PROCESS):
        """Adds a call of CUDA; returns its correlation."""
        self.correlation += 1
        self.put("CUPTI_ACTIVITY_KIND_RUNTIME", int(at * MS), int(at * MS) + 1000, self.thread(thread, process), self.correlation, self.text(name))
        return self.correlation

    def kernel(self, name, begin, end, correlation=0, process=PROCESS, device=0, node=None):
        self.put("CUPTI_ACTIVITY_KIND_KERNEL", begin * MS, end * MS, device, 7, correlation, process << 24, self.text(name), node)

    def copy(self, kind, begin, end, correlation=0, process=PROCESS, device=0, node=None):
        self.put("CUPTI_ACTIVITY_KIND_MEMCPY", begin * MS, end * MS, device, 7, correlation, process << 24, kind, node)


def overlap_module():
    specification = importlib.util.spec_from_file_location("overlap", OVERLAP)
    module = importlib.util.module_from_spec(specification)
    with mock.patch.object(sys, "dont_write_bytecode", True):
        specification.loader.exec_module(module)
    return module


def overlap(path):
    return subprocess.run([sys.executable, OVERLAP, path], capture_output=True, text=True)


class Overlap(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "run.sqlite"
        self.run_ = Run(self.path)

    def said(self):
        """Runs overlap.py; returns (lines of the table, the line of reasons, stderr)."""
        self.run_.database.commit()
        result = overlap(self.path)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()[1:]
        reasons = lines.pop() if lines[-1].startswith("communication, each") else ""
        return [line.split() for line in lines], reasons, result.stderr

    def communication(self):
        """(ms of communication, the reasons) in a run of one process on one device."""
        (line,), reasons, _ = self.said()
        return float(line[3]), reasons

    def test_help_is_printed_and_unknown_options_are_refused(self):
        for option, code in (("--help", 0), ("--bogus", 2)):
            result = overlap(option)
            self.assertEqual(result.returncode, code)
            self.assertIn("usage: overlap.py", result.stdout + result.stderr)

    def test_names_files_that_are_no_exports(self):
        self.assertIn("there is no", overlap(self.path.with_name("none.sqlite")).stderr)
        garbage = self.path.with_name("garbage.sqlite")
        garbage.write_text("no database" * 100)
        self.assertIn("garbage.sqlite is not an export of nsys", overlap(garbage).stderr)
        sqlite3.connect(self.path.with_name("other.sqlite")).execute("CREATE TABLE other (id INTEGER)")
        self.assertIn("it has no table StringIds", overlap(self.path.with_name("other.sqlite")).stderr)
        self.run_.database.commit()
        self.assertIn("holds no kernel of a GPU", overlap(self.path).stderr)

    def test_names_a_missing_column(self):
        self.run_.database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, demangledName INTEGER)")
        self.run_.database.commit()
        self.assertIn("CUPTI_ACTIVITY_KIND_KERNEL has no column globalPid", overlap(self.path).stderr)

    def test_exposed_is_what_compute_does_not_hide(self):
        # Compute 0 to 10 ms and 20 to 30 ms; communication 5 to 25 ms, in two kernels that overlap, and a copy between devices.
        for begin, end in ((0, 10), (20, 30)):
            self.run_.kernel("gemm", begin, end)
        for begin, end in ((5, 15), (12, 25)):
            self.run_.kernel("ncclDevKernel_AllReduce", begin, end)
        self.run_.copy(PEER_TO_PEER, 30, 34)
        self.run_.copy(HOST_TO_DEVICE, 40, 50)
        lines, reasons, notes = self.said()
        self.assertEqual(lines, [["77", "0", "20.000", "24.000", "10.000", "14.000", "41.7", "%"]])
        self.assertEqual(reasons, "communication, each by itself: NCCL's kernels 23.000 ms, copies between GPUs 4.000 ms")
        self.assertIn("it has no ranges", notes)
        self.assertIn("it has no calls of CUDA", notes)

    def test_processes_and_devices_are_kept_apart(self):
        self.run_.kernel("gemm", 0, 10)
        self.run_.kernel("ncclDevKernel_SendRecv", 0, 4, process=78)
        self.run_.kernel("ncclDevKernel_SendRecv", 0, 6, process=78, device=1)
        lines, _, _ = self.said()
        self.assertEqual([line[:4] for line in lines], [["77", "0", "10.000", "0.000"], ["78", "0", "0.000", "4.000"], ["78", "1", "0.000", "6.000"]])

    def test_copies_by_driver_calls_are_wefts(self):
        for begin, kind in ((0, ON_DEVICE), (2, DEVICE_TO_HOST), (4, HOST_TO_DEVICE)):
            self.run_.copy(kind, begin, begin + 1, self.run_.call("cuMemcpyAsync", begin))
        for begin, kind in ((10, ON_DEVICE), (12, HOST_TO_DEVICE)):  # made by a program through libtorch
            self.run_.copy(kind, begin, begin + 1, self.run_.call("cudaMemcpyAsync_v3020", begin))
        self.assertEqual(self.communication(), (3.0, "communication, each by itself: copies by Weft 3.000 ms"))

    def test_program_copies_inside_transport_ranges_count(self):
        self.run_.range("weft.transport", "stage", 0, 5)
        self.run_.copy(DEVICE_TO_HOST, 6, 8, self.run_.call("cudaMemcpyAsync", 1))
        self.run_.copy(DEVICE_TO_HOST, 8, 9, self.run_.call("cudaMemcpyAsync", 6))
        self.assertEqual(self.communication(), (2.0, "communication, each by itself: other copies in Weft's ranges 2.000 ms"))

    def test_wefts_kernels_except_optimizers_count(self):
        for begin, name in enumerate(("weft_sum_float32", "weft_copy_4_many", "weft_cast_float32_bfloat16")):
            self.run_.kernel(name, begin, begin + 1)
        for begin, name in enumerate(("weft_sgd_float32", "weft_sgd_momentum_float16_many", "weft_adam_float32", "weft_adam_amsgrad_float32"), 10):
            self.run_.kernel(name, begin, begin + 1)
        (line,), reasons, _ = self.said()
        self.assertEqual(line[2:4], ["4.000", "3.000"])
        self.assertIn("Weft's kernels 3.000 ms", reasons)

    def test_the_innermost_telling_range_decides(self):
        run = self.run_
        run.range("weft.engine", "bucket", 0, 100)
        run.range("weft.engine", "wait", 10, 90)  # does not tell what the work is
        run.range("weft.engine", "run", 20, 40)
        run.range("weft.transport", "stage", 25, 30, registered=False)
        run.range("weft.user", "stage", 26, 27)
        for at, length in ((5, 1), (15, 2), (22, 4), (26.5, 8), (35, 16), (50, 32), (95, 64), (101, 128)):
            begin = int(at) * 1000
            run.kernel("elementwise", begin, begin + length, run.call("cudaLaunchKernel", at))
        self.assertEqual(self.communication()[0], 1 + 2 + 8 + 32 + 64)

    def test_ranges_belong_to_threads_and_domains_to_processes(self):
        run = self.run_
        run.range("weft.transport", "stage", 0, 10)
        run.range("other", "stage", 0, 10, process=78)  # has the same number as weft.transport in 77
        run.kernel("elementwise", 20, 21, run.call("cudaLaunchKernel", 5, thread=2))
        run.kernel("elementwise", 22, 23, run.call("cudaLaunchKernel", 5, process=78), process=78)
        lines, reasons, _ = self.said()
        self.assertEqual([line[3] for line in lines], ["0.000", "0.000"])
        self.assertEqual(reasons, "")

    def test_unended_ranges_last_to_the_end(self):
        self.run_.range("weft.transport", "stage", 0, None)
        self.run_.kernel("elementwise", 6, 8, self.run_.call("cudaLaunchKernel", 5))
        self.assertEqual(self.communication()[0], 2.0)

    def test_graph_work_counts_as_where_it_was_captured(self):
        run = self.run_
        run.range("weft.engine", "bucket", 0, 10)
        for node, at in ((100, 5), (101, 15)):
            run.put("CUDA_GRAPH_NODE_EVENTS", at * MS, run.thread(1), node, None)
            run.put("CUDA_GRAPH_NODE_EVENTS", 20 * MS, run.thread(1), node + 100, node)  # when the graph was instantiated
        run.range("weft.engine", "bucket", 29, 31)  # the graph is launched in this one
        launch = run.call("cuGraphLaunch", 30)
        run.kernel("elementwise", 40, 41, launch, node=200)
        run.kernel("elementwise", 42, 44, launch, node=201)
        run.kernel("ncclDevKernel_AllReduce", 50, 54, launch, node=202)  # the capture of this node is unknown
        run.copy(ON_DEVICE, 60, 68, launch, node=203)
        (line,), _, _ = self.said()
        self.assertEqual(line[2:4], ["2.000", "5.000"])

    def test_names_a_build_without_ranges(self):
        self.run_.range("other", "x", 0, 1)
        self.run_.kernel("gemm", 0, 10, self.run_.call("cudaLaunchKernel", 0))
        _, _, notes = self.said()
        self.assertIn("none of its ranges are Weft's (a build with WEFT_TRACE=OFF?)", notes)
        self.assertNotIn("no calls of CUDA", notes)


NSYS = """#!/bin/bash
echo "$*" >> "$CALLS"
case $1 in
profile)
  while [[ $1 != sh ]]; do [[ $1 = --output ]] && name=$2; shift; done
  touch "$name.nsys-rep"
  exec "$@" ;;
export)
  [[ -f ${*: -1} ]] && cp "$EXPORT" "${@: -2:1}" ;;
esac
"""

NCU = """#!/bin/bash
echo "$*" >> "$CALLS"
while [[ $1 != sh ]]; do [[ $1 = --log-file ]] && log=$2; shift; done
cat "$FIGURES" > "$log"
exec "$@"
"""

HEADER = ('"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name",'
          '"Metric Name","Metric Unit","Metric Value"')


class Scripts(unittest.TestCase):
    """nsys.sh and ncu.sh, with stand-ins for nsys and ncu that do what the scripts need."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "CALLS": str(self.folder / "calls"),
                            "EXPORT": str(self.folder / "export.sqlite"), "FIGURES": str(self.folder / "figures.csv")}
        for name, text in (("nsys", NSYS), ("ncu", NCU)):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)

    def script(self, name, *arguments, **environment):
        return subprocess.run([OVERLAP.parent / name, *arguments], cwd=self.folder, env={**self.environment, **environment}, capture_output=True, text=True)

    def test_nsys_prints_the_overlap_and_returns_the_programs_code(self):
        run = Run(self.environment["EXPORT"])
        run.kernel("gemm", 0, 10)
        run.kernel("ncclDevKernel_AllReduce", 5, 15)
        run.database.commit()
        for code in (0, 3):
            result = self.script("nsys.sh", "run 1", "sh", "-c", f"echo it ran; exit {code}")
            self.assertEqual(result.returncode, code, result.stderr)
            lines = result.stdout.splitlines()
            self.assertEqual(lines[0], "it ran")
            self.assertEqual(lines[2].split(), ["77", "0", "10.000", "10.000", "5.000", "5.000", "50.0", "%"])
        calls = Path(self.environment["CALLS"]).read_text()
        self.assertIn("--trace cuda,nvtx,osrt --cuda-graph-trace node", calls)
        self.assertIn("export --type sqlite --force-overwrite true --output run 1.sqlite run 1.nsys-rep", calls)

    def test_ncu_prints_a_line_for_each_kernel(self):
        def line(launch, kernel, metric, unit, value):
            return f'"{launch}","7","bench","host","{kernel}","1","7","(512, 1, 1)","(264, 1, 1)","0","9.0","Command line profiler metrics","{metric}","{unit}","{value}"'
        figures = ["==PROF== Connected to process 7", HEADER]
        for launch, (time, moved, share) in enumerate([("20,000", "60,000,000", "90.5"), ("10,000", "40,000,000", "80.5"), ("40,000", "60,000,000", "91.5")]):
            figures += [line(launch, "weft_sum_float32", "gpu__time_duration.sum", "ns", time), line(launch, "weft_sum_float32", "dram__bytes.sum", "byte", moved),
                        line(launch, "weft_sum_float32", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", share)]
        figures.append(line(9, "weft_copy_4", "gpu__time_duration.sum", "ns", "5"))
        Path(self.environment["FIGURES"]).write_text("\n".join(figures) + "\n==PROF== Disconnected\n")
        result = self.script("ncu.sh", "sh", "-c", "echo it ran; exit 4", NCU_CSV=str(self.folder / "kept.csv"))
        self.assertEqual(result.returncode, 4, result.stderr)
        ran, _, copies, sums = result.stdout.splitlines()
        self.assertEqual(ran, "it ran")
        self.assertEqual(sums.split(), ["3", "20.00", "60.000", "3000.0", "90.5", "%", "weft_sum_float32"])
        self.assertRegex(copies, "some of its figures are missing +weft_copy_4")
        self.assertIn("==PROF== Connected", (self.folder / "kept.csv").read_text())
        self.assertIn("--kernel-name regex:weft --launch-count 50 --print-units base", Path(self.environment["CALLS"]).read_text())

    def test_ncu_without_figures_says_why(self):
        Path(self.environment["FIGURES"]).write_text("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")
        result = self.script("ncu.sh", "sh", "-c", "true")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("has no figures of a kernel of Weft\n  ==ERROR== ERR_NVGPUCTRPERM", result.stderr)
        Path(self.environment["FIGURES"]).write_text(HEADER + '\n"0","7","b","h","k","1","7","b","g","0","9.0","s","dram__bytes.sum","Mbyte","1"\n')
        self.assertIn("dram__bytes.sum is in Mbyte; run ncu with --print-units base", self.script("ncu.sh", "sh", "-c", "true").stderr)

    def test_help_describes_them_and_missing_tools_are_named(self):
        for name, says in (("nsys.sh", "how much of the communication compute has hidden"), ("ncu.sh", "the share of the memory's bandwidth")):
            result = self.script(name, "--help")
            self.assertEqual(result.returncode, 0)
            self.assertIn("usage:", result.stdout)
            self.assertIn(says, " ".join(result.stdout.split()))
            (self.folder / name.removesuffix(".sh")).unlink()
            path = ":".join(place for place in self.environment["PATH"].split(":") if not (Path(place) / name.removesuffix(".sh")).exists())
            result = self.script(name, "x", "sh", PATH=path)
            self.assertEqual(result.returncode, 3)
            self.assertIn(f"no {name.removesuffix('.sh')}: install", result.stderr)


class Names(unittest.TestCase):
    """The names that overlap.py relies on exist in Weft's sources."""

    def test_ranges_exist(self):
        module = overlap_module()
        sources = "".join(path.read_text() for folder in ("engine", "transport") for path in (ROOT / folder).rglob("*.cc"))
        made = {(f"weft.{layer.lower()}", text) for layer, text in re.findall(r'trace::Name \w+\{trace::Layer::(\w+), "([^"]+)"\}', sources)}
        for table in (module.COMMUNICATING, module.COMPUTING):
            for domain, texts in table.items():
                self.assertIn(domain, {known for known, _ in made})
                for text in texts or ():
                    self.assertIn((domain, text), made)
        self.assertIn('std::string("weft.") + trace::name(layer)', (ROOT / "profiling/trace/nvtx.cc").read_text())

    def test_kernels_exist(self):
        kernels = (ROOT / "kernels/kernel_list.h").read_text()
        optimizers = re.findall(r"WEFT_OPTIMIZER_KERNELS_OF\(X, [A-Z]\w+, (\w+)\)", kernels)
        others = re.findall(r"^  X\((\w+), ", kernels, re.MULTILINE)
        self.assertGreater(min(len(optimizers), len(others)), 3)
        is_optimizer = overlap_module().OPTIMIZERS.match
        self.assertEqual([name for name in optimizers if not is_optimizer(f"weft_{name}_float32")], [])
        self.assertEqual([name for name in others if is_optimizer(f"weft_{name}")], [])
        self.assertIn('"weft_" #name', (ROOT / "kernels/cuda_kernels.cc").read_text())


if __name__ == "__main__":
    unittest.main()

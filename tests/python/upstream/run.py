# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's own tests with the backend "weft" and, as the control, with "gloo".

    python tests/python/upstream/run.py [--pytorch CHECKOUT] --results FILE --table TABLE

It takes DistributedTest from the installed torch, on 2, 3 and 4 ranks, and from a checkout of
PyTorch's source at the same release the files that suites.txt names. Each test runs in a process
group of its own within a time limit, --lanes of them at a time. FILE gets a line of JSON for each
test that has ended, and a second run goes on behind it. TABLE gets the counts, and a line for each
test that Gloo passes and weft does not, with the reason that reasons.txt gives. The exit code is 1
if a reason is missing.

    python tests/python/upstream/run.py --everyday

runs the tests of everyday.txt with weft alone, and all of them must pass. reading.py says how a
backend that PyTorch's tests do not know takes part in them.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALLED = "distributed_test"
BATCH = 40  # tests that share the import of their module


def lines_of(name):
    """The lines of a list in this folder, without comments and empty ones."""
    lines = (line.partition("#")[0].strip() for line in (HERE / name).read_text().splitlines())
    return [line for line in lines if line]


class Results:
    """What has been found so far, in a file of JSON lines that is added to. Thread-safe."""

    def __init__(self, path):
        self._path, self._lock, self.found = path, threading.Lock(), {}
        if path and path.exists():
            for line in path.read_text().splitlines():
                self._keep(json.loads(line))

    def _keep(self, row):
        self.found[row["module"], row["ranks"], row["backend"], row["test"]] = row

    def has(self, module, ranks, backend, test):
        return (module, ranks, backend, test) in self.found

    def add(self, row):
        with self._lock:
            self._keep(row)
            if self._path:
                with self._path.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    def forget(self, wanted):
        """Drops the rows that `wanted` chooses, so that their tests run again."""
        self.found = {key: row for key, row in self.found.items() if not wanted(row)}
        if self._path and self._path.exists():
            self._path.write_text("".join(json.dumps(row) + "\n" for row in self.found.values()))


class Worker:
    """Starts worker.py for one module, backend and number of ranks."""

    def __init__(self, options, folder, module, ranks, backend):
        self.key = module, ranks, backend
        self._options, self._folder = options, folder
        self._logs = folder / "logs" / f"{backend}-{ranks}-{module.replace('/', '-')}"
        self._environment = {
            **os.environ,
            "WEFT_UPSTREAM_BACKEND": backend,
            "BACKEND": backend,
            "WORLD_SIZE": str(ranks or 2),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
            # The ranks' own limit is a little shorter, since it says which rank has not ended.
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(max(5, int(options.limit - 5))),
        }
        if options.pytorch:
            self._environment["WEFT_UPSTREAM_CHECKOUT"] = str(options.pytorch.resolve())

    def _start(self, temporary, *arguments, **pipes):
        return subprocess.Popen(
            [sys.executable, HERE / "worker.py", self.key[0], *map(str, arguments)],
            env={**self._environment, "TMPDIR": temporary, "TEMP_DIR": temporary},
            text=True,
            stdout=subprocess.PIPE,
            **pipes,
        )

    def tests(self):
        with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
            process = self._start(temporary, "--list", stderr=subprocess.PIPE)
            out, errors = process.communicate()
        if process.returncode != 0:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            return None, last
        return out.split(), ""

    def run(self, tests, results):
        """Runs the tests; a worker that ends early fails the test that it was at."""
        waiting = deque(tests)
        while waiting:
            with tempfile.TemporaryDirectory(
                dir=self._folder, ignore_cleanup_errors=True
            ) as temporary:
                process = self._start(
                    temporary, "--limit", self._options.limit, "--logs", self._logs,
                    stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )
                process.stdin.write("".join(f"{test}\n" for test in waiting))
                process.stdin.close()
                for line in process.stdout:
                    waiting.popleft()
                    self._add(json.loads(line), results)
                process.wait()
            if waiting and process.returncode != 0:
                why = f"its module's process ended with {process.returncode}"
                self._add({"test": waiting.popleft(), "result": "failed", "why": why}, results)

    def _add(self, row, results):
        module, ranks, backend = self.key
        results.add({"module": module, "ranks": ranks, "backend": backend, **row})
        if row["result"] == "failed" or self._options.verbose:
            where = f"{backend} {module}" + (f" on {ranks} ranks" if ranks else "")
            print(f"{row['result']}: {where}: {row['test']}: {row['why']}", flush=True)


def modules(options):
    """(module, ranks) of what is to run; ranks 0: the number is the test's own."""
    chosen = [(INSTALLED, ranks) for ranks in options.ranks]
    if options.pytorch:
        folder = options.pytorch / "test" / "distributed"
        for pattern in lines_of("suites.txt"):
            found = sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
            chosen += [(name, 0) for name in found]
    return [
        (name, ranks) for name, ranks in chosen if any(one in name for one in options.only)
    ]


def batches(options, folder, results):
    """The work that is left: (worker, tests), with the backends in turns."""
    if options.pytorch:
        folder_of_tests = options.pytorch / "test" / "distributed"
        missing = [one for one in lines_of("suites.txt") if not any(folder_of_tests.glob(one))]
        if missing:
            print(f"not in this checkout: {', '.join(missing)}", flush=True)
    workers = {
        (module, ranks, backend): Worker(options, folder, module, ranks, backend)
        for module, ranks in modules(options)
        for backend in options.backends
    }
    firsts = {(module, backend): one for (module, _, backend), one in reversed(workers.items())}
    with ThreadPoolExecutor(options.lanes) as lanes:
        listed = dict(zip(firsts, lanes.map(Worker.tests, firsts.values())))
    for (module, backend), (tests, error) in listed.items():
        if tests is None:
            print(f"not imported: {backend} {module}: {error}", flush=True)
    work = []
    for (module, ranks, backend), worker in workers.items():
        left = [
            test
            for test in listed[module, backend][0] or []
            if fnmatch.fnmatch(test, f"*{options.test}*")
            and not results.has(module, ranks, backend, test)
        ]
        work += [
            (begin, worker, left[begin : begin + BATCH]) for begin in range(0, len(left), BATCH)
        ]
    # A stable order: batch by batch, so that both backends' results come beside each other.
    order = {key: place for place, key in enumerate(modules(options))}
    work.sort(key=lambda part: (order[part[1].key[:2]], part[0]))
    return deque((worker, tests) for _, worker, tests in work)


def run_all(work, lanes, results):
    def lane():
        while True:
            try:
                worker, tests = work.popleft()
            except IndexError:
                return
            worker.run(tests, results)

    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gloo_name(test, backend):
    """The name of the same test for Gloo: parameters and classes are named after the backend."""
    return test.replace(backend, "gloo").replace(backend.capitalize(), "Gloo")


def reason_for(module, ranks, test, why):
    for line in lines_of("reasons.txt"):
        pattern, _, text = line.partition(":")
        if fnmatch.fnmatch(f"{module} {ranks} {test}", pattern.strip()):
            return text.strip()
    return ""


def table_of(results, command, release):
    """(lines of the table, the number of tests that Gloo passes and weft does not without a reason)."""
    suites = {}
    elsewhere = {
        (module, ranks, gloo_name(test, backend))
        for (module, ranks, backend, test), row in results.found.items()
        if backend != "gloo" and row["result"] != "skipped" and not row.get("made", True)
    }
    for (module, ranks, backend, test), row in results.found.items():
        if (module, ranks, gloo_name(test, "weft")) in elsewhere:
            continue
        suites.setdefault((module, ranks), {}).setdefault(backend, {})[
            gloo_name(test, "weft") if backend == "weft" else test
        ] = row
    lines = [
        f"PyTorch's own tests (torch {release}), `{command}`.",
        "",
        "| tests | ranks | Gloo: passed, failed, skipped | weft: passed, failed, skipped | passed by Gloo alone |",
        "|---|---|---|---|---|",
    ]
    differences, missing = [], 0
    for (module, ranks), backends in sorted(suites.items()):
        gloo, weft = backends.get("gloo", {}), backends.get("weft", {})
        counts = [
            ", ".join(
                str(sum(row["result"] == kind for row in rows.values()))
                for kind in ("passed", "failed", "skipped")
            )
            for rows in (gloo, weft)
        ]
        alone = [
            (test, weft.get(test, {"result": "missing", "why": "weft has no such test"}))
            for test, row in gloo.items()
            if row["result"] == "passed" and weft.get(test, {"result": ""})["result"] != "passed"
        ] if weft else []
        shown = "DistributedTest" if module == INSTALLED else f"`{module}`"
        lines.append(
            f"| {shown} | {ranks or 'its own'} | {counts[0]} | {counts[1]} | {len(alone) or ''} |"
        )
        for test, row in sorted(alone):
            text = reason_for(module, ranks, test, row["why"])
            missing += not text
            text = text or f"NO REASON GIVEN: {row['why']}"
            where = f"{shown}" + (f" on {ranks} ranks" if ranks else "")
            differences.append(f"- {where}, `{test}` ({row['result']}): {text}")
    lines += [
        "",
        f"{len(elsewhere)} other tests of these files make no group of the backend, such as those of "
        "Gloo's own class, and are not counted.",
    ]
    if differences:
        lines += ["", "Passed by Gloo and not by weft:", "", *differences]
    return lines, missing


def everyday(options, folder):
    """Runs the tests of everyday.txt with weft; returns the exit code."""
    if importlib.util.find_spec("expecttest") is None:
        print("SKIP: PyTorch's test modules need the package expecttest")
        return 77
    results = Results(None)
    work = {}
    for line in lines_of("everyday.txt"):
        ranks, test = line.split()
        work.setdefault(int(ranks), []).append(test)
    parts = deque()
    for ranks, tests in work.items():
        worker = Worker(options, folder, INSTALLED, ranks, options.backends[0])
        size = -(-len(tests) // options.lanes)
        parts += [(worker, tests[at : at + size]) for at in range(0, len(tests), size)]
    expected = sum(len(tests) for _, tests in parts)
    run_all(parts, options.lanes, results)
    passed = sum(row["result"] == "passed" for row in results.found.values())
    for key, row in results.found.items():
        if row["result"] != "passed":
            print(f"{row['result']}: {key[3]} on {key[1]} ranks: {row['why']}")
    print(f"{passed} of {expected} of PyTorch's tests passed with {options.backends[0]}")
    return 0 if passed == expected else 1


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pytorch", type=Path, metavar="CHECKOUT")
    parser.add_argument("--results", type=Path, help="default: a temporary file")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--again", choices=["failed", "weft"], help="forget these results first")
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[2, 3, 4])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["gloo", "weft"])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[""],
        help="only modules whose name contains one of these",
    )
    parser.add_argument("--test", default="", help="only tests whose name matches this pattern")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds for a test")
    parser.add_argument("--folder", type=Path, help="for the output of tests that failed")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("--everyday", action="store_true")
    return parser.parse_args(arguments)


def main():
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="weft-upstream-", ignore_cleanup_errors=True) as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        if options.everyday:
            options.backends = ["weft"] if options.backends == ["gloo", "weft"] else options.backends
            return everyday(options, folder)
        results = Results(options.results)
        if options.again:
            results.forget(
                lambda row: options.again in (row["result"], row["backend"])
                and any(one in row["module"] for one in options.only)
            )
        if not options.table_only:
            run_all(batches(options, folder, results), options.lanes, results)
    import torch

    command = "python tests/python/upstream/run.py" + (" --pytorch CHECKOUT" if options.pytorch else "")
    lines, missing = table_of(results, command, torch.__version__)
    text = "\n".join(lines) + "\n"
    if options.table:
        options.table.write_text(text)
    print(text)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

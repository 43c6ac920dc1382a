# SPDX-License-Identifier: Apache-2.0
"""Imports one module of PyTorch's tests and runs tests of it, each in a process group of its own.

usage: worker.py MODULE --list
       worker.py MODULE --limit SECONDS --logs FOLDER < names, one CLASS.TEST a line

MODULE is "distributed_test", the installed one, or a file of the checkout below test/distributed.
run.py starts it with WEFT_UPSTREAM_BACKEND, WEFT_UPSTREAM_CHECKOUT and WORLD_SIZE. Each result is a
line of JSON: {"test", "result": "passed" | "failed" | "skipped", "why", "seconds", "made"}; "made"
tells whether a rank made a group of the backend (of weft; Gloo's are not noticed).
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import reading

reading.install_from_environment()  # here, since spawned processes import this file as well

INSTALLED = "distributed_test"


def module_of(name):
    """The module of tests `name`, and its test classes by their names."""
    if name == INSTALLED:
        from torch.testing._internal.distributed import distributed_test as module

        class DistributedTests(
            module.TestDistBackend, module.DistributedTest._DistTestBase
        ):
            def setUp(self):
                super().setUp()
                self._spawn_processes()

        return {"DistributedTests": DistributedTests}
    path = Path(os.environ["WEFT_UPSTREAM_CHECKOUT"]) / "test" / "distributed" / name
    sys.path[:0] = [str(path.parent), str(path.parents[len(Path(name).parts) - 1]), str(
        Path(os.environ["WEFT_UPSTREAM_CHECKOUT"]) / "test")]
    module = importlib.import_module(path.stem)
    return {
        name: one
        for name, one in vars(module).items()
        if isinstance(one, type)
        and issubclass(one, unittest.TestCase)
        and one.__module__ == module.__name__
    }


def tests_of(classes):
    loader = unittest.TestLoader()
    return [
        f"{name}.{test}" for name, one in classes.items() for test in loader.getTestCaseNames(one)
    ]


def reason(text):
    """The line of a failure's report that says what went wrong."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Timeout|PeerLost)\b", line)]
    # The last of the first rank that failed: what other ranks report follows from it.
    for begin in (i for i, line in enumerate(lines) if line.startswith("Process 0 exited")):
        errors = [line for line in lines[begin:] if line in errors] or errors
    return (errors or [line for line in lines if line] or ["no report"])[-1][:300]


class OneResult(unittest.TestResult):
    outcome, why, report = "passed", "", ""

    def addSkip(self, test, why):
        self.outcome, self.why = "skipped", why.splitlines()[0] if why else ""

    def addFailure(self, test, error):
        self.outcome, self.report = "failed", self._exc_info_to_string(error, test)
        self.why = reason(self.report)

    addError = addFailure

    def addExpectedFailure(self, test, error):
        self.why = "expected failure"

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addFailure(subtest, error)


def run_here(classes, test, result_file):
    """Runs the test in this process, which is a process group of its own, and writes its result."""
    class_name, name = test.split(".")
    one = OneResult()
    suite = unittest.TestSuite([classes[class_name](name)])
    suite.run(one)
    print(one.report, flush=True)
    result_file.write_text(json.dumps({"result": one.outcome, "why": one.why}))


def wait_for(child, until):
    """Whether the process ended before the time `until`."""
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False


def end_group(child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def run_apart(classes, test, limit, logs):
    log, result_file = logs / f"{test}.log", logs / f"{test}.json"
    made = logs / f"{test}.made"
    for file in (result_file, made):
        file.unlink(missing_ok=True)
    begin = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.environ["WEFT_UPSTREAM_MADE"] = str(made.resolve())
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            # All processes of a test that does not end say where they are.
            faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(out), "w"), all_threads=True)
            run_here(classes, test, result_file)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(0)
    ended = wait_for(child, begin + limit)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGUSR1)
        time.sleep(1)
    end_group(child)
    if not ended:
        os.waitpid(child, 0)
        found = {"result": "failed", "why": f"did not end within {limit} s"}
    elif result_file.exists():
        found = json.loads(result_file.read_text())
    else:
        text = log.read_text(errors="replace") if log.exists() else ""
        found = {"result": "failed", "why": "ended without a result: " + reason(text)}
    if found["result"] != "failed":
        log.unlink(missing_ok=True)
    seconds = round(time.monotonic() - begin, 1)
    return {"test": test, **found, "seconds": seconds, "made": made.exists()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args()
    lines = os.dup(1)
    os.dup2(2, 1)  # what the imports print is no result
    classes = module_of(options.module)
    for one in classes.values():
        one.__module__ = one.__module__  # unittest shows it
    if options.list:
        os.write(lines, ("\n".join(tests_of(classes)) + "\n").encode())
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    for line in sys.stdin:
        result = run_apart(classes, line.strip(), options.limit, options.logs)
        os.write(lines, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""./dev test: builds everything, runs the tests and reports."""

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from . import libtorch
from .build import build, build_folder
from .checkout import ROOT, lock
from .console import say
from .environment import tools
from .libtorch import choose_torch
from .options import BUILDING, parser_of
from .setup import fetch_programs, install_system_packages

MIDDLE_TORCHES = ["2.12.1", "2.13.0", "2.14.1"]  # ./dev test --all compiles against these
MAY_BE_UNSTEADY = 2  # so many failed tests are run again; more are a failure at once


def reported_failures(report):
    """(name, output) of each test that failed, in a JUnit report."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.get("status") == "fail":
            yield case.get("name"), (case.findtext("system-out") or "").rstrip()


def print_failures(failures):
    print("\nOutput of the tests that failed:")
    for name, output in failures:
        # Tests that share a process: print each that failed, then the end of the output, where a
        # crash would be.
        parts = re.findall(
            r"^\[ RUN      \] \S+\n(?:(?!\[ RUN      \]).*\n)*?\[  FAILED  \] \S+",
            output,
            re.MULTILINE,
        )
        shown = [*(part for part in parts if part not in output[-4000:]), output]
        print(f"--- {name}\n" + "\n".join("\n".join(part.splitlines()[-60:]) for part in shown))


def try_again(command, report, environment):
    """Runs the failed tests again, one at a time, if they are few. True if all of them pass.

    The last lines count the tests that passed alone and those that failed again.
    """
    failures = list(reported_failures(report))
    print_failures(failures)
    if not failures or len(failures) > MAY_BE_UNSTEADY:
        return False
    print(f"\nRunning {len(failures)} failed tests again, one at a time", flush=True)
    second = report.with_name("tests-again.xml")
    second.unlink(missing_ok=True)
    again = [*command, "--rerun-failed", "--parallel", "1", "--output-junit", second]
    passed = subprocess.run([str(part) for part in again], env=environment).returncode == 0
    names = [name for name, _ in failures]
    failed = (
        [name for name, _ in reported_failures(second)] if not passed and second.exists() else []
    )
    if not passed and not failed:
        failed = names  # ctest itself failed
    passed_alone = [name for name in names if name not in failed]
    print()
    for told, what in (
        (failed, "failed again"),
        (passed_alone, "failed and then passed alone (a defect to report)"),
    ):
        if told:
            print(f"{len(told)} test{'s' * (len(told) > 1)} {what}: {', '.join(told)}", flush=True)
    return not failed


def reported_skips(report):
    """(name, reason) of each skipped test in a JUnit report."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        output = case.findtext("system-out") or ""
        skipped = case.find("skipped")
        # Tests that share a process: each has its own reason.
        one_by_one = re.findall(
            r"Skipped\n(.+)\n(?:(?!\[  SKIPPED \]).*\n)*\[  SKIPPED \] (\S+) \(", output
        )
        if len(one_by_one) > 1 or (one_by_one and skipped is None):
            yield from ((name, reason.strip()) for reason, name in one_by_one)
            continue
        if skipped is None and case.get("status") not in ("notrun", "disabled"):
            continue
        reason = re.search(r"Skipped\n(.+)", output) or re.search(r"SKIP: (.+)", output)
        text = (
            reason.group(1).strip()
            if reason
            else (skipped.get("message") if skipped is not None else "")
        )
        yield case.get("name"), text or "no reason given"


def command_test(arguments):
    parser = parser_of("test", *BUILDING)
    parser.add_argument("-R", "--tests-regex", help="only tests whose name matches")
    parser.add_argument("-L", "--label", help="only tests with this label")
    parser.add_argument("--repeat", type=int, help="repeat until a failure, at most this often")
    parser.add_argument(
        "--all",
        action="store_true",
        help="also every setting of every test, the same tests built by g++ with optimisation, the "
        "benches, each header alone, and libtorch's releases between the oldest and the newest",
    )
    options = parser.parse_args(arguments)
    if options.all:
        os.environ["WEFT_ALL_SETTINGS"] = "1"
    code = run_tests(options)
    if options.all:
        for version in MIDDLE_TORCHES:
            compile_with(version)
        if options.preset == "dev":
            optimized = argparse.Namespace(**{**vars(options), "preset": "optimized"})
            code = run_tests(optimized) or code
    sys.exit(code)


def run_tests(options):
    """Builds everything, runs the chosen tests and reports; returns ctest's exit code."""
    build(options)
    fetch_programs("prometheus")
    if not (options.tests_regex or options.label):
        with lock("setup"):
            install_system_packages("apt-test.txt", required=False)
            install_system_packages("apt-docs.txt", required=False)
    folder = build_folder(options)
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    ctest = ["ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error"]
    environment = tools()
    if options.tests_regex:
        environment["WEFT_EACH_TEST"] = "1"  # a process for each (tests/GroupedTests.cmake)
    code, summary = run_ctest(
        [*ctest, "--output-junit", report, *chosen_tests(options)], environment
    )
    if report.exists():
        print_skips(report)
        print_passed(report)
    print(summary, end="", flush=True)
    if (
        code != 0
        and report.exists()
        and not options.repeat
        and try_again(ctest, report, environment)
    ):
        return 0
    return code


def chosen_tests(options):
    """ctest's arguments for the tests that the options choose."""
    # Tests mostly wait for their ranks or for the guest. Sanitizers need the memory of two.
    parallel = options.jobs if options.preset in ("asan", "tsan") else 2 * options.jobs
    arguments = ["--parallel", parallel, "--test-output-size-passed", 1 << 20]
    if options.tests_regex:
        arguments += ["-R", options.tests_regex]
    if options.label:
        arguments += ["-L", options.label]
    if options.repeat:
        arguments += ["--repeat", f"until-fail:{options.repeat}"]
    return arguments


def run_ctest(command, environment):
    """Runs ctest and prints its output; returns (exit code, summary).

    The summary is not printed yet: the reasons for skipped tests come before it.
    """
    process = subprocess.Popen(
        [str(part) for part in command], env=environment, stdout=subprocess.PIPE, text=True
    )
    summary = []
    for line in process.stdout:
        if summary or re.match(r"\d+% tests passed", line):
            summary.append(line)
        else:
            print(line, end="", flush=True)
    process.wait()
    return process.returncode, "".join(summary)


def print_skips(report):
    reasons = {}
    for name, reason in reported_skips(report):
        reasons.setdefault(reason, []).append(name)
    if reasons:
        print("Skipped on this machine:")
    for reason, names in sorted(reasons.items()):
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        print(f"  {len(names):4} x {reason}\n         {shown}")
    print()


def print_passed(report):
    outputs = [
        case.findtext("system-out") or ""
        for case in ElementTree.parse(report).getroot().iter("testcase")
    ]
    passed = sum(len(re.findall(r"^\[       OK \]", output, re.MULTILINE)) for output in outputs)
    print(f"{passed} of GoogleTest's tests passed, in these processes:")


def includes_of(path, found):
    """Adds the files of the repository that a source includes, directly or not, to `found`."""
    for name in re.findall(r"#include <weft/([^>]+)>", path.read_text()):
        header = next(
            (file for file in (ROOT / name, ROOT / "include" / "weft" / name) if file.exists()),
            None,
        )
        if header and header not in found:
            found.add(header)
            includes_of(header, found)
    return found


def sources_that_see_torch_releases():
    """The sources of engine/ that include the header on differences between libtorch's releases."""
    differences = ROOT / "engine" / "tensor" / "torch_releases.h"
    return [
        path
        for path in sorted((ROOT / "engine").rglob("*.cc"))
        if differences in includes_of(path, set())
    ]


def compile_with(version):
    """Compiles the sources that depend on libtorch's release, and one example, against another."""
    say(f"compiling the sources that depend on libtorch's release with torch {version}")
    before = libtorch.torch_version
    choose_torch(version)
    try:
        options = argparse.Namespace(
            preset="dev", compiler=None, cuda="off", jobs=os.cpu_count(), compiles_only=True
        )
        objects = [
            f"engine/CMakeFiles/weft_engine.dir/{path.relative_to(ROOT / 'engine')}.o"
            for path in sources_that_see_torch_releases()
        ]
        build(options, [*objects, "examples/CMakeFiles/readme.dir/readme.cc.o"])
    finally:
        choose_torch(before)

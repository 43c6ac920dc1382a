#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the groups of GroupedTests.cmake with ctest: grouped_test.py CTEST GROUPED_TESTS. Their
executable is a script that prints the output of GoogleTest."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CTEST, GROUPED = sys.argv[1:3]
# A suite of each kind; tests that RESULTS does not name pass.
TESTS = {"Passing": "ab", "Failing": "a", "AllFail": "ab", "Skipping": "ab", "FailsAndSkips": "ab", "PassesAndSkips": "ab"}
RESULTS = {"Failing.a": "FAILED", "AllFail.a": "FAILED", "AllFail.b": "FAILED", "Skipping.a": "SKIPPED", "Skipping.b": "SKIPPED",
           "FailsAndSkips.a": "FAILED", "FailsAndSkips.b": "SKIPPED", "PassesAndSkips.b": "SKIPPED"}
PROGRAM = """#!{python}
import fnmatch, sys
tests, results = {tests!r}, {results!r}
if sys.argv[1] == "--gtest_list_tests":
    for suite, names in tests.items():
        print(suite + ".", *("  " + name for name in names), sep="\\n")
    sys.exit()
pattern = sys.argv[1].removeprefix("--gtest_filter=")
chosen = [suite + "." + name for suite, names in tests.items() for name in names
          if any(fnmatch.fnmatchcase(suite + "." + name, one) for one in pattern.split(":"))]
of = lambda result: [name for name in chosen if results.get(name, "OK") == result]
print(f"[==========] Running {{len(chosen)}} tests from 1 test suite.")
print(f"[  PASSED  ] {{len(of('OK'))}} test{{'' if len(of('OK')) == 1 else 's'}}.")
for result in ("SKIPPED", "FAILED"):
    if of(result):
        print(f"[  {{result:7}} ] {{len(of(result))}} test{{'' if len(of(result)) == 1 else 's'}}, listed below:")
        print(*(f"[  {{result:7}} ] {{name}}" for name in of(result)), sep="\\n")
if of("FAILED"):
    print(f"\\n {{len(of('FAILED'))}} FAILED TESTS")
sys.exit(1 if of("FAILED") else 0)
"""


class Groups(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def say(self, alone="FALSE", each=False, tests=TESTS, sanitized="", fails=True):
        """{test: its result} as ctest prints them."""
        program = self.root / "some_test"
        program.write_text(PROGRAM.format(python=sys.executable, tests=tests, results=RESULTS))
        program.chmod(0o755)
        settings = {"executable": program, "labels": "cpu", "timeout": 20, "prefix": "", "alone": alone, "sanitized": sanitized}
        lines = [f'set({name} "{value}")' for name, value in settings.items()]
        (self.root / "CTestTestfile.cmake").write_text("\n".join([*lines, f'include("{GROUPED}")', ""]))
        environment = {name: value for name, value in os.environ.items() if name != "WEFT_EACH_TEST"}
        if each:
            environment["WEFT_EACH_TEST"] = "1"
        said = subprocess.run([CTEST], cwd=self.root, env=environment, capture_output=True, text=True)
        rows = re.findall(r"Test +#\d+: (.+?) \.+ *(Passed|\*\*\*Failed|\*\*\*Skipped)", said.stdout)
        self.assertEqual(said.returncode != 0, fails, said.stdout)
        return {name: result.lstrip("*") for name, result in rows}

    def test_group_result_combines_its_tests(self):
        self.assertEqual(self.say(), {
            "some_test Passing.*": "Passed", "some_test Failing.*": "Failed", "some_test AllFail.*": "Failed",
            "some_test Skipping.*": "Skipped", "some_test FailsAndSkips.*": "Failed", "some_test PassesAndSkips.*": "Passed"})

    def test_single_tests_keep_their_results(self):
        words = {"OK": "Passed", "FAILED": "Failed", "SKIPPED": "Skipped"}
        names = [f"{suite}.{name}" for suite, tests in TESTS.items() for name in tests]
        expected = {name: words[RESULTS.get(name, "OK")] for name in names}
        self.assertEqual(self.say(each=True), expected)
        self.assertEqual(self.say(alone="TRUE"), expected)

    def test_similar_suites_share_a_process(self):
        names = [f"t{number}/{way}" for number in range(12) for way in ("shmThreads2", "shmProcesses4")]
        tests = {"A/One": names, "A/Two": names, "A/Three": names, "Plain": ["a"]}
        passed = {name: "Passed" for name in ("some_test A/One.*/shmThreads2 and 1 more", "some_test A/One.*/shmProcesses4 and 1 more",
                                              "some_test A/Three.*/shmThreads2", "some_test A/Three.*/shmProcesses4", "some_test Plain.*")}
        self.assertEqual(self.say(tests=tests, fails=False), passed)
        apart = self.say(tests=tests, sanitized="thread", fails=False)
        self.assertEqual(len(apart), 7, apart)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

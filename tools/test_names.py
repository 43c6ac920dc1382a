#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Maps the names of C++ tests at one commit to those at another.

usage: test_names.py OLD NEW

Prints "file<TAB>old name<TAB>new name" for each test of OLD. Tests are paired by their order in a
file, and files by git's detection of renames, so it needs commits between which no test was moved
inside its file. Fails, naming the file, if a file has lost tests.
"""

import re
import subprocess
import sys

TEST = re.compile(
    r"^\s*(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P|WEFT_TEST\w*)\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE
)


def git(*words):
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def tests_of(commit, path):
    return [".".join(name) for name in TEST.findall(git("show", f"{commit}:{path}"))]


def files_of(commit):
    return [path for path in git("ls-tree", "-r", "--name-only", commit, "tests").splitlines() if path.endswith((".cc", ".h"))]


def main(old, new):
    renamed = {}
    for line in git("diff", "-M20%", "--name-status", old, new, "--", "tests").splitlines():
        fields = line.split("\t")
        if fields[0].startswith("R"):
            renamed[fields[1]] = fields[2]
    present = set(files_of(new))
    lost = 0
    for path in files_of(old):
        before = tests_of(old, path)
        if not before:
            continue
        after = tests_of(new, renamed.get(path, path)) if renamed.get(path, path) in present else []
        if len(after) < len(before):
            print(f"{path}: {len(before)} tests at {old}, {len(after)} at {new}", file=sys.stderr)
            lost += 1
        for one, other in zip(before, after):
            print(f"{path}\t{one}\t{other}")
    return 1 if lost else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))

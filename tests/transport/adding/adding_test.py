#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds a transport as docs/adding-a-transport.md says, and runs the conformance suites over it.

In a copy of the tree, transport/inproc is copied to transport/copycat and every name in it is changed; nothing else in the
tree is changed. Then a separate build must find the folder, and both conformance suites must run the same tests over copycat
as over inproc, with the same outcomes. It builds some hundred files, so it runs on request only.

usage: adding_test.py SOURCE_FOLDER WORK_FOLDER TORCH_ROOT CXX_COMPILER
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUEST = "WEFT_TRY_ADDING"
OLD, NEW = "inproc", "copycat"
PROGRAMS = ["connection_test", "connection_process_test", "connection_fault_test", "connection_soak_test", "communicator_mesh_test",
            "communicator_fault_test"]
# Options that are switched off: they have no bearing on the folder.
WITHOUT = ["CUDA", "NCCL", "GLOO", "VERBS", "MPI", "METRICS", "BUILD_BENCHES", "BUILD_EXAMPLES"]


def run(*command, **options):
    result = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if result.returncode != 0:
        sys.exit(f"{' '.join(str(part) for part in command)}: exit {result.returncode}\n{result.stdout[-8000:]}")
    return result.stdout


def files_of(tree):
    """{path in the tree: bytes} of every file outside build folders."""
    found = {}
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("build", "__pycache__")]
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                found[str(path.relative_to(tree))] = path.read_bytes()
    return found


def renamed(text):
    for change in (str.lower, str.capitalize):
        text = text.replace(change(OLD), change(NEW))
    return text


def with_copycat(files):
    """The files, and those of the added folder."""
    prefix = f"transport/{OLD}/"
    added = {renamed(path): renamed(content.decode()).encode() for path, content in files.items() if path.startswith(prefix)}
    return {**files, **added}


def bring(tree, files):
    """Makes the tree hold exactly these files; leaves unchanged files alone, so that the next build has less to do."""
    there = files_of(tree)
    for path in there.keys() - files.keys():
        (tree / path).unlink()
    for path, content in files.items():
        if there.get(path) != content:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(content)


def changed(tree, before):
    """The paths at which the tree differs from the files that it was made of."""
    after = files_of(tree)
    digest = lambda content: hashlib.sha256(content or b"").digest()
    return sorted(path for path in before.keys() | after.keys() if digest(before.get(path)) != digest(after.get(path)))


def outcomes(program, backend, folder):
    """{test, with the backend's name replaced by X: its outcome}."""
    report = folder / f"{program.name}-{backend}.json"
    report.unlink(missing_ok=True)
    run(program, f"--gtest_filter=*{backend}*:*{backend.capitalize()}*", f"--gtest_output=json:{report}", "--gtest_brief=1",
        env={**os.environ, "WEFT_SOAK_MESSAGES": "20000"})
    tests = {}
    for suite in json.loads(report.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}".replace(backend, "X").replace(backend.capitalize(), "X")
            tests[name] = test["result"]
    return tests


def main(source, work, torch, compiler):
    if REQUEST not in os.environ:
        print(f"SKIP: it builds for minutes: {REQUEST}=1 ./dev test -L adding")
        sys.exit(77)
    tree, build = work / "tree", work / "build"
    before = files_of(source)
    files = with_copycat(before)
    tree.mkdir(parents=True, exist_ok=True)
    bring(tree, files)
    run("cmake", "-G", "Ninja", "-S", tree, "-B", build, f"-DWEFT_TORCH_ROOT={torch}", f"-DCMAKE_CXX_COMPILER={compiler}",
        *(f"-DWEFT_{option}=OFF" for option in WITHOUT))
    run("cmake", "--build", build, "--parallel", str(os.cpu_count()), "--target", *PROGRAMS)
    total = 0
    for name in PROGRAMS:
        ours = outcomes(build / "tests" / name, NEW, work)
        theirs = outcomes(build / "tests" / name, OLD, work)
        theirs.pop("Connections.AtLeastXIsTested", None)  # this test is about inproc itself
        if ours != theirs:
            differ = sorted(ours.items() ^ theirs.items())
            sys.exit(f"{name}: {NEW} and {OLD} differ in {len(differ)}: {differ[:10]}")
        counted = {outcome: list(ours.values()).count(outcome) for outcome in set(ours.values())}
        print(f"{name}: {counted or 'nothing that stays in a process'}")
        total += counted.get("COMPLETED", 0)
    if total < 100:
        sys.exit(f"only {total} tests ran over {NEW}")
    touched = changed(tree, before)
    outside = [path for path in touched if not path.startswith(f"transport/{NEW}/")]
    if outside or not touched:
        sys.exit(f"outside of transport/{NEW}: {outside}")
    print(f"{total} claims, and nothing outside of transport/{NEW} was changed: {', '.join(touched)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:5])

#!/usr/bin/env python3
"""Compiles without output, with the flags that the build has for the contract's test.

usage: compile_test.py BUILD_FOLDER refused FILE CXX …         fails, and says what FILE's comments say
       compile_test.py BUILD_FOLDER accepted FILE CXX …        succeeds
       compile_test.py BUILD_FOLDER accepted_in_all FILE CXX …   the same, with WEFT_ALL_SETTINGS in the environment only

CXX: compilers, of which the first that this machine has is used.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

build, check = sys.argv[1:3]
source = str(Path(sys.argv[3]).resolve())
MODEL = "tests/engine/contract/rpc_contract_test.cc"
# Words of the build's command, and how many, that only its own compiler understands; and -Werror, since warnings differ.
COMPILERS_OWN = (("-Xclang", 2), ("-include", 2), ("--param", 2), ("-Winvalid-pch", 1), ("-Werror", 1))


def command_for(path):
    """The command that compiles MODEL, for another file and compiler; and its folder."""
    compiler = next(filter(None, map(shutil.which, sys.argv[4:])), None)
    if compiler is None:
        print(f"SKIP: there is no {' or '.join(sys.argv[4:])}")
        sys.exit(77)
    for entry in json.loads((Path(build) / "compile_commands.json").read_text()):
        if entry["file"].endswith(MODEL):
            words = shlex.split(entry["command"])
            place = words.index("-o")
            del words[place : place + 2]
            words = words[: words.index("-c")]
            words = words[next(i for i, word in enumerate(words) if re.search(r"(\+\+|g\+\+-\d+|clang\+\+-\d+)$", word)) + 1 :]
            for name, count in COMPILERS_OWN:
                while name in words:
                    place = words.index(name)
                    del words[place : place + count]
            return [compiler, *words, "-fsyntax-only", path], entry["directory"]
    sys.exit(f"{build} does not compile {MODEL}")


def compiled(words, folder):
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=550, env={**os.environ, "LC_ALL": "C"})


def errors_by_line(output, name):
    """(line of the file, text) of every error: where it is, and where what it is in was instantiated from."""
    here = re.compile(rf"(?:^|/){re.escape(name)}:(\d+):\d+:")
    lines = set()
    for text in output.splitlines():
        if re.search(r": In (instantiation|substitution|function|member function|lambda|static member)", text):
            lines = set()
        found = here.search(text)
        if "required from" in text and found:
            lines.add(int(found[1]))
        if " error: " in text:
            for line in {int(found[1])} if found else lines:
                yield line, text


def refused():
    words, folder = command_for(source)
    result = compiled([*words, "-fmax-errors=0"], folder)
    if result.returncode == 0:
        sys.exit(f"{source} compiles")
    errors = list(errors_by_line(result.stderr, Path(source).name))
    missing = []
    expected = 0
    for number, text in enumerate(Path(source).read_text().splitlines(), 1):
        wanted = re.search(r"[;)]\s+// refused: (.*)$", text)
        if not wanted:
            continue
        expected += 1
        said = [error for line, error in errors if line == number]
        if not any(wanted[1] in error for error in said):
            missing.append(f"{source}:{number}: nobody says \"{wanted[1]}\", but\n  " + "\n  ".join(said))
    if missing or expected == 0:
        sys.exit("\n".join(missing) + f"\n{result.stderr[-6000:]}")
    print(f"{expected} refused")


def accepted():
    words, folder = command_for(source)
    result = compiled([*words, "-Wno-unknown-warning-option"], folder)
    if result.returncode != 0:
        sys.exit(f"{words[0]} does not take {source}:\n{result.stderr[-20000:]}")
    print("accepted")


def accepted_in_all():
    if "WEFT_ALL_SETTINGS" not in os.environ:
        print("SKIP: ./dev test --all compiles this program too")
        sys.exit(77)
    accepted()


{"refused": refused, "accepted": accepted, "accepted_in_all": accepted_in_all}[check]()

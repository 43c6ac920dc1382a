#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles without output, with the flags that the build has for the contract's test.

usage: compile_test.py BUILD_FOLDER refused FILE CXX …         fails with the errors that FILE's comments name
       compile_test.py BUILD_FOLDER accepted FILE CXX …        succeeds
       compile_test.py BUILD_FOLDER accepted_in_all FILE CXX …   the same, with WEFT_ALL_SETTINGS in the environment only
       compile_test.py BUILD_FOLDER brief FOLDER CXX …        fails in each of the mistakes in FOLDER's files, briefly

CXX: compilers, of which the first that this machine has is used.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

build, check = sys.argv[1:3]
source = str(Path(sys.argv[3]).resolve())
MODEL = "tests/engine/contract/rpc_contract_test.cc"
MOST_LINES = 15  # of a mistake's output
# Options of the build's command that only its own compiler understands, with the number of their
# words; and -Werror, since warnings differ.
COMPILERS_OWN = (("-Xclang", 2), ("-include", 2), ("--param", 2), ("-Winvalid-pch", 1), ("-Werror", 1), ("-Wthread-safety", 1))


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
    """(line of the file, text) of every error: the line that it is in, and the lines that instantiate the code around it."""
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
    lines = Path(source).read_text().splitlines()
    for number, text in enumerate(lines, 1):
        wanted = re.search(r"[;)]\s+// refused: (.*)$", text)
        if not wanted:
            continue
        expected += 1
        first = number  # of the statement that ends in this line
        while first > 1 and not re.search(r"^\s*$|^\s*//|[;{}](\s*//.*)?$|:$", lines[first - 2]):
            first -= 1
        said = [error for line, error in errors if first <= line <= number]
        if not any(wanted[1] in error for error in said):
            missing.append(f"{source}:{number}: no error says \"{wanted[1]}\", but\n  " + "\n  ".join(said))
    if missing or expected == 0:
        sys.exit("\n".join(missing) + f"\n{result.stderr[-6000:]}")
    print(f"{expected} refused")


def accepted():
    words, folder = command_for(source)
    result = compiled([*words, "-Wno-unknown-warning-option"], folder)
    if result.returncode != 0:
        sys.exit(f"{words[0]} does not take {source}:\n{result.stderr[-20000:]}")
    print("accepted")


@dataclass
class Mistake:
    name: str
    most_lines: int
    sentence: str
    text: str
    said: list = field(default_factory=list)  # lines of the compiler's output

    def what_is_wrong(self):
        """What is wrong with the compiler's output; "" if nothing is."""
        text = "\n".join(self.said)
        if ": error: " not in text:
            return f"{self.name} compiles\n"
        if not any(one.strip() in text for one in self.sentence.split(" | ")):
            return f"{self.name}: no error says \"{self.sentence}\", but\n{text[:6000]}\n"
        if f"/{self.name}.cc:" not in text:
            return f"{self.name}: no error names its line, but\n{text[:6000]}\n"
        if len(self.said) > self.most_lines:
            return f"{self.name}: {len(self.said)} lines, more than {self.most_lines}:\n{text[:6000]}\n"
        return ""


def read_mistakes():
    """The includes and the declarations that all mistakes share (shared.cc), and the mistakes of FOLDER's other files."""
    shared = Path(source) / "shared.cc"
    head, declarations = shared.read_text().split("namespace mistakes {", 1)
    includes = re.findall(r"^#include.*\n", head, flags=re.M)
    files = sorted(path for path in Path(source).glob("*.cc") if path != shared)
    blocks = [block for path in files for block in re.split(r"^(?=#ifdef )", path.read_text(), flags=re.M)[1:]]
    mistakes = []
    for block in blocks:
        first, text = block.split("\n", 1)
        parts = re.fullmatch(r"#ifdef (\w+)  // (?:in (\d+) lines, )?says: (.+)", first)
        if parts is None:
            sys.exit(f"{source}: \"{first}\" is not #ifdef NAME  // says: SENTENCE")
        mistakes.append(Mistake(parts[1], int(parts[2] or MOST_LINES), parts[3], text[: text.index("#endif")]))
    if len({mistake.name for mistake in mistakes}) < len(mistakes):
        sys.exit(f"two mistakes in {source} have one name")
    return includes, declarations.rsplit("}", 1)[0], mistakes


def messages(output):
    """The errors and warnings: of each, the lines that a compiler prints for it, before it and behind it."""
    before = re.compile(r"In file included from |\s+from |\S+: (In|At) |\S+:\s+(recursively )?required (from|by)")
    waiting, found = [], []
    for line in output.splitlines():
        if re.search(r": (fatal error|error|warning): ", line):
            found.append([*waiting, line])
            waiting = []
        elif before.match(line):
            waiting.append(line)
        elif found:
            found[-1] += [*waiting, line]
            waiting = []
    return found


def with_includes(found):
    """Yields each message with the includes of its file, which compilers print only for the first message of a file."""
    is_include = re.compile(r"In file included from |\s+from ")
    place = re.compile(r"(\S+?):(\d+:\d+:| In instantiation of )")
    includes = {}
    for lines in found:
        count = next((i for i, line in enumerate(lines) if not is_include.match(line)), len(lines))
        where = place.match(lines[count])
        if where and count > 0:
            includes.setdefault(where[1], lines[:count])
        yield [*includes.get(where[1], []), *lines] if where and count == 0 else lines


def brief():
    """Compiles all mistakes at once: one compiler reads the headers once. Each mistake has types of its own, since a compiler
    says a sentence once for each type."""
    includes, shared, mistakes = read_mistakes()
    words, folder = command_for("all.cc")
    limit = "-ferror-limit=0" if "clang" in Path(words[0]).name else "-fmax-errors=0"
    by_name = {mistake.name: mistake for mistake in mistakes}
    with tempfile.TemporaryDirectory() as place:
        together = Path(place) / "all.cc"
        files = [Path(place) / f"{mistake.name}.cc" for mistake in mistakes]
        for file, mistake in zip(files, mistakes):
            file.write_text(f"namespace {mistake.name} {{\n{shared}\n{mistake.text}\n}}\n")
        together.write_text("".join([*includes, *(f'#include "{file}"\n' for file in files)]))
        result = compiled([*words[:-1], "-Wno-unknown-warning-option", limit, str(together)], folder)
        # Leaves out lines that a mistake would not cause in a program of its own.
        included = re.compile(rf"In file included from {re.escape(str(together))}:(\d+):$")
        last = None
        for lines in with_includes(messages(result.stderr)):
            names = re.findall(rf"{re.escape(place)}/(\w+)\.cc:", "\n".join(lines))
            # The first error in an instantiation names its place; the errors after it do not.
            last = next((by_name[name] for name in reversed(names) if name in by_name), last)
            if last is None:
                sys.exit("the declarations that all mistakes share do not compile:\n" + "\n".join(lines))
            for line in lines:
                by = included.match(line)
                if by is None or int(by[1]) <= len(includes):
                    last.said.append(line)
    wrong = [text for text in (mistake.what_is_wrong() for mistake in mistakes) if text]
    for mistake in mistakes:
        print(f"{len(mistake.said):4} lines: {mistake.name}")
    if wrong or not mistakes:
        sys.exit("\n".join(wrong) + f"\n{len(wrong)} of {len(mistakes)} mistakes do not give the expected output")


def accepted_in_all():
    if "WEFT_ALL_SETTINGS" not in os.environ:
        print("SKIP: ./dev test --all compiles this program too")
        sys.exit(77)
    accepted()


checks = {"refused": refused, "accepted": accepted, "accepted_in_all": accepted_in_all, "brief": brief}
checks[check]()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts the C++ of documents into one source, which compiles if what they show does.

usage: blocks.py OUTPUT NAMES DOCUMENT...

A block that includes something is a file of its own: it stands as it is, but for its includes. Of another one, paragraphs
that define a function stand for themselves, and the rest is inside a function. NAMES (names.h) declares what the blocks of a
document mention and do not show, in the namespace docs::<document>, where they stand.
"""

import pathlib
import re
import sys

BLOCK = re.compile(r"^```cpp\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFINITION = re.compile(r"(?:^//.*\n)*[\w:]+(?:<.*>)? \w+\(.*\) \{")


def inside_a_function(lines, number):
    """A fragment: definitions first, as they stand; then the rest."""
    text = "".join(lines)
    outside, inside = "", f"void line_{number}() {{\n"
    line = number
    for paragraph in re.split(r"(?<=\n)\n", text):
        placed = f'#line {line} "DOCUMENT"\n{paragraph}'
        if DEFINITION.match(paragraph):
            outside += placed
        else:
            inside += placed
        line += paragraph.count("\n") + 1
    return outside + inside + "}\n"


def source_of(document):
    name = re.sub(r"\W", "_", document.stem)
    text = document.read_text()
    parts = []
    for block in BLOCK.finditer(text):
        number = text[: block.start(1)].count("\n") + 1
        lines = block.group(1).splitlines(keepends=True)
        if any(line.startswith("#include") for line in lines):
            body = "".join("\n" if line.startswith("#include") else line for line in lines)
            code = f'#line {number} "DOCUMENT"\n{body}'
        else:
            code = inside_a_function(lines, number)
        if not any(line.startswith("namespace ") for line in lines):
            code = f"namespace docs::{name} {{\n{code}}}\n"
        parts.append(code.replace("DOCUMENT", str(document)))
    return "".join(parts)


def main():
    output, names, *documents = sys.argv[1:]
    source = f'#include "{names}"\n'
    for document in map(pathlib.Path, documents):
        found = source_of(document)
        if not found:
            sys.exit(f"{document}: no block of C++; take it off the list in tests/docs/CMakeLists.txt")
        source += found
    pathlib.Path(output).write_text(source)


if __name__ == "__main__":
    main()

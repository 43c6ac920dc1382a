#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when docs/errors.md quotes a message that the code does not have.

usage: errors_test.py ROOT [DOCUMENT]

A message is what stands in backquotes in the first column of a table under the header "message". "…" in it stands for
names and numbers; every part between must be in one string of the code.
"""

import pathlib
import re
import sys

STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
FOLDERS = ["base", "cuda", "engine", "kernels", "profiling", "transport"]


def strings_of(root):
    """All string literals of the sources, with those that stand one behind the other joined."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".h", ".cc", ".cu"):
                yield from STRING.findall(re.sub(r'"\s*\n\s*"', "", file.read_text()))


def messages_of(document):
    is_listed = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.startswith("| message |"):
            is_listed = True
        elif not line.startswith("|"):
            is_listed = False
        elif is_listed and (message := re.match(r"\| `([^`]+)` \|", line)):
            yield number, message.group(1)


def main():
    root = pathlib.Path(sys.argv[1])
    document = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else root / "docs" / "errors.md"
    text = "\n".join(strings_of(root))
    messages = list(messages_of(document))
    wrong = [
        f"{document}:{number}: no string of the code has '{part}'"
        for number, message in messages
        for part in (part.strip() for part in message.split("…"))
        if part not in text
    ]
    if len(messages) < 20:
        wrong.append(f"{document}: {len(messages)} messages were found")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when docs/tour.md names a file or a function that is not there.

usage: tour_test.py ROOT [DOCUMENT]

A word in backquotes that has a "/" and a suffix is a file of the repository. One that ends with "()" is a function: it must
stand in the file that is named last before it.
"""

import pathlib
import re
import sys

FILE = re.compile(r"[\w./-]+/[\w.-]+\.\w+")
FUNCTION = re.compile(r"[\w:~]+\(\)")


def wrong_names(root, document):
    text, checked = None, 0
    for number, line in enumerate(document.read_text().splitlines(), 1):
        for name in re.findall(r"`([^`]+)`", line):
            where = f"{document}:{number}"
            if FILE.fullmatch(name):
                file = root / name
                text = file.read_text() if file.is_file() else None
                if text is None:
                    yield f"{where}: there is no file {name}"
                path = name
            elif FUNCTION.fullmatch(name) and text is not None:
                checked += 1
                parts = name[:-2].split("::")
                if not re.search(rf"\b{re.escape(parts[-1])}\s*\(", text):
                    yield f"{where}: {path} has no {name}"
                elif len(parts) > 1 and not re.search(rf"\b{parts[-2]}\b", text):
                    yield f"{where}: {path} does not name {parts[-2]}"
    if checked < 20:
        yield f"{document}: {checked} functions were checked"


def main():
    root = pathlib.Path(sys.argv[1])
    document = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else root / "docs" / "tour.md"
    sys.exit("\n".join(wrong_names(root, document)) or 0)


if __name__ == "__main__":
    main()

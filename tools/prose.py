#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the language of the tree: how plain comments, test names and documents are.

usage: prose.py [--at COMMIT] [--list {comments,names,columns}] [FOLDER ...]

Prints for the working tree (or for COMMIT):

  comments   the share of comment lines that use who, whom, whose, what or whatever without an antecedent. A relative clause
             ("a rank that waits", "the rank whose part has ended") and a question are not counted.
  names      test names that carry a code (CN017_…), and the median length of test names
  columns    lines of comments, strings and documents that are longer than 100 columns
  docs       the size of README.md and docs/*.md

--list prints the lines behind one of these numbers. ./dev format --check prints the numbers; nothing fails because of them.
"""

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

SOURCE = re.compile(r"\.(h|cc|cu|cuh)$")
DOCUMENT = re.compile(r"^(README\.md|docs/.*\.md)$")
COMMENT = re.compile(r"(?:^|\s)//+(?! SPDX-)(.*)$")
VAGUE = re.compile(r"\b(who|whom|whose|what|whatever|whoever)\b", re.IGNORECASE)
# A noun in front of "who" or "whose" is its antecedent; these words are none.
NO_ANTECEDENT = set(
    "a all also an and as asks at be because before but by for from has if in is it just knows known no not of on once only or says see so "
    "than that the then there till to told until was were when where which while with without yet".split()
)
TEST = re.compile(r"^\s*(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P|WEFT_TEST\w*)\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)
CODE = re.compile(r"^[A-Z]{1,3}\d+[a-z]?(_|$)")
STRING_OR_COMMENT = re.compile(r'"|//')
COLUMNS = 100


def is_vague(comment):
    """True if one of the words stands without an antecedent, outside a question."""
    for match in VAGUE.finditer(comment):
        rest = comment[match.end() :]
        if re.match(r"[^.;]*\?", rest):
            continue
        before = re.search(r"([\w'-]+)(,?)\s*$", comment[: match.start()])
        has_noun = before and before.group(1).lower() not in NO_ANTECEDENT
        if match.group(1).lower() in ("who", "whom", "whose") and has_noun:
            continue
        return True
    return False


def files_at(root, commit, folders):
    """(path, text) of every tracked file in `folders` (all, if none is named)."""
    listing = ["git", "ls-tree", "-r", "--name-only", commit] if commit else ["git", "ls-files"]
    paths = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    for path in paths:
        if folders and not any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders):
            continue
        if not SOURCE.search(path) and not DOCUMENT.match(path):
            continue
        if commit:
            yield path, subprocess.run(["git", "show", f"{commit}:{path}"], cwd=root, capture_output=True, text=True, check=True).stdout
        elif (root / path).is_file():
            yield path, (root / path).read_text(errors="replace")


class Measures:
    def __init__(self):
        self.comments = 0
        self.vague = []
        self.names = []
        self.coded = []
        self.long = []
        self.document_bytes = 0

    def add(self, path, text):
        document = DOCUMENT.match(path)
        if document:
            self.document_bytes += len(text.encode())
        else:
            for match in TEST.finditer(text):
                self.names.append(match.group(2))
                if CODE.match(match.group(2)) or CODE.match(match.group(1)):
                    self.coded.append(f"{path}: {match.group(1)}.{match.group(2)}")
        for number, line in enumerate(text.splitlines(), 1):
            comment = None if document else COMMENT.search(line)
            if comment:
                self.comments += 1
                if is_vague(comment.group(1)):
                    self.vague.append(f"{path}:{number}: {comment.group(1).strip()}")
            is_text = (document and not line.startswith("|")) or STRING_OR_COMMENT.search(line)
            if is_text and len(line) > COLUMNS:
                self.long.append(f"{path}:{number}: {len(line)} columns")


def measure(root, commit=None, folders=()):
    measures = Measures()
    for path, text in files_at(root, commit, folders):
        measures.add(path, text)
    return measures


def summary(measures):
    share = 100 * len(measures.vague) / max(1, measures.comments)
    median = statistics.median(map(len, measures.names)) if measures.names else 0
    return (
        f"{len(measures.vague)} of {measures.comments} comment lines ({share:.1f} %) have who, whose, what or whatever without an antecedent\n"
        f"{len(measures.coded)} of {len(measures.names)} test names carry a code; their median length is {median:.0f} characters\n"
        f"{len(measures.long)} lines of comments, strings and documents are longer than {COLUMNS} columns\n"
        f"README.md and docs/ have {measures.document_bytes / 1000:.0f} kB"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="measure this commit in place of the working tree")
    parser.add_argument("--list", choices=["comments", "names", "columns"], help="print the lines behind one of the numbers")
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    measures = measure(root, arguments.at, arguments.folders)
    if arguments.list:
        print("\n".join({"comments": measures.vague, "names": measures.coded, "columns": measures.long}[arguments.list]))
    else:
        print(summary(measures))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a folder that weft::checkpoint::save_async() wrote, without Weft.

check_checkpoint.py FOLDER/NUMBER; ends with 1 if something is damaged, and names it. It needs the
package xxhash, unless the checkpoint's checksums are SHA-256. docs/wire.md describes the files.
"""

import hashlib
import json
import pathlib
import sys

CHUNK = 64 << 20  # bytes under one checksum of a slice


def checksum(kind):
    """Returns the function that makes a checksum of bytes."""
    if kind == "sha256":
        return lambda data: hashlib.sha256(data).hexdigest()
    if kind == "xxh3-128":
        try:
            import xxhash
        except ImportError:
            sys.exit("the checksums are XXH3: pip install xxhash")
        return xxhash.xxh3_128_hexdigest
    sys.exit(f"checksums of the kind {kind} are unknown; this program is older than the checkpoint")


def read_manifest(path):
    """Returns the manifest, a JSON object before a line with its own size and checksum."""
    text, line = path.read_bytes().rsplit(b"\nweft-checkpoint ", 1)
    if line.split()[2].decode() != hashlib.sha256(text).hexdigest():
        sys.exit(f"{path} is damaged")
    manifest = json.loads(text)
    if manifest["version"] != 3:
        sys.exit(f"{path} has version {manifest['version']}; this program knows version 3")
    return manifest


def damaged_in(folder, file):
    """Yields what is damaged in a file of the manifest."""
    digest = checksum(file["checksum"])
    with open(folder / file["name"], "rb") as data:
        front = data.read(file["data"])
        if digest(front) != file["header_checksum"]:
            yield "the header"
            return
        header = json.loads(front[8:])
        for part in file["slices"]:
            begin, end = header[part["name"]]["data_offsets"]
            data.seek(file["data"] + begin)
            for expected in part["checksums"]:
                chunk = data.read(min(end - begin, CHUNK))
                begin += len(chunk)
                if digest(chunk) != expected:
                    yield part["name"]
                    break


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
    folder = pathlib.Path(sys.argv[1])
    if not (folder / "manifest").exists():
        sys.exit(f"{folder} has no manifest: it is no checkpoint, or was cut off")
    files = read_manifest(folder / "manifest")["files"]
    count = 0
    for file in files:
        for name in damaged_in(folder, file):
            print(f"{name} in {file['name']} is damaged")
            count += 1
    if count > 0:
        sys.exit(1)
    print(f"{len(files)} files are whole")


main()

#!python
# SPDX-License-Identifier: Apache-2.0
"""Becomes the program of the same name in the package torch_weft, which it does not import."""

import importlib.util
import os
import sys


def folder_of(package):
    spec = importlib.util.find_spec(package)
    return spec.submodule_search_locations[0] if spec else None


def environment(weft, torch):
    """os.environ, with torch's libraries if they are not beside torch_weft."""
    if torch is None or os.path.isdir(os.path.join(weft, "..", "torch", "lib")):
        return os.environ
    known = os.environ.get("LD_LIBRARY_PATH")
    libraries = os.path.join(torch, "lib")
    return {**os.environ, "LD_LIBRARY_PATH": f"{known}:{libraries}" if known else libraries}


weft = folder_of("torch_weft")
if weft is None:
    sys.exit("@PROGRAM@: torch-weft is not installed for this Python: pip install torch-weft")
program = os.path.join(weft, "bin", "@PROGRAM@")
os.execve(program, [program, *sys.argv[1:]], environment(weft, folder_of("torch")))

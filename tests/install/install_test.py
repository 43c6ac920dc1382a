#!/usr/bin/env python3
"""Installs the build into a folder of its own, moves that folder, and builds and runs a separate project against it.

usage: install_test.py BUILD_FOLDER CXX_COMPILER CXX_FLAGS
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

build, compiler, flags = sys.argv[1:4]
project = Path(__file__).parent / "project"


def run(*command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=400, **options)
    if result.returncode != 0:
        sys.exit(f"{command[0]} …: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


with tempfile.TemporaryDirectory() as folder:
    run("cmake", "--install", build, "--prefix", f"{folder}/first")
    prefix = Path(shutil.move(f"{folder}/first", f"{folder}/moved"))
    for header in ("weft/weft.h", "weft/version.h", "weft/group.h", "weft/base/error.h", "weft/engine/parallel/ddp.h"):
        if not (prefix / "include" / header).is_file():
            sys.exit(f"{header} is not installed")
    shutil.copytree(project, f"{folder}/project")
    # A release build whatever ours is: users choose their own.
    settings = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={flags}", "-DCMAKE_BUILD_TYPE="]
    run("cmake", "-G", "Ninja", "-S", f"{folder}/project", "-B", f"{folder}/build", *settings)
    # Where the CUDA toolkit that Weft was built with was pip's, nobody finds one.
    run("cmake", "-G", "Ninja", "-S", f"{folder}/project", "-B", f"{folder}/without", *settings, "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
    run("cmake", "--build", f"{folder}/build")
    output = run(f"{folder}/build/user")
    version, _, output = output.partition("\n")
    if output != "2 ranks\n":
        sys.exit(f"the user's program printed: {output}")
    output = run(prefix / "bin" / "weft-run", "--nproc-per-node", "2", "sh", "-c", "echo rank $RANK")
    if sorted(output.splitlines()) != ["[rank 0] rank 0", "[rank 1] rank 1"]:
        sys.exit(f"the installed weft-run printed: {output}")
    for program in ("weft-run", "weft-agent", "weft-info", "weft-debug", "weft-timeline"):
        output = run(prefix / "bin" / program, "--version")
        if not output.startswith(f"{program} {version}"):
            sys.exit(f"the installed {program} --version printed: {output}; the library is {version}")
    if "tcp" not in run(prefix / "bin" / "weft-info"):
        sys.exit("the installed weft-info knows no tcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    output = run(prefix / "bin" / "weft-run", "--no-prefix", "--rdzv-endpoint", endpoint, "sh", "-c", "echo rank $RANK")
    if output != "rank 0\n":
        sys.exit(f"the installed weft-run, which goes on as weft-agent, printed: {output}")
print("ok")

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the build into a folder of its own, moves that folder, and builds and runs a separate project against it.

usage: install_test.py BUILD_FOLDER CXX_COMPILER CXX_FLAGS LIBRARY MOST_BYTES
  LIBRARY: shared or static, the kind that the build made of libweft
  MOST_BYTES: the largest size of the stripped libweft.so; 0 for no limit, if the build is not optimised
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

build, compiler, flags, library, most_bytes = sys.argv[1:6]
# The programs must find their libraries by themselves.
environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
project = Path(__file__).parent / "project"


def run(*command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=400, env=environment, **options)
    if result.returncode != 0:
        sys.exit(f"{command[0]} …: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def check_exports(path):
    """Checks that libweft.so exports only Weft's symbols, and that it is small enough when stripped."""
    names = [line.split(" ", 2)[2] for line in run("nm", "-DC", "--defined-only", path).splitlines()]
    strange = [name for name in names if "weft::" not in name]
    if not names or strange:
        sys.exit(f"{path} exports {len(names)} symbols, among them these of other namespaces: {strange[:10]}")
    stripped = path.with_name("stripped.so")
    run("strip", "-o", stripped, path)
    if int(most_bytes) and stripped.stat().st_size > int(most_bytes):
        sys.exit(f"{path} has {stripped.stat().st_size} bytes when stripped; the limit is {most_bytes}")
    stripped.unlink()


with tempfile.TemporaryDirectory() as folder:
    run("cmake", "--install", build, "--prefix", f"{folder}/first")
    prefix = Path(shutil.move(f"{folder}/first", f"{folder}/moved"))
    for header in ("weft/weft.h", "weft/version.h", "weft/group.h", "weft/base/error.h", "weft/engine/ddp/ddp.h"):
        if not (prefix / "include" / header).is_file():
            sys.exit(f"{header} is not installed")
    if (prefix / "include/weft/engine/call/core.h").exists():
        sys.exit("engine/call/core.h is installed, although no public header includes it")
    libraries = sorted(path.name for path in (prefix / "lib").iterdir() if path.is_file() and not path.is_symlink())
    if [name.split(".")[:2] for name in libraries] != [["libweft", "so" if library == "shared" else "a"]]:
        sys.exit(f"lib/ has {libraries}, not just one {library} libweft")
    if library == "shared":
        check_exports(prefix / "lib" / libraries[0])
    shutil.copytree(project, f"{folder}/project")
    # A release build, whichever ours is: users choose their own build type.
    settings = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={flags}", "-DCMAKE_BUILD_TYPE="]
    # A user's machine need not have the CUDA toolkit that Weft was built with.
    settings.append("-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
    run("cmake", "-G", "Ninja", "-S", f"{folder}/project", "-B", f"{folder}/build", *settings)
    run("cmake", "--build", f"{folder}/build")
    if library == "shared":
        resolved = run("ldd", f"{folder}/build/user")
        if f"=> {prefix}/lib/libweft.so" not in resolved or "not found" in resolved:
            sys.exit(f"the user's program finds other libraries: {resolved}")
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
        sys.exit(f"the installed weft-run, which continues as weft-agent, printed: {output}")
print("ok")

# SPDX-License-Identifier: Apache-2.0
"""./dev pack: programs with the libraries that they need, to run on other machines."""

import re
import shutil
import subprocess
from pathlib import Path

from .build import build, program
from .checkout import BUILD
from .console import Stop, run, say
from .libtorch import site_packages
from .options import BUILDING, parser_of

# Every Linux of the same age has these; they are never packed.
SYSTEM_LIBRARIES = re.compile(
    r"^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util)\.so\..*|linux-vdso.*)$"
)


def needed_libraries(path):
    """(name, file) of each library that a program or one of its libraries needs."""
    listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True)
    if listed.returncode != 0:
        raise Stop(f"ldd {path}: {listed.stderr.strip()}")
    for line in listed.stdout.splitlines():
        found = re.match(r"\s*(\S+) => (not found|.+?)(?: \(0x|$)", line)
        if found is None or SYSTEM_LIBRARIES.match(found.group(1)):
            continue
        if found.group(2) == "not found":
            raise Stop(f"{path} needs {found.group(1)}, which is not on this machine")
        yield found.group(1), Path(found.group(2))


def opened_libraries(options):
    """Libraries for GPUs that programs open at run time, which ldd does not list.

    Programs open libtorch's CUDA half and NCCL; these open linear algebra, the parts of cuDNN
    (libcudnn.so only loads them) and the run-time compiler.
    """
    if options.cuda == "off":
        return []
    found = []
    for pattern in (
        "torch/lib/libtorch_cuda.so",
        "torch/lib/libtorch_cuda_linalg.so",
        "nvidia/**/libnccl.so.2",
        "nvidia/**/libcudnn_*.so.9",
        "nvidia/**/libnvrtc.so.13",
        "nvidia/**/libnvrtc-builtins.so.13.*",
    ):
        files = sorted(site_packages().glob(pattern))
        if not files:
            raise Stop(
                f"this torch has no {pattern}, which programs open at run time; "
                "--cuda off packs them for CPUs only"
            )
        found += files
    return found


def pack(programs, folder, with_torch, opened=()):
    """Copies programs to bin/, stripped, and their libraries to lib/."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "lib").mkdir(exist_ok=True)
    wheel = str(site_packages())
    for program_path in programs:
        target = folder / "bin" / program_path.name
        shutil.copy2(program_path, target)
        run(["strip", target])
        for name, library in needed_libraries(program_path):
            if (folder / "lib" / name).exists() or (
                not with_torch and str(library).startswith(wheel)
            ):
                continue
            shutil.copy2(library.resolve(), folder / "lib" / name)
    for path in opened:
        for name, library in [(path.name, path), *needed_libraries(path)]:
            if not (folder / "lib" / name).exists():
                shutil.copy2(library.resolve(), folder / "lib" / name)


def command_pack(arguments):
    parser = parser_of("pack", *BUILDING, preset="optimized")
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--output", type=Path, default=BUILD / "pack")
    parser.add_argument(
        "--without-torch",
        action="store_true",
        help="leave torch out: the other machine has the same torch wheel",
    )
    options = parser.parse_intermixed_args(arguments)
    build(options, options.programs)
    opened = [] if options.without_torch else opened_libraries(options)
    pack(
        [program(options, name) for name in options.programs],
        options.output,
        not options.without_torch,
        opened,
    )
    say(f"packed into {options.output}; run with LD_LIBRARY_PATH={options.output}/lib")

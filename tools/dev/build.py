# SPDX-License-Identifier: Apache-2.0
"""Configures and builds with CMake: presets, compilers, build folders."""

import contextlib
import hashlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from .checkout import BUILD, ROOT, lock
from .console import Stop, run, say
from .environment import tools
from .libtorch import home
from .options import BUILDING, parser_of
from .setup import install_system_packages, setup

# clang with precompiled headers compiles Weft in a third of g++'s time (CONTRIBUTING.md has the
# figures). g++, which most users have, builds the presets for installing, packing and measuring.
CLANG_PRESETS = ["dev", "asan", "tsan", "fuzz"]
OLDEST_CLANG, NEWEST_CLANG = 16, 21


def default_compiler(preset):
    return "clang" if preset in CLANG_PRESETS else "gcc"


def compiler_of(options):
    return getattr(options, "compiler", None) or default_compiler(options.preset)


def build_folder(options):
    """The preset's folder; its name ends with the compiler if that is not the preset's default."""
    other = compiler_of(options) != default_compiler(options.preset)
    return home() / (f"{options.preset}-{compiler_of(options)}" if other else options.preset)


def newest_clang():
    """The newest installed clang++ that Weft supports."""
    for version in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1):
        if found := shutil.which(f"clang++-{version}"):
            return Path(found)
    found = shutil.which("clang++")
    said = (
        subprocess.run([found, "--version"], capture_output=True, text=True).stdout if found else ""
    )
    version = re.search(r"clang version (\d+)", said)
    if version is None or int(version.group(1)) < OLDEST_CLANG:
        raise Stop(
            f"no clang++ {OLDEST_CLANG} or newer is installed"
            f"{f' (clang++ is {version.group(1)})' if version else ''}: "
            "install the package clang-19, or give --compiler gcc"
        )
    return Path(found)


def compiler_arguments(options):
    gcc = shutil.which("g++")
    if gcc is None:
        raise Stop(
            "no g++ is installed, whose standard library both compilers use: "
            "install the package build-essential"
        )
    if compiler_of(options) == "gcc":
        return [f"-DCMAKE_CXX_COMPILER={gcc}"]
    return [f"-DCMAKE_CXX_COMPILER={newest_clang()}", f"-DCMAKE_CUDA_HOST_COMPILER={gcc}"]


def configure(options):
    arguments = [*setup(options), *compiler_arguments(options)]
    folder = build_folder(options)
    stamp = folder / ".weft-arguments"
    presets = hashlib.sha256((ROOT / "CMakePresets.json").read_bytes()).hexdigest()
    wanted = "\n".join([*arguments, f"# CMakePresets.json: {presets[:16]}"])
    if (folder / "build.ninja").exists() and stamp.exists() and stamp.read_text() == wanted:
        return  # when a CMake file changes, ninja runs CMake again
    # Start afresh after other arguments or presets, a failure, an interruption or a run of cmake by
    # hand.
    for left in (stamp, folder / "CMakeCache.txt"):
        left.unlink(missing_ok=True)
    run(["cmake", "--preset", options.preset, "-B", folder, *arguments], cwd=ROOT, env=tools())
    stamp.write_text(wanted)


SANITIZED_PRESETS = ("asan", "tsan", "fuzz")


def prepare_sanitizers(options):
    """Installs llvm-symbolizer for clang's sanitizers; warns of a limit of GCC's.

    GCC's sanitizers up to release 13 support at most 28 random bits in an address. On kernels with
    more, programs abort when they start.
    """
    if options.preset not in SANITIZED_PRESETS:
        return
    if compiler_of(options) == "clang":
        with lock("setup"):
            install_system_packages("apt-sanitizers.txt", required=False)
        return
    setting = Path("/proc/sys/vm/mmap_rnd_bits")
    with contextlib.suppress(OSError, ValueError):
        if int(setting.read_text()) > 28:
            say(
                "this kernel's vm.mmap_rnd_bits is above 28: if programs end with 'unexpected "
                "memory mapping', run sudo sysctl vm.mmap_rnd_bits=28"
            )


def build(options, targets=()):
    prepare_sanitizers(options)
    with lock("build"):
        configure(options)
        command = ["cmake", "--build", build_folder(options), "--parallel", options.jobs]
        for target in targets:
            command += ["--target", target]
        run(command, env=tools())


def program(options, name):
    """The path of a built program."""
    for folder in ("bin", "."):
        path = build_folder(options) / folder / name
        if path.exists():
            return path
    raise Stop(f"no program '{name}' in {build_folder(options) / 'bin'}")


def command_build(arguments):
    parser = parser_of("build", *BUILDING)
    parser.add_argument("targets", nargs="*", help="default: everything")
    options = parser.parse_intermixed_args(arguments)
    build(options, options.targets)


def command_install(arguments):
    parser = parser_of("install", *BUILDING, preset="optimized")
    parser.add_argument("folder", type=Path, help="such as ~/weft; weft-run will be in its bin/")
    options = parser.parse_args(arguments)
    folder = options.folder.expanduser().absolute()
    build(options, ["installed"])
    run(
        ["cmake", "--install", build_folder(options), "--prefix", folder],
        env=tools(),
        stdout=subprocess.DEVNULL,
    )
    say(
        f"installed into {folder}; build a program that uses it with "
        f"cmake -B build -DCMAKE_PREFIX_PATH={shlex.quote(str(folder))}"
    )


def command_clean(arguments):
    parser = parser_of("clean")
    parser.add_argument("--all", action="store_true", help="also remove the installed packages")
    options = parser.parse_args(arguments)
    for folder in [BUILD, *BUILD.glob("torch-*")]:
        for path in folder.iterdir() if folder.exists() else []:
            if not options.all and (path.name == "venv" or path.name.startswith("torch-")):
                continue
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

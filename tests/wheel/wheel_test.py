#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs the build into a wheel, installs it into a fresh environment and uses it as the README says.

usage: wheel_test.py pack BUILD_FOLDER             packs twice into BUILD_FOLDER/wheel and compares
       wheel_test.py python BUILD_FOLDER           installs that wheel and uses it from Python
       wheel_test.py first_program BUILD_FOLDER    installs it and builds the README's C++ program
       wheel_test.py installed FOLDER              both, with the wheel in FOLDER/wheel
       wheel_test.py smoke ENVIRONMENT             both, in an environment that has a wheel

The tests' own environments have torch's files by links, so nothing is downloaded or copied.
"""

import contextlib
import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))
from dev import wheel as packer  # noqa: E402

COMMANDS = ["weft-run", "weft-info", "weft-debug", "weft-timeline"]


def run(*command, code=0, **options):
    """The output of a program, which must end with `code`."""
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=560, **options
    )
    if done.returncode != code:
        sys.exit(f"{command[0]} …: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def check(truth, text):
    if not truth:
        sys.exit(text)


def skip(reason):
    print(f"SKIP: {reason}")
    sys.exit(77)  # ctest reports the test as skipped


class Environment:
    """A virtual environment that has the wheel and torch."""

    def __init__(self, folder):
        self.folder = folder
        self.python = folder / "bin" / "python"
        foreign = ("PYTHON", "LD_", "WEFT_", "VIRTUAL_ENV")
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.variables["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"

    def run(self, *command, **options):
        return run(*command, env=self.variables, **options)

    def ask(self, program):
        return self.run(self.python, "-c", program).strip()


def make_environment(folder, wheel):
    """A fresh environment with torch's files by links, and the wheel by pip."""
    python = sys.executable  # of build/venv, which has torch
    run(python, "-m", "venv", "--without-pip", folder)
    site = next(folder.glob("lib/python3.*/site-packages"))
    given = Path(run(python, "-c", "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])").strip())
    for path in given.iterdir():
        if not path.name.startswith(("torch_weft", "pip", "__pycache__")):
            (site / path.name).symlink_to(path)
    fresh = Environment(folder)
    # As `pip install torch-weft --find-links RELEASE`, but never from a network.
    pip = [python, "-m", "pip", "--python", fresh.python, "--disable-pip-version-check", "install", "-q"]
    fresh.run(*pip, "--no-index", "--find-links", wheel.parent, "torch-weft")
    return fresh


@contextlib.contextmanager
def environment(build):
    with tempfile.TemporaryDirectory() as folder:
        yield make_environment(Path(folder) / "venv", wheel_of(build))


def wheel_of(build):
    wheels = list((build / "wheel").glob("torch_weft-*.whl"))
    if not wheels:
        skip(f"{build / 'wheel'} has no wheel: wheel_test.py pack makes it")
    check(len(wheels) == 1, f"{build / 'wheel'} has {len(wheels)} wheels")
    return wheels[0]


def pack(build):
    """Two packs of one build are the same bytes, and name no folder of this machine."""
    for tool in ("auditwheel", "patchelf"):
        if not shutil.which(tool):
            skip(f"no {tool}: ./dev test installs it")
    os.environ["SOURCE_DATE_EPOCH"] = "1767225600"  # else the last commit's, which may change meanwhile
    shutil.rmtree(build / "wheel", ignore_errors=True)
    first = packer.pack_wheel(build, build / "wheel")
    with tempfile.TemporaryDirectory() as folder:
        second = packer.pack_wheel(build, Path(folder))
        check(second.name == first.name, f"packed as {first.name} and then as {second.name}")
        check(second.read_bytes() == first.read_bytes(), differences(first, second))
    print(f"{first.name}: {first.stat().st_size / 1e6:.2f} MB")
    check_contents(first, build)


def differences(first, second):
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as two:
        names = [name for name in one.namelist() if name not in two.namelist() or one.read(name) != two.read(name)]
    return f"two packs differ in {names or 'the order or attributes of their files'}"


def check_contents(wheel, build):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        check(names[:-1] == sorted(names[:-1], key=lambda name: (".dist-info/" in name, name)), "the files are not sorted")
        recorded = next(name for name in names if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(io.StringIO(archive.read(recorded).decode())))
        check([row[0] for row in rows] == names, "RECORD does not list the files of the wheel")
        strays = [name for name in names if str(ROOT).encode() in archive.read(name)]
        check(not strays, f"these files name the folder of the build: {strays}")
        copied = [name for name in names if re.search(r"/lib(torch|c10)[^/]*\.so", name)]
        check(not copied, f"the wheel contains libraries of torch: {copied}")
        for name in ("include/weft/weft.h", "lib/cmake/weft/weftConfig.cmake", "bin/weft-agent", "__init__.py"):
            check(f"torch_weft/{name}" in names, f"the wheel has no torch_weft/{name}")


def python(build):
    """The module, the programs and the backend work in a fresh environment, without an import."""
    with environment(build) as fresh:
        use_from_python(fresh)


def first_program(build):
    """The README's commands build and run its program against the installed wheel."""
    with environment(build) as fresh:
        build_first_program(fresh)


def installed(folder):
    with environment(folder) as fresh:
        use_from_python(fresh)
        build_first_program(fresh)


def smoke(folder):
    fresh = Environment(folder)
    use_from_python(fresh)
    build_first_program(fresh)


def use_from_python(fresh):
    version = packer.weft_version()
    told = fresh.ask("import torch_weft as w; print(w.version, w.cmake_prefix_path, w.include, sep='\\n')").splitlines()
    check(told[0] == version, f"torch_weft.version is {told[0]}, not {version}")
    check((Path(told[1]) / "lib/cmake/weft/weftConfig.cmake").is_file(), f"nothing to find in {told[1]}")
    check((Path(told[2]) / "weft/weft.h").is_file(), f"no weft/weft.h in {told[2]}")
    for name in COMMANDS:
        output = fresh.run(name, "--version")
        check(output.startswith(f"{name} {version}"), f"{name} --version printed: {output}")
    check("tcp" in fresh.run("weft-info"), "weft-info lists no tcp")
    check_backend(fresh)
    check_other_torch(fresh)


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("weft")
mine = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(mine)
assert mine.eq(3).all(), mine
dist.barrier()
if dist.get_rank() == 0: print("sum", int(mine[0]))
dist.destroy_process_group()
"""


def check_backend(fresh):
    for launcher in (["weft-run", "--no-prefix"], [fresh.python, "-m", "torch.distributed.run", "--standalone"]):
        with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
            program.write(PROGRAM)
            program.flush()
            command = [] if "-m" in launcher else [fresh.python]
            output = fresh.run(*launcher, "--nproc-per-node", "2", *command, program.name)
        check("sum 3\n" in output, f"{launcher[0]} printed: {output}")


def check_other_torch(fresh):
    """With another minor release of torch the backend says which one it wants."""
    output = fresh.ask(
        "import torch, torch.distributed as dist\n"
        "torch.__version__ = '2.99.1+cpu'\n"
        "try: dist.init_process_group('weft', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "except RuntimeError as error: print(error)"
    )
    for words in ("was built for torch", "torch 2.99.1+cpu is installed"):
        check(words in output, f"with torch 2.99.1 init_process_group printed: {output}")


def blocks(document, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def build_first_program(fresh):
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        source = next(block for block in blocks("README.md", "cpp") if "int main()" in block)
        (project / "train.cc").write_text(source)
        (project / "CMakeLists.txt").write_text(next(block for block in blocks("docs/start.md", "cmake") if "find_package" in block))
        commands = next(block for block in blocks("README.md", "sh") if "torch_weft.cmake_prefix_path" in block)
        check(len(commands.replace("\\\n", "").splitlines()) == 3, f"the README says three commands: {commands}")
        begin = time.monotonic()
        output = fresh.run("sh", "-euxc", commands, cwd=project)
        check("step 200: loss" in output, f"the README's program printed: {output}")
        print(f"compiled and run in {time.monotonic() - begin:.0f} s")
        (listed,) = (project / "build").rglob("train.cc.o.d")
        included = re.findall(r"/\S+/(?:msgpack|spdlog|fmt|nlohmann|prometheus)\S*", listed.read_text())
        strays = [header for header in included if "/torch_weft/include/" not in header and "/torch/include/" not in header]
        check(not strays, f"the program includes headers that are not in the wheel: {strays[:5]}")
        needed = fresh.run("ldd", project / "build" / "train")
        check("not found" not in needed, f"the program misses libraries: {needed}")


if __name__ == "__main__":
    tests = [pack, python, first_program, installed, smoke]
    {test.__name__: test for test in tests}[sys.argv[1]](Path(sys.argv[2]).resolve())

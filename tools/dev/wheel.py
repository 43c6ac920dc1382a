# SPDX-License-Identifier: Apache-2.0
"""./dev wheel: packs the installed library, its programs and the Python module into a wheel."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

from .build import build, build_folder
from .checkout import BUILD, ROOT
from .console import Stop, run, say
from .environment import tools
from .options import BUILDING, parser_of

INSTALLED = ["weft-run", "weft-agent", "weft-info", "weft-debug", "weft-timeline"]
ON_PATH = [name for name in INSTALLED if name != "weft-agent"]  # weft-run starts weft-agent
MOST_WHEEL_BYTES = 12_000_000  # of an optimised build
# torch's own wheel has these beside torch_weft; auditwheel leaves them out of Weft's.
TORCHS = ["libtorch*.so*", "libc10*.so*", "libshm.so*"]
# Debian's packages of the libraries whose code is in the wheel.
CONTAINED = [
    "libcivetweb1",
    "libcli11-dev",
    "libfmt-dev",
    "libiberty-dev",
    "libmsgpack-cxx-dev",
    "libprometheus-cpp-core1.0",
    "libspdlog-dev",
    "libssl-dev",
    "libxxhash-dev",
    "nlohmann-json3-dev",
]
COMMAND_SCRIPT = ROOT / "python" / "weft_command.py"


class Built:
    """What a build folder says about its build."""

    def __init__(self, folder):
        self.folder = folder
        self.cache = dict(
            re.findall(
                r"^([\w-]+):\w+=(.*)$", (folder / "CMakeCache.txt").read_text(), re.MULTILINE
            )
        )
        self.version = weft_version()
        header = Path(self.cache["Libtorch_INCLUDE_DIR"]) / "torch/headeronly/version.h"
        numbers = re.findall(
            r"define TORCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header.read_text()
        )
        self.torch = ".".join(numbers)
        self.torch_minor = ".".join(numbers[:2])
        kind = self.cache["CMAKE_BUILD_TYPE"].upper()
        flags = self.cache.get(f"CMAKE_CXX_FLAGS_{kind}", "")
        self.optimised = re.search(r"-O[23s]", flags) is not None
        if self.cache.get("WEFT_SANITIZE"):
            raise Stop(f"{folder.name} is built with sanitizers, which Python's interpreter is not")
        if self.cache.get("WEFT_SHARED", "ON") != "ON":
            raise Stop(f"{folder.name} has no shared library: a wheel needs WEFT_SHARED=ON")

    @property
    def name(self):
        """Distribution and version, such as torch_weft-0.1.0+torch215.

        For pip any build that is not optimised is older than any that is.
        """
        local = f"torch{self.torch_minor.replace('.', '')}"
        return f"torch_weft-{self.version}+{'' if self.optimised else 'debug.'}{local}"


def weft_version():
    """MAJOR.MINOR.PATCH, which only base/version.h states."""
    lines = (ROOT / "base" / "version.h").read_text()
    return ".".join(re.findall(r"define WEFT_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", lines))


def python_tag(module):
    """The tags of CPython and its ABI, such as cp311-cp311, from the extension's file name.

    The extension uses pybind11's classes, which CPython's stable ABI does not cover.
    """
    found = next(module.glob("_weft.cpython-*.so"), None)
    number = found and re.match(r"_weft\.cpython-(\d+)-", found.name)
    if not number:
        raise Stop(f"{module} has no extension _weft: build with WEFT_PYTHON=ON")
    return f"cp{number.group(1)}-cp{number.group(1)}"


def text_of(command):
    """The output of a program."""
    done = subprocess.run(
        [str(part) for part in command], env=tools(), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Stop(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def set_rpath(path, *folders):
    """Makes a library or program find libraries relative to itself only."""
    run(
        ["patchelf", "--set-rpath", ":".join(f"$ORIGIN/{folder}" for folder in folders), path],
        env=tools(),
    )


def install(built, package):
    """Installs the build and its Python module as the package torch_weft."""
    shutil.copytree(
        built.folder / "python" / "torch_weft",
        package,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    text_of(["cmake", "--install", built.folder, "--prefix", package, "--strip"])
    for extension in package.glob("_weft.*.so"):
        run(["strip", extension], env=tools())
        set_rpath(extension, "lib", "../torch/lib")
    for name in INSTALLED:
        set_rpath(package / "bin" / name, "../../torch/lib")
    copy_msgpack(built, package / "include")
    one_library(package / "lib")
    set_rpath(next((package / "lib").glob("libweft.so.*")), "../../torch/lib")
    set_config(package / "lib" / "cmake" / "weft" / "weftConfig.cmake")


def copy_msgpack(built, folder):
    """Copies the headers of msgpack-cxx that Weft's headers include, which a user may not have."""
    root = built.cache["WEFT_MSGPACK_INCLUDE_DIR"]
    listing = ["-std=c++20", "-DMSGPACK_NO_BOOST", "-idirafter", root, "-M", f"{root}/msgpack.hpp"]
    listed = text_of([built.cache["CMAKE_CXX_COMPILER"], *listing])
    for name in set(re.findall(rf"{re.escape(root)}/(msgpack\S+)", listed)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(root) / name, folder / name)


def one_library(folder):
    """Replaces the links to libweft.so, which a wheel cannot contain, by one file.

    Its name is the one that programs ask for. libweft.so becomes a linker's script.
    """
    whole = next(path for path in folder.glob("libweft.so.*") if not path.is_symlink())
    (asked,) = re.findall(r"\(SONAME\).*\[(.+)\]", text_of(["readelf", "-d", whole]))
    for link in folder.glob("libweft.so*"):
        if link.is_symlink():
            link.unlink()
    whole.rename(folder / asked)
    (folder / "libweft.so").write_text(f"INPUT({asked})\n")
    targets = next((folder / "cmake" / "weft").glob("weftTargets-*.cmake"))
    text = targets.read_text()
    if f"lib/{whole.name}" not in text:
        raise Stop(f"{targets.name} does not name lib/{whole.name}")
    targets.write_text(text.replace(f"lib/{whole.name}", f"lib/{asked}"))


def set_config(path):
    """Makes find_package(weft) forget the torch of the build, which only this machine has."""
    text, changed = re.subn(
        r'^set\(built_with ".*"\)$', 'set(built_with "")', path.read_text(), flags=re.MULTILINE
    )
    if changed != 1:
        raise Stop(f"{path.name} does not say which torch the build used")
    path.write_text(text)


METADATA = """\
Metadata-Version: 2.1
Name: torch-weft
Version: {version}
Summary: torch.distributed in C++, its programs, and a backend of torch.distributed for Python
License: Apache-2.0
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C++
Classifier: Programming Language :: Python :: Implementation :: CPython
Requires-Python: =={python}.*
Requires-Dist: torch >={torch}.0, <{next_torch}
Description-Content-Type: text/markdown

"""


def write_metadata(built, info, tag):
    """Writes what pip reads, but for RECORD."""
    info.mkdir()
    major, minor = built.torch_minor.split(".")
    python = re.sub(r"^cp(\d)(\d+)-.*$", r"\1.\2", tag)
    head = METADATA.format(
        version=built.name.partition("-")[2],
        python=python,
        torch=built.torch_minor,
        next_torch=f"{major}.{int(minor) + 1}",
    )
    (info / "METADATA").write_text(head + (ROOT / "README.md").read_text())
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: weft-dev\nRoot-Is-Purelib: false\n"
        f"Tag: {tag}-linux_{os.uname().machine}\n"
    )
    shutil.copy2(ROOT / "python" / "torch_weft" / "entry_points.txt", info)
    copy_licences(info / "licenses")


def copy_licences(folder):
    """Copies Weft's licence, and those of the libraries whose code is inside, which ask for it."""
    folder.mkdir()
    shutil.copy2(ROOT / "LICENSE", folder)
    for package in CONTAINED:
        text = Path("/usr/share/doc") / package / "copyright"
        if text.exists():
            shutil.copyfile(text, folder / f"{package}.txt")
        else:
            say(f"{text} is missing: the wheel is without this licence, so do not publish it")


def write_commands(folder):
    """Writes the programs that pip puts on PATH."""
    folder.mkdir(parents=True)
    for name in ON_PATH:
        (folder / name).write_text(COMMAND_SCRIPT.read_text().replace("@PROGRAM@", name))
        (folder / name).chmod(0o755)


def source_date():
    """The time that all files in a wheel have: SOURCE_DATE_EPOCH, or the last commit's."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if not given:
        commit = subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True
        )
        given = commit.stdout.strip() or "315532800"  # 1980, as far back as a zip file goes
    return time.gmtime(max(int(given), 315532800))[:6]


def write_wheel(tree, path):
    """Writes a folder as a wheel: sorted, with equal times, RECORD last."""
    (info,) = tree.glob("*.dist-info")
    record = info / "RECORD"
    record.unlink(missing_ok=True)
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(file, data):
            name = file.relative_to(tree).as_posix()
            entry = zipfile.ZipInfo(name, source_date())
            entry.compress_type = zipfile.ZIP_DEFLATED
            executable = file.exists() and os.access(file, os.X_OK)
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")

        files = [file for file in tree.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: (info in file.parents, file.as_posix())):
            add(file, file.read_bytes())
        lines.append(f"{record.relative_to(tree).as_posix()},,")
        add(record, ("\n".join(lines) + "\n").encode())


def repair(raw, folder):
    """Lets auditwheel add the libraries that are not torch's, and find the tag of the platform."""
    excluded = [word for pattern in TORCHS for word in ("--exclude", pattern)]
    text_of(["auditwheel", "repair", *excluded, "--wheel-dir", folder, raw])
    (repaired,) = folder.glob("*.whl")
    return repaired


def pack_wheel(folder, output):
    """Packs a build folder; returns the wheel's path."""
    built = Built(folder)
    tag = python_tag(folder / "python" / "torch_weft")
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        tree = work / "tree"
        tree.mkdir()
        install(built, tree / "torch_weft")
        write_commands(tree / f"{built.name}.data" / "scripts")
        write_metadata(built, tree / f"{built.name}.dist-info", tag)
        raw = work / f"{built.name}-{tag}-linux_{os.uname().machine}.whl"
        write_wheel(tree, raw)
        repaired = repair(raw, work / "repaired")
        # auditwheel's own archive is packed once more, so that only this file decides its bytes.
        shutil.rmtree(tree)
        unpack(repaired, tree)
        output.mkdir(parents=True, exist_ok=True)
        wheel = output / repaired.name
        write_wheel(tree, wheel)
    if built.optimised and wheel.stat().st_size > MOST_WHEEL_BYTES:
        raise Stop(f"{wheel} has {wheel.stat().st_size} bytes; the limit is {MOST_WHEEL_BYTES}")
    return wheel


def unpack(wheel, folder):
    """Unpacks a wheel with the permissions of its files."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = Path(archive.extract(entry, folder))
            if entry.external_attr >> 16 & 0o111:
                path.chmod(0o755)


def command_wheel(arguments):
    parser = parser_of("wheel", *BUILDING, preset="optimized")
    parser.add_argument("--output", type=Path, default=BUILD / "wheels")
    options = parser.parse_args(arguments)
    build(options, ["installed", "weft_python"])
    wheel = pack_wheel(build_folder(options), options.output.absolute())
    say(f"packed {wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")

# SPDX-License-Identifier: Apache-2.0
"""Installs system packages, the venv, nvcc and the programs that tests run."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from . import libtorch
from .checkout import PROGRAMS, ROOT, lock
from .console import Stop, run, say
from .environment import tools
from .libtorch import site_packages, venv, wheels_cuda
from .options import BUILDING, parser_of

REQUIREMENTS = ROOT / "cmake" / "requirements"


def lines_of(path):
    """The entries of a requirements file, without comments."""
    text = path.read_text().splitlines()
    return [line.strip() for line in text if line.strip() and not line.startswith("#")]


def install_system_packages(file="apt.txt", required=True):
    """Installs the packages of a requirements file.

    If they are not required, a package that cannot be installed is reported and left out.
    """
    if not shutil.which("dpkg-query"):
        say(f"no dpkg here: install the packages of cmake/requirements/{file} by hand")
        return
    wanted = lines_of(REQUIREMENTS / file)
    query = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted],
        capture_output=True,
        text=True,
    )
    present = {line.split()[0] for line in query.stdout.splitlines() if line.endswith(" installed")}
    missing = [package for package in wanted if package not in present]
    if not missing:
        return
    say(f"installing system packages: {' '.join(missing)}")
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
    try:
        if sudo and not shutil.which("sudo"):
            raise Stop(f"as root, run: apt-get install {' '.join(missing)}")
        run(
            [*sudo, *environment, "dpkg", "--configure", "-a"], stdout=subprocess.DEVNULL
        )  # repairs an interrupted install
        run([*sudo, *environment, "apt-get", "-q", "update"], stdout=subprocess.DEVNULL)
        install = [*sudo, *environment, "apt-get", "-qy", "install", "--no-install-recommends"]
        # Packages that are not required are installed one by one, since each may fail.
        for some in [missing] if required else [[package] for package in missing]:
            try:
                run([*install, *some], stdout=subprocess.DEVNULL)
            except Stop as stop:
                if required:
                    raise
                say(f"{some[0]} could not be installed: {stop}")
    except Stop as stop:
        if required:
            raise
        say(f"continuing without {', '.join(missing)}: {stop}")


def fetch_programs(*packages):
    """Unpacks programs that tests run under build/.

    Installing their packages would start services on this machine.
    """
    missing = [package for package in packages if not shutil.which(package, path=tools()["PATH"])]
    if not missing or not shutil.which("apt-get"):
        return
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    for package in missing:
        whole, part = PROGRAMS / package, PROGRAMS / f"{package}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        say(f"unpacking {package}, which tests run, under {PROGRAMS.relative_to(ROOT)}/")
        got = subprocess.run(
            ["apt-get", "-q", "download", package], cwd=part, capture_output=True, text=True
        )
        archives = sorted(part.glob("*.deb"))
        if got.returncode != 0 or not archives:
            say(
                f"continuing without {package}, whose tests will be skipped: "
                f"{got.stderr.strip()[-300:]}"
            )
            continue
        run(["dpkg", "-x", archives[-1], part])
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)  # so that `whole` is complete if it exists


def venv_starts():
    """False if the venv's programs do not start.

    They contain absolute paths: moving the checkout or replacing its Python breaks them.
    """
    try:
        return all(
            subprocess.run([venv() / "bin" / name, "--version"], capture_output=True).returncode
            == 0
            for name in ("python", "pip")
        )
    except OSError:
        return False


def install_venv(name, packages, dependencies=True):
    """Makes the venv where necessary and installs packages into it.

    The stamp is written last, so that an interrupted run is repeated. Without its dependencies
    torch is a fifth of the size; programs compile against it but do not run.
    """
    if not venv_starts():
        say(f"making the venv {venv().relative_to(ROOT)}")
        shutil.rmtree(venv(), ignore_errors=True)
        run([sys.executable, "-m", "venv", venv()])
    digest = hashlib.sha256("\n".join(packages).encode()).hexdigest()[:16]
    stamp = venv() / f".weft-{name}-{digest}"
    if stamp.exists():
        return
    pip = [venv() / "bin" / "python", "-m", "pip"]
    say(f"installing Python packages: {', '.join(packages)} (the first time takes minutes)")
    run(
        [
            *pip,
            "install",
            "-q",
            "--disable-pip-version-check",
            *([] if dependencies else ["--no-deps"]),
            *packages,
        ]
    )
    for old in venv().glob(f".weft-{name}-*"):
        old.unlink()
    stamp.touch()


def requirements(file):
    """The packages that a requirements file names, with the chosen release of torch."""
    return [
        f"torch=={libtorch.torch_version}" if line.startswith("torch==") else line
        for line in lines_of(REQUIREMENTS / file)
    ]


def system_nvcc():
    """The system's nvcc if it is of CUDA 13, as the torch wheels are, else None.

    Weft links no library of CUDA, so the minor releases may differ.
    """
    for candidate in [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]:
        if candidate and Path(candidate).exists():
            text = subprocess.run([candidate, "--version"], capture_output=True, text=True).stdout
            release = re.search(r"release (\d+)\.", text)
            if release and int(release.group(1)) == 13:
                return Path(candidate).resolve()
    return None


def pip_nvcc():
    file = f"pip-cuda-{wheels_cuda()}.txt"
    if not (REQUIREMENTS / file).exists():
        raise Stop(
            f"torch {libtorch.torch_version} needs CUDA {wheels_cuda()}, and there is no "
            f"cmake/requirements/{file}: --cuda system uses the system's nvcc, "
            "--cuda off builds without CUDA"
        )
    install_venv("cuda", requirements(file))
    root = site_packages() / "nvidia" / "cu13"
    link = root / "lib" / "libcudart.so"  # linkers need this name, which the wheel lacks
    if not link.exists():
        link.symlink_to("libcudart.so.13")
    library_folder = root / "lib64"
    if not library_folder.exists():
        library_folder.symlink_to("lib")
    return root / "bin" / "nvcc"


def setup(options):
    """Installs what a build needs; returns the CMake arguments that say where it is."""
    with lock("setup"):
        install_system_packages()
        if getattr(options, "compiles_only", False):
            install_venv("compiling", requirements("pip.txt"), dependencies=False)
        else:
            install_venv("base", requirements("pip.txt"))
        nvcc = None
        if options.cuda in ("auto", "system"):
            nvcc = system_nvcc()
            if nvcc is None and options.cuda == "system":
                raise Stop(
                    "--cuda system: no nvcc of CUDA 13 on PATH or in /usr/local/cuda; "
                    "use --cuda pip"
                )
        if options.cuda == "pip" or (options.cuda == "auto" and nvcc is None):
            nvcc = pip_nvcc()
    arguments = [
        f"-DWEFT_TORCH_ROOT={site_packages() / 'torch'}",
        f"-DPython3_EXECUTABLE={venv() / 'bin' / 'python'}",
    ]
    if nvcc is None:
        return [*arguments, "-DWEFT_CUDA=OFF", "-DWEFT_NCCL=OFF"]
    root = nvcc.parent.parent
    return [
        *arguments,
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCUDAToolkit_ROOT={root}",
        f"-DNCCL_ROOT={site_packages() / 'nvidia' / 'nccl'}",
    ]


def command_setup(arguments):
    parser = parser_of("setup", *BUILDING)
    parser.add_argument(
        "--tests",
        action="store_true",
        help="also install programs that some tests run; some of them start services",
    )
    options = parser.parse_args(arguments)
    setup(options)
    if options.tests:
        with lock("setup"):
            install_system_packages("apt-services.txt", required=False)
    say("everything that a build needs is installed")

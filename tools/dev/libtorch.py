# SPDX-License-Identifier: Apache-2.0
"""The libtorch release that ./dev installs and builds with, and the venv that holds it."""

import re

from .checkout import BUILD
from .console import Stop

DEFAULT_TORCH = "2.15.0"
OLDEST_TORCH = "2.11"

# ./dev --torch changes it. Other modules read it as libtorch.torch_version.
torch_version = DEFAULT_TORCH


def choose_torch(version):
    global torch_version
    oldest = tuple(int(number) for number in OLDEST_TORCH.split("."))
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Stop(f"--torch {version}: give all three numbers, such as --torch {DEFAULT_TORCH}")
    if tuple(int(number) for number in version.split(".")[:2]) < oldest:
        raise Stop(
            f"--torch {version}: Weft needs libtorch {OLDEST_TORCH} or newer "
            "(docs/compatibility.md)"
        )
    torch_version = version


def home():
    """The folder of the venv and the builds of the chosen libtorch release."""
    return BUILD if torch_version == DEFAULT_TORCH else BUILD / f"torch-{torch_version}"


def venv():
    return home() / "venv"


def site_packages():
    return next((venv() / "lib").glob("python3.*/site-packages"), venv() / "missing")


def wheels_cuda():
    """The CUDA release that the installed torch wheel depends on, such as 13.2."""
    found = next(site_packages().glob("cuda_toolkit-*.dist-info"), None)
    release = found and re.match(r"cuda_toolkit-(\d+\.\d+)\.", found.name)
    if not release:
        raise Stop(
            f"torch {torch_version} depends on no CUDA toolkit: --cuda system uses the system's "
            "nvcc, --cuda off builds without CUDA"
        )
    return release.group(1)

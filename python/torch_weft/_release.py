# SPDX-License-Identifier: Apache-2.0
"""The release of this package, the torch that it was built for, and where its C++ library is.

It imports nothing of torch but its version, so it works with a torch for which Weft was not built.
"""

from pathlib import Path

from ._built import TORCH, TORCH_MINOR, VERSION

_PACKAGE = Path(__file__).resolve().parent

version = VERSION
# What CMake's CMAKE_PREFIX_PATH needs for find_package(weft), and the folder of <weft/weft.h>. A
# module that was built without being packed into a wheel has neither.
cmake_prefix_path = str(_PACKAGE)
include = str(_PACKAGE / "include")


def wheel_for(torch_minor):
    """The version of the wheel for a minor release of torch, such as 0.1.0+torch215."""
    return f"{VERSION}+torch{torch_minor.replace('.', '')}"


def check_torch(installed=None):
    """Raises ImportError unless the installed torch is of the release that Weft was built for.

    The C++ classes of torch are laid out differently in each minor release, so another one would
    crash. `installed` is the version to check, for tests.
    """
    if installed is None:
        from torch.version import __version__ as installed
    minor = ".".join(installed.split(".")[:2])
    if minor == TORCH_MINOR:
        return
    raise ImportError(
        f"this torch-weft {wheel_for(TORCH_MINOR)} was built for torch {TORCH_MINOR} (with {TORCH}), and "
        f"torch {installed} is installed, whose C++ classes are laid out differently. Install torch "
        f"{TORCH_MINOR} (pip install 'torch=={TORCH_MINOR}.*'), or the Weft for this torch: "
        f"pip install 'torch-weft=={wheel_for(minor)}' --find-links RELEASE, if the release has it",
        name="torch_weft",
    )

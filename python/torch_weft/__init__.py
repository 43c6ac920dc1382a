# SPDX-License-Identifier: Apache-2.0
"""Weft for Python: the backend "weft" of torch.distributed, and where the C++ library is.

torch.distributed finds the backend by an entry point, so a program need not import this module. It
holds the exceptions of the backend, and for C++ projects `include` and `cmake_prefix_path`.
"""

from pathlib import Path

from torch_weft._build import TORCH as torch_version
from torch_weft._build import VERSION as version

__version__ = version

# Given to CMake as CMAKE_PREFIX_PATH, find_package(weft) finds the C++ library.
cmake_prefix_path = str(Path(__file__).absolute().parent)
# The folder that holds weft/weft.h.
include = str(Path(__file__).absolute().parent / "include")


def register():
    """Tells torch.distributed of the backend "weft".

    Only needed with TORCH_DEVICE_BACKEND_AUTOLOAD=0, where PyTorch calls no entry points.
    """
    from torch_weft import _entry

    _entry.register()


_ERRORS = ("Error", "PeerLost", "Timeout", "CallerError", "Unsupported")

__all__ = ["version", "torch_version", "cmake_prefix_path", "include", "register", *_ERRORS]


def __getattr__(name):
    # The exceptions are subclasses of torch's, which is imported only when they are asked for.
    if name in _ERRORS:
        from torch_weft import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'torch_weft' has no attribute '{name}'")


def __dir__():
    return sorted([*globals(), *_ERRORS])

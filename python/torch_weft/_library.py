# SPDX-License-Identifier: Apache-2.0
"""Loads the extension module, once, when the first process group is made."""

import atexit
import os
import sys
import threading

from torch_weft import _build

_weft = None


def load():
    """Returns the extension module. Raises RuntimeError if torch is of another release."""
    global _weft
    if _weft is None:
        _require_release()
        from torch_weft import _weft as module

        _follow_main_thread(module)
        atexit.register(_leave, module)
        _weft = module
    return _weft


def _release(version):
    return version.split("+")[0].split(".")[:2]


def _require_release():
    import torch

    if _release(torch.__version__) == _release(_build.TORCH):
        return
    wanted, found = ".".join(_release(_build.TORCH)), ".".join(_release(torch.__version__))
    raise RuntimeError(
        f"this torch_weft {_build.VERSION} was built for torch {wanted}, and torch {torch.__version__} "
        "is installed: libtorch's classes differ between releases. Install the torch-weft that was "
        f"built for torch {found}, or torch {wanted}.*"
    )


def _follow_main_thread(module):
    def tell():
        module.set_main_thread(threading.main_thread().ident)

    tell()
    os.register_at_fork(after_in_child=tell)


def _leave(module):
    # An exception that nobody caught ends the process as if it had been killed: the other ranks
    # learn of it at once. Otherwise this rank waits until they have what they need of it.
    is_well = getattr(sys, "last_value", None) is None
    try:
        module.leave_all(is_well)
    except BaseException:  # Ctrl-C
        module.leave_all(False)
        raise

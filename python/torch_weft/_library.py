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
        _follow_exceptions(module)
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


def _follow_exceptions(module):
    # The process may live on for long after an exception that nobody caught: Python waits for
    # threads, which may wait for other ranks, and runs what other modules do at its end.
    shown_before = sys.excepthook

    def show(kind, error, trace):
        is_the_end = not hasattr(sys, "ps1") and not sys.flags.interactive  # no prompt follows
        try:
            if is_the_end:
                module.leave_by_exception()
        finally:
            shown_before(kind, error, trace)

    sys.excepthook = show


def _leave(module):
    # After an exception that nobody caught, this rank waits for nobody. Otherwise it waits until
    # the other ranks have what they need of it.
    is_well = getattr(sys, "last_value", None) is None
    try:
        module.leave_all(is_well)
    except BaseException:  # Ctrl-C
        module.leave_all(False)
        raise

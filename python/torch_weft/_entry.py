# SPDX-License-Identifier: Apache-2.0
"""The entry point that torch calls at the end of `import torch`."""

import os
import warnings


def register():
    """Tells torch.distributed of the backend "weft". Loads no library. A failure only warns, since an
    exception here would end `import torch`."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "weft" not in dist.Backend.backend_list:
            dist.Backend.register_backend("weft", _create, extended_api=True, devices=["cpu", "cuda"])
            _leave_recording_to_weft(dist.distributed_c10d)
    except Exception as error:
        warnings.warn(f"torch.distributed has no backend 'weft': {error!r}", stacklevel=2)


def _leave_recording_to_weft(c10d):
    """Weft's flight recorder keeps each operation. PyTorch's, which since 2.15 also keeps the calls of
    backends from elsewhere, with their stacks, takes longer than a small operation does: only a
    program that sets its size before `import torch` has both."""
    is_asked = "TORCH_FR_BUFFER_SIZE" in os.environ or "TORCH_NCCL_TRACE_BUFFER_SIZE" in os.environ
    recorders = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(recorders, set) and not is_asked:
        recorders.add("weft")


def _create(options, backend_options=None):
    from torch_weft import _library

    return _library.load().create(options)

# SPDX-License-Identifier: Apache-2.0
"""The entry point that torch calls at the end of `import torch`."""

import warnings


def register():
    """Tells torch.distributed of the backend "weft". Loads no library. A failure only warns, since an
    exception here would end `import torch`."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "weft" not in dist.Backend.backend_list:
            dist.Backend.register_backend("weft", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        warnings.warn(f"torch.distributed has no backend 'weft': {error!r}", stacklevel=2)


def _create(options, backend_options=None):
    from torch_weft import _library

    return _library.load().create(options)

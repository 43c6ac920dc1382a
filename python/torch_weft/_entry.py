# SPDX-License-Identifier: Apache-2.0
"""The entry point that torch calls at the end of `import torch`."""


def register():
    """Tells torch.distributed of the backend "weft". Loads no library, and never raises."""
    import torch.distributed as dist

    if not dist.is_available() or "weft" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("weft", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options, backend_options=None):
    from torch_weft import _library

    return _library.load().create(options)

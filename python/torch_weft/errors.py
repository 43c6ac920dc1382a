# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the backend. Each text names the operation and the ranks.

`ranks` holds the ranks that are lost or have not come, as ranks of the group that raised the error;
`operation` is the call, as Weft names it ("all_reduce").
"""

from torch.distributed import DistBackendError, DistNetworkError


class Error(DistBackendError):
    """What Weft raises. The subclasses say what to do about it."""

    def __init__(self, text="", ranks=None, operation=None):
        super().__init__(text)
        if ranks is None:
            from torch_weft import _weft

            ranks, operation = _weft.facts_of(str(text)) or ([], operation or "")
        self.ranks = list(ranks)
        self.operation = operation or ""

    def __reduce__(self):
        return type(self), (str(self), self.ranks, self.operation)


class PeerLost(Error, DistNetworkError):
    """A rank died or cannot be reached: make a new group of the ranks that live."""


class Timeout(Error, DistNetworkError):
    """A time limit passed; `ranks` did not come."""


class CallerError(Error, ValueError):
    """The call is wrong on this rank, or does not fit those of other ranks."""


class Unsupported(CallerError):
    """Weft cannot do it: convert the tensor, or choose another operator or backend."""

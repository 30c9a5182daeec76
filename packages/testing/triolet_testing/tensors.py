"""The tensors that are alive in this process. An executor's books are compared with them.

On the CPU, torch keeps no count such as `torch.cuda.memory_allocated`. Python's tensor objects are counted instead. The
garbage collector knows each of them, even when it is off, and each refers to its storage. Tensors that only C++ holds
are not counted.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import UntypedStorage


def live_storages() -> dict[int, UntypedStorage]:
    """Returns the storages of all tensors that are alive, by identity, without empty ones. Objects that `gc.freeze` has
    set apart are not found."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}  # a process that has not imported torch has no tensors
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.UntypedStorage):
            storage = one
        elif issubclass(type(one), torch.Tensor) and one.layout is torch.strided:
            storage = one.untyped_storage()
        else:
            continue
        if storage.nbytes():
            found[storage._cdata] = storage
    return found


def live_bytes() -> int:
    """Returns the bytes of all tensors that are alive; a shared storage counts once."""
    return sum(storage.nbytes() for storage in live_storages().values())

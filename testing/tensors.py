"""The tensors that are alive in this process: the truth that an executor's books are compared with.

On the CPU, torch keeps no count such as `torch.cuda.memory_allocated`. Python's tensor objects are counted instead: the
collector, switched on or off, knows each, and each leads to its storage. Tensors that only C++ holds are not counted.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import UntypedStorage


def live_storages() -> dict[int, UntypedStorage]:
    """The storages of all tensors that live now, by identity, without empty ones. Objects that `gc.freeze` has set
    apart are not seen."""
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
    """Bytes of all tensors that live now, each storage once."""
    return sum(storage.nbytes() for storage in live_storages().values())

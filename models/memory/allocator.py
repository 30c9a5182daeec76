"""Memory of the operating system: the return of freed memory, which the C library would keep for later use, and large
pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from functools import cache
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `trim` is imported before an engine starts, and torch takes seconds
    import torch
    from torch import Tensor

ROOMY = 16 << 20  # bytes of a tensor that fills large pages alone


def trim() -> None:
    """Returns free memory of the C library to the operating system. The call takes milliseconds; it does nothing if the
    C library is not GNU's."""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Looks the function up once. Each look-up creates classes that only the garbage collector frees."""
    if platform.libc_ver()[0] != "glibc":
        return None
    found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    return found


def large_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Returns a new tensor. On the CPU of Linux it asks for large pages (admin-guide/mm/transhuge of the kernel): the
    processor then finds addresses faster, above all on virtual machines. What the system does not give in large pages
    it gives in small ones."""
    import torch

    made = torch.empty(shape, dtype=dtype, device=device)
    advise = _madvise()
    if made.device.type == "cpu" and advise is not None:
        start, end = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE, made.data_ptr() + made.nbytes
        if start < end:
            advise(start, end - start, mmap.MADV_HUGEPAGE)  # only an advice: a kernel without large pages refuses it
    return made


def roomy_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a new tensor on the CPU, in large pages if it fills some alone: it has `ROOMY` bytes or more."""
    import torch

    roomy = prod(shape) * dtype.itemsize >= ROOMY
    return large_empty(shape, dtype) if roomy else torch.empty(shape, dtype=dtype)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Looks the function up once, as `_malloc_trim` does. ``None``: the system has no large pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = call
    return found

"""Return of freed memory to the operating system. The C library would keep the memory for later use."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache


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

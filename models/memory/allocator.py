"""Gives freed memory back to the operating system. The C library would keep it for later use."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache


def trim() -> None:
    """Gives the C library's free memory back; does nothing where it is not GNU's. It takes milliseconds."""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Looks the function up once: each look-up makes classes, which only the collector frees."""
    if platform.libc_ver()[0] != "glibc":
        return None
    found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    return found

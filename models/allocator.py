"""What was freed goes back to the operating system. The C library keeps it otherwise, in case it is asked for again."""

from __future__ import annotations

import ctypes
import platform


def trim() -> None:
    """Gives the C library's free memory back; does nothing where it is not GNU's. It takes milliseconds."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)

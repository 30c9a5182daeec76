"""Fails where an installed wheel has no native library, or one that cannot be loaded. Needs no other package."""

import ctypes
from importlib.metadata import files

(library,) = (one for one in files("triolet") or () if one.suffix == ".so")
print(f"{library.name}: level {ctypes.CDLL(str(library.locate())).triolet_level()}")

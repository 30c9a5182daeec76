"""Loads modules of transformers without one of their parts. The weights of this part are not read.

transformers first makes a module without memory. Then it reads the weights for the parameters that the module has, and
ignores all other weights. So the part is emptied between these two stages.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def leaving_out(made: type[nn.Module], name: str) -> type[nn.Module]:
    """Returns a subclass of ``made``, in whose modules the part ``name`` is empty. The part shares no weight with other
    parts. See `cut_off`."""

    def begin(self: Any, *args: Any, **options: Any) -> None:
        made.__init__(self, *args, **options)
        self.set_submodule(name, nn.Module())

    members = {"__init__": begin, "__module__": made.__module__}  # tells transformers that the class is its own
    return type(made.__name__, (made,), members)


def cut_off(module: nn.Module, name: str) -> None:
    """Removes the empty part ``name`` from a loaded ``module``, whose class `leaving_out` made."""
    parent, _, key = name.rpartition(".")
    delattr(module.get_submodule(parent), key)

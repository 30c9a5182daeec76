"""Loads modules of transformers without some of their parts. The weights of these parts are not read.

transformers first makes a module without memory. Then it reads the weights for the parameters that the module has, and
ignores all other weights. So the parts are removed between these two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Find = Callable[[Any], Iterable[nn.Module]]
"""Returns the parts of a module that are left out."""


def leaving_out(made: type[nn.Module], find: Find) -> type[nn.Module]:
    """Returns a subclass of ``made``, whose modules lack the parts that ``find`` returns. Weights that other parts
    share are kept, since a checkpoint may store them under the name of a part that is left out. See `cut_off`.
    """

    def begin(self: Any, *args: Any, **options: Any) -> None:
        made.__init__(self, *args, **options)
        _empty(self, find)

    members = {"__init__": begin, "__module__": made.__module__}  # tells transformers that the class is its own
    return type(made.__name__, (made,), members)


def cut_off(module: Any) -> None:
    """Removes the rest of the left-out parts from a loaded ``module``, whose class `leaving_out` made. Afterwards it
    has no attributes for these parts."""
    for name in module._left_out:
        parent, _, key = name.rpartition(".")
        delattr(module.get_submodule(parent), key)
    module._buffers.clear()  # buffers of the head: encoders have theirs in submodules
    del module._left_out


def _empty(module: Any, find: Find) -> None:
    names = {id(part): name for name, part in module.named_modules()}
    found = {names[id(part)] for part in find(module)}
    left_out = tuple(sorted(name for name in found if not _is_in(found, name)))
    weights = dict(module.named_parameters(remove_duplicate=False))
    tied: dict[str, str] = module.all_tied_weights_keys  # each weight's name to that of the weight it is tied to
    sources = {source for name, source in tied.items() if not (_is_in(left_out, name) and _is_in(left_out, source))}
    module.all_tied_weights_keys = {name: source for name, source in tied.items() if source in sources}
    kept = {id(weights[name]) for name in (*module.all_tied_weights_keys, *sources)}
    for name in left_out:
        parent, _, key = name.rpartition(".")
        setattr(module.get_submodule(parent), key, _bare(module.get_submodule(name), kept))
    module._left_out = left_out


def _is_in(parts: Iterable[str], name: str) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)


def _bare(part: nn.Module, kept: set[int]) -> nn.Module:
    """Returns a module with nothing but those parameters of ``part`` whose `id` is in ``kept``."""
    bare = nn.Module()
    for key, weight in part._parameters.items():
        if id(weight) in kept:
            bare.register_parameter(key, weight)
    for key, child in part.named_children():
        inner = _bare(child, kept)
        if next(inner.parameters(), None) is not None:
            bare.add_module(key, inner)
    return bare

"""Modules of transformers without some of their parts, whose weights are not read.

transformers makes a module without memory, and then reads the weights that the module has; others of the checkpoint are
left over. So the parts are taken out in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Find = Callable[[Any], Iterable[nn.Module]]
"""Tells the parts of a module that are left out."""


def leaving_out(made: type[nn.Module], find: Find) -> type[nn.Module]:
    """A class like ``made``, whose modules have no more of the parts that ``find`` names than the weights that other
    parts share: a checkpoint may have these under the name of a part that is left out. See `cut_off`."""

    def begin(self: Any, *args: Any, **options: Any) -> None:
        made.__init__(self, *args, **options)
        _empty(self, find)

    members = {"__init__": begin, "__module__": made.__module__}  # transformers knows its own by the module
    return type(made.__name__, (made,), members)


def cut_off(module: Any) -> None:
    """Takes from a loaded ``module`` of such a class what it has left of the parts. The parts' attributes are gone, and
    the class is the plain one again."""
    for name in module._left_out:
        parent, _, key = name.rpartition(".")
        delattr(module.get_submodule(parent), key)
    module._buffers.clear()  # of the head: what encodes has modules of its own
    del module._left_out
    module.__class__ = type(module).__base__


def _empty(module: Any, find: Find) -> None:
    names = {id(part): name for name, part in module.named_modules()}
    found = {names[id(part)] for part in find(module)}
    left_out = tuple(sorted(name for name in found if not _is_in(found, name)))
    weights = dict(module.named_parameters(remove_duplicate=False))
    tied: dict[str, str] = module.all_tied_weights_keys  # each to the name of what it is tied to
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
    """A module with the parameters of ``part`` that are ``kept``, by identity, and nothing else."""
    bare = nn.Module()
    for key, weight in part._parameters.items():
        if id(weight) in kept:
            bare.register_parameter(key, weight)
    for key, child in part.named_children():
        inner = _bare(child, kept)
        if next(inner.parameters(), None) is not None:
            bare.add_module(key, inner)
    return bare

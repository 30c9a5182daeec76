"""`DecoderLayer`: the parts of a decoder's layer, as its recipe names them."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from .by_layer import other_names as names_by_layer
from .latent import other_names, query_name
from .panels import Panels
from .recipes import Recipe
from .recurrent import KINDS, Recurrent


@frozen(eq=False)
class DecoderLayer:
    """The parts of one layer: attention, a recurrent part, or both, and a feed-forward part. A layer may lack some.

    Args:
        heads: the number of heads of attention.
    """

    module: Any
    recipe: Recipe
    heads: int

    @property
    def attention(self) -> Any:
        """The attention; ``None``: there is none."""
        part = getattr(self.module, self.recipe.attention, None)
        return part if self.recipe.latent or hasattr(part, self.recipe.read[0]) else None

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent part; ``None``: there is none."""
        part = getattr(self.module, self.recipe.recurrent, None) if self.recipe.recurrent else None
        kind = KINDS.get(type(part).__name__)
        return None if kind is None else kind(part)

    @property
    def feed(self) -> Any:
        """The feed-forward part; ``None``: there is none."""
        return getattr(self.module, self.recipe.feed, None) if self.recipe.feed else self.module

    @property
    def experts(self) -> Any:
        """The experts of the feed-forward part; ``None``: it has none."""
        return getattr(self.feed, "experts", None)

    @property
    def router(self) -> Any:
        """The module that chooses experts."""
        return getattr(self.feed, self.recipe.router)

    @property
    def correction(self) -> Any:
        """The numbers that are added to chances only to choose; ``None``: there are none."""
        own = found(self.router, self.recipe.correction)
        return found(self.feed, self.recipe.correction) if own is None else own

    @property
    def gate(self) -> Any:
        """The linear layer that says how much of the shared expert's outputs is added; ``None``: all of them."""
        return getattr(self.feed, "shared_expert_gate", None)

    @property
    def dense(self) -> Any:
        """The module that computes all rows: the feed-forward part, or the shared expert; ``None``: there is none."""
        part = self.feed if self.experts is None else None
        part = found(self.module, self.recipe.shared) if part is None else part
        return part if hasattr(part, self.recipe.narrow) else None

    @property
    def shorteners(self) -> tuple[str, ...]:
        """The names of the linear layers before and behind experts that read something shorter than hidden states;
        empty: there are none."""
        named = ("fc1_latent_proj", "fc2_latent_proj")
        return named if hasattr(getattr(self.feed, named[0], None), "in_features") else ()

    @property
    def matrices(self) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """The packed matrices by what they are for: for each, a module and the names of its linear layers that the
        matrix joins."""
        recipe, attention, recurrent, dense = self.recipe, self.attention, self.recurrent, self.dense
        made: dict[str, tuple[Any, tuple[str, ...]]] = {}
        if attention is not None:
            read = (query_name(attention),) if recipe.latent else recipe.read
            there = tuple(name for name in read if getattr(attention, name, None) is not None)
            made |= {"read": (attention, there), "out": (attention, (recipe.out,))}
            made |= {name: (attention, (name,)) for name in (other_names(attention) if recipe.latent else ())}
        made |= {name: (self.module, (name,)) for name in names_by_layer(self.module)}
        if recurrent is not None:
            made |= {"enter": (recurrent.module, recurrent.enter), "leave": (recurrent.module, (recurrent.leave,))}
        made |= {name: (self.feed, (name,)) for name in self.shorteners}
        if dense is not None:
            made |= {"widen": (dense, recipe.widen), "narrow": (dense, (recipe.narrow,))}
        return made

    def order(self, matrix: str) -> Tensor | None:
        """Returns the order of a matrix's outputs, as for `packed`."""
        if matrix == "enter" and self.recurrent is not None:
            return self.recurrent.order
        if matrix != "read" or not (self.recipe.in_heads or self.recipe.opens_numbers):
            return None
        groups = [getattr(self.attention, name) for name in self.matrices[matrix][1]]
        outputs = torch.arange(sum(len(group.weight) for group in groups))
        if self.recipe.in_heads:  # queries, keys and values of one head after the other
            return outputs.view(self.heads, 3, -1).transpose(0, 1).flatten()
        queries = outputs[: len(groups[0].weight)].view(self.heads, 2, -1)  # and gates, of one head after the other
        return torch.cat([queries[:, 0].flatten(), outputs[queries.numel() :], queries[:, 1].flatten()])

    @property
    def groups(self) -> dict[str, list[Any]]:
        """The linear layers of each matrix."""
        return {kind: [getattr(parent, name) for name in names] for kind, (parent, names) in self.matrices.items()}

    def panels(self) -> dict[str, Panels]:
        """Returns the panels of each matrix. The matrices must be packed."""
        return {kind: group[0].panels() for kind, group in self.groups.items()}

    @property
    def norms(self) -> list[Any]:
        """The norms before attention, before its sum, before the feed-forward part and before its sum; ``None``: there
        is none."""
        each = [getattr(self.module, name) if name else None for name in self.recipe.norms]
        return [None if isinstance(norm, nn.Identity) else norm for norm in each]

    @property
    def head_norms(self) -> list[Any]:
        """The norms of queries and keys; ``None``: there are none."""
        return [getattr(self.attention, name, None) for name in self.recipe.head_norms]

    @property
    def is_parallel(self) -> bool:
        return bool(getattr(self.module, "use_parallel_residual", self.recipe.parallel))


def found(module: Any, path: str) -> Any:
    """Returns what ``path`` names in ``module``; ``None`` if there is nothing."""
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return None
    return module

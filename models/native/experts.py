"""Experts of a decoder's feed-forward parts: of each row, some experts compute it, and the sum of their outputs by the
row's chances is added (Shazeer et al. 2017, "Outrageously large neural networks").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import unwrap
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from .decoder_layers import DecoderLayer
from .library import ACTIVATIONS, Ending, Kind
from .panels import PANEL, Panels
from .parts import PackedLinear, plain
from .program import Program
from .recurrent import Rooms


class PackedExperts(nn.Module):
    """A replacement for the experts of a layer, each of which computes some rows. It takes the matrices from
    ``experts``, one after the other. Those of gpt-oss have a ``limit``: there gates are at most that, values lie within
    it on both sides, and 1 is added to these. In their files inputs come before outputs, and gates between values.
    Those of Nemotron-H have no gates."""

    widen: PackedLinear
    narrow: PackedLinear

    def __init__(self, experts: Any, *, int8: bool) -> None:
        super().__init__()
        self.limit: float | None = getattr(experts, "limit", None)
        self.intermediate_dim, self.act_fn = sizes_of(experts)[1], getattr(experts, "act_fn", _quick_gelu)
        self.num_experts, self.hidden_dim = experts.num_experts, sizes_of(experts)[0]
        self.gated = not hasattr(experts, "up_proj")
        for part, name in zip(("widen", "narrow"), _names_of(experts), strict=True):
            weights, bias = getattr(experts, name).detach(), getattr(experts, f"{name}_bias", None)
            delattr(experts, name)
            if self.limit is not None and part == "widen":
                bias = None if bias is None else _gates_first(bias)
            if self.limit is not None:
                rows = getattr(weights, "derived_from", None)  # of a GGUF file, in which gates come first
                weights = weights.transpose(1, 2) if rows is None else rows
                weights = _gates_first(weights) if rows is None and part == "widen" else weights
            panels = _in_blocks(weights, bias, planes=1 if int8 else 2)
            panels = panels or Panels.of_each(weights, bias=bias, dtype=torch.int8 if int8 else None)
            setattr(self, part, PackedLinear(panels, 0, weights.shape[1], apart=panels.outputs // len(weights)))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns the sums [rows, hidden] of the outputs of experts ``chosen`` [rows, asked] by their ``weights``."""
        found = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, ranks = torch.where(chosen == expert)
            gates, *values = self.widen(hidden[rows], expert).chunk(2 if self.gated else 1, -1)
            if self.limit is not None:
                gates, values = gates.clamp(max=self.limit), [values[0].clamp(-self.limit, self.limit) + 1]
            own = self.narrow(math.prod(values, start=self.act_fn(gates)), expert)
            found.index_add_(0, rows, (own * weights[rows, ranks, None]).to(found.dtype))
        return found


def _in_blocks(weights: Any, bias: Tensor | None, *, planes: int) -> Panels | None:
    """Packs matrices [experts, outputs, inputs] of quantized blocks, each in panels of its own; ``None``: they have
    other numbers, or panels with outputs of two experts. Gates may have blocks of another kind than values."""
    if weights.shape[1] % PANEL or not hasattr(weights, "unread_part"):
        return None
    each = [weights.unread_part(index) for index in range(len(weights))]
    if any(one is None for one in each):
        return None
    parts = [half for one in each for half in one.joined_rows()]
    if any(part.input_order is not None for part in parts):  # an order would be each expert's own
        return None
    return Panels.of_blocks(parts, None if bias is None else bias.detach().flatten(), planes=planes)


def _gates_first(outputs: Tensor) -> Tensor:
    """Returns ``outputs`` [experts, gates and values by turns, ...] with all gates before all values."""
    return torch.cat([outputs[:, ::2], outputs[:, 1::2]], 1)


def _quick_gelu(gates: Tensor) -> Tensor:
    return gates * torch.sigmoid(QUICK * gates)


QUICK = 1.702
"""The number in the quick form of GELU."""


def _names_of(experts: Any) -> tuple[str, str]:
    """Returns the names of the matrices of transformers' experts."""
    return ("up_proj" if hasattr(experts, "up_proj") else "gate_up_proj"), "down_proj"


def sizes_of(experts: Any) -> tuple[int, int]:
    """Returns the width of what experts read, and that within an expert."""
    if hasattr(experts, "up_proj"):  # may read something shorter than hidden states
        return experts.up_proj.shape[2], experts.up_proj.shape[1]
    if hasattr(experts, "hidden_dim"):
        return experts.hidden_dim, experts.intermediate_dim
    return experts.hidden_size, experts.intermediate_size


def answers_of(experts: Any, dtype: torch.dtype) -> list[Tensor]:
    """Returns what each of a layer's experts, packed or transformers' own, computes of a made-up row. The rows are so
    long that it matters which numbers are the gate."""
    count, dice = experts.num_experts, torch.Generator().manual_seed(0)
    rows = torch.randn(count, sizes_of(experts)[0], generator=dice, dtype=torch.float32).mul_(30.0).to(dtype)
    unread = [one for one in experts.parameters() if getattr(one, "kept", None) == []]
    with torch.no_grad():
        each = torch.arange(count)[:, None]
        found = list(unwrap(type(experts).forward)(experts, rows, each, rows.new_ones(count, 1)).float())
    for one in unread:  # they keep what is computed with, and what is kept, and may have been changed, has no blocks
        one.kept.clear()
    return found


def are_known(experts: Any) -> bool:
    """True if ``experts`` have two matrices of floating-point numbers each, or are already packed."""
    if type(experts) is PackedExperts:
        return True
    return all(getattr(experts, name).is_floating_point() for name in _names_of(experts))


@frozen(eq=False)
class ExpertsWriter:
    """A writer of the operations of experts."""

    program: Program
    rooms: Rooms

    def write(self, layer: DecoderLayer, hidden: int, told: Mapping[str, Any], scale: float) -> int | None:
        """Adds the outputs of a layer's experts, times ``scale``, to the hidden states. Returns the buffer with the
        gate of the shared expert; ``None``: it has none.

        Args:
            told: the norm before the experts, and their activation.
        """
        program, router, experts = self.program, layer.router, layer.experts
        count, asked, width, size = router.num_experts, router.top_k, experts.intermediate_dim, experts.hidden_dim
        named = {"logits": count, "chances": asked, "inners": asked * width, "outputs": asked * size, "opened": 1}
        logits, chances, inners, outputs, opened = (self.rooms(name, wide) for name, wide in named.items())
        added, panels = layer.correction, Panels(count, program.widths[hidden], router.packed, router.packed_bias)
        groups, groups_asked = groups_of(router)
        program.linear(hidden, logits, panels, Ending.STORE, norm=told["norm"])
        program.route(
            logits,
            chances,
            asked,
            count,
            apart=layer.recipe.apart,
            together=getattr(router, "norm_topk_prob", layer.recipe.together),
            least=getattr(router, "norm_min", 0.0),
            more=layer.recipe.more,
            added=None if added is None else plain(added.flatten()),
            groups=groups,
            groups_asked=groups_asked,
            best=1 if hasattr(router, "topk_method") else 2,
        )
        each = {"heads": asked, "kv_heads": count, "size": width}
        gates = {**told, "cap": experts.limit, "activation": ACTIVATIONS["quick_gelu"]} if experts.limit else told
        read, short = hidden, [layer.panels()[name] for name in layer.shorteners]
        if short:
            read, gates = self.rooms("short", size), {**gates, "norm": None}
            program.linear(hidden, read, short[0], Ending.STORE, norm=told["norm"])
        ending = Ending.GATED if experts.gated else Ending.ACTIVATED
        program.linear(read, inners, experts.widen.panels(), ending, **gates, others={**each, "kind": Kind.EXPERTS})
        each = {**each, "size": size, "distance_count": width}
        program.linear(inners, outputs, experts.narrow.panels(), Ending.STORE, others={**each, "kind": Kind.EXPERTS})
        if layer.gate is not None:
            gated = {**told, "activation": ACTIVATIONS["sigmoid"]}
            program.linear(hidden, opened, layer.gate.panels(), Ending.ACTIVATED, **gated)
        mixed = {"asked": asked, "size": size, "scale": scale * getattr(router, "routed_scaling_factor", 1.0)}
        if short:
            program.mix(outputs, read, chances, **mixed, ending=Ending.STORE)
            program.linear(read, hidden, short[1], Ending.ADD)
        else:
            program.mix(outputs, hidden, chances, **mixed)
        return None if layer.gate is None else opened


def groups_of(router: Any) -> tuple[int, int]:
    """Returns the number of groups of experts, and how many of them are chosen first."""
    grouped = getattr(router, "topk_method", "") != "greedy" and getattr(router, "num_group", None)
    return (router.num_group, router.topk_group) if grouped else (1, 1)


def left_in(router: Any) -> int:
    """Returns the number of experts in the groups that are chosen."""
    groups, asked = groups_of(router)
    return int(router.num_experts // groups * asked)

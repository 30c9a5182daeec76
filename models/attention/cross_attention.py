"""Attention in the decoders of encoder-decoders: over pages of their own tokens, as in other decoders, and over
cross-attention slots.

Both kinds share one name among transformers' implementations, since one setting applies to all attention of a decoder.
A module's call has an argument that names its kind: `PagedCall` for the decoder's own tokens, `CrossCall` to read a
slot, and `WriteCall` to write a slot. A write stores the keys and values that the module has computed from an encoder
output. So all that a module does to keys and values (projections, norms, padded heads) is the same as in transformers.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import Tensor, nn

from ...core.errors import UnsupportedModel
from ..memory.slots import CrossKV, CrossStep
from .layers import LayerRequest, PagedCall, Witness, attend_paged, check_request

CROSSED = "triolet_crossed"
"""Our name among transformers' attention implementations."""


def register_crossed() -> None:
    """Registers `CROSSED` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(CROSSED, attend_crossed)


@frozen(kw_only=True, eq=False)
class CrossCall:
    """The argument of every cross-attention module in a step."""

    step: CrossStep
    witness: Witness | None = None


@frozen(kw_only=True, eq=False)
class WriteCall:
    """The argument of every cross-attention module when a slot is written."""

    cross: CrossKV
    slot: int


def attend_crossed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    triolet: PagedCall | CrossCall | WriteCall | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows,
    head_dim]; returns [1, rows, heads, head_dim].

    Raises:
        UnsupportedModel: the layer asks for something that is not supported here.
    """
    layer = getattr(module, "layer_idx", None)
    if triolet is None or not isinstance(layer, int):
        raise UnsupportedModel(
            f"{type(module).__name__} of transformers does not pass the engine's keywords and its layer number to "
            "the attention function; allowed: decoders whose layers pass them"
        )
    if isinstance(triolet, WriteCall):
        triolet.cross.write(triolet.slot, layer, key[0], value[0])
        return query.new_zeros(query.shape).transpose(1, 2), None
    if isinstance(triolet, CrossCall):
        if triolet.witness is not None:
            causal = others.pop("is_causal", None) or getattr(module, "is_causal", False)
            others = {name: value for name, value in others.items() if value != 0.0}  # no dropout
            added = position_bias is not None and bool(position_bias.any())
            asked = {"something added to its scores": added, "causal attention": bool(causal)}
            allowed = "plain attention to all of an encoder output, with grouped heads"
            check_request(module, attention_mask, others, asked, allowed)
            triolet.witness(LayerRequest.of(layer, key, value))
        scale = float(query.shape[-1]) ** -0.5 if scaling is None else scaling
        return triolet.step.attend(layer, query[0].transpose(0, 1), scale=scale)[None], None
    if position_bias is not None and position_bias is not getattr(triolet.step, "distances", None):
        raise UnsupportedModel(
            f"{type(module).__name__} of transformers adds a bias to its scores that the engine has not prepared; "
            "allowed: a bias that depends only on the distance of query and key, the same in all layers"
        )
    return attend_paged(module, query, key, value, attention_mask, scaling=scaling, triolet=triolet, **others)

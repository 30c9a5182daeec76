"""Parts of programs: functions that pack and read the linear layers, embeddings and norms of transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from .modules import PackedEmbedding, PackedLinear, packed
from .panels import Panels, filled
from .program import Normed

_FIXED = frozenset({"default", "linear", "llama3", "yarn"})  # rotary kinds that do not depend on a sequence's length


def is_known(linear: Any) -> bool:
    """True if ``linear`` is a linear layer of torch, is already packed, or is in int8 with one scale for each
    output."""
    return type(linear) in {nn.Linear, PackedLinear} or (
        hasattr(linear, "scales") and linear.weight.dtype == torch.int8 and linear.scales.dim() == 1
    )


def scale_of(embedding: Any) -> float | None:
    """Returns the factor that an embedding multiplies its rows with; ``None``: the embedding computes something
    else."""
    if type(embedding) in {nn.Embedding, PackedEmbedding}:
        return 1.0
    name = type(embedding).__name__
    if name in {"BartScaledWordEmbedding", "MBartScaledWordEmbedding"}:
        return float(embedding.embed_scale)
    return float(embedding.scalar_embed_scale) if name.endswith("TextScaledWordEmbedding") else None


def pack_linears(parent: Any, names: Sequence[str], *, int8: bool = False) -> None:
    """Replaces linear layers of ``parent``, which all read the same inputs, by one packed matrix."""
    modules = [getattr(parent, name) for name in names]
    for name, made in zip(names, packed(modules, int8=int8), strict=True):
        setattr(parent, name, made)


def pack_words(module: nn.Module, embedding: Any, head: Any, *, int8: bool = False, bias: Tensor | None = None) -> None:
    """Packs the matrices of a token embedding and of the head, which may be one. Other embeddings in ``module`` with
    the same matrix are replaced, too.

    Args:
        head: the linear layer that computes logits; ``None``: the model has none.
        bias: the bias of the head, in place of its own; ``None``: the head keeps its own.
    """
    weight = embedding.weight
    table = Panels.of(weight.detach(), dtype=torch.int8 if int8 else None)
    tied = head is not None and head.weight is weight
    for each in list(module.modules()):
        scale = scale_of(each)
        if scale is not None and each.weight is weight:
            _replace(module, each, PackedEmbedding(table, scale))
    if head is None:
        return
    panels = table if tied else packed([head], int8=int8)[0].panels()
    own = head.bias if bias is None else bias
    if own is not None:
        panels = evolve(panels, bias=filled(own.detach(), len(panels.packed)))
    _replace(module, head, PackedLinear(panels, 0, panels.outputs))


def _replace(module: nn.Module, old: Any, new: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def norm_of(module: Any) -> Normed:
    """Returns a layer norm or a root mean square norm of transformers as a `Normed`."""
    gain, shift = gain_of(module), getattr(module, "bias", None)
    if isinstance(module, nn.LayerNorm):
        shift = torch.zeros_like(gain) if shift is None else plain(shift)
    return Normed(gain=gain, epsilon=epsilon_of(module), shift=shift)


def unknown_turns(config: Any) -> str | None:
    """Returns the reason why the library cannot compute the model's rotary positions; ``None``: it can."""
    told: Mapping[str, Any] = config.rope_parameters or {}
    each = [one for one in told.values() if isinstance(one, Mapping)] or [told]
    others = {str(one.get("rope_type", "default")) for one in each} - _FIXED
    if not others:
        return None
    return f"its positions are turned by {', '.join(sorted(others))}; known: {', '.join(sorted(_FIXED))}"


def turns_of(rotary: Any, positions: int, *kind: str) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [positions, half] of rotary positions, for one ``kind`` of layers if it is given."""
    cosines, sines = rotary(torch.empty(1, dtype=torch.float32), torch.arange(positions)[None], *kind)
    half = cosines.shape[-1] // 2
    return plain(cosines[0, :, :half]), plain(sines[0, :, :half])


def epsilon_of(norm: Any) -> float:
    """Returns the epsilon of a norm."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def gain_of(norm: Any) -> Tensor:
    """Returns the numbers that a norm multiplies its rows with."""
    gain = plain(norm.weight)
    return gain.add_(1.0) if type(norm).__name__ in {"Gemma2RMSNorm", "Gemma3RMSNorm"} else gain


def plain(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy in float32."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()

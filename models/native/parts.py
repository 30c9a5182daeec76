"""Parts of programs: the linear layers, embeddings and norms of transformers' modules, packed and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from .modules import PackedEmbedding, PackedLinear, packed
from .panels import Panels, filled
from .program import Normed

_FIXED = frozenset({"default", "linear", "llama3", "yarn"})  # ways to turn that do not depend on a sequence's length


def is_known(linear: Any) -> bool:
    """True if a linear layer is torch's, packed already, or in int8 with a scale for each output."""
    return type(linear) in {nn.Linear, PackedLinear} or (
        hasattr(linear, "scales") and linear.weight.dtype == torch.int8 and linear.scales.dim() == 1
    )


def scale_of(embedding: Any) -> float | None:
    """The factor of an embedding's rows; ``None``: it does something else."""
    if type(embedding) in {nn.Embedding, PackedEmbedding}:
        return 1.0
    name = type(embedding).__name__
    if name in {"BartScaledWordEmbedding", "MBartScaledWordEmbedding"}:
        return float(embedding.embed_scale)
    return float(embedding.scalar_embed_scale) if name.endswith("TextScaledWordEmbedding") else None


def pack_linears(parent: Any, names: Sequence[str], *, int8: bool = False) -> None:
    """Puts one packed matrix in the places of the linear layers of ``parent`` that read the same."""
    modules = [getattr(parent, name) for name in names]
    for name, made in zip(names, packed(modules, int8=int8), strict=True):
        setattr(parent, name, made)


def pack_words(module: nn.Module, embedding: Any, head: Any, *, int8: bool = False, bias: Tensor | None = None) -> None:
    """Puts packed matrices in the places of a token embedding, of all others in ``module`` that share its matrix, and
    of the head, which may share it, too.

    Args:
        head: what makes logits; ``None``: there is none.
        bias: of the head, in place of its own.
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
    """A norm of layers or of root mean squares."""
    gain, shift = gain_of(module), getattr(module, "bias", None)
    if isinstance(module, nn.LayerNorm):
        shift = torch.zeros_like(gain) if shift is None else plain(shift)
    return Normed(gain=gain, epsilon=epsilon_of(module), shift=shift)


def unknown_turns(config: Any) -> str | None:
    """The reason why the library does not turn positions as the model does; ``None``: it does."""
    told: Mapping[str, Any] = config.rope_parameters or {}
    each = [one for one in told.values() if isinstance(one, Mapping)] or [told]
    others = {str(one.get("rope_type", "default")) for one in each} - _FIXED
    if not others:
        return None
    return f"its positions are turned by {', '.join(sorted(others))}; known: {', '.join(sorted(_FIXED))}"


def turns_of(rotary: Any, positions: int, *kind: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, half], perhaps of one ``kind`` of layers."""
    cosines, sines = rotary(torch.empty(1), torch.arange(positions)[None], *kind)
    half = cosines.shape[-1] // 2
    return plain(cosines[0, :, :half]), plain(sines[0, :, :half])


def epsilon_of(norm: Any) -> float:
    """The number that is added to a norm's squares."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def gain_of(norm: Any) -> Tensor:
    """The numbers that a norm multiplies with."""
    gain = plain(norm.weight)
    return gain.add_(1.0) if type(norm).__name__ in {"Gemma2RMSNorm", "Gemma3RMSNorm"} else gain


def plain(tensor: Tensor) -> Tensor:
    """A copy in float32, value by value."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()

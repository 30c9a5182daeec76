"""Parts of programs: functions that pack and read the linear layers, embeddings and norms of transformers' modules.

Modules of torch whose matrices are in the native library's order replace modules of a loaded model, so that its weights
are held once. Torch computes with them for comparisons, and wherever the library does not compute. They unpack their
matrix part by part, and return the same as the replaced module. They quantize no inputs, unlike the library, which does
so if weights are in int8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.nn import functional

from ..memory.allocator import trim
from .library import ACTIVATIONS
from .panels import PANEL, Panels, filled, quantized
from .program import Normed, Program

# -- modules -----------------------------------------------------------------------------------------------------------


_PART = 1024  # outputs that are unpacked at a time
_LARGE = 1 << 20  # bytes


class PackedLinear(nn.Module):
    """A replacement for an `nn.Linear`, or for a `Conv1D` of transformers: ``outputs`` outputs of a matrix in panels,
    from output ``first`` on. The other outputs of the matrix belong to neighbours.

    Args:
        apart: the matrix is of several experts, whose first outputs are so far apart.
        places: int64 [outputs], where the matrix has each output; ``None``: one after the other.
    """

    packed: Tensor
    bias: Tensor | None
    places: Tensor | None
    input_order: Tensor | None
    weight: Tensor | None = None  # T5's layers ask for its dtype, to compute in that

    def __init__(
        self, panels: Panels, first: int, outputs: int, *, apart: int = 0, places: Tensor | None = None
    ) -> None:
        super().__init__()
        self.apart = apart
        self.register_buffer("packed", panels.packed)
        self.register_buffer("bias", panels.bias)
        self.register_buffer("places", places)
        self.whole, self.in_features = panels.outputs, panels.inputs
        self.sections, self.planes = panels.sections, panels.planes
        self.register_buffer("input_order", panels.order)
        self.first, self.out_features = first, outputs

    def panels(self) -> Panels:
        """Returns the matrix, with the outputs of the neighbours."""
        own = self.packed, self.bias, self.sections, self.planes, self.input_order
        return Panels(self.whole, self.in_features, *own)

    def forward(self, inputs: Tensor, expert: int = 0) -> Tensor:
        panels, first = self.panels(), self.first + expert * self.apart
        found, end = inputs.new_empty(*inputs.shape[:-1], self.out_features), first + self.out_features
        for start in range(first, end, _PART):  # into one tensor: small ones would lie where parts were unpacked
            stop = min(start + _PART, end)
            places = torch.arange(start, stop) if self.places is None else self.places[start - first : stop - first]
            weights = panels.part(start, stop) if self.places is None else panels.rows(places)
            bias = None if self.bias is None else self.bias[places].to(inputs.dtype)
            found[..., start - first : stop - first] = functional.linear(inputs, weights.to(inputs.dtype), bias)
        return found


class PackedConvolution(nn.Module):
    """A replacement for an `nn.Conv1d` without padding, or with silence in front: a product for each window
    [steps * channels]."""

    def __init__(self, convolution: Any, *, int8: bool) -> None:
        super().__init__()
        weight, bias = convolution.weight.detach().transpose(1, 2).flatten(1), convolution.bias
        panels = Panels.of(weight, None if bias is None else bias.detach(), dtype=torch.int8 if int8 else None)
        self.linear = PackedLinear(panels, 0, len(weight))
        (self.steps,), (self.stride,) = convolution.kernel_size, convolution.stride
        self.left_pad = getattr(convolution, "left_pad", 0)

    def windows(self, rows: Tensor) -> Tensor:
        """Returns the windows [outputs, steps * channels] of ``rows`` [rows, channels]."""
        rows = functional.pad(rows, (0, 0, self.left_pad, 0))
        count, width = (len(rows) - self.steps) // self.stride + 1, rows.shape[1]
        shape, strides = (count, self.steps * width), (self.stride * width, 1)
        return rows.contiguous().as_strided(shape, strides).contiguous()

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.linear(self.windows(each.T)).T for each in hidden])


class CausalConvolution(PackedConvolution):
    """A replacement for Moonshine streaming's, which also returns what is no padding."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        assert mask is None, "an audio has no padding"
        return super().forward(hidden), None


class PackedDistances(nn.Module):
    """A replacement for an `nn.Linear` that only reads positions: its outputs for all distances of two rows up to
    ``rows`` apart, [heads, panels, size, 32]."""

    vectors: Tensor

    def __init__(self, outputs: Tensor, heads: int) -> None:
        super().__init__()
        self.count, filled = len(outputs), functional.pad(outputs, (0, 0, 0, -len(outputs) % PANEL))
        split = filled.float().view(-1, PANEL, heads, outputs.shape[1] // heads)
        self.register_buffer("vectors", split.permute(2, 0, 3, 1).contiguous())

    def forward(self, positions: Tensor) -> Tensor:
        count = positions.shape[-2]
        assert count <= self.count, f"{count} distances; the most are {self.count}"
        first = (self.count - count) // 2
        rows = self.vectors.permute(1, 3, 0, 2).flatten(0, 1).flatten(1)[first : first + count]
        return rows.to(positions.dtype).expand(*positions.shape[:-1], -1)


class PackedEmbedding(nn.Module):
    """A replacement for an `nn.Embedding`, which may share its matrix with the head."""

    weight: Tensor

    def __init__(self, panels: Panels, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", panels.packed)
        self.whole, self.inputs, self.scale, self.dtype = panels.outputs, panels.inputs, scale, dtype
        self.sections, self.planes = panels.sections, panels.planes

    def panels(self) -> Panels:
        """Returns the matrix. Its tensors may have been moved since the last call."""
        return Panels(self.whole, self.inputs, self.weight, None, self.sections, self.planes)

    def forward(self, indices: Tensor) -> Tensor:
        rows = self.panels().rows(indices.reshape(-1)).view(*indices.shape, self.inputs).to(self.dtype)
        return rows if self.scale == 1.0 else rows * self.scale


def packed(modules: Sequence[Any], *, int8: bool, order: Tensor | None = None) -> list[PackedLinear]:
    """Packs linear layers that read the same inputs as neighbours in one matrix. The matrix is in int8 if ``int8`` is
    true or the layers already are.

    Args:
        order: int64 [outputs], the output of all layers that is each output of the matrix; ``None``: the same one.
    """
    bias = _bias(modules)
    bias = bias if bias is None or order is None else bias[order]
    weights = list(map(_outputs_first, modules))
    blocks = Panels.of_blocks(weights, bias, order, planes=1 if int8 else 2)
    if blocks is not None:
        panels = blocks
    elif hasattr(modules[0], "scales"):  # one for each output
        panels = Panels.of_int8(
            _joined(weights, order), _joined([each.scales for each in modules], order)[:, None], bias
        )
    else:
        weight = _joined(weights, order)
        panels = Panels.of_int8(*quantized(weight), bias) if int8 else Panels.of(weight, bias)
    made, first, places = [], 0, None if order is None else order.argsort()
    for outputs in map(len, weights):
        own = None if places is None else places[first : first + outputs].clone()
        made.append(PackedLinear(panels, first, outputs, places=own))
        first += outputs
    return made


def _outputs_first(linear: Any) -> Tensor:
    weight: Tensor = linear.weight.detach()
    if not _is_turned(linear):
        return weight
    rows: Tensor | None = getattr(weight, "derived_from", None)  # of a GGUF file, in which outputs come first
    return weight.T if rows is None else rows


def _is_turned(linear: Any) -> bool:
    """True if the weight is [inputs, outputs]."""
    return type(linear).__name__ == "Conv1D"


def _joined(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return joined if order is None else joined[order]


def _bias(modules: Sequence[Any]) -> Tensor | None:
    if all(each.bias is None for each in modules):
        return None
    zeros = [torch.zeros(each.weight.shape[1 if _is_turned(each) else 0], dtype=torch.float32) for each in modules]
    return torch.cat(
        [zero if each.bias is None else each.bias.detach() for zero, each in zip(zeros, modules, strict=True)]
    )


# -- parts -------------------------------------------------------------------------------------------------------------


_FIXED = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rotary kinds that do not depend on a sequence's length."""


def is_known(linear: Any) -> bool:
    """True if ``linear`` is a linear layer of torch, a `Conv1D` of transformers, is already packed, or is in int8 with
    one scale for each output."""
    return (
        type(linear) in {nn.Linear, PackedLinear}
        or _is_turned(linear)
        or (hasattr(linear, "scales") and linear.weight.dtype == torch.int8 and linear.scales.dim() == 1)
    )


def width_of(linear: Any) -> int:
    """Returns the number of inputs of a linear layer that `is_known`."""
    return int(linear.weight.shape[1] if linear.weight is not None else linear.in_features)


def scale_of(embedding: Any) -> float | None:
    """Returns the factor that an embedding multiplies its rows with; ``None``: the embedding computes something
    else."""
    name = type(embedding).__name__
    if type(embedding) in {nn.Embedding, PackedEmbedding} or name == "QuantizedEmbedding":
        return 1.0
    if name in {"BartScaledWordEmbedding", "MBartScaledWordEmbedding"}:
        return float(embedding.embed_scale)
    return float(embedding.scalar_embed_scale) if name.endswith("ScaledWordEmbedding") else None


def pack_linears(parent: Any, names: Sequence[str], *, int8: bool = False, order: Tensor | None = None) -> None:
    """Replaces linear layers of ``parent``, which all read the same inputs, by one packed matrix."""
    pack_joined([(parent, name) for name in names], int8=int8, order=order)


def pack_joined(places: Sequence[tuple[Any, str]], *, int8: bool = False, order: Tensor | None = None) -> None:
    """Replaces linear layers of several modules, which all read the same inputs, by one packed matrix.

    Args:
        places: the module and the name of each layer.
        order: as for `packed`.
    """
    modules = [getattr(parent, name) for parent, name in places]
    for (parent, name), made in zip(places, packed(modules, int8=int8, order=order), strict=True):
        setattr(parent, name, made)
    if made.packed.nbytes >= _LARGE:
        trim()  # what was read lay between packed matrices


def pack_words(module: nn.Module, embedding: Any, head: Any, *, int8: bool = False, bias: Tensor | None = None) -> None:
    """Packs the matrices of a token embedding and of the head, which may be one. Other embeddings in ``module`` with
    the same matrix are replaced, too.

    Args:
        head: the linear layer that computes logits; ``None``: the model has none.
        bias: the bias of the head, in place of its own; ``None``: the head keeps its own.
    """
    weight, scales = embedding.weight, getattr(embedding, "scales", None)
    dtype = weight.dtype if scales is None else scales.dtype
    table = Panels.of_blocks([weight.detach()], planes=1 if int8 else 2)
    if scales is not None:
        table = Panels.of_int8(weight, scales[:, None])
    elif table is None:
        table = Panels.of(weight.detach(), dtype=torch.int8 if int8 else None)
    tied = head is not None and head.weight is weight
    for each in list(module.modules()):
        scale = scale_of(each)
        if scale is not None and each.weight is weight:
            _replace(module, each, PackedEmbedding(table, scale, dtype))
    if head is None:
        return
    panels = table if tied else packed([head], int8=int8)[0].panels()
    own = head.bias if bias is None else bias
    if own is not None:
        panels = evolve(panels, bias=filled(own.detach(), panels.count))
    made = PackedLinear(panels, 0, panels.outputs)
    made.weight = torch.empty(0, dtype=head.weight.dtype)  # Mamba 2 asks for its dtype
    _replace(module, head, made)


def _replace(module: nn.Module, old: Any, new: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def norm_of(module: Any) -> Normed:
    """Returns a layer norm or a root mean square norm of transformers as a `Normed`."""
    if hasattr(module, "gamma"):  # Moonshine streaming's
        gain = plain(module.gamma).add_(module.unit_offset)
        return Normed(gain=gain, epsilon=float(module.ln.eps), shift=torch.zeros_like(gain))
    gain, shift = gain_of(module), getattr(module, "bias", None)
    if is_layer_norm(module):
        shift = torch.zeros_like(gain) if shift is None else plain(shift)
    return Normed(gain=gain, epsilon=epsilon_of(module), shift=shift)


def is_layer_norm(norm: Any) -> bool:
    """True if a norm subtracts the mean, false for a root mean square norm."""
    return isinstance(norm, nn.LayerNorm) or type(norm).__name__ in {"CohereLayerNorm", "Cohere2LayerNorm"}


def unknown_parts(base: Any, activation: str, linears: Iterable[Any], embedding: Any) -> str | None:
    """Returns the reason why the library cannot compute one of these parts of ``base``, or its rotary positions;
    ``None``: it can."""
    if activation not in ACTIVATIONS:
        return f"its activation is {activation}; known: {', '.join(ACTIVATIONS)}"
    if not all(map(is_known, linears)):
        return "its linear layers are not torch's"
    if scale_of(embedding) is None:
        return f"its embedding is a {type(embedding).__name__}; known: torch's"
    return unknown_turns(base)


def unknown_turns(base: Any) -> str | None:
    """Returns the reason why the library cannot compute the rotary positions of ``base``; ``None``: it can, or there
    are none."""
    others = other_turns(base.config)
    if not others or _rotary(base) is None:
        return None
    return f"its positions are turned by {', '.join(sorted(others))}; known: {', '.join(sorted(_FIXED))}"


def other_turns(config: Any) -> set[str]:
    """Returns the kinds of rotary positions that a configuration names and the library cannot compute."""
    told: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    each = [one for one in told.values() if isinstance(one, Mapping)] or [told]
    return {str(one.get("rope_type", "default")) for one in each} - _FIXED


def _rotary(base: Any) -> Any:
    """Returns the module that computes rotary positions; ``None``: there is none."""
    named = getattr(base, "pos_emb", None)  # of some models, a table of embeddings
    return getattr(base, "rotary_emb", named if hasattr(named, "inv_freq") else None)


def turned(
    program: Program,
    base: Any,
    positions: int,
    *kind: str,
    repeated: bool = False,
    once: bool = False,
    rotary: Any = None,
) -> dict[str, Any]:
    """Returns the arguments of `Attention` for the rotary positions of ``base``, if it has any, for one ``kind`` of
    layers if it is given. The program gets cosines and sines of each kind once.

    Args:
        repeated: each number of the model stands beside itself, not in two halves.
        once: each number of the model stands once; cosines and sines may be the parts of complex numbers.
        rotary: the module that has the positions of this ``kind`` alone; ``None``: that of ``base``.
    """
    if _rotary(base) is None:
        return {}
    if kind not in program.tables:
        asked = torch.empty(1, dtype=torch.float32), torch.arange(positions)[None]
        numbers = _rotary(base)(*asked, *kind) if rotary is None else rotary(*asked)
        numbers = (numbers.real, numbers.imag) if isinstance(numbers, Tensor) else numbers
        half = numbers[0].shape[-1] // (1 if once else 2)
        cosines, sines = (plain(each[0, :, ::2] if repeated else each[0, :, :half]) for each in numbers)
        program.tables[kind] = {"table": len(program.turns), "turned": 2 * half}
        program.turns.append((cosines, sines))
        program.axes = _axes_of(rotary or _rotary(base), half, repeated=repeated)
    return program.tables[kind]


def _axes_of(rotary: Any, half: int, *, repeated: bool) -> tuple[int, ...]:
    """Returns the axis of positions in three dimensions by which each angle turns; empty: positions have one
    dimension."""
    if not hasattr(rotary, "mrope_section"):
        return ()
    alone = torch.eye(3, dtype=torch.long)[:, None]  # a row for each axis, with position 1 there, and 0 elsewhere
    sines = rotary(torch.empty(1, dtype=torch.float32), alone)[1][0]
    return tuple((sines[:, ::2] if repeated else sines[:, :half]).ne(0.0).int().argmax(0).tolist())


def epsilon_of(norm: Any) -> float:
    """Returns the epsilon of a norm."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


_ONE_MORE = {
    "GemmaRMSNorm",
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "VaultGemmaRMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5RMSNorm",
    "Qwen3_5MoeRMSNorm",
}  # norms that multiply with 1 + weight


def gain_of(norm: Any) -> Tensor:
    """Returns the numbers that a norm multiplies its rows with."""
    gain = plain(norm.weight)
    return gain.add_(1.0) if type(norm).__name__ in _ONE_MORE else gain


def plain(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy in float32."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()

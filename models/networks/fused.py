"""A decoder's layers without the many small calls between their products: what transformers' modules compute, from the
same weights, with queries, keys and values as one product, and gate and up as another.

A step of one token is short: what passes between the operations takes as long as they do. Layers of the architectures
in `_FUSED` are computed here, to the same numbers up to rounding (the trial compares them, see `blueprints.trial`). Of
all other models the linear layers alone are replaced, by the kernels that are fastest on this machine.

The layers are in the modules during a call and at no other time, as those of `launch.compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.nn import functional

from ..attention.layers import PagedCall
from ..linear.layers import FloatLinear, Int8Linear, Kernels, Timed
from ..linear.modules import QuantizedLinear, kernels_for
from ..memory.module import forwards

_FUSED = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""Classes of transformers whose layers are: norm, attention, sum, norm, gated feed-forward, sum (Touvron et al. 2023,
"LLaMA", section 2.2), with rotary positions (Su et al. 2021) in halves, and perhaps a norm of each head."""


@frozen(eq=False)
class _Norm:
    """Root mean square norm (Zhang and Sennrich 2019), equation 4."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module.weight.detach(), float(module.variance_epsilon))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Of [..., width]."""
        # By a layer norm, which is one operation; torch's own root mean square norm takes eight. Numbers followed by
        # their negatives have the mean 0, and their variance is the mean of the squares.
        width = hidden.shape[-1]
        both = functional.layer_norm(torch.cat([hidden, -hidden], -1), (2 * width,), eps=self.epsilon)
        return both[..., :width] * self.weight


@frozen(eq=False, kw_only=True)
class FusedLayer:
    """One decoder layer; stands for its module's ``forward``."""

    index: int
    window: int | None
    scale: float
    heads: int
    head_dim: int
    norm: _Norm
    qkv: Timed
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: Timed
    second_norm: _Norm
    gate_up: Timed
    down: Timed
    activation: Callable[[Tensor], Tensor]

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        triolet: PagedCall,
        **others: Any,  # noqa: ARG002  (masks and the like, which are the attention's)
    ) -> Tensor:
        """Of hidden states [1, rows, hidden]; ``position_embeddings`` as `Turn` gives them."""
        hidden = hidden_states[0]
        hidden = hidden + self.out(self._attend(self.norm(hidden), position_embeddings, triolet))
        gate, up = self.gate_up(self.second_norm(hidden)).chunk(2, -1)
        return hidden.add_(self.down(self.activation(gate) * up))[None]

    def _attend(self, hidden: Tensor, turns: tuple[Tensor, Tensor], call: PagedCall) -> Tensor:
        assert call.step is not None, "the call is over"
        split = self.qkv(hidden).view(len(hidden), -1, self.head_dim)  # queries, keys, values
        kv_heads = (split.shape[1] - self.heads) // 2
        turned, values = split[:, : self.heads + kv_heads], split[:, self.heads + kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            turned = torch.cat([self.query_norm(turned[:, : self.heads]), self.key_norm(turned[:, self.heads :])], 1)
        cosines, sines = turns
        half = self.head_dim // 2
        swapped = torch.cat([turned[..., half:], turned[..., :half]], -1)
        turned = torch.addcmul(turned * cosines, swapped, sines)
        attended = call.step.attend(
            self.index,
            turned[:, : self.heads],
            turned[:, self.heads :],
            values,
            scale=self.scale,
            window=self.window,
            softcap=None,
        )
        return attended.reshape(len(hidden), -1)


@frozen(eq=False)
class Turn:
    """Stands for the ``forward`` of a module of rotary positions: cosines and sines, both [rows, 1, head_dim], the
    first half of the sines negated, so that each layer multiplies the swapped halves by them."""

    module: nn.Module

    def __call__(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = type(self.module).forward(self.module, hidden, position_ids)
        half = sines.shape[-1] // 2
        signed = torch.cat([-sines[..., :half], sines[..., half:]], -1)
        return cosines[0][:, None], signed[0][:, None]


@define(eq=False)
class FusedLayers:
    """What a decoder's modules call instead of their own ``forward``, and the linear layers that kernels are to be
    chosen for."""

    kernels: Kernels = field(repr=False)
    linears: list[Timed] = field(repr=False)
    _instead: list[tuple[nn.Module, Callable[..., Any]]] = field(repr=False)

    @classmethod
    def of(
        cls, module: nn.Module, head: nn.Module | None, layers: nn.ModuleList | None, windows: Sequence[int | None]
    ) -> FusedLayers:
        """Of a decoder ``module``, its ``head``, which may be within it, and its ``layers``, each with its sliding
        window; ``None``: it has no head, or no list of layers."""
        kernels, linears = kernels_for(module), list[Timed]()
        instead: list[tuple[nn.Module, Callable[..., Any]]] = []
        inside: set[int] = set()
        rotary = None if layers is None else _rotary(module, layers)
        if layers is not None and rotary is not None:
            for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
                fused = _fuse(layer, index, window, kernels)
                linears += [fused.qkv, fused.out, fused.gate_up, fused.down]
                instead.append((layer, fused))
            instead.append((rotary, Turn(rotary)))
            inside = {id(each) for each in layers.modules()}
        for each in {id(each): each for each in (*module.modules(), head)}.values():
            if id(each) not in inside and type(each) in {nn.Linear, QuantizedLinear}:
                linear = _linear_of(each, kernels)
                linears.append(linear)
                instead.append((cast("nn.Module", each), linear))
        return cls(kernels, linears, instead)

    def crossing(self) -> AbstractContextManager[None]:
        """They are called within."""
        return forwards(self._instead)

    def tensors(self) -> Iterator[Tensor]:
        """None of its own: all are the modules'."""
        return iter(())

    def release(self) -> None:
        """Forgets the layers."""
        self._instead.clear()
        self.linears.clear()


def _rotary(module: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    """The module of the layers' rotary positions; ``None`` where the layers are not to be fused."""
    if {type(layer).__name__ for layer in layers} - _FUSED:
        return None
    found = [each for each in module.modules() if type(each).__name__.endswith("RotaryEmbedding")]
    return found[0] if len(found) == 1 else None


def _fuse(layer: Any, index: int, window: int | None, kernels: Kernels) -> FusedLayer:
    attention, feed = layer.self_attn, layer.mlp
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    head_dim = attention.head_dim
    return FusedLayer(
        index=index,
        window=window,
        scale=float(attention.scaling),
        heads=_outputs(attention.q_proj) // head_dim,
        head_dim=head_dim,
        norm=_Norm.of(layer.input_layernorm),
        qkv=_stacked([attention.q_proj, attention.k_proj, attention.v_proj], kernels),
        query_norm=None if query_norm is None else _Norm.of(query_norm),
        key_norm=None if key_norm is None else _Norm.of(key_norm),
        out=_linear_of(attention.o_proj, kernels),
        second_norm=_Norm.of(layer.post_attention_layernorm),
        gate_up=_stacked([feed.gate_proj, feed.up_proj], kernels),
        down=_linear_of(feed.down_proj, kernels),
        activation=feed.act_fn,
    )


def _outputs(module: Any) -> int:
    return int(module.weight.shape[0])


def _linear_of(module: Any, kernels: Kernels) -> Timed:
    """A module's linear layer; the module computes with the same kernels."""
    bias = None if module.bias is None else module.bias.detach()
    if isinstance(module, QuantizedLinear):
        module.kernels = kernels
        return Int8Linear(module.weight, module.scales, bias, kernels)
    return FloatLinear(module.weight.detach(), bias, kernels)


def _stacked(modules: Sequence[Any], kernels: Kernels) -> Timed:
    """Linear layers of the same inputs as one. Their weights become parts of one tensor, in the modules too: nothing is
    held twice."""
    for module in modules:
        if isinstance(module, QuantizedLinear):
            module.kernels = kernels
    weight = _joined(modules, "weight")
    bias = None if modules[0].bias is None else _joined(modules, "bias")
    if isinstance(modules[0], QuantizedLinear):
        return Int8Linear(weight, _joined(modules, "scales"), bias, kernels)
    return FloatLinear(weight, bias, kernels)


def _joined(modules: Sequence[Any], name: str) -> Tensor:
    parts = [getattr(module, name).detach() for module in modules]
    joined = _neighbours(parts)
    if joined is not None:
        return joined
    joined = torch.cat(parts)
    for module, part in zip(modules, torch.split(joined, [len(part) for part in parts]), strict=True):
        parameter = isinstance(getattr(module, name), nn.Parameter)
        setattr(module, name, nn.Parameter(part, requires_grad=False) if parameter else part)
    return joined


def _neighbours(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that ``parts`` are the parts of, one behind the other, as they are when they have been joined before;
    ``None``: they lie apart."""
    first = parts[0]
    place = first.storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata or part.storage_offset() != place:
            return None
        place += part.numel()
    whole = sum(map(len, parts))
    return first.as_strided((whole, *first.shape[1:]), first.stride(), first.storage_offset())

"""Whisper's encoder and decoder (Radford et al. 2022, section 2.2), for inference only: plain tensors and products.

Numbers follow transformers' `WhisperForConditionalGeneration`, including what it leaves out: `scale_embedding` has no
effect there, nor here. The query scale (head_dim ** -0.5) is folded into the query projections when they are loaded.

Loops that load are spelled with `map`: what a comprehension closes over would live as long as an error that came
through it (see `core.frames`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import torch
from attrs import define, evolve, field, fields, frozen, has
from torch import Tensor
from torch.nn import functional

from ...core.errors import CheckpointError
from ..checkpoints.whisper import Activation, WhisperShape
from ..memory.kv import CrossKV, PagedKV, StepLayout


class Weights(Protocol):
    """Where `WhisperModel.load` takes its tensors from; names are those of transformers, without ``model.``."""

    def __contains__(self, name: object) -> bool:
        """Whether the checkpoint has the tensor."""

    def get(self, name: str, target: Tensor, *, scale: float = 1.0) -> None:
        """Writes the tensor times ``scale`` to ``target``, in its dtype and on its device; raises `CheckpointError`
        when it is missing or of another shape."""


@frozen(kw_only=True)
class _Loader:
    """Takes tensors in the model's dtype to the model's device."""

    weights: Weights
    device: torch.device
    dtype: torch.dtype
    taken: list[Tensor]

    def take(self, name: str, *shape: int) -> Tensor:
        made = self.empty(*shape)
        self.weights.get(name, made)
        return made

    def linear(self, name: str, outputs: int, inputs: int) -> _Linear:
        return _Linear(self.take(f"{name}.weight", outputs, inputs), self.take(f"{name}.bias", outputs))

    def norm(self, name: str, width: int) -> _LayerNorm:
        return _LayerNorm(self.take(f"{name}.weight", width), self.take(f"{name}.bias", width))

    def fused(self, name: str, parts: str, width: int, heads: int) -> _Linear:
        """The projections ``parts`` (of "qkv") of one attention, one below the other."""
        return self.stacked([(name, part) for part in parts], width, heads)

    def stacked(self, projections: Sequence[tuple[str, str]], width: int, heads: int) -> _Linear:
        """Projections one below the other, each named by its attention and "q", "k" or "v". Each is written where it
        belongs as soon as it is read: at no time are there two copies of them all."""
        weight, bias = self.empty(len(projections) * width, width), self.empty(len(projections) * width)
        for index, (name, part) in enumerate(projections):
            rows = slice(index * width, (index + 1) * width)
            scale = (width // heads) ** -0.5 if part == "q" else 1.0
            self.weights.get(f"{name}.{part}_proj.weight", weight[rows], scale=scale)
            if part == "k":  # Keys have no bias in Whisper.
                bias[rows] = 0.0
            else:
                self.weights.get(f"{name}.{part}_proj.bias", bias[rows], scale=scale)
        return _Linear(weight, bias)

    def empty(self, *shape: int) -> Tensor:
        """Room for weights that are written by the caller."""
        made = torch.empty(*shape, dtype=self.dtype, device=self.device)
        self.taken.append(made)
        return made


@frozen(eq=False)
class _Linear:
    weight: Tensor
    bias: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight, self.bias)


@frozen(eq=False)
class _LayerNorm:
    weight: Tensor
    bias: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        return functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias)


@frozen(eq=False, kw_only=True)
class _FeedForward:
    norm: _LayerNorm
    widen: _Linear
    narrow: _Linear
    activation: Activation

    @classmethod
    def load(cls, loader: _Loader, name: str, width: int, inner: int, activation: Activation) -> _FeedForward:
        return cls(
            norm=loader.norm(f"{name}.final_layer_norm", width),
            widen=loader.linear(f"{name}.fc1", inner, width),
            narrow=loader.linear(f"{name}.fc2", width, inner),
            activation=activation,
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden + self.narrow(self.activation(self.widen(self.norm(hidden))))


@frozen(eq=False, kw_only=True)
class _EncoderLayer:
    heads: int
    norm: _LayerNorm
    qkv: _Linear
    out: _Linear
    feed_forward: _FeedForward

    @classmethod
    def load(
        cls, loader: _Loader, shape: WhisperShape, inner: int, activation: Activation, index: int
    ) -> _EncoderLayer:
        name, width, heads = f"encoder.layers.{index}", shape.width, shape.encoder_heads
        return cls(
            heads=heads,
            norm=loader.norm(f"{name}.self_attn_layer_norm", width),
            qkv=loader.fused(f"{name}.self_attn", "qkv", width, heads),
            out=loader.linear(f"{name}.self_attn.out_proj", width, width),
            feed_forward=_FeedForward.load(loader, name, width, inner, activation),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden = self.feed_forward(hidden + self.out(self._attend(self.norm(hidden))))
        if hidden.dtype == torch.float16:  # as transformers: large models leave float16's range here
            limit = torch.finfo(torch.float16).max - 1000
            hidden = hidden.clamp(-limit, limit)
        return hidden

    def _attend(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv(hidden)
        split = qkv.view(*qkv.shape[:-1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [3, n, heads, rows, size]
        attended = functional.scaled_dot_product_attention(split[0], split[1], split[2], scale=1.0)
        return attended.transpose(1, 2).flatten(-2)


@frozen(eq=False, kw_only=True)
class _Encoder:
    stem: tuple[_Linear, _Linear]  # the two convolutions' weights and biases
    positions: Tensor  # [embeddings, width]
    layers: tuple[_EncoderLayer, ...]
    norm: _LayerNorm

    @classmethod
    def load(cls, loader: _Loader, shape: WhisperShape, inner: int, activation: Activation) -> _Encoder:
        width = shape.width
        return cls(
            stem=(
                _convolution(loader, "encoder.conv1", width, shape.mels),
                _convolution(loader, "encoder.conv2", width, width),
            ),
            positions=loader.take("encoder.embed_positions.weight", shape.embeddings, width),
            layers=tuple(
                map(partial(_EncoderLayer.load, loader, shape, inner, activation), range(shape.encoder_layers))
            ),
            norm=loader.norm("encoder.layer_norm", width),
        )

    def __call__(self, log_mel: Tensor) -> Tensor:
        first, second = self.stem
        hidden = functional.gelu(functional.conv1d(log_mel, first.weight, first.bias, padding=1))
        hidden = functional.gelu(functional.conv1d(hidden, second.weight, second.bias, stride=2, padding=1))
        hidden = hidden.transpose(1, 2) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


def _convolution(loader: _Loader, name: str, outputs: int, inputs: int) -> _Linear:
    return _Linear(loader.take(f"{name}.weight", outputs, inputs, 3), loader.take(f"{name}.bias", outputs))


@frozen(eq=False, kw_only=True)
class _DecoderLayer:
    index: int
    width: int
    norm: _LayerNorm
    qkv: _Linear
    out: _Linear
    cross_norm: _LayerNorm
    cross_query: _Linear
    cross_out: _Linear
    feed_forward: _FeedForward

    @classmethod
    def load(
        cls, loader: _Loader, shape: WhisperShape, inner: int, activation: Activation, index: int
    ) -> _DecoderLayer:
        name, width, heads = f"decoder.layers.{index}", shape.width, shape.decoder_heads
        return cls(
            index=index,
            width=width,
            norm=loader.norm(f"{name}.self_attn_layer_norm", width),
            qkv=loader.fused(f"{name}.self_attn", "qkv", width, heads),
            out=loader.linear(f"{name}.self_attn.out_proj", width, width),
            cross_norm=loader.norm(f"{name}.encoder_attn_layer_norm", width),
            cross_query=loader.fused(f"{name}.encoder_attn", "q", width, heads),
            cross_out=loader.linear(f"{name}.encoder_attn.out_proj", width, width),
            feed_forward=_FeedForward.load(loader, name, width, inner, activation),
        )

    def __call__(
        self, hidden: Tensor, layout: StepLayout, paged: PagedKV, cross: CrossKV, kept: dict[int, Tensor] | None
    ) -> Tensor:
        qkv = self.qkv(self.norm(hidden))
        paged.write(self.index, layout.slot_mapping, qkv[:, self.width :])
        hidden = hidden + self.out(paged.attend(self.index, qkv[:, : self.width], layout.groups))
        queries = self.cross_query(self.cross_norm(hidden))
        if kept is not None:
            kept[self.index] = queries
        hidden = hidden + self.cross_out(cross.attend(self.index, queries, layout.runs))
        return self.feed_forward(hidden)


@frozen(eq=False, kw_only=True)
class _Decoder:
    tokens: Tensor  # [vocabulary, width]
    positions: Tensor  # [positions, width]
    cross_keys_values: _Linear  # of all layers: one product writes a slot
    layers: tuple[_DecoderLayer, ...]
    norm: _LayerNorm
    head: Tensor  # [vocabulary, width]; the same tensor as ``tokens`` where they are equal

    @classmethod
    def load(cls, loader: _Loader, shape: WhisperShape, inner: int, activation: Activation, *, tied: bool) -> _Decoder:
        width, layers = shape.width, range(shape.decoder_layers)
        tokens = loader.take("decoder.embed_tokens.weight", shape.vocabulary, width)
        cross = [(f"decoder.layers.{index}.encoder_attn", part) for index in layers for part in "kv"]
        return cls(
            tokens=tokens,
            positions=loader.take("decoder.embed_positions.weight", shape.positions, width),
            cross_keys_values=loader.stacked(cross, width, shape.decoder_heads),
            layers=tuple(map(partial(_DecoderLayer.load, loader, shape, inner, activation), layers)),
            norm=loader.norm("decoder.layer_norm", width),
            head=_head(loader, tokens, tied=tied),
        )


def _head(loader: _Loader, tokens: Tensor, *, tied: bool) -> Tensor:
    """The weights' own head, whatever config.json says of it, as in transformers; ``tokens``, the token embedding,
    where they have none, or one that is equal and would only take memory."""
    name = "proj_out.weight"
    if tied and name not in loader.weights:
        return tokens
    if name not in loader.weights:
        raise CheckpointError(
            f"config.json has tie_word_embeddings=false, but there is no weight {name!r}; allowed: the weight, or "
            "tie_word_embeddings=true where the head is the token embedding"
        )
    head = torch.empty_like(tokens)
    loader.weights.get(name, head)
    if torch.equal(head, tokens):
        return tokens
    loader.taken.append(head)
    return head


@define(eq=False, kw_only=True)
class WhisperModel:
    """A loaded model. Every method is for `torch.inference_mode`; the KV it works on is handed in."""

    shape: WhisperShape
    _encoder: _Encoder | None = field(repr=False)
    _decoder: _Decoder | None = field(repr=False)
    _tensors: list[Tensor] = field(repr=False)

    @classmethod
    def load(
        cls,
        weights: Weights,
        shape: WhisperShape,
        *,
        encoder_inner: int,
        decoder_inner: int,
        activation: Activation,
        tied: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> WhisperModel:
        """Takes every tensor of ``weights`` to ``device`` as ``dtype``, one after the other.

        Args:
            tied: the head may be the token embedding, where ``weights`` have no ``proj_out.weight``.

        Raises:
            CheckpointError: a weight is missing or of another shape.
        """
        loader = _Loader(weights=weights, device=device, dtype=dtype, taken=[])
        encoder = _Encoder.load(loader, shape, encoder_inner, activation)
        decoder = _Decoder.load(loader, shape, decoder_inner, activation, tied=tied)
        return cls(shape=shape, encoder=encoder, decoder=decoder, tensors=loader.taken)

    def encode(self, log_mel: Tensor) -> Tensor:
        """Encoder outputs [n, embeddings, width] of features [n, mels, frames] of any float dtype."""
        assert self._encoder is not None, "the model is released"
        return self._encoder(log_mel.to(self._encoder.positions.dtype))

    def cross_keys_values(self, encoder_output: Tensor) -> Tensor:
        """Cross-attention keys and values of all layers, [embeddings, layers * 2 * width], as `CrossKV.write` takes
        them, of one encoder output [embeddings, width]."""
        assert self._decoder is not None, "the model is released"
        return self._decoder.cross_keys_values(encoder_output)

    def decode(
        self,
        token_ids: Tensor,
        layout: StepLayout,
        paged: PagedKV,
        cross: CrossKV,
        kept: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Feeds ``token_ids`` [rows]; the last hidden states [rows, width], before the final norm. Puts the scaled
        queries [rows, width] of each layer's cross-attention into ``kept``, by layer."""
        decoder = self._decoder
        assert decoder is not None, "the model is released"
        hidden = functional.embedding(token_ids, decoder.tokens) + decoder.positions[layout.positions]
        for layer in decoder.layers:
            hidden = layer(hidden, layout, paged, cross, kept)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary], float32, of hidden states [rows, width]."""
        assert self._decoder is not None, "the model is released"
        normed = self._decoder.norm(hidden)
        if normed.device.type == "cpu":  # the wide matrix first: up to twice as fast for few rows
            return (self._decoder.head @ normed.T).T.float().contiguous()
        return functional.linear(normed, self._decoder.head).float()

    def to(self, device: torch.device) -> WhisperModel:
        """The same model with its tensors on ``device``; those that are there already are shared, not copied."""
        moved = {id(tensor): tensor.to(device) for tensor in self._tensors}
        return WhisperModel(
            shape=self.shape,
            encoder=_rebuilt(self._encoder, moved),
            decoder=_rebuilt(self._decoder, moved),
            tensors=list(moved.values()),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The weights."""
        return tuple(self._tensors)

    def release(self) -> None:
        """Forgets every tensor."""
        self._encoder = self._decoder = None
        self._tensors.clear()


def _rebuilt(part: Any, moved: dict[int, Tensor]) -> Any:
    """``part`` of a model with other tensors, which ``moved`` has by the identities of those they replace."""
    if isinstance(part, Tensor):
        return moved[id(part)]
    if isinstance(part, tuple):
        return tuple(map(_rebuilt, part, repeat(moved)))
    if has(type(part)):
        names = [each.name for each in fields(type(part))]
        rebuilt = map(_rebuilt, map(getattr, repeat(part), names), repeat(moved))
        return evolve(part, **dict(zip(names, rebuilt, strict=True)))
    return part

"""Whisper's encoder and decoder (Radford et al. 2022, section 2.2), for inference only, with plain tensors and matrix
products.

The numbers are those of transformers' `WhisperForConditionalGeneration`. `scale_embedding` has no effect here, as in
transformers. The query scale (head_dim ** -0.5) is folded into the query projections when they are loaded.

Loops that load use `map`. An error that passes through a comprehension would keep alive all that the comprehension
refers to (see `core.tracebacks`).

`Loader` takes tensors from a checkpoint onto the model's device: in the model's dtype, in int8, or in the native
library's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from attrs import define, evolve, field, fields, frozen, has
from torch import Tensor
from torch.nn import functional

from ...core.errors import CheckpointError
from ..attention.paged import PagedStep
from ..checkpoints.whisper_checkpoint import Activation, Checkpoint, WeightFiles, WhisperShape
from ..linear.layers import FloatLinear, Int8Linear, Linear, Plain, memory_of
from ..memory.rows import Rows
from ..memory.slots import CrossStep
from ..native.panels import Panels
from ..native.program import Program
from ..native.runner import Runner
from .whisper_program import WhisperProgram, write_encoder, write_program

# -- loading -----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Loader:
    """Loads tensors onto the model's device, in the model's dtype unless they are quantized."""

    weights: WeightFiles
    device: torch.device
    dtype: torch.dtype
    int8: bool  # whether linear layers, embedding and head are quantized
    native: bool  # whether matrices are put in the native library's order
    taken: list[Tensor]

    def take(self, name: str, *shape: int) -> Tensor:
        made = torch.empty(*shape, dtype=self.dtype, device=self.device)
        self.taken.append(made)
        self.weights.get(name, made)
        return made

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        linear = self.blank(outputs, inputs, bias=True)
        self.fill(linear, slice(None), f"{name}.weight")
        assert linear.bias is not None, "a linear layer of Whisper has a bias"
        self.weights.get(f"{name}.bias", linear.bias)
        return self.kept(linear)

    def matrix(self, name: str, outputs: int, inputs: int) -> Plain:
        """Reads a matrix without a bias: the head, or the token embedding. The caller must still pass it to `kept`."""
        linear = self.blank(outputs, inputs, bias=False)
        self.fill(linear, slice(None), name)
        return linear

    def fused(self, name: str, width: int, heads: int) -> Linear:
        """Reads the query, key and value projections of one attention as a single layer."""
        return self.stacked([(name, "q"), (name, "k"), (name, "v")], width, heads)

    def stacked(self, projections: Sequence[tuple[str, str]], width: int, heads: int) -> Linear:
        """Reads several projections as a single layer, one below the other. Each is named by its attention and "q", "k"
        or "v", and is read directly into its rows. So there are never two copies of all projections.
        """
        linear = self.blank(len(projections) * width, width, bias=True)
        assert linear.bias is not None, "it was asked for"
        for index, (name, part) in enumerate(projections):
            rows = slice(index * width, (index + 1) * width)
            scale = (width // heads) ** -0.5 if part == "q" else 1.0
            self.fill(linear, rows, f"{name}.{part}_proj.weight", scale)
            if part == "k":  # Keys have no bias in Whisper.
                linear.bias[rows] = 0.0
            else:
                self.weights.get(f"{name}.{part}_proj.bias", linear.bias[rows], scale=scale)
        return self.kept(linear)

    def blank(self, outputs: int, inputs: int, *, bias: bool) -> Plain:
        """Allocates a linear layer with empty weights."""
        empty = partial(torch.empty, device=self.device)
        added = empty(outputs, dtype=self.dtype) if bias else None
        if self.native or not self.int8:
            return FloatLinear(empty(outputs, inputs, dtype=self.dtype), added)
        weight, scales = empty(outputs, inputs, dtype=torch.int8), empty(outputs, dtype=self.dtype)
        return Int8Linear(weight, scales, added)

    def kept(self, linear: Plain) -> Linear:
        """Returns a layer with loaded weights in the form that the model holds, and records its tensors in
        ``taken``."""
        held: Linear = linear
        if self.native:
            held = Panels.of(linear.weight, linear.bias, dtype=torch.int8 if self.int8 else None)
        self.taken.extend(memory_of(held))
        return held

    def fill(self, linear: Plain, rows: slice, name: str, scale: float = 1.0) -> None:
        """Reads the weight ``name``, times ``scale``, into ``rows`` of the weight of ``linear``."""
        if isinstance(linear, Int8Linear):
            self.weights.quantize(name, linear.weight[rows], linear.scales[rows], scale=scale)
        else:
            self.weights.get(name, linear.weight[rows], scale=scale)


# -- layers ------------------------------------------------------------------------------------------------------------


_BLOCK = 1600 << 10  # bytes of hidden states in one block of rows


@frozen(eq=False)
class _LayerNorm:
    weight: Tensor
    bias: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        return functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias)


@frozen(eq=False, kw_only=True)
class _FeedForward:
    norm: _LayerNorm
    widen: Linear
    narrow: Linear
    activation: Activation

    @classmethod
    def load(cls, loader: Loader, name: str, width: int, inner: int, activation: Activation) -> _FeedForward:
        return cls(
            norm=_norm(loader, f"{name}.final_layer_norm", width),
            widen=loader.linear(f"{name}.fc1", inner, width),
            narrow=loader.linear(f"{name}.fc2", width, inner),
            activation=activation,
        )

    def add_to(self, hidden: Tensor) -> None:
        """Adds the layer's output for ``hidden`` [rows, width] to ``hidden``, in place."""
        hidden += self.narrow(self.activation(self.widen(self.norm(hidden))))


@frozen(eq=False, kw_only=True)
class _EncoderLayer:
    heads: int
    norm: _LayerNorm
    qkv: Linear
    out: Linear
    feed_forward: _FeedForward

    @classmethod
    def load(cls, loader: Loader, shape: WhisperShape, inner: int, activation: Activation, index: int) -> _EncoderLayer:
        name, width, heads = f"encoder.layers.{index}", shape.width, shape.encoder_heads
        return cls(
            heads=heads,
            norm=_norm(loader, f"{name}.self_attn_layer_norm", width),
            qkv=loader.fused(f"{name}.self_attn", width, heads),
            out=loader.linear(f"{name}.self_attn.out_proj", width, width),
            feed_forward=_FeedForward.load(loader, name, width, inner, activation),
        )

    def change(self, hidden: Tensor, room: Tensor) -> None:
        """Computes the layer in place. All operations except attention are computed for some rows at a time.

        Args:
            hidden: [n, embeddings, width].
            room: [n * embeddings, 3 * width], a buffer for queries, keys and values; allocating this much memory would
                cost as much time as a matrix product.
        """
        flat = hidden.view(-1, hidden.shape[-1])
        parts = _row_blocks(flat)
        for rows in parts:
            room[rows] = self.qkv(self.norm(flat[rows]))
        split = room.view(*hidden.shape[:-1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [3, n, heads, rows, size]
        attended = functional.scaled_dot_product_attention(split[0], split[1], split[2], scale=1.0)
        attended = attended.transpose(1, 2).reshape(flat.shape)
        for rows in parts:
            part = flat[rows]
            part += self.out(attended[rows])
            self.feed_forward.add_to(part)
            if part.dtype == torch.float16:  # as in transformers: large models exceed float16's range here
                limit = torch.finfo(torch.float16).max - 1000
                part.clamp_(-limit, limit)


def _row_blocks(rows: Tensor) -> list[slice]:
    """Returns slices that cover ``rows``. On the CPU the slices are small enough that their intermediate results stay
    in the caches."""
    count = -(-rows.nbytes // _BLOCK) if rows.device.type == "cpu" else 1
    size = -(-len(rows) // count)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


@frozen(eq=False)
class _Convolution:
    weight: Tensor  # [outputs, inputs, 3]
    bias: Tensor

    def __call__(self, hidden: Tensor, stride: int) -> Tensor:
        return functional.conv1d(hidden, self.weight, self.bias, stride=stride, padding=1)


@frozen(eq=False, kw_only=True)
class _Encoder:
    stem: tuple[_Convolution, _Convolution]
    positions: Tensor  # [embeddings, width]
    layers: tuple[_EncoderLayer, ...]
    norm: _LayerNorm

    @classmethod
    def load(cls, loader: Loader, checkpoint: Checkpoint) -> _Encoder:
        shape, width = checkpoint.shape, checkpoint.shape.width
        load = partial(_EncoderLayer.load, loader, shape, checkpoint.encoder_inner, checkpoint.activation)
        return cls(
            stem=(
                _convolution(loader, "encoder.conv1", width, shape.mels),
                _convolution(loader, "encoder.conv2", width, width),
            ),
            positions=loader.take("encoder.embed_positions.weight", shape.embeddings, width),
            layers=tuple(map(load, range(shape.encoder_layers))),
            norm=_norm(loader, "encoder.layer_norm", width),
        )

    def embed(self, log_mel: Tensor) -> Tensor:
        """Returns the first layer's input, [n, embeddings, width]."""
        first, second = self.stem
        hidden = functional.gelu(first(log_mel, 1))
        hidden = functional.gelu(second(hidden, 2))
        hidden = hidden.transpose(1, 2).contiguous()
        hidden += self.positions[: hidden.shape[1]]
        return hidden

    def change(self, hidden: Tensor) -> Tensor:
        """Turns ``hidden``, a result of `embed`, into encoder outputs, in place."""
        room = hidden.new_empty(hidden.shape[0] * hidden.shape[1], 3 * hidden.shape[2])
        for layer in self.layers:
            layer.change(hidden, room)
        return self.norm(hidden)


def _norm(loader: Loader, name: str, width: int) -> _LayerNorm:
    return _LayerNorm(loader.take(f"{name}.weight", width), loader.take(f"{name}.bias", width))


def _convolution(loader: Loader, name: str, outputs: int, inputs: int) -> _Convolution:
    return _Convolution(loader.take(f"{name}.weight", outputs, inputs, 3), loader.take(f"{name}.bias", outputs))


@frozen(eq=False, kw_only=True)
class _DecoderLayer:
    index: int
    heads: int
    norm: _LayerNorm
    qkv: Linear
    out: Linear
    cross_norm: _LayerNorm
    cross_query: Linear
    cross_out: Linear
    feed_forward: _FeedForward

    @classmethod
    def load(cls, loader: Loader, shape: WhisperShape, inner: int, activation: Activation, index: int) -> _DecoderLayer:
        name, width, heads = f"decoder.layers.{index}", shape.width, shape.decoder_heads
        return cls(
            index=index,
            heads=heads,
            norm=_norm(loader, f"{name}.self_attn_layer_norm", width),
            qkv=loader.fused(f"{name}.self_attn", width, heads),
            out=loader.linear(f"{name}.self_attn.out_proj", width, width),
            cross_norm=_norm(loader, f"{name}.encoder_attn_layer_norm", width),
            cross_query=loader.stacked([(f"{name}.encoder_attn", "q")], width, heads),
            cross_out=loader.linear(f"{name}.encoder_attn.out_proj", width, width),
            feed_forward=_FeedForward.load(loader, name, width, inner, activation),
        )

    def change(self, hidden: Tensor, step: PagedStep, crossing: CrossStep, kept: dict[int, Tensor] | None) -> None:
        """Computes the layer for the step's rows ``hidden`` [rows, width], in place. Puts the queries of
        cross-attention into ``kept``."""
        asked, keys, values = self.qkv(self.norm(hidden)).view(len(hidden), 3, self.heads, -1).unbind(1)
        attended = step.attend(self.index, asked, keys, values, scale=1.0, window=None, softcap=None)
        hidden += self.out(attended.flatten(1))
        queries = self.cross_query(self.cross_norm(hidden))
        if kept is not None:
            kept[self.index] = queries
        asked = queries.view(len(queries), self.heads, -1)
        hidden += self.cross_out(crossing.attend(self.index, asked, scale=1.0).flatten(1))
        self.feed_forward.add_to(hidden)


@frozen(eq=False, kw_only=True)
class _Decoder:
    tokens: Linear  # [vocabulary, width]
    positions: Tensor  # [positions, width]
    cross_keys_values: Linear  # of all layers, so that one product computes a slot
    layers: tuple[_DecoderLayer, ...]
    norm: _LayerNorm
    head: Linear  # the same object as ``tokens`` if their weights are equal

    @classmethod
    def load(cls, loader: Loader, checkpoint: Checkpoint) -> _Decoder:
        shape, width, layers = checkpoint.shape, checkpoint.shape.width, range(checkpoint.shape.decoder_layers)
        load = partial(_DecoderLayer.load, loader, shape, checkpoint.decoder_inner, checkpoint.activation)
        tokens, head = _embedding_and_head(loader, shape.vocabulary, width, tied=checkpoint.tied)
        cross = [(f"decoder.layers.{index}.encoder_attn", part) for index in layers for part in "kv"]
        return cls(
            tokens=tokens,
            positions=loader.take("decoder.embed_positions.weight", shape.positions, width),
            cross_keys_values=loader.stacked(cross, width, shape.decoder_heads),
            layers=tuple(map(load, layers)),
            norm=_norm(loader, "decoder.layer_norm", width),
            head=head,
        )


def _embedding_and_head(loader: Loader, vocabulary: int, width: int, *, tied: bool) -> tuple[Linear, Linear]:
    """Returns the token embedding and the head. A head in the weights is read even if config.json ties it to the
    embedding, as in transformers. If there is no head, or it equals the embedding, the embedding is also the head,
    which saves memory.
    """
    name = "proj_out.weight"
    if not tied and name not in loader.weights:
        raise CheckpointError(
            f"config.json has tie_word_embeddings=false, but there is no weight {name!r}; allowed: the weight, or "
            "tie_word_embeddings=true where the head is the token embedding"
        )
    tokens = loader.matrix("decoder.embed_tokens.weight", vocabulary, width)
    if name in loader.weights:
        head = loader.matrix(name, vocabulary, width)
        if not _is_same(head, tokens):
            return loader.kept(tokens), loader.kept(head)
    shared = loader.kept(tokens)
    return shared, shared


def _is_same(one: Plain, other: Plain) -> bool:
    """True if two layers without a bias have the same numbers."""
    if isinstance(one, Int8Linear) and isinstance(other, Int8Linear):
        return torch.equal(one.weight, other.weight) and torch.equal(one.scales, other.scales)
    return torch.equal(one.weight, other.weight)


@define(eq=False, kw_only=True)
class WhisperModel:
    """A loaded Whisper model. Every method must run in `torch.inference_mode`; the caller passes the KV."""

    shape: WhisperShape
    _encoder: _Encoder | None = field(repr=False)
    _decoder: _Decoder | None = field(repr=False)
    _tensors: list[Tensor] = field(repr=False)

    @classmethod
    def load(
        cls,
        weights: WeightFiles,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        int8: bool = False,
        native: bool = False,
    ) -> WhisperModel:
        """Loads the tensors of ``weights`` onto ``device`` as ``dtype``, one after the other.

        Args:
            int8: quantizes the matrices while they are read; the model still computes in ``dtype``.
            native: puts the matrices in the native library's order.

        Raises:
            CheckpointError: a weight is missing or has another shape.
        """
        loader = Loader(weights=weights, device=device, dtype=dtype, int8=int8, native=native, taken=[])
        encoder = _Encoder.load(loader, checkpoint)
        decoder = _Decoder.load(loader, checkpoint)
        return cls(shape=checkpoint.shape, encoder=encoder, decoder=decoder, tensors=loader.taken)

    @property
    def decoder(self) -> _Decoder:
        """The parts of the decoder."""
        assert self._decoder is not None, "the model is released"
        return self._decoder

    def encode(self, log_mel: Tensor, runner: Runner | None = None) -> Tensor:
        """Returns encoder outputs [n, frames / 2, width] of features [n, mels, frames] in any float dtype. The features
        are those of whole windows, or of the beginnings of windows.

        Args:
            runner: runs `encoder_program`, one window at a time; ``None``: torch computes.
        """
        assert self._encoder is not None, "the model is released"
        hidden = self._encoder.embed(log_mel.to(self._encoder.positions.dtype))
        if runner is None:
            return self._encoder.change(hidden)
        assert len(hidden) == 1, f"{len(hidden)} windows at a time; allowed: 1"
        return runner.step(hidden[0], Rows.all_of(hidden.shape[1]), hidden=True)[None]

    def cross_keys_values(self, encoder_output: Tensor) -> Tensor:
        """Computes the cross-attention keys and values of all layers from one encoder output [embeddings, width]. The
        result [embeddings, layers * 2 * width] has the form that `CrossKV.write_all` needs."""
        return self.decoder.cross_keys_values(encoder_output)

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: PagedStep,
        crossing: CrossStep,
        kept: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Feeds ``token_ids`` [rows]. Returns the last hidden states [rows, width], before the final norm. Puts the
        scaled queries [rows, width] of each layer's cross-attention into ``kept``, by layer."""
        decoder = self.decoder
        hidden = decoder.tokens.rows(token_ids) + decoder.positions[positions]
        for layer in decoder.layers:
            layer.change(hidden, step, crossing, kept)
        return hidden

    def encoder_program(self) -> Program:
        """Returns the encoder's program for the native library. The program's head computes the keys and values of
        cross-attention. The model must have been loaded with ``native``."""
        assert self._encoder is not None, "the model is released"
        cross = self.decoder.cross_keys_values
        assert not isinstance(cross, Plain), "the model is not in the library's order"
        return write_encoder(self._encoder, self.shape, cross)

    def decoder_program(self) -> WhisperProgram:
        """Returns the decoder's program for the native library. The model must have been loaded with ``native``."""
        return write_program(self.decoder, self.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [rows, vocabulary], float32, of hidden states [rows, width]."""
        return self.decoder.head(self.decoder.norm(hidden)).float()

    def to(self, device: torch.device) -> WhisperModel:
        """Returns the same model with its tensors on ``device``. Tensors that are on ``device`` already are shared, not
        copied."""
        tensors = {id(tensor): tensor.to(device) for tensor in self._tensors}
        made: dict[int, Any] = dict(tensors)
        return WhisperModel(
            shape=self.shape,
            encoder=_rebuilt(self._encoder, made),
            decoder=_rebuilt(self._decoder, made),
            tensors=list(tensors.values()),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The weights."""
        return tuple(self._tensors)

    def release(self) -> None:
        """Forgets every tensor."""
        self._encoder = self._decoder = None
        self._tensors.clear()


def _rebuilt(part: Any, made: dict[int, Any]) -> Any:
    """Returns a copy of ``part`` of a model with other tensors. ``made`` maps the `id` of each old tensor to the new
    one. Rebuilt parts are added to ``made`` under the `id` of the old part, so that a part that occurs twice is rebuilt
    once.
    """
    if id(part) in made:
        return made[id(part)]
    if isinstance(part, tuple):
        return tuple(map(_rebuilt, part, repeat(made)))
    if not has(type(part)):
        return part
    names = [each.name for each in fields(type(part)) if each.init]
    rebuilt = map(_rebuilt, map(getattr, repeat(part), names), repeat(made))
    made[id(part)] = evolve(part, **dict(zip(names, rebuilt, strict=True)))
    return made[id(part)]

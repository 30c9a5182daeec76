"""Whisper's encoder and decoder (Radford et al. 2022, section 2.2) as a module of torch, for inference only. Its parts
have transformers' names.

The numbers are those of transformers' `WhisperForConditionalGeneration`, whose import alone would double the time in
which a small Whisper opens. `scale_embedding` has no effect here, as in transformers. The query scale
(head_dim ** -0.5) is folded into the query projections when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import CheckpointError
from ..attention.paged import PagedStep
from ..checkpoints.whisper_checkpoint import Checkpoint, WeightFiles
from ..linear.modules import QuantizedEmbedding, QuantizedLinear, quantize_modules
from ..linear.rounded import round_matrices
from ..memory.rows import Rows
from ..memory.slots import CrossStep
from ..native.crossed_decoder import CrossedDecoder
from ..native.layers import WHISPER, Layer
from ..native.parts import pack_joined
from ..native.program import Program
from ..native.runner import Runner
from .whisper_program import write_encoder

_HEAD = "proj_out.weight"

# Parts have no memory before their weights are read. torch would draw numbers even for these, and imports 800 modules
# for it, which takes a second and 70 MiB.


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Draws nothing."""


class _Convolution(nn.Conv1d):
    def reset_parameters(self) -> None:
        """Draws nothing."""


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    made: nn.Linear = _Linear(inputs, outputs, bias=bias, device="meta")
    made.__class__ = nn.Linear  # of which others know what it computes
    return made


def _table(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, dtype=torch.float32, device="meta"))


_norm = partial(nn.LayerNorm, device="meta")
_convolution = partial(_Convolution, kernel_size=3, padding=1, device="meta")


@frozen
class WhisperSettings:
    """The settings of a layer, with transformers' names."""

    hidden_size: int
    heads: int
    inner: int
    activation_function: str

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The activation function of the feed-forward part."""
        if self.activation_function == "gelu":  # in every Whisper except in tests; the import below takes two seconds
            return functional.gelu
        from transformers.activations import ACT2FN

        found: Callable[[Tensor], Tensor] = ACT2FN[self.activation_function]
        return found


class WhisperPositions(nn.Module):
    """A table of positions, [positions, width]."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, width, dtype=torch.float32, device="meta"))

    def forward(self, _: object, position_ids: Tensor) -> Tensor:
        return self.weight[position_ids]


class WhisperAttention(nn.Module):
    """The projections of one attention."""

    scaling = 1.0  # the rest is part of the query weights, unless these are blocks, which the library alone reads

    def __init__(self, config: WhisperSettings) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.heads, self.head_dim = config, config.heads, width // config.heads
        self.q_proj, self.k_proj = _linear(width, width), _linear(width, width, bias=False)
        self.v_proj, self.out_proj = _linear(width, width), _linear(width, width)

    def split(self, rows: Tensor) -> Tensor:
        """Returns ``rows`` [..., width] as [..., heads, head_dim]."""
        return rows.view(*rows.shape[:-1], self.heads, self.head_dim)


class WhisperEncoderLayer(nn.Module):
    """A layer of the encoder."""

    def __init__(self, config: WhisperSettings) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn, self.self_attn_layer_norm = WhisperAttention(config), _norm(width)
        self.fc1, self.fc2 = _linear(width, config.inner), _linear(config.inner, width)
        self.final_layer_norm, self.activation = _norm(width), config.activation

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes the layer for ``hidden`` [n, embeddings, width]."""
        own, normed = self.self_attn, self.self_attn_layer_norm(hidden)
        projected = own.q_proj(normed), own.k_proj(normed), own.v_proj(normed)
        queries, keys, values = (own.split(each).transpose(1, 2) for each in projected)
        attended = functional.scaled_dot_product_attention(queries, keys, values, scale=own.scaling)
        hidden = hidden + own.out_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.fc2(self.activation(self.fc1(self.final_layer_norm(hidden))))
        if hidden.dtype == torch.float16:  # as in transformers: large models exceed float16's range here
            limit = torch.finfo(torch.float16).max - 1000
            hidden = hidden.clamp(-limit, limit)
        return hidden


class WhisperDecoderLayer(WhisperEncoderLayer):
    """A layer of the decoder."""

    def __init__(self, config: WhisperSettings) -> None:
        super().__init__(config)
        self.encoder_attn, self.encoder_attn_layer_norm = WhisperAttention(config), _norm(config.hidden_size)

    def step(self, index: int, hidden: Tensor, own: PagedStep, crossing: CrossStep) -> tuple[Tensor, Tensor]:
        """Computes the layer for the step's rows ``hidden`` [rows, width]. Returns them and the queries of
        cross-attention [rows, width]."""
        attention, normed = self.self_attn, self.self_attn_layer_norm(hidden)
        projected = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        attended = own.attend(index, *map(attention.split, projected), scale=1.0, window=None, softcap=None)
        hidden = hidden + attention.out_proj(attended.flatten(1))
        attention = self.encoder_attn
        queries = attention.q_proj(self.encoder_attn_layer_norm(hidden))
        hidden = hidden + attention.out_proj(crossing.attend(index, attention.split(queries), scale=1.0).flatten(1))
        return hidden + self.fc2(self.activation(self.fc1(self.final_layer_norm(hidden)))), queries


class WhisperEncoder(nn.Module):
    """The encoder."""

    def __init__(self, mels: int, embeddings: int, layers: int, config: WhisperSettings) -> None:
        super().__init__()
        width = config.hidden_size
        self.conv1, self.conv2 = _convolution(mels, width), _convolution(width, width, stride=2)
        self.embed_positions = WhisperPositions(embeddings, width)
        self.layers: Any = nn.ModuleList([WhisperEncoderLayer(config) for _ in range(layers)])
        self.layer_norm, self.config = _norm(width), config

    def embed(self, log_mel: Tensor) -> Tensor:
        """Returns the first layer's input, [n, embeddings, width]."""
        hidden = functional.gelu(self.conv2(functional.gelu(self.conv1(log_mel))))
        hidden = hidden.transpose(1, 2).contiguous()
        hidden += self.embed_positions.weight[: hidden.shape[1]]
        return hidden


class WhisperDecoder(nn.Module):
    """The decoder."""

    def __init__(self, vocabulary: int, positions: int, layers: int, config: WhisperSettings) -> None:
        super().__init__()
        self.embed_tokens = _table(vocabulary, config.hidden_size)
        self.embed_positions = WhisperPositions(positions, config.hidden_size)
        self.layers: Any = nn.ModuleList([WhisperDecoderLayer(config) for _ in range(layers)])
        self.layer_norm, self.config = _norm(config.hidden_size), config


class WhisperModel(nn.Module):
    """Whisper. Its methods must run in `torch.inference_mode`; the caller passes the KV."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        shape = checkpoint.shape
        settings = partial(WhisperSettings, shape.width, activation_function=checkpoint.activation)
        encoding = settings(heads=shape.encoder_heads, inner=checkpoint.encoder_inner)
        self.config = settings(heads=shape.decoder_heads, inner=checkpoint.decoder_inner)
        self.encoder = WhisperEncoder(shape.mels, shape.embeddings, shape.encoder_layers, encoding)
        self.decoder = WhisperDecoder(shape.vocabulary, shape.positions, shape.decoder_layers, self.config)
        self.proj_out: nn.Linear | QuantizedLinear = _linear(shape.width, shape.vocabulary, bias=False)

    def get_decoder(self) -> nn.Module:
        """Returns the part that has the decoder's layers."""
        return self.decoder

    def get_output_embeddings(self) -> nn.Module:
        """Returns the part that computes logits from the last hidden states."""
        return self.proj_out

    def encode(self, log_mel: Tensor, runner: Runner | None = None) -> Tensor:
        """Returns encoder outputs [n, frames / 2, width] of features [n, mels, frames] in any float dtype. The features
        are those of whole windows, or of the beginnings of windows.

        Args:
            runner: runs `encoder_program`, one window at a time; ``None``: torch computes.
        """
        hidden = self.encoder.embed(log_mel.to(self.encoder.embed_positions.weight.dtype))
        if runner is not None:
            assert len(hidden) == 1, f"{len(hidden)} windows at a time; allowed: 1"
            return runner.step(hidden[0].float(), Rows.all_of(hidden.shape[1]), hidden=True)[None].to(hidden.dtype)
        for layer in self.encoder.layers:
            hidden = layer(hidden)
        found: Tensor = self.encoder.layer_norm(hidden)
        return found

    def decode(
        self, token_ids: Tensor, positions: Tensor, own: PagedStep, crossing: CrossStep
    ) -> tuple[Tensor, list[Tensor]]:
        """Feeds ``token_ids`` [rows]. Returns the last hidden states [rows, width], before the final norm, and for each
        layer the scaled queries of cross-attention [rows, width]."""
        hidden = self.decoder.embed_tokens(token_ids) + self.decoder.embed_positions(None, positions)
        kept = list[Tensor]()
        for index, layer in enumerate(self.decoder.layers):
            hidden, queries = layer.step(index, hidden, own, crossing)
            kept.append(queries)
        return hidden, kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [rows, vocabulary], float32, of hidden states [rows, width]."""
        found: Tensor = self.proj_out(self.decoder.layer_norm(hidden))
        return found.float()

    def encoder_program(self) -> Program:
        """Returns the encoder's program for the native library. The program's head computes the keys and values of
        cross-attention in all layers. The model must have been loaded with ``native``."""
        return write_encoder(self.encoder, self.decoder.layers[0].encoder_attn.k_proj.panels())


def load_whisper(
    files: WeightFiles,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    native: bool,
) -> WhisperModel:
    """Loads the tensors of ``files`` onto ``device`` as ``dtype``, one after the other.

    Args:
        quantization: quantizes the matrices by the values in the files; the model still computes in ``dtype``.
            ``"int4"`` needs ``native``.
        native: puts the matrices in the native library's order.

    Each layer is quantized or packed when it is read, so that the model is never held twice. Matrices in blocks are
    packed as they are. The projections that make a slot's keys and values are read first and packed together, from all
    layers.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    if not checkpoint.tied and _HEAD not in files:
        raise CheckpointError(
            f"config.json has tie_word_embeddings=false, but there is no weight {_HEAD!r}; allowed: the weight, or "
            "tie_word_embeddings=true where the head is the token embedding"
        )
    module, int8 = WhisperModel(checkpoint).eval(), quantization is not None
    decoder, layers = CrossedDecoder(module), module.decoder.layers
    matrices = torch.float32 if int8 and not native else dtype
    read = partial(_read, module, files, device=device, dtype=dtype, matrices=matrices, blocks=native)
    read("decoder.embed_tokens")
    if _HEAD in files:  # even if config.json ties it to the embedding, as in transformers
        read("proj_out")
    words = module.decoder.embed_tokens
    if isinstance(words, QuantizedEmbedding):
        if _HEAD not in files:
            module.proj_out = QuantizedLinear(words.weight, words.scales, None)
    elif _HEAD not in files or torch.equal(module.proj_out.weight, words.weight):
        module.proj_out.weight = words.weight
    if native:
        decoder.pack_words(int8=int8)
    elif int8:
        quantize_modules(module, module.decoder.embed_tokens, dtype)  # and the head
    if native:  # one product computes a slot
        crossing = list[tuple[nn.Module, str]]()
        for index, layer in enumerate(layers):
            for name in ("k_proj", "v_proj"):
                read(f"decoder.layers.{index}.encoder_attn.{name}")
                crossing.append((layer.encoder_attn, name))
        pack_joined(crossing, int8=int8)
    for index, layer in enumerate(layers):
        read(f"decoder.layers.{index}")
        if quantization == "int4":
            round_matrices(layer)
        if native:
            decoder.pack_layer(layer, int8=int8)
        elif int8:
            quantize_modules(layer, layer, dtype)
    for index, layer in enumerate(module.encoder.layers):
        read(f"encoder.layers.{index}")
        if quantization == "int4":
            round_matrices(layer)
        if native:
            Layer.of(layer, WHISPER).pack(int8=int8)
        elif int8:
            quantize_modules(layer, layer, dtype)
    read("")
    return module


def _read(
    module: WhisperModel,
    files: WeightFiles,
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    matrices: torch.dtype,
    blocks: bool,
) -> None:
    """Reads those weights of the part ``name`` that have not been read. ``matrices`` is the dtype of the matrices of
    linear layers and of the token embedding. Those that are in int8 in the files stay so, and with ``blocks`` those in
    blocks."""
    for key, parameter in list(module.get_submodule(name).named_parameters(name)):
        if not parameter.is_meta:
            continue
        holder, _, leaf = key.rpartition(".")
        attention, _, part = holder.rpartition(".")
        above: Any = module.get_submodule(attention)
        scale = above.head_dim**-0.5 if part == "q_proj" and above.scaling == 1.0 else 1.0
        plain = isinstance(module.get_submodule(holder), nn.Linear | nn.Embedding) and leaf == "weight"
        if plain and f"{holder}.scales" in files:
            values = torch.empty(parameter.shape, dtype=torch.int8, device=device)
            scales = torch.empty(len(values), dtype=dtype, device=device)
            files.get(key, values)
            files.get(f"{holder}.scales", scales, scale=scale)
            words = isinstance(module.get_submodule(holder), nn.Embedding)
            setattr(above, part, QuantizedEmbedding(values, scales) if words else QuantizedLinear(values, scales, None))
            continue
        if plain and blocks and (unread := files.unread(key, parameter.shape, dtype)) is not None:
            module.get_submodule(holder).weight = nn.Parameter(unread, requires_grad=False)
            if part == "q_proj":
                above.scaling = scale
            continue
        made = torch.empty(parameter.shape, dtype=matrices if plain else dtype, device=device)
        files.get(key, made, scale=scale)
        owner = module.get_submodule(holder)
        setattr(owner, leaf, made if isinstance(owner, QuantizedLinear) else nn.Parameter(made, requires_grad=False))

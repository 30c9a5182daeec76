"""Whisper's encoder and decoder as programs of the native library (Radford et al. 2022, section 2.2)."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import Tensor
from torch.nn import functional

from ..checkpoints.whisper_checkpoint import Activation, WhisperShape
from ..native.library import ACTIVATIONS, Ending
from ..native.panels import Panels
from ..native.program import MULTIPLE, Attention, Normed, Program


@frozen(eq=False)
class WhisperProgram:
    """The program, and the buffers that hold the queries of cross-attention, by layer."""

    program: Program
    queries: tuple[int, ...]


def unknown(shape: WhisperShape, activation: Activation) -> str | None:
    """The reason why the native library cannot run the encoder and decoder; ``None``: it can."""
    if activation is not functional.gelu:
        return "its activation is not gelu"
    if shape.width % MULTIPLE:
        return f"its width is {shape.width}; known: multiples of {MULTIPLE}"
    return None


def write_encoder(encoder: Any, shape: WhisperShape, cross: Panels) -> Program:
    """Returns the program of an encoder without its convolutions. The program ends with the encoder output. Its head is
    ``cross``, which computes the keys and values of cross-attention in all layers.
    """
    program, width, heads = Program(), shape.width, shape.encoder_heads
    inner = encoder.layers[0].feed_forward.widen.outputs
    hidden, split, attended = program.buffer(width), program.buffer(3 * width), program.buffer(width)
    widened = program.buffer(inner)
    for layer in encoder.layers:
        program.linear(hidden, split, layer.qkv, Ending.STORE, norm=_norm(layer.norm))
        program.attend_all(split, attended, heads=heads, size=width // heads)
        program.linear(attended, hidden, layer.out, Ending.ADD)
        _feed_forward(program, hidden, widened, layer.feed_forward)
    last = program.buffer(width)
    program.norm(hidden, last, _norm(encoder.norm), wanted=True)
    program.linear(last, program.buffer(cross.outputs), cross, Ending.STORE, wanted=True)
    program.has_head = True
    return program


def write_program(decoder: Any, shape: WhisperShape) -> WhisperProgram:
    """Returns the program of a decoder whose matrices are in panels. The query scales are part of the weights."""
    program, width, heads = Program(), shape.width, shape.decoder_heads
    inner = decoder.layers[0].feed_forward.widen.outputs
    hidden, split, attended = program.buffer(width), program.buffer(3 * width), program.buffer(width)
    queries = tuple(map(program.buffer, [width] * len(decoder.layers)))  # no closure here, see `core.tracebacks`
    widened = program.buffer(inner)
    program.look_up(hidden, decoder.tokens, 1.0, decoder.positions.clone())
    for layer, query in zip(decoder.layers, queries, strict=True):
        size = width // heads
        attention = Attention(layer=layer.index, heads=heads, kv_heads=heads, size=size, scale=1.0, turned=0)
        program.linear(hidden, split, layer.qkv, Ending.STORE, norm=_norm(layer.norm))
        program.attend(split, attended, attention)
        program.linear(attended, hidden, layer.out, Ending.ADD)
        program.linear(hidden, query, layer.cross_query, Ending.STORE, norm=_norm(layer.cross_norm))
        program.cross(query, attended, attention)
        program.linear(attended, hidden, layer.cross_out, Ending.ADD)
        _feed_forward(program, hidden, widened, layer.feed_forward)
    last = program.buffer(width)
    program.norm(hidden, last, _norm(decoder.norm), wanted=True)
    program.linear(last, program.buffer(shape.vocabulary), decoder.head, Ending.STORE, wanted=True)
    program.has_head = program.chooses = True
    return WhisperProgram(program, queries)


def _feed_forward(program: Program, hidden: int, widened: int, feed: Any) -> None:
    norm, gelu = _norm(feed.norm), ACTIVATIONS["gelu"]
    program.linear(hidden, widened, feed.widen, Ending.ACTIVATED, norm=norm, activation=gelu)
    program.linear(widened, hidden, feed.narrow, Ending.ADD)


def _norm(norm: Any) -> Normed:
    """Returns a layer norm with torch's default epsilon."""
    gain: Tensor = norm.weight
    return Normed(gain=gain.clone(), shift=norm.bias.clone(), epsilon=1e-5)

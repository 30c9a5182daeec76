"""Whisper's encoder as a program of the native library (Radford et al. 2022, section 2.2). `CrossedDecoder` writes the
decoder's."""

from __future__ import annotations

from typing import Any

from ..checkpoints.whisper_checkpoint import WhisperShape
from ..native.layers import WHISPER, Layer
from ..native.library import ACTIVATIONS, Ending
from ..native.panels import Panels
from ..native.parts import norm_of
from ..native.program import MULTIPLE, Attention, Program


def unknown(shape: WhisperShape, activation: str) -> str | None:
    """The reason why the native library cannot run the encoder and decoder; ``None``: it can."""
    if activation not in ACTIVATIONS:
        return f"its activation is {activation}; known: {', '.join(ACTIVATIONS)}"
    if shape.width % MULTIPLE:
        return f"its width is {shape.width}; known: multiples of {MULTIPLE}"
    return None


def write_encoder(encoder: Any, cross: Panels) -> Program:
    """Returns the program of an encoder without its convolutions. The program ends with the encoder output. Its head is
    ``cross``, which computes the keys and values of cross-attention in all layers.
    """
    program, width, heads = Program(), encoder.config.hidden_size, encoder.config.heads
    layers = [Layer.of(layer, WHISPER, ahead=True) for layer in encoder.layers]
    buffers = layers[0].buffers(program)
    for each, layer in zip(encoder.layers, layers, strict=True):
        attention = Attention.plain(heads, width // heads, each.self_attn.scaling)
        layer.write(program, buffers, attention, ACTIVATIONS[encoder.config.activation_function])
    last = program.buffer(width)
    program.norm(buffers[0], last, norm_of(encoder.layer_norm), wanted=True)
    program.linear(last, program.buffer(cross.outputs), cross, Ending.STORE, wanted=True)
    program.has_head = True
    return program

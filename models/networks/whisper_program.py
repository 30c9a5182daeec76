"""Whisper's encoder as a program of the native library (Radford et al. 2022, section 2.2). `CrossedDecoder` writes the
decoder's."""

from __future__ import annotations

from typing import Any

from ..checkpoints.whisper_checkpoint import WhisperShape
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
    activation = ACTIVATIONS[encoder.config.activation_function]
    hidden, split, attended = program.buffer(width), program.buffer(3 * width), program.buffer(width)
    widened = program.buffer(encoder.config.inner)
    attention = Attention.plain(heads, width // heads)  # queries are scaled already
    for layer in encoder.layers:
        own, norm, widen_norm = layer.self_attn, norm_of(layer.self_attn_layer_norm), norm_of(layer.final_layer_norm)
        program.linear(hidden, split, own.q_proj.panels(), Ending.STORE, norm=norm)
        program.attend_all(split, attended, attention)
        program.linear(attended, hidden, own.out_proj.panels(), Ending.ADD)
        widen, narrow = layer.fc1.panels(), layer.fc2.panels()
        program.linear(hidden, widened, widen, Ending.ACTIVATED, norm=widen_norm, activation=activation)
        program.linear(widened, hidden, narrow, Ending.ADD)
    last = program.buffer(width)
    program.norm(hidden, last, norm_of(encoder.layer_norm), wanted=True)
    program.linear(last, program.buffer(cross.outputs), cross, Ending.STORE, wanted=True)
    program.has_head = True
    return program

"""Encoders of speech, whose modules have the names of transformers, as programs of the native library. What
is before the layers is computed clip by clip, so that the bits of a clip depend on no other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from .library import ACTIVATIONS, Ending
from .parts import PackedConvolution, is_known, norm_of, pack_linears, turns_of, unknown_turns
from .program import MULTIPLE, Attention, Program

MODEL_TYPES = frozenset({"moonshine"})
"""Model types of configurations whose encoders this module knows."""

_ROWS = (9, 40)  # of made-up clips
Payload = Mapping[str, Tensor]


@frozen(kw_only=True, eq=False)
class _Kind:
    """The knowledge of encoders that have one class of layers.

    Args:
        matrices: for each packed matrix of a layer, the name of a part of the layer and the names of its linear layers
            that the matrix joins.
        convolutions: the names of packed convolutions. The last one is part of the program, the others are the stem.
        embed: returns the input of the program, [rows, width], by the products of the stem.
        unknown: returns the reason why an encoder is not known, or ``None``.
        write: adds all operations but the last norm to a program, and returns the buffer of the hidden states.
        final: the name of the last norm.
        clip: makes a clip of about as many rows.
    """

    matrices: tuple[tuple[str, tuple[str, ...]], ...]
    convolutions: tuple[str, ...]
    embed: Callable[[Any, Payload, Callable[[Tensor], Tensor]], Tensor]
    unknown: Callable[[Any], str | None]
    write: Callable[[Any, Program, int], int]
    final: str
    clip: Callable[[Any, int], Payload]


@frozen(eq=False)
class SpeechEncoder:
    """One of transformers' encoders of speech, ``module``."""

    module: Any

    @property
    def _kind(self) -> _Kind:
        return _KINDS[type(self.module.layers[0]).__name__]

    @property
    def _linears(self) -> list[tuple[Any, tuple[str, ...]]]:
        """The module and the names of the linear layers that each packed matrix of the layers joins."""
        return [(getattr(layer, part), names) for layer in self.module.layers for part, names in self._kind.matrices]

    def unknown(self) -> str | None:
        """Returns the reason why the encoder cannot be a program; ``None``: it can."""
        names = {type(layer).__name__ for layer in getattr(self.module, "layers", ())}
        if len(names) != 1 or names - _KINDS.keys():
            return f"the layers of its encoder are {', '.join(sorted(names)) or 'none'}; known: {', '.join(_KINDS)}"
        if not all(is_known(getattr(parent, name)) for parent, names in self._linears for name in names):
            return "the linear layers of its encoder are not torch's"
        if self.module.config.hidden_size % MULTIPLE:
            return f"the width of its encoder is {self.module.config.hidden_size}; known: multiples of {MULTIPLE}"
        return self._kind.unknown(self.module)

    def pack(self, *, int8: bool = False) -> None:
        """Replaces the linear layers by packed matrices, one after the other, and convolutions likewise."""
        for parent, names in self._linears:
            pack_linears(parent, names, int8=int8)
        for name in self._kind.convolutions:
            setattr(self.module, name, PackedConvolution(getattr(self.module, name), int8=int8))

    def embed(self, payload: Payload, stem: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the input of the program, [rows, width], for one clip. ``stem`` runs `stem_program`."""
        return self._kind.embed(self.module, payload, stem)

    def stem_program(self) -> Program:
        """Writes the program of the product in front of `program`: windows in, activated values out."""
        program, panels = Program(), getattr(self.module, self._kind.convolutions[0]).linear.panels()
        windows, values = program.buffer(panels.inputs), program.buffer(panels.outputs)
        program.linear(windows, values, panels, Ending.ACTIVATED, activation=ACTIVATIONS["gelu"])
        return program

    def clips(self) -> list[Payload]:
        """Returns made-up clips of different lengths."""
        return [self._kind.clip(self.module, rows) for rows in _ROWS]

    def program(self, positions: int) -> Program:
        """Writes the program of the encoder, which must be packed, for clips of up to ``positions`` rows. The program
        ends with the encoder output."""
        program = Program()
        hidden = self._kind.write(self.module, program, positions)
        last, norm = program.buffer(program.widths[hidden]), norm_of(getattr(self.module, self._kind.final))
        program.norm(hidden, last, norm, wanted=True)
        return program


# -- Moonshine (Jeffries et al. 2024) ----------------------------------------------------------------------------------


def _embed_moonshine(encoder: Any, payload: Payload, stem: Callable[[Tensor], Tensor]) -> Tensor:
    first = encoder.conv1
    windows = payload["input_values"].unfold(0, *first.kernel_size, *first.stride)
    hidden = encoder.groupnorm(functional.linear(windows, first.weight[:, 0]).tanh_().T[None])[0].T
    return encoder.conv3.windows(stem(encoder.conv2.windows(hidden)))


def _clip_of_samples(_: Any, rows: int) -> Payload:
    return {"input_values": torch.arange(511 + 384 * rows, dtype=torch.float32).mul(0.03).sin()}


def _unknown_moonshine(encoder: Any) -> str | None:
    own, activation = encoder.layers[0].self_attn, encoder.config.encoder_hidden_act
    if activation not in ACTIVATIONS:
        return f"the activation of its encoder is {activation}; known: {', '.join(ACTIVATIONS)}"
    if own.q_proj.out_features != own.k_proj.out_features:
        return "its encoder has fewer heads of keys than of queries"
    return unknown_turns(encoder.config)


def _write_moonshine(encoder: Any, program: Program, positions: int) -> int:
    first, convolution = encoder.layers[0], encoder.conv3.linear.panels()
    windows, hidden = program.buffer(convolution.inputs), program.buffer(convolution.outputs)
    program.linear(windows, hidden, convolution, Ending.ACTIVATED, activation=ACTIVATIONS["gelu"])
    program.turns.append(turns_of(encoder.rotary_emb, positions))
    own, inner = first.self_attn, program.buffer(first.mlp.fc1.out_features)
    split, attended = program.buffer(own.q_proj.panels().outputs), program.buffer(own.o_proj.in_features)
    attention = Attention.plain(
        own.q_proj.out_features // own.head_dim,
        own.head_dim,
        float(own.scaling),
        turned=2 * program.turns[0][0].shape[1],
        paired=True,
    )
    activation = ACTIVATIONS[encoder.config.encoder_hidden_act]
    for layer in encoder.layers:
        own, feed = layer.self_attn, layer.mlp
        norm, second = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
        program.linear(hidden, split, own.q_proj.panels(), Ending.STORE, norm=norm)
        program.attend_all(split, attended, attention)
        program.linear(attended, hidden, own.o_proj.panels(), Ending.ADD)
        program.linear(hidden, inner, feed.fc1.panels(), Ending.ACTIVATED, norm=second, activation=activation)
        program.linear(inner, hidden, feed.fc2.panels(), Ending.ADD)
    return hidden


_KINDS = {
    "MoonshineEncoderLayer": _Kind(
        matrices=(
            ("self_attn", ("q_proj", "k_proj", "v_proj")),
            ("self_attn", ("o_proj",)),
            ("mlp", ("fc1",)),
            ("mlp", ("fc2",)),
        ),
        convolutions=("conv2", "conv3"),
        embed=_embed_moonshine,
        unknown=_unknown_moonshine,
        write=_write_moonshine,
        final="layer_norm",
        clip=_clip_of_samples,
    ),
}

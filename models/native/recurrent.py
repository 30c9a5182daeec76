"""Recurrent parts of decoders' layers: they read the rows before a row by a state, which is fixed in size.

Each has a linear layer in front and one behind. Between them are a short convolution (LFM2), a convolution and the
gated delta rule (Yang et al. 2024, "Gated Delta Networks"), or a convolution and a state space (Dao and Gu 2024,
"Mamba-2").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from .library import ACTIVATIONS
from .parts import epsilon_of, gain_of, plain
from .program import MULTIPLE, Program
from .recurrences import Gate, Recurrence


@frozen(eq=False)
class Rooms:
    """The buffers of a program that its layers share, by what they are for and their width."""

    program: Program
    _made: dict[tuple[str, int], int] = field(factory=dict, init=False)

    def __call__(self, name: str, width: int) -> int:
        if (name, width) not in self._made:
            self._made[name, width] = self.program.buffer(width)
        return self._made[name, width]


@frozen(eq=False)
class Recurrent:
    """A recurrent part of a layer."""

    module: Any
    enter = ("in_proj",)  # the names of its first linear layers, which one matrix joins
    leave = "out_proj"
    convolution = "conv1d"

    @property
    def order(self) -> Tensor | None:
        """The order of the outputs of the first matrix, as for `packed`."""
        return None

    @property
    def kept(self) -> int:
        """The number of rows that the convolution reads before a row's own."""
        return len(self._taps()) - 1

    def unknown(self) -> str | None:
        """Returns the reason why the library does not compute the part; ``None``: it does."""
        width = self._taps().shape[1]
        if width % MULTIPLE:
            return f"its convolutions have a width of {width}; known: multiples of {MULTIPLE}"
        activation = getattr(self.module, "activation", "silu")
        return None if activation in ACTIVATIONS else f"its recurrent layers have the activation {activation}"

    def write(self, program: Program, rooms: Rooms, split: int) -> int:
        """Adds the operations between the matrices. ``split`` is the buffer of the first one's outputs; returns the
        buffer that the other one reads."""
        raise NotImplementedError

    def room(self, outputs: int) -> int:
        """Returns the width of the buffer of the first matrix's ``outputs``."""
        return outputs

    def _taps(self) -> Tensor:
        return plain(getattr(self.module, self.convolution).weight[:, 0].T)

    def _convolve(self, program: Program, source: int, to: int, column: int = 0, by: Tensor | float = 1.0) -> None:
        """Adds the convolution of the numbers from ``column`` on, which are multiplied with ``by`` first."""
        bias, taps = getattr(self.module, self.convolution).bias, self._taps()
        shift = torch.zeros(taps.shape[1], dtype=torch.float32) if bias is None else plain(bias)
        kind, before = getattr(self.module, "activation", None), len(taps) - 1
        activation = None if kind is None else ACTIVATIONS[kind]
        program.convolve(source, to, taps * by, shift, before=before, activation=activation, column=column)


@frozen(eq=False)
class ShortConvolution(Recurrent):
    """LFM2's: what is convolved is opened by gates before and behind."""

    convolution = "conv"

    def write(self, program: Program, rooms: Rooms, split: int) -> int:
        width = self._taps().shape[1]
        opened, found = rooms("opened", width), rooms("convolved", width)
        program.gate(split, opened, split, Gate(heads=1, size=width, column=2 * width))
        self._convolve(program, opened, found)
        program.gate(found, opened, split, Gate(heads=1, size=width, first=width))
        return opened


@frozen(eq=False)
class DeltaNet(Recurrent):
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid. The matrix has queries, keys, values, gates of the
    outputs, strengths, and decays."""

    @property
    def enter(self) -> tuple[str, ...]:  # type: ignore[override]
        ways = (
            ("in_proj_qkvz", "in_proj_ba"),
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        )
        return next(names for names in ways if hasattr(self.module, names[0]))

    @property
    def leave(self) -> str:  # type: ignore[override]
        return "out_proj" if hasattr(self.module, "out_proj") else "o_proj"

    @property
    def order(self) -> Tensor | None:
        if not hasattr(self.module, "in_proj_qkvz"):
            return None
        module, shared = self.module, self.module.num_v_heads // self.module.num_k_heads  # heads of one key
        keys, own = module.head_k_dim, shared * module.head_v_dim
        wide = torch.arange(2 * (module.key_dim + module.value_dim)).view(module.num_k_heads, -1)
        narrow = torch.arange(2 * module.num_v_heads).view(module.num_k_heads, -1) + wide.numel()
        found, first = list[Tensor](), 0
        for outputs in (keys, keys, own, own, shared, shared):  # of each head of keys, in its outputs of both layers
            found.append(torch.cat([wide, narrow], 1)[:, first : first + outputs].flatten())
            first += outputs
        return torch.cat(found)

    def write(self, program: Program, rooms: Rooms, split: int) -> int:
        module, width = self.module, self._taps().shape[1]
        mixed, made = rooms("convolved", width), rooms("made", module.value_dim)
        self._convolve(program, split, mixed)
        recurrence = Recurrence(
            heads=module.num_v_heads,
            groups=module.num_k_heads,
            size=module.head_v_dim,
            depth=module.head_k_dim,
            first=width + module.value_dim,
            decay=-plain(module.A_log).exp(),
            shift=plain(module.dt_bias),
            delta=True,
            scale=module.head_k_dim**-0.5,
            epsilon=1e-6,
            most=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        )
        norm = module.norm if hasattr(module, "norm") else module.o_norm
        program.recur(mixed, made, split, recurrence)
        gate = Gate(
            heads=module.num_v_heads,
            size=module.head_v_dim,
            first=width,
            activation=ACTIVATIONS["silu"],
            gain=gain_of(norm),
            epsilon=epsilon_of(norm),
        )
        program.gate(made, made, split, gate)
        return made


@frozen(eq=False)
class StateSpace(Recurrent):
    """The state space of Mamba 2 and its kin. The matrix has gates of the outputs, what is convolved (values, keys and
    queries), and steps. Falcon-H1 multiplies the five with numbers of their own."""

    def unknown(self) -> str | None:
        if self._factors() != [1.0] * 5 and self.module.in_proj.bias is not None:
            return "its recurrent layers have both biases and factors"
        return super().unknown()

    def _factors(self) -> list[float]:
        module, width = self.module, self._taps().shape[1]
        vector, by = getattr(module, "mup_vector", None), getattr(module, "ssm_in_multiplier", 1.0)
        inner, keys = module.intermediate_size, (width - module.intermediate_size) // 2
        firsts = (0, inner, 2 * inner, 2 * inner + keys, inner + width)
        return [by * (1.0 if vector is None else float(vector.flatten()[first])) for first in firsts]

    def room(self, outputs: int) -> int:
        return outputs + int(self.module.num_heads)  # for decays

    def write(self, program: Program, rooms: Rooms, split: int) -> int:
        module, inner, width = self.module, self.module.intermediate_size, self._taps().shape[1]
        mixed, made = rooms("convolved", width), rooms("made", inner)
        of_gates, of_values, of_keys, of_queries, of_steps = self._factors()
        keys = torch.full(((width - inner) // 2,), of_keys, dtype=torch.float32)
        by = torch.cat([keys.new_full((inner,), of_values), keys, torch.full_like(keys, of_queries)])
        self._convolve(program, split, mixed, inner, by)
        least, most = module.time_step_limit
        recurrence = Recurrence(
            heads=module.num_heads,
            groups=module.n_groups,
            size=module.head_dim,
            depth=module.ssm_state_size,
            first=inner + width,
            decay=-plain(module.A_log).exp(),
            shift=plain(module.dt_bias),
            delta=False,
            skip=plain(module.D),
            factor=of_steps,
            least=float(least),
            most=float(most),
        )
        program.recur(mixed, made, split, recurrence)
        norm, groups = getattr(module, "norm", None), module.n_groups
        normed: dict[str, Any] = {}
        if hasattr(norm, "weight"):
            normed = {"gain": gain_of(norm), "epsilon": epsilon_of(norm)}
            normed["norm_first"] = getattr(norm, "norm_before_gate", False)
        gate = Gate(heads=groups, size=inner // groups, scale=of_gates, activation=ACTIVATIONS["silu"], **normed)
        program.gate(made, made, split, gate)
        return made


KINDS: dict[str, Callable[[Any], Recurrent]] = {
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
    "Lfm3ShortConv": ShortConvolution,
    "Qwen3NextGatedDeltaNet": DeltaNet,
    "Qwen3_5GatedDeltaNet": DeltaNet,
    "Qwen3_5MoeGatedDeltaNet": DeltaNet,
    "OlmoHybridGatedDeltaNet": DeltaNet,
    "GraniteMoeHybridMambaLayer": StateSpace,
    "Mamba2Mixer": StateSpace,
    "NemotronHMamba2Mixer": StateSpace,
    "FalconH1Mixer": StateSpace,
    "BambaMixer": StateSpace,
}
"""The recurrent parts that the library computes, by their classes in transformers."""

"""Layers of encoders: attention and a feed-forward part, each with a residual sum and a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen
from torch import nn
from torch.nn import functional

from .library import Ending
from .panels import PANEL, Panels
from .parts import norm_of, pack_linears
from .program import Attention, Program

Buffers = tuple[int, int, int, int]
"""The buffers of hidden states, of queries, keys and values, of what is attended, and within the feed-forward part."""

Paths = tuple[str, str, str, str, str, str]
"""The names in a layer: its linear layers, as in `Layer.matrices`, and its norms. Linear layers that a matrix joins
stand behind one another."""

WHISPER: Paths = (
    *("self_attn.q_proj k_proj v_proj", "self_attn.out_proj", "fc1", "fc2"),
    *("self_attn_layer_norm", "final_layer_norm"),
)
MOONSHINE: Paths = (
    *("self_attn.q_proj k_proj v_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2"),
    *("input_layernorm", "post_attention_layernorm"),
)


def joined(layer: Any, paths: Sequence[str]) -> list[tuple[Any, tuple[str, ...]]]:
    """Returns the `Matrices.matrices` of a ``layer`` of transformers. Names that it does not have are left out."""
    split = [path.rpartition(".") for path in paths]
    parted = [(layer.get_submodule(holder), names.split()) for holder, _, names in split]
    return [(holder, tuple(name for name in names if hasattr(holder, name))) for holder, names in parted]


@frozen(kw_only=True, eq=False)
class Matrices:
    """The packed matrices of a layer.

    Args:
        matrices: for each matrix, a module and the names of its linear layers that the matrix joins.
    """

    matrices: Sequence[tuple[Any, tuple[str, ...]]]

    @property
    def linears(self) -> list[Any]:
        """The linear layers."""
        return [getattr(parent, name) for parent, names in self.matrices for name in names]

    def panels(self) -> list[Panels]:
        """Returns the panels of each matrix. The matrices must be packed."""
        return [getattr(parent, names[0]).panels() for parent, names in self.matrices]


@frozen(kw_only=True, eq=False)
class Layer(Matrices):
    """The parts of one layer, independent of their names in transformers. Its matrices are: queries, keys and values;
    outputs of attention; the first and the second of the feed-forward part.

    Args:
        norms: the norms of attention and of the feed-forward part. An ``nn.Identity`` is none.
        ahead: true if norms precede attention and the feed-forward part.
        window: the number of positions on each side that a row sees, its own included; 0: all.
        kind: the kind of rotary positions, if there are several.
    """

    norms: tuple[Any, Any]
    gated: bool = False
    ahead: bool = False
    window: int = 0
    kind: tuple[str, ...] = ()

    @classmethod
    def of(cls, layer: Any, paths: Paths, *, ahead: bool = False) -> Layer:
        """Returns the parts of a ``layer`` of transformers."""
        matrices = joined(layer, paths[:4])
        return cls(
            matrices=matrices,
            norms=(layer.get_submodule(paths[4]), layer.get_submodule(paths[5])),
            gated=matrices[2][1] in {("gate_proj", "up_proj"), ("Wi",), ("wi_0", "wi_1")},
            ahead=ahead,
            window=getattr(matrices[0][0], "sliding_window", 0) or 0,
            kind=(layer.attention_type,) if hasattr(layer, "attention_type") else (),
        )

    def pack(self, *, int8: bool = False) -> None:
        """Replaces the linear layers by packed matrices, one after the other. Gates are filled up to whole panels, as
        are what they are multiplied with and the inputs of the last matrix."""
        narrow = self.linears[-1]
        more = -narrow.in_features % PANEL if self.gated else 0
        for linear in self.linears[-3:] if more else ():
            shape = (0, more) if linear is narrow else (0, 0, 0, more)
            linear.weight = nn.Parameter(functional.pad(linear.weight.detach(), shape), requires_grad=False)
            if linear is not narrow and linear.bias is not None:
                linear.bias = nn.Parameter(functional.pad(linear.bias.detach(), (0, more)), requires_grad=False)
        for parent, names in self.matrices:
            pack_linears(parent, names, int8=int8)

    def buffers(self, program: Program) -> Buffers:
        """Adds the buffers of layers like this one, which must be packed."""
        inputs, out, _, narrow = self.panels()
        hidden, split = program.buffer(inputs.inputs), program.buffer(inputs.outputs)
        return hidden, split, program.buffer(out.inputs), program.buffer(narrow.inputs)

    def write(
        self, program: Program, buffers: Buffers, attention: Attention, activation: int, *, last: bool = False
    ) -> None:
        """Adds the operations of the layer. ``last``: a norm behind the layer is left to the caller."""
        hidden, split, attended, inner = buffers
        inputs, out, widen, narrow = self.panels()
        first, second = (None if isinstance(norm, nn.Identity) else norm_of(norm) for norm in self.norms)
        ending = Ending.GATED if self.gated else Ending.ACTIVATED
        before, behind = ((first, second), (None, None)) if self.ahead else ((None, None), (first, second))
        program.linear(hidden, split, inputs, Ending.STORE, norm=before[0])
        program.attend_all(split, attended, attention)
        program.add(attended, hidden, out, behind[0])
        program.linear(hidden, inner, widen, ending, norm=before[1], activation=activation)
        program.add(inner, hidden, narrow, None if last else behind[1])

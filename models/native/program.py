"""`Program`: a decoder or encoder as the list of operations that the native library runs, see `runner`.

A program names buffers, one row for each token fed, and reads weights where they are. It holds tensors, the library
their addresses: whoever takes the tensors away closes the runner first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor

from .library import Kind, Norm, OperationData
from .panels import Panels

MULTIPLE = 16  # widths that are normalized are multiples of it


@frozen(kw_only=True, eq=False)
class Normed:
    """A norm of what an operation reads: layer norm where there is a ``shift``, else root mean square."""

    gain: Tensor  # float32 [width]
    epsilon: float
    shift: Tensor | None = None


@frozen(kw_only=True, eq=False)
class Attention:
    """The attention of a layer.

    Args:
        turned: how many leading dimensions of a head are turned, in halves (Su et al. 2021); 0: none.
        paired: they are turned with their neighbours instead.
        table: by which of the program's tables.
        window: positions that a row sees, its own included; 0: all.
        distances: float32 [heads, distances], added to scores by the distance of query and key; the last one is that of
            all farther.
        soft_cap: scores go through ``soft_cap * tanh(score / soft_cap)``; 0: they do not.
    """

    layer: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    turned: int
    table: int = 0
    window: int = 0
    soft_cap: float = 0.0
    epsilon: float = 0.0
    query_gain: Tensor | None = None  # float32 [size] of norms of each head
    key_gain: Tensor | None = None
    paired: bool = False
    distances: Tensor | None = None


@define(eq=False)
class Program:
    """Is written once, operation after operation. Buffer 0 has the embeddings [rows, hidden], the last one the logits
    [wanted, vocabulary]."""

    widths: list[int] = field(factory=list, init=False)
    turns: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)  # cosines and sines [positions, half]
    chooses: bool = field(default=False, init=False)  # tokens are chosen of its logits
    has_head: bool = field(default=False, init=False)  # without one the last buffer has the last hidden states
    _operations: list[OperationData] = field(factory=list, init=False, repr=False)
    _tensors: list[Tensor] = field(factory=list, init=False, repr=False)
    _matrices: list[Panels] = field(factory=list, init=False, repr=False)  # others'

    def buffer(self, width: int) -> int:
        """A new buffer's number."""
        self.widths.append(width)
        return len(self.widths) - 1

    def norm(self, source: int, to: int, norm: Normed, *, wanted: bool = False, add: bool = False) -> None:
        """The norm of each row of ``source``: of those that are wanted, one after the other; or ``add``\\ ed to
        ``to``."""
        kind = Kind.NORM_ADD if add else Kind.NORM
        self._add(kind=kind, source=source, to=to, wanted=int(wanted), **self._normed(norm))

    def look_up(self, to: int, matrix: Panels, scale: float, positions: Tensor | None = None) -> None:
        """Embeddings of the step's tokens, where it is given some: rows of ``matrix``, times ``scale``; and what is
        added at their ``positions``, float32 [positions, hidden]."""
        self._matrices.append(matrix)
        told = {"shift": self._kept(positions), "distance_count": 0 if positions is None else len(positions)}
        self._add(kind=Kind.LOOKUP, source=to, to=to, matrix=matrix.data(), scale=scale, **told)

    def linear(
        self,
        source: int,
        to: int,
        matrix: Panels,
        ending: int,
        *,
        norm: Normed | None = None,
        activation: int = 0,
        cap: float = 0.0,
        wanted: bool = False,
    ) -> None:
        """Products of each row with ``matrix``; ``wanted``: the rows are as many as are wanted."""
        self._matrices.append(matrix)
        told = {} if norm is None else self._normed(norm)
        self._add(
            kind=Kind.LINEAR,
            source=source,
            to=to,
            wanted=2 * wanted,
            matrix=matrix.data(),
            ending=ending,
            activation=activation,
            cap=cap,
            **told,
        )

    def attend(self, source: int, to: int, attention: Attention) -> None:
        """Turns the queries and keys in ``source`` [rows, (heads + 2 * kv_heads) * size], writes keys and values to the
        pages, and attends."""
        told = {
            **asdict(attention, recurse=False),
            "source": source,
            "query_gain": self._kept(attention.query_gain),
            "key_gain": self._kept(attention.key_gain),
            "distances": self._kept(attention.distances),
            "distance_count": 0 if attention.distances is None else attention.distances.shape[1],
        }
        self._add(kind=Kind.TURN, to=source, **told)
        self._add(kind=Kind.ATTEND, to=to, **told)

    @property
    def in_int8(self) -> bool:
        """True if any matrix is in int8."""
        return any(one.in_int8 for one in self._matrices)

    def cross(self, source: int, to: int, attention: Attention) -> None:
        """Attends from the queries in ``source`` [rows, heads * size], which are scaled in place, to the slot of each
        row."""
        one = attention
        told = {"layer": one.layer, "heads": one.heads, "kv_heads": one.kv_heads, "size": one.size, "scale": one.scale}
        self._add(kind=Kind.CROSS, source=source, to=to, **told)

    def attend_all(self, source: int, to: int, *, heads: int, size: int) -> None:
        """Attends from each row to all rows of the step, by the scaled queries, keys and values in ``source``
        [rows, 3 * heads * size]."""
        told = {"heads": heads, "kv_heads": heads, "size": size, "scale": 1.0}
        self._add(kind=Kind.ATTEND_ALL, source=source, to=to, **told)

    @property
    def looks_up(self) -> bool:
        """True if it may be fed with tokens."""
        return bool(self._operations) and self._operations[0].kind == Kind.LOOKUP

    @property
    def attends_to_all(self) -> bool:
        """True if rows read all rows of their step, which is not to be cut."""
        return any(one.kind == Kind.ATTEND_ALL for one in self._operations)

    def operations(self) -> bytearray:
        """The operations as the library reads them, one after the other, as long as the program has them."""
        return bytearray(b"".join(map(bytes, self._operations)))

    def tensors(self) -> Iterator[Tensor]:
        """The program's own tensors that operations read: not the matrices."""
        yield from self._tensors
        for pair in self.turns:
            yield from pair

    def release(self) -> None:
        """Forgets every tensor and operation."""
        self._operations.clear()
        self._tensors.clear()
        self._matrices.clear()
        self.turns.clear()

    def _add(self, **told: Any) -> None:
        self._operations.append(OperationData(**told))

    def _normed(self, norm: Normed) -> dict[str, Any]:
        assert len(norm.gain) % MULTIPLE == 0, f"rows of {len(norm.gain)}; allowed: multiples of {MULTIPLE}"
        kind = Norm.ROOT_MEAN_SQUARE if norm.shift is None else Norm.LAYER
        gain, shift = self._kept(norm.gain), self._kept(norm.shift)
        return {"norm": kind, "gain": gain, "shift": shift, "epsilon": norm.epsilon}

    def _kept(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.dtype == torch.float32, f"the library reads float32, not {tensor.dtype}"
        assert tensor.is_contiguous(), "the library reads value by value"
        self._tensors.append(tensor)
        return tensor.data_ptr()

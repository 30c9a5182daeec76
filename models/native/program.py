"""`Program`: a decoder or encoder as the list of operations that the native library runs, see `runner`.

The operations read and write numbered buffers, which have one row for each token fed. The program holds tensors, and
the library holds their addresses: the runner must be closed before the tensors are moved or released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor

from .library import ACTIVATIONS, Ending, Kind, Norm, OperationData
from .panels import PANEL, Panels
from .recurrences import Gate, Recurrence

MULTIPLE = 16  # rows that are normalized have a width that is a multiple of this number


@frozen(kw_only=True, eq=False)
class Normed:
    """A norm of the rows that an operation reads: layer norm if there is a ``shift``, else root mean square norm."""

    gain: Tensor  # float32 [width]
    epsilon: float
    shift: Tensor | None = None


@frozen(kw_only=True, eq=False)
class Places:
    """Products that are added to scores (He et al. 2021, "DeBERTa", section 3.1). The distance of query and key has a
    place. To a score are added the query times the key of the place, and the key times the query of the place.

    Args:
        of: int32 [distances], the place of each distance, as in `Attention.distances`; places never fall.
        keys, queries: of all places, [heads * places, size] with the same number of panels for each head.
    """

    of: Tensor
    keys: Panels | None
    queries: Panels | None


@frozen(kw_only=True, eq=False)
class Attention:
    """The attention of a layer.

    Args:
        value_size: the numbers of a value of one head; 0: ``size``.
        turned: the number of dimensions of a head with rotary positions (Su et al. 2021); 0: none.
        turned_from: the first one of these.
        paired: True: a dimension is turned together with its neighbour. False: with its counterpart in the other half.
        table: the index of the cosines and sines in `Program.turns`.
        window: the number of positions that a row attends to, its own included; 0: all. If rows attend to both sides,
            the number up to the first row of their block (see `Program.block`).
        ahead: if rows attend to both sides, the number of positions behind its block that a row attends to; ``None``:
            as many as before.
        distances: float32 [heads, distances], added to scores by the distance of query and key. The last number is for
            all larger distances, too. If rows attend to both sides, the numbers go from keys far before a row to keys
            far behind it, and the number for the row's own key is in the middle.
        places: what is added to scores by places; ``None``: nothing.
        together: True: the queries of all heads have one norm, and the keys another one. Their gains are of all heads.
        by_chunk: True: if rows attend to both sides, they see their own chunk alone, not their whole sequence.
        factors: float32 [positions], by which queries are multiplied; ``None``: they are not.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: scores are not capped.
        value_gain: float32 [value_size], the gain of a norm of each head's values; ``None``: they have no norm.
        sinks: float32 [heads], scores of a key without a value, which all rows see; ``None``: there is none.
        reads: True: the layer reads the keys and values that another one wrote to the pages of ``layer``. Its own rows
            have queries alone.
    """

    layer: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    value_size: int = 0
    turned: int = 0
    turned_from: int = 0
    table: int = 0
    window: int = 0
    ahead: int | None = None
    soft_cap: float = 0.0
    epsilon: float = 0.0
    query_gain: Tensor | None = None  # float32 [size], the gain of a norm of each head; None: heads have no norms
    key_gain: Tensor | None = None
    together: bool = False
    by_chunk: bool = False
    factors: Tensor | None = None
    paired: bool = False
    distances: Tensor | None = None
    places: Places | None = None
    value_gain: Tensor | None = None
    sinks: Tensor | None = None
    reads: bool = False

    @property
    def width(self) -> int:
        """The numbers of a row's queries, keys and values."""
        own = 0 if self.reads else self.kv_heads * (self.size + (self.value_size or self.size))
        return self.heads * self.size + own

    @classmethod
    def plain(cls, heads: int, size: int, scale: float = 1.0, **others: Any) -> Attention:
        """Returns the attention of an encoder's layer, which has as many heads of keys as of queries."""
        return cls(layer=0, heads=heads, kv_heads=heads, size=size, scale=scale, **others)


@define(eq=False)
class Program:
    """A list of operations that is written once, one operation after the other.

    Buffer 0 has the embeddings [rows, hidden], the last buffer the logits [wanted, vocabulary]."""

    widths: list[int] = field(factory=list, init=False)
    turns: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)  # cosines and sines [positions, half]
    tables: dict[tuple[str, ...], dict[str, Any]] = field(factory=dict, init=False)  # see `parts.turned`
    axes: tuple[int, ...] = field(default=(), init=False)  # of each angle, see `Runner.turned`; empty: there is one
    added: list[int] = field(factory=list, init=False)  # the buffers of what is added, see `add_given`
    chooses: bool = field(default=False, init=False)  # the library may choose tokens from the logits
    crossing: tuple[int, ...] = field(default=(), init=False)  # the buffers with the queries of cross-attention
    uncounted: int | None = field(default=None, init=False)  # the token whose position is 0; others count from 1
    has_head: bool = field(default=False, init=False)  # without a head the last buffer has the last hidden states
    kept: int = 0  # the most rows before a chunk's that its state keeps; 0: the state has no rows
    block: int = 1  # rows that see the same rows, from a chunk's first one on
    state: int = field(default=0, init=False)  # the numbers of a chunk's state, which a step reads and changes
    _operations: list[OperationData] = field(factory=list, init=False, repr=False)
    _tensors: list[Tensor] = field(factory=list, init=False, repr=False)
    _matrices: list[Panels] = field(factory=list, init=False, repr=False)  # owned by modules, not by the program

    def buffer(self, width: int) -> int:
        """Adds a buffer, and returns its number."""
        self.widths.append(width)
        return len(self.widths) - 1

    def norm(
        self,
        source: int,
        to: int,
        norm: Normed,
        *,
        wanted: bool = False,
        add: bool = False,
        activation: int | None = None,
    ) -> None:
        """Normalizes each row of ``source`` into ``to``.

        Args:
            wanted: only the wanted rows, one after the other.
            add: the result is added to ``to``.
            activation: of the result, unless it is added.
        """
        kind = Kind.NORM_ADD if add else Kind.NORM
        told = self._normed(norm) | self._activated(activation)
        self._add(kind=kind, source=source, to=to, wanted=int(wanted), **told)

    def look_up(
        self,
        to: int,
        matrix: Panels,
        scale: float,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        *,
        wanted: bool = False,
    ) -> None:
        """Writes the embeddings of the step's tokens, or of the wanted ones, if the step has tokens: rows of ``matrix``
        times ``scale``, plus the rows of ``types``, float32 [types, hidden], for the tokens' types, plus the rows of
        ``positions``, float32 [positions, hidden], for the tokens' positions."""
        self._matrices.append(matrix)
        told = {"shift": self._kept(positions), "distance_count": 0 if positions is None else len(positions)}
        told |= {"gain": self._kept(types), "heads": 0 if types is None else len(types)}
        self._add(kind=Kind.LOOKUP, source=to, to=to, matrix=matrix.data(), scale=scale, wanted=int(wanted), **told)

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
        scale: float = 1.0,
        wanted: bool = False,
        others: Mapping[str, Any] | None = None,
        gates_by: float = 1.0,
    ) -> None:
        """Multiplies each row with ``matrix``, and what comes out with ``scale``.

        Args:
            gates_by: the factor of gates, before their activation.
            wanted: the source has only the wanted rows.
            others: fields of an operation that multiplies with the matrices of a row's experts or adapter, or that adds
                what adapters compute; ``None``: there is one matrix for all rows.
        """
        self._matrices.append(matrix)
        told = {"kind": Kind.LINEAR, **({} if norm is None else self._normed(norm)), **(others or {})}
        self._add(
            source=source,
            to=to,
            wanted=2 * wanted,
            matrix=matrix.data(),
            ending=ending,
            activation=activation,
            cap=cap,
            scale=scale,
            soft_cap=gates_by,
            **told,
        )

    def recur(self, source: int, to: int, gates: int, recurrence: Recurrence) -> None:
        """Changes the states of heads row after row, and writes what queries find in them. The program's model has
        pages. The buffers ``source``, which has queries, keys and values from its first number on, and ``gates`` are
        changed."""
        one = recurrence
        blocks = -(-one.size // PANEL)
        self._add(
            kind=Kind.RECUR,
            source=source,
            to=to,
            table=gates,
            place=self.add_state(one.heads * blocks * PANEL * one.depth),
            heads=one.heads,
            kv_heads=one.groups,
            size=one.size,
            distance_count=one.depth,
            ahead=one.first,
            paired=int(not one.delta),
            delta=int(one.delta),
            gain=self._kept(one.decay),
            shift=self._kept(one.shift),
            query_gain=self._kept(one.skip),
            scale=one.scale,
            epsilon=one.epsilon if one.delta else one.least,
            cap=one.most,
            soft_cap=one.factor,
        )

    def gate(self, source: int, to: int, gates: int, gate: Gate) -> None:
        """Multiplies the numbers of heads in ``source`` with gates, which are numbers of the buffer ``gates``."""
        one = gate
        told: dict[str, Any] = {"heads": one.heads, "size": one.size, "column": one.column, "ahead": one.first}
        told |= {"distance_count": 1 if one.whole else one.size, "scale": one.scale, **self._activated(one.activation)}
        if one.gain is not None:
            told |= {"norm": Norm.ROOT_MEAN_SQUARE, "gain": self._kept(one.gain), "epsilon": one.epsilon}
            told |= {"paired": int(one.norm_first), "together": int(len(one.gain) != one.size)}
        self._add(kind=Kind.GATE, source=source, to=to, table=gates, **told)

    def add(self, source: int, hidden: int, matrix: Panels, norm: Normed | None = None) -> None:
        """Adds the product with ``matrix`` to the buffer ``hidden``, whose sum then is normalized if there is a
        ``norm``."""
        self.linear(source, hidden, matrix, Ending.ADD)
        if norm is not None:
            self.norm(hidden, hidden, norm)

    def route(
        self,
        source: int,
        to: int,
        asked: int,
        count: int,
        *,
        apart: bool,
        together: bool,
        least: float,
        more: float,
        added: Tensor | None,
        groups: int = 1,
        groups_asked: int = 1,
        best: int = 1,
        numbers: bool = False,
        wanted: bool = False,
    ) -> None:
        """Chooses ``asked`` of ``count`` experts by their chances, and writes these.

        Args:
            source: the buffer of logits. Chances are their softmax; if experts are ``apart``, the sigmoid of each.
            together: divide the chances by their sum, or by ``least`` if that is more; and by ``more`` beside it.
            added: float32 [count], added to all chances only to choose; ``None``: nothing is.
            groups: the number of groups of experts, side by side, of which ``groups_asked`` are chosen first, by the
                sum of the ``best`` chances in each.
            numbers: the numbers of the experts are written in place of their chances.
            wanted: the source has only the wanted rows.
        """
        told = {"together": int(together), "epsilon": least, "cap": more, "gain": self._kept(added)}
        told |= {"column": groups, "place": groups_asked, "ahead": best, "delta": int(numbers), "wanted": 2 * wanted}
        told["activation"] = ACTIVATIONS["sigmoid" if apart else "silu"]
        self._add(kind=Kind.ROUTE, source=source, to=to, heads=asked, kv_heads=count, **told)

    def mix(
        self, source: int, to: int, weights: int, *, asked: int, size: int, scale: float, ending: int = Ending.ADD
    ) -> None:
        """Adds the outputs [rows, asked, size] by the weights in the buffer ``weights``, times ``scale``, to ``to``."""
        told = {"table": weights, "heads": asked, "size": size, "scale": scale, "ending": ending}
        self._add(kind=Kind.MIX, source=source, to=to, **told)

    def add_given(self, to: int, scale: float) -> None:
        """Adds to ``to`` the next of what a step is given to add, see `Rows.added`, times ``scale``."""
        width = self.widths[to]
        self.added += [self.buffer(width)] if self.added else [self.buffer(1), self.buffer(width)]  # the first: ones
        self.mix(self.added[-1], to, self.added[0], asked=1, size=width, scale=scale)

    def attend(self, source: int, to: int, attention: Attention) -> None:
        """Applies rotary positions to the queries and keys in ``source`` [rows, (heads + kv_heads) * size + kv_heads *
        value_size], writes keys and values to the pages, and attends."""
        told, factors = self._attention(attention), attention.factors
        own = {"gain": self._kept(attention.value_gain), "place": attention.turned_from}
        own |= {} if factors is None else {"shift": self._kept(factors), "distance_count": len(factors)}
        own |= {"kv_heads": 0} if attention.reads else {}
        self._add(kind=Kind.TURN, source=source, to=source, **{**told, **own})
        self._add(kind=Kind.ATTEND, source=source, to=to, **told, shift=self._kept(attention.sinks))

    def normalize_heads(self, source: int, heads: int, gain: Tensor, epsilon: float, scale: float) -> None:
        """Normalizes each of the ``heads`` parts of a row by its root mean square, and multiplies it with ``scale``."""
        told = {"heads": heads, "size": len(gain), "query_gain": self._kept(gain), "epsilon": epsilon, "scale": scale}
        self._add(kind=Kind.TURN, source=source, to=source, **told)

    def copy(
        self,
        source: int,
        to: int,
        size: int,
        *,
        count: int = 1,
        first: int = 0,
        apart: int = 0,
        place: int = 0,
        places_apart: int = 0,
        scale: float = 1.0,
        ending: int = Ending.STORE,
        wanted: bool = False,
    ) -> None:
        """Copies ``count`` times ``size`` numbers of each row by ``scale``.

        Args:
            first: the column of the first of them; each time begins ``apart`` behind the one before.
            place: where the first of them goes; each time begins ``places_apart`` behind the one before.
            ending: they are stored; added to what is there; or, if ``GATED``, multiplied with it.
            wanted: the source has only the wanted rows.
        """
        columns = {"column": first, "window": apart, "place": place, "ahead": places_apart}
        told = {**columns, "heads": count, "size": size, "scale": scale, "ending": ending, "wanted": 2 * wanted}
        self._add(kind=Kind.COPY, source=source, to=to, **told)

    @property
    def in_int8(self) -> bool:
        """True if any matrix is in int8."""
        return any(one.in_int8 for one in self._matrices)

    def cross(self, source: int, to: int, attention: Attention) -> None:
        """Attends from the queries in ``source`` [rows, heads * size] to the slot of each row. The queries are scaled
        in place."""
        one = attention
        told = {"layer": one.layer, "heads": one.heads, "kv_heads": one.kv_heads, "size": one.size, "scale": one.scale}
        self._add(kind=Kind.CROSS, source=source, to=to, **told)

    def attend_all(self, source: int, to: int, attention: Attention) -> None:
        """Attends from each row to all rows of its sequence, in ``source`` [rows, 3 * heads * size], which has queries,
        keys and values. The program's model has no pages. Queries and keys are normalized and get rotary positions in
        place, if ``attention`` says so. The rows that the chunk's state keeps are before those of the chunk. In a
        program in int8 without states, sequences or chunks of 256 rows or more are attended in int8."""
        told = self._attention(attention)
        if attention.turned or attention.query_gain is not None:
            self._add(kind=Kind.TURN, source=source, to=source, **{**told, "scale": 1.0})
        width = attention.heads * attention.size
        place = self.add_state(self.kept * 2 * width)
        self._add(kind=Kind.ATTEND_ALL, source=source, to=to, place=place, quantized=self.in_int8, **told)
        self._keep(source, place, self.kept, width, 2 * width)

    def convolve(
        self,
        source: int,
        to: int,
        taps: Tensor,
        shift: Tensor,
        *,
        before: int,
        activation: int | None,
        column: int = 0,
    ) -> None:
        """Convolves each number of a row with those of the rows around it in its sequence.

        Args:
            taps: float32 [rows, width], for the rows around a row, the first one ``before`` rows before it.
            shift: float32 [width], added before the activation.
            column: the first of the ``width`` numbers of a row.
        """
        told = {"gain": self._kept(taps), "shift": self._kept(shift), "distance_count": len(taps), "window": before}
        told |= {"column": column, "size": taps.shape[1]}
        rows = min(before, self.kept)
        place = self.add_state(rows * taps.shape[1])
        self._add(kind=Kind.CONVOLVE, source=source, to=to, place=place, **told, **self._activated(activation))
        self._keep(source, place, rows, column, taps.shape[1])

    def add_state(self, numbers: int) -> int:
        """Adds numbers to a chunk's state, and returns the place of the first one."""
        self.state += numbers
        return self.state - numbers

    def _keep(self, source: int, place: int, rows: int, first: int, size: int) -> None:
        """Has the state keep ``size`` numbers of the last ``rows`` rows."""
        if rows:
            self._add(kind=Kind.KEEP, source=source, to=source, place=place, window=rows, column=first, size=size)

    def recall(self, to: int, place: int, size: int, *, wanted: bool = False) -> None:
        """Writes ``size`` numbers of the state of each row's chunk."""
        self._add(kind=Kind.RECALL, source=to, to=to, place=place, size=size, wanted=int(wanted))

    def lstm(self, gates: int, to: int, place: int, size: int) -> None:
        """Computes the next hidden and cell state (Hochreiter and Schmidhuber 1997), 2 * ``size`` numbers of the state,
        of the chunks of the wanted rows, by the rows of ``gates``; writes the hidden state."""
        self._add(kind=Kind.LSTM, source=gates, to=to, place=place, size=size, wanted=1)

    def _activated(self, activation: int | None) -> dict[str, Any]:
        return {} if activation is None else {"ending": Ending.ACTIVATED, "activation": activation}

    def _attention(self, attention: Attention) -> dict[str, Any]:
        places, told = attention.places, asdict(attention, recurse=False)
        for name in ("factors", "turned_from", "value_gain", "sinks", "reads"):
            del told[name]
        told |= {
            "ahead": max(attention.window - 1, 0) if attention.ahead is None else attention.ahead,
            "query_gain": self._kept(attention.query_gain),
            "key_gain": self._kept(attention.key_gain),
            "distances": self._kept(attention.distances),
            "distance_count": 0 if attention.distances is None else attention.distances.shape[1],
            "places": None,
        }
        if places is None:
            return told
        assert places.of.dtype == torch.int32, f"places are int32, not {places.of.dtype}"
        self._tensors.append(places.of)
        told |= {"places": places.of.data_ptr(), "distance_count": len(places.of)}
        for name, panels in (("place_keys", places.keys), ("place_queries", places.queries)):
            if panels is not None:
                self._tensors.append(panels.packed)
                told[name] = panels.data()
        return told

    @property
    def looks_up(self) -> bool:
        """True if the program may be fed with tokens."""
        return bool(self._operations) and self._operations[0].kind == Kind.LOOKUP

    @property
    def needs_tokens(self) -> bool:
        """True if the program looks up more than the embeddings that it may be fed with."""
        return any(one.kind == Kind.LOOKUP and one.to for one in self._operations)

    @property
    def adds_positions(self) -> bool:
        """True if the program adds embeddings of positions to those of tokens, and must be fed with tokens alone."""
        return self.looks_up and bool(self._operations[0].shift)

    @property
    def attends_to_all(self) -> bool:
        """True if rows read all rows of their sequence, which must not be cut into several calls."""
        return any(one.kind == Kind.ATTEND_ALL for one in self._operations)

    def operations(self) -> bytearray:
        """Returns the operations in the form that the library reads, one after the other. Their addresses are valid
        until the program is released."""
        return bytearray(b"".join(map(bytes, self._operations)))

    def tensors(self) -> Iterator[Tensor]:
        """Yields the program's own tensors, which operations read. Matrices are not among them."""
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

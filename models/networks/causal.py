"""Decoder-only models of transformers as a `Network`: the modules compute, and our attention reads and writes the
pages.

One call of the module feeds all chunks of a step, flattened into rows; `paged.py` keeps the sequences apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from ...core.plan import AlignedTokens
from ...core.request import EncoderItem
from ..architectures.family import Family
from ..attention.fixed import FixedInputs, FixedStep
from ..attention.graphs import GraphManager
from ..attention.layers import PAGED, PagedCall, Witness, register
from ..attention.paged import PagedStep
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.kv import PagedKV
from ..memory.module import TransformerModel
from ..memory.recurrent_states import RecurrentStates
from ..memory.rows import Rows
from ..native.adapters import AdapterSlots
from ..native.runner import Runner
from .item_encoder import ItemEncoder
from .network import Feed, Network, Record
from .pooling import Sums, check_pooling, marked, pooled


@define(eq=False)
class _Notes:
    """The network's notes about one sequence, on the host."""

    positions: Any = None  # numpy int64 [3, prompt]; None: positions are indices
    delta: int = 0  # added to the index of a later token to get its position
    bent: bool = False  # some positions are not indices
    sums: Sums | None = None
    marks: list[tuple[int, float]] = field(factory=list)  # the class of each mark so far, and its log-probability


@frozen(kw_only=True, eq=False)
class CausalNetwork(Network):
    """A decoder-only model as a network. ``generates`` is false if the module has no head for tokens."""

    model: TransformerModel
    paged: PagedKV
    positions: int
    device: torch.device
    generates: bool
    states: RecurrentStates | None = None  # set if the model has recurrent layers; then only the library computes it
    classifies: bool = False
    family: Family | None = None
    encoder: ItemEncoder | None = None
    witness: Witness | None = None
    native: Runner | None = None  # computes all steps; then the module serves comparisons alone
    graphs: GraphManager | None = None  # records steps that only decode, see `CausalDecode`
    adapters: AdapterSlots | None = None  # set if the native library's program has them
    keeps: bool = field(init=False)  # whether the module can compute only the wanted logits
    _others: Mapping[int, int] = field(init=False)  # see `Family.read_as`

    @keeps.default
    def _find_out(self) -> bool:
        return "logits_to_keep" in signature(self.model.module.forward).parameters

    @_others.default
    def _find_others(self) -> Mapping[int, int]:
        return {} if self.family is None else self.family.read_as(self.model.module.config)

    @property
    def decoder(self) -> Any:
        """The module that uses our attention. Other parts of the model, which encode, keep their own attention."""
        return self.model.module if self.family is None else self.family.text(self.model.module)

    def attach(self, implementation: str | None = None) -> None:
        """Sets the decoder's attention to ours, or to another ``implementation``."""
        if implementation is None:
            register()
        if self.decoder._can_set_attn_implementation():
            self.decoder.set_attn_implementation(implementation or PAGED)

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        assert self.encoder is not None, f"{len(jobs)} items are to be encoded, but the model reads text only"
        return self.encoder.encode(jobs)

    def start(self, record: Record) -> None:
        start = record.start
        check_pooling(start, classifies=self.classifies)
        record.notes = notes = _Notes()
        placed = None
        if self.family is not None:
            prompt = start.token_ids[: start.prompt_length]
            placed = self.family.positions(self.model.module, prompt, start.placeholders)
        if placed is not None:
            notes.positions, notes.delta = placed[0].numpy().copy(), placed[1]
            notes.bent = bool(start.placeholders)

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs) -> Tensor:
        assert self.generates, "a model without a head for tokens is asked for some"
        positions = None if self.graphs is None else _fixed(feeds)
        if self.graphs is not None and positions is not None:
            rows = self._lay_out(feeds, wanted)
            self.paged.enter([feed.part for feed in feeds])
            logits = self.graphs.run(rows, self._tokens(feeds), positions)
            if logits is not None:  # logits of all rows
                return logits.index_select(0, torch.tensor(rows.wanted, dtype=torch.long, device=self.device)).float()
        return self.rows(feeds, wanted, outputs)

    def rows(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs) -> Tensor:
        """Returns the wanted `logits`; if the model does not generate, the wanted last hidden states [wanted,
        hidden].
        """
        if self.native is not None:
            return self.native.step(*self.fed(feeds, wanted, outputs))
        feeds = self._with_all_seen(feeds)
        rows = self._lay_out(feeds, wanted)
        chosen = torch.tensor(rows.wanted, dtype=torch.long, device=self.device)
        if not self.generates:
            return self._hidden(feeds, rows, outputs)[chosen].float()
        module = self.model.module
        kept = self._run(module, feeds, rows, outputs, **({"logits_to_keep": chosen} if self.keeps else {})).logits[0]
        logits: Tensor = (kept if self.keeps else kept[chosen]).float().contiguous()
        return logits

    def _lay_out(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]]) -> Rows:
        """Returns the rows of the step, chunk after chunk."""
        parts, kept = [feed.part for feed in feeds], 0 if self.native is None else self.native.kept
        rows = Rows.of(parts, wanted, self.paged.page_size, states=self.states, kept=kept)
        if any(feed.record.start.adapter is not None for feed in feeds):
            rows = evolve(rows, adapters=[slot for feed in feeds for slot in _adapted(feed)])
        if not self._sees_items(feeds):
            return rows
        seen = [last for feed in feeds for last in _seen(feed)]
        return evolve(rows, seen=seen, in_windows=self.family is not None and self.family.in_windows)

    def _tokens(self, feeds: Sequence[Feed]) -> list[int]:
        """Returns the tokens of all rows as the decoder reads them."""
        tokens = [token for feed in feeds for token in feed.tokens]
        return [self._others.get(token, token) for token in tokens] if self._others else tokens

    def _sees_items(self, feeds: Sequence[Feed]) -> bool:
        """True if some rows of the step see rows behind them."""
        return self.family is not None and self.family.mutual and any(map(_holds_items, feeds))

    def _with_all_seen(self, feeds: Sequence[Feed]) -> Sequence[Feed]:
        """Returns the chunks with all rows that their rows see. A chunk that ends within an item whose rows see each
        other is computed to the end of the item, and the next chunk computes the same once more: so an item may be cut
        anywhere. Pages for the whole prompt are there since it has begun.
        """
        return list(map(_to_the_last_seen, feeds)) if self._sees_items(feeds) else feeds

    def fed(
        self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs
    ) -> tuple[Tensor | Sequence[int], Rows]:
        """Returns the step for the native library. If the step has no items, the library gets tokens and looks up their
        embeddings itself."""
        feeds = self._with_all_seen(feeds)
        rows = self._lay_out(feeds, wanted)
        if self.native is not None and any(feed.record.notes.bent for feed in feeds):
            rows = evolve(rows, turns=self.native.turned(_axes_of(feeds)))
        if any(map(_holds_items, feeds)):
            embedded, *added = self._embed(feeds, rows.starts, outputs)
            return embedded.float().contiguous(), evolve(rows, added=added, tokens=self._tokens(feeds))
        return self._tokens(feeds), rows

    def vectors(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[tuple[float, ...] | None]:
        return list(map(self._pool, feeds, self.read(feeds, outputs)))

    def align(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[AlignedTokens | None]:
        return list(map(self._marks, feeds, self.read(feeds, outputs)))

    def read(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> Sequence[Tensor]:
        """Feeds chunks, and returns the last hidden states [length, hidden] of each."""
        every = [(index, offset) for index, feed in enumerate(feeds) for offset in range(feed.part.length)]
        lengths = [feed.part.length for feed in feeds]
        if self.native is None:
            feeds = self._with_all_seen(feeds)
            rows = self._lay_out(feeds, every)
            hidden = self._hidden(feeds, rows, outputs)[rows.wanted]
        else:
            hidden = self.native.step(*self.fed(feeds, every, outputs), hidden=True)
        return torch.split(hidden, lengths)

    def _hidden(self, feeds: Sequence[Feed], rows: Rows, outputs: EncoderOutputs) -> Tensor:
        """Returns the last hidden states [rows, hidden], computed by torch."""
        hidden: Tensor = self._run(self.model.module.base_model, feeds, rows, outputs).last_hidden_state[0]
        return hidden

    def _run(self, module: Any, feeds: Sequence[Feed], rows: Rows, outputs: EncoderOutputs, **options: Any) -> Any:
        self.paged.enter([feed.part for feed in feeds])  # the library needs no such call: it reads what is written
        embedded, *added = self._embed(feeds, rows.starts, outputs)
        return module(
            inputs_embeds=embedded[None],
            position_ids=self._position_ids(feeds, rows),
            use_cache=False,
            triolet=PagedCall(step=PagedStep(self.paged, rows), witness=self.witness, added=tuple(added)),
            **options,
            **_by_layer(self.decoder, self._tokens(feeds), self.device),
        )

    def _pool(self, feed: Feed, hidden: Tensor) -> tuple[float, ...] | None:
        pooling, notes = feed.record.start.pooling, feed.record.notes
        assert pooling is not None, "only a sequence with a pooling is pooled"
        if notes.sums is None:
            notes.sums = Sums(count=feed.part.start)
            assert feed.part.start == 0 or pooling.kind in {"last", "classify"}, (
                f"sequence {feed.record.start.sequence_id}: {pooling.kind} needs all positions, so no shared prefix"
            )
        notes.sums.add(hidden, pooling)
        return pooled(self.model, notes.sums, pooling) if feed.part.samples else None

    def _marks(self, feed: Feed, hidden: Tensor) -> AlignedTokens | None:
        """Classifies the marks of a chunk. Returns the classes of all marks if the chunk ends its prompt."""
        alignment, found = feed.record.start.alignment, feed.record.notes.marks
        assert alignment is not None, "only a sequence with an alignment is aligned"
        found += marked(self.model, hidden[[token == alignment.marks for token in feed.tokens]])
        if not feed.part.samples:
            return None
        return AlignedTokens(frames=tuple(frame for frame, _ in found), logprobs=tuple(logprob for _, logprob in found))

    def _embed(self, feeds: Sequence[Feed], starts: Sequence[int], outputs: EncoderOutputs) -> Sequence[Tensor]:
        """Returns the embeddings of the step's rows [rows, hidden]: those of the tokens, and of the items placed among
        them. If there are items, then also what they add to the outputs of layers, see `Family.deeper`.

        Args:
            starts: the first row of each chunk.
        """
        embed = self.model.module.get_input_embeddings()
        embeddings: Tensor = embed(torch.tensor(self._tokens(feeds), device=self.device))
        if self.family is None or not any(map(_holds_items, feeds)):
            return (embeddings,)
        width = embeddings.shape[1]
        embeddings = functional.pad(embeddings, (0, self.family.deeper(self.model.module.config) * width))
        for feed, row in zip(feeds, starts, strict=True):
            _place(embeddings, row, feed, outputs, added=self.family.added)
        return torch.split(embeddings, width, 1)

    def _position_ids(self, feeds: Sequence[Feed], rows: Rows) -> Tensor:
        """Returns the positions [1, rows], or [3, 1, rows] if the family has positions in three dimensions."""
        if feeds[0].record.notes.positions is None:
            return torch.tensor(rows.positions, device=self.device)[None]
        return torch.from_numpy(_axes_of(feeds)).to(self.device)[:, None]


@frozen(kw_only=True, eq=False)
class CausalDecode:
    """Computes the logits of a `FixedStep`. A graph records this call, so it does the same work each time and copies
    nothing from the device."""

    model: TransformerModel
    paged: PagedKV
    axes: bool  # whether the model reads positions in three dimensions
    family: Family | None

    @classmethod
    def of(cls, network: CausalNetwork) -> CausalDecode:
        """Makes the decode for a network's model, pages and positions."""
        family, module = network.family, network.model.module
        axes = family is not None and family.positions(module, (0,), ()) is not None
        return cls(model=network.model, paged=network.paged, axes=axes, family=family)

    def __call__(self, inputs: FixedInputs) -> None:
        module = self.model.module
        decoder = module if self.family is None else self.family.text(module)
        answer = module(
            inputs_embeds=module.get_input_embeddings()(inputs.token_ids)[None],
            position_ids=inputs.positions.expand(3, 1, -1) if self.axes else inputs.positions[None],
            use_cache=False,
            triolet=PagedCall(step=FixedStep(self.paged, inputs)),
            **_by_layer(decoder, inputs.token_ids, inputs.token_ids.device),
        )
        inputs.logits.copy_(answer.logits[0])

    def rehearse(self, inputs: FixedInputs) -> None:
        """Runs the step on the meta device, where nothing is computed. This fails if code copies a number from the
        device or mixes two devices, so that no capture has to be aborted.
        """
        place, paged = torch.device("meta"), self.paged
        pages = paged.another(pages=paged.pages, page_size=paged.page_size, device=place)
        evolve(self, model=self.model.to(place), paged=pages)(inputs.on(place))


def _adapted(feed: Feed) -> list[int]:
    """Returns the slot of the adapter of each row; -1: it has none."""
    slot = feed.record.start.adapter
    return [-1 if slot is None else slot] * feed.part.length


def _by_layer(decoder: Any, tokens: Tensor | Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Returns the keywords by which a decoder gets the embeddings of ``tokens`` [rows] that enter its layers, as Gemma
    4's do; most have none."""
    base = decoder.base_model
    if not getattr(base, "hidden_size_per_layer_input", None):
        return {}
    return {"per_layer_inputs": base.get_per_layer_inputs(torch.as_tensor(tokens, device=device)[None])}


def _fixed(feeds: Sequence[Feed]) -> list[int] | None:
    """Returns the positions of a step that only decodes, as the model counts them. ``None``: the step does more than
    decode."""
    positions = list[int]()
    for feed in feeds:
        start, notes = feed.part.start, feed.record.notes
        bent = notes.positions is not None and start < notes.positions.shape[1]  # its three positions differ
        if feed.part.length != 1 or _holds_items(feed) or bent:  # draft tokens lengthen the chunk
            return None
        positions.append(start + notes.delta)
    return positions


def _holds_items(feed: Feed) -> bool:
    """True if some rows of the chunk belong to an item."""
    start, stop = feed.part.start, feed.part.start + feed.part.length
    return any(one.touches(start, stop) for one in feed.record.start.placeholders)


def _seen(feed: Feed) -> list[int]:
    """Returns the last position that each row of the chunk sees: in an item, the last one of its span."""
    start, stop = feed.part.start, feed.part.start + feed.part.length
    seen = list(range(start, stop))
    for first, last in (span for one in feed.record.start.placeholders for span in one.spans):
        low, high = max(first, start), min(last, stop)
        if low < high:
            seen[low - start : high - start] = [last - 1] * (high - low)
    return seen


def _to_the_last_seen(feed: Feed) -> Feed:
    stop = _seen(feed)[-1] + 1
    return feed if stop == feed.part.start + feed.part.length else feed.up_to(stop)


def _place(embeddings: Tensor, row: int, feed: Feed, outputs: EncoderOutputs, *, added: bool) -> None:
    """Replaces the embeddings of placeholders in the chunk by the encoder outputs of their items, or adds these to
    them. The chunk's rows begin at ``row``. The rows of an output fill the item's spans in order, and chunks may cut
    the spans anywhere."""
    start, stop = feed.part.start, feed.part.start + feed.part.length
    for placeholder in feed.record.start.placeholders:
        if not placeholder.touches(start, stop):
            continue
        output, taken = outputs.get(placeholder.key), 0
        for first, last in placeholder.spans:
            low, high = max(first, start), min(last, stop)
            if low < high:
                rows, own = embeddings[row + low - start : row + high - start], output[taken + low - first :]
                rows.copy_(rows + own[: high - low] if added else own[: high - low])
            taken += last - first


def _axes_of(feeds: Sequence[Feed]) -> Any:
    """Returns the positions of all rows in three dimensions, numpy int64 [3, rows]."""
    return np.concatenate([_axes(feed) for feed in feeds], 1)


def _axes(feed: Feed) -> Any:
    """Returns the chunk's positions in three dimensions, numpy int64 [3, length]. After the prompt, all three count up
    together."""
    start, stop, notes = feed.part.start, feed.part.start + feed.part.length, feed.record.notes
    prompt = notes.positions.shape[1]
    later = np.arange(max(start, prompt), stop, dtype=np.int64) + notes.delta
    return np.concatenate([notes.positions[:, start:stop], np.broadcast_to(later, (3, len(later)))], 1)

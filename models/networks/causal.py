"""Decoder-only models of transformers behind `Network`: its modules compute, our attention reads and writes the pages.

One call of the module feeds all chunks of a step, flattened into rows; `paged.py` keeps the sequences apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...core.plan import Chunk, EncodeJob
from ..architectures.families import Family
from ..attention.fixed import FixedInputs, FixedRow, FixedStep
from ..attention.layers import PAGED, PAGED_APART, AnyStep, PagedCall, Witness, register
from ..attention.paged import PagedLayout, PagedStep
from ..launch.compiled import CompiledLayers
from ..launch.graphs import GraphManager
from ..launch.pipeline import Pipeline, StagedKV
from ..memory.kv import PagedKV
from ..memory.module import TransformerModel
from ..native.runner import Rows, Runner
from .network import Feed, Outputs, Record
from .pooling import PooledHead, Sums, check_pooling


@define(eq=False)
class _Notes:
    """What a network has found out of a sequence, on the host."""

    positions: Any = None  # numpy int64 [3, prompt]; None: plain
    delta: int = 0  # what is added to later positions
    sums: Sums | None = None


@frozen(kw_only=True, eq=False)
class CausalNetwork:
    """A decoder at work. ``generates`` is false where the module has no head for tokens; ``device`` is the first where
    there is a ``pipeline``, and pages are in stages then, and only then."""

    model: TransformerModel
    paged: PagedKV | StagedKV
    positions: int
    device: torch.device
    generates: bool
    classifies: bool = False
    family: Family | None = None
    witness: Witness | None = None
    pipeline: Pipeline | None = None
    compiled: CompiledLayers | None = None
    native: Runner | None = None  # which computes steps; the module does in a trial alone
    graphs: GraphManager | None = None  # what records steps that only decode, see `CausalDecode`
    _keeps: bool = field(init=False)  # whether the module computes only the logits that are wanted

    @_keeps.default
    def _find_out(self) -> bool:
        return "logits_to_keep" in signature(self.model.module.forward).parameters

    @property
    def language(self) -> Any:
        """The module whose attention is ours; others of it, which encode, keep their own."""
        return self.model.module if self.family is None else self.family.text(self.model.module)

    def attach(self, implementation: str | None = None) -> None:
        """Makes our attention, or another ``implementation``, the language model's."""
        if implementation is None:
            implementation = PAGED if self.compiled is None else PAGED_APART
            register(implementation)
        self.language.set_attn_implementation(implementation)

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[Tensor]:
        assert self.family is not None, f"{len(jobs)} items are to be encoded, but the model reads text only"
        return encode_together(self.family, self.model, jobs)

    def write_cross(self, slot: int, output: Tensor) -> None:
        raise AssertionError(
            f"slot {slot} is to be written with {tuple(output.shape)}, but there is no cross-attention"
        )

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

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs) -> Tensor:
        assert self.generates, "a model without a head for tokens is asked for some"
        rows = None if self.graphs is None else _fixed_rows(feeds)
        if self.graphs is not None and rows is not None:
            self.paged.enter([feed.part for feed in feeds])
            logits = self.graphs.run(rows)
            if logits is not None:  # of all rows, one for each chunk
                chosen = torch.tensor([index for index, _ in wanted], dtype=torch.long, device=self.device)
                return logits.index_select(0, chosen).float()
        return self.rows(feeds, wanted, outputs)

    def rows(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs) -> Tensor:
        """As `logits`; of a model that does not generate, the last hidden states [wanted, hidden]."""
        if self.native is not None:
            return self._native_rows(self.native, feeds, wanted, outputs)
        layout = self._lay_out([feed.part for feed in feeds])
        answers_on = self.device if self.pipeline is None else self.pipeline.answers_on
        rows = torch.tensor(_rows(layout, wanted), dtype=torch.long, device=answers_on)
        if not self.generates:
            return self.hidden(feeds, layout, outputs)[rows].float()
        module = self.model.module
        kept = self._run(module, feeds, layout, outputs, **({"logits_to_keep": rows} if self._keeps else {})).logits[0]
        logits: Tensor = (kept if self._keeps else kept[rows]).float().contiguous()
        return logits

    def _native_rows(
        self,
        native: Runner,
        feeds: Sequence[Feed],
        wanted: Sequence[tuple[int, int]],
        outputs: Outputs,
        *,
        hidden: bool = False,
    ) -> Tensor:
        """The rows of one chunk follow those of the one before. The pages are not entered: the library reads no
        position that nobody wrote."""
        rows = Rows.of([feed.part for feed in feeds], wanted, self.paged.page_size)
        inputs = self._embed(feeds, rows.order, rows.starts, outputs)
        return native.step(inputs, rows, hidden=hidden)

    def fed(
        self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs
    ) -> tuple[Tensor | Sequence[int], Rows]:
        """See `Chooser`. Where no items are among the tokens, the library looks these up, too."""
        rows = Rows.of([feed.part for feed in feeds], wanted, self.paged.page_size)
        if any(map(_holds_items, feeds)):
            return self._embed(feeds, rows.order, rows.starts, outputs), rows
        return [token for feed in feeds for token in feed.tokens], rows

    def vectors(self, feeds: Sequence[Feed], outputs: Outputs) -> list[tuple[float, ...] | None]:
        if self.native is not None:
            every = [(index, offset) for index, feed in enumerate(feeds) for offset in range(feed.part.length)]
            hidden = self._native_rows(self.native, feeds, every, outputs, hidden=True)
            parts = torch.split(hidden, [feed.part.length for feed in feeds])
            return list(map(self._pool, feeds, parts))
        layout = self._lay_out([feed.part for feed in feeds])
        hidden = self.hidden(feeds, layout, outputs)
        starts = dict(zip(layout.order, layout.starts, strict=True))
        return [
            self._pool(feed, hidden[starts[index] : starts[index] + feed.part.length])
            for index, feed in enumerate(feeds)
        ]

    def hidden(self, feeds: Sequence[Feed], layout: PagedLayout, outputs: Outputs) -> Tensor:
        """The last hidden states [rows, hidden]."""
        hidden: Tensor = self._run(self.model.module.base_model, feeds, layout, outputs).last_hidden_state[0]
        return hidden

    def _run(self, module: Any, feeds: Sequence[Feed], layout: PagedLayout, outputs: Outputs, **options: Any) -> Any:
        call = PagedCall(step=self._step(layout), witness=self.witness)
        try:
            with self.crossing():
                return module(
                    inputs_embeds=self._embed(feeds, layout.order, layout.starts, outputs)[None],
                    position_ids=self._position_ids(feeds, layout),
                    use_cache=False,
                    triolet=call,
                    **options,
                )
        finally:
            call.step = None

    def crossing(self) -> AbstractContextManager[None]:
        """The module can be called within, whatever devices it is on; compiled, where it is."""
        if self.pipeline is not None:
            return self.pipeline.crossing()
        return nullcontext() if self.compiled is None else self.compiled.crossing()

    def _step(self, layout: PagedLayout) -> AnyStep:
        if isinstance(self.paged, PagedKV):
            return PagedStep(self.paged, layout)
        assert self.pipeline is not None, "pages in stages are of a pipeline"
        return self.pipeline.step(self.paged, layout)

    def _pool(self, feed: Feed, hidden: Tensor) -> tuple[float, ...] | None:
        pooling, notes = feed.record.start.pooling, feed.record.notes
        assert pooling is not None, "only a sequence with a pooling is pooled"
        if notes.sums is None:
            notes.sums = Sums(count=feed.part.start)
            assert feed.part.start == 0 or pooling.kind in {"last", "classify"}, (
                f"sequence {feed.record.start.sequence_id}: {pooling.kind} needs all positions, so no shared prefix"
            )
        notes.sums.add(hidden, pooling)
        return PooledHead(self.model).answer(notes.sums, pooling) if feed.part.samples else None

    def _lay_out(self, chunks: Sequence[Chunk]) -> PagedLayout:
        self.paged.enter(chunks)
        return PagedLayout.of(chunks, self.paged.page_size, self.device)

    def _embed(self, feeds: Sequence[Feed], order: Sequence[int], starts: Sequence[int], outputs: Outputs) -> Tensor:
        """Embeddings of the step's rows [rows, hidden]: of the tokens, and of the items placed among them.

        Args:
            order: which chunk's rows come one after the other.
            starts: the first row of each, in this order.
        """
        fed = [token for index in order for token in feeds[index].tokens]
        embed = self.model.module.get_input_embeddings()
        embeddings: Tensor = embed(torch.tensor(fed, device=self.device))
        for index, row in zip(order, starts, strict=True):
            if feeds[index].record.start.placeholders:
                _place(embeddings, row, feeds[index], outputs)
        return embeddings

    def _position_ids(self, feeds: Sequence[Feed], layout: PagedLayout) -> Tensor:
        """[1, rows], or [3, 1, rows] where items have rows and columns."""
        if feeds[0].record.notes.positions is None:
            return layout.positions[None]
        axes = np.concatenate([_axes(feeds[index]) for index in layout.order], 1)
        return torch.from_numpy(axes).to(self.device)[:, None]


@frozen(kw_only=True, eq=False)
class CausalDecode:
    """Computes a `FixedStep`'s logits; what is recorded. It does the same each time, and asks the device nothing."""

    model: TransformerModel
    paged: PagedKV
    compiled: CompiledLayers | None
    axes: bool  # whether the model reads positions in three dimensions

    @classmethod
    def of(cls, network: CausalNetwork) -> CausalDecode:
        """Of a network's model, pages and positions."""
        family, module = network.family, network.model.module
        assert isinstance(network.paged, PagedKV), "a pipeline's steps are not recorded"
        axes = family is not None and family.positions(module, (0,), ()) is not None
        return cls(model=network.model, paged=network.paged, compiled=network.compiled, axes=axes)

    def __call__(self, inputs: FixedInputs) -> None:
        module = self.model.module
        call = PagedCall(step=FixedStep(self.paged, inputs))
        try:
            with nullcontext() if self.compiled is None else self.compiled.crossing():
                answer = module(
                    inputs_embeds=module.get_input_embeddings()(inputs.token_ids)[None],
                    position_ids=inputs.positions.expand(3, 1, -1) if self.axes else inputs.positions[None],
                    use_cache=False,
                    triolet=call,
                )
        finally:
            call.step = None
        inputs.logits.copy_(answer.logits[0])

    def rehearse(self, inputs: FixedInputs) -> None:
        """Runs on the meta device, where nothing is computed: what asks a device for a number fails there, as does what
        mixes two devices, and no capture need be broken off."""
        place, paged = torch.device("meta"), self.paged
        pages = paged.another(pages=paged.pages, page_size=paged.page_size, device=place)
        evolve(self, model=self.model.to(place), paged=pages, compiled=None)(inputs.on(place))


def encode_together(family: Family, model: TransformerModel, jobs: Sequence[EncodeJob]) -> list[Tensor]:
    """See `Network.encode`. All items share a launch."""
    outputs = family.encode(model.module, [job.payload for job in jobs])
    for job, output in zip(jobs, outputs, strict=True):
        assert len(output) == job.embeddings, f"item {job.key!r} has {len(output)} embeddings, not {job.embeddings}"
    return outputs


def _fixed_rows(feeds: Sequence[Feed]) -> list[FixedRow] | None:
    """The rows of a step that only decodes; ``None``: it does not."""
    rows = []
    for feed in feeds:
        part, start, notes = feed.part, feed.part.start, feed.record.notes
        placed = any(one.touches(start, start + 1) for one in feed.record.start.placeholders)
        bent = notes.positions is not None and start < notes.positions.shape[1]  # among items, three numbers differ
        if part.length != 1 or placed or bent:  # draft tokens lengthen the chunk
            return None
        token, position = feed.record.tokens[start], start + notes.delta
        rows.append(FixedRow(token=token, start=start, position=position, page_table=part.page_table))
    return rows


def _holds_items(feed: Feed) -> bool:
    """Whether any of its rows are an item's."""
    start, stop = feed.part.start, feed.part.start + feed.part.length
    return any(one.touches(start, stop) for one in feed.record.start.placeholders)


def _place(embeddings: Tensor, row: int, feed: Feed, outputs: Outputs) -> None:
    """Puts what the chunk holds of each item in place of the embeddings of its placeholders. The chunk's rows begin at
    ``row``; an item's rows fill its spans in order, and chunks may cut them anywhere."""
    start, stop = feed.part.start, feed.part.start + feed.part.length
    for placeholder in feed.record.start.placeholders:
        if not placeholder.touches(start, stop):
            continue
        output, taken = outputs.get(placeholder.key), 0
        for first, last in placeholder.spans:
            low, high = max(first, start), min(last, stop)
            if low < high:
                embeddings[row + low - start : row + high - start] = output[taken + low - first : taken + high - first]
            taken += last - first


def _axes(feed: Feed) -> Any:
    """Positions in three dimensions of the chunk, numpy int64 [3, length]: the prompt's own, then in a line."""
    start, stop, notes = feed.part.start, feed.part.start + feed.part.length, feed.record.notes
    prompt = notes.positions.shape[1]
    later = np.arange(max(start, prompt), stop, dtype=np.int64) + notes.delta
    return np.concatenate([notes.positions[:, start:stop], np.broadcast_to(later, (3, len(later)))], 1)


def _rows(layout: PagedLayout, wanted: Sequence[tuple[int, int]]) -> list[int]:
    starts = dict(zip(layout.order, layout.starts, strict=True))
    return [starts[index] + offset for index, offset in wanted]

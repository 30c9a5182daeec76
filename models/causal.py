"""Decoder-only models of transformers behind `Network`: its modules compute, our attention reads and writes the pages.

One call of the module feeds all slices of a step, flattened into rows; `paged.py` keeps the sequences apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from ..core.plan import EncodeJob, Slice
from .attention import PAGED, PagedCall, Witness, register
from .kv import PagedKV
from .network import Feed, Outputs, Record
from .paged import PagedLayout, PagedStep
from .pooling import PooledHead, Sums
from .transformer import TransformerModel


@define(eq=False)
class _Notes:
    """What a network has found out of a sequence, on the host."""

    positions: Any = None  # numpy int64 [3, prompt]; None: plain
    delta: int = 0  # what is added to later positions
    sums: Sums | None = None


@frozen(kw_only=True, eq=False)
class CausalNetwork:
    """A decoder at work. ``generates`` is false where the module has no head for tokens."""

    model: TransformerModel
    paged: PagedKV
    positions: int
    device: torch.device
    generates: bool
    witness: Witness | None = None

    def attach(self) -> None:
        """Makes our attention the module's."""
        register()
        self.model.module.set_attn_implementation(PAGED)

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[Tensor]:
        raise AssertionError(f"{len(jobs)} items are to be encoded, but the model reads text only")

    def write_cross(self, slot: int, output: Tensor) -> None:
        raise AssertionError(
            f"slot {slot} is to be written with {tuple(output.shape)}, but there is no cross-attention"
        )

    def start(self, record: Record) -> None:
        record.notes = _Notes()

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs) -> Tensor:
        assert self.generates, "a model without a head for tokens is asked for some"
        return self.rows(feeds, wanted, outputs)

    def rows(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs) -> Tensor:
        """As `logits`; of a model that does not generate, the last hidden states [wanted, hidden]."""
        layout = self._lay_out([feed.part for feed in feeds])
        rows = torch.tensor(_rows(layout, wanted), dtype=torch.long, device=self.device)
        if not self.generates:
            return self.hidden(feeds, layout, outputs)[rows].float()
        answer = self.model.module(
            inputs_embeds=self._embed(feeds, layout, outputs)[None],
            position_ids=self._position_ids(feeds, layout),
            use_cache=False,
            logits_to_keep=rows,
            triolet=PagedCall(step=PagedStep(self.paged, layout), witness=self.witness),
        )
        return answer.logits[0].float().contiguous()

    def vectors(self, feeds: Sequence[Feed], outputs: Outputs) -> list[tuple[float, ...] | None]:
        layout = self._lay_out([feed.part for feed in feeds])
        hidden = self.hidden(feeds, layout, outputs)
        starts = dict(zip(layout.order, layout.starts, strict=True))
        return [
            self._pool(feed, hidden[starts[index] : starts[index] + feed.part.length])
            for index, feed in enumerate(feeds)
        ]

    def hidden(self, feeds: Sequence[Feed], layout: PagedLayout, outputs: Outputs) -> Tensor:
        """The last hidden states [rows, hidden]."""
        answer = self.model.module.base_model(
            inputs_embeds=self._embed(feeds, layout, outputs)[None],
            position_ids=self._position_ids(feeds, layout),
            use_cache=False,
            triolet=PagedCall(step=PagedStep(self.paged, layout), witness=self.witness),
        )
        return answer.last_hidden_state[0]

    def _pool(self, feed: Feed, hidden: Tensor) -> tuple[float, ...] | None:
        pooling, notes = feed.record.start.pooling, feed.record.notes
        assert pooling is not None, "only a sequence with a pooling is pooled"
        if notes.sums is None:
            notes.sums = Sums()
        notes.sums.add(hidden, pooling)
        return PooledHead(self.model).answer(notes.sums, pooling) if feed.part.draw else None

    def _lay_out(self, slices: Sequence[Slice]) -> PagedLayout:
        self.paged.enter(slices)
        return PagedLayout.of(slices, self.paged.page_size, self.device)

    def _embed(self, feeds: Sequence[Feed], layout: PagedLayout, outputs: Outputs) -> Tensor:
        """Embeddings of the step's rows [rows, hidden]: of the tokens, and of the items placed among them."""
        fed = [token for index in layout.order for token in feeds[index].tokens]
        embed = self.model.module.get_input_embeddings()
        return embed(torch.tensor(fed, device=self.device))

    def _position_ids(self, feeds: Sequence[Feed], layout: PagedLayout) -> Tensor:
        return layout.positions[None]


def _rows(layout: PagedLayout, wanted: Sequence[tuple[int, int]]) -> list[int]:
    starts = dict(zip(layout.order, layout.starts, strict=True))
    return [starts[index] + offset for index, offset in wanted]

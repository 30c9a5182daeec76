"""A simulated model that aligns texts."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from triolet import InvalidRequest
from triolet.api.inputs.audio import content_key
from triolet.core.aligning import TextDraft, Timed, cut_words
from triolet.core.model import ModelDescription
from triolet.core.plan import AlignedTokens
from triolet.core.request import Alignment, EncoderItem
from triolet_testing.sim_model import START, SimModel

FRAMES = 10
SECONDS = 0.01  # of a frame


@frozen
class SimAligner:
    """Implements `triolet.core.aligning.TextAligner`. It knows no digits. Each other word is one token."""

    def draft(self, samples: Any, text: str, language: str | None) -> TextDraft:
        if language not in {None, "en"}:
            raise InvalidRequest(f"language={language!r}; allowed: 'en'")
        spoken = text.split()
        known = [word for word in spoken if not word.isdigit()]
        item = EncoderItem(key=content_key(samples, "sim"), payload=samples, embeddings=10, size=100)
        places = iter(range(len(known)))
        return TextDraft(
            words=cut_words(text, spoken),
            token_ids=(START, *(2 + len(word) for word in known)) if known else (),
            items=(item,),
            alignment=Alignment(start=1, frames=FRAMES),
            places=tuple(None if word.isdigit() else ((at := next(places)), at + 1) for word in spoken),
        )

    def times(self, draft: TextDraft, answer: AlignedTokens) -> tuple[Timed | None, ...]:
        return tuple(
            None if place is None else Timed(SECONDS * answer.frames[place[0]], SECONDS * answer.frames[place[1]], 0.5)
            for place in draft.places
        )


@frozen(kw_only=True)
class AligningModel(SimModel):
    """A simulated model with `SimAligner`."""

    def describe(self) -> ModelDescription:
        return evolve(SimModel.describe(self), aligner=SimAligner())

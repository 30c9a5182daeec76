"""`CtcTexts`: known texts as the labels of a CTC model, whose likeliest path gives the times of words."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from attrs import frozen

from ...core.aligning import APOSTROPHES, TextDraft, Timed, cut_words, least_frames, spoken_words
from ...core.checks import check_characters
from ...core.errors import InvalidRequest
from ...core.plan import AlignedTokens
from ...core.request import Alignment
from .frames import FrameItems
from .prompts import tokenize


@frozen(kw_only=True)
class CtcTexts:
    """Implements `triolet.core.aligning.TextAligner`. Marks are left out, since a model may say none. A letter that the
    vocabulary lacks is written small or large, if the vocabulary has that, and else left out."""

    preparer: FrameItems
    blank: int

    def draft(self, samples: Any, text: str, language: str | None) -> TextDraft:  # noqa: ARG002
        """Implements `TextAligner.draft`."""
        check_characters(text)
        item, spoken = self.preparer.item(samples), spoken_words(text)
        known = {letter: self._known(letter) for letter in set().union(*spoken)}
        words = [self._tokens("".join(known[letter] for letter in word)) for word in spoken]
        tokens, places = list[int](), list[tuple[int, int] | None]()
        for word in words or [()]:
            places.append((len(tokens), len(tokens) + len(word)) if word else None)
            tokens += word
        if (least := least_frames(tokens)) > item.embeddings:
            raise InvalidRequest(
                f"the text has {len(tokens)} tokens, which take {least} frames or more; allowed: up to "
                f"{item.embeddings}, the frames of {len(samples) / self.preparer.sampling_rate:.2f} s of audio"
            )
        return TextDraft(
            words=cut_words(text, spoken),
            token_ids=(self.blank, *tokens) if tokens else (),
            items=(item,),
            alignment=Alignment(start=1, frames=item.embeddings),
            places=tuple(places),
        )

    def times(self, draft: TextDraft, answer: AlignedTokens) -> tuple[Timed | None, ...]:
        """Implements `TextAligner.times`."""
        seconds = self.preparer.frame_seconds
        return tuple(
            place
            and Timed(
                seconds * answer.frames[place[0]],
                seconds * answer.ends[place[1] - 1],
                fmean(math.exp(logprob) for logprob in answer.logprobs[slice(*place)]),
            )
            for place in draft.places
        )

    def _known(self, letter: str) -> str:
        """Returns ``letter`` as the vocabulary has it; empty if it lacks the letter."""
        for form in [letter, letter.lower(), letter.upper(), *("'" if letter in APOSTROPHES else "")]:
            if str(self.preparer.tokenizer.decode(self._tokens(form))).strip() == form:
                return form
        return ""

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tokenize(self.preparer.tokenizer, text, special=False) if text else ()

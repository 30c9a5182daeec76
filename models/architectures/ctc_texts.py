"""`CtcTexts`: known texts as the labels of a CTC model, whose likeliest path gives the times of words."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from statistics import fmean
from typing import Any

from attrs import frozen

from ...core.aligning import APOSTROPHES, TextDraft, Timed, cut_words, least_frames, spoken_words
from ...core.checks import check_characters
from ...core.errors import InvalidRequest
from ...core.plan import AlignedTokens
from ...core.request import Alignment
from .frame_family import FrameItems
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
        words, written = cut_words(text, spoken), ""
        known, stops = {letter: self._known(letter) for letter in set().union(*spoken)}, list[int]()
        for part, word in zip(words, spoken, strict=False):
            form = "".join(known[letter] for letter in word)
            written += (" " if written and form and part[0].isspace() else "") + form
            stops.append(len(written))
        read = self.preparer.tokenizer(written, add_special_tokens=False, return_offsets_mapping=True)
        unknown = {self.blank, self.preparer.tokenizer.unk_token_id}  # a blank between words may be no token
        pairs = zip(read["input_ids"], read["offset_mapping"], strict=True)
        kept = [(token, bisect_left(stops, stop)) for token, (_, stop) in pairs if token not in unknown]
        tokens, owners = [token for token, _ in kept], [owner for _, owner in kept]
        places = [(bisect_left(owners, index), bisect_right(owners, index)) for index in range(len(words))]
        if (least := least_frames(tokens)) > item.embeddings:
            raise InvalidRequest(
                f"the text has {len(tokens)} tokens, which take {least} frames or more; allowed: up to "
                f"{item.embeddings}, the frames of {len(samples) / self.preparer.sampling_rate:.2f} s of audio"
            )
        return TextDraft(
            words=words,
            token_ids=(self.blank, *tokens) if tokens else (),
            items=(item,),
            alignment=Alignment(start=1, frames=item.embeddings),
            places=tuple(place if place[0] < place[1] else None for place in places),
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
        tokenizer = self.preparer.tokenizer
        forms: list[str] = [letter, letter.lower(), letter.upper(), *("'" if letter in APOSTROPHES else "")]
        for form in forms:
            if str(tokenizer.decode(tokenize(tokenizer, form, special=False))).strip() == form:
                return form
        return ""

"""`ForcedAligner`: the texts of Qwen3-ForcedAligner (Qwen3-ASR technical report, 2026). The prompt has two marks after
each word, and the model classifies each mark by its time."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import field, frozen
from torch import nn

from ...core.aligning import TextDraft, Timed, cut_words
from ...core.checks import check_characters
from ...core.errors import InvalidRequest
from ...core.plan import AlignedTokens
from ...core.request import Alignment
from .conversations import Rendered
from .prompts import MediaPreparer


@frozen(kw_only=True)
class ForcedAligner:
    """Implements `triolet.core.aligning.TextAligner` by transformers' processor of the checkpoint, which finds words,
    writes the prompt and mends times that run backwards. ``mark`` is the token of a mark, ``classes`` the number of
    times."""

    preparer: MediaPreparer
    processor: Any = field(repr=False)
    mark: int
    classes: int

    def draft(self, samples: Any, text: str, language: str | None) -> TextDraft:
        """Implements `TextAligner.draft`."""
        rate = self.preparer.sampling_rate
        most = self.classes * self.processor.timestamp_segment_time / 1000
        if len(samples) > most * rate:
            raise InvalidRequest(
                f"the audio lasts {len(samples) / rate:.2f} s; allowed: up to {most:g} s. Align shorter parts"
            )
        check_characters(text)
        spoken = self._spoken(text, language)
        try:
            words = cut_words(text, spoken)
        except ValueError:  # a tokenizer of words may write other characters
            raise InvalidRequest(
                f"the words {spoken!r:.200} are not those of text={text!r:.200}; allowed: a text in the form NFKC"
            ) from None
        alignment = Alignment(start=1, frames=self.classes, marks=self.mark)
        if not spoken:
            return TextDraft(words=words, token_ids=(), items=(), alignment=alignment, places=(None,))
        parts = [{"type": "audio"}, *({"type": "text", "text": word} for word in spoken)]
        prompt = self.processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        prepared = self.preparer.prepare(Rendered(prompt), audio=[samples])
        marks = prepared.token_ids.count(self.mark)
        assert marks == 2 * len(words), f"the chat template wrote {marks} marks for {len(words)} words"
        return TextDraft(
            words=words,
            token_ids=prepared.token_ids,
            items=prepared.items,
            alignment=Alignment(start=prepared.token_ids.index(self.mark), frames=self.classes, marks=self.mark),
            places=tuple((2 * index, 2 * index + 2) for index in range(len(words))),
        )

    def times(self, draft: TextDraft, answer: AlignedTokens) -> tuple[Timed | None, ...]:
        """Implements `TextAligner.times`."""
        chosen = nn.functional.one_hot(torch.tensor(answer.frames), self.classes)[None]
        marks = torch.full((1, len(answer.frames)), self.mark, dtype=torch.long)
        (found,) = self.processor.decode_forced_alignment(chosen, marks, [draft.words], self.mark)
        certain = [math.exp(logprob) for logprob in answer.logprobs]
        return tuple(
            Timed(time["start_time"], time["end_time"], sum(certain[2 * index : 2 * index + 2]) / 2)
            for index, time in enumerate(found)
        )

    def _spoken(self, text: str, language: str | None) -> list[str]:
        """Returns the words of ``text`` as the model knows them, without marks."""
        from transformers.models.qwen3_asr import processing_qwen3_asr as known

        codes = known.LANGUAGE_CODE_TO_NAME
        name = None if language is None else codes.get(language)
        if language is not None and name not in known.FORCED_ALIGNER_LANGUAGES:
            allowed = sorted(code for code in codes if codes[code] in known.FORCED_ALIGNER_LANGUAGES)
            raise InvalidRequest(f"language={language!r}; allowed: {', '.join(allowed)}, or None")
        try:
            spoken: list[str] = self.processor.split_words_for_alignment(text, name)
        except ImportError as error:
            raise InvalidRequest(f"language={language!r} is not allowed here: {error}") from error
        return spoken

"""Models that hear one piece of audio and write plain text, without times, as `SpeechModel`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from attrs import field, frozen

from ...core.checks import shown
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ...core.request import LogitRules
from ...core.speech import SAMPLING, Ask, Draft, Sound, Span, SpeechFacts, WindowCut, WordTokens, continuing
from ..architectures.prompts import tokenize

LEAST_SECONDS = 0.25  # shorter windows are filled with silence, since encoders need some embeddings
STEPS = 50  # in a second
STREAM_SECONDS = 300  # of an utterance that is heard piece by piece: all of them are kept, to be heard again


@frozen(kw_only=True, slots=False)
class PlainSpeech:
    """An encoder-decoder behind the seam. The window is its one encoder item, and the decoder writes the text.

    Args:
        model: the description of the model, with its preparer.
        facts: the abilities and limits.
    """

    model: ModelDescription
    facts: SpeechFacts = field()

    @facts.default
    def _facts(self) -> SpeechFacts:
        return SpeechFacts(
            window_samples=self.model.window_samples,
            step_samples=self.model.sampling_rate // STEPS,
            most_tokens=self.model.max_positions - 1,
            begins=True,
            reuses=getattr(self.model.preparer, "extends", False),
            options=SAMPLING,
            defaults={"beam_size": 1},
        )

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that are no text."""
        tokenizer = self.model.tokenizer
        added = (token for token, text in tokenizer.added_tokens_decoder.items() if text.special)
        return frozenset({*added, *tokenizer.all_special_ids, *self.model.eos_token_ids})

    def is_text(self, token: int) -> bool:
        """True if ``token`` is not special."""
        return token not in self.special

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of ``text``. Raises `InvalidRequest` if one of them is special."""
        encoded = tokenize(self.model.tokenizer, text, special=False)
        if not all(map(self.is_text, encoded)):
            raise InvalidRequest(f"{shown(text)} has a special token; allowed: plain text")
        return encoded

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ``token_ids`` without special tokens."""
        kept = [token for token in token_ids if self.is_text(token)]
        return str(self.model.tokenizer.decode(kept, skip_special_tokens=True))

    def hear(self, samples: Any, *, trimmed: bool = False) -> Sound:  # noqa: ARG002  (nothing is filled up)
        """Returns the window, with its features."""
        preparer = self.model.preparer
        assert preparer is not None, "a model of speech besides Whisper has a preparer"
        prepared = preparer.prepare((), audio=preparer.read_media([self.filled(samples)]))
        return Sound(samples=samples, item=prepared.items[0], heard=prepared.token_ids)

    def filled(self, samples: Any) -> Any:
        """Returns ``samples``, with silence after them if they are too few for an encoder."""
        least = round(LEAST_SECONDS * self.model.sampling_rate)
        return np.pad(samples, (0, max(least - len(samples), 0)))

    def detection(self, sound: Sound) -> Draft:
        """Is never called, since the language is not detected by a request of its own."""
        raise NotImplementedError

    def draft(self, sound: Sound, ask: Ask) -> Draft:
        """Returns the draft of a window's text."""
        prompt = (*self.prompt(sound, ask), *ask.begun)
        most = max(self.model.max_positions - len(prompt), 1)
        rules = self.rules(ask.suppress)
        if self.model.generation is not None:
            rules = self.model.generation.of(rules, prompt_length=len(prompt), max_tokens=most)
        return Draft(token_ids=prompt, items=(sound.item,), rules=rules, max_tokens=most)

    def rules(self, suppress: tuple[int, ...] | None = None) -> LogitRules:
        """Returns the rules of a text; ``suppress``: tokens in place of those that the checkpoint suppresses."""
        own = self.model.suppress_token_ids if suppress is None else suppress
        return LogitRules(suppress=own, begin_suppress=self.model.begin_suppress_token_ids)

    def prompt(self, sound: Sound, ask: Ask) -> tuple[int, ...]:  # noqa: ARG002  (for other prompts)
        """Returns the tokens before the text."""
        start: tuple[int, ...] = sound.heard
        return start

    def cut(self, token_ids: Sequence[int], ask: Ask) -> WindowCut:  # noqa: ARG002  (it writes no times)
        """Returns the text as one span."""
        return WindowCut((Span(0, None, tuple(token_ids), text=continuing(self.decode(token_ids))),))

    def word_tokens(self, written: tuple[int, ...], ask: Ask) -> WordTokens:  # noqa: ARG002
        """Returns the text tokens, which alone have times."""
        return WordTokens(special=(), written=tuple(filter(self.is_text, written)), text=self.model.vocabulary_size)


def plain_speech(description: ModelDescription, checkpoint: Any) -> PlainSpeech:  # noqa: ARG001  (see `known.Make`)
    """Returns the speech model of a Moonshine."""
    return PlainSpeech(model=description)

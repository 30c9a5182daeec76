"""CTC models and transducers as `SpeechModel`: the engine knows the frames of each token, so the model knows all
times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from attrs import evolve, field, frozen

from ...core.speech import Ask, Detection, Draft, Sound, Span, SpeechFacts, WindowCut
from ..architectures.frames import FrameItems
from .plain import STREAM_SECONDS, PlainSpeech

_BEGIN = "\N{LOWER ONE EIGHTH BLOCK}"  # of a word, as sentencepiece writes it
_TAG = re.compile(r"<([a-z]{2,3})-[A-Z]{2}>")  # the language that Nemotron writes


@frozen(kw_only=True, slots=False)
class FrameSpeech(PlainSpeech):
    """A CTC model or a transducer behind the seam."""

    facts: SpeechFacts = field(init=False)

    @facts.default
    def _facts(self) -> SpeechFacts:
        languages, pieces = tuple(self._preparer.languages), self._preparer.pieces
        return SpeechFacts(
            window_samples=self.model.window_samples,
            step_samples=round(self.model.frame_seconds * self.model.sampling_rate),
            most_tokens=self.model.max_positions - 1,
            languages=languages,
            detection=Detection.WRITTEN if languages else Detection.SILENT,
            word_times="frames",
            stream_samples=0 if pieces is None else STREAM_SECONDS * self.model.sampling_rate,
            defaults={"temperature": (0.0,), "beam_size": 1},
        )

    @property
    def _preparer(self) -> FrameItems:
        assert isinstance(self.model.preparer, FrameItems), "a model that reads frames has them"
        return self.model.preparer

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that are no text: special ones, and languages."""
        vocabulary = self.model.tokenizer.get_vocab()
        return super().special | {token for text, token in vocabulary.items() if _TAG.fullmatch(text)}

    def draft(self, sound: Sound, ask: Ask) -> Draft:
        """Returns the draft of a window's text, in the language of ``ask``."""
        found = super().draft(sound, ask)
        if ask.language is None:
            return found
        return evolve(found, items=(self._preparer.spoken(sound.item, ask.language),))

    def cut(self, token_ids: Sequence[int], ask: Ask) -> WindowCut:  # noqa: ARG002  (the engine knows the times)
        """Returns the text as one span, and the language that the model wrote."""
        tags = map(_TAG.fullmatch, map(str, self.model.tokenizer.convert_ids_to_tokens(list(token_ids))))
        language = next((tag[1] for tag in tags if tag is not None), None)
        return WindowCut((Span(0, None, tuple(token_ids)),), language=language)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ``token_ids``, which begins with a blank if a word begins there."""
        kept = [token for token in token_ids if self.is_text(token)]
        text = super().decode(kept)
        first = str(self.model.tokenizer.convert_ids_to_tokens(kept[0])) if kept else ""
        return f" {text}" if first.startswith(_BEGIN) and not text.startswith(" ") else text

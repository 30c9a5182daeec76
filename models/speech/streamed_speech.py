"""Models with causal encoders as `StreamingModel`: live audio is heard piece by piece, each piece once.

`FrameSpeech` is a CTC model or transducer as `SpeechModel`: the engine knows the frames of each token, so the model
knows all times.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from attrs import evolve, field, frozen

from ...core.model import ModelDescription
from ...core.request import EncoderItem, LogitRules, most_tokens
from ...core.speech import Ask, Detection, Draft, Sound, Span, SpeechFacts, WindowCut
from ..architectures.frame_family import FrameItems
from ..architectures.streamed_encoder import AudioPiece, Pieces
from .placed import PlacedSpeech
from .plain import LEAST_SECONDS, STREAM_SECONDS, PlainSpeech

# -- CTC models and transducers ----------------------------------------------------------------------------------------


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


# -- causal encoders ---------------------------------------------------------------------------------------------------


@frozen(kw_only=True, slots=False)
class StreamedSpeech(FrameSpeech):
    """A transducer that hears on where it was. An item has the frames of one piece; the request of a piece begins with
    the tokens of all pieces before, which the prediction network reads again."""

    @property
    def _pieces(self) -> Pieces:
        pieces = self._preparer.pieces
        assert pieces is not None, "a causal encoder hears pieces"
        return pieces

    def hear_on(self, samples: Any, before: Sound | None, language: str | None, *, last: bool) -> Sound | None:
        """Returns the next piece, as many whole chunks of the encoder as are new; with ``last``, silence fills the last
        chunk up."""
        payload, follows = (None, "") if before is None else (before.item.payload, before.item.key)
        piece = self._pieces.next(samples, payload, follows, last=last)
        if piece is None:
            return None
        piece = evolve(piece, inputs=self._preparer.in_language(piece.inputs, language))
        settings = self._preparer.settings
        return Sound(samples=samples, item=_item(piece, settings.identity, settings.embedding_bytes))

    def draft_on(self, sound: Sound, written: tuple[int, ...]) -> Draft:
        """Returns the draft of the text of a piece. It begins with the latest tokens if one reading has so many pieces
        that all tokens would leave no positions for more."""
        start = self._preparer.begin(())
        room = self.model.max_positions - len(start)
        known = written[max(len(written) - room // 2, 0) :]
        return Draft(token_ids=(*start, *known), items=(sound.item,), rules=LogitRules(), max_tokens=room - len(known))


@frozen(kw_only=True, slots=False)
class PacedSpeech(PlacedSpeech):
    """A language model that writes a token at each position of the audio, and hears on where it was. An item has the
    positions of one piece. The request of a piece has the items of all pieces so far, and goes on after their tokens,
    whose pages are cached; so its text is that of one request for the whole audio."""

    facts: SpeechFacts = field(init=False)

    @facts.default
    def _paced_facts(self) -> SpeechFacts:
        whole, paced, rate = self._facts(), self._preparer.processor, self.model.sampling_rate
        held = self.cache_bytes // self._preparer.embedding_bytes  # each request has the items of all pieces so far
        room = (min(self.model.max_positions, held) - paced.around) * paced.step
        return evolve(
            whole,
            window_samples=min(whole.window_samples, max(room, round(LEAST_SECONDS * rate))),
            step_samples=paced.step,
            word_times="frames",
            first_step=-paced.lead,
            most_tokens=self.model.max_positions,  # one for each position
            stream_samples=max(min(STREAM_SECONDS * rate, room), 0),
            options=frozenset(),
            defaults={"temperature": (0.0,), "beam_size": 1},
        )

    def hear_on(
        self,
        samples: Any,
        before: Sound | None,
        language: str | None,  # noqa: ARG002  (none can be named)
        *,
        last: bool,
    ) -> Sound | None:
        """Returns the next piece, as many positions as are new; with ``last``, also those of the silence in which the
        rest of the text is written. The first piece has more positions than the prompt."""
        items: tuple[EncoderItem, ...] = () if before is None else before.heard
        payload, follows, start = (items[-1].payload, items[-1].key, items[-1].spans[-1][1]) if items else (None, "", 0)
        if not len(samples):
            return None
        processor = self._preparer.processor
        piece = processor.pieces.next(processor.padded(samples, last=last), payload, follows, last=last)
        if piece is None or start + piece.frames <= len(self._preparer.start):
            return None
        # the features of one piece alone are kept, and sent to a replica
        earlier = [evolve(item, payload=evolve(item.payload, features=piece.features)) for item in items]
        item = _item(piece, self._preparer.identity, self._preparer.embedding_bytes)
        placed = evolve(item, spans=((start, start + piece.frames),))
        return Sound(samples=samples, item=placed, heard=(*earlier, placed))

    def draft_on(self, sound: Sound, written: tuple[int, ...]) -> Draft:
        """Returns the draft of the text up to the last position of a piece."""
        token_ids, begin = (*self._preparer.start, *written), self.model.begin_suppress_token_ids
        return Draft(
            token_ids=token_ids,
            items=sound.heard,
            rules=LogitRules(suppress=self.model.suppress_token_ids, begin_suppress=() if written else begin),
            max_tokens=most_tokens(self.model.max_positions, len(token_ids), sound.heard),
        )


def frame_speech(description: ModelDescription, checkpoint: Any) -> FrameSpeech:  # noqa: ARG001  (see `known.Make`)
    """Returns the speech model of a CTC model or transducer."""
    found = FrameSpeech(model=description)
    return StreamedSpeech(model=description) if found.facts.stream_samples else found


def _item(piece: AudioPiece, identity: str, embedding_bytes: int) -> EncoderItem:
    """Returns the item of a piece. Its key is a hash of the key before it and of what is new."""
    digest = hashlib.blake2b(repr((identity, piece.follows, piece.first)).encode(), digest_size=16)
    for name, tensor in sorted(piece.inputs.items()):
        digest.update(f"{name} {tensor.tolist()}".encode())
    digest.update(piece.features[piece.first :].contiguous().numpy().data)
    size = piece.frames * embedding_bytes
    return EncoderItem(key=digest.hexdigest(), payload=piece, embeddings=piece.frames, size=size)

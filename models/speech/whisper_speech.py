"""Whisper (Radford et al. 2022) as a `SpeechModel`: special tokens before the text, and timestamps in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from attrs import field, frozen

from ...core.checks import shown
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription, WhisperTokens
from ...core.request import EncoderItem, LogitRules, Probe, TimestampRules
from ...core.speech import SAMPLING, Ask, Detection, Draft, Sound, Span, SpeechFacts, WindowCut, WordTokens
from .content import content_key

_MARGIN = 2.0  # seconds of silence after a trimmed window, at least
LEAD = 1
"""The number of frames by which the alignment heads are assumed to be ahead of the sound. The heads of whisper-base are
ahead by 45 to 65 ms (medians over four recordings of synthetic speech with known word times). Only one frame is
corrected, so that times stay near those of other programs."""
_OPTIONS = SAMPLING | {"encoder_context", "language_detection_segments", "language_detection_threshold"}
_OPTIONS |= {"max_initial_timestamp", "no_speech_threshold"}
_READS = frozenset({"carry_initial_prompt", "hotwords", "initial_prompt"})  # with <|startofprev|>
_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@frozen(kw_only=True, slots=False)
class WhisperSpeech:
    """Whisper behind the seam. ``tokens`` are its special tokens, and ``model`` is the description of the rest."""

    model: ModelDescription
    tokens: WhisperTokens
    facts: SpeechFacts = field(init=False)

    @facts.default
    def _facts(self) -> SpeechFacts:
        tokens, model = self.tokens, self.model
        half = model.max_positions // 2
        fault = model.alignment_fault
        return SpeechFacts(
            window_samples=model.window_samples,
            step_samples=round(tokens.seconds_per_timestamp * model.sampling_rate),
            most_tokens=half,
            history_tokens=0 if tokens.previous_id is None else max(half - 1, 0),
            languages=tuple(tokens.language_ids) or ("en",),
            detection=Detection.PROBED,
            tasks=tuple(tokens.task_ids) or ("transcribe",),
            begins=True,
            word_times="cross-attention" if fault is None else None,
            word_fault=fault or "",
            lead_steps=LEAD,
            options=_OPTIONS if tokens.previous_id is None else _OPTIONS | _READS,
            defaults={"beam_size": 5, "temperature": _TEMPERATURES},
        )

    @cached_property
    def special(self) -> frozenset[int]:
        """The special tokens below the timestamps. In every Whisper vocabulary <|endoftext|> follows the text tokens,
        and all tokens from <|startoftranscript|> up to <|0.00|> are special, <|startoflm|> among them."""
        tokens = self.tokens
        named = {tokens.no_timestamps_id, tokens.previous_id, tokens.no_speech_id}
        ids = named | {*tokens.language_ids.values(), *tokens.task_ids.values(), *self.model.eos_token_ids}
        layout = range(tokens.start_id, tokens.timestamp_begin_id)
        return frozenset(token for token in ids if token is not None).union([tokens.start_id], layout)

    def is_text(self, token: int) -> bool:
        """True if ``token`` is neither a timestamp nor special."""
        return token < self.tokens.timestamp_begin_id and token not in self.special

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of ``text`` after a space. Raises `InvalidRequest` if one of them is special."""
        encoded = tuple(self.model.tokenizer.encode(f" {text}", add_special_tokens=False))
        if any(not self.is_text(token) for token in encoded):
            raise InvalidRequest(f"{shown(text)} has a special token (<|...|>); allowed: plain text")
        return encoded

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ``token_ids`` without timestamps and special tokens."""
        kept = [token for token in token_ids if self.is_text(token)]
        return str(self.model.tokenizer.decode(kept, skip_special_tokens=True))

    def hear(self, samples: Any, *, trimmed: bool = False) -> Sound:
        """Returns the window. The runner computes its spectrum."""
        model, most = self.model, self.model.encoder_embeddings
        embeddings = self._embeddings_of(samples.size) if trimmed else most
        identity = model.processor_identity
        item = EncoderItem(
            key=content_key(samples, identity if embeddings == most else f"{identity}, {embeddings} embeddings"),
            payload=samples,
            embeddings=embeddings,
            size=model.encoder_bytes * embeddings // most,
        )
        return Sound(samples=samples, item=item, whole=embeddings == most)

    def _embeddings_of(self, samples: int) -> int:
        """Returns the number of embeddings of a trimmed window. They cover whole seconds, so that windows of similar
        lengths are computed together."""
        model = self.model
        seconds = math.ceil(samples / model.sampling_rate + _MARGIN)
        wanted = seconds * model.encoder_embeddings * model.sampling_rate // model.window_samples
        return min(wanted, model.encoder_embeddings)

    def detection(self, sound: Sound) -> Draft:
        """Returns the draft that samples one token after <|startoftranscript|> and asks for the probability of each
        language."""
        languages = tuple(self.tokens.language_ids.values())
        silence = () if self.tokens.no_speech_id is None else (self.tokens.no_speech_id,)
        return Draft(
            token_ids=(self.tokens.start_id,),
            items=(sound.item,),
            rules=LogitRules(allowed=languages),
            probe=Probe(position=0, token_ids=languages + silence),
            max_tokens=1,
        )

    def draft(self, sound: Sound, ask: Ask) -> Draft:
        """Returns the draft of a window's text, with a probe for "no speech"."""
        previous, silence = self.tokens.previous_id, self.tokens.no_speech_id
        before = () if previous is None or not ask.before else (previous, *ask.before)
        begun = (self.tokens.timestamp_begin_id, *ask.begun) if ask.timestamps and ask.begun else ask.begun
        prompt = (*before, *self._start(ask), *begun)
        probe = None if silence is None else Probe(position=prompt.index(self.tokens.start_id), token_ids=(silence,))
        return Draft(
            token_ids=prompt,
            items=(sound.item,),
            rules=self._rules(ask, begun),
            probe=probe,
            max_tokens=max(min(self.facts.most_tokens, self.model.max_positions - len(prompt)), 1),
        )

    def _start(self, ask: Ask) -> tuple[int, ...]:
        """Returns the tokens from <|startoftranscript|> on that precede a window's own text."""
        tokens = self.tokens
        ids = [tokens.start_id]
        if tokens.language_ids:
            assert ask.language is not None, "a window is read before the language is known"
            ids.append(tokens.language_ids[ask.language])
        if tokens.task_ids:
            ids.append(tokens.task_ids[ask.task])
        if not ask.timestamps:
            ids.append(tokens.no_timestamps_id)
        return tuple(ids)

    def _rules(self, ask: Ask, begun: tuple[int, ...]) -> LogitRules:
        tokens = self.tokens
        latest = None if ask.latest is None else round(ask.latest / tokens.seconds_per_timestamp)
        timestamps = TimestampRules(
            begin_id=tokens.timestamp_begin_id,
            no_timestamps_id=tokens.no_timestamps_id,
            max_initial=tokens.max_initial_timestamp if latest is None else latest,
            begun=begun,
        )
        return LogitRules(
            suppress=self._suppressed(ask.suppress),
            begin_suppress=self.model.begin_suppress_token_ids,
            timestamps=timestamps if ask.timestamps else None,
            counts_prompt=False,
        )

    def _suppressed(self, given: tuple[int, ...] | None) -> tuple[int, ...]:
        """Returns the tokens that are never sampled: the checkpoint's, or the caller's and all special tokens that no
        text has."""
        if given is None:
            return self.model.suppress_token_ids
        tokens = self.tokens
        allowed = {*self.model.eos_token_ids, *tokens.language_ids.values(), tokens.no_timestamps_id}
        return tuple(sorted({*given, *(self.special - allowed)}))

    def cut(self, token_ids: Sequence[int], ask: Ask) -> WindowCut:
        """Returns the spans of a window and the start of the next window."""
        if ask.timestamps:
            return cut_window(token_ids, self.tokens.timestamp_begin_id)
        return WindowCut((Span(0, None, tuple(token_ids)),))

    def word_tokens(self, written: tuple[int, ...], ask: Ask) -> WordTokens:
        """Returns the tokens of a window in the form in which the times of its words are requested."""
        text = min(*self.special, self.tokens.timestamp_begin_id) or self.tokens.timestamp_begin_id
        return WordTokens(special=self._start(ask), written=written, text=text)


def with_whisper(description: ModelDescription, tokens: WhisperTokens) -> Mapping[str, Any]:
    """Returns the fields of a Whisper model's description that follow from its special ``tokens``."""
    speech = WhisperSpeech(model=description, tokens=tokens)
    return {"speech": speech, "start_id": tokens.start_id, "text_tokens": tokens.start_id}


def special_tokens(description: ModelDescription) -> WhisperTokens:
    """The special tokens of a Whisper model. Raises `InvalidRequest` for another model."""
    if not isinstance(description.speech, WhisperSpeech):
        raise InvalidRequest(f"{description.architecture} has no special tokens of Whisper; allowed: Whisper models")
    return description.speech.tokens


def cut_window(token_ids: Sequence[int], begin_id: int) -> WindowCut:
    """Cuts a window's tokens at their timestamps (ids from ``begin_id`` on). Any sequence of tokens is allowed.

    Two timestamps in a row separate two spans. If the window has such a pair, the tokens after the last pair are an
    unfinished span: they are dropped, and the next window starts at the first timestamp of that pair. However, if a
    lone timestamp ends the window, those tokens are its last span, and the next window starts at this window's end.
    Without a pair the whole window is one span. It ends at its last timestamp, or at the window's end if that timestamp
    is 0 or missing.
    """
    is_time = [token >= begin_id for token in token_ids]
    closed = is_time[-2:] == [False, True]
    cuts = [index + 1 for index, pair in enumerate(pairwise(is_time)) if all(pair)]
    if not cuts:
        times = [token - begin_id for token in token_ids if token >= begin_id]
        end = times[-1] if times and times[-1] != 0 else None
        text = any(not time for time in is_time)
        return WindowCut((Span(0, end, tuple(token_ids)),) if text else (), None, closed)
    ends = [*cuts, len(token_ids)] if closed else cuts
    parts = [tuple(token_ids[start:end]) for start, end in pairwise([0, *ends])]
    spans, reached = [], 0
    for part, first in zip(parts, [0, *cuts], strict=False):
        start = part[0] - begin_id if part[0] >= begin_id else reached
        reached = part[-1] - begin_id
        spans.append(Span(start, reached, part, first))
    return WindowCut(tuple(spans), None if closed else reached, closed)

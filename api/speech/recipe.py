"""`Recipe`: a transcription's options resolved against one model. It makes requests and reads the tokens of their
answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, field, frozen

from ...core.checks import shown
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription, WhisperTokens
from ...core.request import EncoderItem, LogitRules, Probe, Request, SamplingParams, TimestampRules
from ..outputs.languages import language_code, unknown_language
from .history import History
from .options import TranscribeOptions
from .windows import Generated, Span, WindowCut, cut_window
from .words import WordRules, WordTokens, check_alignment

_MOST_READ = 10_000  # characters that are read of hotwords or a prompt: only some of its tokens are used anyway


@frozen(kw_only=True)
class Context:
    """The surroundings of one window's text.

    Args:
        name: a part of the requests' ids.
        language: the code of the language.
        before: the tokens of the text before the window, see `History`.
        begun: the known first tokens of the window's text; the answer continues them.
        first: the window is the first one of the audio, so that its text begins with the prefix.
    """

    name: str
    language: str
    before: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    first: bool = False


def language_probabilities(language_ids: Mapping[str, int], logprobs: Sequence[float]) -> dict[str, float]:
    """Returns the probability of each language by code, among the languages alone. ``logprobs`` has the
    log-probabilities of the languages, in the order of ``language_ids``."""
    highest = max(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    total = sum(weights)
    return {code: weight / total for code, weight in zip(language_ids, weights, strict=True)}


def whisper_tokens(description: ModelDescription) -> WhisperTokens:
    """The special tokens of a model that transcribes.

    Raises:
        InvalidRequest: the model does not transcribe.
    """
    if description.whisper is None:
        raise InvalidRequest(
            f"{description.architecture} cannot transcribe; allowed: Whisper models. Ask other models that read "
            "audio with engine.generate"
        )
    return description.whisper


def resolve_language(language: str | None, tokens: WhisperTokens) -> str | None:
    """Returns the code of the language, or ``None`` if the language must be detected. English-only models always give
    "en".

    Raises:
        InvalidRequest: the model does not know the language.
    """
    known = tokens.language_ids or {"en": -1}
    if language is None:
        return None if tokens.language_ids else "en"
    code = language_code(language)
    if code in known:
        return code
    if not tokens.language_ids:
        raise InvalidRequest(
            f"language={language!r}, but the model knows only English; allowed: None, 'en'. For other languages "
            "use a multilingual model"
        )
    if code is not None:
        raise InvalidRequest(
            f"language={language!r}, which the model does not know; allowed: {', '.join(sorted(known))}"
        )
    raise InvalidRequest(f"language={unknown_language(language)}; None: the model detects it")


@frozen(kw_only=True)
class Recipe:
    """The options of a transcription resolved against one model. A recipe makes requests and reads the tokens of their
    answers.

    Raises:
        InvalidRequest: the model is not a speech model, or does not know the language, the task or prompts.
    """

    options: TranscribeOptions
    description: ModelDescription
    tokens: WhisperTokens = field(init=False)
    language: str | None = field(init=False)  # None: it must be detected
    special: frozenset[int] = field(init=False)
    hotwords: tuple[int, ...] = field(init=False)  # tokens of the hotwords
    initial: tuple[int, ...] = field(init=False)  # tokens of the initial prompt
    prefix: tuple[int, ...] = field(init=False)  # tokens of the prefix

    @tokens.default
    def _tokens(self) -> WhisperTokens:
        return whisper_tokens(self.description)

    @language.default
    def _language(self) -> str | None:
        tasks = self.tokens.task_ids or ("transcribe",)
        if self.options.timestamps == "word":
            check_alignment(self.description)
        if self.options.task not in tasks:
            raise InvalidRequest(
                f"task={self.options.task!r}, but {self.description.architecture} knows only: "
                f"{', '.join(map(repr, tasks))}"
            )
        return resolve_language(self.options.language, self.tokens)

    @special.default
    def _special(self) -> frozenset[int]:
        """The special tokens below the timestamps. In every Whisper vocabulary <|endoftext|> follows the text tokens,
        and all tokens from <|startoftranscript|> up to <|0.00|> are special, <|startoflm|> among them."""
        tokens = self.tokens
        named = {tokens.no_timestamps_id, tokens.previous_id, tokens.no_speech_id}
        ids = named | {*tokens.language_ids.values(), *tokens.task_ids.values(), *self.description.eos_token_ids}
        layout = range(tokens.start_id, tokens.timestamp_begin_id)
        return frozenset(token for token in ids if token is not None).union([tokens.start_id], layout)

    @hotwords.default
    def _hotwords(self) -> tuple[int, ...]:
        return self._encoded("hotwords", self.options.hotwords, slice(_MOST_READ), is_before=True)

    @initial.default
    def _initial(self) -> tuple[int, ...]:
        return self._encoded("initial_prompt", self.options.initial_prompt, is_before=True)

    @prefix.default
    def _prefix(self) -> tuple[int, ...]:
        return self._encoded("prefix", self.options.prefix)

    def _encoded(
        self, name: str, text: str | None, part: slice = slice(-_MOST_READ, None), *, is_before: bool = False
    ) -> tuple[int, ...]:
        if text is None or not text.strip():
            return ()
        if is_before and self.tokens.previous_id is None:
            raise InvalidRequest(
                f"{name}={shown(text)}, but {self.description.architecture} has no <|startofprev|> token; allowed: None"
            )
        read = text.strip()[part]
        encoded = tuple(self.description.tokenizer.encode(f" {read}", add_special_tokens=False))
        if any(not self.is_text(token) for token in encoded):
            raise InvalidRequest(f"{name}={shown(text)} has a special token (<|...|>); allowed: plain text")
        return encoded

    @property
    def half(self) -> int:
        """Half of the model's positions: the most tokens of a window's text, prefix included, and also of the text
        before the window, <|startofprev|> included.
        """
        return self.description.max_positions // 2

    @property
    def room(self) -> int:
        """The most tokens before a window, <|startofprev|> excluded."""
        return max(self.half - 1, 0)

    def history(self) -> History:
        """The history before the first window."""
        room = self.room if self.tokens.previous_id is not None else 0
        always, carried = self.hotwords[:room], self.options.carry_initial_prompt
        if carried:
            always += self.initial[max(len(self.initial) + len(always) - room, 0) :]
        return History(
            always=always,
            initial=() if carried else self.initial,
            room=room - len(always),
            goes_on=self.options.condition_on_previous_text,
            reset_above=self.options.prompt_reset_temperature,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about options that are used only in part."""
        found, room = [], self.room
        for name, text, tokens, which, most in (
            ("hotwords", self.options.hotwords, self.hotwords, "first", room),
            ("initial_prompt", self.options.initial_prompt, self.initial, "last", max(room - len(self.hotwords), 0)),
            ("prefix", self.options.prefix, self.prefix, "last", self.half // 2),
        ):
            if len(text or "") > _MOST_READ:
                found.append(f"{name} has {len(text or ''):,} characters; only its {which} {most} tokens are used")
            elif len(tokens) > most:
                found.append(f"{name} has {len(tokens)} tokens; only the {which} {most} are used")
        return tuple(found)

    def samples(self, seconds: float) -> int:
        """Returns the number of samples in ``seconds`` of audio."""
        return round(seconds * self.description.sampling_rate)

    def seconds(self, samples: float) -> float:
        """Returns the duration of ``samples`` in seconds."""
        return samples / self.description.sampling_rate

    @property
    def timestamp_step(self) -> int:
        """The number of samples in one timestamp step."""
        return round(self.tokens.seconds_per_timestamp * self.description.sampling_rate)

    @property
    def with_timestamps(self) -> bool:
        """True if the model writes timestamps."""
        return self.options.timestamps != "none"

    def is_text(self, token: int) -> bool:
        """True if ``token`` is neither a timestamp nor special."""
        return token < self.tokens.timestamp_begin_id and token not in self.special

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without timestamps and special tokens."""
        kept = [token for token in token_ids if self.is_text(token)]
        return str(self.description.tokenizer.decode(kept, skip_special_tokens=True))

    def detection(self, request_id: str, item: EncoderItem) -> Request:
        """Returns the request that detects the language. It samples one token after <|startoftranscript|> and asks for
        the probability of each language."""
        languages = tuple(self.tokens.language_ids.values())
        silence = () if self.tokens.no_speech_id is None else (self.tokens.no_speech_id,)
        return Request(
            id=request_id,
            prompt_token_ids=(self.tokens.start_id,),
            items=(item,),
            sampling=SamplingParams(max_tokens=1),
            rules=LogitRules(allowed=languages),
            probe=Probe(position=0, token_ids=languages + silence),
            max_tokens=1,
        )

    def detected(self, generated: Generated) -> dict[str, float]:
        """The probability of each language, by code."""
        assert generated.probe is not None, "the answer to a request with a probe has no probe"
        languages = self.tokens.language_ids
        return language_probabilities(languages, generated.probe[: len(languages)])

    def attempt(self, name: Callable[[], str], item: EncoderItem, context: Context, attempt: int) -> list[Request]:
        """Returns the requests for a window's text at the temperature of ``attempt``: one request at temperature 0,
        ``best_of`` requests above it. The first request has a probe for "no speech". ``name`` returns a new id at each
        call."""
        prompt = self._prompt(context)
        longest = min(self.half, self.options.max_new_tokens or self.half)
        most = max(min(longest, self.description.max_positions - len(prompt)), 1)
        silence = self.tokens.no_speech_id
        sampling = self._sampling(attempt, most)
        request = Request(
            id=name(),
            prompt_token_ids=prompt,
            items=(item,),
            sampling=sampling.sibling(0),
            rules=self._rules(),
            probe=None if silence is None else Probe(position=prompt.index(self.tokens.start_id), token_ids=(silence,)),
            max_tokens=most,
        )
        if sampling.beam_size > 1:
            return [evolve(request, sampling=sampling)]
        others = [evolve(request, id=name(), sampling=sampling.sibling(n), probe=None) for n in range(1, sampling.n)]
        return [request, *others]

    def _sampling(self, attempt: int, most: int) -> SamplingParams:
        options, temperature = self.options, self.options.temperature[attempt]
        assert options.seed is not None, "a fresh seed is chosen when the transcription is made"
        if temperature == 0.0:
            return SamplingParams(
                max_tokens=most,
                beam_size=options.beam_size,
                patience=options.patience,
                length_penalty=options.length_penalty,
                repetition_penalty=options.repetition_penalty,
            )
        return SamplingParams(
            max_tokens=most,
            temperature=temperature,
            seed=options.seed + attempt,
            n=options.best_of,
            repetition_penalty=options.repetition_penalty,
        )

    def _prompt(self, context: Context) -> tuple[int, ...]:
        previous_id = self.tokens.previous_id
        before = (previous_id, *context.before) if context.before and previous_id is not None else ()
        prefix = self.prefix[max(len(self.prefix) - self.half // 2, 0) :] if context.first else ()
        return (*before, *self.start(context.language), *prefix, *context.begun)

    def start(self, language: str) -> tuple[int, ...]:
        """Returns the tokens from <|startoftranscript|> on that precede a window's own text."""
        tokens = self.tokens
        ids = [tokens.start_id]
        if tokens.language_ids:
            ids.append(tokens.language_ids[language])
        if tokens.task_ids:
            ids.append(tokens.task_ids[self.options.task])
        if not self.with_timestamps:
            ids.append(tokens.no_timestamps_id)
        return tuple(ids)

    def _rules(self) -> LogitRules:
        options, tokens = self.options, self.tokens
        latest = options.max_initial_timestamp
        timestamps = TimestampRules(
            begin_id=tokens.timestamp_begin_id,
            no_timestamps_id=tokens.no_timestamps_id,
            max_initial=tokens.max_initial_timestamp
            if latest is None
            else round(latest / tokens.seconds_per_timestamp),
        )
        return LogitRules(
            suppress=self._suppressed(),
            begin_suppress=self.description.begin_suppress_token_ids,
            timestamps=timestamps if self.with_timestamps else None,
            no_repeat_ngram=options.no_repeat_ngram_size,
            counts_prompt=False,
        )

    def word_tokens(self, written: tuple[int, ...], language: str) -> WordTokens:
        """Returns the tokens of a window in the form in which the times of its words are requested."""
        text = min(*self.special, self.tokens.timestamp_begin_id)
        return WordTokens(special=self.start(language), written=written, text=text)

    def word_rules(self, language: str) -> WordRules:
        """The rules by which a window's tokens become words."""
        return WordRules(
            decode=self.decode,
            language=language,
            prepended=self.options.prepend_punctuations,
            appended=self.options.append_punctuations,
            frame_seconds=self.tokens.seconds_per_timestamp,
        )

    def _suppressed(self) -> tuple[int, ...]:
        """Returns the tokens that are never sampled: the checkpoint's, or the caller's and all special tokens that no
        text has."""
        given, tokens = self.options.suppress_tokens, self.tokens
        if given is None:
            return self.description.suppress_token_ids
        allowed = {*self.description.eos_token_ids, *tokens.language_ids.values(), tokens.no_timestamps_id}
        return tuple(sorted({*given, *(self.special - allowed)}))

    def cut(self, generated: Generated) -> WindowCut:
        """Returns the spans of a window and the start of the next window."""
        if self.with_timestamps:
            return cut_window(generated.token_ids, self.tokens.timestamp_begin_id)
        return WindowCut((Span(0, None, generated.token_ids),), None)

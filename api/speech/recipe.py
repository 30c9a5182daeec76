"""`Recipe`: a transcription's options resolved against one model. It makes requests and reads the tokens of their
answers. `History` is the text before a window, in the form in which the model gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, evolve, field, fields_dict, frozen

from ...core.checks import shown
from ...core.errors import ContextLengthExceeded, InvalidRequest
from ...core.languages import LANGUAGES, language_code
from ...core.model import ModelDescription
from ...core.request import Request, SamplingParams
from ...core.speech import Ask, Detection, Draft, Sound, Span, SpeechFacts, SpeechModel
from ..inputs.vectors import softmax
from ..outputs.languages import unknown_language
from .options import ANY_SPEAKERS, OF_MODELS, TEMPERATURES, TranscribeOptions
from .windows import Generated
from .words import WordRules, check_alignment


@define
class History:
    """The tokens of the hotwords, the initial prompt and the earlier windows, timestamps included.

    Args:
        always: the tokens that every window gets, before all others.
        initial: the tokens of the initial prompt, if only the first windows get it.
        room: the most tokens of the text that the next window gets; the last ones are kept.
        goes_on: ``False``: no window gets the text of earlier windows, and only the first window gets the initial
            prompt.
        reset_above: text that was sampled at a higher temperature is dropped, with all text before it.
    """

    always: tuple[int, ...]
    initial: tuple[int, ...]
    room: int
    goes_on: bool
    reset_above: float
    _tokens: list[int] = field(init=False)
    _language: str | None = field(default=None, init=False)  # of the text; None: it is not known

    def __attrs_post_init__(self) -> None:
        self._tokens = list(self.initial)

    def last(self, taken: int = 0, language: str | None = None) -> tuple[int, ...]:
        """Returns the tokens that the next window gets, in which ``language`` is spoken. Text in another language is
        left out, since the model would go on in that language. ``taken`` positions of the room are taken by other
        tokens."""
        return (*self.always, *self._last(0 if self._is_foreign(language) else max(self.room - taken, 0)))

    def add(self, token_ids: Iterable[int], temperature: float, language: str | None = None) -> None:
        """Adds the text of a window, which was sampled at ``temperature`` and is in ``language``. Earlier text in
        another language is dropped first. If the history does not go on, or if ``temperature`` is above
        ``reset_above``, nothing is added, and all text is dropped."""
        if self._is_foreign(language):
            self._tokens.clear()
        self._language = language or self._language
        if not self.goes_on or temperature > self.reset_above:
            self._tokens.clear()
        else:
            self._tokens = [*self._last(self.room), *token_ids]

    @property
    def callers(self) -> tuple[int, ...]:
        """The tokens of the caller's texts among those that the next window gets."""
        begun = self._tokens != list(self.initial)
        return (*self.always, *(() if begun else self._last(self.room)))

    def clear(self) -> None:
        """Drops all text, since it has misled the model."""
        self._tokens.clear()

    def _is_foreign(self, language: str | None) -> bool:
        return None not in (language, self._language) and language != self._language

    def _last(self, most: int) -> list[int]:
        return self._tokens[max(len(self._tokens) - most, 0) :]


# ---- recipes ---------------------------------------------------------------------------------------------------------


_MOST_READ = 10_000  # characters that are read of hotwords or a prompt


@frozen(kw_only=True)
class Context:
    """The surroundings of one window's text.

    Args:
        name: a part of the requests' ids.
        language: the code of the language; ``None``: the model finds it.
        before: the tokens of the text before the window, see `History`.
        begun: the known first tokens of the window's text; the answer continues them.
        first: the window is the first one of the audio, so that its text begins with the prefix.
    """

    name: str
    language: str | None
    before: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    first: bool = False


def language_probabilities(languages: Iterable[str], logprobs: Sequence[float]) -> dict[str, float]:
    """Returns the probability of each language by code, among the languages alone. ``logprobs`` has the
    log-probabilities of the ``languages``, in their order."""
    return dict(zip(languages, softmax(logprobs), strict=True))


def speech_model(description: ModelDescription) -> SpeechModel:
    """The model of speech that transcribes.

    Raises:
        InvalidRequest: the model does not transcribe.
    """
    if description.speech is None:
        raise InvalidRequest(
            f"{description.architecture} cannot transcribe; allowed: models of speech, such as Whisper. Other "
            "models that read audio answer questions about it: engine.generate(...)"
        )
    return description.speech


def resolve_language(language: str | None, facts: SpeechFacts) -> str | None:
    """Returns the code of the language, or ``None`` if the model must find it. Models of one language always give its
    code.

    Raises:
        InvalidRequest: the model does not know the language, or needs one.
    """
    known = facts.languages
    if language is None:
        if len(known) == 1:
            return known[0]
        if facts.detection is Detection.NAMED:
            raise InvalidRequest(
                f"no language is given, and the model does not detect it; allowed: {', '.join(sorted(known))}"
            )
        return None
    exact = language.strip().lower()  # some models know regions
    code = exact if exact in known else language_code(language) or exact
    if code in known:
        return code
    if not known:
        raise InvalidRequest(f"language={language!r}, but the model takes no language; leave it out")
    if len(known) == 1:
        only = LANGUAGES.get(known[0], known[0]).title()
        raise InvalidRequest(
            f"language={language!r}, but the model knows only {only}; allowed: {known[0]!r}, or leave it out. Other "
            "languages need a multilingual model"
        )
    if language_code(language) is not None or facts.detection is not Detection.PROBED:
        raise InvalidRequest(
            f"language={language!r}, which the model does not know; allowed: {', '.join(sorted(known))}"
        )
    raise InvalidRequest(f"language={unknown_language(language)}; if left out, the model detects it")


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def check(options: TranscribeOptions, description: ModelDescription, facts: SpeechFacts) -> None:
    """Raises `InvalidRequest` if the model cannot follow one of the ``options``."""
    if options.timestamps == "word" and options.aligner is None:
        check_alignment(description)
    if options.task not in facts.tasks:
        raise InvalidRequest(
            f"task={options.task!r}, but {description.architecture} knows only: {', '.join(map(repr, facts.tasks))}"
        )
    counted = options.speakers not in (None, ANY_SPEAKERS)
    asked = {"speakers": counted, "known_speakers": options.known_speakers, "diarizer": options.diarizer}
    if facts.names_speakers and (given := [name for name, value in asked.items() if value]):
        raise InvalidRequest(
            f"{given[0]} is given, but {description.architecture} itself "
            "counts and names speakers; allowed: speakers='any' alone"
        )
    for name in sorted(OF_MODELS - facts.options):
        value, default = getattr(options, name), fields_dict(TranscribeOptions)[name].default
        if isinstance(value, str) and not value.strip():
            continue
        allowed = dict.fromkeys((default, facts.defaults.get(name, default)))
        if value is not None and value not in allowed:
            told = " or ".join(repr(_single(one)) for one in allowed if one is not None)
            raise InvalidRequest(
                f"{name}={shown(_single(value))}, which {description.architecture} cannot use; "
                + (f"allowed: {told}" if told else "leave it out")
            )
    last = description.vocabulary_size - 1
    if wrong := [token for token in options.suppress_tokens or () if token > last]:
        raise InvalidRequest(f"suppress_tokens has {wrong[0]}; allowed: 0 to {last}, the model's tokens, and -1")


@frozen(kw_only=True)
class Recipe:
    """The options of a transcription resolved against one model. A recipe makes requests and reads the tokens of their
    answers.

    Raises:
        InvalidRequest: the model is not a speech model, or does not know the language, the task or prompts.
    """

    options: TranscribeOptions
    description: ModelDescription
    model: SpeechModel = field(init=False)
    language: str | None = field(init=False)  # None: the model finds it
    temperatures: tuple[float, ...] = field(init=False)
    beam_size: int = field(init=False)
    hotwords: tuple[int, ...] = field(init=False)  # tokens of the hotwords, if they come before the window's text
    initial: tuple[int, ...] = field(init=False)  # tokens of the initial prompt, if they come before the window's text
    prefix: tuple[int, ...] = field(init=False)  # tokens of the prefix

    @model.default
    def _model(self) -> SpeechModel:
        return speech_model(self.description)

    @language.default
    def _language(self) -> str | None:
        check(self.options, self.description, self.facts)
        return resolve_language(self.options.language, self.facts)

    @temperatures.default
    def _temperatures(self) -> tuple[float, ...]:
        given, default = self.options.temperature, self.facts.defaults.get("temperature", TEMPERATURES)
        return tuple(default) if given is None else given

    @beam_size.default
    def _beam_size(self) -> int:
        given, default = self.options.beam_size, self.facts.defaults.get("beam_size", 1)
        return int(default) if given is None else given

    @hotwords.default
    def _hotwords(self) -> tuple[int, ...]:
        return self._before("hotwords", slice(_MOST_READ))

    @initial.default
    def _initial(self) -> tuple[int, ...]:
        return self._before("initial_prompt", slice(-_MOST_READ, None))

    @prefix.default
    def _prefix(self) -> tuple[int, ...]:
        return self._encoded("prefix", slice(-_MOST_READ, None))

    def _before(self, name: str, part: slice) -> tuple[int, ...]:
        """Returns the tokens of a text that comes before that of a window; none if the prompt has the text itself."""
        found, most, length = self._encoded(name, part), self.facts.most_tokens // 4, len(self._text(name))
        if self.facts.history_tokens or not most:
            return found
        if length > _MOST_READ or len(found) > most:
            raise InvalidRequest(
                f"{name} has {length:,} characters and at least {len(found):,} tokens, all of which "
                f"{self.description.architecture} reads in its prompt; allowed: up to {_MOST_READ:,} characters and "
                f"{most:,} tokens"
            )
        return ()

    def _encoded(self, name: str, part: slice) -> tuple[int, ...]:
        text = self._text(name)
        if not text:
            return ()
        try:
            return self.model.encode(text[part])
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}={error}") from None

    def _text(self, name: str) -> str:
        return (getattr(self.options, name) or "").strip()

    @property
    def facts(self) -> SpeechFacts:
        """The abilities and limits of the model."""
        return self.model.facts

    def history(self) -> History:
        """The history before the first window."""
        room = self.facts.history_tokens
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
    def word_times(self) -> str | None:
        """The way in which the times of words are found, as in `Transcript.word_times`."""
        if self.options.timestamps != "word":
            return None
        return self.facts.word_times if self.options.aligner is None else "aligner"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about options that are used only in part."""
        found, room, half = [], self.facts.history_tokens, self.facts.most_tokens // 2
        for name, tokens, which, most in (
            ("hotwords", self.hotwords, "first", room),
            ("initial_prompt", self.initial, "last", max(room - len(self.hotwords), 0)),
            ("prefix", self.prefix, "last", half),
        ):
            length, used = len(self._text(name)), min(most, len(tokens))
            if length > _MOST_READ:
                found.append(f"{name} has {length:,} characters; only its {which} {used} tokens are used")
            elif len(tokens) > most:
                found.append(f"{name} has {len(tokens)} tokens; only the {which} {most} are used")
        return tuple(found)

    def samples(self, seconds: float) -> int:
        """Returns the number of samples in ``seconds`` of audio."""
        return round(seconds * self.description.sampling_rate)

    def seconds(self, samples: float) -> float:
        """Returns the duration of ``samples`` in seconds."""
        return samples / self.description.sampling_rate

    def detection(self, request_id: str, sound: Sound) -> Request:
        """Returns the request that asks for the probability of each language."""
        return self.request(request_id, self.model.detection(sound))

    def request(self, request_id: str, draft: Draft, sampling: SamplingParams | None = None) -> Request:
        """Returns the request of ``draft``. Its tokens are the likeliest, unless ``sampling`` says otherwise."""
        sampling = SamplingParams(max_tokens=draft.max_tokens) if sampling is None else sampling
        return Request(
            id=request_id,
            prompt_token_ids=draft.token_ids,
            items=draft.items,
            sampling=sampling,
            rules=draft.rules,
            probe=draft.probe,
            max_tokens=draft.max_tokens,
        )

    def detected(self, generated: Generated) -> dict[str, float]:
        """The probability of each language, by code."""
        assert generated.probe is not None, "the answer to a request with a probe has no probe"
        return language_probabilities(self.facts.languages, generated.probe[: len(self.facts.languages)])

    def ask(self, context: Context) -> Ask:
        """Returns the question about a window."""
        options, half = self.options, self.facts.most_tokens // 2
        prefix = self.prefix[max(len(self.prefix) - half, 0) :] if context.first else ()
        as_text = not self.facts.history_tokens
        given, listed = options.suppress_tokens, self.description.suppress_token_ids
        return Ask(
            language=context.language,
            task=options.task,
            timestamps=options.timestamps != "none",
            before=context.before,
            begun=(*prefix, *context.begun),
            hotwords=self._text("hotwords") if as_text else "",
            prompt=self._text("initial_prompt") if as_text else "",
            suppress=given and tuple(token for one in given for token in (listed if one == -1 else (one,))),
            latest=options.max_initial_timestamp,
            punctuation=options.punctuation,
        )

    def attempt(self, name: Callable[[], str], sound: Sound, ask: Ask, attempt: int) -> list[Request]:
        """Returns the requests for a window's text at the temperature of ``attempt``: one request at temperature 0,
        ``best_of`` requests above it. The first request has the probe for "no speech", if the model knows one. ``name``
        returns a new id at each call."""
        draft, positions = self.model.draft(sound, ask), self.description.max_positions
        if len(draft.token_ids) >= positions:
            raise ContextLengthExceeded(
                f"the prompt of a window has {len(draft.token_ids):,} tokens; allowed: up to {positions - 1:,}. "
                "Shorten initial_prompt, hotwords or prefix, or give a larger EngineConfig(max_positions=...)"
            )
        most = min(draft.max_tokens, self.options.max_new_tokens or draft.max_tokens)
        rules = evolve(draft.rules, no_repeat_ngram=self.options.no_repeat_ngram_size)
        draft = evolve(draft, rules=rules, max_tokens=most)
        sampling = self._sampling(attempt, most)
        request = self.request(name(), draft, sampling.sibling(0))
        if sampling.beam_size > 1:
            return [evolve(request, sampling=sampling)]
        others = [evolve(request, id=name(), sampling=sampling.sibling(n), probe=None) for n in range(1, sampling.n)]
        return [request, *others]

    def _sampling(self, attempt: int, most: int) -> SamplingParams:
        options, temperature = self.options, self.temperatures[attempt]
        assert options.seed is not None, "a fresh seed is chosen when the transcription is made"
        if temperature == 0.0:
            return SamplingParams(
                max_tokens=most,
                beam_size=self.beam_size,
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

    def text_of(self, span: Span) -> str:
        """The text of a span."""
        return self.model.decode(span.token_ids) if span.text is None else span.text

    def word_rules(self, language: str | None) -> WordRules:
        """The rules by which a window's tokens become words."""
        return WordRules(
            decode=self.model.decode,
            language=language,
            prepended=self.options.prepend_punctuations,
            appended=self.options.append_punctuations,
            frame_seconds=self.seconds(self.facts.step_samples),
            lead=self.facts.lead_steps,
        )

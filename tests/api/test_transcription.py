"""Windows, seeking and fallback, with a scripted run in the model's place and one token per byte of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.inputs.audio import content_key
from triolet.api.outputs.results import Segment
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.recipe import Recipe, language_probabilities
from triolet.api.speech.transcription import Transcription
from triolet.api.speech.windows import Assessment, Generated, Span, WindowCut, compression_ratio, cut_window
from triolet.core.errors import EngineStateError, InvalidRequest
from triolet.core.model import ModelDescription, WhisperTokens
from triolet.core.request import FinishReason, Request

EOS, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS, BEGIN = range(256, 266)
RATE, WINDOW = 16_000, 480_000
STEP = 320  # samples of one timestamp step
LANGUAGES = {"en": EN, "de": DE}


class ByteTokenizer:
    """One token per UTF-8 byte; "<|en|>" in a text becomes its token, as in transformers' tokenizers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        before, found, after = text.partition("<|en|>")
        return [*before.encode(), *([EN] if found else []), *after.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token_ids).decode(errors="replace")


def describe(**changes: object) -> ModelDescription:
    values: dict[str, object] = {
        "name": "tiny-stub",
        "architecture": "WhisperForConditionalGeneration",
        "device": "cpu",
        "dtype": "float32",
        "vocabulary_size": BEGIN + 1501,
        "max_positions": 448,
        "eos_token_ids": (EOS,),
        "suppress_token_ids": (1, 2),
        "begin_suppress_token_ids": (32, EOS),
        "page_size": 16,
        "pages": 100,
        "cross_slots": 4,
        "encoder_embeddings": 1500,
        "encoder_bytes": 1500 * 64 * 4,
        "sampling_rate": RATE,
        "window_samples": WINDOW,
        "processor_identity": "stub-80",
        "whisper": WhisperTokens(
            start_id=START,
            no_timestamps_id=NO_TIMESTAMPS,
            timestamp_begin_id=BEGIN,
            previous_id=PREVIOUS,
            no_speech_id=NO_SPEECH,
            language_ids=LANGUAGES,
            task_ids={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
            max_initial_timestamp=50,
        ),
        "tokenizer": ByteTokenizer(),
    }
    return ModelDescription(**{**values, **changes})  # type: ignore[arg-type]


MODEL = describe()
assert MODEL.whisper is not None
ENGLISH_ONLY = describe(whisper=attrs.evolve(MODEL.whisper, language_ids={}, task_ids={}))
GREEDY = TranscribeOptions(language="en", temperature=0.0)


def at(seconds: float) -> int:
    """The timestamp token of ``seconds``."""
    return BEGIN + round(seconds / 0.02)


def tokens(*parts: float | str) -> tuple[int, ...]:
    """Tokens of texts (str) and timestamps (seconds)."""
    found: list[int] = []
    for part in parts:
        found += part.encode() if isinstance(part, str) else [at(part)]
    return tuple(found)


def answer(
    *parts: float | str, logprob: float = -0.1, no_speech: float = 0.01, reason: FinishReason = FinishReason.STOP
) -> Generated:
    ids = tokens(*parts)
    return Generated(
        token_ids=ids, logprobs=(logprob,) * (len(ids) + 1), finish_reason=reason, probe=(math.log(no_speech),)
    )


class Script:
    """A run that gives the answers in order, the last for ever, and keeps the requests."""

    def __init__(self, *answers: Generated) -> None:
        self.answers = answers
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> Generated:
        self.requests.append(request)
        await trio.lowlevel.checkpoint()
        return self.answers[min(len(self.requests), len(self.answers)) - 1]

    def windows(self, samples: np.ndarray) -> list[tuple[int, int]]:
        """(start, end) in ``samples`` of the distinct payloads, in order; the samples must be a ramp."""
        found = [(round(float(p[0])), round(float(p[0])) + len(p)) for p in (r.items[0].payload for r in self.requests)]
        return list(dict.fromkeys(found))


def ramp(seconds: float) -> np.ndarray:
    """Samples that tell their own position (exact in float32 up to 1,048 s)."""
    return np.arange(round(seconds * RATE), dtype=np.float32)


def begin(samples: np.ndarray, script: Script, options: TranscribeOptions = GREEDY) -> Transcription:
    return Transcription(samples, options, MODEL, script, request_id="r")


# ---- cutting one window ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "spans", "next_start"),
    [
        ((0.0, "a", 5.0), [(0, 250, "a")], None),
        ((0.5, "a", 5.0), [(25, 250, "a")], None),
        ((0.0, "a", 5.0, 5.0), [(0, 250, "a")], 250),
        ((0.0, "a", 5.0, 6.0, "b"), [(0, 250, "a")], 250),
        ((0.0, "a", 5.0, 5.0, "b", 9.0), [(0, 250, "a"), (250, 450, "b")], None),
        ((0.0, "a", 5.0, 6.0, "b", 9.0, 9.0), [(0, 250, "a"), (300, 450, "b")], 450),
        ((0.0, "a"), [(0, None, "a")], None),
        (("a",), [(0, None, "a")], None),
        (("a", 5.0), [(0, 250, "a")], None),
        ((3.0,), [], None),
        ((0.0, 0.0), [], None),
        ((), [], None),
        ((0.0, "a", 0.0, 0.0), [(0, 0, "a")], None),
        ((0.0, "a", 0.98, 0.98), [(0, 49, "a")], None),
        ((0.0, "a", 0.98, 0.98, "b"), [(0, 49, "a"), (49, None, "b")], None),
        ((0.0, "a", 0.5, "b"), [(0, 25, "a"), (25, None, "b")], None),
        ((0.0, "a", 1.0, 1.0, "b"), [(0, 50, "a")], 50),
    ],
)
def test_a_window_ends_where_its_last_whole_sentence_does(
    parts: tuple[float | str, ...], spans: list[tuple[int, int | None, str]], next_start: int | None
) -> None:
    """The table of openai/whisper's seek rules, and its edges: nothing, one timestamp, less progress than a second, of
    which the text behind it is kept."""
    expected = WindowCut(tuple(Span(start, end, tuple(text.encode())) for start, end, text in spans), next_start)
    assert cut_window(tokens(*parts), BEGIN, finished=True, least=50) == expected


def test_an_output_stopped_by_its_length_does_not_use_up_the_window() -> None:
    """More was to come after the last timestamp: the next window begins there."""
    assert cut_window(tokens(0.0, "a", 5.0), BEGIN, finished=False, least=50).next_start == 250
    assert cut_window(tokens(0.0, "a", 0.5), BEGIN, finished=False, least=50).next_start is None


# ---- the walk --------------------------------------------------------------------------------------------------------


async def test_a_sentence_that_the_window_cuts_off_is_read_again_from_its_start() -> None:
    """The second window begins at the last timestamp; times are those of the whole audio."""
    samples = ramp(40)
    script = Script(answer(0.0, " one", 12.0, 12.0, " tw"), answer(0.0, " two", 20.0))
    transcript = await begin(samples, script).transcript()
    assert script.windows(samples) == [(0, WINDOW), (12 * RATE, 40 * RATE)]
    assert [(s.id, s.start, s.end, s.text) for s in transcript.segments] == [(0, 0, 12, " one"), (1, 12, 32, " two")]
    assert transcript.text == "one two"
    assert transcript.duration == 40
    assert transcript.segments[0].token_ids == tuple(b" one")


async def test_without_progress_the_window_is_used_up() -> None:
    """A last timestamp of 0.00 does not repeat the window for ever."""
    samples = ramp(45)
    script = Script(answer(0.0, "a", 0.0, 0.0))
    assert await begin(samples, script).next_window() == []
    assert await begin(samples, script).transcript()
    assert script.windows(samples) == [(0, WINDOW), (WINDOW, 45 * RATE)]


async def test_tiny_steps_use_up_the_window() -> None:
    """A model that ends a sentence after 20 ms, over and over, is asked once a window, not 1,500 times; what it wrote
    behind it is kept."""
    samples = ramp(60)
    script = Script(answer(0.0, " a", 0.02, 0.02, " b"))
    transcript = await begin(samples, script).transcript()
    assert script.windows(samples) == [(0, WINDOW), (WINDOW, 60 * RATE)]
    assert [(s.start, s.end, s.text) for s in transcript.segments] == [
        (0, 0.02, " a"),
        (0.02, 30, " b"),
        (30, 30.02, " a"),
        (30.02, 60, " b"),
    ]


async def test_without_timestamps_each_window_is_one_segment() -> None:
    """timestamps='none': windows of full length, <|notimestamps|> in the prompt, no timestamp rules."""
    samples = ramp(70)
    script = Script(answer(" text"))
    options = TranscribeOptions(language="en", timestamps="none")
    transcript = await begin(samples, script, options).transcript()
    assert [(s.start, s.end) for s in transcript.segments] == [(0, 30), (30, 60), (60, 70)]
    assert script.requests[0].prompt_token_ids == (START, EN, TRANSCRIBE, NO_TIMESTAMPS)
    assert script.requests[0].rules.timestamps is None


async def test_segments_end_with_the_audio() -> None:
    """Times in the padding are cut; a span that begins there is left out."""
    transcript = await begin(ramp(2.5), Script(answer(0.0, "a", 2.8, 2.8, "b", 4.0))).transcript()
    assert [(s.start, s.end, s.text) for s in transcript.segments] == [(0, 2.5, "a")]


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ((1.0, " late", 1.4), [(0, 0.8, " late")]),
        ((1.0, " late"), [(0, 0.8, " late")]),
        ((1.0, " ", 1.2, 1.2, " late", 1.4, 1.4, " later", 1.6), [(0, 0.8, " late")]),
        ((0.0, " soon", 0.5, 1.0, " late", 1.4), [(0, 0.5, " soon")]),
    ],
)
async def test_the_only_text_is_kept_although_its_time_lies_behind_the_audio(
    parts: tuple[float | str, ...], kept: list[tuple[float, float, str]]
) -> None:
    """Short audio, and a timestamp in the padding: the words were said, so they take the window's time."""
    transcript = await begin(ramp(0.8), Script(answer(*parts))).transcript()
    assert [(s.start, s.end, s.text) for s in transcript.segments] == kept


async def test_each_request_says_all_that_the_engine_must_know() -> None:
    """Prompt, item, limits, rules and probe of a window's request."""
    samples = ramp(31)
    script = Script(answer(0.0, "a", 5.0))
    await begin(samples, script).next_window()
    (request,) = script.requests
    assert request.id == "r/0.0/0"
    assert request.prompt_token_ids == (START, EN, TRANSCRIBE)
    assert request.max_tokens == request.sampling.max_tokens == 445
    assert request.rules.suppress == (1, 2)
    assert request.rules.begin_suppress == (32, EOS)
    assert request.rules.timestamps is not None
    assert attrs.astuple(request.rules.timestamps) == (BEGIN, NO_TIMESTAMPS, 50)
    assert request.probe is not None
    assert attrs.astuple(request.probe) == (0, (NO_SPEECH,))
    (item,) = request.items
    assert item.key == content_key(samples[:WINDOW], "stub-80")
    assert (item.embeddings, item.size) == (1500, 384_000)
    assert not np.shares_memory(item.payload, samples)
    assert item.payload.flags.c_contiguous


async def test_the_prompt_precedes_the_first_window_only() -> None:
    """Its last tokens are kept, and the probe follows <|startoftranscript|>."""
    samples = ramp(50)
    script = Script(answer(0.0, "a", 5.0))
    options = TranscribeOptions(language="de", task="translate", initial_prompt="x" * 500)
    await begin(samples, script, options).transcript()
    first, second = script.requests
    assert first.prompt_token_ids == (PREVIOUS, *b"x" * 223, START, DE, TRANSLATE)
    assert first.max_tokens == 448 - 227
    assert first.probe is not None
    assert first.probe.position == 224
    assert second.prompt_token_ids == (START, DE, TRANSLATE)


async def test_a_failed_request_may_be_tried_again() -> None:
    """Nothing has moved when run raises."""
    script = Script(answer(0.0, "a", 5.0))
    broken = True

    async def run(request: Request) -> Generated:
        if broken:
            raise RuntimeError("device")
        return await script(request)

    transcription = Transcription(ramp(10), GREEDY, MODEL, run, request_id="r")
    with pytest.raises(RuntimeError, match="device"):
        await transcription.next_window()
    assert transcription.position == 0
    broken = False
    assert [s.text for s in await transcription.next_window() or []] == ["a"]
    assert transcription.position == transcription.duration == 10
    assert await transcription.next_window() is None


async def test_a_request_id_is_never_used_twice() -> None:
    """A window that was cancelled or failed is asked again under other names: the engine may still know the first."""
    fates = ["cancelled", "failed", "answered"] * 2
    asked: list[str] = []

    async def run(request: Request) -> Generated:
        asked.append(request.id)
        fate = fates[len(asked) - 1]
        if fate == "cancelled":
            scope.cancel()
        if fate == "failed":
            raise RuntimeError("device")
        await trio.lowlevel.checkpoint()
        return detected(0.9, 0.1, 0.1) if request.rules.allowed else answer(0.0, "a", 5.0)

    transcription = Transcription(ramp(10), TranscribeOptions(), MODEL, run, request_id="r")
    for ask in (transcription.start, transcription.next_window):
        with trio.CancelScope() as scope:
            await ask()
        assert scope.cancelled_caught
        with pytest.raises(RuntimeError, match="device"):
            await ask()
        await ask()
    assert transcription.position == 10
    assert [name.rpartition("/")[0] for name in asked] == ["r/language"] * 3 + ["r/0.0"] * 3
    assert len(set(asked)) == 6


async def test_one_window_at_a_time(nursery: trio.Nursery) -> None:
    """A second call while one runs is refused by name; the first goes on, and calls are welcome again."""
    go, done = trio.Event(), trio.Event()

    async def run(request: Request) -> Generated:
        await go.wait()
        return answer(0.0, "a", 5.0)

    found: list[list[Segment] | None] = []
    transcription = Transcription(ramp(40), GREEDY, MODEL, run, request_id="r")

    async def first() -> None:
        found.append(await transcription.next_window())
        done.set()

    nursery.start_soon(first)
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(EngineStateError, match=r"next_window of transcription 'r' .* one call at a time"):
        await transcription.next_window()
    with pytest.raises(EngineStateError, match="start of transcription 'r'"):
        await transcription.start()
    go.set()
    await done.wait()
    assert [len(segments or []) for segments in found] == [1]
    assert len(await transcription.next_window() or []) == 1


# ---- language --------------------------------------------------------------------------------------------------------


def detected(english: float, german: float, silence: float) -> Generated:
    return Generated(
        token_ids=(EN,),
        logprobs=(-1.0,),
        finish_reason=FinishReason.LENGTH,
        probe=tuple(math.log(p) for p in (english, german, silence)),
    )


async def test_the_language_is_detected_once_on_the_first_window() -> None:
    """One token after <|startoftranscript|>, on the item that the window itself uses; probabilities among languages."""
    samples = ramp(40)
    script = Script(detected(0.1, 0.3, 0.2), answer(0.0, "a", 5.0))
    transcript = await begin(samples, script, TranscribeOptions()).transcript()
    detection, first, second = script.requests
    assert detection.id == "r/language/0"
    assert detection.prompt_token_ids == (START,)
    assert detection.max_tokens == 1
    assert detection.rules.allowed == (EN, DE)
    assert detection.probe is not None
    assert attrs.astuple(detection.probe) == (0, (EN, DE, NO_SPEECH))
    assert detection.items[0].key == first.items[0].key
    assert first.prompt_token_ids == second.prompt_token_ids == (START, DE, TRANSCRIBE)
    assert transcript.language == "de"
    assert transcript.language_probability == pytest.approx(0.75)


async def test_start_detects_the_language_ahead_of_the_windows() -> None:
    """A stream can tell the language before its first segment; it is not asked for twice."""
    script = Script(detected(0.9, 0.05, 0.01), answer(0.0, "a", 5.0))
    transcription = begin(ramp(5), script, TranscribeOptions())
    assert transcription.language is None
    await transcription.start()
    await transcription.start()
    assert transcription.language == "en"
    await transcription.next_window()
    assert [request.id for request in script.requests] == ["r/language/0", "r/0.0/1"]


@pytest.mark.parametrize("name", ["de", "DE", " german ", "German", "<|de|>"])
def test_languages_have_codes_names_and_tokens(name: str) -> None:
    """All spellings of a language give its code."""
    assert Recipe(options=TranscribeOptions(language=name), description=MODEL).language == "de"


async def test_english_only_models_have_neither_language_nor_task() -> None:
    """Their prompt is <|startoftranscript|> alone, and nothing is detected."""
    script = Script(answer(0.0, "a", 5.0))
    for language in (None, "en", "english"):
        options = TranscribeOptions(language=language)
        transcript = await Transcription(ramp(5), options, ENGLISH_ONLY, script, request_id="r").transcript()
        assert (transcript.language, transcript.language_probability) == ("en", None)
    assert {request.prompt_token_ids for request in script.requests} == {(START,)}


@given(st.lists(st.floats(-50, 0), min_size=2, max_size=2))
@settings(derandomize=True, max_examples=50, deadline=None)
def test_language_probabilities_sum_to_one(logprobs: list[float]) -> None:
    """Normalised over the languages, likelier first."""
    found = language_probabilities(LANGUAGES, logprobs)
    assert sum(found.values()) == pytest.approx(1)
    assert (found["en"] >= found["de"]) == (logprobs[0] >= logprobs[1])


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TranscribeOptions(task="sing"), r"task='sing'; allowed: 'transcribe' or 'translate'"),
        (lambda: TranscribeOptions(timestamps="line"), r"timestamps='line'; allowed"),
        (lambda: TranscribeOptions(temperature=()), r"temperature=\(\); allowed"),
        (lambda: TranscribeOptions(temperature=-1), r"temperature=-1; allowed"),
        (lambda: options_of(temperature="0.2"), r"temperature='0.2'; allowed: one or more numbers"),
        (lambda: options_of(temperature=[0.0, "0.2"]), r"temperature=\[0.0, '0.2'\]; allowed"),
        (lambda: options_of(temperature=None), r"temperature=None; allowed"),
        (lambda: options_of(temperature=np.zeros((1, 2))), r"temperature=array.*; allowed"),
        (lambda: options_of(temperature=np.array(["a"])), r"temperature=array.*; allowed"),
        (lambda: options_of(language=1), r"language=1; allowed: a text; None: "),
        (lambda: options_of(initial_prompt=["a"]), r"prompt=\['a'\]; allowed: a text; None: "),
        (lambda: options_of(seed=2**63), r"seed=9223372036854775808; allowed: an integer"),
        (lambda: options_of(logprob_threshold=math.nan), r"logprob_threshold=nan; allowed: a number"),
        (lambda: options_of(seed=0.5), r"seed=0.5; allowed: an integer"),
        (lambda: options_of(logprob_threshold="-1"), r"logprob_threshold='-1'; allowed: a number"),
        (lambda: TranscribeOptions(temperature=(0.0, math.nan)), r"nan\); allowed"),
        (lambda: recipe(language="klingon"), r"language='klingon'; allowed: None \(detect\).*de, en"),
        (lambda: recipe(language="french"), r"language='french'; allowed"),
        (lambda: recipe(initial_prompt="say <|en|>"), r"special token"),
        (lambda: recipe(ENGLISH_ONLY, language="de"), r"knows English only"),
        (lambda: recipe(ENGLISH_ONLY, task="translate"), r"knows only: 'transcribe'"),
        (lambda: recipe(describe(whisper=None)), r"cannot transcribe; allowed: Whisper models"),
        (lambda: recipe(without_previous(), initial_prompt="names"), r"has no <\|startofprev\|> token"),
        (lambda: begin(np.zeros(0, np.float32), Script()), r"without samples"),
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(make: Callable[[], object], message: str) -> None:
    """The message says what was got and what is allowed."""
    with pytest.raises(InvalidRequest, match=message):
        make()


def options_of(**options: Any) -> TranscribeOptions:
    return TranscribeOptions(**options)


def test_without_a_seed_each_transcription_draws_afresh() -> None:
    drawn = {begin(ramp(1), Script(), options_of(seed=None))._recipe.options.seed for _ in range(2)}
    assert len(drawn - {None}) == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (0, (0.0,)),
        ([0.0, 1], (0.0, 1.0)),
        (np.array([0.0, 0.5]), (0.0, 0.5)),
        (np.float64(0.5), (0.5,)),
        (np.array(0.5), (0.5,)),
    ],
    ids=repr,
)
def test_temperatures_may_be_one_or_many(given: Any, kept: tuple[float, ...]) -> None:
    """Numbers, lists, tuples and arrays; a seed may be numpy's too."""
    options = options_of(temperature=given, seed=np.int64(3))
    assert (options.temperature, options.seed) == (kept, 3)
    assert {type(value) for value in (*options.temperature, options.seed)} == {float, int}


def recipe(description: ModelDescription = MODEL, **options: str) -> Recipe:
    return Recipe(options=TranscribeOptions(**options), description=description)  # type: ignore[arg-type]


def without_previous() -> ModelDescription:
    assert MODEL.whisper is not None
    return describe(whisper=attrs.evolve(MODEL.whisper, previous_id=None, no_speech_id=None))


def test_a_model_without_room_for_a_prompt_takes_none() -> None:
    """Half of its positions, less one for <|startofprev|>: of two that is nothing, not everything."""
    assert recipe(describe(max_positions=2), initial_prompt="names").previous == ()
    assert recipe(describe(max_positions=1), initial_prompt="names").previous == ()
    assert recipe(describe(max_positions=4), initial_prompt="names").previous == (PREVIOUS, ord("s"))


def test_every_token_between_the_text_and_the_timestamps_is_special() -> None:
    """<|startoflm|> too, which no setting names."""
    start_of_lm = NO_TIMESTAMPS  # its place in a vocabulary that has one more
    whisper = attrs.evolve(MODEL.whisper, no_timestamps_id=NO_TIMESTAMPS + 1, timestamp_begin_id=BEGIN + 1)
    found = recipe(describe(whisper=whisper))
    assert not any(found.is_text(token) for token in range(EOS, BEGIN + 2))
    assert found.decode([97, start_of_lm, 98]) == "ab"


def test_a_blank_prompt_is_no_prompt() -> None:
    """It asks for nothing, so a model without prompts takes it."""
    assert recipe(without_previous(), initial_prompt=" ").previous == ()


async def test_models_without_a_no_speech_token_hear_speech_everywhere() -> None:
    """No probe is asked for, and the probability is 0."""
    script = Script(attrs.evolve(answer(0.0, "a", 5.0), probe=None))
    found = await Transcription(ramp(5), GREEDY, without_previous(), script, request_id="r").next_window()
    assert script.requests[0].probe is None
    assert [s.no_speech_prob for s in found or []] == [0.0]


# ---- temperature and silence -----------------------------------------------------------------------------------------

LOOP = " and" * 50


async def test_a_repetition_is_tried_again_at_the_next_temperature() -> None:
    """The ladder climbs until the text is good, with a seed of its own each time, on the same item."""
    options = TranscribeOptions(language="en", seed=7)
    script = Script(answer(0.0, LOOP, 5.0), answer(0.0, "bad guess", 5.0, logprob=-2), answer(0.0, " good", 5.0))
    transcript = await begin(ramp(5), script, options).transcript()
    assert [(r.id, r.sampling.temperature, r.sampling.seed) for r in script.requests] == [
        ("r/0.0/0", 0.0, 7),
        ("r/0.1/1", 0.2, 8),
        ("r/0.2/2", 0.4, 9),
    ]
    assert len({request.items[0].key for request in script.requests}) == 1
    assert [(s.text, s.temperature) for s in transcript.segments] == [(" good", 0.4)]


async def test_the_last_temperature_is_taken_as_it_is() -> None:
    """Bad text is better than none: its segment says how bad."""
    options = TranscribeOptions(language="en", temperature=(0.0, 1.0))
    (segment,) = (await begin(ramp(5), Script(answer(0.0, LOOP, 5.0)), options).transcript()).segments
    assert (segment.temperature, segment.text) == (1.0, LOOP)
    assert segment.compression_ratio > 2.4


async def test_thresholds_can_be_switched_off() -> None:
    """None: every text is good, no window is silent."""
    options = TranscribeOptions(
        language="en", compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    )
    script = Script(answer(0.0, LOOP, 5.0, logprob=-9, no_speech=0.99))
    assert len((await begin(ramp(5), script, options).transcript()).segments) == 1
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("parts", "logprob", "no_speech", "silent"),
    [
        ((0.0, " you", 5.0), -1.5, 0.9, True),
        ((0.0, " you", 5.0), -0.5, 0.9, False),
        ((0.0, " you", 5.0), -0.5, 0.3, False),
        ((0.0, " ", 5.0), -0.5, 0.9, True),
        ((), -0.5, 0.9, True),
    ],
)
async def test_a_window_is_silent_when_nothing_convincing_is_said(
    parts: tuple[float | str, ...], logprob: float, no_speech: float, silent: bool
) -> None:
    """No speech is likely, and the text is a guess or empty: no segments, no second temperature, the window is over."""
    script = Script(answer(*parts, logprob=logprob, no_speech=no_speech))
    transcription = begin(ramp(40), script, TranscribeOptions(language="en"))
    found = await transcription.next_window()
    assert (found == []) == silent
    assert len(script.requests) == 1
    assert transcription.position == 30


def test_the_average_counts_the_end_of_text() -> None:
    """Three tokens and the end: the sum over four."""
    generated = Generated(token_ids=(1, 2, 3), logprobs=(-1, -1, -1, -1), finish_reason=FinishReason.STOP)
    assessment = Assessment.of(generated, "abc", 0.0)
    assert assessment.avg_logprob == -1
    assert assessment.no_speech_prob == 0
    nothing = Generated(token_ids=(), logprobs=(), finish_reason=FinishReason.STOP)
    assert Assessment.of(nothing, "", 0.0).avg_logprob == 0


def test_repetitions_compress_well() -> None:
    """The threshold of 2.4 lies between them and plain speech."""
    assert compression_ratio("and then we went home, which was not so far away") < 1.3
    assert compression_ratio(LOOP) > 2.4
    assert compression_ratio("") == 0


# ---- properties ------------------------------------------------------------------------------------------------------

SHORT = 90 * STEP  # a window of 90 timestamp steps shows all that one of 1,500 does
any_tokens = st.lists(
    st.one_of(st.integers(0, 255), st.integers(256, BEGIN - 1), st.integers(BEGIN, BEGIN + 120)), max_size=12
)
any_answer = st.builds(
    lambda ids, logprob, no_speech, reason: Generated(
        token_ids=tuple(ids), logprobs=(logprob,) * len(ids), finish_reason=reason, probe=(no_speech,)
    ),
    any_tokens,
    st.floats(-3, 0),
    st.floats(-3, 0),
    st.sampled_from(FinishReason),
)


@given(
    length=st.integers(1, 4 * SHORT),
    answers=st.lists(any_answer, min_size=1, max_size=8),
    timestamps=st.sampled_from(["segment", "none"]),
)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_whatever_the_model_writes(length: int, answers: list[Generated], timestamps: str) -> None:
    """Seek always advances and ends; segments are ordered and within the audio; the windows cover every sample."""
    samples = np.arange(length, dtype=np.float32)
    script = Script(*answers)
    options = TranscribeOptions(language="en", timestamps=timestamps, temperature=0.0)
    transcription = Transcription(samples, options, describe(window_samples=SHORT), script, request_id="r")

    async def walk() -> list[tuple[float, float]]:
        spoken: list[tuple[float, float]] = []
        while True:
            before = transcription.position
            found = await transcription.next_window()
            if found is None:
                return spoken
            assert transcription.position > before
            assert all(segment.text.strip() for segment in found)
            spoken += [(segment.start, segment.end) for segment in found]

    spoken = trio.run(walk)
    assert transcription.position == transcription.duration == length / RATE
    assert all(start < end for start, end in spoken)
    edges = [edge for segment in spoken for edge in segment]
    assert edges == sorted(edges)
    assert not edges or (edges[0] >= 0 and edges[-1] <= length / RATE)
    windows = script.windows(samples)
    reached = 0
    for start, end in windows:
        assert start <= reached <= end <= start + SHORT
        reached = end
    assert length - reached < STEP
    if timestamps == "none":
        assert windows == [(start, min(start + SHORT, length)) for start, _ in windows]
        assert [start for start, _ in windows] == list(range(0, max(length - STEP, 0) + 1, SHORT))

"""Options of transcriptions: what is refused, and how the message helps; the recipe, which makes requests of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.inputs.audio import content_key
from triolet.api.outputs.results import Turn
from triolet.api.speech.options import _ELSEWHERE, TranscribeOptions, read_options
from triolet.api.speech.recipe import Recipe, language_probabilities
from triolet.api.speech.windows import Generated
from triolet.core.errors import ContextLengthExceeded, InvalidRequest
from triolet.core.model import ModelDescription
from triolet.core.request import Request, SamplingParams

from .speech import (
    BEGIN,
    DE,
    EN,
    ENGLISH_ONLY,
    EOS,
    LANGUAGES,
    MODEL,
    NO_SPEECH,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    WINDOW,
    WITHOUT_PREVIOUS,
    Script,
    answer,
    begin,
    describe,
    describe_with,
    options_of,
    ramp,
)


def recipe(description: ModelDescription = MODEL, **options: Any) -> Recipe:
    return Recipe(options=TranscribeOptions(**options), description=description)


async def first_requests(model: ModelDescription = MODEL, seconds: float = 40, **options: Any) -> list[Request]:
    """Those of two windows."""
    script = Script(answer(0.0, "a", 5.0))
    await begin(ramp(seconds), script, options_of(**options), model).transcript()
    return script.requests


class Finder:
    """Has the methods of an aligner and of a diarizer."""

    align = diarize = print


ADA = Turn(start=1.0, end=2.0, speaker="Ada")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TranscribeOptions(task="sing"), r"task='sing'; allowed: 'transcribe' or 'translate'"),
        (lambda: TranscribeOptions(encoder_context="short"), r"encoder_context='short'; allowed: 'full' or 'trimmed'"),
        (lambda: TranscribeOptions(voice_activity="on"), r"voice_activity='on'; allowed: 'skip', 'off', or"),
        (lambda: options_of(temperature=()), r"temperature=\(\); allowed"),
        (lambda: options_of(temperature=-1), r"temperature=-1; allowed"),
        (lambda: options_of(temperature=[0.0, "0.2"]), r"temperature=\[0.0, '0.2'\]; allowed"),
        (lambda: options_of(temperature=(0.0, math.nan)), r"nan\); allowed"),
        (lambda: options_of(language=1), r"language=1; allowed: a text; None: "),
        (lambda: options_of(seed=2**63), r"seed=9223372036854775808; allowed: an integer"),
        (lambda: options_of(logprob_threshold=math.nan), r"logprob_threshold=nan; allowed: a number"),
        (lambda: options_of(beam_size=0), r"beam_size=0; allowed: an integer.*1 is greedy"),
        (lambda: options_of(suppress_tokens=[-2]), r"suppress_tokens=\[-2\]; allowed: a list of token ids"),
        (lambda: options_of(suppress_tokens="1,2"), r"suppress_tokens='1,2'; allowed: a list of token ids"),
        (lambda: options_of(hotwords=7), r"hotwords=7; allowed: a text, or a list of texts; None: none"),
        (lambda: options_of(hotwords=["Åsa", 7]), r"hotwords=\['Åsa', 7\]; allowed: a text, or a list of texts"),
        (lambda: options_of(repetition_penalty=0), r"repetition_penalty=0; allowed: a number, 0.001 or more.*1 is off"),
        (lambda: options_of(no_repeat_ngram_size=-1), r"no_repeat_ngram_size=-1; allowed: an integer, 0 .*0 is off"),
        (lambda: options_of(max_new_tokens=0), r"max_new_tokens=0; allowed: an integer, 1 to .*None: half of the"),
        (lambda: options_of(clip_timestamps=[3, 1]), r"clip_timestamps=\[3, 1\]; allowed: rising times in seconds"),
        (lambda: options_of(clip_timestamps=[(0, 5), (4, 9)]), r"clip_timestamps=.*; allowed: rising times in seconds"),
        (lambda: options_of(clip_timestamps=[-1, 1]), r"clip_timestamps=\[-1, 1\]; allowed"),
        (lambda: options_of(clip_timestamps=[math.nan, 1]), r"clip_timestamps=\[nan, 1\]; allowed"),
        (lambda: options_of(clip_timestamps="0,a"), r"clip_timestamps='0,a'; allowed"),
        (lambda: options_of(clip_timestamps=7), r"clip_timestamps=7; allowed"),
        (
            lambda: options_of(hallucination_silence_threshold=2.0),
            r"hallucination_silence_threshold=2 with timestamps='segment'; allowed: timestamps='word'",
        ),
        (
            lambda: options_of(voice_activity="off", vad_threshold=0.6),
            r"vad_threshold is given with voice_activity='off', which reads everything",
        ),
        (lambda: options_of(vad_threshold=1.5), r"vad_threshold=1.5; allowed: a number.* 1"),
        (
            lambda: options_of(prefix="a", parallel=True),
            r"prefix is given with parallel=True, which has no first window",
        ),
        (lambda: options_of(timestamps="word", aligner=3), "allowed: an engine whose model aligns texts"),
        (lambda: options_of(timestamps="word", aligner=Finder), "allowed: an engine whose model aligns texts"),
        (lambda: options_of(aligner=Finder()), "allowed: timestamps='word'"),
        (lambda: options_of(timestamps="word", aligner=Finder(), task="translate"), "allowed: task='transcribe'"),
        (lambda: options_of(diarizer=3), "allowed: an engine whose model finds speakers"),
        (lambda: options_of(diarizer=Finder), "allowed: an engine whose model finds speakers"),
        (lambda: options_of(diarizer=[3]), "allowed: an engine whose model finds speakers"),
        (lambda: options_of(diarizer=[ADA, attrs.evolve(ADA, end=0.5)]), "each with a speaker and 0 <= start <= end"),
        (lambda: options_of(diarizer=[attrs.evolve(ADA, end=math.nan)]), "each with a speaker and 0 <= start <= end"),
        (lambda: options_of(diarizer=Finder(), speakers=2), "a number of speakers is given with diarizer"),
        (
            lambda: options_of(diarizer=[ADA], speakers=True, known_speakers={"Ada": b""}),
            "known_speakers is given with diarizer",
        ),
        (
            lambda: recipe(language="klingon"),
            r"klingon. is not a language of Whisper.*left out, the model detects it",
        ),
        (lambda: recipe(language="fr-CA"), r"fr-CA., which the model does not know; allowed: de, en"),
        (lambda: recipe(language="en-klingon"), r"en-klingon. is not a language of Whisper"),
        (lambda: recipe(language="french"), r"french., which the model does not know; allowed: de, en"),
        (
            lambda: recipe(suppress_tokens=[-1, MODEL.vocabulary_size]),
            rf"suppress_tokens has {MODEL.vocabulary_size}; allowed: 0 to {MODEL.vocabulary_size - 1}",
        ),
        (lambda: recipe(initial_prompt="say <|en|>"), r"initial_prompt=.* special token"),
        (lambda: recipe(hotwords="say <|en|>"), r"hotwords=.* special token"),
        (lambda: recipe(prefix="say <|en|>"), r"prefix=.* special token"),
        (lambda: recipe(ENGLISH_ONLY, language="de"), r"knows only English"),
        (lambda: recipe(ENGLISH_ONLY, task="translate"), r"knows only: 'transcribe'"),
        (lambda: recipe(attrs.evolve(MODEL, speech=None)), r"cannot transcribe; allowed: models of speech"),
        (lambda: recipe(WITHOUT_PREVIOUS, hotwords="names"), r"hotwords='names', which Whisper.* cannot use"),
        (
            lambda: recipe(WITHOUT_PREVIOUS, initial_prompt="names"),
            r"initial_prompt=.*cannot use",
        ),
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(make: Callable[[], object], message: str) -> None:
    """The message says what was got and what is allowed."""
    with pytest.raises(InvalidRequest, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *_ELSEWHERE.items(),
        ("temperatur", "temperature"),
        ("log_prob_threshold", "logprob_threshold"),
        ("samplingrate", "sampling_rate"),
        ("clip_timestamp", "clip_timestamps"),
    ],
)
def test_an_unknown_option_is_answered_with_the_near_one(name: str, near: str) -> None:
    """A name with a mistake in it, or that of another program."""
    with pytest.raises(
        InvalidRequest, match=re.escape(f"{name}= is not an option of a transcription; did you mean {near}?")
    ):
        read_options({"language": "en", name: 1})


def test_an_option_that_is_like_nothing_is_answered_with_all() -> None:
    with pytest.raises(
        InvalidRequest, match=r"zzz= is not an option of a transcription; allowed: language, task, .*wait"
    ):
        read_options({"zzz": 1})


def test_no_name_of_another_program_hides_an_option() -> None:
    """And what it is answered with exists."""
    known = set(attrs.fields_dict(TranscribeOptions)) | {"sampling_rate"}
    assert not known & _ELSEWHERE.keys()
    named = [near.partition("=")[0] for near in _ELSEWHERE.values() if "(" not in near.partition("=")[0]]
    assert set(named) <= known


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


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((), ()),
        ("", ()),
        ([1, 2], ((1.0, 2.0),)),
        ([1, 2, 5], ((1.0, 2.0), (5.0, math.inf))),
        ([(1, 2), (5, 7.5)], ((1.0, 2.0), (5.0, 7.5))),
        ([[0, 2], [2, 3]], ((0.0, 2.0), (2.0, 3.0))),
        ("1,2.5,5", ((1.0, 2.5), (5.0, math.inf))),
        ("0", ((0.0, math.inf),)),
        (np.array([1.0, 2.0]), ((1.0, 2.0),)),
    ],
    ids=repr,
)
def test_clips_are_pairs_or_a_list_or_a_text(given: Any, kept: tuple[tuple[float, float], ...]) -> None:
    """A last start without end reaches to the end of the audio. What was read may be read again."""
    options = options_of(clip_timestamps=given)
    assert options.clip_timestamps == kept
    assert attrs.evolve(options, seed=1).clip_timestamps == kept


# ---- requests --------------------------------------------------------------------------------------------------------


async def test_each_request_says_all_that_the_engine_must_know() -> None:
    """Prompt, item, limits, rules and probe of a window's request."""
    samples = ramp(31)
    script = Script(answer(0.0, "a", 5.0))
    await begin(samples, script).next_window()
    (request,) = script.requests
    assert request.id == "r/0.0/0"
    assert request.prompt_token_ids == (START, EN, TRANSCRIBE)
    assert (request.max_tokens, request.sampling) == (224, SamplingParams(max_tokens=224, patience=1.0))
    assert request.rules.suppress == (1, 2)
    assert request.rules.begin_suppress == (32, EOS)
    assert request.rules.timestamps is not None
    assert attrs.astuple(request.rules.timestamps) == (BEGIN, NO_TIMESTAMPS, 50, ())
    assert request.probe is not None
    assert attrs.astuple(request.probe) == (0, (NO_SPEECH,))
    (item,) = request.items
    assert item.key == content_key(samples[:WINDOW], "stub-80")
    assert (item.embeddings, item.size) == (1500, 384_000)
    assert not np.shares_memory(item.payload, samples)
    assert item.payload.flags.c_contiguous


async def test_the_initial_prompt_precedes_the_first_window() -> None:
    """Its last tokens are kept, half of the positions less <|startofprev|>; the probe follows <|startoftranscript|>.
    The text is half of the positions at most, and what is left of all."""
    first, second = await first_requests(language="de", task="translate", initial_prompt="x" * 500)
    assert first.prompt_token_ids == (PREVIOUS, *b"x" * 223, START, DE, TRANSLATE)
    assert first.max_tokens == 448 - 227
    assert first.probe is not None
    assert first.probe.position == 224
    assert len(second.prompt_token_ids) == 227, "the next window's prompt is as long, with the first one's text in it"


async def test_a_prompt_that_is_cut_is_told() -> None:
    script = Script(answer(0.0, "a", 5.0))
    options = options_of(initial_prompt="x" * 500, prefix="y" * 120)
    transcript = await begin(ramp(5), script, options).transcript()
    assert transcript.warnings == (
        "initial_prompt has 501 tokens; only the last 223 are used",
        "prefix has 121 tokens; only the last 112 are used",
    )
    assert script.requests[0].prompt_token_ids == (PREVIOUS, *b"x" * 223, START, EN, TRANSCRIBE, BEGIN, *b"y" * 112)
    assert not recipe(initial_prompt="x" * 222, prefix="y" * 111).warnings
    assert not recipe(hotwords="x" * 111, initial_prompt="y" * 110).warnings
    assert recipe(hotwords="x" * 223, initial_prompt="y").warnings == (
        "hotwords has 224 tokens; only the first 223 are used",
        "initial_prompt has 2 tokens; only the last 0 are used",
    )


@given(
    hotwords=st.text("xy", min_size=1, max_size=300),
    answers=st.lists(
        st.builds(
            answer,
            st.just(0.0),
            st.text("ab ", max_size=300),
            st.sampled_from([1.0, 5.0, 30.0]),
            logprob=st.sampled_from([-0.1, -2.0]),
            no_speech=st.sampled_from([0.1, 0.9]),
        ),
        min_size=1,
        max_size=8,
    ),
    carries=st.booleans(),
    goes_on=st.booleans(),
    temperature=st.sampled_from([0.0, (0.0, 0.6), 1.0]),
)
@settings(max_examples=50)
async def test_every_window_has_the_hotwords(
    hotwords: str, answers: list[Generated], carries: bool, goes_on: bool, temperature: Any
) -> None:
    """Whatever the model writes; text before takes half of the positions at most, and room is left for new text."""
    script = Script(*answers)
    options = options_of(
        hotwords=hotwords,
        initial_prompt="names",
        carry_initial_prompt=carries,
        condition_on_previous_text=goes_on,
        temperature=temperature,
        best_of=1,
    )
    await begin(ramp(75), script, options).transcript()
    expected = (PREVIOUS, *f" {hotwords}".encode()[:223])
    assert len(script.windows()) >= 3
    for request in script.requests:
        assert request.prompt_token_ids[: len(expected)] == expected
        assert request.prompt_token_ids.index(START) <= 224
        assert len(request.prompt_token_ids) + (request.max_tokens or 0) <= 448


async def test_penalties_and_the_longest_text_go_to_the_engine_as_faster_whisper_means_them() -> None:
    """They speak of the window's text alone, so that no hotword is banned. A text is half of the positions at most."""
    first, *_ = await first_requests(repetition_penalty=1.2, no_repeat_ngram_size=3, max_new_tokens=9)
    assert (first.max_tokens, first.sampling.max_tokens, first.sampling.repetition_penalty) == (9, 9, 1.2)
    assert (first.rules.no_repeat_ngram, first.rules.counts_prompt) == (3, False)
    longest, *_ = await first_requests(max_new_tokens=300)
    assert longest.max_tokens == 224


async def test_the_prefix_begins_the_first_window_alone_and_is_no_part_of_its_text() -> None:
    """Its tokens follow <|0.00|>; what the model writes begins behind them."""
    script = Script(answer(0.0, " a", 5.0))
    transcript = await begin(ramp(40), script, options_of(prefix=" So ")).transcript()
    first, second = (request.prompt_token_ids for request in script.requests)
    assert first == (START, EN, TRANSCRIBE, BEGIN, *b" So")
    assert second[second.index(START) :] == (START, EN, TRANSCRIBE)
    assert transcript.text == "a a"


async def test_without_timestamps_there_are_no_rules_of_timestamps() -> None:
    """timestamps='none': <|notimestamps|> in the prompt."""
    first, *_ = await first_requests(timestamps="none")
    assert first.prompt_token_ids == (START, EN, TRANSCRIBE, NO_TIMESTAMPS)
    assert first.rules.timestamps is None


async def test_english_only_models_have_neither_language_nor_task() -> None:
    """Their prompt is <|startoftranscript|> alone, and nothing is detected."""
    for language in (None, "en", "english"):
        script = Script(answer(0.0, "a", 5.0))
        transcript = await begin(ramp(5), script, options_of(language=language), ENGLISH_ONLY).transcript()
        assert (transcript.language, transcript.language_probability) == ("en", None)
        assert [request.prompt_token_ids for request in script.requests] == [(START,)]


async def test_models_without_a_no_speech_token_hear_speech_everywhere() -> None:
    """No probe is asked for, and the probability is 0."""
    script = Script(attrs.evolve(answer(0.0, "a", 5.0), probe=None))
    found = await begin(ramp(5), script, model=WITHOUT_PREVIOUS).next_window()
    assert script.requests[0].probe is None
    assert [s.no_speech_prob for s in found or []] == [0.0]


async def test_models_without_a_token_for_the_text_before_get_none() -> None:
    requests = await first_requests(WITHOUT_PREVIOUS)
    assert {request.prompt_token_ids for request in requests} == {(START, EN, TRANSCRIBE)}


def test_a_model_without_room_for_a_prompt_takes_none() -> None:
    """Half of its positions, less one for <|startofprev|>: of two that is nothing, not everything."""
    for positions, kept in ((1, ()), (2, ()), (4, (ord("s"),))):
        assert recipe(describe(max_positions=positions), initial_prompt="names").history().last() == kept


def test_a_warning_says_how_much_of_a_text_is_used() -> None:
    """The characters that are read may have fewer tokens than there is room for."""
    for positions, used in ((400, 100), (80_000, 10_001)):  # one for the blank before
        (told,) = recipe(describe(max_positions=positions), prefix="s" * 10_001).warnings
        assert told == f"prefix has 10,001 characters; only its last {used} tokens are used"


async def test_a_window_whose_prompt_fills_the_positions_is_refused() -> None:
    """It never comes to the device."""
    script, model = Script(answer(0.0, "a", 5.0)), describe(max_positions=3)
    with pytest.raises(ContextLengthExceeded, match="the prompt of a window has 3 tokens; allowed: up to 2"):
        await begin(ramp(5), script, options_of(language="en"), model).next_window()
    assert not script.requests


def test_every_token_between_the_text_and_the_timestamps_is_special() -> None:
    """<|startoflm|> too, which no setting names."""
    start_of_lm = NO_TIMESTAMPS  # its place in a vocabulary that has one more
    found = recipe(describe_with(no_timestamps_id=NO_TIMESTAMPS + 1, timestamp_begin_id=BEGIN + 1))
    assert not any(found.model.is_text(token) for token in range(EOS, BEGIN + 2))
    assert found.model.decode([97, start_of_lm, 98]) == "ab"


def test_a_blank_prompt_is_no_prompt() -> None:
    """It asks for nothing, so a model without prompts takes it."""
    found = recipe(WITHOUT_PREVIOUS, initial_prompt=" ", prefix=" ")
    assert (found.initial, found.prefix) == ((), ())


async def test_temperatures_have_their_sampling() -> None:
    """Beams at 0; above 0 several draws, of which the first has the probe, each with a seed of its own."""
    bad = answer(0.0, "a", 5.0, logprob=-3)
    script = Script(bad)
    options = options_of(temperature=(0.0, 0.5), beam_size=3, patience=2, length_penalty=0.5, best_of=4, seed=7)
    await begin(ramp(5), script, options).transcript()
    search, *draws = script.requests
    assert search.sampling == SamplingParams(max_tokens=224, beam_size=3, patience=2, length_penalty=0.5)
    assert [draw.sampling.temperature for draw in draws] == [0.5] * 4
    assert [draw.sampling.n for draw in draws] == [1] * 4
    assert [draw.probe is None for draw in draws] == [False, True, True, True]
    assert draws[0].sampling.seed == 8
    assert len({draw.sampling.seed for draw in draws}) == 4
    assert len({draw.id for draw in script.requests}) == 5
    assert len({draw.items[0].key for draw in script.requests}) == 1


# ---- languages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["de", "DE", " german ", "German", "<|de|>", "de-DE", "de_at", "de-Latn-CH"])
def test_languages_have_codes_names_and_tokens(name: str) -> None:
    """All spellings of a language give its code."""
    assert recipe(language=name).language == "de"


@given(st.lists(st.floats(-50, 0), min_size=2, max_size=2))
@settings(max_examples=50)
def test_language_probabilities_sum_to_one(logprobs: list[float]) -> None:
    """Normalised over the languages, likelier first."""
    found = language_probabilities(LANGUAGES, logprobs)
    assert sum(found.values()) == pytest.approx(1)
    assert (found["en"] >= found["de"]) == (logprobs[0] >= logprobs[1])

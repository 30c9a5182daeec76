"""The decisions of openai/whisper's decoding.py and transcribe.py (Radford et al. 2022, section 4.5), made by hand.

Each row is what the model wrote, or the logits that it gave, and the decision that must follow. The comment of a row
says which rule it shows.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve

from triolet.api.outputs.results import Segment, Word
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.recipe import Context, Recipe
from triolet.api.speech.windows import (
    Assessment,
    Attempt,
    Generated,
    Surroundings,
    best_attempt,
    compression_ratio,
    is_strange,
    likeliest,
    strangeness,
    without_hallucinations,
)
from triolet.core.model import ModelDescription
from triolet.core.plan import SampledToken
from triolet.core.request import EncoderItem, FinishReason, Request
from triolet.core.speech import Ask, Sound, Span, WindowCut
from triolet.models.sampling.rules import SamplerInput
from triolet.models.speech.whisper_speech import cut_window

from ..models.texts import sample_tokens
from .speech import (
    BEGIN,
    EOS,
    GREEDY,
    LADDER,
    MODEL,
    NO_SPEECH,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TRANSLATE,
    Script,
    answer,
    at,
    begin,
    describe_with,
    options_of,
    ramp,
    segment,
    tokens,
)

# ---- logits: which token comes next ----------------------------------------------------------------------------------

A, B, C, BLANK = b"abc "
UNLIKELY = -30.0  # all timestamps at this together are still less likely than any token that a row names
SOUND = Sound(samples=(), item=EncoderItem(key="k", payload=None, embeddings=1500, size=1))
Logits = dict[int, float]


def request_of(options: TranscribeOptions = GREEDY, model: ModelDescription = MODEL) -> Request:
    """The first window's request."""
    recipe = Recipe(options=options, description=model)
    return recipe.attempt(lambda: "r", SOUND, recipe.ask(Context(name="r", language="en", first=True)), 0)[0]


def sampled(
    written: tuple[int, ...], given: Logits, options: TranscribeOptions, model: ModelDescription
) -> SampledToken:
    """What the engine's own sampler takes after ``written``."""
    request = request_of(options, model)
    logits = torch.full((1, model.vocabulary_size), UNLIKELY)
    for token, value in given.items():
        logits[0, token] = value
    one = SamplerInput(generated=written, sampling=request.sampling, rules=request.rules)
    return sample_tokens(logits, [one], model.eos_token_ids)[0]


PLAIN = options_of(timestamps="none")
UNLIMITED = describe_with(max_initial_timestamp=None)
ROWS: list[tuple[tuple[int, ...], Logits, int, dict[str, Any]]] = [
    # the first token is a timestamp, however likely a text is
    ((), {A: 9, at(0.0): 1}, at(0.0), {}),
    # nor may the window end at once
    ((), {EOS: 9, at(0.06): 1}, at(0.06), {}),
    # the first timestamp is 1.00 s at most, as the checkpoint says
    ((), {at(1.02): 9, at(1.0): 1}, at(1.0), {}),
    # ... and 1.00 s itself is allowed
    ((), {at(1.0): 9, at(0.0): 1}, at(1.0), {}),
    # max_initial_timestamp is the option for it
    ((), {at(0.52): 9, at(0.5): 1}, at(0.5), {"options": options_of(max_initial_timestamp=0.5)}),
    # 0 s allows 0.00 alone (openai/whisper takes 0 for "no limit")
    ((), {at(0.02): 9, at(0.0): 1}, at(0.0), {"options": options_of(max_initial_timestamp=0)}),
    # no limit
    ((), {at(14.0): 9, at(0.0): 1}, at(14.0), {"model": UNLIMITED}),
    # the limit holds for the first token alone
    (tokens(0.0, "a"), {at(14.0): 9, B: 1}, at(14.0), {}),
    # behind the first timestamp comes no second one: text must
    (tokens(0.0), {at(0.1): 9, A: 1}, A, {}),
    # ... or the end: a window without a word
    (tokens(0.0), {EOS: 9, A: 1}, EOS, {}),
    # a blank is suppressed at the beginning only
    (tokens(0.0), {BLANK: 9, A: 1}, BLANK, {}),
    # the likeliest text wins over timestamps that are together less likely
    (tokens(0.0, "a"), {B: 5, at(1.0): 4}, B, {}),
    # three timestamps are together likelier than the text, though each alone is not: the likeliest of them
    (tokens(0.0, "a"), {B: 5, at(1.0): 3.9, at(1.02): 4, at(1.04): 3.9}, at(1.02), {}),
    # equally likely is not likelier
    (tokens(0.0, "a"), {B: 5, at(1.0): 5}, B, {}),
    # all the text together counts for nothing: the rule compares with the likeliest text token alone
    (tokens(0.0, "a"), {A: 5, B: 5, C: 5, at(1.0): 5.1}, at(1.0), {}),
    # the end of the text counts as a text token
    (tokens(0.0, "a"), {EOS: 5, at(1.0): 4, at(1.02): 4}, EOS, {}),
    (tokens(0.0, "a"), {EOS: 5, at(1.0): 4, at(1.02): 4, at(1.04): 4}, at(1.0), {}),
    # a suppressed token is not sampled
    (tokens(0.0), {1: 9, A: 1}, A, {}),
    # ... and does not count as the likeliest text
    (tokens(0.0, "a"), {1: 9, B: 3, at(1.0): 3.5}, at(1.0), {}),
    # timestamps that are banned do not count for the sum: 0.50 s has passed
    (tokens(0.0, "a", 0.5, 0.5, "b"), {C: 3, at(0.2): 9, at(0.5): 9, at(1.0): 2}, C, {}),
    # a timestamp behind text wants its pair, or the end: no text
    (tokens(0.0, "a", 0.5), {B: 9, at(0.5): 1}, at(0.5), {}),
    (tokens(0.0, "a", 0.5), {B: 9, EOS: 5, at(0.5): 1}, EOS, {}),
    # ... though the timestamps win where they are together likelier than the end
    (tokens(0.0, "a", 0.5), {EOS: 5, at(0.5): 4, at(0.52): 4, at(0.54): 4.1}, at(0.54), {}),
    # the pair's second may be the same time, or later, not earlier
    (tokens(0.0, "a", 0.5), {at(0.48): 9, at(0.5): 1}, at(0.5), {}),
    (tokens(0.0, "a", 0.5), {at(3.0): 9, at(0.5): 1}, at(3.0), {}),
    # behind a pair comes text, no third timestamp
    (tokens(0.0, "a", 0.5, 0.5), {at(0.6): 9, B: 1}, B, {}),
    # ... or the end
    (tokens(0.0, "a", 0.5, 0.5), {at(0.6): 9, EOS: 2, B: 1}, EOS, {}),
    # the next segment ends later than it began: no segment without length
    (tokens(0.0, "a", 0.5, 0.6, "b"), {at(0.6): 9, at(0.62): 8}, at(0.62), {}),
    # time does not run backwards
    (tokens(0.0, "a", 0.5, 0.6, "b"), {at(0.3): 9, C: 3, at(0.62): 1}, C, {}),
    # <|notimestamps|> is never written
    (tokens(0.0, "a"), {NO_TIMESTAMPS: 9, B: 1}, B, {}),
    # the prefix stands in the prompt behind <|0.00|>, as in faster-whisper: what is written goes on with its text
    ((), {A: 9, at(0.2): 1}, A, {"options": options_of(prefix="So")}),
    # ... or ends it, and not at 0
    ((), {at(0.0): 9, at(0.2): 8, A: 1}, at(0.2), {"options": options_of(prefix="So")}),
    (tokens(0.2), {A: 9, at(0.2): 1}, at(0.2), {"options": options_of(prefix="So")}),
    # without timestamps neither a blank nor the end may come first
    ((), {BLANK: 9, EOS: 8, A: 1}, A, {"options": PLAIN}),
    # ... but both may come second
    ((A,), {EOS: 9, B: 1}, EOS, {"options": PLAIN}),
    # ... and no timestamp is forced
    ((A,), {B: 5, at(1.0): 4.9, at(1.02): 4.9}, B, {"options": PLAIN}),
    # tokens that the caller names are not sampled
    (tokens(0.0), {A: 9, B: 1}, B, {"options": options_of(suppress_tokens=[A])}),
    # ... in the place of the checkpoint's
    (tokens(0.0), {1: 9, A: 1}, 1, {"options": options_of(suppress_tokens=[A])}),
    # ... or beside them, which -1 stands for
    (tokens(0.0), {1: 9, A: 8, B: 1}, B, {"options": options_of(suppress_tokens=[-1, A])}),
    # special tokens that are no text never are, whatever the caller names
    (
        tokens(0.0),
        {PREVIOUS: 9, NO_SPEECH: 8, START: 7, TRANSLATE: 6, A: 1},
        A,
        {"options": options_of(suppress_tokens=[])},
    ),
    # an empty list does not forbid the end
    (tokens(0.0), {EOS: 9, A: 1}, EOS, {"options": options_of(suppress_tokens=[])}),
]


@pytest.mark.parametrize(("written", "given", "taken", "with_"), ROWS)
def test_the_next_token(written: tuple[int, ...], given: Logits, taken: int, with_: dict[str, Any]) -> None:
    """Suppressions first, then the rules of timestamps, then a timestamp where all of them are likelier than text."""
    options, model = with_.get("options", GREEDY), with_.get("model", MODEL)
    assert sampled(written, given, options, model).token_id == taken


def test_a_log_probability_is_that_among_what_may_be_sampled() -> None:
    """Text is banned behind the first timestamp of a pair: two ends that are equally likely share the whole."""
    found = sampled(tokens(0.0, "a", 0.5), {B: 9, EOS: 1, at(0.5): 1}, GREEDY, MODEL)
    assert found.logprob == pytest.approx(math.log(0.5), abs=1e-5)


def test_a_log_probability_is_taken_before_the_temperature() -> None:
    """At temperature 0.1 the likelier of two is nearly certain, and its log-probability still that of the model."""
    found = sampled(tokens(0.0), {A: 2, B: 1}, options_of(temperature=0.1, best_of=1), MODEL)
    assert (found.token_id, found.logprob) == (A, pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-5))


# ---- tokens: segments, and where the next window starts --------------------------------------------------------------

Parts = tuple[float | str, ...]


@pytest.mark.parametrize(
    ("parts", "spans", "next_start", "closed"),
    [
        # one segment between two timestamps, the last alone at the end: the window is used up
        ((0.0, "a", 5.0), [(0, 250, (0.0, "a", 5.0))], None, True),
        # without a pair the segment begins with the window, whatever the first timestamp says
        ((0.5, "a", 5.0), [(0, 250, (0.5, "a", 5.0))], None, True),
        # a pair at the end, behind which the text is cut off: the next window starts there
        ((0.0, "a", 5.0, 5.0), [(0, 250, (0.0, "a", 5.0))], 250, False),
        # an unfinished segment is dropped
        ((0.0, "a", 5.0, 5.0, "b"), [(0, 250, (0.0, "a", 5.0))], 250, False),
        # ... and read again from the pair's first timestamp, not from its second
        ((0.0, "a", 5.0, 6.0, "b"), [(0, 250, (0.0, "a", 5.0))], 250, False),
        # a lone timestamp finishes the last segment: both are kept, and nobody speaks behind it
        ((0.0, "a", 5.0, 5.0, "b", 9.0), [(0, 250, (0.0, "a", 5.0)), (250, 450, (5.0, "b", 9.0))], None, True),
        # a silence between two segments
        ((0.0, "a", 5.0, 6.0, "b", 9.0, 9.0), [(0, 250, (0.0, "a", 5.0)), (300, 450, (6.0, "b", 9.0))], 450, False),
        # three pairs
        (
            (0.0, "a", 1.0, 1.0, "b", 2.0, 2.0, "c", 3.0, 3.0, "d"),
            [(0, 50, (0.0, "a", 1.0)), (50, 100, (1.0, "b", 2.0)), (100, 150, (2.0, "c", 3.0))],
            150,
            False,
        ),
        # little progress is progress too
        ((0.0, "a", 0.5, 0.5, "b"), [(0, 25, (0.0, "a", 0.5))], 25, False),
        # a pair at 0.00 is no progress at all
        ((0.0, "a", 0.0, 0.0), [(0, 0, (0.0, "a", 0.0))], 0, False),
        # three timestamps in a row: a segment without text, which nobody tells
        ((0.0, "a", 5.0, 5.0, 6.0, "b"), [(0, 250, (0.0, "a", 5.0)), (250, 250, (5.0,))], 250, False),
        # a pair at the very beginning: nothing was said
        ((0.0, 4.0, "a"), [(0, 0, (0.0,))], 0, False),
        # only one timestamp: its text goes on to the window's end
        ((0.0, "a"), [(0, None, (0.0, "a"))], None, False),
        # no timestamp at all
        (("a",), [(0, None, ("a",))], None, False),
        # one at the end
        (("a", 5.0), [(0, 250, ("a", 5.0))], None, True),
        # 0.00 at the end tells no time: the segment ends with the window
        (("a", 0.0), [(0, None, ("a", 0.0))], None, True),
        # a timestamp within the text, no pair: one segment, which ends at the last timestamp
        ((0.0, "a", 0.5, "b"), [(0, 25, (0.0, "a", 0.5, "b"))], None, False),
        # ... and of several the last
        ((0.0, "a", 0.5, "b", 2.0, "c"), [(0, 100, (0.0, "a", 0.5, "b", 2.0, "c"))], None, False),
        # text before the first timestamp, and pairs: it begins with the window
        (("a", 5.0, 5.0, "b", 6.0), [(0, 250, ("a", 5.0)), (250, 300, (5.0, "b", 6.0))], None, True),
        # a timestamp alone
        ((3.0,), [], None, False),
        # nothing
        ((), [], None, False),
    ],
)
def test_a_window_is_cut_at_its_timestamps(
    parts: Parts, spans: list[tuple[int, int | None, Parts]], next_start: int | None, closed: bool
) -> None:
    """The segments with all their tokens, and where the next window starts, in steps of 20 ms."""
    expected = tuple(Span(start, end, tokens(*inside)) for start, end, inside in spans)
    found = cut_window(tokens(*parts), BEGIN)
    assert found == WindowCut(expected, next_start, closed)
    for span in found.spans:
        assert tokens(*parts)[span.first :][: len(span.token_ids)] == span.token_ids


# ---- thresholds: is this text good enough ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("avg_logprob", "no_speech", "ratio", "changed", "good", "silent"),
    [
        # probable and without repetition
        (-0.3, 0.1, 1.5, {}, True, False),
        # improbable: again
        (-1.01, 0.1, 1.5, {}, False, False),
        # exactly at the threshold is probable
        (-1.0, 0.1, 1.5, {}, True, False),
        # it repeats itself: again
        (-0.3, 0.1, 2.41, {}, False, False),
        # exactly at the threshold it does not
        (-0.3, 0.1, 2.4, {}, True, False),
        # no speech, says the model, and the text is improbable: silence, and no other temperature
        (-1.5, 0.9, 1.5, {}, True, True),
        # ... even if it repeats itself
        (-1.5, 0.9, 9.0, {}, True, True),
        # no speech, says the model, but the text is probable: it was said
        (-0.5, 0.9, 1.5, {}, True, False),
        # ... and it is read again if it repeats itself
        (-0.5, 0.9, 9.0, {}, False, False),
        # no speech with exactly the threshold's probability is speech
        (-1.5, 0.6, 1.5, {}, False, False),
        # improbable text with speech in it
        (-1.5, 0.5, 1.5, {}, False, False),
        # exactly at log-probability's threshold the text does not convince: silence
        (-1.0, 0.9, 1.5, {}, True, True),
        # ... but a repetition is read again, since only a lower one is excepted
        (-1.0, 0.9, 9.0, {}, False, True),
        # no threshold of log-probability: the model's word is enough for silence
        (-0.1, 0.9, 1.5, {"logprob_threshold": None}, True, True),
        # ... and nothing is improbable
        (-9.0, 0.1, 1.5, {"logprob_threshold": None}, True, False),
        # no threshold of silence: improbable text is read again
        (-1.5, 0.99, 1.5, {"no_speech_threshold": None}, False, False),
        # no threshold of repetition
        (-0.3, 0.1, 50.0, {"compression_ratio_threshold": None}, True, False),
        # thresholds of the caller's
        (-0.6, 0.1, 1.5, {"logprob_threshold": -0.5}, False, False),
        (-1.5, 0.2, 1.5, {"no_speech_threshold": 0.1}, True, True),
        (-0.3, 0.1, 1.5, {"compression_ratio_threshold": 1.4}, False, False),
        # a model that computes no number is not probable
        (math.nan, 0.1, 1.5, {}, False, False),
    ],
)
def test_an_attempt_is_judged(
    avg_logprob: float, no_speech: float, ratio: float, changed: dict[str, Any], good: bool, silent: bool
) -> None:
    """Good: no other temperature is tried. Silent: the window has no segments, and is used up."""
    found = Assessment(
        text="a", avg_logprob=avg_logprob, no_speech_prob=no_speech, compression_ratio=ratio, temperature=0.0
    )
    assert (found.is_good(options_of(**changed)), found.is_silent(options_of(**changed))) == (good, silent)


def test_the_average_counts_the_end_of_text() -> None:
    """Three tokens and the end: the sum over four. So it is too where the length cut the end off."""
    generated = Generated(token_ids=(65, 66, 67), logprobs=(-1, -1, -1, -1), finish_reason=FinishReason.STOP)
    assert Assessment.of(generated, "abc", 0.0).avg_logprob == -1
    assert Assessment.of(generated, "abc", 0.0).no_speech_prob == 0
    cut_off = Generated(token_ids=(65, 66, 67), logprobs=(-1, -1, -1), finish_reason=FinishReason.LENGTH)
    assert Assessment.of(cut_off, "abc", 0.0).avg_logprob == -0.75
    nothing = Generated(token_ids=(), logprobs=(), finish_reason=FinishReason.STOP)
    assert Assessment.of(nothing, "", 0.0).avg_logprob == 0


def test_repetitions_compress_well() -> None:
    """The threshold of 2.4 lies between them and plain speech. Blanks around the text do not count."""
    assert compression_ratio("and then we went home, which was not so far away") < 1.3
    assert compression_ratio(" and" * 50) > 2.4
    assert compression_ratio("") == 0
    plain, blank = (Assessment.of(answer("x"), text, 0.0).compression_ratio for text in ("abc", "  abc "))
    assert plain == blank == compression_ratio("abc")


# ---- several texts: which is the best --------------------------------------------------------------------------------


def drawn(length: int, total: float) -> Generated:
    """A text of ``length`` tokens with this log-probability, its end included."""
    logprobs = (total / (length + 1),) * (length + 1)
    return Generated(token_ids=tuple(range(65, 65 + length)), logprobs=logprobs, finish_reason=FinishReason.STOP)


@pytest.mark.parametrize(
    ("lengths_and_totals", "penalty", "best"),
    [
        # by the average over the tokens without the end: -0.5 is better than -0.6
        ([(10, -6.0), (20, -10.0)], 1.0, 1),
        # counting the end too, as the thresholds do, the first would win: (1: -1.0 / 2) against (3: -2.1 / 4)
        ([(1, -1.0), (3, -2.1)], 1.0, 1),
        # of equal ones the first
        ([(10, -5.0), (20, -10.0), (10, -5.0)], 1.0, 0),
        # the sum alone
        ([(10, -6.0), (20, -10.0)], 0.0, 0),
        # an empty text
        ([(0, -0.5), (10, -4.0)], 1.0, 1),
    ],
)
def test_the_likeliest_of_several_draws_is_taken(
    lengths_and_totals: list[tuple[int, float]], penalty: float, best: int
) -> None:
    texts = [drawn(length, total) for length, total in lengths_and_totals]
    assert likeliest(texts, penalty) is texts[best]


def attempt(avg_logprob: float, ratio: float, temperature: float) -> Attempt:
    found = Assessment(
        text="a", avg_logprob=avg_logprob, no_speech_prob=0.1, compression_ratio=ratio, temperature=temperature
    )
    return Attempt(answer("a"), found, SOUND, Ask(language="en"))


@pytest.mark.parametrize(
    ("attempts", "best"),
    [
        # none repeats itself: the likeliest
        ([(-1.5, 1.5), (-1.2, 1.5), (-1.3, 1.5)], 1),
        # one that does not repeat itself before one that does, however likely
        ([(-0.1, 5.0), (-3.0, 1.5)], 1),
        # all repeat themselves: the one that does so least
        ([(-0.1, 5.0), (-0.9, 3.0), (-0.2, 4.0)], 1),
        # of equal ones the first, at the lowest temperature
        ([(-1.5, 1.5), (-1.5, 1.5)], 0),
        # exactly at the threshold it does not repeat itself
        ([(-0.1, 5.0), (-3.0, 2.4)], 1),
    ],
)
def test_where_every_attempt_fails_the_best_is_taken(attempts: list[tuple[float, float]], best: int) -> None:
    """openai/whisper takes the last one, which is the most random."""
    found = [attempt(logprob, ratio, 0.2 * index) for index, (logprob, ratio) in enumerate(attempts)]
    assert best_attempt(found, LADDER) is found[best]


# ---- the text before -------------------------------------------------------------------------------------------------

SHORT = tokens(0.0, " a", 5.0)
LONG = tokens(0.0, "x" * 300, 5.0)


@pytest.mark.parametrize(
    ("first", "options", "prompt"),
    [
        # the text of the window before, with its timestamps
        (answer(0.0, " a", 5.0), {}, (PREVIOUS, *SHORT)),
        # an unfinished segment is not given on: it is read again
        (answer(0.0, " a", 5.0, 5.0, " b"), {}, (PREVIOUS, *SHORT)),
        # nor is a segment without text
        (answer(0.0, " a", 5.0, 5.0, " ", 6.0), {}, (PREVIOUS, *SHORT)),
        # behind the initial prompt
        (answer(0.0, " a", 5.0), {"initial_prompt": "Hi"}, (PREVIOUS, *b" Hi", *SHORT)),
        # of a long text the last 223 tokens
        (answer(0.0, "x" * 300, 5.0), {"initial_prompt": "Hi"}, (PREVIOUS, *LONG[-223:])),
        # without condition_on_previous_text neither text nor initial prompt goes on
        (answer(0.0, " a", 5.0), {"initial_prompt": "Hi", "condition_on_previous_text": False}, ()),
        # nor does text of a high temperature, nor what was before it
        (answer(0.0, " a", 5.0), {"initial_prompt": "Hi", "temperature": 0.6, "best_of": 1}, ()),
        # exactly at prompt_reset_temperature it does
        (answer(0.0, " a", 5.0), {"temperature": 0.5, "best_of": 1}, (PREVIOUS, *SHORT)),
        # a silent window changes nothing: its text is not given on
        (answer(0.0, " a", 5.0, logprob=-2, no_speech=0.9), {"initial_prompt": "Hi"}, (PREVIOUS, *b" Hi")),
        # ... nor does its temperature make the model forget
        (
            answer(0.0, " a", 5.0, logprob=-2, no_speech=0.9),
            {"initial_prompt": "Hi", "temperature": 0.6, "best_of": 1},
            (PREVIOUS, *b" Hi"),
        ),
        # ... nor is it the first window whose prompt is not repeated
        (
            answer(0.0, " a", 5.0, logprob=-2, no_speech=0.9),
            {"initial_prompt": "Hi", "condition_on_previous_text": False},
            (PREVIOUS, *b" Hi"),
        ),
        # hotwords come before all other text, and stay where that is cut or dropped
        (
            answer(0.0, " a", 5.0),
            {"hotwords": ["Yo", "Ko"], "initial_prompt": "Hi"},
            (PREVIOUS, *b" Yo, Ko Hi", *SHORT),
        ),
        (answer(0.0, "x" * 300, 5.0), {"hotwords": "Yo"}, (PREVIOUS, *b" Yo", *LONG[-220:])),
        (answer(0.0, " a", 5.0), {"hotwords": "Yo", "condition_on_previous_text": False}, (PREVIOUS, *b" Yo")),
        (answer(0.0, " a", 5.0), {"hotwords": "Yo", "temperature": 0.6, "best_of": 1}, (PREVIOUS, *b" Yo")),
        # of long hotwords the first tokens are kept, as in faster-whisper, and no room is left
        (answer(0.0, " a", 5.0), {"hotwords": "yz" * 150, "initial_prompt": "Hi"}, (PREVIOUS, *(b" " + b"yz" * 111))),
        # so does the initial prompt where it is carried
        (
            answer(0.0, "x" * 300, 5.0),
            {"carry_initial_prompt": True, "initial_prompt": "Hi"},
            (PREVIOUS, *b" Hi", *LONG[-220:]),
        ),
        (
            answer(0.0, " a", 5.0),
            {"carry_initial_prompt": True, "initial_prompt": "Hi", "condition_on_previous_text": False},
            (PREVIOUS, *b" Hi"),
        ),
        (
            answer(0.0, " a", 5.0),
            {"carry_initial_prompt": True, "initial_prompt": "z" * 300, "hotwords": "Yo"},
            (PREVIOUS, *b" Yo", *b"z" * 220),
        ),
        # without timestamps the text alone
        (answer(" a"), {"timestamps": "none"}, (PREVIOUS, *b" a")),
    ],
)
async def test_the_text_before_a_window(first: Generated, options: dict[str, Any], prompt: tuple[int, ...]) -> None:
    """What stands before <|startoftranscript|> in the second window's prompt. Repetition counts for nothing here."""
    script = Script(first, answer(0.0, " b", 5.0))
    transcription = begin(ramp(60), script, options_of(compression_ratio_threshold=None, **options))
    await transcription.next_window()
    await transcription.next_window()
    found = script.requests[1].prompt_token_ids
    assert found[: found.index(START)] == prompt


# ---- words that nobody spoke -----------------------------------------------------------------------------------------

AROUND = Surroundings(start=30.0, stop=60.0, full=60.0, audio=100.0, last_speech=29.0, closed=False)


def spoken(start: float, end: float, probability: float = 0.9, words: int = 3) -> Segment:
    """``words`` words that share the time."""
    edges = [start + (end - start) / words * index for index in range(words + 1)]
    told = [Word(text=" a", start=one, end=other, probability=probability) for one, other in pairwise(edges)]
    return segment(" a" * words, start, end, told)


def ghost(start: float, end: float) -> Segment:
    return spoken(start, end, probability=0.01)


@pytest.mark.parametrize(
    ("seconds", "probability", "expected"), [(0.5, 0.9, 0.0), (0.5, 0.1, 1.0), (0.033, 0.9, 1.5), (3.0, 0.9, 1.0)]
)
def test_a_word_is_strange_by_its_probability_and_its_length(
    seconds: float, probability: float, expected: float
) -> None:
    assert strangeness(Word(text="a", start=1.0, end=1.0 + seconds, probability=probability)) == pytest.approx(expected)


def test_a_segment_is_strange_by_its_words_alone() -> None:
    assert is_strange(ghost(40, 41))
    assert not is_strange(spoken(40, 41))
    assert not is_strange(None)
    assert not is_strange(evolve(ghost(40, 41), words=()))


def test_what_is_spoken_stays_and_the_next_window_begins_behind_it_where_silence_follows() -> None:
    told = (spoken(30, 35), spoken(36, 40))
    kept = without_hallucinations(told, AROUND, 2.0)
    assert (kept.segments, kept.seek) == (told, 40)
    assert without_hallucinations(told, evolve(AROUND, closed=True), 2.0).seek is None
    assert without_hallucinations((spoken(30, 59, words=60),), AROUND, 2.0).seek == 60


def test_a_hallucination_behind_a_silence_is_skipped_and_heard_again() -> None:
    kept = without_hallucinations((ghost(40, 41), spoken(41, 42)), AROUND, 2.0)
    assert (kept.segments, kept.seek) == ((), 40)


def test_a_hallucination_between_silences_ends_the_window_and_one_beside_speech_stays() -> None:
    first, lone, beside = spoken(30, 35), ghost(45, 46), ghost(35.5, 36)
    kept = without_hallucinations((first, lone, spoken(50, 55)), AROUND, 2.0)
    assert (kept.segments, kept.seek) == ((first,), 45)
    together = (first, beside, spoken(36, 40))
    assert without_hallucinations(together, AROUND, 2.0).segments == together


def test_a_hallucination_at_the_end_of_the_audio_ends_it() -> None:
    told = spoken(30, 35), ghost(58.2, 59)
    for audio, seek in ((60.0, 60.0), (100.0, 58.2), (None, 58.2)):
        kept = without_hallucinations(told, evolve(AROUND, audio=audio), 2.0)
        assert (kept.segments, kept.seek) == (told[:1], seek)

"""What the native library chooses is what torch chooses of its logits: tokens, candidates of beams, probes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from triolet.core.errors import EngineError
from triolet.core.request import LogitRules, SamplingParams, TimestampRules
from triolet.models.memory.rows import Rows
from triolet.models.native.draws import NOTHING, Draw
from triolet.models.native.library import Change, Choice, Ending, Library
from triolet.models.native.panels import Panels
from triolet.models.native.program import Normed, Program
from triolet.models.native.runner import Runner
from triolet.models.sampling.beams import merge
from triolet.models.sampling.logits import choose
from triolet.models.sampling.rules import ConstantBans, SamplerInput, draw_of

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

VOCABULARY, HIDDEN, SCALE, MOST_ROWS, EOS = 1_997, 48, 1.5, 7, 9
PAIRS = "pairs"  # a weight in bfloat16
TOKENS = st.integers(0, VOCABULARY - 1)
POSITIONS = torch.randn(99, HIDDEN, generator=torch.Generator().manual_seed(3))


def table(dtype: torch.dtype | str | None) -> Panels:
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    return Panels.of(weight.bfloat16()) if dtype == PAIRS else Panels.of(weight, dtype=dtype)


@contextmanager
def running(
    embedding: Panels, bias: torch.Tensor, *, threads: int = 2, level: int = 0, pages: torch.Tensor | None = None
) -> Iterator[Runner]:
    """Embeddings, their norm, and logits of it."""
    program, library = Program(), Library.load()
    assert library is not None
    hidden = program.buffer(HIDDEN)
    program.look_up(hidden, embedding, SCALE, POSITIONS)
    last = program.buffer(HIDDEN)
    program.norm(hidden, last, Normed(gain=torch.ones(HIDDEN), epsilon=1e-5), wanted=True)
    head = Panels.of(torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.3, bias)
    program.linear(last, program.buffer(VOCABULARY), head, Ending.STORE, wanted=True)
    program.has_head = program.chooses = True
    runner = Runner.open(library, program, pages, rows=MOST_ROWS, positions=99, threads=threads, level=level)
    try:
        yield runner
    finally:
        runner.release()


@frozen(eq=False)
class AnyTokens:
    """A structure that allows some tokens."""

    tokens: frozenset[int]
    error: str = ""

    def allowed(self, _: Sequence[int]) -> NDArray[np.uint8]:
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
        bits[list(self.tokens)] = 1
        return np.packbits(bits, bitorder="little")


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1e-9, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 5_000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 1 << 30),
    logprobs=st.sampled_from([None, 0, 1, 5, 20]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-9, 9, width=32), max_size=4),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    min_tokens=st.sampled_from([0, 3]),
)
TIMESTAMPS = st.builds(
    TimestampRules,
    begin_id=st.integers(VOCABULARY - 900, VOCABULARY - 1),
    no_timestamps_id=st.just(VOCABULARY - 1_000),
    max_initial=st.sampled_from([None, 0, 50]),
)
NO_RULES = LogitRules()
RULES = st.builds(
    LogitRules,
    suppress=st.lists(TOKENS, max_size=5, unique=True).map(tuple),
    begin_suppress=st.lists(TOKENS, max_size=3).map(tuple),
    allowed=st.none() | st.lists(TOKENS, max_size=40, unique=True).map(tuple),
    timestamps=st.none() | TIMESTAMPS,
    min_tokens=st.sampled_from([0, 4]),
    no_repeat_ngram=st.sampled_from([0, 1, 2]),
    forced=st.sampled_from([(), (), ((0, 77),), ((2, 78),)]),
)
INPUTS = st.builds(
    SamplerInput,
    generated=st.lists(TOKENS, max_size=5),
    sampling=SAMPLINGS,
    rules=st.just(NO_RULES) | RULES,
    guide=st.none() | st.builds(AnyTokens, st.frozensets(TOKENS, max_size=30)),
    prompt=st.lists(TOKENS, max_size=3).map(tuple),
)
BEAMS = st.builds(
    SamplerInput, generated=st.lists(TOKENS, max_size=5), sampling=st.just(SamplingParams(beam_size=5)), rules=RULES
)


def drawn(one: SamplerInput, **changes: Any) -> Draw:
    return evolve(draw_of(one, ConstantBans(VOCABULARY), (EOS,)), **changes)


QUESTIONS = st.one_of(
    INPUTS.map(drawn),
    st.builds(drawn, BEAMS, choice=st.just(Choice.BEAM), told=st.integers(2, 10), total=st.floats(-9, 0, width=32)),
    st.just(NOTHING),
)
DRAWS = st.builds(lambda draw, asked: evolve(draw, asked=asked), QUESTIONS, st.lists(TOKENS, max_size=5).map(tuple))


def assert_alike(runner: Runner, fed: Sequence[int], draws: Sequence[Draw]) -> None:
    """The answers of torch, to the library's own logits, and those of the library."""
    rows = Rows.all_of(len(fed))
    expected, found = choose(runner.step(fed, rows), draws), runner.choose(fed, rows, draws)
    for draw, theirs, ours in zip(draws, expected, found, strict=True):
        if draw.choice is Choice.TOKEN:
            assert ours.token == theirs.token or math.isnan(theirs.logprob)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4, nan_ok=True)
        assert [token for token, *_ in ours.found] == [token for token, *_ in theirs.found]
        for place in (1, 2):
            assert [one[place] for one in ours.found] == pytest.approx([one[place] for one in theirs.found], abs=1e-4)
        assert ours.asked == pytest.approx(theirs.asked, abs=1e-4)


@settings(max_examples=120)
@given(
    asked=st.lists(st.tuples(TOKENS, DRAWS), min_size=1, max_size=12),
    dtype=st.sampled_from([None, torch.float16, torch.bfloat16, torch.int8, PAIRS]),
    level=st.sampled_from([1, 3, 4, 5]),
)
def test_the_library_answers_as_torch_does(
    asked: list[tuple[int, Draw]], dtype: torch.dtype | str | None, level: int
) -> None:
    """Tokens by every rule, beams, and what is asked; in one call, or in several of ``MOST_ROWS`` rows."""
    with running(table(dtype), torch.zeros(VOCABULARY), level=level) as runner:
        assert_alike(runner, [token for token, _ in asked], [draw for _, draw in asked])


@settings(max_examples=60)
@given(
    asked=st.lists(st.tuples(TOKENS, SAMPLINGS, st.integers(0, 9)), min_size=1),
    level=st.sampled_from([1, 3, 4]),
)
def test_of_equal_logits_the_first_is_the_likeliest(asked: list[tuple[int, SamplingParams, int]], level: int) -> None:
    draws = [
        drawn(SamplerInput(generated=[0] * length, sampling=evolve(one, logprobs=None, logit_bias=()), rules=NO_RULES))
        for _, one, length in asked
    ]
    bias = torch.where(torch.arange(VOCABULARY) % 3 == 0, 40.0, 0.0)
    with running(table(None), bias, level=level) as runner:
        assert_alike(runner, [token for token, *_ in asked], draws)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize(
    "draw",
    [
        Draw(),
        Draw(temperature=1.0, told=2),
        Draw(choice=Choice.BEAM, told=2),
        Draw(choice=Choice.NOTHING, asked=(3, 4)),
    ],
)
def test_what_is_broken_has_no_log_probability(broken: float, draw: Draw) -> None:
    bias = torch.zeros(VOCABULARY)
    bias[VOCABULARY - 1] = broken
    with running(table(None), bias) as runner:
        (told,) = runner.choose([3], Rows.all_of(1), [draw])
    assert math.isnan(told.logprob)
    assert all(map(math.isnan, told.asked))
    assert all(math.isnan(logprob) for *_, logprob in told.found)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_search_whose_logits_are_broken_finds_no_candidates(broken: float) -> None:
    """It fails, and does not win by a score that nobody has computed."""
    bias = torch.zeros(VOCABULARY)
    bias[VOCABULARY - 1] = broken
    draws, rows = [Draw(choice=Choice.BEAM, told=4)] * 2, Rows.all_of(2)
    with running(table(None), bias) as runner:
        for chosen in (choose(runner.step([3, 4], rows), draws), runner.choose([3, 4], rows, draws)):
            assert merge([one.found for one in chosen], 4) == []


def test_pages_are_copied_before_all_else() -> None:
    pages = torch.arange(3 * 5 * 2 * 8, dtype=torch.float32).view(3, 5, 2, 8)
    expected = pages.clone()
    expected[:, [4, 0]] = pages[:, [1, 2]]
    rows = Rows(positions=[0], chunks=[(1, 0, 0, 0)], tables=[3], wanted=[0])
    with running(table(None), torch.zeros(VOCABULARY), pages=pages) as runner:
        runner.choose([3], rows, [NOTHING], [(1, 4), (2, 0)])
        assert torch.equal(pages, expected)
        with pytest.raises(EngineError, match="page"):
            runner.choose([3], rows, [NOTHING], [(1, 5)])
        assert torch.equal(pages, expected)


def test_a_token_that_is_none_is_refused() -> None:
    with running(table(None), torch.zeros(VOCABULARY)) as runner:
        for token in (-1, VOCABULARY):
            with pytest.raises(EngineError, match="token"):
                runner.choose([token], Rows.all_of(1), [NOTHING])


@pytest.mark.parametrize(
    "draw",
    [
        Draw(edits=[(VOCABULARY, Change.ADDED, 1.0)]),
        Draw(edits=[(-1, Change.ADDED, 1.0)]),
        Draw(bans=[(0, VOCABULARY + 1)]),
        Draw(bans=[(5, 4)]),
        Draw(bans=[(-1, 4)]),
        Draw(allowed=bytes(VOCABULARY // 8)),
        Draw(timestamps=VOCABULARY + 1),
        Draw(timestamps=-1),
        Draw(asked=(VOCABULARY,)),
    ],
    ids=repr,
)
def test_a_draw_that_leaves_the_tokens_is_refused(draw: Draw) -> None:
    with running(table(None), torch.zeros(VOCABULARY)) as runner, pytest.raises(EngineError, match="draw"):
        runner.choose([3], Rows.all_of(1), [draw])

"""What the native library chooses is what torch chooses of its logits: tokens, candidates of beams, probes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from triolet.core.beams import Candidate
from triolet.core.errors import EngineError
from triolet.core.plan import SequenceStart
from triolet.core.request import LogitRules, SamplingParams, TimestampRules
from triolet.models.memory.rows import Rows
from triolet.models.native.draws import NOTHING, Draw
from triolet.models.native.library import Change, Choice, Ending, Library
from triolet.models.native.panels import Panels
from triolet.models.native.program import Normed, Program
from triolet.models.native.runner import Runner
from triolet.models.sampling.answers import Answers, Asked, answers_of, draws_of
from triolet.models.sampling.beams import Search
from triolet.models.sampling.logits import choose
from triolet.models.sampling.rules import ConstantBans, SamplerInput

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

VOCABULARY, HIDDEN, SCALE, MOST_ROWS, EOS = 1_997, 48, 1.5, 7, 9
TOKENS = st.integers(0, VOCABULARY - 1)
POSITIONS = torch.randn(99, HIDDEN, generator=torch.Generator().manual_seed(3))


def table(dtype: torch.dtype | None) -> Panels:
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    return Panels.of(weight, dtype=dtype)


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
    rules=st.just(LogitRules()) | RULES,
    guide=st.none() | st.builds(AnyTokens, st.frozensets(TOKENS, max_size=30)),
    prompt=st.lists(TOKENS, max_size=3).map(tuple),
)


def searching(size: int, beams: int) -> Search:
    """A search that has as many beams as ``beams``."""
    sampling = SamplingParams(beam_size=size)
    start = SequenceStart(
        sequence_id=1, token_ids=(1, 2), prompt_length=2, sampling=sampling, rules=LogitRules(), probe=None,
        max_tokens=50, stops=frozenset({EOS}),
    )  # fmt: skip
    search = Search.of(start, 16)
    search.advance([Candidate(0, 100 + one, -0.5 * one, -0.5) for one in range(beams)])
    return search


@st.composite
def questions(draw: st.DrawFn) -> Asked:
    searches = [searching(size, draw(st.integers(1, size))) for size in draw(st.lists(st.integers(2, 5), max_size=2))]
    rules = st.builds(LogitRules) | RULES
    beams = [
        SamplerInput(generated=list(beam.token_ids), sampling=SamplingParams(beam_size=5), rules=ruled)
        for search in searches
        for ruled in [draw(rules)]
        for beam in search.state.beams
    ]
    tokens, asked = draw(st.lists(INPUTS, max_size=9)), draw(st.lists(st.lists(TOKENS, max_size=5).map(tuple)))
    shared, behind = draw(st.integers(0, min(len(tokens), len(asked)))), len(tokens) + len(beams)
    probes = [(row if row < shared else behind + row - shared, ids) for row, ids in enumerate(asked)]
    return Asked(tokens=tokens, beams=beams, searches=searches, probes=probes)


def answers_by(runner: Runner, fed: Sequence[int], asked: Asked) -> tuple[Answers, Answers]:
    """Those of torch, of the library's own logits; and the library's."""
    rows, draws = Rows.all_of(len(fed)), draws_of(asked, ConstantBans(VOCABULARY), (EOS,))
    by_torch, by_library = choose(runner.step(fed, rows), draws), runner.choose(fed, rows, draws)
    return answers_of(by_torch, asked, (EOS,)), answers_of(by_library, asked, (EOS,))


def assert_alike(expected: Answers, found: Answers) -> None:
    for ours, theirs in zip(found.tokens, expected.tokens, strict=True):
        assert (ours.token_id, ours.error) == (theirs.token_id, theirs.error) or math.isnan(theirs.logprob)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4, nan_ok=True)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [one for _, one in ours.top] == pytest.approx([one for _, one in theirs.top], abs=1e-4)
    for ours, theirs in zip(found.candidates, expected.candidates, strict=True):
        assert [(one.beam, one.token_id) for one in ours] == [(one.beam, one.token_id) for one in theirs]
        for name in ("total", "logprob"):
            assert [getattr(one, name) for one in ours] == pytest.approx(
                [getattr(one, name) for one in theirs], abs=1e-4
            )
    for ours, theirs in zip(found.probes, expected.probes, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@settings(max_examples=120)
@given(asked=questions(), dtype=st.sampled_from([None, torch.float16, torch.bfloat16, torch.int8]), data=st.data())
def test_the_library_answers_as_torch_does(asked: Asked, dtype: torch.dtype | None, data: st.DataObject) -> None:
    """Tokens by every rule, candidates of searches, probes; in one call, or in several of ``MOST_ROWS`` rows."""
    count = max([len(asked.tokens) + len(asked.beams), *(row + 1 for row, _ in asked.probes)])
    if not count:
        return
    fed = data.draw(st.lists(TOKENS, min_size=count, max_size=count))
    with running(table(dtype), torch.zeros(VOCABULARY), level=data.draw(st.sampled_from([1, 3, 4]))) as runner:
        assert_alike(*answers_by(runner, fed, asked))


@settings(max_examples=60)
@given(
    asked=st.lists(st.tuples(TOKENS, SAMPLINGS, st.integers(0, 9)), min_size=1),
    level=st.sampled_from([1, 3, 4]),
)
def test_of_equal_logits_the_first_is_the_likeliest(asked: list[tuple[int, SamplingParams, int]], level: int) -> None:
    inputs = [
        SamplerInput(
            generated=[0] * length, sampling=evolve(sampling, logprobs=None, logit_bias=()), rules=LogitRules()
        )
        for _, sampling, length in asked
    ]
    bias = torch.where(torch.arange(VOCABULARY) % 3 == 0, 40.0, 0.0)
    with running(table(None), bias, level=level) as runner:
        questions = Asked(tokens=inputs, beams=(), searches=(), probes=())
        assert_alike(*answers_by(runner, [token for token, *_ in asked], questions))


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
    bias, search = torch.zeros(VOCABULARY), searching(4, 2)
    bias[VOCABULARY - 1] = broken
    beams = [SamplerInput(generated=[1], sampling=SamplingParams(beam_size=4), rules=LogitRules()) for _ in range(2)]
    with running(table(None), bias) as runner:
        asked = Asked(tokens=(), beams=beams, searches=[search], probes=())
        expected, found = answers_by(runner, [3, 4], asked)
    assert expected.candidates == found.candidates == [[]]


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

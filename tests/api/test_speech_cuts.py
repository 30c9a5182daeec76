"""Where windows are cut, which stretches a plan reads, and what became of every second: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.outputs.results import Stretch
from triolet.api.speech.plan import MOST_WINDOWS, Clips, CutRules, Plan, next_speech, window_at
from triolet.api.speech.transcription import coverage

from .speech import EVERYTHING, PaperHearing, plain

Span = tuple[int, int]


def rules(**changes: int) -> CutRules:
    return CutRules(**{"window": 100, "gap": 20, "padding": 4, "earliest": 60, **changes})


# ---- one window ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seek", "spans", "changed", "window"),
    [
        # nobody speaks
        (0, [], {}, None),
        # nobody speaks any more
        (50, [(10, 50)], {}, None),
        # speech with its padding
        (0, [(10, 50)], {}, (6, 54)),
        # no padding before the audio, nor before what was read
        (0, [(2, 50)], {}, (0, 54)),
        (9, [(10, 50)], {}, (9, 54)),
        # from the middle of speech
        (30, [(10, 50)], {}, (30, 54)),
        # a short pause is read
        (0, [(10, 30), (45, 80)], {}, (6, 84)),
        # a long one ends the window
        (0, [(10, 30), (50, 80)], {}, (6, 34)),
        # a pause of just the gap is long
        (0, [(10, 30), (49, 80)], {"gap": 20}, (6, 84)),
        # padding is cut at the window's length
        (0, [(4, 99)], {}, (0, 100)),
        # speech that goes on: cut at the middle of its longest pause
        (0, [(4, 70), (74, 90), (92, 150)], {}, (0, 72)),
        # ... behind the earliest cut
        (0, [(4, 30), (40, 75), (77, 150)], {}, (0, 76)),
        # ... of a pause that begins before it, the part behind
        (0, [(4, 50), (68, 150)], {}, (0, 64)),
        # ... of a pause that ends behind the window, the part within
        (0, [(4, 90), (108, 150)], {}, (0, 95)),
        # ... a pause before the earliest cut is none
        (0, [(4, 30), (40, 150)], {}, (0, 100)),
        # no pause: the full length, and timestamps tell where to go on
        (0, [(4, 150)], {}, (0, 100)),
        # a long pause ends the window, although there is a longer one behind it
        (0, [(4, 50), (70, 75), (98, 150)], {}, (0, 54)),
    ],
)
def test_a_window_is_cut(seek: int, spans: Sequence[Span], changed: dict[str, int], window: Span | None) -> None:
    assert window_at(seek, spans, rules(**changed)) == window


# ---- all windows -----------------------------------------------------------------------------------------------------


@st.composite
def speech(draw: st.DrawFn, most: int = 60) -> list[Span]:
    """Stretches of speech with silence between."""
    at, found = draw(st.integers(0, most)), list[Span]()
    for length, pause in draw(st.lists(st.tuples(st.integers(1, 3 * most), st.integers(1, most)), max_size=8)):
        found.append((at, at + length))
        at += length + pause
    return found


@st.composite
def all_rules(draw: st.DrawFn) -> CutRules:
    window = draw(st.integers(30, 100))
    gap = draw(st.integers(3, 40))
    return CutRules(
        window=window,
        gap=gap,
        padding=draw(st.integers(0, gap // 2)),
        earliest=draw(st.integers(gap // 2 + 1, window - 1)),
    )


def windows_from(seek: int, spans: Sequence[Span], chosen: CutRules) -> list[Span]:
    found: list[Span] = []
    while (window := window_at(seek, spans, chosen)) is not None:
        assert window[1] > seek, f"{window} leads nowhere"
        found.append(window)
        seek = window[1]
    return found


def inside(spans: Sequence[Span]) -> set[int]:
    return {sample for start, stop in spans for sample in range(start, stop)}


@given(speech(), all_rules())
@settings(max_examples=120)
def test_windows_have_no_long_silence_and_are_cut_in_pauses(spans: list[Span], chosen: CutRules) -> None:
    """A window has only pauses shorter than the gap, and the padding. Where there is no pause behind the earliest cut,
    it has its full length."""
    for start, stop in windows_from(0, spans, chosen):
        within = [(max(a, start), min(b, stop)) for a, b in spans if b > start and a < stop]
        edges = [(start, start), *within, (stop, stop)]
        silences = [behind - before for (_, before), (behind, _) in pairwise(edges)]
        assert within, f"nobody speaks in {start, stop}"
        assert max(silences) < max(chosen.gap, chosen.padding + 1), f"silence of {max(silences)} in {start, stop}"
        if any(a < stop < b for a, b in spans):
            earliest, latest = start + chosen.earliest, start + chosen.window
            pauses = [(a, b) for (_, a), (b, _) in pairwise(spans) if a < latest and b > earliest and a >= start]
            assert not pauses, f"{start, stop} is cut inside of speech, although there are pauses {pauses}"
            assert stop == latest, f"{start, stop} is cut early, inside of speech"


# ---- plans -----------------------------------------------------------------------------------------------------------


@st.composite
def clips_of(draw: st.DrawFn, most: int = 900) -> Clips:
    edges = sorted(draw(st.sets(st.integers(0, most), min_size=0, max_size=6)))
    pairs = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=False)]
    return (*pairs, (edges[-1], math.inf)) if len(edges) % 2 else tuple(pairs) or EVERYTHING


def planned(plan: Plan, length: int, limit: float = math.inf, *, pieces: int = 0) -> list[Span]:
    """The windows of a whole walk, or its pieces of ``pieces`` windows, cut at the end of the audio."""
    found: list[Span] = []

    async def walk() -> None:
        seek = 0
        while (window := await (plan.piece(seek, pieces) if pieces else plan.next(seek, limit))) is not None:
            start, stop = window
            assert seek <= start < stop, f"{window} behind {seek}"
            if start >= length:
                return
            seek = min(stop, length)
            found.append((start, seek))
            if seek == length:
                return

    trio.run(walk)
    return found


@given(clips_of(), st.integers(1, 1_000), st.integers(20, 100), st.just(math.inf) | st.integers(1, 1_000))
@settings(max_examples=80)
def test_a_plain_plan_reads_the_clips_and_nothing_else(clips: Clips, length: int, window: int, limit: float) -> None:
    """Each sample of them once, up to the limit. Nobody listens, so that no pause is known: a piece is a window."""
    plan = plain(window, clips)
    found = planned(plan, length, limit)
    assert planned(plan, length, pieces=3) == planned(plan, length)
    end = min(length, limit)
    wanted = inside([(start, min(stop, end)) for start, stop in clips])
    read = [sample for start, stop in found for sample in range(start, stop)]
    assert set(read) == wanted, "not the clips"
    assert len(read) == len(set(read)), "a sample is read twice"
    assert all(stop - start <= window for start, stop in found)


@given(speech(), all_rules(), clips_of(), st.integers(1, 80), st.just(math.inf) | st.integers(1, 1_000))
@settings(max_examples=120)
def test_a_voiced_plan_reads_all_speech_of_the_clips_and_nothing_outside(
    spans: list[Span], chosen: CutRules, clips: Clips, block: int, limit: float
) -> None:
    """However little is known ahead, the windows are those that full knowledge gives."""
    length = spans[-1][1] + 7 if spans else 50
    end = min(length, limit)
    allowed = inside([(start, min(stop, end)) for start, stop in clips])
    hearing = PaperHearing(spans, length, block)
    found = planned(Plan(chosen, clips, hearing), length, limit)
    assert inside(found) <= allowed, "something outside of the clips is read"
    assert (inside(spans) & allowed) <= inside(found), "speech is not read"
    assert all(stop - start <= chosen.window for start, stop in found)
    known = PaperHearing(spans, length, length)
    assert found == planned(Plan(chosen, clips, known), length, limit), "it depends on what is known ahead"


@given(speech(), all_rules())
@settings(max_examples=80)
def test_nobody_listens_further_ahead_than_a_window_needs(spans: list[Span], chosen: CutRules) -> None:
    """So that a live recording is read as it comes."""
    length = spans[-1][1] + 500 if spans else 500
    hearing = PaperHearing(spans, length, 1)

    async def first() -> Span | None:
        return await Plan(chosen, EVERYTHING, hearing).next(0)

    window = trio.run(first)
    if window is not None:
        start = next_speech(spans, 0, 0)
        assert hearing.heard <= start + chosen.window + chosen.gap + chosen.padding


# ---- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "spans", "clips", "pieces"),
    [
        # a window that a pause ends is a piece
        (1, [(4, 70), (74, 150)], EVERYTHING, [(0, 72), (72, 154)]),
        # speech without a pause: windows together, up to its end
        (1, [(4, 250)], EVERYTHING, [(0, 254)]),
        # ... up to its first pause behind the earliest cut of a window
        (1, [(4, 180), (184, 250)], EVERYTHING, [(0, 182), (182, 254)]),
        # ... up to eight windows
        (1, [(4, 950)], EVERYTHING, [(0, 800), (800, 954)]),
        # a clip ends although somebody speaks
        (1, [(4, 950)], ((0, 50), (300, 340)), [(0, 50), (300, 340)]),
        # clips side by side are read together where somebody speaks across them
        (1, [(4, 95)], ((0, 50), (50, math.inf)), [(0, 99)]),
        # two windows
        (2, [(4, 70), (74, 150)], EVERYTHING, [(0, 154)]),
        (2, [(4, 70), (74, 150), (154, 240)], EVERYTHING, [(0, 152), (152, 244)]),
        # ... unless they lie too far apart
        (2, [(4, 70), (600, 650)], EVERYTHING, [(0, 74), (596, 654)]),
        # ... and up to a pause
        (2, [(4, 270), (274, 350)], EVERYTHING, [(0, 272), (272, 354)]),
    ],
)
def test_a_piece_is_cut(windows: int, spans: Sequence[Span], clips: Clips, pieces: list[Span]) -> None:
    length = spans[-1][1] + 50
    assert planned(Plan(rules(), clips, PaperHearing(spans, length)), length, pieces=windows) == pieces


@given(speech(), all_rules(), clips_of(), st.integers(1, 80))
@settings(max_examples=120)
def test_pieces_tile_the_speech_and_are_not_cut_in_its_middle(
    spans: list[Span], chosen: CutRules, clips: Clips, block: int
) -> None:
    """But where a clip ends, or behind so many full windows without a pause, since samples must be bounded."""
    length = spans[-1][1] + 7 if spans else 50
    allowed = inside([(start, min(stop, length)) for start, stop in clips])
    found = planned(Plan(chosen, clips, PaperHearing(spans, length, block)), length, pieces=1)
    assert inside(found) <= allowed, "something outside of the clips is read"
    assert (inside(spans) & allowed) <= inside(found), "speech is not read"
    for start, stop in found:
        assert stop - start <= MOST_WINDOWS * chosen.window, f"{start, stop} is too long"
        in_speech = any(a < stop < b for a, b in spans) and {stop - 1, stop} <= allowed
        several = any(start < edge < stop for clip in clips for edge in clip)
        if in_speech and not several:
            assert stop - start == MOST_WINDOWS * chosen.window, f"{start, stop} is cut inside of speech"
    known = PaperHearing(spans, length, length)
    assert found == planned(Plan(chosen, clips, known), length, pieces=1), "it depends on what is known ahead"


# ---- coverage --------------------------------------------------------------------------------------------------------

quarters = st.integers(0, 120).map(lambda count: count / 4)  # exact, so that equal means equal
Times = list[tuple[float, float]]


@st.composite
def apart(draw: st.DrawFn, most: float = 40.0) -> Times:
    edges = sorted({edge for edge in draw(st.lists(quarters, max_size=12)) if edge <= most})
    return list(zip(edges[::2], edges[1::2], strict=False))


@given(quarters, apart(), apart())
@settings(max_examples=120)
def test_coverage_tells_every_second_once(duration: float, told: Times, heard: Times) -> None:
    """Stretches tile the audio. Speech is where text is, failed where somebody speaks for long and no text is."""
    told = [(start, stop) for start, stop in told if stop <= duration]
    found = coverage(duration, told, heard)
    edges = [0.0, *(edge for one in found for edge in (one.start, one.end)), duration]
    assert all(a == b for a, b in zip(edges[::2], edges[1::2], strict=True)), f"they do not tile: {found}"
    assert all(one.start < one.end for one in found), f"an empty stretch: {found}"
    assert all(a.kind != b.kind for a, b in pairwise(found)), f"neighbours are alike: {found}"
    for quarter in range(round(duration * 4)):
        moment = quarter / 4 + 0.125
        kind = next(one.kind for one in found if one.start <= moment < one.end)
        assert (kind == "speech") == any(a <= moment < b for a, b in told), f"{kind} at {moment}"
        if kind == "failed":
            assert any(a <= moment < b for a, b in heard), f"nobody speaks at {moment}"
    for one in found:
        assert one.kind != "failed" or one.end - one.start >= 1.0, f"too short to tell: {one}"


@pytest.mark.parametrize(
    ("told", "heard", "kinds"),
    [
        ([], [], [(10, "silent")]),
        ([(0, 10)], [], [(10, "speech")]),
        ([(2, 4), (4, 6)], [], [(2, "silent"), (6, "speech"), (10, "silent")]),
        ([(2, 4)], [(1.5, 8)], [(2, "silent"), (4, "speech"), (8, "failed"), (10, "silent")]),
        ([(2, 4)], [(1, 4.5)], [(1, "silent"), (2, "failed"), (4, "speech"), (10, "silent")]),
        ([(2, 4)], [(6, 6.5), (7, 9)], [(2, "silent"), (4, "speech"), (7, "silent"), (9, "failed"), (10, "silent")]),
        ([], [(0, 20)], [(10, "failed")]),
        ([(9, 10)], [(0, 10)], [(9, "failed"), (10, "speech")]),
    ],
)
def test_coverage(told: Times, heard: Times, kinds: list[tuple[float, str]]) -> None:
    starts = [0.0, *(end for end, _ in kinds)]
    expected = tuple(Stretch(start=at, end=end, kind=kind) for at, (end, kind) in zip(starts, kinds, strict=False))
    assert coverage(10.0, told, heard) == expected
    assert not coverage(0.0, [], [(0.0, math.inf)])

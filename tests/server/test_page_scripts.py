"""The parts of the page that know no screen, run by a browser: what is known of the server, and who gets which lane."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.core import events as e
from triolet.core.overview import Overview
from triolet.server.view import messages as view
from triolet.server.view.page import plain
from triolet.server.view.watchers import Watchers

from .browsing import chromium

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.real_time]

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs code behind a script: ``run("lanes.js", code, argument)``; ``code`` is a function of the argument."""
    with chromium() as opened, opened("about:blank") as page:

        def run(script: str | tuple[str, ...], code: str, argument: Any) -> Any:
            scripts = (script,) if isinstance(script, str) else script
            place = files(view.__package__) / "page"
            text = "\n".join(plain((place / one).read_text(encoding="utf-8")) for one in scripts)
            return page.evaluate(f"(argument) => {{ {text}\nreturn ({code})(argument); }}", argument)

        yield run


# -- server-sent events ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2), max_size=4),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_found_however_the_answer_is_cut(run: Run, sent: list[Any], cuts: list[int], end: str) -> None:
    text = "".join(f"event: x{end}data: {json.dumps(one)}{end}{end}" for one in sent)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[begin:stop] for begin, stop in itertools.pairwise(places)]
    code = "(parts) => { const cutter = new EventCutter(); return parts.flatMap((part) => cutter.cut(part)); }"
    assert [json.loads(one) for one in run("event_reader.js", code, parts)] == sent


# -- Markdown ----------------------------------------------------------------------------------------------------------

_RENDERED = """
(texts) => texts.map((text) => {
  const place = element("div", {}, ...rendered(text));
  const all = [...place.querySelectorAll("*")];
  const links = all.filter((one) => one.hasAttribute("href")).map((one) => one.getAttribute("href"));
  return { html: place.innerHTML, tags: all.map((one) => one.localName), links };
})
"""
_TAGS = {"p", "pre", "code", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li", "div", "table", "thead"}
_TAGS |= {"tbody", "tr", "th", "td", "strong", "em", "s", "a"}


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** `d*e*` ~~f~~", "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code> <s>f</s></p>"),
        ("2 * 3 * 4, snake_case_name, \\*no\\*", "<p>2 * 3 * 4, snake_case_name, *no*</p>"),
        ("## A\nb\nc", "<h4>A</h4><p>b\nc</p>"),
        ("1. a\n   - b\n2. c", '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>'),
        ("```py\na < b\n\n# c\n```\nd", '<pre tabindex="0"><code>a &lt; b\n\n# c</code></pre><p>d</p>'),
        ("## A ## #", "<h4>A ##</h4>"),
        ("```x```\ny", "<p><code>x</code>\ny</p>"),
        ("```\nstill open", '<pre tabindex="0"><code>still open</code></pre>'),
        ("> a\n> b\n\n---", "<blockquote><p>a\nb</p></blockquote><hr>"),
        (
            "| a | b |\n|---|:-:|\n| 1 | x \\| y |",
            '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
            "<tbody><tr><td>1</td><td>x | y</td></tr></tbody></table></div>",
        ),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        (
            "[a](https://x.org/b) [c](javascript:d)",
            '<p><a href="https://x.org/b" target="_blank" rel="noopener noreferrer">a</a> [c](javascript:d)</p>',
        ),
    ],
)
def test_markdown_becomes_elements(run: Run, text: str, html: str) -> None:
    [found] = run(("dom.js", "markdown.js"), _RENDERED, [text])
    assert found["html"] == html


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(st.sampled_from('ab1 \n*_`~#>-|[]()<&\\:/."htps'), max_size=60), max_size=20))
def test_no_text_makes_other_elements_or_leads_elsewhere(run: Run, texts: list[str]) -> None:
    for found in run(("dom.js", "markdown.js"), _RENDERED, texts):
        assert set(found["tags"]) <= _TAGS
        assert all(link.startswith(("http://", "https://")) for link in found["links"])


def test_a_text_of_marks_alone_takes_no_time(run: Run) -> None:
    """Whatever is opened and never closed is looked for in a part of the text."""
    texts = [mark * 20_000 for mark in ("**a ", "`", "[", "_a ", "~~a", "> ", "- ", "|-", "| -", "\\", "```\n")]
    texts += ["# a" + " " * 20_000 + "b", "a|b\n|" + " " * 20_000 + "-"]
    assert len(run(("dom.js", "markdown.js"), _RENDERED, texts)) == len(texts)


# -- failures ----------------------------------------------------------------------------------------------------------

_FAILED = """
(ids) => {
  const world = new World();
  for (const id of ids) fail(world, { model: "m", at: 0, id, text: "no" });
  return world.failures.map(({ id }) => id);
}
"""


def test_a_failure_of_the_page_counts_once_and_those_of_others_each(run: Run) -> None:
    told = ["page-00aa", "page-00aa#1", "mine", "mine", "", ""]
    assert run(("api.js", "world.js"), _FAILED, told) == ["", "", "mine", "mine", "page-00aa"]


# -- lanes -------------------------------------------------------------------------------------------------------------

_PLACE = """
({ least, most, lives }) => {
  const lanes = new Lanes(least, most);
  const tracks = lives.map(([from, to]) => ({ from, end: to, to: null, get isActive() { return this.to === null; } }));
  const told = [];
  for (let now = 0; now < 40; now += 0.5) {
    for (const track of tracks) if (track.end <= now) track.to = track.end;
    const known = tracks.filter((track) => track.from <= now && (track.isActive || track.to > now - 10));
    lanes.place(known);
    told.push({
      rows: lanes.rows.map((row) => row.map((track) => tracks.indexOf(track))),
      active: known.filter((track) => track.isActive).map((track) => tracks.indexOf(track)),
      hidden: lanes.hidden,
    });
  }
  return told;
}
"""
LIVES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=25).map(
    lambda pairs: sorted((begin / 2, (begin + length) / 2) for begin, length in pairs)
)


@settings(deadline=None, max_examples=40)
@given(LIVES, st.integers(1, 3), st.integers(0, 3))
def test_a_track_keeps_its_lane_while_any_runs_and_two_that_run_have_two(
    run: Run, lives: list[tuple[float, float]], least: int, more: int
) -> None:
    lane_of: dict[int, int] = {}
    for moment in run("lanes.js", _PLACE, {"least": least, "most": least + more, "lives": lives}):
        rows, active = moment["rows"], set(moment["active"])
        if not active:
            full = sum(map(bool, rows))
            assert all(rows[:full]), "lanes close up"
            lane_of.clear()
        assert least <= len(rows) <= least + more
        for number, row in enumerate(rows):
            assert len(active & set(row)) <= 1
            assert active & set(row[:-1]) == set(), "one that runs is the last of its lane"
            for track in row:
                assert lane_of.setdefault(track, number) == number
        shown = {track for row in rows for track in row}
        assert moment["hidden"] == len(active - shown)
        assert not moment["hidden"] or all(row and row[-1] in active for row in rows), "a lane is free, and one waits"


# -- the world ---------------------------------------------------------------------------------------------------------

_TAKE = """
(messages) => {
  const world = new World();
  for (const one of messages) world.take(one);
  const plain = ({ id, model, stage, tokens, error, segments }) => ({ id, model, stage, tokens, error, segments });
  return {
    works: world.works.map(plain),
    entries: world.entries.map(({ id, stage, to }) => ({ id, stage, to })),
    failures: world.failures,
    lost: world.lost,
  };
}
"""


def messages(*happened: e.Event, model: str = "m") -> list[view.Message]:
    """What a watcher from the beginning on gets of ``happened``."""
    watchers = Watchers()
    first = view.state_message({}, 1, 0.0)
    with watchers.joined() as watcher:
        for event in happened:
            watchers.hear(model, event)
        now = max((event.time for event in happened), default=0.0)
        return [first, view.message("changes", now, changes=watcher.take()[1])]


def test_the_windows_of_one_recording_are_one_piece_of_work(run: Run) -> None:
    """Its stages follow each other, its tokens are added up."""
    life: list[e.Event] = []
    for window, begin in enumerate((1.0, 2.0)):
        name = f"r#0/{window}"
        life += [e.RequestQueued(name, time=begin), e.RequestStarted(name, 3, time=begin + 0.1)]
        for step in range(3):
            life += [e.StepBegun(step, (name,), (), (), 1, (name,)), e.StepEnded(step, ok=True, time=begin + 0.2)]
        life.append(e.RequestEnded(name, "finished", time=begin + 0.9))
    (work,) = run(("api.js", "world.js"), _TAKE, messages(*life))["works"]
    assert (work["id"], work["stage"], work["tokens"]) == ("r#0", "finished", 6)
    assert [(one["stage"], one["from"], one["to"]) for one in work["segments"]] == [
        ("queued", 1.0, 1.1), ("reading", 1.1, 1.2), ("decoding", 1.2, 1.9),
        ("queued", 2.0, 2.1), ("reading", 2.1, 2.2), ("decoding", 2.2, 2.9),
    ]  # fmt: skip


def test_requests_of_one_work_at_the_same_time_are_two_lanes(run: Run) -> None:
    both = [e.RequestQueued(f"r#0/{number}", time=1.0) for number in (1, 2)]
    assert [work["stage"] for work in run(("api.js", "world.js"), _TAKE, messages(*both))["works"]] == [
        "queued",
        "queued",
    ]


def test_after_a_loss_the_state_counts(run: Run) -> None:
    """What ended in between is over, as it ended where that is known; what is new is there with its beginning, and the
    rest goes on."""
    queued = [e.RequestQueued(name, time=1.0) for name in "abd"]
    state = Overview()
    for event in (*queued[1:], e.RequestQueued("c", time=2.0), e.RequestStarted("c", 3, time=3.0)):
        state(event)
    state(e.RequestEnded("d", "aborted", time=3.5))
    before = messages(*queued, e.EntryReserved("k", 3, time=1.0))
    after = [view.message("lost", 4.0, count=5), view.state_message({"m": state}, 1, 4.0)]
    known = run(("api.js", "world.js"), _TAKE, [*before, *after])
    assert {work["id"]: work["stage"] for work in known["works"]} == {
        "a": "unknown", "b": "queued", "c": "reading", "d": "aborted"
    }  # fmt: skip
    (new,) = [work for work in known["works"] if work["id"] == "c"]
    assert [(one["stage"], one["from"]) for one in new["segments"]] == [("queued", 2.0), ("reading", 3.0)]
    assert known["entries"] == [{"id": "k", "stage": "absent", "to": 4.0}]
    assert known["lost"] == 5


_RATES = """
({ counts, span }) => {
  const of = (tokens) => ({ m: { engine: tokens === null ? null : { tokens } } });
  const samples = counts.map((tokens, index) => ({ now: index / 4, models: of(tokens) }));
  return samples.map((_, index) => growth(samples, index, () => true, (engine) => engine.tokens, span));
}
"""


def test_a_rate_is_that_of_the_last_seconds_and_never_negative(run: Run) -> None:
    """A model that was loaded again counts from 0."""
    counts = [None, 0, 10, 20, 30, 30, 30, 30, 5, 5]
    rates = run(("api.js", "world.js"), _RATES, {"counts": counts, "span": 1})
    assert rates == [0, 0, 20, 80 / 3, 30, 30, 20, 10, 0, 0]

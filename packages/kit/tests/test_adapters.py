"""The adapters of other engines: they are as short as the pages say, and each runs where its engine is installed."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from triolet_kit import Findings, SchedulerDeclaration, examine_scheduler, examine_steps
from triolet_kit.findings import BrokenPromise
from triolet_kit.schedulers import PROMISES, Item, Limits, NewRequest, SchedulerWorkload, play_scheduler

from .test_docs_page import table

ROOT = Path(__file__).resolve().parents[3]
ADAPTERS = ROOT / "packages" / "kit" / "adapters"
PAGE = (ROOT / "docs" / "check_your_scheduler.md").read_text(encoding="utf-8")
CACHE_PAGE = (ROOT / "docs" / "adapt_your_cache.md").read_text(encoding="utf-8")


def lines_of_code(source: str) -> int:
    """Without imports, comments and docstrings."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in left_out for number, line in lines)


# -- the pages -------------------------------------------------------------------------------------------------------


def test_the_table_of_lengths_is_true_of_all_adapters() -> None:
    told = {name: int(lines) for row in table("adapter", PAGE) for name, lines in [(row[0].split("`")[1], row[2])]}
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ADAPTERS.glob("*.py")}
    assert told == {name: lines_of_code(source) for name, source in sources.items()}
    assert told["packages/kit/adapters/nano_vllm.py"] <= 30


def test_the_pages_show_the_adapters_as_they_are() -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown == (ADAPTERS / "nano_vllm.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```", CACHE_PAGE, re.MULTILINE | re.DOTALL)
    assert (ADAPTERS / "vllm_encoder_cache.py").read_text(encoding="utf-8").endswith(shown)


def test_the_tables_of_the_scheduler_protocol_are_those_of_the_kit() -> None:
    assert [row[0] for row in table("promise", PAGE)] == [promise.name for promise in PROMISES]
    words = {"True": "yes", "False": "no"}
    defaults = {one.name: str(one.default) for one in SchedulerDeclaration.__attrs_attrs__}
    told = [(row[0].strip("`"), row[1].strip("`")) for row in table("option", PAGE)]
    assert told == [(name, words.get(default, default)) for name, default in defaults.items()]


def test_the_script_examines_the_commits_of_the_table() -> None:
    script = (ADAPTERS / "reproduce.sh").read_text(encoding="utf-8")
    commits = [row[0].split(",")[0] for row in table("commit", PAGE) if row[0]]
    assert f"${{*:-{' '.join(commits)}}}" in script


# -- the engines -----------------------------------------------------------------------------------------------------


def needs(module: str) -> pytest.MarkDecorator:
    there = find_spec(module) is not None
    return pytest.mark.skipif(
        not there, reason=f"{module} is not installed; the adapter's docstring says what it needs"
    )


def names(findings: Findings) -> list[str]:
    return [finding.name for finding in findings]


@needs("nanovllm")
def test_nothing_is_found_in_nano_vllm() -> None:
    from nano_vllm import DECLARED, NanoVllm

    examine_scheduler(NanoVllm, DECLARED, workloads=300).raise_if_any()


@needs("minisgl")
@pytest.mark.parametrize("overlapped", [False, True])
def test_mini_sglang_gives_pages_back_too_early(overlapped: bool) -> None:
    """Bugs of commit 20fcd7f, see docs/verification.md. When this fails, they are mended there."""
    from mini_sglang import DECLARED, IGNORED, OVERLAP, MiniSglang

    found = examine_scheduler(MiniSglang, OVERLAP if overlapped else DECLARED, workloads=50, ignore=IGNORED)
    assert names(found) == ["no page is given away in use"]


@needs("lmdeploy")
def test_lmdeploy_appends_anothers_page_behind_its_own() -> None:
    """A bug of commit 1263d5cd8, see docs/verification.md. When this fails, it is mended there."""
    from lmdeploy_scheduler import DECLARED, Lmdeploy

    asked = [((2,), 5), ((1,), 1), ((1,), 2), ((2, 3, 3, 3), 1), ((2, 3, 3, 3, 1), 1)]
    workload = SchedulerWorkload(
        limits=Limits(pages=3, page_size=4, max_step_tokens=16, max_running=2, room=0, steps_in_flight=2),
        requests=tuple(NewRequest(id=f"r{at}", tokens=one, max_tokens=most) for at, (one, most) in enumerate(asked)),
        operations=(*(("ask", number) for number in range(5)), *(("run", 0),) * 9),
    )
    with pytest.raises(BrokenPromise, match=r"r4 takes page 1 .* r0 has written its position 4 into page 1"):
        play_scheduler(Lmdeploy, workload, evolve(DECLARED, overlaps=True))


@needs("vllm")
def test_vllms_encoder_cache_keeps_its_promises_under_its_default_policy() -> None:
    from vllm_encoder_cache import DECLARED, EncoderCache

    examine_steps(EncoderCache, DECLARED, workloads=300, ignore=["encode once"]).raise_if_any()


@needs("vllm")
def test_vllms_policy_priority_lists_as_cached_what_it_has_called_off() -> None:
    """When this fails, it is mended in vLLM: docs/adapt_your_cache.md and docs/verification.md."""
    from vllm_encoder_cache import PRIORITY, EncoderCache

    found = examine_steps(EncoderCache, PRIORITY, workloads=300, ignore=["encode once"])
    assert names(found) == ["no phantom: after a preemption"]


@needs("vllm")
def test_vllms_cache_of_encoder_decoders_gives_back_what_it_never_took() -> None:
    """A bug of vLLM 0.32 (issue 55733), and the only one. When this fails, it is mended in vLLM: the same pages."""
    from vllm_encoder_cache import DECODER, EncoderDecoderCache

    class Once(EncoderDecoderCache.make_manager):  # type: ignore[misc,name-defined]
        """Gives back what was taken, once."""

        def __init__(self, cache_size: int) -> None:
            super().__init__(cache_size)
            self.taken = set[str]()

        def allocate(self, request: Any, input_id: int) -> None:
            super().allocate(request, input_id)
            self.taken.add(request.request_id)

        def free_encoder_input(self, request: Any, input_id: int) -> None:
            if request.request_id in self.taken:
                self.taken.remove(request.request_id)
                super().free_encoder_input(request, input_id)

        def reset(self) -> None:
            super().reset()
            self.taken.clear()

    class Mended(EncoderDecoderCache):
        make_manager = Once

    assert "room is kept" in names(examine_steps(EncoderDecoderCache, DECODER, workloads=100))
    examine_steps(Mended, DECODER, workloads=300).raise_if_any()


@needs("vllm")
def test_nothing_is_found_in_vllms_scheduler_under_its_default_policy() -> None:
    from vllm_scheduler import DECLARED, VllmScheduler

    examine_scheduler(VllmScheduler, DECLARED, workloads=100, ignore=["encode once"]).raise_if_any()


@needs("vllm")
@pytest.mark.parametrize(
    ("items", "broken"),
    [
        ((), "prefix hits are what was computed: r0 counts position 4, in page 8, as computed, but nobody computed it"),
        ((Item("i0", 1, 5, 1),), "no use before ready: r0 reads i0 at position 5, and it was never encoded"),
    ],
)
def test_vllms_policy_priority_goes_on_after_a_chunk_that_was_called_off(items: tuple[Item, ...], broken: str) -> None:
    """A bug of vLLM 0.32, see docs/verification.md. When this fails, it is mended in vLLM."""
    from vllm_scheduler import DECLARED, Priority, VllmScheduler

    workload = SchedulerWorkload(
        limits=Limits(pages=8, page_size=1, max_step_tokens=4, max_running=2, room=1, steps_in_flight=1),
        requests=(
            NewRequest(id="r0", tokens=(1, 2, 1, 2, 1, 9, 1), max_tokens=1, items=items, priority=1),
            NewRequest(id="r1", tokens=(3,), max_tokens=1),
            NewRequest(id="r2", tokens=(2, 1), max_tokens=2),
        ),
        operations=(("ask", 0), ("ask", 1), ("plan", 0), ("ask", 2), ("run", 0)),
    )
    with pytest.raises(BrokenPromise, match=re.escape(broken)):
        play_scheduler(Priority, workload, DECLARED)
    play_scheduler(VllmScheduler, workload, DECLARED)

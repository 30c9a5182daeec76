"""The table of mutants: tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from . import test_tool_calls
from .mutants import Killer, Mutant


def examples(test: Any, *, most: int = 60, **values: Any) -> Killer:
    """A property over some examples, not shrunk. They are the same in every run that has imported the same modules,
    whose constants Hypothesis draws, too. ``values`` are strategies, or plain values."""
    check: Callable[..., None] = test.hypothesis.inner_test
    drawn = {name: value for name, value in values.items() if isinstance(value, st.SearchStrategy)}

    @settings(
        derandomize=True,
        max_examples=most,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.fixed_dictionaries(drawn))
    def kill(found: dict[str, Any]) -> None:
        check(**{**values, **found})

    return kill


def cut(name: str) -> Killer:
    test = test_tool_calls.test_however_a_text_is_cut_the_parts_are_those_of_the_whole
    return examples(test, name=name, data=st.data(), cuts=test_tool_calls.CUTS)


CUT = cut("hermes")
CUT_TAGS = cut("qwen3_coder")
CUT_TEMPLATE = cut("response_template")
OUT = examples(
    test_tool_calls.test_what_is_fed_comes_out_and_arguments_are_objects, most=400, name="mistral", data=st.data()
)
JSON = examples(test_tool_calls.test_what_is_json_is_what_json_says, text=test_tool_calls.PIECED)
WHOLE = "== whole"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="the beginning of a marker at the end of a piece is told",
        function="api.tools.syntax:_first",
        fragment="0 if ended else min(len(text) - start, len(begin) - 1)",
        mistake="0",
        killer=CUT,
        reason=WHOLE,
    ),
    Mutant(
        name="what is no call is dropped",
        function="api.tools.reader:ToolReader._go_on",
        fragment="self._tell(self._scanner.text[self._start], parts)",
        mistake="pass",
        killer=OUT,
        reason="found.content == text",
    ),
    Mutant(
        name="what follows a call is passed over with it",
        function="api.tools.reader:ToolReader._go_on",
        fragment="self._candidate, self._start = None, self._scanner.place",
        mistake="self._candidate, self._start = None, len(self._scanner.text)",
        killer=OUT,
        reason="noise(out) == noise(text)",
    ),
    Mutant(
        name="blanks between pieces of content are lost",
        function="api.tools.reader:ToolReader._tell",
        fragment="(*self._blanks, content)",
        mistake="(content,)",
        killer=OUT,
        reason="found.content == text",
    ),
    Mutant(
        name="a marker that is cut in two is none",
        function="api.tools.scanner:Scanner.maybe",
        fragment="if self.ended or not literal.startswith(there):",
        mistake="if True:",
        killer=CUT,
        reason=WHOLE,
    ),
    Mutant(
        name="a name ends where a piece ends",
        function="api.tools.scanner:Scanner.run",
        fragment="if self.place < len(self.text) or self.ended:",
        mistake="if True:",
        killer=CUT_TAGS,
        reason=WHOLE,
    ),
    Mutant(
        name="the end of a tag that is cut in two is not found",
        function="api.tools.scanner:Scanner.until",
        fragment="seen = max(start, len(self.text) - len(literal) + 1)",
        mistake="seen = len(self.text)",
        killer=CUT_TAGS,
        reason=WHOLE,
    ),
    Mutant(
        name="a pattern that may still grow counts",
        function="api.tools.templated:TemplatedCalls._closed",
        fragment="seen = len(scanner.text) if found is None else found.start()",
        mistake="seen = len(scanner.text)",
        killer=CUT_TEMPLATE,
        reason=WHOLE,
    ),
    Mutant(
        name="JSON may escape anything",
        function="api.tools.scanner:Scanner._escaped",
        fragment="elif not character or character not in",
        mistake="elif not character and character not in",
        killer=test_tool_calls.test_json_escapes_what_it_may_and_nothing_else,
        reason="escaped == sorted",
    ),
    Mutant(
        name="a number may be written anyhow",
        function="api.tools.scanner:Scanner._scalar",
        fragment="if not _SCALARS.fullmatch((yield from self.run(_SCALAR))):",
        mistake="if not (yield from self.run(_SCALAR)):",
        killer=JSON,
        reason="is_value(text) is expected",
    ),
)

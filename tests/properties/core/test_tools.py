"""The tools of a conversation: which descriptions are taken, and what is told of the others."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from triolet.core.errors import InvalidRequest
from triolet.core.tools import read_tools

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("now", "tools='now'; allowed: a list of"),
        (NOW, "tools={.*; allowed: a list of"),
        (3, "tools=3; allowed: a list of"),
        (["now"], 'tools\\[0\\]=\'now\'; allowed: {"type": "function"'),
        ([NOW, {"type": "retrieval"}], "tools\\[1\\]={'type': 'retrieval'}; allowed"),
        ([{"type": "function"}], "tools\\[0\\]={'type': 'function'}; allowed"),
        ([{"type": "function", "function": {}}], "tools\\[0\\] has the name None; allowed: 1 to 128 of"),
        ([{"type": "function", "function": {"name": "a b"}}], "has the name 'a b'"),
        ([{"type": "function", "function": {"name": "a", "description": 3}}], "has the description 3; allowed: a text"),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], "has strict=1; allowed: True or False"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "has the parameters \\[\\]"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], "schema of an object"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"required": "a"}}}], "schema of an object"),
        (
            [{"type": "function", "function": {"name": "a", "x": {1, 2}}}],
            "cannot be written as JSON: a set is not a JSON",
        ),
        ([{"type": "function", "function": {"name": "a", "x": float("nan")}}], "cannot be written as JSON"),
        ([{"type": "function", "function": {"name": "a", "description": "\udcff"}}], "half of a surrogate pair"),
        ([NOW, NOW], "tools has 'now' more than once"),
    ],
    ids=str,
)
def test_tools_that_are_none_are_told(tools: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_tools(tools)


def test_tools_of_any_kind_of_mapping_are_read() -> None:
    function = MappingProxyType({"name": "now", "parameters": MappingProxyType({"properties": {}}), "strict": None})
    (found,) = read_tools(({"type": "function", "function": function},))
    assert found.given == {
        "type": "function",
        "function": {"name": "now", "parameters": {"properties": {}}, "strict": None},
    }
    assert found.parameters == {"properties": {}}
    assert read_tools([]) == ()

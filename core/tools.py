"""The tools of a conversation: functions that the model may call, described as OpenAI describes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from .checks import check_characters, shown
from .errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NAMES = "1 to 128 of A-Z, a-z, 0-9, '_', '-', '.' and ':'"
_SHAPE = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": a JSON schema}}'


@frozen(kw_only=True)
class Tool:
    """One function that a model may call.

    Args:
        name: 1 to 128 letters, digits, ``_``, ``-``, ``.`` and ``:``.
        parameters: the JSON schema of the arguments, which are an object; ``None``: the function has no arguments.
        given: the tool as the caller described it, in plain JSON values. Chat templates read this.
    """

    name: str
    parameters: Mapping[str, Any] | None
    given: Mapping[str, Any] = field(repr=False)


def read_tools(tools: object) -> tuple[Tool, ...]:
    """Returns the tools that a caller gave: mappings in the shape of OpenAI's, or results of this function.

    Raises:
        InvalidRequest: a tool has another shape, has a name that is not allowed or occurs twice, or cannot be written
            as JSON.
    """
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequest(f"tools={shown(tools)}; allowed: a list of {_SHAPE}")
    found = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool.name for tool in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"tools has {name!r} more than once; allowed: each name once")
    return found


def _read_tool(tool: object, where: str) -> Tool:
    if isinstance(tool, Tool):
        return tool
    given = _plain(tool, where)
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{where}={shown(tool)}; allowed: {_SHAPE}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where} has the name {shown(name)}; allowed: {_NAMES}")
    if not isinstance(function.get("description", ""), str | None):
        raise InvalidRequest(f"{where} has the description {shown(function['description'])}; allowed: a text")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{where} has strict={shown(function['strict'])}; allowed: True or False")
    return Tool(name=name, parameters=_schema(parameters, where), given=given)


def _schema(parameters: object, where: str) -> Mapping[str, Any] | None:
    if parameters is None:
        return None
    if (
        not isinstance(parameters, dict)
        or parameters.get("type", "object") != "object"
        or not isinstance(parameters.get("properties", {}), dict)
        or not isinstance(parameters.get("required", []), list)
    ):
        raise InvalidRequest(f"{where} has the parameters {shown(parameters)}; allowed: a JSON schema of an object")
    return parameters


def _plain(tool: object, where: str) -> dict[str, Any]:
    """Returns ``tool`` in JSON values alone, so that every template can write it."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"{where}={shown(tool)}; allowed: {_SHAPE}")
    try:
        text = json.dumps(tool, ensure_ascii=False, allow_nan=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{where}={shown(tool)} cannot be written as JSON: {error}; allowed: texts, numbers, lists and mappings"
        ) from None
    check_characters(text)
    found: dict[str, Any] = json.loads(text)
    return found


def _as_dict(value: object) -> dict[str, Any]:
    """Converts mappings of other libraries, which `json` does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not a JSON value")

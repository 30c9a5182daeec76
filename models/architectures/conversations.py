"""Conversations as prompts, by the chat template of the checkpoint: messages, tools and tool calls become text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from ...core.checks import shown
from ...core.errors import InvalidRequest
from ...core.tools import Tool

_OPEN = frozenset({"documents"})  # an argument that transformers only passes on to the template
_NO_TOOLS = (
    "tools are given, but the checkpoint's chat template does not read them; leave them out, or open a model that "
    "was trained to call tools"
)


_FORMS: tuple[Callable[[dict[str, Any] | str], Any], ...] = (  # of arguments, one of which a template reads
    lambda given: given,
    lambda given: {"arguments": given} if isinstance(given, str) else given,
    lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False),
)


class Rendered(str):
    """A prompt that a chat template wrote. It has its special tokens already, so `TextPreparer` adds none.

    String operations return a plain `str`, to which `TextPreparer` adds special tokens as usual.
    """

    __slots__ = ()


def template_of(tokenizer: Any, own: str | None = None, *, tools: bool) -> str:
    """The text of the chat template: ``own``, or else that of the tokenizer. A tokenizer may have a separate template
    for conversations with ``tools``. Empty if there is none.
    """
    if not (own or tokenizer.chat_template):
        return ""
    try:
        return str(tokenizer.get_chat_template(own, tools=[] if tools else None))
    except ValueError:  # there are several templates, and no default among them
        return ""


def replace_template(tokenizer: Any, template: str) -> None:
    """Gives the tokenizer ``template`` as its chat template, and removes its response template, which belongs to the
    old one.

    Raises:
        InvalidRequest: ``template`` is not a Jinja template that transformers can read.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=template)
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"line {error.lineno} of chat_template: {error.message}; allowed: a Jinja template that transformers "
            "can read"
        ) from error
    tokenizer.chat_template, tokenizer.response_template = template, None


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
) -> Rendered:
    """Renders ``messages`` by ``template``, or else by the tokenizer's own chat template.

    Args:
        options: further variables of the template; with ``continue_final_message`` the text ends within the last
            message, and with ``add_generation_prompt=False`` behind it.

    Raises:
        InvalidRequest: there is no template, or it refuses the messages or ignores tools, tool calls or an option.
    """
    if not (template or tokenizer.chat_template):
        raise InvalidRequest("the checkpoint has no chat template; write the prompt as text")
    if not messages:
        raise InvalidRequest("messages is empty; give one message or more")
    options = {} if options is None else dict(options)
    goes_on = options.pop("continue_final_message", None)
    turn: dict[str, Any] = {
        "continue_final_message": goes_on,
        "add_generation_prompt": options.pop("add_generation_prompt", not goes_on),
    }
    for name, value in turn.items():
        if not isinstance(value, bool | None):
            raise InvalidRequest(f"template_options has {name}={shown(value)}; allowed: True or False")
    calls = any(message.get("tool_calls") for message in messages)
    if tools or options or calls:
        text = template_of(tokenizer, template, tools=bool(tools))
        _check_is_read(text, _ours(tokenizer), tools=bool(tools), calls=calls, options=options)
    if goes_on and not messages[-1].get("content") and messages[-1].get("reasoning_content"):
        turn["continue_final_message"] = "reasoning_content"
    if tools:
        options = {**options, "tools": [dict(tool.given) for tool in tools]}
    options |= turn
    if not calls:
        return _write(tokenizer, messages, template, options)
    read = [_with_read_calls(message, f"messages[{index}]") for index, message in enumerate(messages)]
    texts = [call["function"]["arguments"] for message in read for call in message.get("tool_calls") or ()]
    texts = [text.strip() for text in texts if isinstance(text, str)]
    for form in _FORMS[: 2 if texts else 1]:
        with suppress(InvalidRequest):
            written = _write(tokenizer, [_with_arguments(message, form) for message in read], template, options)
            if all(text in written or json.dumps(text, ensure_ascii=False)[1:-1] in written for text in texts):
                return written
    return _write(tokenizer, [_with_arguments(message, _FORMS[-1]) for message in read], template, options)


def _write(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None, options: Mapping[str, Any]
) -> Rendered:
    try:
        text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options)
    except Exception as error:  # templates are programs that others wrote, and may raise anything
        raise InvalidRequest(
            f"the checkpoint's chat template refuses the messages: {type(error).__name__}: {error}"
        ) from error
    return Rendered(text)


def variables_of(template: str) -> frozenset[str]:
    """The variables that ``template`` names; none if it is broken, which rendering reports."""
    return (_names(template) or (frozenset[str](),))[0]


def tools_fault(template: str) -> str | None:
    """Returns the reason why conversations by ``template`` cannot have tools; ``None``: they can. A broken template has
    no reason here, since rendering reports it.
    """
    names = _names(template)
    return None if names is None or "tools" in names[0] else _NO_TOOLS


def _ours(tokenizer: Any) -> frozenset[str]:
    """The option names that `render` itself passes to the template or to transformers, and the names that transformers
    reserves."""
    theirs = inspect.signature(tokenizer.apply_chat_template).parameters
    return frozenset({"messages", "conversations", *theirs}) - _OPEN


def _check_is_read(
    template: str, ours: frozenset[str], *, tools: bool, calls: bool, options: Mapping[str, Any]
) -> None:
    """Raises `InvalidRequest` if the template would ignore the tools, the tool calls or an option."""
    if (names := _names(template)) is None:  # rendering reports this error
        return
    variables, members = names
    if tools and "tools" not in variables:
        raise InvalidRequest(_NO_TOOLS)
    if calls and "tool_calls" not in members:
        raise InvalidRequest(
            "messages have tool_calls, but the checkpoint's chat template does not read them; write them into the "
            "content, or open a model that was trained to call tools"
        )
    for name in options:
        if name in ours:
            raise InvalidRequest(f"template_options has {name!r}, which the engine sets itself; leave it out")
        is_off = options[name] is None or options[name] is False  # as what is not read
        if name not in variables and not is_off:
            raise InvalidRequest(
                f"template_options has {shown(name)}, which the checkpoint's chat template does not read; leave it out"
            )


@lru_cache(maxsize=16)
def _names(template: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """Returns the variables that a template names, and their members, written ``a.member`` or ``a["member"]``;
    ``None``: it is broken."""
    try:
        tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError:
        return None
    named = [(before == ".", text) for (_, before), (kind, text) in pairwise([("", ""), *tokens]) if kind == "name"]
    quoted = {text[1:-1] for kind, text in tokens if kind == "string"}
    return (
        frozenset(text for is_member, text in named if not is_member),
        frozenset(text for is_member, text in named if is_member) | quoted,
    )


# -- tool calls of messages ------------------------------------------------------------------------------------------


def _with_read_calls(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns ``message`` with the arguments of its tool calls as mappings, which most templates read, or as the text
    that a model wrote in place of an object. OpenAI's clients send JSON text. If there are calls, a content of ``None``
    is left out, as in transformers.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise InvalidRequest(f"{where} has tool_calls={shown(calls)}; allowed: a list of calls")
    given = {name: value for name, value in message.items() if value is not None}
    return {**given, "tool_calls": [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f'{where}={shown(call)}; allowed: {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        )
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _with_arguments(message: Mapping[str, Any], form: Callable[[dict[str, Any] | str], Any]) -> Mapping[str, Any]:
    """Returns ``message``, a result of `_with_read_calls`, with the arguments of its tool calls in ``form``."""
    calls = [
        {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _arguments(given: Any, where: str) -> dict[str, Any] | str:
    """Returns the arguments of a call. A history replays what models wrote: no arguments, an object that was cut, or
    that is a JSON string itself, are taken."""
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(
            f"{where} has the arguments {shown(given)}; allowed: a mapping, or its JSON text"
        ) from None
    try:
        found = json.loads(text or "null")
        found = json.loads(found or "null") if isinstance(found, str) else found
    except (ValueError, RecursionError):
        found = text
    return {} if found is None or not text.strip() else found if isinstance(found, dict) else text

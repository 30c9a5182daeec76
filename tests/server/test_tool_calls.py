"""The calls in a model's text as answers of the server have them: whole, piece by piece, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from triolet import Completion, Delta, ToolFormat
from triolet.api.outputs.results import Usage
from triolet.core.detokenizer import TokenBytes
from triolet.core.errors import RequestTooLarge
from triolet.core.request import FinishReason
from triolet.core.tools import read_tools
from triolet.server.endpoints import chat, responses
from triolet.server.endpoints.sampling import structure_of
from triolet.server.endpoints.tool_calls import Tools
from triolet.server.problems import BadBody
from triolet.server.schemas.chat import ChatRequest
from triolet.server.schemas.responses import ResponsesRequest
from triolet_testing.sim_model import SimTokenizer

NAMES = ("get", "now")
GIVEN = [{"type": "function", "function": {"name": name}} for name in NAMES]
CALLS = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in NAMES)
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": GIVEN}


def tools(*, parallel: bool = True, choice: str = "auto", told: dict[str, object] | None = None) -> Tools:
    return Tools(
        ToolFormat.named("hermes"), read_tools(GIVEN), read_tools(GIVEN), choice, parallel, {} if told is None else told
    )


@pytest.mark.parametrize("parallel", [False, True])
def test_one_call_is_answered_where_the_client_wants_one_whole_and_as_a_stream(parallel: bool) -> None:
    text = f"a {CALLS} b"
    message = tools(parallel=parallel).message(text)
    called = [call.function.name for call in message.tool_calls or ()]
    assert (message.content, called) == ("a  b", ["get", "now"][: 2 if parallel else 1])
    reader = tools(parallel=parallel).reader()
    deltas = [delta for index, one in enumerate(text, 1) for delta in reader.feed(one, last=index == len(text))]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert [call.function.name for one in deltas for call in one.tool_calls or () if call.id] == called


def test_one_function_that_must_be_called_is_called_once() -> None:
    form = ToolFormat.named("hermes")
    for choice in ("required", "get"):
        expected = form.structure(GIVEN, choice, parallel=choice == "required")
        assert tools(choice=choice).structure() == expected != form.structure(GIVEN, choice, parallel=choice == "get")


def test_calls_that_cannot_be_read_are_content_and_counted_in_the_access_log() -> None:
    told: dict[str, object] = {}
    several = tools(told=told)
    message = several.message("<tool_call>{'name': 'get'}</tool_call> b")
    assert (message.content, message.tool_calls) == ("<tool_call>{'name': 'get'}</tool_call> b", None)
    assert told == {"unread_calls": 1}
    several.message("<tool_call>{'name': 'get'}</tool_call>")
    assert told == {"unread_calls": 2}, "of all answers"
    assert tools(told=(none := {})).message(CALLS).content is None
    assert not none


def test_calls_that_are_left_out_are_counted_in_the_access_log() -> None:
    told: dict[str, object] = {}
    tools(parallel=False, told=told).message(CALLS)
    assert told == {"dropped_calls": 1}


def test_the_form_of_a_response_has_its_own_name_in_refusals() -> None:
    """``response_format`` was advised, which responses refuse."""
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    body: dict[str, Any] = {"model": "m", "input": "a", "structured_outputs": {"regex": "a"}}
    both = ResponsesRequest(**body, text={"format": schema}).as_chat
    with pytest.raises(BadBody, match=r"several forms .* structured_outputs.regex, text\.format; give one"):
        structure_of(both, both.response_format)
    beside = ResponsesRequest(**body, tools=[{"type": "function", "name": "get"}]).as_chat
    with pytest.raises(BadBody, match=r"give one of them, text\.format, or tool_choice none"):
        Tools.of(beside, SimpleNamespace(), None, {})
    large = {"type": "json_schema", "name": "a", "schema": {"enum": list(range(5_001))}}
    with pytest.raises(RequestTooLarge, match=r"^text\.format has more than"):
        ResponsesRequest(model="m", input="a", text={"format": large}).check_size()


# -- log-probabilities -------------------------------------------------------------------------------------------------

TEXTS = ("a ", CALLS, " b")
LONG = f'<tool_call>{{"name": "get", "arguments": {{"a": "{"b" * 2_990}"}}}}</tool_call>'
TOKENS = SimTokenizer().encode("".join(TEXTS))
ENGINE: Any = SimpleNamespace(inside=SimpleNamespace(token_bytes=lambda: TokenBytes(SimTokenizer())))


def deltas(tokens: Sequence[int] = TOKENS) -> list[Delta]:
    """A token each, with its number as its log-probability."""
    found = [
        Delta(text=chr(97 + token), token_ids=(token,), logprobs=(-float(place),)) for place, token in enumerate(tokens)
    ]
    usage = Usage(prompt_tokens=1, completion_tokens=len(found))
    return [*found, Delta(text="", token_ids=(), finish_reason=FinishReason.STOP, usage=usage)]


async def test_a_call_that_is_left_out_is_no_event_of_a_stream() -> None:
    events = list[Any]()

    async def write(event: Any) -> None:
        events.append(event.choices[0].delta)

    writer = chat._ChunkWriter(ChatRequest(**BODY), SimpleNamespace(write=write), tools(parallel=False))
    for delta in deltas():
        await writer.add(ENGINE, 0, delta)
    told = [event.content if event.tool_calls is None else event.tool_calls[0].index for event in events]
    assert told == ["", "a", 0, 0, "  b", None], "the begin, a text, a call and its arguments, a text, the end"


async def test_each_token_beside_a_call_has_its_log_probability_once() -> None:
    """Those of the call itself, too, as in the whole answer."""
    body, events = ChatRequest(**BODY, logprobs=True), list[Any]()

    async def write(event: Any) -> None:
        events.append(event)

    writer = chat._ChunkWriter(body, SimpleNamespace(write=write), tools())
    for delta in deltas():
        await writer.add(ENGINE, 0, delta)
    told = [one for event in events if (found := event.choices[0].logprobs) for one in found.content]
    whole = Completion(
        text="".join(TEXTS),
        token_ids=tuple(TOKENS),
        logprobs=tuple(-float(place) for place in range(len(TOKENS))),
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
    )
    assert told == chat._choice(ENGINE, body, tools(), 0, whole).logprobs.content
    assert [one.logprob for one in told] == list(whole.logprobs)


@pytest.mark.parametrize(
    ("calls", "parallel"),
    [(CALLS, True), (LONG, True), (CALLS, False), (CALLS + LONG, False)],
    ids=["short", "long", "left out", "long and left out"],
)
def test_a_text_behind_a_call_has_the_log_probabilities_of_its_own_tokens(calls: str, parallel: bool) -> None:
    """A long call is read late, together with the text behind it, and one that is left out as others are."""
    body = ResponsesRequest(model="m", input="a", include=["message.output_text.logprobs"])
    writer = responses._ItemWriter(body, tools(parallel=parallel).reader())
    tokens = SimTokenizer().encode(f"a {calls} b")
    for delta in deltas(tokens):
        list(writer.add(ENGINE, delta))
    first, *_, last = writer.answer.output
    assert [one.logprob for one in first.content[0].logprobs] == [0.0]
    assert (last.content[0].text, last.content[0].logprobs[-1].logprob) == ("  b", -float(len(tokens) - 1))
    assert len(last.content[0].logprobs) <= len("  b") + len("</tool_call>")

"""Bodies with faults: what is told of them, and how much is looked at for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from triolet.server.body import _parse
from triolet.server.endpoints.realtime import _event_of
from triolet.server.faults import _LOOKED_AT, faults_of
from triolet.server.problems import BadBody
from triolet.server.schemas.base import Body
from triolet.server.schemas.chat import ChatRequest
from triolet.server.schemas.completions import CompletionRequest
from triolet.server.schemas.responses import ResponsesRequest
from triolet.server.schemas.vectors import RerankRequest

MANY = 20_000
HELLO = {"role": "user", "content": "a"}


class Inner(Body):
    """Members of two kinds."""

    one: int
    two: int


class Outer(Body):
    """A member of two kinds, and one that has many."""

    inner: Inner | str = ""
    rows: list[int] | None = None


def error_of(kind: type[BaseModel], body: Any) -> ValidationError:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate_json(json.dumps(body), strict=True)
    return raised.value


def told_of(kind: type[BaseModel], body: Any) -> BadBody:
    with pytest.raises(BadBody) as raised:
        _parse(kind, [json.dumps(body).encode()])
    return raised.value


def test_of_faults_within_one_another_the_innermost_is_told() -> None:
    body = {"inner": {"one": "x", "two": "y"}}
    assert list(faults_of(error_of(Outer, body), body)) == ["inner.one", "inner.two"]


def test_each_of_as_many_faults_as_are_looked_at_is_told() -> None:
    body = {"rows": ["x"] * _LOOKED_AT}
    assert len(faults_of(error_of(Outer, body), body)) == _LOOKED_AT


def test_of_more_faults_the_number_is_told() -> None:
    body = {"rows": ["x"] * (_LOOKED_AT + 1)}
    (found,) = faults_of(error_of(Outer, body), body).values()
    assert found == "it has 1,001 faults, too many to list; GET /openapi.json says what is allowed"


def test_of_members_that_do_not_exist_by_the_thousand_the_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the body is not read once more."""
    monkeypatch.setattr("triolet.server.body.parsed", None)
    error = told_of(ChatRequest, {"model": "m", "messages": [HELLO], **{f"x{index}": 1 for index in range(MANY)}})
    assert str(error).startswith(f"it has {MANY:,} faults")
    assert error.param is None


@pytest.mark.parametrize(
    ("kind", "body", "first"),
    [
        (ChatRequest, {"messages": [1] * 4_000}, "messages.0"),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 2_000}]}, "messages.0.content.0"),
        (ChatRequest, {"messages": [HELLO], "stop": [1] * 64}, "stop.0"),
        (ChatRequest, {"messages": [HELLO], "stop_token_ids": ["x"] * 1_000}, "stop_token_ids.0"),
        (ChatRequest, {"messages": [HELLO], "tools": [1] * 128}, "tools.0"),
        (CompletionRequest, {"prompt": [None] * MANY}, "prompt.0"),
        (RerankRequest, {"query": "a", "documents": [1] * 2_000}, "documents.0"),
    ],
)
def test_of_a_list_the_first_item_that_is_wrong_is_told_alone(kind: type[BaseModel], body: Any, first: str) -> None:
    """Whatever is in it, its faults are few."""
    body = {"model": "m", **body}
    assert error_of(kind, body).error_count() <= 4
    assert told_of(kind, body).param == first


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [HELLO] * 4_097},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2_049}]},
        {"messages": [HELLO], "stop": ["a"] * 65},
        {"messages": [HELLO], "stop_token_ids": [1] * 1_025},
        {"messages": [HELLO], "modalities": ["text"] * 9},
        {"messages": [HELLO], "logit_bias": dict.fromkeys(range(1_025), 1)},
    ],
)
def test_lists_are_bounded(given: dict[str, Any]) -> None:
    assert "should have at most" in str(told_of(ChatRequest, {"model": "m", **given}))


def hears(**given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **given}]}


ITEMS, TALK = ResponsesRequest, ChatRequest
THOUGHT = {"type": "thinking", "thinking": "a"}


@pytest.mark.parametrize(
    ("kind", "body", "place", "told"),
    [
        (ITEMS, {"input": [{"type": "computer"}]}, "input.0", "the type 'computer'; allowed: 'message', "),
        (ITEMS, {"input": [{"type": "item_reference"}]}, "input.0", "this server stores no items; send the item"),
        (ITEMS, {"input": [{"role": "user", "content": [{}]}]}, "input.0.content.0", "its type is missing"),
        (ITEMS, {"input": [{**HELLO, "x": 1}]}, "input.0.x", "there is no such member"),
        (ITEMS, {}, "input", "it is missing"),
        (TALK, {"messages": [HELLO], "temperature": 5}, "temperature", "Input should be less than or equal to 2"),
        (TALK, {"messages": []}, "messages", "0 items; allowed: 1 or more"),
        (TALK, hears(content=5), "messages.0.content", "Input should be a valid string; or Input should be a valid"),
        (TALK, hears(content=[{"type": "text"}]), "messages.0.content.0.text", "it is missing"),
        (
            TALK,
            hears(content="a", reasoning="b"),
            "messages.0",
            "a message with the role user has reasoning; allowed: in",
        ),
        (TALK, hears(content=[THOUGHT]), "messages.0", "a message with the role user has reasoning; allowed: in"),
        (
            TALK,
            {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]},
            "messages.0",
            "reasoning_content and reasoning differ; give one of them",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "max_tokens": 0, "min_tokens": 2},
            None,
            "min_tokens=2 with max_tokens=0; al",
        ),
        (
            ITEMS,
            {"input": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            None,
            "continuous_usage_stats is true, but the last event alone has the usage; leave it out",
        ),
        (CompletionRequest, {"prompt": ["a"] * 128, "n": 3}, None, "128 prompts with n=3 make too many answers; allow"),
        (TALK, {"messages": [HELLO], "top_logprobs": 3}, None, "top_logprobs is given without logprobs; set lo"),
    ],
)
def test_a_fault_is_reported_in_plain_words_by_its_place(kind: Any, body: Any, place: str | None, told: str) -> None:
    error = told_of(kind, {"model": "m", **body})
    assert error.param == place
    assert str(error).startswith(told if place is None else f"{place}: {told}")


@pytest.mark.parametrize(
    ("name", "hint"), [("temprature", "did you mean temperature?"), ("search", "leave it out; similar ones are ")]
)
def test_a_member_that_does_not_exist_is_reported_first(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison takes time that grows with the length of the name."""
    error = told_of(ChatRequest, {"messages": 5, name: 1})
    assert (error.param, str(error).startswith(f"{name} is not a member of this request; {hint}")) == (name, True)
    compared = list[str]()

    def compare(one: str, *_: object) -> list[str]:
        compared.append(one)
        return []

    monkeypatch.setattr("triolet.server.body.difflib.get_close_matches", compare)
    told_of(ChatRequest, {"messages": 5, name * 100: 1})
    assert max(map(len, compared)) == 32


def test_what_is_told_of_a_fault_is_short() -> None:
    """The client may have sent anything in the place of a kind."""
    for body in (hears(content=[{"type": "x" * 100_000}]), {"messages": [HELLO], "x" * 900_000: 1}):
        assert len(str(told_of(ChatRequest, {"model": "m", **body}))) < 5_000


# -- events of live audio ----------------------------------------------------------------------------------------------


def test_an_event_of_live_audio_may_be_large_if_it_is_audio() -> None:
    audio = "A" * (4 << 20)
    event = _event_of(json.dumps({"event_id": "e", "type": "input_audio_buffer.append", "audio": audio}))
    assert event.audio == audio


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "session.update", "session": {"include": [' + "1," * 100_000 + "1]}}",
        '{"type": "session.update", "session": {"audio": {"input": {"transcription": {"prompt": "'
        + "x" * 200_000
        + '"}}}}}',
        "[" * 200_000,
    ],
)
def test_another_large_event_is_refused(text: str) -> None:
    with pytest.raises(BadBody, match=r"the event has [\d,]+ characters; allowed: up to 131,072"):
        _event_of(text)


@pytest.mark.parametrize(
    "heard", [{"transcription": {"language": "x" * 65}}, {"turn_detection": {"eagerness": "x" * 65}}]
)
def test_settings_of_live_audio_are_short(heard: dict[str, Any]) -> None:
    """Of those that wait for the model the prompt alone is counted."""
    with pytest.raises(BadBody, match="should have at most 64 characters"):
        _event_of(json.dumps({"type": "session.update", "session": {"audio": {"input": heard}}}))


def test_what_is_never_done_is_refused_by_its_name() -> None:
    wanted = "item.input_audio_transcription.logprobs"
    with pytest.raises(BadBody, match=f"{wanted} is not available for live audio; allowed: triolet.provisional"):
        _event_of(json.dumps({"type": "session.update", "session": {"include": [wanted]}}))

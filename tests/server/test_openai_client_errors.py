"""OpenAI's own client, as it is published: what it raises for each way in which a request may end."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import openai
import pytest
from trio.testing import MockClock

from triolet.server.exchange import Cut

from .openai_client import openai_client
from .served import served

pytestmark = pytest.mark.real_time

QUESTION = [{"role": "user", "content": "hi"}]
LONG = {"max_tokens": 400, "n": 100, "extra_body": {"ignore_eos": True}}  # far longer than a client of these waits


def talk(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "llama", "messages": QUESTION, **options})


# -- what the caller can mend ------------------------------------------------------------------------------------------


def test_what_the_engine_refuses_comes_in_its_words(service, client):
    with pytest.raises(ValueError, match="positions") as expected:
        service.engine("llama", lambda engine: engine.generate(messages=QUESTION, max_tokens=10_000))
    with pytest.raises(openai.APIStatusError) as caught:
        talk(client, max_tokens=10_000)
    assert caught.value.message == f"Error code: 400 - {expected.value}"
    assert caught.value.body["message"] == str(expected.value)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.type == "invalid_request_error"


def test_a_wrong_member_is_named(client):
    with pytest.raises(openai.BadRequestError, match="did you mean temperature") as caught:
        talk(client, extra_body={"temprature": 1})
    assert (caught.value.param, caught.value.code) == ("temprature", "invalid_request")


def test_a_model_or_a_path_that_is_none_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="nobody") as caught:
        talk(client, model="nobody")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.NotFoundError, match="POST /v1/moderations is not an endpoint"):
        client.moderations.create(input="text")


# -- the server's limits -----------------------------------------------------------------------------------------------


def test_too_many_requests_are_told_when_to_come_again(models):
    """Time stands still: they come in the same minute."""
    only = {"bert": models["bert"]}
    with served(only, clock=MockClock(), requests_per_minute=1) as service, openai_client(service) as client:
        client.embeddings.create(model="bert", input="one")
        with pytest.raises(openai.RateLimitError, match="more than 1 requests came within a minute") as caught:
            client.embeddings.create(model="bert", input="two")
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert 0 < int(caught.value.response.headers["retry-after"]) <= 60


def test_a_stream_that_is_cut_off_tells_why(service, client):
    """As soon as it has begun: later it might be complete."""

    def begun() -> bool:
        return any(one.bytes_out for one in service.server.exchanges)

    def cut_off() -> None:
        for one in service.server.exchanges:
            one.end(Cut.STOPPING)

    service.until(service.is_idle)
    with service.when(begun, cut_off):
        with pytest.raises(openai.APIError, match="the server is stopping, and the time for running requests is over"):
            list(talk(client, stream=True, **LONG))
    service.until(service.is_idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_of_another_kind_says_so_with_the_status_of_the_failure(client, speech, stream):
    with pytest.raises(openai.BadRequestError, match="gives vectors, not text"):
        talk(client, model="bert", stream=stream)
    with pytest.raises(openai.BadRequestError, match="cannot transcribe"):
        client.audio.transcriptions.create(model="llama", file=speech, stream=stream)


# -- names -------------------------------------------------------------------------------------------------------------


def test_answers_and_errors_have_the_name_of_their_request(client):
    raw = client.embeddings.with_raw_response.create(model="bert", input="one", encoding_format="float")
    assert re.fullmatch(r"req-[0-9a-f]{16}", raw.headers["x-request-id"])
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    named = partial(client.embeddings.with_raw_response.create, encoding_format="float", input="one")
    assert named(model="bert", extra_headers={"x-request-id": "mine.1"}).headers["x-request-id"] == "mine.1"
    with pytest.raises(openai.NotFoundError) as caught:
        named(model="nobody", extra_headers={"x-request-id": "mine.2"})
    assert caught.value.request_id == "mine.2"


def test_a_streams_name_comes_with_its_beginning(client):
    ask = client.chat.completions.with_streaming_response.create
    with ask(model="llama", messages=QUESTION, max_tokens=2, stream=True) as raw:
        assert raw.headers["x-request-id"].startswith("req-")
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert b"".join(raw.iter_bytes()).endswith(b"data: [DONE]\n\n")

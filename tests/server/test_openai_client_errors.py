"""OpenAI's own client, as it is published: what it raises for each way in which a request may end."""

from __future__ import annotations

import json
import logging
import re
import threading
from functools import partial
from typing import Any

import openai
import pytest
from trio.testing import MockClock

from triolet.server.exchange import Cut

from .openai_client import openai_client
from .served import PATIENCE, served

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


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"temperature": 5}, "temperature", "temperature: Input should be less than or equal to 2"),
        ({"stop": [1]}, "stop.0", "stop.0: Input should be a valid string"),
        ({"messages": []}, "messages", "messages: List should have at least 1 item after validation, not 0"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "messages.0.content: Input should be a valid string; or Input should be a valid array",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "messages.0.content.0.text: Field required",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
        ({"extra_body": {"temprature": 1}}, "temprature", "temprature is no member of this request; did you mean "),
        ({"top_logprobs": 3}, None, "top_logprobs without logprobs; set logprobs to true"),
        ({"extra_body": {"reasoning_effort": "low"}}, "reasoning_effort", "reasoning_effort is no member of "),
    ],
)
def test_a_wrong_member_is_named_by_its_place(client, options, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        talk(client, **options)
    assert (caught.value.param, caught.value.code) == (param, "invalid_request")
    if message is not None:
        assert caught.value.body["message"].startswith(message)


def test_a_model_or_a_path_that_is_none_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="nobody") as caught:
        talk(client, model="nobody")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.NotFoundError, match="POST /v1/moderations is no endpoint"):
        client.moderations.create(input="text")


def test_a_model_of_another_kind_says_so(client, speech):
    with pytest.raises(openai.BadRequestError, match="gives vectors, not text"):
        talk(client, model="bert")
    with pytest.raises(openai.BadRequestError, match="cannot transcribe"):
        client.audio.transcriptions.create(model="llama", file=speech)


def test_an_address_that_is_not_allowed_is_forbidden(client):
    content = [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]
    with pytest.raises(openai.PermissionDeniedError, match="may not be fetched") as caught:
        talk(client, model="qwen2_vl", messages=[{"role": "user", "content": content}])
    assert caught.value.param == "messages.0.content.0"


# -- the server's limits -----------------------------------------------------------------------------------------------


def test_an_address_without_an_answer_cannot_be_processed(models):
    """Nobody listens on port 9 (discard) of this machine."""
    content = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/cat.png"}}]
    model = {"qwen2_vl": models["qwen2_vl"]}
    with (
        served(model, url_prefixes=["http://127.0.0.1:9/"], private_urls=True) as service,
        openai_client(service) as client,
    ):
        with pytest.raises(openai.UnprocessableEntityError, match="cannot be fetched") as caught:
            talk(client, model="qwen2_vl", messages=[{"role": "user", "content": content}])
    assert caught.value.code == "address_failed"


def test_a_wrong_key_is_no_authentication(models):
    with served({"bert": models["bert"]}, api_keys=["right"]) as service:
        with openai_client(service, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="no API key, or a wrong one") as caught:
                client.models.list()
        with openai_client(service, api_key="right") as client:
            assert client.models.retrieve("bert").id == "bert"
    assert caught.value.code == "invalid_api_key"


def test_too_many_requests_are_told_when_to_come_again(models):
    """Time stands still: they come in the same minute."""
    only = {"bert": models["bert"]}
    with served(only, clock=MockClock(), requests_per_minute=1) as service, openai_client(service) as client:
        client.embeddings.create(model="bert", input="one")
        with pytest.raises(openai.RateLimitError, match="more than 1 requests a minute") as caught:
            client.embeddings.create(model="bert", input="two")
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert 0 < int(caught.value.response.headers["retry-after"]) <= 60


def test_a_body_that_is_too_large_has_the_status_413(models):
    with served({"bert": models["bert"]}, max_body_bytes=1_000) as service, openai_client(service) as client:
        with pytest.raises(openai.APIStatusError, match="allowed: up to 1,000") as caught:
            client.embeddings.create(model="bert", input="word " * 1_000)
    assert caught.value.status_code == 413


def test_a_server_that_stops_is_an_internal_error_that_passes(models):
    with served({"bert": models["bert"]}) as service, openai_client(service) as client:
        service.ask(service.server.stop)
        with pytest.raises(openai.InternalServerError, match="the server is stopping") as caught:
            client.embeddings.create(model="bert", input="one")
    assert (caught.value.status_code, caught.value.code) == (503, "stopping")
    assert caught.value.response.headers["retry-after"] == "5"


def test_a_stream_that_is_cut_off_tells_why(service, client):
    """As soon as it has begun: later it might be complete."""

    def begun() -> bool:
        return any(one.bytes_out for one in service.server.exchanges)

    def cut_off() -> None:
        for one in service.server.exchanges:
            one.end(Cut.STOPPING)

    service.until(service.is_idle)
    with service.when(begun, cut_off):
        with pytest.raises(openai.APIError, match="the server stops, and the time for running requests is over"):
            list(talk(client, stream=True, **LONG))
    service.until(service.is_idle)


def test_a_stream_that_fails_before_its_first_event_has_the_status_of_its_failure(client, speech):
    with pytest.raises(openai.BadRequestError, match="gives vectors, not text"):
        talk(client, model="bert", stream=True)
    with pytest.raises(openai.BadRequestError, match="cannot transcribe"):
        client.audio.transcriptions.create(model="llama", file=speech, stream=True)


# -- clients that go ---------------------------------------------------------------------------------------------------


def statuses(caplog: pytest.LogCaptureFixture) -> list[int]:
    """What the access log tells of the requests since it was cleared."""
    return [json.loads(one.getMessage())["status"] for one in caplog.records if one.name == "triolet.access"]


def test_a_client_whose_patience_ends_withdraws_its_request(service, client, caplog):
    """From the request's beginning on the server stands still, until the client has given up. The access log says
    that it has gone."""
    caplog.set_level(logging.INFO, "triolet.access")
    talk(client, max_tokens=1)  # the model is loaded
    service.until(service.is_idle)
    caplog.clear()
    given_up = threading.Event()
    with service.when(lambda: not service.is_idle(), lambda: given_up.wait(PATIENCE)):
        try:
            with pytest.raises(openai.APITimeoutError):
                talk(client, timeout=openai.Timeout(PATIENCE, read=0.1), **LONG)
        finally:
            given_up.set()
    service.until(service.is_idle)
    assert statuses(caplog) == [499]


def test_leaving_a_stream_withdraws_its_request(service, client):
    with talk(client, stream=True, **LONG) as stream:
        next(stream)
    service.until(service.is_idle)


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


def test_a_model_that_cannot_be_loaded_is_the_servers_fault_and_tells_of_no_file(tmp_path):
    with served({"broken": str(tmp_path / "secret")}) as running:
        with openai_client(running) as client, pytest.raises(openai.InternalServerError) as caught:
            talk(client, model="broken")
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (503, "model_not_loaded", "model")
    assert caught.value.body["message"] == "the model 'broken' cannot be loaded; the server's log says why"
    assert int(caught.value.response.headers["retry-after"]) > 0

"""Figures for Prometheus, and spans for OpenTelemetry."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from triolet.core.timings import Timings
from triolet.server.exchange import Exchange
from triolet.server.spans import Spans

from .served import Served
from .talking import PaperEngine, answered, paper_server, scope_of, talking
from .test_gate import Asked

pytestmark = pytest.mark.real_time


def samples(service: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The figures, when all requests are counted: who has its answer may ask before."""
    service.until(service.is_idle)
    families = text_string_to_metric_families(service.get("/metrics")[1])
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_request_counts_once_everywhere(
    service: Served, caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    """In the figures and in the access log."""
    asked = {"model": "llama", "ignore_eos": True, "stream": stream, **ASKED[path]}
    service.get(path, asked)
    before = samples(service)
    with caplog.at_level(logging.INFO, "triolet.access"):
        assert service.get(path, asked)[0] == 200
        after = samples(service)
    [line] = [one for one in map(json.loads, caplog.messages) if one["path"] == path]
    assert (line["model"], line["tokens"], line["status"]) == ("llama", 3, 200)
    llama = ("model", "llama")

    def more(name: str, *labels: tuple[str, str]) -> float:
        key = (name, tuple(sorted(labels)))
        return after[key] - before[key]

    assert more("triolet_http_requests_total", ("path", path), ("method", "POST"), ("status", "200")) == 1
    assert more("triolet_requests_ended_total", llama, ("outcome", "finished")) == 1
    assert more("triolet_time_to_first_token_seconds_count", llama) == 1
    assert more("triolet_request_seconds_count", llama) == 1
    assert more("triolet_tokens_committed_total", llama) == 3
    assert after["triolet_requests", (llama, ("phase", "running"))] == 0
    assert after["triolet_model_state", (llama, ("state", "ready"))] == 1
    assert after["triolet_model_load_seconds_total", (llama,)] > 0
    assert any(name == "triolet_encoder_cache_bytes" for name, _ in after)


def test_clients_make_no_series_of_their_own(service: Served) -> None:
    """Names and paths that are none of the server's would be a series each."""
    for number in range(3):
        assert service.get(f"/nothing/{number}", {})[0] == 404
        asked = {"model": f"nobody{number}", "input": "a"}
        assert service.get("/v1/embeddings", asked)[0] == 404
    told = samples(service)
    assert not [key for key in told if "nobody" in str(key) or "/nothing" in str(key)]
    assert ("triolet_http_requests_total", (("method", "POST"), ("path", "unknown"), ("status", "404"))) in told


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models/a/b", "/v1/realtime", "/nothing"])
async def test_a_refused_key_counts_at_the_path_that_was_asked_for(path: str) -> None:
    server = paper_server(PaperEngine(), api_keys=("secret",))
    if path == "/v1/realtime":
        await answered(server, scope_of(path))
    else:
        await Asked(server, "POST", path).run()
    named = {"/v1/models/a/b": "/v1/models/{model:path}", "/nothing": "unknown"}.get(path, path)
    method = "GET" if path == "/v1/realtime" else "POST"
    told = f'triolet_http_requests_total{{method="{method}",path="{named}",status="401"}} 1.0'
    assert told in server.metrics.text().decode()


async def test_a_session_of_live_audio_is_counted_while_it_is_open_and_when_it_has_ended(autojump_clock: Any) -> None:
    async with talking() as talk:
        assert "\ntriolet_realtime_sessions 1.0\n" in talk.server.metrics.text().decode()
        await trio.sleep(40)
    told = talk.server.metrics.text().decode()
    assert "\ntriolet_realtime_sessions 0.0\n" in told
    assert 'triolet_http_requests_total{method="GET",path="/v1/realtime",status="101"} 1.0' in told
    assert 'triolet_http_request_seconds_sum{path="/v1/realtime"} 40.0' in told


async def test_the_first_token_comes_after_the_model_was_loaded(autojump_clock: Any) -> None:
    server = paper_server(PaperEngine())
    server.engines.load_seconds = 20  # type: ignore[attr-defined]
    exchange: Any = Exchange({}, server.settings, "r", trio.sleep_forever, trio.sleep)  # type: ignore[arg-type]
    async with server.use("whisper", exchange):
        await trio.sleep(3)
        exchange.ended(Timings(queued=0.5, encoder_wait=0.25, first_token=1.0, total=3.0))
    server.metrics.timed("whisper", exchange.timings)
    told = server.metrics.text().decode()
    for name, seconds in {"time_to_first_token": 21.0, "queue": 20.5, "request": 23.0}.items():
        assert f'triolet_{name}_seconds_sum{{model="whisper"}} {seconds}' in told


class Span:
    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self.name, self.given, self.ended, self.attributes = name, given, 0, dict[str, Any]()

    def end(self, time: int) -> None:
        self.ended = time

    def set_attribute(self, name: str, value: object) -> None:
        self.attributes[name] = value


def test_the_stages_of_a_request_lie_within_it_one_behind_the_other() -> None:
    pytest.importorskip("opentelemetry")
    spans, begun = Spans(), list[Span]()
    spans._tracer = SimpleNamespace(start_span=lambda name, **given: begun.append(Span(name, given)) or begun[-1])
    timings = Timings(queued=0.5, encoder_wait=0.25, first_token=0.75, total=2.0)
    spans.tell("POST /v1/x", {}, 2.5, timings, {"model": "m", "nothing": None})
    whole, *stages = begun
    assert whole.given["attributes"] == {"triolet.model": "m"}
    assert whole.ended - whole.given["start_time"] == 2_500_000_000
    assert [one.name for one in stages] == ["queued", "first token", "decode"]
    assert [one.attributes for one in stages] == [{"triolet.encoder_wait_seconds": 0.25}, {}, {}]
    assert [one.ended - one.given["start_time"] for one in stages] == [500_000_000, 250_000_000, 1_250_000_000]
    assert [one.given["start_time"] for one in stages[1:]] == [one.ended for one in stages[:-1]]
    assert stages[-1].ended == whole.ended

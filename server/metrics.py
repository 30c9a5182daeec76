"""``/metrics``: what Prometheus reads, by `prometheus_client`.

Counts of the server and times of requests are kept here as they happen. All else is read from the engines' statistics
when somebody asks. A model that is unloaded takes its counters with it: they begin at 0 again, as Prometheus allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..actors.statistics import EngineStatistics
from ..api.engines import Engines
from ..core import events
from ..core.residency import ModelState
from ..core.timings import Timings

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OUTSIDE = "unknown"  # paths that are none of ours would be a series each
_COUNTED = {
    "steps": "Steps of the decoder.",
    "tokens_fed": "Tokens read, draft tokens included.",
    "tokens_cached": "Tokens not read, since their keys and values were cached.",
    "tokens_drafted": "Draft tokens that steps made room for.",
    "tokens_accepted": "Draft tokens that proved right.",
    "tokens_committed": "Tokens written.",
    "preemptions": "Requests that gave way to earlier ones.",
    "failed_steps": "Steps that failed.",
    "cross_written": "Windows whose cross-attention keys and values were written.",
    "cross_shared": "Starts that found them resident.",
}
_OF_CACHE = {
    "acquires": "Encoder outputs that requests asked for.",
    "hits": "Those that were there already, or on the way.",
    "encoded": "Encoder outputs computed.",
    "evicted": "Encoder outputs dropped for room, or after their time.",
}


class Metrics:
    """The server's figures. `heard` is a listener of `Observers`."""

    def __init__(self, engines: Engines) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "triolet_http_requests", "Requests by their answer.", ("path", "method", "status"), registry=self._registry
        )
        self._seconds = self._histogram("triolet_http_request_seconds", "From the first byte to the last.", "path")
        self._first = self._histogram("triolet_time_to_first_token_seconds", "From the call on.", "model")
        self._queued = self._histogram("triolet_queue_seconds", "Until a request has a place.", "model")
        self._whole = self._histogram("triolet_request_seconds", "From the call to the end.", "model")
        self._ended = Counter(
            "triolet_requests_ended", "The engine's requests by outcome.", ("model", "outcome"), registry=self._registry
        )
        self._failed = Counter(
            "triolet_request_failures", "Failed requests by error.", ("model", "kind"), registry=self._registry
        )
        self._restarts = Counter(
            "triolet_runner_restarts", "Runners that failed and began anew.", ("model",), registry=self._registry
        )
        self._registry.register(_Snapshots(engines))

    def _histogram(self, name: str, told: str, label: str) -> Histogram:
        return Histogram(name, told, (label,), buckets=_SECONDS, registry=self._registry)

    def answered(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """A request was answered. ``path`` is that of the endpoint; ``status`` is 499 where the client left."""
        named = path or _OUTSIDE
        method = method if method in _METHODS else "other"
        self._answers.labels(named, method, str(status)).inc()
        self._seconds.labels(named).observe(seconds)

    def timed(self, model: str, timings: Timings | None) -> None:
        """A request of ``model`` has ended well."""
        if timings is None:
            return
        self._queued.labels(model).observe(timings.queued)
        self._whole.labels(model).observe(timings.total)
        if timings.first_token is not None:
            self._first.labels(model).observe(timings.first_token)

    def heard(self, model: str, event: events.Event) -> None:
        """Counts what nothing else tells."""
        if isinstance(event, events.RequestEnded):
            self._ended.labels(model, event.outcome).inc()
            if event.error:
                self._failed.labels(model, event.error.partition(":")[0]).inc()
        elif isinstance(event, events.RunnerRestarting):
            self._restarts.labels(model).inc()

    def text(self) -> bytes:
        """All figures, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Snapshots:
    """Reads the statistics of all models when Prometheus asks."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def describe(self) -> list[Any]:
        """Nothing: it would be read before the engines are open."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics."""
        told = self._engines.statistics()
        yield from _of_models(told)
        running = {name: one.engine for name, one in told.items() if one.engine is not None}
        yield from _of_requests(running)
        yield from _of_cache(running)
        yield from _of_memory(running)


def _of_models(told: Any) -> Iterator[Any]:
    state = GaugeMetricFamily("triolet_model_state", "1: the model is in this state.", labels=("model", "state"))
    users = GaugeMetricFamily("triolet_model_users", "Uses of the model.", labels=("model", "phase"))
    size = GaugeMetricFamily("triolet_model_bytes", "What the model counts against the budget.", labels=("model",))
    loads = CounterMetricFamily("triolet_model_loads", "How often it was loaded.", labels=("model",))
    for name, one in told.items():
        for each in ModelState:
            state.add_metric((name, each.value), float(one.state is each))
        users.add_metric((name, "running"), one.users)
        users.add_metric((name, "waiting"), one.waiting)
        size.add_metric((name,), one.bytes)
        loads.add_metric((name,), one.loads)
    yield from (state, users, size, loads)


def _of_requests(running: dict[str, EngineStatistics]) -> Iterator[Any]:
    requests = GaugeMetricFamily("triolet_requests", "Requests of the engine.", labels=("model", "phase"))
    pages = GaugeMetricFamily("triolet_pages", "Pages of keys and values.", labels=("model", "state"))
    slots = GaugeMetricFamily("triolet_cross_slots", "Slots of cross-attention.", labels=("model", "state"))
    for name, one in running.items():
        planner = one.requests
        for phase in ("waiting", "running", "leaving"):
            requests.add_metric((name, phase), getattr(planner, phase))
        used = planner.pages - planner.pages_free
        for state, count in (("used", used), ("cached", planner.pages_cached), ("free", planner.pages_free)):
            pages.add_metric((name, state), count)
        used = planner.cross_slots_used
        for state, count in (("used", used), ("idle", planner.cross_slots_idle)):
            slots.add_metric((name, state), count)
    yield from (requests, pages, slots)
    for figure, text in _COUNTED.items():
        yield _counter(
            f"triolet_{figure}", text, {name: getattr(one.requests, figure) for name, one in running.items()}
        )


def _of_cache(running: dict[str, EngineStatistics]) -> Iterator[Any]:
    size = GaugeMetricFamily("triolet_encoder_cache_bytes", "Encoder outputs by state.", labels=("model", "state"))
    capacity = GaugeMetricFamily("triolet_encoder_cache_capacity_bytes", "Room for them.", labels=("model",))
    waiting = GaugeMetricFamily("triolet_encoder_cache_waiting", "Acquires that wait for room.", labels=("model",))
    for name, one in running.items():
        for state, count in one.encoder_cache.bytes_by_state.items():
            size.add_metric((name, state), count)
        capacity.add_metric((name,), one.encoder_cache.capacity)
        waiting.add_metric((name,), one.encoder_cache.waiting)
    yield from (size, capacity, waiting)
    for figure, text in _OF_CACHE.items():
        values = {name: getattr(one.encoder_cache, figure) for name, one in running.items()}
        yield _counter(f"triolet_encoder_cache_{figure}", text, values)


def _of_memory(running: dict[str, EngineStatistics]) -> Iterator[Any]:
    owned = GaugeMetricFamily("triolet_device_bytes", "What the engine holds, by owner.", labels=("model", "owner"))
    for name, one in running.items():
        for owner, count in one.device.by_owner.items():
            owned.add_metric((name, owner), count)
    yield owned


def _counter(name: str, told: str, values: dict[str, int]) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, told, labels=("model",))
    for model, value in values.items():
        counter.add_metric((model,), value)
    return counter

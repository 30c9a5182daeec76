"""``/metrics``: what Prometheus reads, by `prometheus_client`.

Counts of the server and times of requests are kept here as they happen. All else is read from the engines' statistics
when somebody asks. A model that is unloaded takes its counters with it: they begin at 0 again, as Prometheus allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

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

    def _histogram(self, name: str, text: str, label: str) -> Histogram:
        return Histogram(name, text, (label,), buckets=_SECONDS, registry=self._registry)

    def answered(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Counts an answer. ``path`` is that of the endpoint; ``status`` is 499 where the client left."""
        named = path or _OUTSIDE
        method = method if method in _METHODS else "other"
        self._answers.labels(named, method, str(status)).inc()
        self._seconds.labels(named).observe(seconds)

    def timed(self, model: str, timings: Timings | None) -> None:
        """Counts the times of a request of ``model`` that has ended well."""
        if timings is None:
            return
        self._queued.labels(model).observe(timings.queued)
        self._whole.labels(model).observe(timings.total)
        if timings.first_token is not None:
            self._first.labels(model).observe(timings.first_token)

    def heard(self, model: str, event: events.Event) -> None:
        """Counts what no statistics have."""
        if isinstance(event, events.RequestEnded):
            self._ended.labels(model, event.outcome).inc()
            if event.error:
                self._failed.labels(model, event.error.partition(":")[0]).inc()
        elif isinstance(event, events.RunnerRestarting):
            self._restarts.labels(model).inc()

    def text(self) -> bytes:
        """Returns all figures, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Snapshots:
    """Reads the statistics of all models when Prometheus asks."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def describe(self) -> list[Any]:
        """Returns nothing: it would be read before the engines are open."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields all metrics."""
        models = self._engines.statistics()
        states = {name: {each.value: float(one.state is each) for each in ModelState} for name, one in models.items()}
        yield _gauge("model_state", "1: the model is in this state.", states, "state")
        users = {name: {"running": one.users, "waiting": one.waiting} for name, one in models.items()}
        yield _gauge("model_users", "Uses of the model.", users, "phase")
        sizes = {name: one.bytes for name, one in models.items()}
        yield _gauge("model_bytes", "What the model counts against the budget.", sizes)
        yield _counter("model_loads", "How often it was loaded.", {name: one.loads for name, one in models.items()})
        running = {name: one.engine for name, one in models.items() if one.engine is not None}
        yield from _of_requests({name: one.requests for name, one in running.items()})
        yield from _of_cache({name: one.encoder_cache for name, one in running.items()})
        owned = {name: one.device.by_owner for name, one in running.items()}
        yield _gauge("device_bytes", "What the engine holds, by owner.", owned, "owner")


def _of_requests(running: Mapping[str, Any]) -> Iterator[Any]:
    phases = ("waiting", "running", "leaving")
    requests = {name: {phase: getattr(one, phase) for phase in phases} for name, one in running.items()}
    yield _gauge("requests", "Requests of the engine.", requests, "phase")
    pages = {
        name: {"used": one.pages - one.pages_free, "cached": one.pages_cached, "free": one.pages_free}
        for name, one in running.items()
    }
    yield _gauge("pages", "Pages of keys and values.", pages, "state")
    slots = {name: {"used": one.cross_slots_used, "idle": one.cross_slots_idle} for name, one in running.items()}
    yield _gauge("cross_slots", "Slots of cross-attention.", slots, "state")
    for figure, text in _COUNTED.items():
        yield _counter(figure, text, {name: getattr(one, figure) for name, one in running.items()})


def _of_cache(running: Mapping[str, Any]) -> Iterator[Any]:
    sizes = {name: one.bytes_by_state for name, one in running.items()}
    yield _gauge("encoder_cache_bytes", "Encoder outputs by state.", sizes, "state")
    yield _gauge(
        "encoder_cache_capacity_bytes", "Room for them.", {name: one.capacity for name, one in running.items()}
    )
    waiting = {name: one.waiting for name, one in running.items()}
    yield _gauge("encoder_cache_waiting", "Acquires that wait for room.", waiting)
    for figure, text in _OF_CACHE.items():
        yield _counter(f"encoder_cache_{figure}", text, {name: getattr(one, figure) for name, one in running.items()})


def _gauge(name: str, text: str, values: Mapping[str, Any], label: str | None = None) -> GaugeMetricFamily:
    """Makes a gauge of the values by model, or with a ``label`` by model and by that label."""
    gauge = GaugeMetricFamily(f"triolet_{name}", text, labels=("model",) if label is None else ("model", label))
    for model, value in values.items():
        if label is None:
            gauge.add_metric((model,), value)
        else:
            for part, number in value.items():
                gauge.add_metric((model, part), number)
    return gauge


def _counter(name: str, text: str, values: Mapping[str, int]) -> CounterMetricFamily:
    counter = CounterMetricFamily(f"triolet_{name}", text, labels=("model",))
    for model, value in values.items():
        counter.add_metric((model,), value)
    return counter

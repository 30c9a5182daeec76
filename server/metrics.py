"""``/metrics``: the figures that Prometheus reads, written by `prometheus_client`.

The server's own counts and the times of requests are collected here as they happen. All other figures are read from the
engines' statistics on demand. The counters of a model are lost when it is unloaded, and begin at 0 again; Prometheus
allows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import partial
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client import Gauge as _Gauge
from prometheus_client.core import CounterMetricFamily as Count
from prometheus_client.core import GaugeMetricFamily as Gauge

from ..api.engines import Engines, ModelStatistics
from ..core import events
from ..core.budget import Budget
from ..core.planning.statistics import PlannerStatistics
from ..core.residency import ModelState
from ..core.timings import Timings

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OUTSIDE = "unknown"  # else each unknown path would make a series
_Row = tuple[Callable[..., Any], str, str, str | None, Callable[[Any], Any]]
"""A family of metrics: its kind, name and help, its label beside the model, and a function that reads its values from
statistics."""


def _count(name: str, text: str) -> _Row:
    return Count, name, text, None, attrgetter(name)


def _states(model: ModelStatistics) -> dict[str, float]:
    return {each.value: float(model.state is each) for each in ModelState}


def _phases(requests: PlannerStatistics) -> dict[str, int]:
    return {"waiting": requests.waiting, "running": requests.running, "leaving": requests.leaving}


def _slots(requests: PlannerStatistics) -> dict[str, int]:
    return {"used": requests.cross_slots_used, "idle": requests.cross_slots_idle}


def _pages(requests: PlannerStatistics) -> dict[str, int]:
    used = requests.pages - requests.pages_free
    return {"used": used, "cached": requests.pages_cached, "free": requests.pages_free}


_OF_MODELS: tuple[_Row, ...] = (
    (Gauge, "model_state", "1 if the model is in this state, else 0.", "state", _states),
    (Gauge, "model_users", "Uses.", "phase", lambda one: {"running": one.users, "waiting": one.waiting}),
    (Gauge, "model_bytes", "Bytes of the model within the memory budget.", None, attrgetter("bytes")),
    (Count, "model_loads", "The number of times that the model was loaded.", None, attrgetter("loads")),
    (Count, "model_load_seconds", "Seconds that these loads took together.", None, attrgetter("load_seconds")),
)
_OF_REQUESTS: tuple[_Row, ...] = (
    (Gauge, "requests", "Requests in the engine, by phase.", "phase", _phases),
    (Gauge, "pages", "Pages of keys and values, by state.", "state", _pages),
    (Gauge, "cross_slots", "Cross-attention slots, by state.", "state", _slots),
    _count("steps", "Decoder steps."),
    _count("tokens_fed", "Tokens that were read, including draft tokens."),
    _count("tokens_cached", "Tokens that were not read, since their keys and values were cached."),
    _count("tokens_drafted", "Draft tokens in steps."),
    _count("tokens_accepted", "Draft tokens that were right."),
    _count("tokens_committed", "Tokens that were generated."),
    _count("preemptions", "Requests that were preempted by earlier ones."),
    _count("failed_steps", "Decoder steps that failed."),
    _count("cross_written", "Windows whose cross-attention keys and values were written."),
    _count("cross_shared", "Starts that found these keys and values resident."),
)
_OF_CACHE: tuple[_Row, ...] = (
    (Gauge, "bytes", "Bytes of encoder outputs, by state.", "state", attrgetter("bytes_by_state")),
    (Gauge, "capacity_bytes", "Bytes that encoder outputs may take.", None, attrgetter("capacity")),
    (Gauge, "waiting", "Requests for encoder outputs that wait for room.", None, attrgetter("waiting")),
    _count("acquires", "Encoder outputs that requests asked for."),
    _count("hits", "Requested encoder outputs that were resident or were being computed."),
    _count("encoded", "Encoder outputs that were computed."),
    _count("evicted", "Encoder outputs that were evicted for room, or after their idle time."),
)
_OF_DEVICE: tuple[_Row, ...] = (
    (Gauge, "bytes", "Bytes that the engine holds, by owner.", "owner", attrgetter("by_owner")),
)


class Metrics:
    """The figures of the server. `heard` is a listener of `Observers`."""

    def __init__(self, engines: Engines, budget: Budget, sockets: Sized) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=self._registry)
        self._answers = counter(
            "triolet_http_requests", "HTTP requests, by path, method and status.", ("path", "method", "status")
        )
        self._seconds = histogram(
            "triolet_http_request_seconds",
            "Seconds from the first byte of a request to the last byte of its answer.",
            ("path",),
        )
        self._first = histogram(
            "triolet_time_to_first_token_seconds",
            "Seconds from the call to the first token, those of loading the model among them.",
            ("model",),
        )
        self._queued = histogram(
            "triolet_queue_seconds",
            "Seconds until a request has a place in the engine, and its model is loaded.",
            ("model",),
        )
        self._whole = histogram(
            "triolet_request_seconds", "Seconds from the call to the end of the request.", ("model",)
        )
        self._ended = counter(
            "triolet_requests_ended", "Requests of the engine that have ended, by outcome.", ("model", "outcome")
        )
        self._failed = counter(
            "triolet_request_failures", "Requests of the engine that have failed, by error.", ("model", "kind")
        )
        self._restarts = counter("triolet_runner_restarts", "Restarts of the runner after a failure.", ("model",))
        gauge = partial(_Gauge, registry=self._registry)
        gauge("triolet_request_memory_bytes", "Bytes that requests hold.").set_function(lambda: budget.held)
        gauge("triolet_request_memory_capacity_bytes", "Bytes that requests may hold.").set(budget.capacity)
        gauge("triolet_realtime_sessions", "Sessions of live audio that are open.").set_function(lambda: len(sockets))
        self._registry.register(_Snapshots(engines))

    def answered(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Counts an answer, or a WebSocket that has ended. ``path`` is the path of the endpoint; ``status`` is 499 if
        the client has left."""
        named = path or _OUTSIDE
        method = method if method in _METHODS else "other"
        self._answers.labels(named, method, str(status)).inc()
        self._seconds.labels(named).observe(seconds)

    def timed(self, model: str, timings: Timings | None) -> None:
        """Adds the times of a request of ``model`` that has ended well."""
        if timings is None:
            return
        self._queued.labels(model).observe(timings.queued)
        self._whole.labels(model).observe(timings.total)
        if timings.first_token is not None:
            self._first.labels(model).observe(timings.first_token)

    def heard(self, model: str, event: events.Event) -> None:
        """Counts an event that the engine's statistics do not cover."""
        if isinstance(event, events.RequestEnded):
            self._ended.labels(model, event.outcome).inc()
            if event.error:
                self._failed.labels(model, event.error.partition(":")[0]).inc()
        elif isinstance(event, events.RunnerRestarting):
            self._restarts.labels(model).inc()

    def text(self) -> bytes:
        """Returns all figures in the text format of Prometheus."""
        return generate_latest(self._registry)


class _Snapshots:
    """Reads the statistics of all models whenever Prometheus asks for them."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def describe(self) -> list[Any]:
        """Returns nothing, since it is called before the engines are open."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields all metrics."""
        models = self._engines.statistics()
        engines = {name: one.engine for name, one in models.items() if one.engine is not None}
        for prefix, rows, statistics in (
            ("", _OF_MODELS, models),
            ("", _OF_REQUESTS, {name: one.requests for name, one in engines.items()}),
            ("encoder_cache_", _OF_CACHE, {name: one.encoder_cache for name, one in engines.items()}),
            ("device_", _OF_DEVICE, {name: one.device for name, one in engines.items()}),
        ):
            for kind, name, text, label, read in rows:
                labels = ("model",) if label is None else ("model", label)
                family = kind(f"triolet_{prefix}{name}", text, labels=labels)
                for model, one in statistics.items():
                    if label is None:
                        family.add_metric((model,), read(one))
                    else:
                        for part, number in read(one).items():
                            family.add_metric((model, part), number)
                yield family

"""OpenTelemetry's spans of a request and its stages, if OpenTelemetry's API package is installed.

If the program has not configured an SDK, the API's own tracer does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from attrs import define, field

from ..core.timings import Timings

_NANOSECONDS = 1_000_000_000


@define(eq=False)
class Spans:
    """Reports requests to OpenTelemetry. It reports a request when it is over, since all times are known then."""

    _tracer: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tracer = _tracer()

    def tell(
        self, name: str, headers: Mapping[str, str], seconds: float, timings: Timings | None, told: Mapping[str, object]
    ) -> None:
        """Reports the request ``name``, which has just ended after ``seconds``. A ``traceparent`` in ``headers`` names
        the parent span."""
        if self._tracer is None:
            return
        from opentelemetry import propagate, trace

        end = time.time_ns()
        begin = end - round(seconds * _NANOSECONDS)
        attributes = {f"triolet.{key}": _plain(value) for key, value in told.items() if value is not None}
        span = self._tracer.start_span(
            name,
            context=propagate.extract(dict(headers)),
            kind=trace.SpanKind.SERVER,
            start_time=begin,
            attributes=attributes,
        )
        if timings is not None:
            self._stages(trace.set_span_in_context(span), end, timings)
        span.end(end)

    def _stages(self, parent: Any, end: int, timings: Timings) -> None:
        """Reports the stages of a request. Its last stage ended at the time ``end``."""
        start = end - round(timings.total * _NANOSECONDS)
        first = timings.queued if timings.first_token is None else timings.first_token
        stages = {
            "queued": (0.0, timings.queued),
            "first token": (timings.queued, first),
            "decode": (first, timings.total),
        }
        for name, (begins, ends) in stages.items():
            span = self._tracer.start_span(name, context=parent, start_time=start + round(begins * _NANOSECONDS))
            if name == "queued":
                span.set_attribute("triolet.encoder_wait_seconds", timings.encoder_wait)
            span.end(start + round(max(begins, ends) * _NANOSECONDS))


def _plain(value: object) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)


def _tracer() -> Any:
    if find_spec("opentelemetry") is None:
        return None
    from opentelemetry import trace

    return trace.get_tracer("triolet")

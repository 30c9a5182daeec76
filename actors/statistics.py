"""A snapshot of a running engine's figures."""

from __future__ import annotations

from attrs import frozen

from ..core import html
from ..core.ledger_values import LedgerStatistics
from ..core.plan import DeviceMemory
from ..core.planning.statistics import PlannerStatistics
from ..core.power import Power


@frozen(kw_only=True)
class EngineStatistics:
    """A snapshot of a running engine: its power state, the queue and the pages, the encoder ledger, the device's bytes
    by owner."""

    power: Power
    requests: PlannerStatistics
    encoder_cache: LedgerStatistics
    device: DeviceMemory

    def _repr_html_(self) -> str:
        """Returns the figures as a table, which notebooks show."""
        return html.table("statistics", self.rows())

    def rows(self) -> tuple[html.Row, ...]:
        """The figures by name, for people."""
        return html.statistics_rows(self.power, self.requests, self.encoder_cache, self.device)

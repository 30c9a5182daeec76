"""A snapshot of a running engine's figures."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from attrs import asdict, frozen

from ..core.ledger_values import LedgerStatistics
from ..core.log_lines import owners
from ..core.plan import DeviceMemory
from ..core.planning.statistics import PlannerStatistics
from ..core.power import Power


@frozen(kw_only=True)
class EngineStatistics:
    """A snapshot of a running engine: its power state, the figures of its planner and of its encoder ledger, and the
    bytes on the device by owner.
    """

    power: Power
    requests: PlannerStatistics
    encoder_cache: LedgerStatistics
    device: DeviceMemory

    def _repr_html_(self) -> str:
        """Returns the figures as a table, which notebooks show in place of a long repr."""
        return self.table("statistics")

    def table(self, caption: str) -> str:
        """Returns the figures as an HTML table."""
        left = 'style="text-align:left"'
        lines = "".join(
            f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(figures)}</td></tr>" for name, figures in self.rows()
        )
        return f"<table><caption {left}>{escape(caption)}</caption>{lines}</table>"

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the figures of each part, as text for people. Figures that are 0 are left out, and so is
        the encoder cache while nobody has used it."""
        yield "power", self.power.value
        parts = {"requests": asdict(self.requests), "encoder cache": asdict(self.encoder_cache)}
        for part, figures in parts.items():
            if figures.get("acquires") != 0:
                counts = {name.replace("_", " "): count for name, count in figures.items() if type(count) is int}
                yield part, ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
        yield f"memory on {self.device.device}", owners(self.device)

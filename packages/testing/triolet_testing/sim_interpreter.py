"""A simulated interpreter."""

from __future__ import annotations

from attrs import define

from triolet.actors.switch_interval import SwitchInterval


@define(eq=False)
class SimInterpreter:
    """A stand-in for Python's switch interval, kept in whole microseconds. Real threads are not affected."""

    microseconds: int = 5000

    def read(self) -> float:
        """Plays `sys.getswitchinterval`."""
        return self.microseconds * 1e-6

    def write(self, seconds: float) -> None:
        """Plays `sys.setswitchinterval`, which rounds down to whole microseconds."""
        self.microseconds = int(seconds * 1e6)

    def owner(self) -> SwitchInterval:
        """Returns the owner of this interval."""
        return SwitchInterval(self.read, self.write)

"""The progress of files that are transcribed: a bar of seconds of audio, and segments as they become final."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..formats.writers import timed_line
from ..outputs.results import Segment
from .terminal import is_terminal, visible

_FORM = "{percentage:3.0f}% of {total:.0f} s |{bar}| {elapsed}, {remaining} left, {rate_noinv_fmt}"
_FORM_WITHOUT_TOTAL = "{n:.0f} s, {elapsed}, {rate_noinv_fmt}"


class Progress:
    """A bar of seconds of audio on standard error, with the speed (seconds of audio a second). There is no bar if
    standard error is not a terminal. ``shows_text``: `show` writes segments to standard error.
    """

    def __init__(self, *, shows_text: bool = False) -> None:
        self._shows_text = shows_text
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def has_bar(self) -> bool:
        """True if there is a bar once a file was opened."""
        return is_terminal(sys.stderr)

    def begin(self, seconds: float | None) -> None:
        """Adds the length of a file that was opened; ``None``: its length is not known."""
        if self._bar is None:
            from tqdm import tqdm

            form = _FORM_WITHOUT_TOTAL if seconds is None else _FORM
            options = {"leave": False, "unit": " s of audio", "smoothing": 0, "bar_format": form}
            self._bar = tqdm(total=seconds, file=sys.stderr, disable=None, **options)
        elif seconds is None:
            self._bar.total, self._bar.bar_format = None, _FORM_WITHOUT_TOTAL
        elif self._bar.total is not None:
            self._bar.total += seconds
            self._bar.refresh()

    def advance(self, seconds: float) -> None:
        """Counts ``seconds`` more of audio as done."""
        if self._bar is not None:
            self._bar.update(seconds)
            self._bar.refresh()

    def show(self, name: str | None, segment: Segment) -> None:
        """Writes a final segment with its times, and the ``name`` of its file if there are several."""
        if self._shows_text:
            self.clear()
            click.echo(visible((f"{name} " if name else "") + timed_line(segment)), err=True)

    def clear(self) -> None:
        """Makes room for a line on the terminal."""
        if self._bar is not None:
            self._bar.clear()

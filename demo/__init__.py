"""The demo checkpoint and its sample recordings: real speech recognition in a few megabytes, for trying things out.

The model knows English, German and Spanish household sentences as espeak-ng speaks them, and nothing else.
"""

import json
from pathlib import Path

import attrs

__all__ = ["Sample", "checkpoint", "samples"]

_HERE = Path(__file__).resolve().parent


@attrs.frozen
class Sample:
    """A recording with what is said in it."""

    path: Path
    language: str | None
    """'en', 'de' or 'es'; None where nobody speaks."""
    text: str
    """The true transcript; empty where nobody speaks."""
    translation: str
    """The true English translation."""
    duration: float
    """Seconds."""


def checkpoint() -> Path:
    """The folder of the demo checkpoint, in the layout of transformers."""
    return _HERE / "checkpoint"


def samples() -> tuple[Sample, ...]:
    """The sample recordings, by file name."""
    rows = json.loads((_HERE / "samples" / "samples.json").read_text(encoding="utf-8"))
    return tuple(
        Sample(_HERE / "samples" / row["file"], row["language"], row["text"], row["translation"], row["duration"])
        for row in rows
    )

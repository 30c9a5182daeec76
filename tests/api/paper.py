"""An engine of paper for the command line: it says the names of files."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from triolet.api.command_line.main import main
from triolet.api.outputs.results import Progress, Segment, Stretch, Transcript, Turn, Word
from triolet.api.speech.transcription import SegmentStream
from triolet.core.config import EngineConfig
from triolet.core.errors import EncodeFailed, TrioletError, UnsupportedAudio

from .speech import describe


def segment(number: int, start: float, end: float, text: str) -> Segment:
    return Segment(
        id=number,
        start=start,
        end=end,
        text=text,
        token_ids=(1, 2),
        avg_logprob=-0.5,
        no_speech_prob=0.1,
        compression_ratio=1.0,
        temperature=0.0,
    )


class PaperEngine:
    """Two segments that say the file's name; by that name: ``bad*`` cannot be decoded, ``breaks*`` breaks after the
    first segment, ``endless*`` presses ^C after the first segment, ``interrupt*`` before it, ``ahead*`` when the second
    one is read but not the first, and the bar shows it, ``slow*`` comes last, ``warned*`` has a warning."""

    def __init__(self, opening: TrioletError | None = None, closing: BaseException | None = None) -> None:
        self.model = describe(alignment_fault=None)
        self.opening = opening
        self.closing = closing
        self.models: list[tuple[str, EngineConfig]] = []
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.duration: float | None = 2.5
        self.words = False
        self.turns: tuple[Turn, ...] = ()
        self.running = self.most_running = 0
        self.closed = False
        self.finished = 0

    def __call__(self, model: str, config: EngineConfig) -> PaperEngine:
        self.models.append((model, config))
        return self

    async def __aenter__(self) -> PaperEngine:
        if self.opening:
            raise self.opening
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True
        if isinstance(self.closing, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        elif self.closing:
            raise self.closing

    def diarize(self, audio: Any, strict: bool) -> Any:
        raise AssertionError(f"only an engine calls a diarizer, here with {audio} and {strict}")

    async def align(self, audio: Any, text: str, language: str | None = None) -> list[Word]:
        raise AssertionError("only checked")

    @asynccontextmanager
    async def stream_transcription(self, audio: Any, **options: Any) -> AsyncIterator[SegmentStream]:
        self.asked.append((audio, options))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        name = str(audio)
        if name.startswith("bad"):
            raise UnsupportedAudio("cut short:\n  promised 2, found 1")
        if name.startswith("interrupt"):
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        while name.startswith("slow") and self.finished < 2:
            await trio.lowlevel.checkpoint()
        so_far = Transcript(
            text="",
            language="en",
            language_probability=0.75,
            duration=self.duration or 0.0,
            segments=(),
            turns=self.turns,
            warnings=("the end is missing",) if name.startswith("warned") else (),
        )
        at = [Progress(so_far=so_far, duration=self.duration, position=0.0)]
        yield SegmentStream(self._segments(name, at), lambda _: at[-1])
        self.running -= 1
        self.finished += 1

    async def _segments(self, name: str, at: list[Progress]) -> AsyncIterator[Segment]:
        await trio.lowlevel.checkpoint()
        if name.startswith("ahead"):
            second = self._segment(0, 1.0, 2.5, "\nmöglichst.")
            coverage = (Stretch(start=0.0, end=1.0, kind="unread"), Stretch(start=1.0, end=2.5, kind="speech"))
            at.append(evolve(at[0], seconds_read=1.5, ahead=(second,), so_far=evolve(at[0].so_far, coverage=coverage)))
            with trio.move_on_after(60):
                while sys.stderr.isatty() and "60%" not in sys.stderr.getvalue():  # type: ignore[attr-defined]
                    await trio.lowlevel.checkpoint()
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        at.append(self._reached(at[0], 1.0))
        yield self._segment(0, 0.0, 1.0, f" said in {name},")
        if name.startswith("breaks"):
            raise EncodeFailed("the device is gone")
        if name.startswith("endless"):
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        at.append(self._reached(at[0], 2.5))
        yield self._segment(1, 1.0, 2.5, "\nmöglichst.")

    def _reached(self, begun: Progress, seconds: float) -> Progress:
        """How far the transcription is; without a known length it is as long as it was read."""
        end = self.duration or seconds
        coverage = (Stretch(start=seconds, end=end, kind="unread"),) if seconds < end else ()
        so_far = evolve(begun.so_far, duration=end, coverage=coverage)
        return evolve(begun, so_far=so_far, position=seconds, seconds_read=seconds)

    def _segment(self, number: int, start: float, end: float, text: str) -> Segment:
        words = (Word(text=text, start=start, end=end, probability=0.5),) if self.words else None
        return evolve(segment(number, start, end, text), words=words)


def run(arguments: Sequence[str], engine: Any = None) -> int:
    """The exit status. Recordings to transcribe are made first, but ``absent*``; a model is named where none is."""
    if arguments[:1] == ["transcribe"]:
        for name in arguments:
            if name.endswith(".wav") and not name.startswith("absent"):
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).touch()
        if "--model" not in arguments:
            arguments = ["transcribe", "--model", "paper", *arguments[1:]]
    return run_as_it_is(arguments, engine)


def run_as_it_is(arguments: Sequence[str], engine: Any = None) -> int:
    """The exit status. ``engine`` stands for `Engine`."""
    with pytest.raises(SystemExit) as caught:
        main(arguments, engine)
    status = caught.value.code
    assert isinstance(status, int)
    return status


def refuse(model: str, config: EngineConfig) -> Any:
    """Stands for an engine that must not be opened."""
    raise AssertionError(f"{model} was opened with {config}")


class Terminal(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    """A stream that takes nothing: its reader went away, or the disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

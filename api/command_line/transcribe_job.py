"""`TranscribeJob`: files to transcribe through one engine, several at once."""

from __future__ import annotations

import io
import itertools
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import trio
from attrs import define, evolve, field

from ...core.errors import TrioletError
from ..formats.writers import timed_line
from ..outputs.results import Segment, Transcript
from ..speech.options import TranscribeOptions
from ..speech.recipe import Recipe
from ..speech.transcription import SegmentStream
from .destinations import Outputs
from .given import STDIN, read_stdin, shown
from .pages import in_flags
from .terminal import FAILED, PIPE_CLOSED, OutputError, complain, is_terminal, visible

_FORM = "{percentage:3.0f}% of {total:.0f} s |{bar}| {elapsed}, LEFT left, {rate_noinv_fmt}"
_FORM_WITHOUT_TOTAL = "{n:.0f} s, {elapsed}, {rate_noinv_fmt}"


class ProgressBar:
    """A bar of seconds of audio on standard error, with the speed (seconds of audio a second). There is no bar if
    standard error is not a terminal. ``shows_text``: `show` writes segments to standard error.
    """

    def __init__(self, *, shows_text: bool = False) -> None:
        self._shows_text = shows_text
        self._bar: Any = None
        self._reached: float | None = None  # seconds from the bar's begin to the last audio that was done

    def __enter__(self) -> ProgressBar:
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
        if not self.has_bar:
            return
        if self._bar is None:
            from tqdm import tqdm

            options = {"leave": False, "unit": " s of audio", "smoothing": 0, "bar_format": self._form(seconds)}
            self._bar = tqdm(total=seconds, file=sys.stderr, **options)
        elif seconds is None:
            self._bar.total = None
        elif self._bar.total is not None:
            self._bar.total += seconds
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Counts ``seconds`` more of audio as done."""
        if self._bar is None:
            return
        if seconds:
            self._reached = self._bar.format_dict["elapsed"]
            self._bar.update(seconds)
        self._bar.bar_format = self._form(self._bar.total)
        self._bar.refresh()

    def _form(self, total: float | None) -> str:
        """The form of the bar. The time left follows from the pace up to the last audio that was done, and runs down
        until more is done. tqdm's own grows meanwhile."""
        if total is None:
            return _FORM_WITHOUT_TOTAL
        if self._reached is None:
            return _FORM.replace("LEFT", "?")
        left = self._reached * total / self._bar.n - self._bar.format_dict["elapsed"]
        return _FORM.replace("LEFT", self._bar.format_interval(max(left, 0.0)))

    def show(self, name: str | None, segment: Segment) -> None:
        """Writes a final segment with its times, and the ``name`` of its file if there are several."""
        if self._shows_text:
            self.clear()
            click.echo(visible((f"{name} " if name else "") + timed_line(segment)), err=True)

    def clear(self) -> None:
        """Makes room for a line on the terminal."""
        if self._bar is not None:
            self._bar.clear()


# ---- jobs ------------------------------------------------------------------------------------------------------------


PARALLEL_SECONDS = 120.0  # longer files are transcribed in parallel by default
_REFRESH = 0.25  # seconds from one look at the streams to the next


@define(eq=False)
class _File:
    """A file, and how far its transcription has come.

    Attributes:
        stream: the open stream of its segments.
        given: the number of segments that the destination has.
        counted: the seconds of audio that the bar has counted.
        transcript: the text so far, once the stream has ended.
        missing: which seconds of the audio ``transcript`` lacks, in words.
    """

    name: str
    stream: SegmentStream | None = None
    given: int = 0
    counted: float = 0.0
    transcript: Transcript | None = None
    missing: str = ""
    is_complete: bool = False
    has_ended: bool = False
    error: Exception | None = None


@define(eq=False, kw_only=True)
class TranscribeJob:
    """Files to transcribe through one engine.

    Args:
        names: paths; "-" is standard input.
        destination: the `Outputs` of the transcripts.
        progress: shows how far the files are.
        options: the options of the transcriptions, by name. Unless they say how, a file of more than
            `PARALLEL_SECONDS` is transcribed in parallel.
        at_once: the number of files that are transcribed together, and held in memory.
        tells_files: true: say which files were written, for how many inputs.
        names_requests: true: name requests after their files, for followers of the engine.
    """

    names: tuple[str, ...]
    destination: Outputs
    progress: ProgressBar
    options: Mapping[str, Any]
    at_once: int
    tells_files: bool
    names_requests: bool
    engine: Any = field(default=None, init=False)
    _files: list[_File] = field(init=False)  # not reported yet

    def __attrs_post_init__(self) -> None:
        self._files = [_File(name) for name in self.names]

    async def run(self, engine: Any) -> int:
        """Transcribes the files; returns the exit status. A cancelled run leaves what was transcribed so far."""
        # options that the model lacks are refused once, not for each file
        Recipe(options=TranscribeOptions(**self.options), description=engine.model)
        self.engine = engine
        status, waiting, at_end = 0, iter(tuple(self._files)), False
        sender, ended = trio.open_memory_channel[_File](math.inf)
        try:
            async with trio.open_nursery() as nursery:
                if self.progress.has_bar:
                    nursery.start_soon(self._watch)
                for _ in range(min(self.at_once, len(self._files))):
                    nursery.start_soon(self._work, waiting, sender.clone())
                sender.close()
                try:
                    async for ended_file in ended:
                        for file in self._to_report(ended_file):
                            status = max(status, self._report(file))
                except BrokenPipeError:
                    status = PIPE_CLOSED
                except OutputError as error:
                    status = self._complain(str(error))
                nursery.cancel_scope.cancel()
            at_end = True
        finally:
            if not at_end:
                self._leave()
        return status

    def _to_report(self, file: _File) -> list[_File]:
        """The files to report now that ``file`` has ended. If the destination wants no order, this is ``file`` alone.
        Otherwise these are the next files in the order, up to the first that has not ended.
        """
        file.has_ended = True
        if not self.destination.in_order:
            return [file]
        return list(itertools.takewhile(lambda each: each.has_ended, self._files))

    async def _work(self, waiting: Iterator[_File], ended: trio.MemorySendChannel[_File]) -> None:
        with ended:
            for file in waiting:
                try:
                    await self._transcribe(file)
                except (TrioletError, OutputError, BrokenPipeError) as error:
                    file.error = error
                ended.send_nowait(file)

    async def _transcribe(self, file: _File) -> None:
        name, progress = file.name, self.progress
        source: str | bytes = name
        if name == STDIN:
            source = await trio.to_thread.run_sync(read_stdin, "audio", abandon_on_cancel=True)
        async with self.engine.stream_transcription(source, **await self._options(name, source)) as segments:
            progress.begin(segments.duration)
            file.stream = segments
            try:
                async for segment in segments:
                    if not self.options.keys() & {"speakers", "diarizer"}:  # who speaks is known at the end
                        self.destination.add(name, segment)
                        file.given += 1
                    progress.show(shown(name) if len(self.names) > 1 else None, segment)
                    self._count(file)
                file.is_complete = True
                self._count(file)
            finally:
                file.stream = None
                transcript = segments.transcript()
                if transcript.segments or file.is_complete:
                    file.transcript = transcript
                    file.missing = missing(transcript, has_known_end=segments.duration is not None)

    async def _watch(self) -> None:
        """Moves the bar as windows are read, even if their text waits for the text before it."""
        while True:
            for file in self._files:
                self._count(file)
            await trio.sleep(_REFRESH)

    def _count(self, file: _File) -> None:
        if file.stream is not None:
            seconds = file.stream.seconds_read
            self.progress.advance(seconds - file.counted)
            file.counted = seconds

    async def _options(self, name: str, source: str | bytes) -> dict[str, Any]:
        options = dict(self.options)
        if "parallel" not in options and options.get("prefix") is None:
            seconds = await trio.to_thread.run_sync(seconds_of, source, abandon_on_cancel=True)
            if seconds is not None and seconds > PARALLEL_SECONDS:
                options["parallel"] = True
        if self.names_requests:
            options["request_id"] = shown(Path(name).name)
        return options

    # -- reports -----------------------------------------------------------------------------------------------------

    def _report(self, file: _File) -> int:
        """Writes the result of a file that has ended. Returns the exit status for it; raises errors of writing."""
        if isinstance(file.error, OutputError | BrokenPipeError):
            raise file.error
        self._files.remove(file)
        if file.error is None:
            self._finish(file, None)
            return 0
        assert isinstance(file.error, TrioletError), f"{file.error!r} is not for users"
        why = in_flags(str(file.error))
        file.error = None  # its traceback refers to the file
        if file.transcript is None:
            return self._complain(f"{shown(file.name)}: {why}")
        self._finish(file, why)
        return FAILED

    def _finish(self, file: _File, why: str | None) -> None:
        """Passes the transcript of ``file`` to the destination. The reason ``why`` the transcript is not complete
        becomes one of its warnings."""
        transcript, name = file.transcript, shown(file.name)
        assert transcript is not None, f"{name} has no transcript"
        told = () if why is None else (f"{why}{file.missing}",)
        for segment in transcript.segments[file.given :]:
            self.destination.add(file.name, segment)
        written = self.destination.finish(file.name, evolve(transcript, warnings=transcript.warnings + told))
        if written and self.tells_files:
            ended = f" ({len(self.names) - len(self._files)} of {len(self.names)})" if len(self.names) > 1 else ""
            self._complain(f"wrote {', '.join(map(str, written))}{ended}")
        for warning in (*(f"warning: {in_flags(each)}" for each in transcript.warnings), *told):
            self._complain(f"{name}: {warning}")

    def _leave(self) -> None:
        """Writes the transcripts so far, in the order of the files, when ^C or a failure of the engine ends the run."""
        nothing = []
        for file in list(self._files):
            if file.transcript is None:
                nothing.append(shown(file.name))
                continue
            self._files.remove(file)
            try:
                self._finish(file, None if file.is_complete else "stopped before its end")
            except BrokenPipeError:
                return
            except OutputError as error:
                self._complain(str(error))
        if nothing:
            self._complain(f"stopped; nothing is transcribed of {', '.join(nothing)}")

    def _complain(self, message: str) -> int:
        self.progress.clear()
        complain(message)
        return FAILED


def missing(transcript: Transcript, *, has_known_end: bool) -> str:
    """Returns the end of a sentence: the seconds of audio that the transcript lacks because it was cut off. Returns ""
    if it lacks none. ``has_known_end``: the transcript's duration is the length of the audio.
    """
    unread = [one for one in transcript.coverage if one.kind == "unread"]
    parts = [f"from {one.start:.2f} to {one.end:.2f} s" for one in unread if one.end < transcript.duration]
    if len(parts) < len(unread):
        parts.append(f"after {unread[-1].start:.2f} s")
    elif not has_known_end:
        parts.append(f"after {transcript.duration:.2f} s")
    if not parts:
        return ""
    return f"; what is said {' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))} is missing"


def seconds_of(source: str | bytes) -> float | None:
    """The length of the audio by its header; ``None`` if the header does not say. Pipes are not read, since the bytes
    would be lost for the transcription. Blocking."""
    import av

    try:
        if isinstance(source, str) and not stat.S_ISREG(os.stat(source).st_mode):
            return None
        with (
            open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as file,
            av.open(file, "r", options={"protocol_whitelist": "none"}, metadata_errors="replace") as container,
        ):
            return None if container.duration is None else container.duration / 1e6
    except (OSError, ValueError, av.FFmpegError):
        return None

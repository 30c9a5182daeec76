"""The destinations of transcripts: files of a folder, or standard output.

Each takes the segments of each file as they become final (`add`), and its transcript at the end, perhaps before the end
of its audio (`finish`). Both raise `OutputError`, or BrokenPipeError where the reader went away. ``in_order``: the
destination wants the end of the files in their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TextIO, TypeAlias

from attrs import define, evolve, field, frozen

from ..formats.cues import one_line
from ..formats.settings import SubtitleSettings
from ..formats.writers import TEXT, Format, Writer, WriterSettings, timed_line
from ..outputs.results import Segment, Transcript
from .given import STDIN
from .terminal import OutputError, is_utf8, visible, write

# ---- a folder --------------------------------------------------------------------------------------------------------


def output_name(name: str) -> str:
    """The name of the outputs of the file ``name``, before the extension of the format."""
    return "stdin" if name == STDIN else Path(name).stem or name


def prepare_folder(folder: str) -> None:
    """Makes the folder, where it is missing.

    Raises:
        OutputError: it cannot be made, or nothing can be written there.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: this folder cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: nothing can be written to this folder; check its permissions (ls -ld)")


@define
class _OpenOutput:
    """One output file. It is made with the first text that it gets, so that a file which fails at its beginning leaves
    what an earlier run wrote."""

    path: Path
    writer: Writer
    _file: TextIO | None = field(default=None, init=False)

    def put(self, text: str, *, last: bool = False) -> None:
        """Appends ``text``, and with the ``last`` one closes the file."""
        if not (text or last):
            return
        try:
            if self._file is None:
                # a name that is no text is written as JSON's own escapes
                self._file = open(self.path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
                text = self.writer.begin() + text
            self._file.write(text)
            self._file.flush()
            if last:
                self._file.close()
        except OSError as error:
            raise OutputError(f"{self.path}: it cannot be written ({error.strerror or error})") from error


@define
class Folder:
    """Files named after the audio's: ``talk.mp3`` gives ``talk.srt``. Formats that can are written as segments come."""

    folder: Path
    formats: Sequence[Format]
    settings: SubtitleSettings
    in_order: ClassVar[bool] = False
    _open: dict[str, list[_OpenOutput]] = field(factory=dict, init=False)

    def add(self, name: str, segment: Segment) -> None:
        """Writes ``segment`` into the outputs of the file ``name``."""
        for output in self._outputs(name):
            output.put(output.writer.add(segment))

    def finish(self, name: str, transcript: Transcript) -> None:
        """Ends the outputs of the file ``name``."""
        for output in self._outputs(name):
            output.put(output.writer.end(transcript), last=True)
        del self._open[name]

    def _outputs(self, name: str) -> list[_OpenOutput]:
        if name not in self._open:
            settings = WriterSettings(subtitles=self.settings, file=name)
            self._open[name] = [
                _OpenOutput(self.folder / f"{output_name(name)}.{each.extension}", each.make(settings))
                for each in self.formats
            ]
        return self._open[name]


# ---- standard output -------------------------------------------------------------------------------------------------


@define
class OneLine(Writer):
    """A writer of plain text in one line, for a pipe: the segments' texts, as they come."""

    _blanks: str = field(default="", init=False)
    _begun: bool = field(default=False, init=False)

    def add(self, segment: Segment) -> str:
        text = self._blanks + one_line(segment.text)
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown

    def end(self, transcript: Transcript) -> str:  # noqa: ARG002
        return "\n"


@frozen
class TimedLines(Writer):
    """A writer of a line for each segment with its times, for people at a terminal."""

    def add(self, segment: Segment) -> str:
        return f"{visible(timed_line(segment))}\n"


@define
class OneFile:
    """One file's transcript to ``out``, as it becomes final. ``clear`` makes room on the terminal."""

    out: TextIO
    writer: Writer
    clear: Callable[[], None]
    in_order: ClassVar[bool] = True
    _begun: bool = field(default=False, init=False)

    def add(self, name: str, segment: Segment) -> None:  # noqa: ARG002
        """Writes ``segment``, if its format can."""
        self._put(self.writer.add(segment))

    def finish(self, name: str, transcript: Transcript) -> None:  # noqa: ARG002
        """Writes the rest."""
        self._put(self.writer.end(transcript), last=True)

    def _put(self, text: str, *, last: bool = False) -> None:
        if not self._begun and (text or last):
            self._begun, text = True, self.writer.begin() + text
        if text:
            self.clear()
            write(text, self.out, end="")


@define
class Lines:
    """A line for each of several files to ``out``, in their order: ``NAME: text``, or one JSON object."""

    out: TextIO
    format: Format
    settings: WriterSettings
    clear: Callable[[], None]
    in_order: ClassVar[bool] = True

    def add(self, name: str, segment: Segment) -> None:
        """Waits for the end of the file ``name``."""

    def finish(self, name: str, transcript: Transcript) -> None:
        """Writes the line of the file ``name``."""
        self.clear()
        write(self._line(name, transcript), self.out, end="")

    def _line(self, name: str, transcript: Transcript) -> str:
        if self.format is TEXT:
            text = one_line(transcript.text)
            return f"{name}: {visible(text) if self.out.isatty() else text}\n"
        return self.format.make(evolve(self.settings, file=name)).end(transcript)


Destination: TypeAlias = Folder | OneFile | Lines


def standard_output(
    out: TextIO, files: Sequence[str], format_: Format, settings: SubtitleSettings, clear: Callable[[], None]
) -> Destination:
    """Standard output ``out`` for these files, which can follow each other there in this format."""
    known = WriterSettings(subtitles=settings, ascii_only=not is_utf8(out))
    if len(files) > 1:
        return Lines(out, format_, known, clear)
    if format_ is TEXT:
        return OneFile(out, TimedLines() if out.isatty() else OneLine(), clear)
    return OneFile(out, format_.make(evolve(known, file=files[0])), clear)


def follow_each_other(format_: Format) -> bool:
    """True if the outputs of several files can follow each other on standard output."""
    return format_ is TEXT or format_.is_line

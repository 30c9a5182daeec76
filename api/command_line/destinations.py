"""The destinations of transcripts: files of a folder, or standard output.

A destination gets the segments of each file as they become final (`add`), and at the end the file's transcript
(`finish`), perhaps of only a part of the audio. Both methods raise `OutputError`, or BrokenPipeError if the reader went
away. With ``in_order``, `finish` must be called for the files in their order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TextIO

from attrs import define, evolve, field, frozen

from ..formats.cues import one_line
from ..formats.settings import SubtitleSettings
from ..formats.writers import TEXT, Format, Writer, WriterSettings, said_by, timed_line
from ..outputs.results import Segment, Transcript
from .given import STDIN
from .terminal import OutputError, is_utf8, visible, write


@define
class _Output:
    """The text of one file in one format. ``sink`` is called with each text, and with true for the first text. It is
    not called without a text. So if a file fails at its beginning, the output of an earlier run stays.
    """

    writer: Writer
    sink: Callable[[str, bool], None]
    path: Path | None = None
    _begun: bool = field(default=False, init=False)

    def put(self, text: str, *, last: bool = False) -> None:
        """Appends ``text``."""
        if text or last:
            first, self._begun = not self._begun, True
            self.sink((self.writer.begin() if first else "") + text, first)


@define
class Outputs:
    """Writes the outputs that ``outputs_of`` makes for each file, as its segments become final."""

    outputs_of: Callable[[str], list[_Output]]
    in_order: bool
    _open: dict[str, list[_Output]] = field(factory=dict, init=False)

    def add(self, name: str, segment: Segment) -> None:
        """Writes ``segment``, if the format can be written segment by segment."""
        for output in self._outputs(name):
            output.put(output.writer.add(segment))

    def finish(self, name: str, transcript: Transcript) -> tuple[Path, ...]:
        """Writes the rest of the outputs of the file ``name``. Returns the paths of those that are files."""
        for output in self._outputs(name):
            output.put(output.writer.end(transcript), last=True)
        return tuple(output.path for output in self._open.pop(name) if output.path is not None)

    def _outputs(self, name: str) -> list[_Output]:
        if name not in self._open:
            self._open[name] = self.outputs_of(name)
        return self._open[name]


# ---- a folder --------------------------------------------------------------------------------------------------------


def output_names(names: Collection[str]) -> dict[str, str]:
    """The name of the outputs of each file, before the extension of the format: ``talk`` for ``talk.mp3``, and
    ``talk.mp3`` if ``talk.wav`` is among ``names``, too."""
    stems = {name: "stdin" if name == STDIN else Path(name).stem or name for name in names}
    files = {(stem, Path(name).name) for name, stem in stems.items()}
    several = Counter(stem for stem, _ in files)
    return {name: Path(name).name if several[stem] > 1 and name != STDIN else stem for name, stem in stems.items()}


def to_folder(folder: str, files: Sequence[str], formats: Sequence[Format], settings: SubtitleSettings) -> Outputs:
    """The destination that writes files named after the audio files by `output_names`: ``talk.srt`` for ``talk.mp3``.
    A format that can be written segment by segment is written as segments come. The folder is made if it is missing.

    Raises:
        OutputError: the folder cannot be made, or nothing can be written there.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: this folder cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: this folder cannot be written to; check its permissions (ls -ld)")

    names = output_names(files)

    def outputs(name: str) -> list[_Output]:
        known = WriterSettings(subtitles=settings, file=name)
        paths = [Path(folder, f"{names[name]}.{each.extension}") for each in formats]
        return [_Output(each.make(known), _into(path), path) for each, path in zip(formats, paths, strict=True)]

    return Outputs(outputs, in_order=False)


def _into(path: Path) -> Callable[[str, bool], None]:
    def put(text: str, first: bool) -> None:
        try:
            # a name that is not valid Unicode is written with JSON's own escapes
            with open(path, "w" if first else "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            raise OutputError(f"{path}: it cannot be written ({error.strerror or error})") from error

    return put


# ---- standard output -------------------------------------------------------------------------------------------------


@define
class OneLine(Writer):
    """A writer of plain text in one line, for a pipe: it writes the segments' texts as they come. Each turn of another
    speaker begins a line."""

    _blanks: str = field(default="", init=False)
    _begun: bool = field(default=False, init=False)
    _speaker: str | None = field(default=None, init=False)

    def add(self, segment: Segment) -> str:
        if segment.speaker != self._speaker and segment.text.strip():
            line_end = "\n" if self._begun else ""
            self._blanks, self._begun, self._speaker = "", False, segment.speaker
            return line_end + said_by(segment.speaker) + self._text(segment)
        return self._text(segment)

    def _text(self, segment: Segment) -> str:
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
    """A writer for people at a terminal: a line for each segment, with its times."""

    def add(self, segment: Segment) -> str:
        return f"{visible(timed_line(segment))}\n"


@frozen
class NamedLine(Writer):
    """A writer of plain text in one line, for one of several files: ``NAME: text``, at the end."""

    name: str
    shown: Callable[[str], str]

    def end(self, transcript: Transcript) -> str:
        writer = OneLine()
        return f"{self.name}: {self.shown(one_line(''.join(map(writer.add, transcript.segments))))}\n"


def standard_output(
    out: TextIO, files: Sequence[str], format_: Format, settings: SubtitleSettings, clear: Callable[[], None]
) -> Outputs:
    """The destination that writes these files to standard output ``out``, in a format in which files can follow each
    other. ``clear`` makes room on the terminal."""
    known = WriterSettings(subtitles=settings, ascii_only=not is_utf8(out))

    def put(text: str, first: bool) -> None:  # noqa: ARG001
        if text:
            clear()
            write(text, out, end="")

    def writer(name: str) -> Writer:
        if format_ is not TEXT:
            return format_.make(evolve(known, file=name))
        if len(files) > 1:
            return NamedLine(name, visible if out.isatty() else str)
        return TimedLines() if out.isatty() else OneLine()

    return Outputs(lambda name: [_Output(writer(name), put)], in_order=True)


def follow_each_other(format_: Format) -> bool:
    """True if the outputs of several files can follow each other on standard output."""
    return format_ is TEXT or format_.is_line

"""The inputs that users give to the commands: files and standard input, checked before any model is loaded."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from ...core.errors import CheckpointError, InvalidRequest
from ..inputs.images import load_image
from .terminal import WrongFile, WrongInput

STDIN = "-"
_MEDIA = re.compile(
    r".*\.(3gp|aac|ac3|aiff?|amr|ape|au|avi|caf|flac|flv|m4[abv]|mk[av]|mov|mp[234]|mpe?g|og[agv]|opus|ts|wav|web[am]|wm[av])",
    re.IGNORECASE | re.DOTALL,
)  # what a folder is searched for


def check_model(model: str, *, transcribes: bool = False) -> None:
    """Raises `WrongFile` if ``model`` is a folder without a readable checkpoint. A command that ``transcribes`` needs a
    model of speech. Hub ids are not looked up here.
    """
    from ...models.checkpoints.files import local_folder, read_config
    from ...models.speech.names import MODEL_TYPES

    try:
        folder = local_folder(model)
        kind = None if folder is None else read_config(folder).get("model_type")
    except CheckpointError as error:
        raise WrongFile(str(error)) from error
    if transcribes and kind is not None and kind not in MODEL_TYPES:
        raise WrongFile(
            f"{model} ({kind}) cannot transcribe; allowed: models of speech, such as Whisper. Other models that read "
            "audio answer questions about it: triolet generate"
        )


def checked_text(text: str, name: str) -> str:
    """Returns ``text``; refuses lone surrogates. Python puts these in place of bytes that are not valid text, and no
    tokenizer reads them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongInput(f"{name} is not UTF-8 text (at character {error.start}); convert it first") from error
    return text


def text_of_stdin(what: str, *, instead: str) -> str:
    """The whole text of standard input. Messages call the input ``what``. ``instead`` is advice for a user whose input
    is not text.
    """
    try:
        return _stdin(what).decode()
    except UnicodeDecodeError as error:
        raise WrongFile(f"{shown(STDIN)}: it is not UTF-8 text (at byte {error.start}); {instead}") from error


def image_of(name: str) -> Any:
    """The image in the file ``name``, or on standard input."""
    check_readable(name)
    try:
        return load_image(_stdin_of("an image") if name == STDIN else name)
    except InvalidRequest as error:
        raise WrongFile(f"{shown(STDIN)}: {error}" if name == STDIN else str(error)) from error


def sound_of(name: str) -> str | bytes:
    """The name of the audio file ``name``, unchanged, or the bytes of standard input."""
    check_readable(name)
    return _stdin_of("audio") if name == STDIN else name


def template_of(given: str) -> str:
    """The chat template ``given``: a file's text, or the template itself, in which escapes such as ``\\n`` are read as
    vLLM's command reads them."""
    try:
        if "{{" in given or "{%" in given:
            return given if "\n" in given else given.encode("latin-1", "backslashreplace").decode("unicode_escape")
        check_readable(given)
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise WrongFile(f"--chat-template {given}: it cannot be read ({error}); give a file of UTF-8 text") from error


def check_readable(name: str) -> None:
    """Raises `WrongFile` if the file ``name`` cannot be read, as `file_fault` finds out."""
    fault = file_fault(name)
    if fault is not None:
        raise WrongFile(f"{shown(name)}: {fault}")


def _stdin_of(what: str) -> bytes:
    data = _stdin(what)
    if not data:
        raise WrongFile(f"{shown(STDIN)}: it is empty; pipe {what} in, or redirect it from a file (< FILE)")
    return data


def _stdin(what: str) -> bytes:
    try:
        return read_stdin(what)
    except InvalidRequest as error:
        raise WrongFile(f"{shown(STDIN)}: {error}") from error


def shown(name: str) -> str:
    return {STDIN: "standard input", "": "''"}.get(name, name)


def is_media(name: str) -> bool:
    """True if ``name`` ends as the names of audio and video files do."""
    return _MEDIA.fullmatch(name) is not None


def with_folders(names: Iterable[str]) -> tuple[str, ...]:
    """``names``, with the audio and video files of a folder, in the order of their names, in place of the folder. A
    folder without such files stays."""
    found = list[str]()
    for name in names:
        try:
            inside = sorted(os.listdir(name)) if os.path.isdir(name) else []
        except OSError:  # no permission: the folder stays, and is refused like one without such files
            inside = []
        media = [os.path.join(name, one) for one in inside if is_media(one)]
        found += [one for one in media if os.path.isfile(one)] or [name]
    return tuple(found)


def file_fault(name: str) -> str | None:
    """The reason why the file ``name`` cannot be read; ``None``: it can probably be read. The file itself is not read,
    and standard input is not checked.
    """
    if name == STDIN:
        return None
    if not name:
        return "the name of the file is empty; check the quotes, and that the variable between them is set"
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISDIR(mode):
            return f"it is a folder; give the files in it ({name.rstrip('/')}/*)"
        if stat.S_ISREG(mode):  # not a pipe: its writer would fail after an open and a close here
            with open(name, "rb"):
                pass
    except FileNotFoundError:
        if "://" in name:
            return (
                "there is no such file, and addresses are not fetched; download it first, or pipe it in and give - as "
                "its name"
            )
        return "there is no such file; check the name and the folder"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    return None


def opened_stdin(what: str) -> TextIO:
    """Standard input, which messages call ``what``. Raises `InvalidRequest` if the shell has closed it (``<&-``)."""
    if sys.stdin is None or sys.stdin.closed:
        raise InvalidRequest(f"it is closed; pipe {what} in, or redirect it from a file (< FILE)")
    return sys.stdin


def read_stdin(what: str) -> bytes:
    """All bytes of standard input, which messages call ``what``. They are read by the file descriptor, so that an
    abandoned read holds no lock of Python's.

    Raises:
        InvalidRequest: standard input is closed, or cannot be read.
    """
    parts, descriptor = list[bytes](), opened_stdin(what).fileno()
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except OSError as error:
        told = f"it cannot be read ({error}); pipe {what} in, or redirect it from a file (< FILE)"
        raise InvalidRequest(told) from error
    return b"".join(parts)

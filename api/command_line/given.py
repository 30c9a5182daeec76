"""The inputs that users give to the commands: texts, images, audio and schemas, checked before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from ...core.errors import CheckpointError, InvalidRequest
from ...core.request import Structure
from ..inputs.images import load_image
from .terminal import STDIN, WrongFile, WrongInput, file_fault, read_stdin, shown


def check_one_reads_stdin(readers: Sequence[str]) -> None:
    """Raises click's `UsageError` where more than one of ``readers`` is to come from standard input."""
    if len(readers) > 1:
        raise click.UsageError(
            f"standard input can be read once, but {' and '.join(readers)} would come from it; give a file's name "
            "instead of -, or the prompt as an argument"
        )


def check_model(model: str, *, transcribes: bool = False) -> None:
    """Raises `WrongFile` where ``model``, if it is a folder, is no checkpoint of a kind that can be read; or where it
    ``transcribes``, and the checkpoint is not of Whisper. Hub ids are not looked for here."""
    from ...models.checkpoints.files import local_folder, read_config

    try:
        folder = local_folder(model)
        kind = None if folder is None else read_config(folder).get("model_type")
    except CheckpointError as error:
        raise WrongFile(str(error)) from error
    if transcribes and kind not in (None, "whisper"):
        raise WrongFile(
            f"{model} ({kind}) cannot transcribe; allowed: Whisper models. triolet generate asks models that read "
            "audio among their tokens"
        )


def checked_text(text: str, name: str) -> str:
    """Refuses lone surrogates: arguments that are no text reach Python so, and no tokenizer reads them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongInput(f"{name} is no UTF-8 text (character {error.start}); convert it first") from error
    return text


def text_of_stdin(what: str, *, instead: str) -> str:
    """All of standard input, which should be ``what``. ``instead``: what to do with anything but a text."""
    try:
        return _stdin(what).decode()
    except UnicodeDecodeError as error:
        raise WrongFile(f"{shown(STDIN)}: byte {error.start} is no UTF-8 text; {instead}") from error


def image_of(name: str) -> Any:
    """The image in the file ``name``, or in standard input."""
    check_readable(name)
    try:
        return load_image(_stdin_of("an image") if name == STDIN else name)
    except InvalidRequest as error:
        raise WrongFile(f"{shown(STDIN)}: {error}" if name == STDIN else str(error)) from error


def sound_of(name: str) -> str | bytes:
    """The audio file ``name`` as it is, or the bytes of standard input."""
    check_readable(name)
    return _stdin_of("audio") if name == STDIN else name


def structure_of(name: str) -> Structure:
    """The JSON schema in the file ``name``."""
    from ...models.sampling.structure import fault_of

    check_readable(name)
    try:
        with open(name, encoding="utf-8") as file:
            structure = Structure.json_schema(json.dumps(json.load(file)))
    except OSError as error:
        raise WrongFile(f"{name}: it cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise WrongFile(f"{name}: it is no JSON ({error}); a JSON schema is wanted") from error
    except RecursionError as error:
        raise WrongFile(f"{name}: it is nested too deeply to be read; a JSON schema can refer to itself") from error
    if fault := fault_of(structure):
        raise WrongFile(f"{name}: {fault}")
    return structure


def check_readable(name: str) -> None:
    """Raises `WrongFile` where the file ``name`` cannot be read, as far as that shows."""
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

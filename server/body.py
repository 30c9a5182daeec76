"""The bodies of requests: JSON, and forms with a file."""

from __future__ import annotations

import difflib
import json
import re
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ..api.inputs.sources import NamedPath
from ..api.inputs.threads import run_in_thread
from .faults import is_beyond_telling
from .heap import trim
from .problems import BadBody, Problem, Refusal
from .schemas.base import Body
from .schemas.weighing import Weighing
from .server import Server

SomeBody = TypeVar("SomeBody", bound=Body)

_INLINE = 16 * 1024  # bytes: parsing more JSON costs more time than a thread
_LEAVES = 2**17  # bytes: memory of a larger body is given back to the system
_LARGE = 2**20  # bytes: memory of larger copies is given back at once
_OF_WIDE, _OF_VALUE = 3, 64  # bytes beside its own that a byte of a wide text, or a value, takes as an object
_MOST_NAME, _MOST_COMPARED = 100, 32  # characters of a member's name that are shown, and compared, which takes long
_MOST_FIELDS = 128  # fields of a form beside its file
_MOST_FIELD = 256 * 2**10  # bytes
_MOST_AUDIO = 8 * 2**20  # bytes of a field that is audio
_AUDIO = ("known_speaker_references", "known_speaker_references[]")
_MOST_FIELDS_TOGETHER = 32 * 2**20  # bytes, which stay in memory
_MOST_NEAR = 3  # names that an error shows
_NEAR = 0.75  # likeness from which a name counts as mistyped
_INSTEAD = {  # members of older and of other APIs, and what has their place here
    "functions": "tools",
    "function_call": "tool_choice",
    "enable_thinking": "chat_template_kwargs",
    **dict.fromkeys(("thinking_budget", "thinking_token_budget"), "max_reasoning_tokens"),
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
}
_CHARSETS = frozenset({"utf-8", "utf8"})
_MOST_OBJECT = 4_096  # characters of a field that may be JSON: parsed in the event loop
_PART = re.compile(r"\[(\w*)\]")


async def read_json(request: Request, kind: type[SomeBody]) -> SomeBody:
    """Reads the body of ``request`` as a ``kind``.

    Raises:
        BadBody: the body is not JSON, or does not fit ``kind``.
        Refusal: the body has another content type.
        RequestTooLarge: the body has more than `Weighing` allows. That is found out before any object is made of it.
    """
    if _media_type(request) not in ("application/json", ""):
        raise Refusal(Problem(415, f"a body of the type {_media_type(request)}; allowed: application/json"))
    come, weighing = bytearray(), Weighing()
    server: Server = request.app.state.server
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            if weighing.size < _LEAVES <= weighing.size + len(part):
                request.scope["exchange"].closing.callback(server.leavings.add)
            weighing.add(part)
            come += part  # not a list of parts: a client may send a byte at a time
    weighing.end()
    request.scope["exchange"].account.take(_OF_WIDE * weighing.wide + _OF_VALUE * weighing.values)
    whole = [come]
    del come
    if weighing.size <= _INLINE:
        return _parse(kind, whole)
    read = partial(_parse_large if weighing.size > _LARGE else _parse, kind, whole)
    return await run_in_thread(read, limiter=server.reading)


def _parse_large(kind: type[SomeBody], whole: list[bytearray]) -> SomeBody:
    """Parses a large body. Gives free memory back to the system before and after that: the memory of the pieces that
    came, and that of the parsed text.
    """
    trim()
    try:
        return _parse(kind, whole)
    finally:
        trim()


def _parse(kind: type[SomeBody], whole: list[bytearray]) -> SomeBody:
    """Parses the body in ``whole``. The body is taken out of the list, so that the arguments of callers do not keep it
    alive."""
    body = bytes(whole.pop())  # pydantic would copy a bytearray, too
    try:
        found = kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        read = None if is_beyond_telling(error) else parsed(body)
        raise _explained(error, kind, read) from None
    found.check_size()
    return found


def parsed(body: bytes | str) -> object:
    """Returns ``body`` read as JSON; ``None`` if it is not JSON."""
    try:
        return from_json(body)
    except ValueError:
        return None


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _explained(error: ValidationError, kind: type[BaseModel], body: object) -> BadBody:
    """Puts ``error`` in words. A member that does not exist is reported first, with the most similar name that
    exists."""
    few = not is_beyond_telling(error)
    for fault in error.errors(include_url=False, include_context=False, include_input=False) if few else ():
        if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
            name = str(fault["loc"][0])[:_MOST_NAME]
            told = name[:_MOST_COMPARED]
            near = difflib.get_close_matches(told, kind.model_fields, _MOST_NEAR, 0.0)
            alike = difflib.get_close_matches(told, near, 1, _NEAR)
            instead = _INSTEAD.get(name)
            if instead in kind.model_fields:
                hint = f"give {instead}"
            elif alike:
                hint = f"did you mean {alike[0]}?"
            else:
                hint = f"leave it out; similar ones are {', '.join(near)}; GET /openapi.json has all"
            return BadBody(f"{name} is not a member of this request; {hint}", name)
    return BadBody.of(error, body)


# -- forms -------------------------------------------------------------------------------------------------------------


async def read_form(request: Request, kind: type[SomeBody], spool_bytes: int) -> tuple[SomeBody, UploadFile]:
    """Reads the members of a form as a ``kind``, and its ``file``. The file is closed when the exchange ends.

    Raises:
        BadBody: the form is broken, does not fit ``kind``, or has no file.
        Refusal: the body is not a form, or its charset is not UTF-8.
    """
    if _media_type(request) != "multipart/form-data":
        told = _media_type(request) or "no content type"
        raise Refusal(
            Problem(415, f"the body has {told}; allowed: multipart/form-data with the members file and model")
        )
    _, parameters = parse_options_header(request.headers["content-type"])
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1")
    if charset.strip().lower() not in _CHARSETS:  # some codecs take quadratic time
        told = f"the form has the charset {charset[:_MOST_NAME]!r}; allowed: utf-8, or no charset"
        raise Refusal(Problem(415, told))
    form = await _parsed(request, spool_bytes)
    files = [(name, value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
    for _, upload in files:
        request.scope["exchange"].closing.callback(upload.file.close)
    named = [upload for name, upload in files if name == "file"]
    if len(named) != 1:
        raise BadBody(f"the form has {len(named)} files named file; allowed: one", "file")
    members = _members(form)
    try:
        return kind.model_validate(members), named[0]
    except ValidationError as error:
        raise _explained(error, kind, members) from None


async def _parsed(request: Request, spool_bytes: int) -> FormData:
    try:
        async with aclosing(request.stream()) as stream:
            parser = _FormParser(request.headers, stream, max_files=1, max_fields=_MOST_FIELDS)
            parser.spool_max_size = spool_bytes
            return await parser.parse()
    except (MultiPartException, KeyError, UnicodeError) as error:
        told = getattr(error, "message", None) or "its boundary or a header of a part is missing or damaged"
        raise BadBody(f"the form cannot be read: {told}") from None


class _FormParser(MultiPartParser):
    """Bounds each field, by its name, and the memory of all fields together."""

    _taken = 0  # bytes of fields

    def on_headers_finished(self) -> None:
        """Begins a part, as the parser asks."""
        super().on_headers_finished()
        self.max_part_size = _MOST_AUDIO if self._current_part.field_name in _AUDIO else _MOST_FIELD

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Takes a piece of a part, as the parser asks."""
        if self._current_part.file is None:
            self._taken += end - start
        if self._taken > _MOST_FIELDS_TOGETHER:
            raise MultiPartException(f"its fields have more than {_MOST_FIELDS_TOGETHER:,} bytes together")
        super().on_part_data(data, start, end)


def _members(form: FormData) -> dict[str, Any]:
    """Returns the members beside the file. ``name[]`` becomes a list; ``name[part]``, and a text of JSON, become an
    object."""
    found: dict[str, Any] = {}
    for key, value in form.multi_items():
        if isinstance(value, UploadFile):
            continue
        name, bracket, _ = key[:_MOST_NAME].partition("[")
        part = _PART.fullmatch(key[len(name) :])
        if bracket and part is None:
            raise BadBody(
                f"the form has a member {key[:_MOST_NAME]!r}; allowed: names such as name, name[] and name[part]", name
            )
        _add(found, name, None if part is None else part[1], value)
    return found


def _add(found: dict[str, Any], name: str, part: str | None, value: str) -> None:
    """Adds a value to the member ``name``. ``part`` is the key in an object, ``""`` for an item of a list, or ``None``
    for a single value."""
    if part == "" and isinstance(found.setdefault(name, []), list):
        found[name].append(value)
    elif part and isinstance(found.setdefault(name, {}), dict) and part not in found[name]:
        found[name][part] = value
    elif part is None and name not in found:
        found[name] = _perhaps_json(value)
    else:
        raise BadBody(f"{name} is given twice; give a list as {name}[], and an object as {name}[part]", name)


def _perhaps_json(value: str) -> Any:
    if not value.startswith("{") or len(value) > _MOST_OBJECT:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def audio_of(upload: UploadFile) -> bytes | NamedPath:
    """Returns the upload in a form for an engine: its bytes, or the path of the file to which it was spooled, which the
    engine reads piece by piece. The path is valid while the upload is open."""
    spooled: Any = upload.file
    if getattr(spooled, "_rolled", False):
        return NamedPath(f"/proc/self/fd/{spooled.fileno()}", "the file")
    spooled.seek(0)
    data: bytes = spooled.read()
    return data

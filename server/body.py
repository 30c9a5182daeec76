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

Read = TypeVar("Read", bound=Body)

_INLINE = 16 * 1024  # bytes: reading more JSON takes longer than a thread costs
_LEAVES = 2**17  # bytes: what a larger body leaves is given back to the system
_LARGE = 2**20  # bytes: copies of more are given back at once
_MOST_NAME = 100  # characters of a member's name that are looked at, and told
_MOST_FIELDS = 32  # of a form beside its file
_MOST_FIELD = 256 * 2**10  # bytes; all of them together stay in memory
_NEAR = 0.75  # so like another name is one that is mistyped
_CHARSETS = frozenset({"utf-8", "utf8"})
_MOST_OBJECT = 4_096  # characters of a field that may be JSON: read on the loop
_PART = re.compile(r"\[(\w*)\]")


async def read_json(request: Request, kind: type[Read]) -> Read:
    """Reads the body of ``request`` as a ``kind``.

    Raises:
        BadBody: it is not JSON, or does not fit ``kind``.
        Refusal: it is of another content type.
        RequestTooLarge: it has more of anything than `Weighing` allows, which is found before any of it is made.
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
    whole = [bytes(come)]  # of a bytearray pydantic would make a copy
    del come
    if weighing.size <= _INLINE:
        return _parse(kind, whole)
    read = partial(_parse_large if weighing.size > _LARGE else _parse, kind, whole)
    return await run_in_thread(read, limiter=server.reading)


def _parse_large(kind: type[Read], whole: list[bytes]) -> Read:
    """Copies are given back before others are made: what came in pieces before it is parsed, and what was parsed before
    what it has in it is decoded."""
    trim()
    try:
        return _parse(kind, whole)
    finally:
        trim()


def _parse(kind: type[Read], whole: list[bytes]) -> Read:
    """Takes the body out of ``whole``: callers of callers keep their arguments."""
    body = whole.pop()
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
    """Puts ``error`` in words. A member that does not exist comes before all else, with the nearest one that does."""
    few = not is_beyond_telling(error)
    for fault in error.errors(include_url=False, include_context=False, include_input=False) if few else ():
        if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
            name = str(fault["loc"][0])[:_MOST_NAME]
            near = difflib.get_close_matches(name, kind.model_fields, 1, _NEAR)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(kind.model_fields)}"
            return BadBody(f"{name} is no member of this request; {hint}", name)
    return BadBody.of(error, body)


# -- forms -------------------------------------------------------------------------------------------------------------


async def read_form(request: Request, kind: type[Read], spool_bytes: int) -> tuple[Read, UploadFile]:
    """Reads the members of a form as a ``kind``, and its ``file``, which is closed when the exchange ends.

    Raises:
        BadBody: the form is broken, or not what ``kind`` says, or has no file.
        Refusal: the body is no form, or a form in another charset than UTF-8.
    """
    if _media_type(request) != "multipart/form-data":
        told = _media_type(request) or "no content type"
        raise Refusal(Problem(415, f"a body with {told}; allowed: multipart/form-data with the members file and model"))
    _, parameters = parse_options_header(request.headers["content-type"])
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1")
    if charset.strip().lower() not in _CHARSETS:  # the time of some codecs grows with the square of the text
        told = f"a form with the charset {charset[:_MOST_NAME]!r}; allowed: utf-8, or leave it out"
        raise Refusal(Problem(415, told))
    form = await _parsed(request, spool_bytes)
    files = [(name, value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
    for _, upload in files:
        request.scope["exchange"].closing.callback(upload.file.close)
    named = [upload for name, upload in files if name == "file"]
    if len(named) != 1:
        raise BadBody(f"{len(named)} files with the name file; allowed: one", "file")
    members = _members(form)
    try:
        return kind.model_validate(members), named[0]
    except ValidationError as error:
        raise _explained(error, kind, members) from None


async def _parsed(request: Request, spool_bytes: int) -> FormData:
    try:
        async with aclosing(request.stream()) as stream:
            parser = MultiPartParser(
                request.headers, stream, max_files=1, max_fields=_MOST_FIELDS, max_part_size=_MOST_FIELD
            )
            parser.spool_max_size = spool_bytes
            return await parser.parse()
    except (MultiPartException, KeyError, UnicodeError) as error:
        told = getattr(error, "message", None) or "its boundary or a header of a part is missing or damaged"
        raise BadBody(f"the form cannot be read: {told}") from None


def _members(form: FormData) -> dict[str, Any]:
    """Returns the members beside the file: ``name[]`` is a list, ``name[part]`` and a text of JSON are an object."""
    found: dict[str, Any] = {}
    for key, value in form.multi_items():
        if isinstance(value, UploadFile):
            continue
        name, bracket, _ = key[:_MOST_NAME].partition("[")
        part = _PART.fullmatch(key[len(name) :])
        if bracket and part is None:
            raise BadBody(f"a member {key[:_MOST_NAME]!r}; allowed: name, name[] and name[part]", name)
        _add(found, name, None if part is None else part[1], value)
    return found


def _add(found: dict[str, Any], name: str, part: str | None, value: str) -> None:
    """Adds ``name``; ``part`` is ``""`` for an item of a list, ``None`` for a value of its own."""
    if part == "" and isinstance(found.setdefault(name, []), list):
        found[name].append(value)
    elif part and isinstance(found.setdefault(name, {}), dict) and part not in found[name]:
        found[name][part] = value
    elif part is None and name not in found:
        found[name] = _perhaps_json(value)
    else:
        raise BadBody(f"{name} is given twice; a list is given as {name}[], an object as {name}[part]", name)


def _perhaps_json(value: str) -> Any:
    if not value.startswith("{") or len(value) > _MOST_OBJECT:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def audio_of(upload: UploadFile) -> bytes | NamedPath:
    """Returns the upload for an engine: its bytes, or the path of the file that it was spooled to, which is read as a
    stream. Open the path while the upload is open."""
    spooled: Any = upload.file
    if getattr(spooled, "_rolled", False):
        return NamedPath(f"/proc/self/fd/{spooled.fileno()}", "the uploaded file")
    spooled.seek(0)
    data: bytes = spooled.read()
    return data

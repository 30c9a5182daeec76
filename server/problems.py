"""`Problem`: the error that a client gets in place of an answer, in the shape of OpenAI's errors."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from attrs import frozen
from pydantic import ValidationError
from starlette.responses import JSONResponse

from ..core.errors import InvalidRequest, TrioletError, UnknownModel
from ..core.log_lines import one_line
from .faults import LONGEST, faults_of, in_words
from .manners.limits import Flood
from .manners.paths import without_paths

_log = logging.getLogger("triolet.server")
_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_LONGEST = 2_000  # characters of a message, which may quote the client
_SETTING = re.compile(r"\bEngineConfig\((\w+)=[^()]*\)")
_NAMES = {  # of the engine's methods and arguments: what clients have in their place
    "engine.generate": "/v1/chat/completions",
    "engine.transcribe": "/v1/audio/transcriptions",
    "engine.embed": "/v1/embeddings",
    "engine.score": "/v1/rerank",
    "engine.classify": "/v1/classify",
    "template_options": "chat_template_kwargs",
    "prompt_token_ids": "prompt",
    "initial_prompt": "prompt",
    "known_speakers": "known_speaker_names",
    "timestamps='segment', 'none'": "timestamp_granularities[]=segment",
    "timestamps='word'": "timestamp_granularities[]=word",
    'voice_activity="off"': "vad_filter=false",
    "None:": "left out:",
}
_NAME = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, _NAMES))})(?!\w)(?:\(\.\.\.\))?")
_OF_OPENAI = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


@frozen
class Problem:
    """The error that a client gets in place of an answer.

    Args:
        status: the HTTP status.
        message: says what was received, what is allowed, and what to do.
        code: a word for programs.
        param: the member of the request that is wrong.
        retry_after: the seconds after which a new attempt may succeed.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def as_object(self) -> dict[str, Any]:
        """Returns the error as the object that OpenAI's clients read."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.word}}

    @property
    def word(self) -> str:
        """The code, or a code that follows from the status."""
        return self.code or _OF_OPENAI.get(self.status) or HTTPStatus(self.status).name.lower()


class Refusal(Exception):
    """An error that ends a request with a given `Problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class BadBody(InvalidRequest):
    """The body of the request does not fit the endpoint; ``param`` is the member that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of(cls, error: ValidationError, body: object) -> BadBody:
        """Makes an error from the first faults of ``body``."""
        faults = faults_of(error, body)
        return cls(in_words(faults), next(iter(faults))[:LONGEST] or None)


_CODES = {BadBody: "invalid_request", UnknownModel: "model_not_found"}


def problem_of(error: Exception, folders: Iterable[str] = ()) -> Problem:
    """Returns the problem that the client gets for ``error``, without the paths that `without_paths` recognises. An
    unexpected error is explained only in the log."""
    error = _innermost(error)
    if isinstance(error, Refusal):
        return error.problem
    if isinstance(error, TrioletError):
        code = _CODES.get(type(error)) or _WORD.sub("_", type(error).__name__).lower()
        param = "model" if isinstance(error, UnknownModel) else getattr(error, "param", None)
        retry = 1 if error.http_status in (429, 503) else None
        return Problem(error.http_status, _for_clients(error, folders), code, param, retry)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        told = "the server's disk is full, so the request cannot be stored; ask again later, or send a smaller file"
        return Problem(507, told)
    return Problem(
        500, "the server failed on this request; the server's log has the reason under the id of the request"
    )


def _innermost(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _for_clients(error: TrioletError, folders: Iterable[str]) -> str:
    """Returns the text of ``error`` for clients. Errors on a body or on the name of a model only quote the client. All
    other texts may come from a loader, a template or a library, and paths are removed from them."""
    text = str(error)
    if not isinstance(error, BadBody | UnknownModel):
        text = without_paths(text[: 2 * _LONGEST], folders)  # long enough not to cut a quoted path that stays
        text = in_their_words(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def in_their_words(text: str) -> str:
    """Returns ``text`` in the words of clients, which have endpoints and members in place of methods and arguments."""
    return _SETTING.sub(r"the server's \1", _NAME.sub(lambda found: _NAMES[found[1]], text))


def problem_answer(problem: Problem) -> JSONResponse:
    """Returns an answer with ``problem``."""
    headers = {} if problem.retry_after is None else {"retry-after": str(problem.retry_after)}
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(problem.as_object(), problem.status, headers)


def report(name: str, told: dict[str, object], error: Exception, problem: Problem, refusals: Flood, now: float) -> None:
    """Logs that the request ``name`` ended with ``error``; adds to ``told``, which goes into the access log. If the
    client gets less than the whole text of the error, the whole text is logged, at most once a minute.

    Args:
        refusals: counts such requests of one server.
    """
    told["error"] = problem.word
    error = _innermost(error)
    expected = isinstance(error, TrioletError | Refusal) or problem.status == HTTPStatus.INSUFFICIENT_STORAGE
    what = one_line(str(error)[:_LONGEST])
    full = isinstance(error, OSError) and problem.status == HTTPStatus.INSUFFICIENT_STORAGE
    kind = "the disk for uploads is full" if full else type(error).__name__
    if problem.status >= 500:
        _log.error("%s failed: %s: %s", name, kind, what, exc_info=None if expected else error)
    elif isinstance(error, TrioletError) and in_their_words(str(error)) != problem.message:
        count = refusals.came(now)
        more = f" ({count:,} such requests since the last line)" if count > 1 else ""
        if count:
            _log.warning("%s was refused: %s: %s%s", name, type(error).__name__, what, more)

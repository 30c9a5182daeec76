"""`Problem`: why a request has no answer, in the shape of OpenAI's errors."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from typing import Any

from attrs import frozen
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ..core.errors import InvalidRequest, TrioletError, UnknownModel
from .faults import faults_of, in_words

_log = logging.getLogger("triolet.server")
_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_OF_OPENAI = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


@frozen
class Problem:
    """Args:
    status: of HTTP.
    message: what was got, what is allowed, what to do.
    code: a word for programs.
    param: the member of the request that is wrong.
    retry_after: seconds after which it may go better.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def as_object(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else _INVALID
        code = self.code or _OF_OPENAI.get(self.status) or HTTPStatus(self.status).name.lower()
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}


_INVALID = "invalid_request_error"


class Refusal(Exception):
    """Ends a request with a `Problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class BadBody(InvalidRequest):
    """The request's body is not what the endpoint takes; ``param`` is the member that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of(cls, error: ValidationError, body: object) -> BadBody:
        """The first faults of ``body``, in words."""
        faults = faults_of(error, body)
        return cls(in_words(faults), faults[0].name or None)


_CODES = {BadBody: "invalid_request", UnknownModel: "model_not_found"}


def problem_of(error: Exception) -> Problem:
    """What the client is told of ``error``. Errors that nobody raised on purpose are told by their place in the log
    alone."""
    if isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        return problem_of(error.exceptions[0])
    if isinstance(error, Refusal):
        return error.problem
    if isinstance(error, TrioletError):
        code = _CODES.get(type(error)) or _WORD.sub("_", type(error).__name__).lower()
        param = "model" if isinstance(error, UnknownModel) else getattr(error, "param", None)
        retry = 1 if error.http_status in (429, 503) else None
        return Problem(error.http_status, str(error), code, param, retry)
    return Problem(500, "the server failed on this request; its log has the reason under the request's id")


def problem_answer(problem: Problem) -> JSONResponse:
    """The answer that tells ``problem``."""
    headers = {} if problem.retry_after is None else {"retry-after": str(problem.retry_after)}
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(problem.as_object(), problem.status, headers)


def report(name: str, told: dict[str, object], error: Exception, problem: Problem) -> None:
    """Tells the logs that the request ``name`` ended with ``error``; ``told`` goes into the access log."""
    told["error"] = problem.as_object()["error"]["code"]
    if problem.status >= 500:
        expected = isinstance(error, TrioletError)
        _log.error("%s failed: %s: %s", name, type(error).__name__, error, exc_info=None if expected else error)


def _nothing_there(request: Request, error: HTTPException) -> Problem:
    """What Starlette refuses: a path that is none, or a method that a path does not have."""
    asked = f"{request.method} {request.url.path}"
    methods = Headers(error.headers).get("allow")
    if methods:
        return Problem(error.status_code, f"{asked} is no endpoint; allowed: {', '.join(sorted(methods.split(', ')))}")
    return Problem(error.status_code, f"{asked} is no endpoint; GET /openapi.json lists those that are there")


async def explain(request: Request, error: Exception) -> JSONResponse:
    """Answers ``error``, for Starlette."""
    problem = _nothing_there(request, error) if isinstance(error, HTTPException) else problem_of(error)
    exchange: Any = request.scope["exchange"]
    report(exchange.id, exchange.told, error, problem)
    answer = problem_answer(problem)
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    return answer

"""`LogFormat`: all lines that `triolet serve` writes to standard error in one form, for people or for programs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping

ACCESS = "triolet.access"
FORMATS = ("text", "json")
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIRST = ("method", "path", "status", "seconds")


class LogFormat(logging.Formatter):
    """Formats the log of the server, the engines and Python's warnings, and the access log, whose records are JSON
    already. ``kind``: text, or one object of JSON for each line."""

    def __init__(self, kind: str) -> None:
        super().__init__(_FORM)
        self._writes: Callable[[logging.LogRecord], str] = self._object if kind == "json" else self._line

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, as logging asks."""
        return self._writes(record)

    def _line(self, record: logging.LogRecord) -> str:
        if record.name != ACCESS:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.name}: {_told(json.loads(record.getMessage()))}"

    def _object(self, record: logging.LogRecord) -> str:
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        told |= json.loads(record.getMessage()) if record.name == ACCESS else {"message": record.getMessage()}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)


def _told(members: Mapping[str, object]) -> str:
    """The members of a request's line in one line of text, in which no client writes a line or a control character."""
    first = [str(members.get(name)).encode("unicode_escape").decode() for name in _FIRST]
    rest = [f"{name}={json.dumps(value)}" for name, value in members.items() if name not in (*_FIRST, "time")]
    return " ".join([*first[:3], f"{first[3]} s", *rest])


def log_to(stream: logging.StreamHandler[object], kind: str) -> None:
    """Writes all that the server logs to ``stream`` alone."""
    stream.setFormatter(LogFormat(kind))
    logging.captureWarnings(True)
    for name in ("triolet", "py.warnings"):
        logger = logging.getLogger(name)
        logger.addHandler(stream)
        logger.setLevel(logging.INFO)
        logger.propagate = False

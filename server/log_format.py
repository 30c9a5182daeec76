"""`LogFormat`: the lines that `triolet serve` logs in one form, for people or for programs."""

from __future__ import annotations

import json
import logging
import time
from copy import copy
from typing import TextIO

ACCESS = "triolet.access"
FORMATS = ("text", "json")
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFormat(logging.Formatter):
    """Formats the log of the server, engines and libraries, Python's warnings, and the access log, whose records are
    JSON already. ``kind``: text, or one object of JSON for each line."""

    def __init__(self, kind: str) -> None:
        super().__init__(_FORM)
        self._is_json = kind == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, as logging asks. In a line of text no client writes a line end or a control character."""
        access = json.loads(record.getMessage()) if record.name == ACCESS else None
        if self._is_json:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
            told = {"time": at, "level": record.levelname.lower(), "logger": record.name}
            told |= {"message": record.getMessage()} if access is None else access
            return json.dumps(told | ({"traceback": self.formatException(record.exc_info)} if record.exc_info else {}))
        if access is not None:
            access["path"] = _quoted(access["path"])  # with blanks it would look like other members
            first = " ".join(str(access.pop(name)) for name in ("method", "path", "status", "seconds"))
            rest = [f"{name}={_quoted(value)}" for name, value in access.items() if name != "time"]
            record = copy(record)  # other handlers get the object
            record.msg, record.args = "%s s %s", (first, " ".join(rest))
        return super().format(record)


def _quoted(value: object) -> str:
    """Returns ``value`` as JSON of printable ASCII."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def log_to(stream: TextIO, kind: str) -> None:
    """Writes the log of the server, and warnings of Python's and of libraries, to ``stream``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormat(kind))
    logging.captureWarnings(True)
    logging.getLogger().addHandler(handler)  # of all loggers: libraries log, too
    logging.getLogger("triolet").setLevel(logging.INFO)

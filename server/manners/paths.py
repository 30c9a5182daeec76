"""`without_paths`: a text for clients, in which no file of this machine is named."""

from __future__ import annotations

import re

_BEGIN = r"(?:file:/{1,3}|~?/(?!/)|[A-Za-z]:[\\/](?!/)|\\\\)"
_QUOTED = re.compile(rf"""(?P<quote>['"`])(?:{_BEGIN})(?:(?!(?P=quote))[^\n])*(?P=quote)""")
_PLAIN = re.compile(rf"""(?<![\w./\\~#%?<>@+\-\])])(?:{_BEGIN})[^\s'"`,;()\[\]{{}}<>|]*[^\s'"`,;:.()\[\]{{}}<>|]""")
_INSTEAD = "(a path of the server)"


def without_paths(text: str) -> str:
    """``text``, with `_INSTEAD` in the place of each absolute path; one with blanks is known by its quotation marks.
    Addresses of the network, types of media and fractions are none."""
    return _PLAIN.sub(_INSTEAD, _QUOTED.sub(_INSTEAD, text))

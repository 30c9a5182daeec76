"""`without_paths`: a text for clients, without the paths of this machine that can be told from other words."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

_BEGIN = r"(?:file:/{1,3}|~?/(?!/)|[A-Za-z]:[\\/](?!/)|\\\\)"
_QUOTED = re.compile(rf"""(?P<quote>['"`])(?:{_BEGIN})(?:(?!(?P=quote))[^\n])*(?P=quote)""")
_PLAIN = re.compile(rf"""(?<![\w./\\~#%?<>@+\-\])])(?:{_BEGIN})[^\s'"`,;()\[\]{{}}<>|]*[^\s'"`,;:.()\[\]{{}}<>|]""")
_INSTEAD = "(a path of the server)"


def known_folders(given: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of folders that errors may have: those that were ``given`` and exist, as they were and in full,
    and those of the process. The longest come first. A name alone is a word as any other."""
    there = [one for one in given if Path(one).is_dir()]
    own = (Path.cwd(), Path.home(), Path(tempfile.gettempdir()))
    found = {*there, *(str(Path(one).resolve()) for one in there), *map(str, own)}
    return tuple(sorted((one for one in found if re.search(r"[\\/].", one)), key=len, reverse=True))


def without_paths(text: str, folders: Iterable[str] = ()) -> str:
    """Returns ``text`` with `_INSTEAD` in the place of each absolute path, and of each of ``folders`` with what is in
    it. One with blanks is known by its quotation marks, or as one of ``folders``: another relative one stays. Addresses
    of the network, types of media and fractions are no paths."""
    for folder in folders:
        text = re.sub(rf"(?<![\w./\\-]){re.escape(folder)}(?![\w-])[^\s'\"`,;:()\[\]{{}}<>|]*", _INSTEAD, text)
    return _PLAIN.sub(_INSTEAD, _QUOTED.sub(_INSTEAD, text))

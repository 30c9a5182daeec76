"""`without_paths`: removes paths of this machine from a text for clients, as far as they can be told from other
words."""

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
    """Returns the paths of folders that errors may contain, the longest first: the existing folders among ``given``,
    both as they were given and as full paths, and the folders of the process. A path of a single name is left out,
    since it looks like any word."""
    there = [one for one in given if Path(one).is_dir()]
    own = (Path.cwd(), Path.home(), Path(tempfile.gettempdir()))
    found = {*there, *(str(Path(one).resolve()) for one in there), *map(str, own)}
    return tuple(sorted((one for one in found if re.search(r"[\\/].", one)), key=len, reverse=True))


def without_paths(text: str, folders: Iterable[str] = ()) -> str:
    """Returns ``text`` with `_INSTEAD` in place of each absolute path, and of each path that begins with one of
    ``folders``. A path with blanks is recognised only in quotation marks or if it is one of ``folders``. Relative paths
    that are not in ``folders`` stay. Network addresses, media types and fractions do not count as paths."""
    for folder in folders:
        text = re.sub(rf"(?<![\w./\\-]){re.escape(folder)}(?![\w-])[^\s'\"`,;:()\[\]{{}}<>|]*", _INSTEAD, text)
    return _PLAIN.sub(_INSTEAD, _QUOTED.sub(_INSTEAD, text))

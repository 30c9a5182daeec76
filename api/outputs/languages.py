"""Languages as users name them."""

from __future__ import annotations

import difflib
import re

from ...core.languages import LANGUAGE_CODES, LANGUAGES

_TAG = re.compile(r"([a-z]{2,3})([-_][a-z]{4})?([-_]([a-z]{2}|[0-9]{3}))?")  # RFC 5646: language, script, region


def language_name(code: str) -> str:
    """The English name of a language as OpenAI's API writes it ("english"); a code that the table lacks is returned
    unchanged."""
    return LANGUAGES.get(code, code)


def language_code(language: str) -> str | None:
    """The code of a language that is given by its code, tag ("en-US"), English name or token; ``None`` if the table
    lacks the language."""
    name = language.strip().lower().removeprefix("<|").removesuffix("|>")
    tag = _TAG.fullmatch(name)
    name = name if tag is None else tag[1]
    return name if name in LANGUAGES else LANGUAGE_CODES.get(name)


def unknown_language(language: str) -> str:
    """The text of the error for a language that the table lacks. It lists the most similar names, not all of the
    hundred.
    """
    known = [*LANGUAGES, *LANGUAGE_CODES]
    near = difflib.get_close_matches(language.strip().lower(), known, 3, 0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else "openai/whisper lists them"
    return f"{language!r} is not a language of Whisper; allowed: a code (en) or an English name (english); {hint}"

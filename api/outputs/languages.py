"""Languages as users name them."""

from __future__ import annotations

import difflib

from ...core.languages import LANGUAGE_CODES, LANGUAGES


def language_name(code: str) -> str:
    """The English name of a language as OpenAI's API writes it ("english"); a code that the table lacks is returned
    unchanged."""
    return LANGUAGES.get(code, code)


def unknown_language(language: str) -> str:
    """The text of the error for a language that the table lacks. It lists the most similar names, not all of the
    hundred.
    """
    known = [*LANGUAGES, *LANGUAGE_CODES]
    near = difflib.get_close_matches(language.strip().lower(), known, 3, 0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else "openai/whisper lists them"
    return f"{language!r} is not a language of Whisper; allowed: a code (en) or an English name (english); {hint}"

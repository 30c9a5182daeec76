"""`align`: the times at which the words of a known text are spoken, by a request to an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from attrs import field, frozen

from ...core.aligning import Timed
from ...core.errors import ContextLengthExceeded, InvalidRequest
from ...core.languages import language_code
from ...core.model import ModelDescription
from ...core.request import Request
from ..inputs.audio import AudioSource, load_audio
from ..inputs.prompts import check_kind
from ..inputs.threads import run_in_thread
from ..outputs.languages import unknown_language
from ..outputs.results import Word
from .windows import Generated
from .word_aligner import check_aligns, words_between


@frozen
class AlignQuery:
    """The arguments of one call of `Engine.align`, which explains them."""

    audio: AudioSource = field(repr=False)
    text: str
    language: str | None
    priority: int = field(kw_only=True)
    request_id: str | None = field(kw_only=True)
    wait: bool = field(kw_only=True)


async def align(
    query: AlignQuery, description: ModelDescription, run: Callable[[Request], Awaitable[Generated]], request_id: str
) -> tuple[Word, ...]:
    """Implements `Engine.align`. ``run`` runs one request to its end."""
    aligner = check_aligns(description)
    if not isinstance(query.text, str):
        raise InvalidRequest(f"text={query.text!r:.200}; allowed: the text that is spoken in the audio")
    language = _code(query.language)
    samples = await run_in_thread(partial(load_audio, query.audio, sampling_rate=description.sampling_rate))
    if not query.text.strip():
        return ()
    draft = await run_in_thread(partial(aligner.draft, samples, query.text, language))
    if len(draft.token_ids) >= description.max_positions:
        raise ContextLengthExceeded(
            f"the text and its audio take {len(draft.token_ids)} positions; allowed: up to "
            f"{description.max_positions - 1}. Align shorter parts"
        )
    found: Sequence[Timed | None] = [None] * len(draft.words)
    if draft.token_ids:
        request = Request(id=request_id, prompt_token_ids=draft.token_ids, items=draft.items, alignment=draft.alignment)
        aligned = (await run(request)).aligned
        assert aligned is not None, "an aligned request ended without times"
        found = await run_in_thread(partial(aligner.times, draft, aligned))
    return words_between(draft.words, found, 0.0, len(samples) / description.sampling_rate)


def _code(language: str | None) -> str | None:
    check_kind("language", language, str, "a code (en) or an English name (english), or leave it out")
    code = None if language is None else language_code(language)
    if language is not None and code is None:
        raise InvalidRequest(f"language={unknown_language(language)}")
    return code

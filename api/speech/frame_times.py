"""The times of a window's text by the frames at which the model wrote its tokens, for CTC models, transducers and
models that write a token at each step.

A span ends with a sentence or before a pause. If the window was cut where somebody may speak, its last word may be cut
too, so the next window begins before that word.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve

from ...core.plan import AlignedTokens
from ...core.speech import Span, WindowCut
from .recipe import Recipe
from .windows import Attempt
from .words import SENTENCE_ENDS, split_words

_PAUSE = 1.0  # seconds without a token
_EDGE = 0.5  # seconds before the end of a window: a word that ends later may go on


def aligned_by_frames(attempt: Attempt, recipe: Recipe) -> AlignedTokens | None:
    """Returns the times of the text tokens, or ``None`` if there are none. A token ends where its frames end, or where
    the next one begins, and none ends later than the window."""
    generated = attempt.generated
    parts = zip(generated.token_ids, generated.frames, generated.logprobs, strict=False)
    kept = [(frames, logprob) for token, frames, logprob in parts if recipe.model.is_text(token)]
    return aligned_frames(kept, _frames(attempt, recipe)) if kept else None


def aligned_frames(tokens: Sequence[tuple[tuple[int, int], float]], last: int) -> AlignedTokens:
    """Returns the times of ``tokens``, each given by its frames and its log-probability. None ends later than frame
    ``last``."""
    frames, logprobs = zip(*tokens, strict=True)
    found, stops = zip(*frames, strict=True)
    starts = [min(start, last - 1) for start in found]
    ends = [min(stop, start) for stop, start in zip(stops, (*starts[1:], last), strict=True)]
    return AlignedTokens(frames=(*starts, ends[-1]), logprobs=logprobs, ends=tuple(ends))


def frames_of_steps(first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Returns the frames of ``count`` tokens, one for each step from ``first`` on. Those before the audio are at its
    beginning."""
    return tuple((max(step, 0), max(step, 0) + 1) for step in range(first, first + count))


def cut_by_frames(cut: WindowCut, attempt: Attempt, recipe: Recipe, *, is_full: bool) -> WindowCut:
    """Returns ``cut`` with spans by frames. They have all text tokens in order, except for a last word that may be cut.

    Args:
        is_full: the window was cut by its length, not at a pause.
    """
    generated, frames, aligned = attempt.generated, _frames(attempt, recipe), aligned_by_frames(attempt, recipe)
    after = -(-len(attempt.sound.samples) // recipe.facts.step_samples)
    cut = evolve(cut, spans=(), next_start=after, closed=True)
    if aligned is None:
        return cut
    texts = [index for index, token in enumerate(generated.token_ids) if recipe.model.is_text(token)]
    words = split_words([generated.token_ids[index] for index in texts], recipe.model.decode, cut.language)
    starts, ends, seconds = aligned.frames, aligned.ends, recipe.seconds(recipe.facts.step_samples)
    if is_full and len(words) > 1 and (frames - ends[-1]) * seconds < _EDGE:
        del texts[-len(words.pop().token_ids) :]
        cut = evolve(cut, next_start=ends[len(texts) - 1])
    firsts, at = list[int](), 0
    for index, word in enumerate(words):
        ended = not index or words[index - 1].text.strip().endswith(SENTENCE_ENDS)
        paused = index > 0 and (starts[at] - ends[at - 1]) * seconds >= _PAUSE
        if not firsts or ((ended or paused) and starts[at] > starts[firsts[-1]]):
            firsts.append(at)
        at += len(word.token_ids)
    spans = [
        Span(
            starts[first],
            max(ends[stop - 1], starts[first] + 1),
            generated.token_ids[texts[first] : texts[stop - 1] + 1],
            texts[first],
        )
        for first, stop in pairwise((*firsts, len(texts)))
    ]
    return evolve(cut, spans=tuple(spans))


def _frames(attempt: Attempt, recipe: Recipe) -> int:
    """Returns the number of whole frames of a window, 1 or more."""
    return max(len(attempt.sound.samples) // recipe.facts.step_samples, 1)

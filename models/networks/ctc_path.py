"""`best_path`: the likeliest way in which a CTC model says given tokens (Graves et al. 2006, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.aligning import least_frames
from ...core.plan import AlignedTokens


def best_path(logprobs: npt.NDArray[Any], tokens: Sequence[int], blank: int) -> AlignedTokens:
    """Returns the frames of ``tokens`` on the likeliest path, found by the algorithm of Viterbi.

    A path has a token or the blank in each frame. Without blanks and without repetitions it is ``tokens``. Of equally
    likely paths the one that leaves its states last is taken.

    Args:
        logprobs: natural log-probabilities, [frames, vocabulary]; at least `least_frames` frames.
        tokens: one token or more, none of them blank.

    Returns:
        For each token its first frame, the frame after its last one, and the mean of its log-probabilities in its
        frames. ``frames`` ends with the end of the last token.
    """
    assert least_frames(tokens) <= len(logprobs), f"{len(tokens)} tokens do not fit {len(logprobs)} frames"
    labels = np.full(2 * len(tokens) + 1, blank)
    labels[1::2] = tokens
    leaps = np.zeros(len(labels), bool)  # from a token to the next one, without a blank between
    leaps[3::2] = labels[3::2] != labels[1:-2:2]
    emitted = np.asarray(logprobs, np.float64)[:, labels]
    best = np.full(len(labels), -np.inf)
    best[:2] = emitted[0, :2]
    moves = np.zeros(emitted.shape, np.int8)  # the number of states by which the best path to a state has moved
    for frame in range(1, len(emitted)):
        step = np.concatenate([[-np.inf], best[:-1]])
        leap = np.where(leaps, np.concatenate([[-np.inf, -np.inf], best[:-2]]), -np.inf)
        entries = np.stack([best, step, leap])
        moves[frame] = entries.argmax(0)
        best = entries.max(0) + emitted[frame]
    states = _traced(moves, len(labels) - 1 if best[-1] >= best[-2] else len(labels) - 2)
    said = range(1, len(labels), 2)
    starts, ends = (np.searchsorted(states, said, side).tolist() for side in ("left", "right"))
    means = [float(emitted[start:end, state].mean()) for state, start, end in zip(said, starts, ends, strict=True)]
    return AlignedTokens(frames=(*starts, ends[-1]), logprobs=tuple(means), ends=tuple(ends))


def _traced(moves: npt.NDArray[Any], state: int) -> npt.NDArray[Any]:
    """Returns the state of each frame, which never decreases, found from the last frame back."""
    states = np.empty(len(moves), np.int64)
    for frame in range(len(moves) - 1, -1, -1):
        states[frame] = state
        state -= int(moves[frame, state])
    return states

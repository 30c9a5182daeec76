"""Finds the times at which tokens are spoken from the decoder's cross-attention: it smooths the weights, then finds the
best monotone path.

A few heads of a Whisper decoder attend to the frames in which the next token is spoken. Their weights are normalized to
one scale, smoothed over time and averaged. Dynamic time warping finds the path through tokens and frames with the
greatest sum (Sakoe and Chiba 1978)::

    frames     0 1 2 3 4 5 6 7 8
    " the"     # # . . . . . . .       begins at frame 0
    " cat"     . . # # # . . . .       begins at frame 2
    end        . . . . . # # # #       begins at frame 5: so " cat" ends there

The scheme is that of openai/whisper's ``timing.py`` and of transformers' Whisper, and yields the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny  # avoids 0 / 0 (NaN) at a frame to which all tokens attend alike


def cross_weights(queries: Tensor, keys: Tensor, frames: int) -> Tensor:
    """Returns the share of attention that each token pays to each of the first ``frames`` frames, float32 [heads,
    tokens, frames].

    As in transformers, the shares are computed over all frames before the later frames are cut off. So a token that
    attends to the silence after the audio has small shares in the audio.

    Args:
        queries: scaled, [heads, tokens, head_dim].
        keys: [heads, embeddings, head_dim].
    """
    scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2))
    return scores.softmax(-1)[..., :frames]


def smoothed(weights: Tensor, width: int) -> Tensor:
    """Normalizes and smooths one head's ``weights`` [tokens, frames]. At each frame, the weights of the tokens get mean
    0 and standard deviation 1. Then each weight becomes the median of the ``width`` frames around it."""
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    return median_filtered((weights - mean) / deviation.clamp(min=_TINY), width)


def median_filtered(values: Tensor, width: int) -> Tensor:
    """Replaces each value by the median of the ``width`` (odd) values around it along the last dimension, whose ends
    are mirrored. If this dimension is too short to mirror, the values stay as they are."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = torch.cat([values[..., 1 : half + 1].flip(-1), values, values[..., -half - 1 : -1].flip(-1)], -1)
    return _median([padded[..., shift : shift + values.shape[-1]] for shift in range(width)])


def _median(lanes: list[Tensor]) -> Tensor:
    """The elementwise median of an odd number of tensors, without sorting. Takes half of the tensors plus two. Their
    least and their greatest value cannot be the median of all, so these two are dropped, the next tensor joins, and so
    on.
    """
    if len(lanes) == 1:
        return lanes[0]
    room = len(lanes) // 2 + 2
    held, unseen = lanes[:room], lanes[room:]
    while len(held) > 1:
        held = _without_extremes(held) + unseen[:1]
        unseen = unseen[1:]
    return held[0]


def _without_extremes(lanes: list[Tensor]) -> list[Tensor]:
    for order in (range(len(lanes) - 1), range(len(lanes) - 3, -1, -1)):
        for index in order:  # upwards moves the greatest to the end, then downwards the least to the beginning
            low, high = torch.minimum(lanes[index], lanes[index + 1]), torch.maximum(lanes[index], lanes[index + 1])
            lanes = [*lanes[:index], low, high, *lanes[index + 2 :]]
    return lanes[1:-1]


def mean_weights(heads: Iterable[Tensor], width: int) -> Tensor:
    """Returns the mean of the smoothed weights over all heads, [tokens, frames]. ``heads`` yields the weights in parts
    [heads, tokens, frames], so that only one part is in memory at a time."""
    total, count = None, 0
    for weights in heads:
        for head in weights:  # one head at a time fits the processor's cache and is twice as fast
            part = smoothed(head, width)
            total = part if total is None else total.add_(part)
            count += 1
    assert total is not None, "there is a head, or words were refused"
    return total / count


def first_frames(gains: Any) -> list[int]:
    """Returns the frame at which each token begins on the best path.

    The path goes through ``gains`` (numpy [tokens, frames]) from the first token and frame to the last token and frame,
    and its sum is the greatest. A step goes to the next frame, to the next token, or to both. Among equally good steps
    the first of these is preferred: to the next frame, to both, to the next token.

    Each row is computed at once. Along a row the sums accumulate, so the best place to enter the row is a running
    maximum: ``best[j] = sums[j] + max(entry[k] - sums[k - 1] for k <= j)``.
    """
    tokens, frames = gains.shape
    assert frames, "a window has one frame or more"
    above = np.full(frames, -np.inf)  # the best sums in the row before
    entered = np.empty((tokens, frames), np.int64)  # the frame at which the best path to a cell enters its row
    both = np.empty((tokens, frames), bool)  # whether the path enters diagonally, from the frame before
    for token, row in enumerate(np.asarray(gains, np.float64)):
        sums = np.cumsum(row)
        diagonal = np.concatenate([[0.0 if token == 0 else -np.inf], above[:-1]])
        both[token] = diagonal >= above
        entry = np.maximum(diagonal, above) - (sums - row)
        running = np.maximum.accumulate(entry)
        fresh = np.concatenate([[True], entry[1:] > running[:-1]])
        entered[token] = np.maximum.accumulate(np.where(fresh, np.arange(frames), 0))
        above = sums + running
    return _traced(entered, both)


def _traced(entered: Any, both: Any) -> list[int]:
    """Returns the frames at which the best path enters the rows, found from the last row back."""
    frame, found = entered.shape[1] - 1, []
    for token in range(len(entered) - 1, -1, -1):
        frame = int(entered[token, frame])
        found.append(frame)
        frame -= int(both[token, frame])
    return found[::-1]

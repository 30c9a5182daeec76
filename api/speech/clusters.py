"""Clusters of voices: windows of speech whose vectors are near each other come from the same voice. Pure functions,
which give the same result in each run.

Spectral clustering (von Luxburg 2007) of the cosines between windows, of which each window keeps the largest (Wang et
al. 2018, "Speaker diarization with LSTM"). The number of voices is the place of the largest gap between eigenvalues.
Then voices that are too much alike are merged, and those that spoke for moments alone are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_MOST_WINDOWS = 1_000  # that are compared with each other: 1,000 take half a second, and ten times as many 500 s
_KEPT, _LEAST_KEPT = 0.06, 6  # the part of the cosines that each window keeps, and the least number of them
_ALIKE = 0.89  # two voices whose means have this cosine are one
_FEW = 4  # a voice with fewer windows is a cough, or two people at once
_KNOWN = 0.78  # the least cosine at which a voice is a known one
_ROUNDS = 50  # of k-means, which has always settled before


def cluster(vectors: Array, least: int, most: int) -> Array:
    """Returns the means of the voices, shape (voices, width), of ``vectors`` of length 1, shape (n, width). There are
    ``least`` to ``most`` voices; fewer if there are fewer vectors."""
    chosen = vectors[np.unique(np.linspace(0, len(vectors) - 1, min(_MOST_WINDOWS, len(vectors))).astype(int))]
    labels = _merged(chosen, _spectral(chosen, least, most), least)
    counts = np.bincount(labels)
    enough = np.argsort(-counts, kind="stable")[: max(least, int((counts >= _FEW).sum()), 1)]
    return _means(chosen, labels)[np.sort(enough)]


def nearest(vectors: Array, means: Array) -> Array:
    """Returns the number of the nearest mean for each vector."""
    return np.asarray((vectors @ means.T).argmax(axis=1))


def recognized(means: Array, known: Mapping[str, Array]) -> dict[int, str]:
    """Returns the name of the known voice for each mean that is near enough to one. The nearest pairs come first, and
    each known voice is found once."""
    pairs = [(float(mean @ voice), number, name) for number, mean in enumerate(means) for name, voice in known.items()]
    found: dict[int, str] = {}
    for cosine, number, name in sorted(pairs, reverse=True):
        if cosine >= _KNOWN and number not in found and name not in found.values():
            found[number] = name
    return found


def _means(vectors: Array, labels: Array) -> Array:
    return unit(np.array([vectors[labels == one].mean(axis=0) for one in range(labels.max() + 1)]))


def unit(vectors: Array) -> Array:
    """Returns ``vectors`` with length 1."""
    return np.asarray(vectors / (np.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-9))


def _affinity(vectors: Array) -> Array:
    cosines = np.clip(vectors @ vectors.T, 0, 1)
    left_out = len(vectors) - min(len(vectors), max(_LEAST_KEPT, int(_KEPT * len(vectors))))
    cosines[cosines < np.partition(cosines, left_out, axis=1)[:, left_out, None]] = 0
    np.fill_diagonal(cosines, 0)
    return np.asarray((cosines + cosines.T) / 2)


def _spectral(vectors: Array, least: int, most: int) -> Array:
    """Returns the label of each vector, by k-means of the rows of eigenvectors."""
    affinity = _affinity(vectors.astype(float))
    degree = affinity.sum(axis=1) + 1e-9
    laplacian = np.eye(len(vectors)) - affinity / np.sqrt(degree[:, None] * degree)
    values, rows = np.linalg.eigh(laplacian)
    gaps = np.diff(values[least - 1 : most + 1])
    count = min(least + int(np.argmax(gaps)) if len(gaps) else least, len(vectors))
    rows = unit(rows[:, :count])
    first = [int(degree.argmax())]
    while len(first) < count:  # the row that is farthest from all that are chosen
        first.append(int((rows @ rows[first].T).max(axis=1).argmin()))
    labels = _numbered(nearest(rows, rows[first]))
    for _ in range(_ROUNDS):
        labels = _numbered(nearest(rows, _means(rows, labels)))
    return labels


def _merged(vectors: Array, labels: Array, least: int) -> Array:
    """Returns the labels after the most similar voices were merged, while they are too much alike and more than
    ``least`` are left."""
    while (means := _means(vectors, labels)).shape[0] > least:
        cosines = np.tril(means @ means.T, -1)
        later, earlier = np.unravel_index(int(cosines.argmax()), cosines.shape)
        if cosines[later, earlier] < _ALIKE:
            break
        labels = _numbered(np.where(labels == later, earlier, labels))
    return labels


def _numbered(labels: Array) -> Array:
    return np.asarray(np.unique(labels, return_inverse=True)[1])

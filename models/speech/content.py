"""The key of a piece of audio."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from ...core.errors import InvalidRequest


def content_key(samples: npt.NDArray[np.float32], identity: str) -> str:
    """Returns the key under which an encoding of ``samples`` is shared: 128 bits of BLAKE2b, in hexadecimal.

    ``samples`` are float32 of any shape. ``identity`` names the processor and the model that encode them.
    """
    if samples.dtype != np.float32:
        raise InvalidRequest(f"content_key was given {samples.dtype} samples; allowed: float32")
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((identity, samples.shape)).encode())
    digest.update(np.ascontiguousarray(samples).data)
    return digest.hexdigest()

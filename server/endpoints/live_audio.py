"""The audio of a live session, as bytes of a client, and as samples for an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field

from ..schemas.realtime import G711, Pcm

Samples = npt.NDArray[np.int16]

_CODECS = {"audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}


@define(eq=False)
class Decoder:
    """Bytes of one format to samples; a sample may be cut by the border of two pieces."""

    format: Pcm | G711
    _rest: bytes = field(default=b"", init=False)

    def length(self, data: bytes) -> int:
        """How many samples ``data`` makes."""
        return len(data) if isinstance(self.format, G711) else (len(self._rest) + len(data)) // 2

    def decode(self, data: bytes) -> Samples:
        """int16 samples, mono, at the format's rate."""
        if isinstance(self.format, G711):
            return _expanded(data, _CODECS[self.format.type])
        data = self._rest + data
        whole = len(data) - len(data) % 2
        self._rest = data[whole:]
        return np.frombuffer(data[:whole], "<i2").astype(np.int16)


def _expanded(data: bytes, codec: str) -> Samples:
    """The samples of ITU-T G.711."""
    import av

    if not data:
        return np.zeros(0, np.int16)
    context: Any = av.CodecContext.create(codec, "r")
    context.sample_rate, context.layout = 8_000, "mono"
    frames = context.decode(av.Packet(data))
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.int16)

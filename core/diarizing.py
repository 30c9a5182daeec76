"""Diarization by a model that reads frames: `FrameDiarizer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import Any, Protocol


class FrameDiarizer(Protocol):
    """A model that finds which speakers speak in each frame. It never changes, and can be pickled."""

    @property
    def frame_samples(self) -> int:
        """The number of samples from one frame to the next."""

    @property
    def speakers(self) -> int:
        """The most speakers of a recording."""

    @property
    def modes(self) -> Collection[str]:
        """The ways of reading. The first is for recordings, the others for audio that is heard as it comes."""

    def read(self, mode: str, hear: Callable[[Any], object]) -> Generator[Any, Any, None]:
        """Reads a recording part by part. The generator yields what it needs, and gets it by ``send``, in any thread:

        - ``(start, length)``: samples ``start`` to ``start + length``, float32, or fewer at the recording's end;
        - an `EncoderItem`: the output of the encoder for it, as numbers;
        - ``None``: nothing, since the recording is read.

        ``hear`` is called with the probabilities of the next frames, float32 [frames, speakers].
        """

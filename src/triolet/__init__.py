"""Triolet: an async inference engine that lives inside your program.

::

    async with triolet.Engine("path-or-hub-id") as engine:
        transcript = await engine.transcribe("speech.wav")          # Whisper
        completion = await engine.generate("Once upon a time")      # decoders; images= and audio= where they read any
        vectors = await engine.embed(["a text", "another"])         # embedding models

torch and transformers are imported when an engine starts, not before.
"""

from .actors.supervisor import EngineStatistics
from .api.engine import Engine
from .api.outputs.results import Completion, Delta, Segment, Transcript, Usage
from .api.outputs.streams import DeltaStream
from .api.speech.options import TranscribeOptions
from .api.speech.segments import SegmentStream
from .core.config import EngineConfig, Speculation
from .core.errors import (
    CallerError,
    CheckpointError,
    DeviceLost,
    DeviceOutOfMemory,
    EncodeFailed,
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineStateError,
    EngineTeardownError,
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    PoisonRequest,
    RequestTooLarge,
    RunnerCrashed,
    TrioletError,
    UnsupportedAudio,
    UnsupportedImage,
    UnsupportedModel,
)
from .core.events import Event
from .core.request import FinishReason, SamplingParams, Structure
from .core.timings import Timings

__all__ = [
    "CallerError",
    "CheckpointError",
    "Completion",
    "Delta",
    "DeltaStream",
    "DeviceLost",
    "DeviceOutOfMemory",
    "EncodeFailed",
    "Engine",
    "EngineAsleep",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineStateError",
    "EngineStatistics",
    "EngineTeardownError",
    "Event",
    "FinishReason",
    "InvalidRequest",
    "InvariantViolation",
    "Overloaded",
    "PoisonRequest",
    "RequestTooLarge",
    "RunnerCrashed",
    "SamplingParams",
    "Segment",
    "SegmentStream",
    "Speculation",
    "Structure",
    "Timings",
    "TranscribeOptions",
    "Transcript",
    "TrioletError",
    "UnsupportedAudio",
    "UnsupportedImage",
    "UnsupportedModel",
    "Usage",
]


def __getattr__(name: str) -> str:
    """``__version__``, read from the installed package when somebody asks."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("triolet")

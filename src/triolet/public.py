"""The public names, which the package gives out when somebody asks for them."""

from .actors.supervisor import EngineStatistics
from .api.engine import Engine
from .api.event_log import EventLog
from .api.live.options import LiveOptions
from .api.live.session import LiveSession
from .api.outputs.results import Completion, Delta, LiveText, Segment, Stretch, Transcript, Usage, Word
from .api.outputs.streams import DeltaStream
from .api.speech.options import TranscribeOptions
from .api.speech.segments import SegmentStream
from .api.speech.voice import VoiceActivity
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
    "EventLog",
    "FinishReason",
    "InvalidRequest",
    "InvariantViolation",
    "LiveOptions",
    "LiveSession",
    "LiveText",
    "Overloaded",
    "PoisonRequest",
    "RequestTooLarge",
    "RunnerCrashed",
    "SamplingParams",
    "Segment",
    "SegmentStream",
    "Speculation",
    "Stretch",
    "Structure",
    "Timings",
    "TranscribeOptions",
    "Transcript",
    "TrioletError",
    "UnsupportedAudio",
    "UnsupportedImage",
    "UnsupportedModel",
    "Usage",
    "VoiceActivity",
    "Word",
]

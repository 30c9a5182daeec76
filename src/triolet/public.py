"""The public names, which the package imports when the first of them is needed."""

from .actors.statistics import EngineStatistics
from .api.engine import Engine
from .api.engines import Engines, ModelStatistics
from .api.event_log import EventLog
from .api.live.options import LiveOptions
from .api.live.session import LiveSession
from .api.model_spec import ModelSpec
from .api.outputs.results import Completion, Delta, LiveText, Segment, Stretch, Transcript, Turn, Usage, Word
from .api.outputs.streams import DeltaStream
from .api.speech.options import TranscribeOptions
from .api.speech.speakers import AudioDiarizer
from .api.speech.transcription import SegmentStream
from .api.speech.voice import VoiceActivity
from .api.speech.word_aligner import WordAligner
from .api.sync_engine import SyncDeltaStream, SyncEngine, SyncLiveSession, SyncSegmentStream
from .api.tools.formats import ToolFormat
from .api.tools.reader import ToolReader
from .api.tools.syntax import ArgumentsPiece, CallBegin, ContentPiece, ToolCall
from .core.config import EngineConfig, Speculation
from .core.errors import (
    CallerError,
    CheckpointError,
    ContextLengthExceeded,
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
    ModelTooLarge,
    Overloaded,
    PoisonRequest,
    RequestTooLarge,
    RunnerCrashed,
    TrioletError,
    UnknownModel,
    UnsupportedAudio,
    UnsupportedImage,
    UnsupportedModel,
)
from .core.events import Event
from .core.request import FinishReason, SamplingParams, Structure
from .core.timings import Timings

__all__ = [
    "ArgumentsPiece",
    "AudioDiarizer",
    "CallBegin",
    "CallerError",
    "CheckpointError",
    "Completion",
    "ContentPiece",
    "ContextLengthExceeded",
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
    "Engines",
    "Event",
    "EventLog",
    "FinishReason",
    "InvalidRequest",
    "InvariantViolation",
    "LiveOptions",
    "LiveSession",
    "LiveText",
    "ModelSpec",
    "ModelStatistics",
    "ModelTooLarge",
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
    "SyncDeltaStream",
    "SyncEngine",
    "SyncLiveSession",
    "SyncSegmentStream",
    "Timings",
    "ToolCall",
    "ToolFormat",
    "ToolReader",
    "TranscribeOptions",
    "Transcript",
    "TrioletError",
    "Turn",
    "UnknownModel",
    "UnsupportedAudio",
    "UnsupportedImage",
    "UnsupportedModel",
    "Usage",
    "VoiceActivity",
    "Word",
    "WordAligner",
]

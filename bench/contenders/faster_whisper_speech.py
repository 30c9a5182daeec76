"""The contender faster-whisper: ``faster_whisper_speech.py FOLDER COMPUTE_TYPE THREADS``. Several paths at once are one
batch of its `BatchedInferencePipeline`."""

from __future__ import annotations

import sys
from typing import Any

from serve import in_order, serve

OPTIONS = {"beam_size": 1, "temperature": 0.0, "without_timestamps": True, "language": "en"}


def open_model() -> tuple[Any, dict[str, str]]:
    import ctranslate2
    import faster_whisper

    folder, kind, threads = sys.argv[1:]
    model = faster_whisper.WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=int(threads))
    versions = {"faster-whisper": faster_whisper.__version__, "ctranslate2": ctranslate2.__version__}
    return (model, faster_whisper.BatchedInferencePipeline(model)), versions


def run(models: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    model, batched = models
    paths = task["paths"]
    if task.get("reuse"):
        return in_order(task, paths, lambda path: reuse(model, path))
    if task.get("arrivals") or len(paths) == 1:
        return in_order(task, paths, lambda path: transcribe(model, path))
    return together(batched, paths)


def transcribe(model: Any, path: str, **options: Any) -> dict[str, Any]:
    segments, _ = model.transcribe(path, condition_on_previous_text=False, **{**OPTIONS, **options})
    found = list(segments)
    return {"text": "".join(one.text for one in found), "tokens": [token for one in found for token in one.tokens]}


def reuse(model: Any, path: str) -> dict[str, Any]:
    text = transcribe(model, path, language=None)
    transcribe(model, path, task="translate")
    return text


def together(batched: Any, paths: list[str]) -> list[dict[str, Any]]:
    import numpy as np
    from faster_whisper.audio import decode_audio

    clips = [decode_audio(path) for path in paths]
    ends = np.cumsum([len(clip) for clip in clips]) / 16_000
    spans = [{"start": float(start), "end": float(end)} for start, end in zip([0.0, *ends[:-1]], ends, strict=True)]
    segments, _ = batched.transcribe(
        np.concatenate(clips), batch_size=len(clips), vad_filter=False, clip_timestamps=spans, **OPTIONS
    )
    found: list[dict[str, Any]] = [{"text": "", "tokens": []} for _ in paths]
    for one in segments:
        # the library rounds starts to milliseconds; a start at the end of a clip belongs to the next clip
        index = min(int(np.searchsorted(ends - 0.01, one.start, side="right")), len(paths) - 1)
        found[index] = {"text": found[index]["text"] + one.text, "tokens": [*found[index]["tokens"], *one.tokens]}
    return found


if __name__ == "__main__":
    serve(open_model, run)

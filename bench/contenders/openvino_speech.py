"""The contender OpenVINO GenAI: ``openvino_speech.py FOLDER NUMBERS THREADS``. FOLDER is an export of ``optimum-cli``.
Its `WhisperPipeline` has no batches, so that several paths at once are answered one after the other."""

from __future__ import annotations

import sys
from typing import Any

from openvino_settings import settings_of
from serve import in_order, serve


def open_model() -> tuple[Any, dict[str, str]]:
    import openvino_genai

    folder, numbers, threads = sys.argv[1:]
    pipeline = openvino_genai.WhisperPipeline(folder, "CPU", **settings_of(numbers, threads))
    return pipeline, {"openvino-genai": openvino_genai.__version__}


def run(pipeline: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    return in_order(task, task["paths"], lambda path: transcribe(pipeline, path, reuse=task.get("reuse", False)))


def transcribe(pipeline: Any, path: str, *, reuse: bool) -> dict[str, Any]:
    import soundfile

    samples = soundfile.read(path, dtype="float32")[0].tolist()
    multilingual = pipeline.get_generation_config().is_multilingual
    asked = {"task": "transcribe", "language": "<|en|>"} if multilingual else {}
    if reuse:
        asked.pop("language")
    text = pipeline.generate(samples, return_timestamps=False, **asked).texts[0]
    if reuse:
        pipeline.generate(samples, return_timestamps=False, task="translate", language="<|en|>")
    tokens = pipeline.get_tokenizer().encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    return {"text": text, "tokens": tokens}


if __name__ == "__main__":
    serve(open_model, run)

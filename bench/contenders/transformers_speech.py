"""The contender transformers: ``transformers_speech.py FOLDER DTYPE THREADS``. Several paths at once are one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve import at_once, in_order, serve
from transformers_models import open_as


def open_model() -> tuple[Any, dict[str, str]]:
    import transformers

    model, folder, versions = open_as("AutoModelForSpeechSeq2Seq")
    return (model, transformers.AutoProcessor.from_pretrained(folder)), versions


def run(models: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    if task.get("reuse"):
        return in_order(task, task["paths"], lambda path: reuse(models, path))
    return at_once(task, task["paths"], lambda paths: generate(models, paths))


def generate(models: Any, paths: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    import soundfile
    import torch

    model, processor = models
    clips = [soundfile.read(path, dtype="float32")[0] for path in paths]
    layout = {} if model.config.model_type == "whisper" else {"padding": True}  # Whisper's windows have one length
    inputs = processor(clips, sampling_rate=16_000, return_tensors="pt", **layout)
    if model.config.model_type == "whisper":
        asked: dict[str, Any] = {"return_timestamps": False}
        if model.generation_config.is_multilingual:
            asked |= {"language": "en", "task": "transcribe", **options}
    else:
        asked = {"max_length": model.config.max_position_embeddings}
    with torch.inference_mode():
        rows = model.generate(**inputs.to(model.dtype), num_beams=1, do_sample=False, **asked)
    special = set(processor.tokenizer.all_special_ids)
    tokens = [[token for token in row if token not in special] for row in rows.tolist()]
    return [{"text": processor.tokenizer.decode(row), "tokens": row} for row in tokens]


def reuse(models: Any, path: str) -> dict[str, Any]:
    (text,) = generate(models, [path], language=None)
    generate(models, [path], task="translate")
    return text


if __name__ == "__main__":
    serve(open_model, run)

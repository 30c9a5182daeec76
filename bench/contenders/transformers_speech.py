"""The contender transformers: ``transformers_speech.py FOLDER DTYPE THREADS``. Several paths at once are one batch."""

from __future__ import annotations

import sys
from typing import Any

from serve import in_order, serve


def open_model() -> tuple[Any, dict[str, str]]:
    import torch
    import transformers

    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    return (model, processor), {"transformers": transformers.__version__, "torch": torch.__version__}


def run(models: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    paths = task["paths"]
    if task.get("reuse"):
        return in_order(task, paths, lambda path: reuse(models, path))
    if task.get("arrivals"):
        return in_order(task, paths, lambda path: generate(models, [path])[0])
    return generate(models, paths)


def generate(models: Any, paths: list[str], **options: Any) -> list[dict[str, Any]]:
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

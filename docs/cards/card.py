"""Runs a checkpoint of speech with its real weights, and writes its card: word error rate, real-time factor, and how
far its texts are from those of transformers' own class.

    python docs/cards/card.py openai/whisper-base RECORDINGS --out docs/cards/whisper-base.md

RECORDINGS is a folder of short recordings (up to 30 s), NAME.wav or NAME.flac with the text in NAME.txt. The package
jiwer is needed (`pip install '.[dev]'`), for Granite Speech also peft and torchaudio, and for Phi-4-multimodal peft and
torchvision. A card is the proof that the checkpoint was run; without one it was not.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch
import transformers
import trio

import triolet
from triolet.bench.inputs import pieces_of, word_error_rate
from triolet.core.speech import Ask
from triolet.models.checkpoints.files import local_folder, read_config

RATE = 16_000
ADAPTER = "speech-lora"  # the folder of Phi-4-multimodal's adapter
ALIKE = {"temperature": 0.0, "beam_size": 1, "timestamps": "none", "voice_activity": "off"}  # as transformers reads


def origin_of(folder: Path) -> str:
    """Returns the commit of a checkpoint in the hub's cache, and for any folder the beginning of a hash of its
    weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    commit = f"commit {folder.name}, " if folder.parent.name == "snapshots" else ""
    return f"{commit}weights {digest.hexdigest()[:16]} (SHA-256)"


def reader(folder: Path, language: str | None, speech: Any) -> Callable[[Any], str]:
    """Returns transformers' own way from samples at 16 kHz to text, greedy, in float32 on the CPU."""
    config = read_config(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    manner, requests = getattr(speech, "manner", None), hasattr(processor, "apply_transcription_request")
    if manner is None and not requests:
        pipe: Any = transformers.pipeline("automatic-speech-recognition", model=str(folder), dtype=torch.float32)
        spoken = {"language": language, "task": "transcribe"} if language and config["model_type"] == "whisper" else {}
        asked = {"generate_kwargs": {"num_beams": 1, **spoken}} if pipe.type != "ctc" else {}
        return lambda samples: str(pipe({"raw": samples, "sampling_rate": RATE}, **asked)["text"])
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder, dtype=torch.float32).eval()
    named = {"language": language} if language else {}
    if (folder / ADAPTER).is_dir():
        model.load_adapter(str(folder), adapter_name="speech", adapter_kwargs={"subfolder": ADAPTER})

    def read(samples: Any) -> str:
        if requests:
            inputs = processor.apply_transcription_request(samples, return_tensors="pt", **named)
        elif config["model_type"] == "kyutai_speech_to_text":  # its prompt is one token that it adds itself
            inputs = processor(audio=soxr.resample(samples, RATE, speech.model.sampling_rate), return_tensors="pt")
        else:
            prompt = manner.prompt_for(speech.model.preparer, Ask(language=language))
            inputs = processor(text=prompt, audio=samples, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=448)
        prompts = [inputs[name] for name in ("input_ids", "decoder_input_ids") if name in inputs]
        begun = prompts[0].shape[1] if prompts else 1
        return str(processor.batch_decode(ids[:, begun:], skip_special_tokens=True)[0])

    return read


async def texts_of(model: str, clips: dict[str, Any], dtype: str, language: str | None) -> tuple[dict[str, Any], Any]:
    """Returns the texts of the clips, read one by one, with the seconds that each took, and the engine's model."""
    spoken = {"language": language} if language else {}
    async with triolet.Engine(model, config=triolet.EngineConfig(dtype=dtype)) as engine:
        found: dict[str, Any] = {}
        for name, samples in clips.items():
            begun = time.perf_counter()
            plain = await engine.transcribe((samples, RATE), **spoken)
            seconds = time.perf_counter() - begun
            alike = await engine.transcribe((samples, RATE), **ALIKE, **spoken)
            found[name] = (plain.text, seconds, alike.text)
        return found, engine.model


def main() -> None:
    """Runs the checkpoint and writes the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder or hub id of a checkpoint")
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--out", type=Path, help="the card; without it the card is printed")
    parser.add_argument("--language", help="for models that must be given one")
    parser.add_argument("--dtype", default="float32", help="of the engine; transformers computes in float32")
    parser.add_argument("--name", help="the name of the checkpoint, if it lies in a folder")
    given = parser.parse_args()
    from transformers.utils.hub import cached_file

    folder = local_folder(given.model) or Path(str(cached_file(given.model, "config.json"))).parent
    paths = sorted(path for path in given.recordings.iterdir() if path.suffix in (".wav", ".flac"))
    clips = {path.name: np.concatenate([one.samples for one in pieces_of(path, 30.0)]) for path in paths}
    if not clips:
        parser.error(f"{given.recordings} has no .wav or .flac files; give a folder of short recordings")
    told = {path.name: path.with_suffix(".txt") for path in paths}
    known = {name: path.read_text(encoding="utf-8") if path.exists() else None for name, path in told.items()}
    found, model = trio.run(texts_of, given.model, clips, given.dtype, given.language)
    theirs = reader(folder, given.language, model.speech)
    reference = {name: theirs(samples) for name, samples in clips.items()}
    seconds = sum(map(len, clips.values())) / RATE
    name = given.name or given.model
    versions = {"triolet": triolet, "transformers": transformers, "torch": torch}
    rows = {
        "checkpoint": f"{name}, {origin_of(folder)}",
        "class": f"{model.architecture}, {model.dtype}, {'native library' if model.native else 'torch'}",
        "run on": f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {model.device}",
        "versions": ", ".join(f"{what} {module.__version__}" for what, module in versions.items()),
        "recordings": f"{len(clips)}, {seconds:.0f} s",
        "word error rate": shown(word_error_rate(known, {name: one[0] for name, one in found.items()})),
        "word error rate of transformers": shown(word_error_rate(known, reference)),
        "words that differ from transformers': tolerance 0 in float32": shown(
            word_error_rate(dict(reference), {name: one[2] for name, one in found.items()})
        ),
        "real-time factor, one clip at a time": f"{sum(one[1] for one in found.values()) / seconds:.3f}",
    }
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items())
    card = f"# {name}\n\n| | |\n|---|---|\n{table}\n"
    if given.out is None:
        print(card)
    else:
        given.out.write_text(card, encoding="utf-8")


def shown(rate: float | None) -> str:
    """Returns a word error rate as text."""
    return "no text is known" if rate is None else f"{rate:.2f} %"


if __name__ == "__main__":
    main()

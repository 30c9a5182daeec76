"""The reference of a card: what transformers' own classes compute with a checkpoint, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import soxr
import torch
import transformers
from torch import Tensor

from ..core.speech import Ask
from ..models.checkpoints.files import read_config
from ..models.checkpoints.gguf_folder import NOTE
from ..models.checkpoints.loading import load_module
from ..models.checkpoints.quantized import READ
from . import quality
from .inputs import RATE

_THEIRS: Any = transformers  # of which many functions have no types
_ADAPTER = "speech-lora"  # the folder of Phi-4-multimodal's adapter


def reader(folder: Path, language: str | None, speech: Any) -> Callable[[Any], str]:
    """Returns transformers' own way from samples at 16 kHz to text, without sampling and beams. Granite Speech needs
    the packages peft and torchaudio, Phi-4-multimodal peft and torchvision."""
    config = read_config(folder)
    processor = _THEIRS.AutoProcessor.from_pretrained(folder)
    manner: Any = getattr(speech, "manner", None)
    requests = hasattr(processor, "apply_transcription_request")
    if manner is None and not requests:
        pipe: Any = _THEIRS.pipeline("automatic-speech-recognition", model=str(folder), dtype=torch.float32)
        spoken = {"language": language, "task": "transcribe"} if language and config["model_type"] == "whisper" else {}
        asked = {"generate_kwargs": {"num_beams": 1, **spoken}} if pipe.type != "ctc" else {}
        return lambda samples: str(pipe({"raw": samples, "sampling_rate": RATE}, **asked)["text"])
    model = getattr(_THEIRS, config["architectures"][0]).from_pretrained(folder, dtype=torch.float32).eval()
    named = {"language": language} if language else {}
    if (folder / _ADAPTER).is_dir():
        model.load_adapter(str(folder), adapter_name="speech", adapter_kwargs={"subfolder": _ADAPTER})

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


def distributions(folder: Path) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    """Returns a function that yields the log-probabilities after tokens, float64 [rows, vocabulary], some rows at a
    time."""
    model = _model(folder, _THEIRS.AutoModelForCausalLM)

    def read(ids: Sequence[int]) -> Iterator[Tensor]:
        before = None
        for start in range(0, len(ids), quality.ROWS):
            with torch.inference_mode():
                found = model(torch.tensor([ids[start : start + quality.ROWS]]), past_key_values=before, use_cache=True)
            before = found.past_key_values
            yield found.logits[0].double().log_softmax(-1)

    return read


def vectors(folder: Path, texts: Sequence[str], pooling: Any) -> list[list[float]]:
    """Returns vectors of length 1, each of the mean, the first or the last of a text's rows."""
    tokenizer = _THEIRS.AutoTokenizer.from_pretrained(folder)
    model = _model(folder, _THEIRS.AutoModel)
    pooled = {"mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "last": lambda rows: rows[-1]}
    found = []
    for text in texts:
        with torch.inference_mode():
            rows = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(pooled[pooling.kind](rows), dim=0).tolist())
    return found


def _model(folder: Path, loader: Any) -> Any:
    """The model of ``loader``, a class of transformers. Of a GGUF file, and of a quantized checkpoint that transformers
    reads with other packages, its class gets the decoded weights."""
    config = read_config(folder)
    if (folder / NOTE).is_file() or (config.get("quantization_config") or {}).get("quant_method") in READ:
        return load_module(config["architectures"][0], folder, torch.float32, spare="pooler")
    return loader.from_pretrained(folder, dtype=torch.float32).eval()

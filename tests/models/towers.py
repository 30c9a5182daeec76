"""The speech models whose processors need further packages, as transformers computes them: features by its
`audio_utils`, in numpy, and embeddings by the model's own encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoFeatureExtractor, Phi4MultimodalForCausalLM
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

TOWERS = {  # one item, as a user writes it
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
    "granite_speech": "<|audio|>",
    "granite_speech_plus": "<|audio|>",
    "fun_asr_nano": "<|object_ref_start|>",
    "phi4_multimodal": "<|audio|>",
}


def reference_of(name: str, folder: Path, module: Any) -> Any:
    """What generates as transformers does: the family's own module, or for Phi-4-multimodal transformers' with the
    adapter beside its weights."""
    if name != "phi4_multimodal":
        return module
    made: Any = Phi4MultimodalForCausalLM.from_pretrained(folder).eval()
    return beside(made, folder / "speech-lora", 0.5)


def beside(module: Any, folder: Path, scale: float) -> Any:
    """Returns ``module`` with the adapter in ``folder`` beside the weights of its layers, as peft has it."""
    matrices = load_file(folder / "adapter_model.safetensors")
    for name in sorted({one.partition(".lora_")[0] for one in matrices}):
        down, up = (matrices[f"{name}.lora_{side}.weight"] for side in "AB")

        def add(_: Any, given: Any, made: Any, down: Any = down, up: Any = up) -> Any:
            return made + given[0] @ down.T @ up.T * scale

        module.get_submodule(name.removeprefix("base_model.model.")).register_forward_hook(add)
    return module


def processed(folder: Path, module: Any, tokenizer: Any, prompt: str, items: list[Any]) -> dict[str, Any]:
    """The inputs of the language model: each item's features are encoded alone."""
    if module.config.model_type == "phi4_multimodal":
        return processed_by_phi4(folder, module, tokenizer, prompt, items)
    kind, token = module.config.model_type, module.config.audio_token_id
    rows = [module.get_audio_features(**features(kind, folder, item)).pooler_output.flatten(0, -2) for item in items]
    first, *rest = prompt.split(tokenizer.convert_ids_to_tokens(token))
    written = tokenizer.convert_ids_to_tokens(token)
    text = first + "".join(written * len(one) + after for one, after in zip(rows, rest, strict=True))
    inputs = dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    embeddings = module.get_input_embeddings()(inputs["input_ids"])
    embeddings[inputs["input_ids"] == token] = torch.cat(rows)
    return {**inputs, "inputs_embeds": embeddings}


def processed_by_phi4(folder: Path, module: Any, tokenizer: Any, prompt: str, items: list[Any]) -> dict[str, Any]:
    """The inputs of Phi-4-multimodal as its processor makes them, which needs torchvision. Two items are encoded one by
    one, since its encoder reads the padding of the shorter one."""
    extractor: Any = AutoFeatureExtractor.from_pretrained(folder)
    made = [extractor(item, sampling_rate=16_000, return_tensors="pt") for item in items]
    sizes = [int(one["audio_embed_sizes"]) for one in made]
    first, *rest = prompt.split("<|audio|>")
    text = first + "".join("<|audio|>" * size + after for size, after in zip(sizes, rest, strict=True))
    inputs = dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    if len(made) == 1:
        return {**inputs, **made[0]}
    tokens, embeddings = inputs["input_ids"], module.get_input_embeddings()(inputs["input_ids"])
    places = (tokens[0] == module.config.audio_config.audio_token_id).nonzero()[:, 0].split(sizes)
    for one, own in zip(made, places, strict=True):
        others = torch.zeros_like(tokens)
        others[0, own] = tokens[0, own]
        embeddings = module.model.embed_tokens_extend(others, embeddings, **one)
    return {**inputs, "inputs_embeds": embeddings}


def features(kind: str, folder: Path, item: Any) -> dict[str, torch.Tensor]:
    """The inputs of the encoder."""
    if kind == "voxtral":
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        padded = np.pad(item, (0, -len(item) % extractor.n_samples))
        made = extractor(padded, sampling_rate=16_000, truncation=False, return_tensors="pt")["input_features"][0]
        return {"input_features": torch.stack(made.split(extractor.nb_max_frames, -1))}
    if kind == "phi4_multimodal":
        return {"input_features": preemphasized(item)}
    if kind == "fun_asr_nano":
        made = stacked(item)
        return {"input_features": made, "input_features_mask": torch.ones(made.shape[:2], dtype=torch.long)}
    return {"input_features": paired(item)}


def paired(item: Any) -> torch.Tensor:
    """The features of Granite Speech [1, rows, 160]."""
    window = np.pad(window_function(400, "hann"), 56)
    bank = mel_filter_bank(257, 80, 0, 8000, 16_000)
    mel = spectrogram(item, window, 512, 160, power=2.0, mel_filters=bank, mel_floor=1e-10, log_mel="log10").T
    mel = np.maximum(mel, mel.max() - 8) / 4 + 1
    return torch.from_numpy(mel[: len(mel) // 2 * 2].reshape(1, -1, 160)).float()


def preemphasized(item: Any) -> torch.Tensor:
    """The features of Phi-4-multimodal with 16 bands [1, rows, 16]."""
    bank = mel_filter_bank(257, 16, 0, 7690, 16_000, mel_scale="kaldi", triangularize_in_mel_space=True)
    window = window_function(400, "hamming", periodic=False)
    settings = {"fft_length": 512, "power": 2.0, "center": False, "preemphasis": 0.97}
    item = item.astype(np.float64) * 32_768
    mel = spectrogram(item, window, 400, 160, mel_filters=bank, mel_floor=1.0, log_mel="log", **settings)
    return torch.from_numpy(mel.T[None]).float()


def stacked(item: Any) -> torch.Tensor:
    """The features of Fun-ASR with 16 bands [1, rows, 112]."""
    bank = mel_filter_bank(257, 16, 20, 8000, 16_000, mel_scale="kaldi", triangularize_in_mel_space=True)
    window = window_function(400, "hamming", periodic=False)
    settings = {"fft_length": 512, "power": 2.0, "center": False, "preemphasis": 0.97, "remove_dc_offset": True}
    floor = torch.finfo(torch.float32).eps
    mel = spectrogram(item, window, 400, 160, mel_filters=bank, mel_floor=floor, log_mel="log", **settings).T
    repeated = np.concatenate([mel[:1]] * 3 + [mel] + [mel[-1:]] * 9)
    rows = [repeated[start : start + 7].ravel() for start in range(0, len(mel), 6)]
    return torch.tensor(np.array([rows])).float()


CHAT = "<|im_start|>user\n<|object_ref_start|>{}<|im_end|>\n<|im_start|>assistant\n"
PHI = "<|im_start|>user\n<|audio|>{}<|im_end|>\n<|im_start|>assistant\n"
REQUESTS: dict[str, list[tuple[dict[str, Any], str]]] = {  # what is asked, and the prompt without a first <s>
    "voxtral": [
        ({}, "[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]"),
        ({"language": "fr"}, "[INST][BEGIN_AUDIO][AUDIO][/INST]lang:fr[TRANSCRIBE]"),
    ],
    "granite_speech": [
        ({}, "<|user|><|audio|>can you transcribe the speech into a written format?</s><|assistant|>"),
        ({"task": "translate"}, "<|user|><|audio|>translate the speech to English</s><|assistant|>"),
        (
            {"hotwords": "Anna, Otto"},
            "<|user|><|audio|>can you transcribe the speech into a written format? Keywords: Anna, Otto</s>"
            "<|assistant|>",
        ),
    ],
    "granite_speech_plus": [
        ({}, "<|user|><|audio|> can you transcribe the speech into a written format?</s><|assistant|>"),
    ],
    "phi4_multimodal": [
        ({}, PHI.format("Transcribe the audio clip into text.")),
        ({"task": "translate"}, PHI.format("Translate the audio to English.")),
    ],
    "fun_asr_nano": [
        ({}, CHAT.format("")),
        (
            {"language": "en", "hotwords": "Anna, Otto", "prompt": "a talk"},
            CHAT.format("a talkHotwords: Anna, Otto[英文]"),
        ),
    ],
}

"""Writes a Whisper in transformers' layout as a folder of CTranslate2, as its converter does (ctranslate2 4.8,
``converters/transformers.py`` and ``specs/model_spec.py``)."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

KINDS = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4, torch.bfloat16: 5}
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def convert(folder: Path, target: Path, quantization: str = "float16", *, vocabulary: str = "") -> Path:
    """Writes ``target``.

    Args:
        quantization: as CTranslate2 names it, such as ``"int8_float16"``.
        vocabulary: the file that is written in place of tokenizer.json; empty: tokenizer.json is copied.
    """
    target.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text())
    told = json.loads((folder / "generation_config.json").read_text())
    weights = {name.removeprefix("model."): one for name, one in load_file(folder / "model.safetensors").items()}
    variables = {
        name: stored for each in _plain(weights, config).items() for name, stored in _stored(*each, quantization)
    }
    tied = {} if "proj_out.weight" in weights else {"decoder/projection/weight": "decoder/embeddings/weight"}
    (target / "model.bin").write_bytes(packed(variables, tied))
    made = {
        "alignment_heads": told.get("alignment_heads"),
        "lang_ids": sorted(told.get("lang_to_id", {}).values()),
        "suppress_ids": told.get("suppress_tokens"),
        "suppress_ids_begin": told.get("begin_suppress_tokens"),
    }
    (target / "config.json").write_text(json.dumps(made, indent=2, sort_keys=True))
    shutil.copy(folder / "preprocessor_config.json", target)
    if not vocabulary:
        shutil.copy(folder / "tokenizer.json", target)
        return target
    known = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    tokens = sorted(known, key=known.get)
    tokens += [f"<|{index * 0.02:.2f}|>" for index in range(config["vocab_size"] - len(tokens))]
    lines = json.dumps(tokens) if vocabulary.endswith("json") else "".join(f"{token}\n" for token in tokens)
    (target / vocabulary).write_text(lines)
    return target


def packed(variables: dict, tied: dict, *, spec: str = "WhisperSpec", version: int = 6) -> bytes:
    """The bytes of ``model.bin`` for tensors by name."""

    def text(value):
        return struct.pack("<H", len(value.encode()) + 1) + value.encode() + b"\0"

    found = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(variables))]
    for name, one in sorted(variables.items()):
        values = one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found += [text(name), struct.pack(f"<B{one.dim()}I", one.dim(), *one.shape)]
        found += [struct.pack("<BI", KINDS[one.dtype], len(values)), values]
    found += [struct.pack("<I", len(tied)), *(text(part) for pair in tied.items() for part in pair)]
    return b"".join(found)


def dequantized(folder: Path, target: Path, quantization: str) -> Path:
    """Copies a checkpoint in transformers' layout, with the numbers that `convert` stores."""
    shutil.copytree(folder, target)
    weights, found = load_file(folder / "model.safetensors"), {}
    for name, one in weights.items():
        leaf = "weight" if one.dim() > 1 and "positions" not in name else "bias"  # what is quantized, and what is not
        beside = _beside(name)
        stored = dict(_stored(f"x/{leaf}", torch.cat([weights[other] for other in beside]), quantization))
        value, scale = stored[f"x/{leaf}"].float(), stored.get("x/weight_scale", torch.ones(()))
        rows = (value.flatten(1) / scale[:, None]).view(value.shape) if scale.dim() else value / scale
        found[name] = rows.chunk(len(beside))[beside.index(name)].contiguous()
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _beside(name: str) -> list[str]:
    """The matrices that are quantized as one, with the one of the name."""
    match = re.fullmatch(r"(.*)\.([qkv])_proj\.weight", name)
    if match is None or (match[1].endswith("encoder_attn") and match[2] == "q"):
        return [name]
    return [f"{match[1]}.{one}_proj.weight" for one in ("kv" if match[1].endswith("encoder_attn") else "qkv")]


def _plain(weights: dict, config: dict) -> dict:
    """The variables before they are quantized."""

    def linear(*names):
        rows = [weights[f"{name}.weight"] for name in names]
        biases = [weights.get(f"{name}.bias", torch.zeros(len(one))) for name, one in zip(names, rows, strict=True)]
        return {"weight": torch.cat(rows), "bias": torch.cat([bias.to(rows[0].dtype) for bias in biases])}

    def norm(name):
        return {"gamma": weights[f"{name}.weight"], "beta": weights[f"{name}.bias"]}

    parts = {f"encoder/conv{index}": linear(f"encoder.conv{index}") for index in (1, 2)}
    parts["decoder/embeddings"] = {"weight": weights["decoder.embed_tokens.weight"]}
    if "proj_out.weight" in weights:
        parts["decoder/projection"] = {"weight": weights["proj_out.weight"]}
    small = {"decoder/activation": 3, "decoder/pre_norm": 1, "decoder/alibi": 0, "decoder/scale_embeddings": 0}
    numbers = {name: torch.tensor(value, dtype=torch.int8) for name, value in small.items()}
    for side in ("encoder", "decoder"):
        numbers[f"{side}/num_heads"] = torch.tensor(config[f"{side}_attention_heads"], dtype=torch.int16)
        parts[f"{side}/position_encodings"] = {"encodings": weights[f"{side}.embed_positions.weight"]}
        parts[f"{side}/layer_norm"] = norm(f"{side}.layer_norm")
        for index in range(config[f"{side}_layers"]):
            theirs, ours = f"{side}/layer_{index}", f"{side}.layers.{index}"
            own = f"{ours}.self_attn"
            parts[f"{theirs}/self_attention/linear_0"] = linear(*(f"{own}.{one}_proj" for one in "qkv"))
            parts[f"{theirs}/self_attention/linear_1"] = linear(f"{own}.out_proj")
            parts[f"{theirs}/self_attention/layer_norm"] = norm(f"{own}_layer_norm")
            parts |= {f"{theirs}/ffn/linear_{one}": linear(f"{ours}.fc{one + 1}") for one in (0, 1)}
            parts[f"{theirs}/ffn/layer_norm"] = norm(f"{ours}.final_layer_norm")
            if side == "decoder":
                cross = f"{ours}.encoder_attn"
                parts[f"{theirs}/attention/linear_0"] = linear(f"{cross}.q_proj")
                parts[f"{theirs}/attention/linear_1"] = linear(*(f"{cross}.{one}_proj" for one in "kv"))
                parts[f"{theirs}/attention/linear_2"] = linear(f"{cross}.out_proj")
                parts[f"{theirs}/attention/layer_norm"] = norm(f"{cross}_layer_norm")
    return numbers | {f"{path}/{leaf}": one for path, leaves in parts.items() for leaf, one in leaves.items()}


def _stored(name: str, one: torch.Tensor, quantization: str):
    """Yields what stands in the file for a variable, as `ctranslate2.specs.LayerSpec.optimize` makes it."""
    if not one.dim():
        yield name, one
        return
    kind, _, rest = quantization.partition("_")
    if not name.endswith("/weight") or kind in FLOATS:
        yield name, one.to(FLOATS[kind if kind in FLOATS else rest or "float32"])
        return
    value = one.float().numpy()
    if kind == "int16":
        scale = np.float32(2**10 / np.abs(value).max())
        yield name, torch.from_numpy(np.rint(value * scale).astype(np.int16))
    else:
        flat = value.reshape(len(value), -1)
        largest = np.abs(flat).max(1)
        largest[largest == 0] = 127.0
        scale = 127.0 / largest
        yield name, torch.from_numpy(np.rint(flat * scale[:, None]).astype(np.int8).reshape(value.shape))
    yield f"{name}_scale", torch.from_numpy(np.asarray(scale))

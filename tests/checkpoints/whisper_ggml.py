"""A Whisper as whisper.cpp has it, written as its ``models/convert-h5-to-ggml.py`` documents the format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

_NAMES = {
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
    "embed_positions.weight": "positional_embedding",
    "embed_tokens": "token_embedding",
    ".layers.": ".blocks.",
}


def ggml_name(own: str) -> str:
    """openai/whisper's name of a weight."""
    name = own.removeprefix("model.")
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_ggml(path: Path, model: Any, tokens: Sequence[bytes], kind: str = "F16") -> Path:
    """Writes ``model``, with matrices in blocks of ``kind`` as whisper.cpp's ``quantize`` makes them. Its weights
    become those that the file has."""
    config = model.config
    sizes = [config.vocab_size, config.max_source_positions, config.d_model, config.encoder_attention_heads]
    sizes += [config.encoder_layers, config.max_target_positions, config.d_model, config.decoder_attention_heads]
    sizes += [config.decoder_layers, config.num_mel_bins, 2000 + int(Kind[kind])]
    made = [b"lmgg", struct.pack("11i", *sizes), struct.pack("2i", config.num_mel_bins, 201)]
    made.append(np.zeros((config.num_mel_bins, 201), np.float32).tobytes())
    made.append(struct.pack("i", len(tokens)))
    made += [struct.pack("i", len(one)) + one for one in tokens]
    for own, weight in model.state_dict().items():
        if own == "proj_out.weight":
            continue
        name, data = ggml_name(own).encode(), weight.squeeze().numpy()
        data = data[:, None] if name.endswith((b"conv1.bias", b"conv2.bias")) else data
        plain = data.ndim < 2 or data.shape[-1] == 1 or name.endswith(b"positional_embedding")
        own_kind = Kind.F32 if plain else Kind.F16 if data.ndim > 2 else Kind[kind]
        stored = gguf.quants.quantize(data.astype(np.float32), own_kind)
        weight.copy_(weight.new_tensor(gguf.quants.dequantize(stored, own_kind)).view(weight.shape))
        made.append(struct.pack("3i", data.ndim, len(name), int(own_kind)))
        made.append(struct.pack(f"{data.ndim}i", *data.shape[::-1]) + name + stored.tobytes())
    Path(path).write_bytes(b"".join(made))
    return Path(path)

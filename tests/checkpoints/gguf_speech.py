"""Models of speech as transcribe.cpp has them, written as the comments at the head of its ``scripts/convert-*.py``, and
its ``docs/tools/quantization.md``, document the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Kind

_WHISPER = {
    "encoder.layer_norm": "enc.final_norm",
    "decoder.layer_norm": "dec.final_norm",
    "encoder.embed_positions": "enc.pos_emb",
    "decoder.embed_positions": "dec.pos_emb",
    "encoder.conv1": "enc.conv.0",
    "encoder.conv2": "enc.conv.1",
    "encoder_attn_layer_norm": "norm_cross",
    "final_layer_norm": "norm_ffn",
    "fc1": "ffn.fc1",
    "fc2": "ffn.fc2",
}
_MOONSHINE = {
    "encoder.layer_norm": "enc.final_norm",
    "encoder.final_norm": "enc.final_norm",
    "decoder.norm": "dec.final_norm",
    "encoder.groupnorm": "enc.conv.norm",
    "encoder.conv1": "enc.conv.0",
    "encoder.conv2": "enc.conv.1",
    "encoder.conv3": "enc.conv.2",
    "decoder.pos_emb": "adapter.pos_emb",
    "decoder.proj": "adapter.proj",
    "proj_out": "dec.lm_head",
    "final_layernorm": "norm_ffn",
    "mlp.": "ffn.",
    ".gamma": ".weight",
}
_SIDES = {
    "encoder": {
        "self_attn_layer_norm": "norm_attn",
        "input_layernorm": "norm_attn",
        "post_attention_layernorm": "norm_ffn",
        "self_attn": "attn",
    },
    "decoder": {
        "self_attn_layer_norm": "norm_self",
        "input_layernorm": "norm_self",
        "post_attention_layernorm": "norm_cross",
        "encoder_attn": "cross_attn",
        "embed_tokens": "token_embd",
    },
}
_BOTH = {"encoder.": "enc.", "decoder.": "dec.", ".layers.": ".blocks.", "out_proj.": "out.", "o_proj.": "out."}
_BOTH |= {f"{one}_proj.": f"{one}." for one in "qkv"}


def speech_name(own: str, architecture: str) -> str:
    """transcribe.cpp's name of a weight."""
    name = own.removeprefix("model.")
    for names in (_WHISPER if architecture == "whisper" else _MOONSHINE, _SIDES.get(name.split(".")[0], {}), _BOTH):
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
    return name


def add_words(writer: Any, folder: Path, count: int, architecture: str) -> None:
    """Adds the vocabulary of tokenizer.json, which a Whisper may have only in part."""
    read = json.loads((folder / "tokenizer.json").read_text())
    places = {place: text for text, place in read["model"]["vocab"].items()}
    added = {one["id"]: one for one in read["added_tokens"]}
    places |= {place: one["content"] for place, one in added.items()}
    texts = [places.get(place, f"<|unused_{place}|>") for place in range(count)]
    plain = {place for place in range(count) if not added.get(place, {"special": False})["special"]}
    types = [1 if place in plain else 3 for place in range(count)]
    whisper = architecture == "whisper"
    if not whisper:
        types = [
            2 if text == "<unk>" else 6 if text[:3] == "<0x" else one for text, one in zip(texts, types, strict=True)
        ]
        writer.add_bool("tokenizer.ggml.byte_fallback", True)
        writer.add_unk_token_id(texts.index("<unk>"))
    writer.add_tokenizer_model("gpt2" if whisper else "bpe")
    writer.add_tokenizer_pre("gpt2" if whisper else "default")
    writer.add_add_bos_token(not whisper)
    for name, text in zip(
        ("bos", "eos", "padding"), ["<|endoftext|>"] * 3 if whisper else ["<s>", "</s>", "</s>"], strict=True
    ):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", texts.index(text))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if merges := [" ".join(pair) for pair in read["model"]["merges"]]:
        writer.add_token_merges(merges)


def add_whisper(add: Any, config: Any, generation: dict[str, Any], preprocessor: dict[str, Any]) -> None:
    for side in ("encoder", "decoder"):
        add(f"whisper.{side}.d_model", config.d_model)
        for theirs, own in {"n_layers": "layers", "n_heads": "attention_heads", "ffn_dim": "ffn_dim"}.items():
            add(f"whisper.{side}.{theirs}", getattr(config, f"{side}_{own}"))
        add(f"whisper.{side}.activation", config.activation_function)
    for name in ("num_mel_bins", "max_source_positions"):
        add(f"whisper.encoder.{name}", getattr(config, name))
    for name in ("max_target_positions", "vocab_size"):
        add(f"whisper.decoder.{name}", getattr(config, name))
    add("whisper.decoder.tie_word_embeddings", True)
    add("whisper.decoder.scale_embedding", config.scale_embedding)
    for name in ("decoder_start_token_id", "no_timestamps_token_id", "suppress_tokens", "begin_suppress_tokens"):
        add(f"whisper.{name}", generation[name])
    front = {"sample_rate": preprocessor["sampling_rate"], "num_mels": preprocessor["feature_size"], "type": "mel"}
    front |= {name: preprocessor[name] for name in ("n_fft", "hop_length", "chunk_length", "n_samples")}
    for name, value in (front | {"normalize": "whisper_logmel", "mel_norm": "slaney"}).items():
        add(f"frontend.{name}", value)


def add_moonshine(add: Any, config: Any, generation: dict[str, Any], preprocessor: dict[str, Any]) -> None:
    prefix, streams = config.model_type, hasattr(config, "encoder_config")
    parts = {"n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads"}
    for side in ("encoder", "decoder"):
        own, before = (config, f"{side}_") if not streams else (getattr(config, f"{side}_config", config), "")
        for theirs, ours in parts.items():
            add(f"{prefix}.{side}.{theirs}", getattr(own, before + ours))
        add(f"{prefix}.{side}.d_model", own.hidden_size)
        add(f"{prefix}.{side}.ffn_dim", own.intermediate_size)
        add(f"{prefix}.{side}.activation", getattr(own, f"{before}hidden_act"))
        if streams:
            add(f"{prefix}.{side}.head_dim", own.head_dim)
    if streams:
        add(f"{prefix}.encoder.frame_ms", float(config.encoder_config.frame_ms))
        edges = [edge for pair in config.encoder_config.sliding_windows for edge in pair]
        add(f"{prefix}.encoder.sliding_windows", edges)
    for name in ("vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        add(f"{prefix}.decoder.{name}", getattr(config, name))
    for name in ("partial_rotary_factor", "rope_theta"):
        add(f"{prefix}.{name}", float(config.rope_parameters[name]))
    if streams:
        add(f"{prefix}.encoder_hidden_size", config.encoder_config.hidden_size)
    add(f"{prefix}.attention_bias", config.attention_bias)
    add(f"{prefix}.pad_head_dim_to_multiple_of", config.pad_head_dim_to_multiple_of or 0)
    for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
        add(f"{prefix}.{name}", generation[name])
    for name, value in {"type": "raw", "sample_rate": preprocessor["sampling_rate"], "num_mels": 1}.items():
        add(f"frontend.{name}", value)


def write_speech(path: Path, folder: Path, model: Any, kind: str = "F32") -> Path:
    """Writes ``model`` with the settings and the tokenizer of the checkpoint in ``folder``, and matrices in blocks of
    ``kind``. Its weights become those that the file has."""
    config, writer = model.config, gguf.GGUFWriter(path, model.config.model_type)
    generation, preprocessor = (
        json.loads((folder / f"{name}_config.json").read_text()) for name in ("generation", "preprocessor")
    )

    def add(name: str, value: Any) -> None:
        by = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        by.get(type(value), writer.add_array)(f"stt.{name}", value)

    writer.add_string("stt.variant", path.stem)
    (add_whisper if config.model_type == "whisper" else add_moonshine)(add, config, generation, preprocessor)
    add_words(writer, folder, config.vocab_size, config.model_type)
    if config.model_type == "whisper":
        writer.add_tensor("frontend.window", model.state_dict()["model.decoder.layer_norm.bias"].numpy())
    for own, weight in model.state_dict().items():
        if own == "proj_out.weight" and config.tie_word_embeddings:
            continue
        name, data = speech_name(own, config.model_type), weight.reshape(weight.shape or (1,)).numpy()
        data = data + 1 if own.endswith(".gamma") else data
        plain = data.ndim < 2 or "pos_emb" in name or name.startswith("enc.embedder.conv")
        own_kind = Kind.F32 if plain else Kind.F16 if data.ndim > 2 and kind != "F32" else Kind[kind]
        if data.shape[-1] % gguf.GGML_QUANT_SIZES[own_kind][0]:
            own_kind = Kind.F16
        stored = gguf.quants.quantize(data, own_kind)
        decoded = gguf.quants.dequantize(stored, own_kind) - (1 if own.endswith(".gamma") else 0)
        weight.copy_(weight.new_tensor(decoded).view(weight.shape))
        writer.add_tensor(name, stored, raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

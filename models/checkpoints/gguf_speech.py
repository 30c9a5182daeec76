"""Tells in a table what transcribe.cpp's converters make of models of speech.

Their settings have names that begin with ``stt.``. Names are told as ``theirs=own``: those of the parts of a
tensor's name, where they differ with ``enc.`` or ``dec.`` in front, and those of settings.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from ...core.errors import UnsupportedModel
from .gguf_architectures import Architecture
from .gguf_file import GgufFile
from .gguf_names import pairs
from .gguf_settings import Told
from .gguf_tokenizer import make_tokenizer
from .whisper_ggml import whisper_tokenizer

_BLOCK = re.compile(r"(enc|dec)\.blocks\.(\d+)\..+")
_PART = re.compile(r"conv\.(?:\d|norm)|\w+")
_PARTS = pairs(
    "enc=model.encoder dec=model.decoder blocks=layers attn=self_attn self_attn=self_attn cross_attn=encoder_attn "
    "q=q_proj k=k_proj v=v_proj fc1=fc1 fc2=fc2 conv.0=conv1 conv.1=conv2 token_embd=embed_tokens weight=weight "
    "bias=bias"
)
_WHISPER = _PARTS | pairs(
    "out=out_proj ffn= norm_attn=self_attn_layer_norm norm_self=self_attn_layer_norm norm_ffn=final_layer_norm "
    "norm_cross=encoder_attn_layer_norm pos_emb=embed_positions final_norm=layer_norm"
)
_MOONSHINE = _PARTS | pairs(
    "out=o_proj ffn=mlp norm_attn=input_layernorm norm_self=input_layernorm norm_cross=post_attention_layernorm "
    "enc.norm_ffn=post_attention_layernorm dec.norm_ffn=final_layernorm conv.2=conv3 conv.norm=groupnorm "
    "enc.final_norm=layer_norm dec.final_norm=norm"
)
_STREAMING = _MOONSHINE | pairs(  # "gamma" stands for the end of a name, too
    "norm_attn=input_layernorm.gamma enc.norm_ffn=post_attention_layernorm.gamma enc.final_norm=final_norm.gamma "
    "embedder=embedder comp=comp log_k=log_k linear=linear conv1=conv1 conv2=conv2 adapter=model.decoder "
    "pos_emb=pos_emb proj=proj dec.lm_head.weight=proj_out.weight"
)
_HEADS = (
    "n_layers=*num_hidden_layers n_heads=*num_attention_heads n_kv_heads=*num_key_value_heads activation=*hidden_act "
)
_DECODER = (
    "decoder.vocab_size=vocab_size decoder.max_position_embeddings=max_position_embeddings "
    "attention_bias=attention_bias decoder.tie_word_embeddings=tie_word_embeddings"
)
_SPECTRA = pairs(
    "num_mels=feature_size sample_rate=sampling_rate n_fft=n_fft hop_length=hop_length chunk_length=chunk_length"
)
_EXTRACTOR = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "do_normalize": False}
_WORDS = "dec.token_embd.weight"
_SHOWN = ("encoder.n_layers", "decoder.n_layers", "decoder.vocab_size", "decoder.d_model")  # by tensors, too
_MOST = 1 << 16  # more than any size of a model of speech
_TOKENS = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")


def _sizes(both: str, own: str, encoder: str = "encoder_", decoder: str = "decoder_") -> dict[str, str]:
    """Returns names of settings: those that ``both`` have, of which ``*`` is the beginning, and a side's ``own``. A dot
    says that one table of config.json lies in another."""
    sides = {"encoder": encoder, "decoder": decoder}.items()
    told = {f"{one}.{theirs}": name.replace("*", side) for one, side in sides for theirs, name in pairs(both).items()}
    return told | pairs(own)


def _whisper(told: Told) -> dict[str, Any]:
    front = Told(told.file, "stt.frontend")
    front.only("normalize", "whisper_logmel")
    tokens, words = ("decoder_start_token_id", "no_timestamps_token_id"), Told(told.file, "tokenizer.ggml")
    generation: dict[str, Any] = {name: told.whole(name) for name in tokens}
    generation |= {name: told.each(name) for name in ("suppress_tokens", "begin_suppress_tokens")}
    generation |= {"max_initial_timestamp_index": 50}  # as in every Whisper
    return {
        "generation_config": generation | {"eos_token_id": words.whole("eos_token_id")},
        "preprocessor_config": {own: front.whole(theirs) for theirs, own in _SPECTRA.items()},
        "tokenizer_config": {"tokenizer_class": "WhisperTokenizer"},
    }


def _moonshine(told: Told) -> dict[str, Any]:
    front = Told(told.file, "stt.frontend")
    front.only("type", "raw")
    tokens: dict[str, Any] = {name: told.whole(name, least=0) for name in _TOKENS}
    rope = {name: told.real(name) for name in ("rope_theta", "partial_rotary_factor")}
    config = tokens | {"rope_parameters": {"rope_type": "default", **rope}}
    config["pad_head_dim_to_multiple_of"] = told.whole("pad_head_dim_to_multiple_of", least=0) or None
    extractor = _EXTRACTOR | {"sampling_rate": front.whole("sample_rate")}
    return {"config": config, "generation_config": tokens, "preprocessor_config": extractor}


def _streaming(told: Told) -> dict[str, Any]:
    made, edges = _moonshine(told), told.each("encoder.sliding_windows")
    if len(edges) != 2 * told.whole("encoder.n_layers"):
        raise told.bad("encoder.sliding_windows", edges, "two numbers for each layer")
    encoder: dict[str, Any] = {"sliding_windows": [edges[at : at + 2] for at in range(0, len(edges), 2)]}
    encoder |= {"sample_rate": made["preprocessor_config"]["sampling_rate"], "frame_ms": told.real("encoder.frame_ms")}
    if encoder["sample_rate"] * encoder["frame_ms"] < 1000:
        raise told.bad("encoder.frame_ms", encoder["frame_ms"], "the time of a sample, or more")
    return made | {"config": made["config"] | {"encoder_config": encoder}}


SPEECH: Final = {  # `more` returns files by their names
    "whisper": Architecture(
        *("whisper", "WhisperForConditionalGeneration", _WHISPER),
        sizes=_sizes(
            "n_layers=*layers d_model=d_model n_heads=*attention_heads ffn_dim=*ffn_dim activation=activation_function",
            "encoder.num_mel_bins=num_mel_bins encoder.max_source_positions=max_source_positions "
            "decoder.max_target_positions=max_target_positions decoder.vocab_size=vocab_size",
        ),
        more=_whisper,
    ),
    "moonshine": Architecture(
        *("moonshine", "MoonshineForConditionalGeneration", _MOONSHINE),
        sizes=_sizes(f"{_HEADS} d_model=hidden_size ffn_dim=intermediate_size", _DECODER),
        more=_moonshine,
    ),
    "moonshine_streaming": Architecture(
        *("moonshine_streaming", "MoonshineStreamingForConditionalGeneration", _STREAMING),
        sizes=_sizes(
            f"{_HEADS} d_model=*hidden_size ffn_dim=*intermediate_size head_dim=*head_dim",
            f"{_DECODER} encoder_hidden_size=encoder_hidden_size",
            *("encoder_config.", ""),
        ),
        more=_streaming,
    ),
}


def speech_of(file: GgufFile) -> Architecture | None:
    """Returns what is known of the model of speech in a file of transcribe.cpp; ``None``: it is another file."""
    return SPEECH.get(str(file.settings.get("general.architecture"))) if "stt.variant" in file.settings else None


def speech_name(file: GgufFile, kind: Architecture, tensor: str) -> str | None:
    """Returns the name of a tensor in transformers' model. ``None``: it is a table that the feature extractor makes.

    Raises:
        UnsupportedModel: the model has no such tensor.
    """
    names, parts = kind.names, _PART.findall(tensor)
    if parts[:1] == ["frontend"]:
        return None
    found = [one if one.isdigit() else names.get(f"{parts[0]}.{one}", names.get(one)) for one in parts]
    found = [names[tensor]] if tensor in names else found
    if not found or None in found:
        raise UnsupportedModel(
            f"{file.path} has the tensor {tensor}, which {kind.loader} of transformers does not have; give the "
            "checkpoint that it was converted from"
        )
    own = ".".join(one for one in found if one)
    return own.removesuffix(".weight") if ".gamma" in own else own


def speech_texts(file: GgufFile, kind: Architecture) -> dict[str, str]:
    """Returns the files that the model has in transformers' layout, by name.

    Raises:
        CheckpointError: a setting or the vocabulary is missing or damaged.
        UnsupportedModel: a setting asks for more than is known of the architecture.
    """
    told = Told(file, f"stt.{kind.model_type}")
    layers = {found.groups() for one in file.tensors if (found := _BLOCK.fullmatch(one))}
    words = file.tensors.get(_WORDS)
    sizes = [sum(one == side for one, _ in layers) for side in ("enc", "dec")]
    sizes += (0, 0) if words is None else words.shape
    for theirs, size in zip(_SHOWN, sizes, strict=False):
        if told.get(theirs) != size:
            raise told.bad(theirs, told.get(theirs), f"{size}, as its tensors say")
    made = kind.more(told)
    config = {"model_type": kind.model_type, "architectures": [kind.loader], **made.get("config", {})}
    for theirs, own in kind.sizes.items():
        value = told.get(theirs)
        value = value if isinstance(value, bool | str) else told.whole(theirs)
        if not isinstance(value, str) and value > _MOST and theirs not in _SHOWN:
            raise told.bad(theirs, value, f"up to {_MOST}")
        table, _, leaf = own.rpartition(".")
        if (config[table] if table else config).setdefault(leaf, value) != value:
            raise told.bad(theirs, value, f"one for encoder and decoder, {own}")
    if kind.model_type == "whisper":
        tokenizer = whisper_tokenizer(file, file.listed("tokenizer.ggml.tokens"))
    else:
        tokenizer, made["tokenizer_config"], _ = make_tokenizer(file)
    files = {f"{one}.json": json.dumps(table) for one, table in (made | {"config": config}).items()}
    return files | {"tokenizer.json": tokenizer.to_str()}

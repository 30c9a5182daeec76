"""Reads a text model's checkpoint, except the weights: its architecture, sizes and special tokens. Refuses models that
the engine's attention would compute wrongly.

A model is refused here, before its weights are read, if config.json shows the reason. All other cases are found by the
comparison with transformers when an engine opens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from ...core.errors import CheckpointError, UnsupportedModel
from ...core.model import Kind
from ...core.request import Pooling
from ..checkpoints.files import file_stamps, find_weights
from ..checkpoints.gguf_folder import file_of
from ..checkpoints.loading import read_tokenizer
from ..checkpoints.modules import DecoderShape, ModuleCheckpoint, whole
from ..checkpoints.quantized import quantization_of, unknown_quantization
from ..checkpoints.settings import FileSettings
from ..checkpoints.turns import TURNS
from .crossed_family import crossed_model_types
from .families import family_media, find_family
from .family import Family
from .frame_family import frame_model_types
from .layer_sizes import DIFFERING, RECURRENT, WITHOUT_KV, layer_sizes

_LAYERS = {"full_attention", "sliding_attention"}
_STATE = "a state of the request beside its pages"
_ENDLESS = 1 << 17  # positions of a model that names no limit: a state has the same size after any number of them
_CHOSEN = "attention to positions that each row chooses"
_JOINED = "keys and values that stand for several positions"
_NEEDED = {  # what a layer of another type would need
    "chunked_attention": "attention within chunks of positions",
    "compressed_sparse_attention": _JOINED,
    "conv": _STATE,
    "heavily_compressed_attention": _JOINED,
    "hybrid": f"{_STATE}, and attention",
    "hybrid_sliding": f"{_STATE}, and attention",
    "indexed_attention": _CHOSEN,
    "linear_attention": _STATE,
    "mlp": "no attention",
    "reference_sliding_attention": "windows that always show the first positions",
}
_DECAYS = f"{_STATE} with a decay for each of its numbers, or each number of a key"
_OF_DECAYS = {"jamba", "kimi_linear"}  # the native library has one for each head
_ROPES = {None, "default", "linear", "llama3", "yarn", "proportional"}
_OFFSET_POSITIONS = {  # the first positions are for padding, so texts have fewer positions than the table
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "longformer",
    "luke",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}


@frozen(kw_only=True)
class TextCheckpoint(ModuleCheckpoint):
    """The facts in a text model's files, apart from the weights."""

    loader: str  # the class of transformers that loads the model, if it has no family
    family: Family | None = field(repr=False)  # set for models that read images or audio
    kind: Kind
    causal: bool  # False: every position attends to all others
    default_pooling: Pooling | None
    labels: tuple[str, ...]
    together: int  # the most rows of a step that see each other; 0: none do
    allowed: str = field(
        default="decoders whose layers have causal attention, full or in a sliding window; and encoders "
        "that do not read masked positions",
        repr=False,
    )

    @property
    def quantized(self) -> bool:
        """True if another library quantized the weights."""
        return quantization_of(self.config) is not None


def read_text_checkpoint(plain: FileSettings) -> TextCheckpoint:
    """Reads everything but the weights of the checkpoint whose config.json is ``plain``.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModel: the engine would compute the architecture wrongly, or transformers does not know it.
    """
    folder = plain.path.parent
    stamps, config = file_stamps(folder), read_transformers_config(plain)
    architecture = _architecture(plain, config)
    text = _text_config(plain, config)
    family = find_family(config)
    if reason := _reason(config, text, family) or _unread(config, architecture, family):
        raise UnsupportedModel(
            f"{file_of(folder) or folder} ({plain.get('model_type')}) {reason}; allowed: decoders whose layers have "
            "causal attention, full or within a sliding window; and encoders of texts"
        )
    aligns = architecture.endswith(_ALIGN)
    if aligns and family is not None:
        family = evolve(family, architecture=architecture)
    find_weights(folder)
    generation = FileSettings.read_if_there(folder / "generation_config.json")
    written = generation or FileSettings(folder / "generation_config.json", {})
    tokenizer = read_tokenizer(folder, config)
    shape = _shape(folder, text)
    sentence = _sentence_pooling(folder)
    classifies = architecture.endswith("ForSequenceClassification")
    causal = _is_causal(text)
    default = Pooling(kind="classify") if classifies else sentence or Pooling(kind="last" if causal else "mean")
    pools = classifies or sentence is not None or not causal or not architecture.endswith(_GENERATE)
    kind = Kind.ALIGNER if aligns else Kind.POOLING if pools else Kind.DECODER
    added = family is not None and family.added  # such a text ends with its audio
    return TextCheckpoint(
        folder=folder,
        architecture=architecture,
        loader=architecture if classifies or not pools else "AutoModel",
        family=family,
        config=config,
        shape=shape,
        kind=kind,
        causal=causal,
        tokenizer=tokenizer,
        eos_token_ids=_eos(generation, plain, text, None if added else tokenizer.eos_token_id, shape.vocabulary),
        suppress_token_ids=written.tokens("suppress_tokens", shape.vocabulary, cut=True),
        begin_suppress_token_ids=written.tokens("begin_suppress_tokens", shape.vocabulary, cut=True),
        default_pooling=default if kind is Kind.POOLING else None,
        together=0 if family is None else family.together(folder, config),
        labels=tuple(str(config.id2label[index]) for index in range(len(config.id2label))) if classifies else (),
        stamps=stamps,
    )


_ALIGN = "ForTokenClassification"
_OTHERS = ("ForSequenceClassification", "Model", "ForMaskedLM", "ForPreTraining")
_GENERATE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def read_transformers_config(plain: FileSettings) -> Any:
    """Returns transformers' configuration of the checkpoint whose config.json is ``plain``.

    Raises:
        CheckpointError: the configuration is damaged.
        UnsupportedModel: transformers does not know the model type.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    folder, kind = plain.path.parent, plain.get("model_type")
    if kind not in CONFIG_MAPPING:
        converted = "hf download microsoft/Phi-4-multimodal-instruct --revision refs/pr/70"
        hint = f". Give the folder that '{converted}' prints" if kind == "phi4mm" else ""
        raise UnsupportedModel(
            f"{folder} is of model_type {kind!r}, which this version of transformers does not know; allowed: "
            "model_type 'whisper', or a decoder or encoder that transformers has, such as 'llama', 'qwen3' or 'bert'"
            f"{hint}"
        )
    try:
        with TURNS.quiet():
            return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds: wrapped, not hidden
        raise CheckpointError(f"{plain.path} cannot be used: {type(error).__name__}: {error}") from error


def check_float_weights(plain: FileSettings) -> None:
    """Checks the weights of a model that is read as it was trained.

    Raises:
        CheckpointError: there are no weights.
        UnsupportedModel: the weights are quantized.
    """
    if plain.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{plain.path.parent} has quantized weights; allowed: float weights, as they were trained"
        )
    find_weights(plain.path.parent)


def _architecture(plain: FileSettings, config: Any) -> str:
    """Returns the class that config.json names, which must be a class of transformers for this model type."""
    import transformers

    found = plain.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise plain.bad("architectures", "a list of names")
    if not found:
        raise UnsupportedModel(f"{plain.path} has no architectures; allowed: one, such as 'LlamaForCausalLM'")
    loader: Any = getattr(transformers, found[0], None)
    try:
        made_of = getattr(loader, "config_class", None)
    except ImportError as error:
        raise UnsupportedModel(f"{plain.path} needs a package that is not installed: {error}") from error
    if not config.sub_configs and loader is transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), 0):
        made_of = type(config)  # a text model with the layers of another one, as InternLM3's are Llama's
    if made_of is not type(config):
        raise UnsupportedModel(
            f"{plain.path} has the architecture {found[0]!r} with model_type {plain.get('model_type')!r}; allowed: "
            "an architecture of that model type that transformers has"
        )
    aligns = (_ALIGN,) if hasattr(config, "timestamp_token_id") else ()
    if not found[0].endswith((*_GENERATE, *_OTHERS, *aligns)):
        raise UnsupportedModel(
            f"{plain.path} has the architecture {found[0]!r}; allowed: models that generate text, give vectors, "
            "classify texts (...ForCausalLM, ...Model, ...ForMaskedLM, ...ForSequenceClassification) or align words "
            "(Qwen3ASRForTokenClassification)"
        )
    return str(found[0])


def _text_config(plain: FileSettings, config: Any) -> Any:
    """Returns the configuration of the model's part that reads text."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModel(
            f"{plain.path.parent} ({plain.get('model_type')}) has more than one model of texts; allowed: one"
        ) from error


def _reason(config: Any, text: Any, family: Family | None) -> str | None:
    """The reason why the engine does not support the configuration; ``None``: it does."""
    if getattr(text, "is_heterogeneous", False):
        differing = set(text.per_layer_attributes or ["their settings (per_layer_config)"]) - DIFFERING
        if differing:
            return f"has layers that differ in {', '.join(sorted(differing))}"
    layers = set(getattr(text, "layer_types", None) or ()) - _LAYERS
    layers -= {*WITHOUT_KV, "hybrid"} if text.model_type in RECURRENT else set()
    ropes = {rope.get("rope_type") for rope in _ropes(text)} - _ROPES - {"longrope"}
    if config.is_encoder_decoder or text.is_encoder_decoder:
        known = (*crossed_model_types(), *frame_model_types())
        return f"is an encoder-decoder that is not supported (supported: whisper, {', '.join(known)})"
    if config.model_type.endswith("_assistant"):
        return "proposes tokens for another model, whose keys and values it reads: give it as draft_head of that model"
    quantized = quantization_of(config)
    if quantized is not None and (unknown := unknown_quantization(quantized)):
        return f"has weights quantized {unknown}"
    if quantized is not None and family is not None:
        return "reads images or audio and has quantized weights"
    if layers and _is_causal(text):
        asked = {**_NEEDED, "linear_attention": _DECAYS} if text.model_type in _OF_DECAYS else _NEEDED
        needed = dict.fromkeys(asked.get(layer, "code of their own") for layer in sorted(layers))
        return f"has layers of type {', '.join(sorted(layers))}, which need {', or '.join(needed)}"
    if getattr(text, "attention_chunk_size", None) is not None:
        return f"attends within chunks of {text.attention_chunk_size} positions"
    if ropes:
        return f"has rotary positions of type {', '.join(map(str, sorted(ropes, key=str)))}, which depend on the batch"
    return None


def _unread(config: Any, architecture: str, family: Family | None) -> str | None:
    """The reason why the engine does not support the images, sounds or videos that the model reads; ``None``: it reads
    text alone, or has a ``family``."""
    import transformers

    told = getattr(transformers, architecture).input_modalities
    others = {told} - {"text"} if isinstance(told, str) else {*told} - {"text"}
    by_itself = not config.sub_configs and architecture.endswith("ForCausalLM")  # the language model of a larger one
    encoders = [
        name for name in config.sub_configs if name != "text_config" and getattr(config, name, None) is not None
    ]
    left_out = bool(config.sub_configs) and not encoders  # such a checkpoint has the language model alone
    if family is not None or by_itself or left_out or not others:
        return None
    return (
        f"reads {' and '.join(sorted(others))}, whose encoder would need a family of its own (supported: "
        f"{', '.join(family_media())})"
    )


def _ropes(text: Any) -> list[Mapping[str, Any]]:
    """The rotary settings: one for all layers, or one for each type of layer."""
    settings = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    return nested or [settings]


def _is_causal(text: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if getattr(text, "use_bidirectional_attention", None) not in {None, False, "vision"}:
        return False
    if text.model_type == "embedding_gemma2_text":  # its class has no head
        return False
    return bool(getattr(text, "is_decoder", False)) or text.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _shape(folder: Path, text: Any) -> DecoderShape:
    number, kv = partial(whole, folder, text), layer_sizes(folder, text)
    return DecoderShape(
        layers=len(kv),
        kv_heads=max(layer.heads for layer in kv),
        head_dim=max(layer.size for layer in kv),
        hidden=number("hidden_size"),
        vocabulary=number("vocab_size"),
        positions=_positions(folder, text),
        windows=_windows(folder, text, len(kv)),
        recurrent=text.model_type in RECURRENT,
        kv=kv,
    )


def _positions(folder: Path, text: Any) -> int:
    """The most positions of one sequence. With longrope, rotary numbers change with the longest sequence of a batch, so
    only the original positions count.
    """
    if not hasattr(text, "max_position_embeddings") and text.model_type in RECURRENT:
        return _ENDLESS
    positions = whole(folder, text, "max_position_embeddings")
    if text.model_type in _OFFSET_POSITIONS:  # MPNet's are those behind 1, whatever its padding token is
        positions -= (1 if text.model_type == "mpnet" else text.pad_token_id or 0) + 1
    for rope in _ropes(text):
        if rope.get("rope_type") == "longrope":
            positions = min(positions, int(rope.get("original_max_position_embeddings") or positions))
    return positions


def _windows(folder: Path, text: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = whole(folder, text, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos(
    generation: FileSettings | None, plain: FileSettings, text: Any, own: int | None, vocabulary: int
) -> tuple[int, ...]:
    """Returns the tokens that end a text, from generation_config.json, else from config.json, else the tokenizer's
    ``own``."""
    for settings in (generation, plain):
        if settings is not None and settings.get("eos_token_id") is not None:
            return settings.tokens("eos_token_id", vocabulary)
    named = own if text.eos_token_id is None else text.eos_token_id
    return FileSettings(plain.path, {"eos_token_id": named}).tokens("eos_token_id", vocabulary, cut=True)


def _sentence_pooling(folder: Path) -> Pooling | None:
    """The pooling that the files of sentence-transformers ask for; ``None`` if there are no such files."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = _read_modules(path)
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if not set(kinds) <= {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedModel(
            f"{path} has the modules {', '.join(kinds)}; allowed: Transformer, Pooling and Normalize"
        )
    normalize = "Normalize" in kinds
    if "Pooling" not in kinds:
        return Pooling(kind="mean", normalize=normalize)
    settings = FileSettings.read_if_there(folder / modules[kinds.index("Pooling")].get("path", "") / "config.json")
    if settings is None:
        raise CheckpointError(f"{path} has a Pooling module, but its folder has no config.json; download it again")
    return Pooling(kind=_pooling_kind(settings), normalize=normalize)


def _read_modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path} is not a list of modules; download it again")
    return modules


_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


def _pooling_kind(settings: FileSettings) -> str:
    if settings.get("pooling_mode") is not None:
        asked = [str(settings.get("pooling_mode"))]
        asked = ["last" if kind == "lasttoken" else kind for kind in asked]
    else:
        asked = [
            _POOLINGS.get(name, name)
            for name in settings.values
            if name.startswith("pooling_mode_") and settings.flag(name)
        ]
    if len(asked) != 1 or asked[0] not in _POOLINGS.values():
        raise UnsupportedModel(
            f"{settings.path} has the poolings {', '.join(asked) or 'none'}; allowed: one of cls, mean and lasttoken"
        )
    return asked[0]

"""Estimates the bytes that an engine will hold before anything is loaded, from the checkpoint's files and the settings.

The estimate is an upper bound except for small buffers. A matrix counts with all its values in the dtype that it is
computed in, although it may be packed or shared when it is loaded. Keys and values count as if memory were plentiful.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from attrs import evolve

from ...core.config import EngineConfig
from ...core.plan import DeviceMemory
from ..checkpoints.draft_weights import PREFIX
from ..checkpoints.quantized import quantization_of
from ..checkpoints.shapes import StoredShape, shapes_of
from ..checkpoints.whisper_checkpoint import WhisperShape
from ..linear.rounded import kind_of
from ..memory.budget import Available
from ..memory.encoder_states import MOST_STATES
from ..native.crossed_decoder import MODEL_TYPES as CROSSED_TYPES
from ..native.decoders import MODEL_TYPES
from ..native.encoders import MODEL_TYPES as ENCODER_TYPES
from ..native.packings import Section
from ..native.panels import BATCH, GROUP, PANEL
from ..native.parts import other_turns
from ..native.speech_encoders import CONFORMERS
from ..native.speech_encoders import MODEL_TYPES as SPEECH_TYPES
from ..native.towers import MODEL_TYPES as TOWER_TYPES
from ..native.towers import unknown_config
from ..networks.frame_network import AHEAD
from .adapted import AdaptedSizes
from .blueprint import NATIVE_ROWS, Blueprint
from .crossed_blueprint import CrossedBlueprint
from .frame_blueprint import FrameBlueprint
from .read import AnyBlueprint, read_blueprint
from .text_blueprint import CHAINS, TextBlueprint
from .whisper_blueprint import WhisperBlueprint

ODDS = 1 << 20  # bytes for buffers, mel filters and the like
_WORDS = ("embed", "wte.")  # in names of embeddings
_HEADS = ("lm_head.weight", "embed_out.weight")
_ENCODERS = (  # in the names of unquantized weights; the last is a table of codes and tokens
    *("visual", "vision", "audio", "projector", "connector", "encoder", "codec"),
    "embed_tokens.embed_tokens",
)
_DECODERS = frozenset(  # names in encoder-decoders; the last three are those of NeMo
    {"decoder", "lm_head", "proj_out", "final_logits_bias", "transf_decoder", "log_softmax", "encoder_decoder_proj"}
)
_SHARED = "shared.weight"  # the token embedding that encoder and decoder share
_WHOLE = (*_WORDS, *_HEADS, _SHARED, ".experts.", "proj_out", "log_softmax")  # no blocks are made of these
_SCALED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "encoder_attn.q_proj.weight",
)
_OF_TEXTS = re.compile(  # what is packed of encoders of texts; DeBERTa's pos_key_proj and pos_query_proj are not
    r"(^|\.)layers?\.[0-9]+\.(?!.*\.pos_)|((word|tok)_embeddings|embed_tokens)\.weight$"
)
_OF_SPEECH = re.compile(  # what is packed of encoders of items; pre_encode is a name of NeMo
    r"encoder\.(embed_tokens|conv[23]|embedder\.conv[12]|subsampling\.linear|pre_encode\.out"
    r"|(layers|block)\.[0-9]+\.(?!conv\.depthwise|.*relative_attention_bias).*)\.weight$"
)
_OF_TRANSDUCERS = re.compile(r"^(decoder\.(embedding|decoder_projector)|joint\.head)\.weight$|^decoder\.lstm\.weight_")
_STEMS = ("encoder.conv2.weight", "embedder.conv1.weight", "subsampling.linear.weight", "pre_encode.out.weight")
_OF_TOWERS = re.compile(r"(visual|vision_tower|vision_model|audio_tower)\.(.*\.)?(blocks|layers)\.[0-9]+\..*\.weight$")
_FUSED = re.compile(r"experts\.(gate_up|up|down)_proj$|moe\.(in|out)put_linear\.weight$")  # all experts of a layer
_ROUTERS = re.compile(r"\.(gate|router|router\.layer)\.weight$")  # read by torch as they are, and packed beside that
_FAR = ("relative_k_proj.weight", "linear_pos.weight")  # replaced by their outputs
_PROJECTED = (  # torch reads these as they are
    *("decoder_proj.weight", "decoder.proj.weight", "pos_emb.weight", "relative_attention_bias.weight"),
)
_EXPERTS, _LAYER = re.compile(r"\.experts\.[0-9]+\."), re.compile(r".*?\.[0-9]+\.")
_ENTERS = re.compile(r"\.(in_proj\w*|linear_attn\.\w+_proj)\.weight$")
_WINDOWS = (".conv.weight", ".conv1d.weight")  # of recurrent layers
_OF_HEADS = (  # settings of their heads: how many, and the values and keys of one
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("num_heads", "head_dim", "state_size"),
)
_COPIED = re.compile(r"\.(kv_b_proj|per_layer_projection)\.weight$")  # in layers that copy parts of rows
_BY_LAYER = "embed_tokens_per_layer.weight"
_ROOM = 1 << 18  # bytes for the native library's plans
_COUNTERS = 2 * 66 * 64  # bytes of an operation's two phases, see native/team.h
_SCALES = "gemma"  # in model types whose token embeddings scale and are not quantized


def estimate(model: str | Path, config: EngineConfig) -> DeviceMemory:
    """Returns the most bytes, by owner, that an engine for the checkpoint ``model`` will hold. Downloads the checkpoint
    if there is no local copy; reads no weight.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
        UnsupportedModel: the engine cannot run the architecture.
        InvalidRequest: the device does not exist, or the sizes are too small for one sequence.
    """
    return estimate_context(model, config)[0]


def estimate_context(
    model: str | Path, config: EngineConfig, measure: Callable[..., Available] = Available.at_most
) -> tuple[DeviceMemory, str]:
    """Returns what `estimate` returns, and `Blueprint.context`, for the memory that ``measure`` finds."""
    read = read_blueprint(model, config)
    stored = stored_shapes(read)
    if isinstance(read, TextBlueprint) and any(name.startswith(PREFIX) for name in stored):
        read = evolve(read, drafts=read.draft_layer)
    more, rows = _assistant_bytes(read)
    weights = weight_bytes(read, stored) + ODDS + more
    read = evolve(read, state_numbers=state_numbers(read, stored), adapter_bytes=adapted_sizes(read, stored).nbytes)
    blueprint = read.sized(weights + read.state_bytes, measure)
    sizes, budget = blueprint.sizes, blueprint.chosen
    memory = DeviceMemory(
        device=str(blueprint.device),
        by_owner={
            "weights": weights,
            "native": native_bytes(blueprint, stored) + rows,
            "self_kv": (budget.pages + 1 + getattr(blueprint, "texts", 0)) * sizes.page,
            "cross_kv": budget.slots * sizes.slot,
            "encoder_outputs": config.encoder_cache_bytes if encodes(blueprint) else 0,
            "encoder_states": blueprint.state_bytes,
            "recurrent_states": budget.states * sizes.state,
            "draft_kv": (budget.pages + 1) * sizes.draft,
            "adapters": blueprint.adapter_bytes,
        },
    )
    return memory, blueprint.context()


def state_numbers(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> int:
    """The numbers of one sequence's state in the recurrent layers of a model; 0: it has none."""
    if not isinstance(blueprint, TextBlueprint) or not blueprint.checkpoint.shape.recurrent:
        return 0
    config = blueprint.checkpoint.config.get_text_config()
    windows = [one.shape for name, one in stored.items() if name.endswith(_WINDOWS)]
    each = next((sizes for sizes in _OF_HEADS if all(hasattr(config, name) for name in sizes)), None)
    of_heads = 0
    if each is not None:
        heads, size, depth = (getattr(config, name) for name in each)
        of_heads = heads * -(-size // PANEL) * PANEL * depth
    count = sum(name.endswith(".A_log") for name in stored)
    return sum(width * (rows - 1) for width, _, rows in windows) + count * of_heads


def adapted_sizes(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> AdaptedSizes:
    """The sizes of what adapters take."""
    config, turned = blueprint.config, False
    if isinstance(blueprint, TextBlueprint):
        turned = blueprint.checkpoint.config.model_type == "gpt2"
    own = {name: one.shape for name, one in stored.items() if not any(part in name for part in _ENCODERS)}
    told = {"mixed": blueprint.decoder.recurrent, "turned": turned}
    return AdaptedSizes.of(own, slots=config.adapters, rank=config.adapter_rank, **told)


def encodes(blueprint: AnyBlueprint) -> bool:
    """True if the model has an encoder whose outputs are kept."""
    return not isinstance(blueprint, TextBlueprint) or blueprint.checkpoint.family is not None


def stored_shapes(blueprint: AnyBlueprint) -> dict[str, StoredShape]:
    """Returns the shape and dtype of each tensor in the checkpoint's files that may be read, by name."""
    left_out = getattr(getattr(blueprint.checkpoint, "family", None), "left_out", "")
    told = quantization_of(getattr(blueprint.checkpoint, "config", None))
    found = shapes_of(blueprint.checkpoint.folder, told)
    drafts = isinstance(blueprint, TextBlueprint) and blueprint.wants_drafts and may_be_native(blueprint)
    unread = tuple(one for one in (left_out, "" if drafts else PREFIX) if one)
    return {name: one for name, one in found.items() if not name.startswith(unread)}


def weight_bytes(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> int:
    """The bytes of all tensors once they are loaded."""
    return sum(_bytes_of(blueprint, name, one) for name, one in _used(blueprint, stored)) + _computed(blueprint)


def _assistant_bytes(blueprint: AnyBlueprint) -> tuple[int, int]:
    """The bytes of an assistant's tensors, whose head may be packed in parts, and those of the native library's buffers
    for it."""
    if not isinstance(blueprint, TextBlueprint) or blueprint.assistant is None:
        return 0, 0
    stored = shapes_of(blueprint.assistant.folder)
    config, text = blueprint.assistant.config(), blueprint.assistant.config().get_text_config()
    parts = config.num_centroids if config.use_ordered_embeddings else 0
    uneven = parts > 0 and text.vocab_size // parts % PANEL > 0
    padded = uneven * parts * PANEL * text.hidden_size * blueprint.dtype.itemsize
    threads, between = blueprint.config.threads or torch.get_num_threads(), 4 * config.backbone_hidden_size + 2 * parts
    widths = [_widths(stored, f"layers.{index}.") for index in range(text.num_hidden_layers)]
    largest = max(most for _, most in widths)
    between += max(every for every, _ in widths) + 4 * largest
    weights = sum(_bytes_of(blueprint, name, one) for name, one in stored.items() if not name.endswith(_HEADS))
    return weights + padded, 4 * (CHAINS * between + threads * max(64 * largest, 3 * text.vocab_size)) + _ROOM


def _computed(blueprint: AnyBlueprint) -> int:
    """The bytes of what is computed and not stored: tables of positions, and a matrix in two dtypes."""
    if isinstance(blueprint, TextBlueprint):
        family = blueprint.checkpoint.family
        return 0 if family is None else family.buffer_bytes(blueprint.checkpoint.config, blueprint.dtype)
    if blueprint.checkpoint.architecture == "GraniteSpeech5ForCTC" and blueprint.config.quantization is not None:
        shape = blueprint.decoder  # the head keeps the matrix that the encoder has in int8
        return shape.vocabulary * shape.hidden * blueprint.dtype.itemsize
    if blueprint.checkpoint.architecture != "CanaryForConditionalGeneration":
        return 0
    return 4 * blueprint.decoder.positions * blueprint.decoder.hidden


def native_bytes(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> int:
    """The bytes of the native library's buffers, and of the counters and norms of its operations. There are at most two
    more in a layer than it has matrices, since all experts have one of each kind; but some more where parts of rows are
    copied."""
    buffers, adapted = _buffer_bytes(blueprint, stored), len(adapted_sizes(blueprint, stored).matrices)
    own = {name: one for name, one in stored.items() if not any(part in name for part in _ENCODERS)}
    matrices = {_EXPERTS.sub(".experts.", name) for name, one in own.items() if len(one.shape) > 1}
    layers = {found[0] for name in matrices if (found := _LAYER.match(name))}
    norms = sum(4 * prod(one.shape) for one in own.values() if len(one.shape) == 1)
    known = isinstance(blueprint, TextBlueprint) and may_be_native(blueprint)
    more = 5 if any(_COPIED.search(name) for name in matrices) else 2
    return buffers + max(0, _COUNTERS * (len(matrices) + 2 * adapted + more * len(layers)) + norms - _ROOM) * known


def _buffer_bytes(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> int:
    """The bytes of the rows of one call between any two operations and, for each thread, of the rows of one matrix
    product."""
    threads, width = blueprint.config.threads or torch.get_num_threads(), blueprint.decoder.hidden
    if not may_be_native(blueprint):
        found = _clip_bytes(blueprint, stored, threads) if _hears(blueprint) else 0
        rows = AHEAD * blueprint.chosen.pages
        read = any(_is_of_transducer(blueprint, name) for name in stored)
        return found + read * (4 * width * (7 * rows + threads * 64) + _ROOM)
    shape, found = blueprint.checkpoint.shape, 0
    if _reads_texts(blueprint):
        return _text_bytes(blueprint, stored, threads)
    if isinstance(shape, WhisperShape):  # the encoder: the rows of a window, with keys, values and scores
        between, largest = _widths(stored, "encoder.layers.0.")
        rows, own = shape.embeddings, max(64 * largest, BATCH * (shape.embeddings + PANEL))
        found += 4 * (rows * (between + largest + 2 * shape.width) + threads * own) + _ROOM
    text = isinstance(blueprint, TextBlueprint)
    first = ("decoder.layers.0.", "decoder.block.0.")
    if text:
        stored = {name: one for name, one in stored.items() if not any(part in name for part in _ENCODERS)}
    layers = [(f"layers.{index}.", f"h.{index}.") for index in range(blueprint.decoder.layers)] if text else [first]
    widths = [_widths(stored, *names) for names in layers]
    between, largest = max(every for every, _ in widths), max(one for _, one in widths)
    if isinstance(shape, WhisperShape):
        between += shape.decoder_layers * shape.width  # queries are kept to align words
    turns = 16 * blueprint.decoder.head_dim if text else 0
    if isinstance(blueprint, TextBlueprint):
        if blueprint.decoder.recurrent:
            between, largest = _recurrent_widths(stored, blueprint.decoder.layers)
        attended = (one.shape[-1] for name, one in stored.items() if name.endswith("o_proj.weight"))
        between += 2 * width + max([width, *attended])  # sums, last states, and what attention finds
        between += _of_experts(blueprint.checkpoint.config.get_text_config()) + blueprint.deeper * width + 1
        between += 2 * sum(one.shape[-1] for name, one in stored.items() if name.endswith(_BY_LAYER))
        between += adapted_sizes(blueprint, stored).widths
        turns += 4 * width * any(map(_is_table, stored))
    positions = blueprint.positions
    own = max(64 * largest, 3 * shape.vocabulary)  # the second is for sampling
    if _hears(blueprint):
        found += _clip_bytes(blueprint, stored, threads)
    if isinstance(blueprint, CrossedBlueprint):  # the contents of slots
        found += 4 * (NATIVE_ROWS * width + threads * 64 * width) + _ROOM
    rows = blueprint.native_rows if isinstance(blueprint, TextBlueprint) else NATIVE_ROWS
    found += 4 * (rows * (between + largest) + threads * own)
    return found + positions * (turns + largest // 8) + _ROOM


def _of_experts(config: Any) -> int:
    """The numbers that a row has for its experts: logits, what they read and compute, and what a layer without experts
    computes."""
    asked = getattr(config, "num_experts_per_tok", None)
    if not asked:
        return 0
    count = getattr(config, "num_experts", None) or config.num_local_experts
    dense, hidden = getattr(config, "intermediate_size", 0), config.hidden_size  # 0: all layers have experts
    inner = getattr(config, "moe_intermediate_size", None) or dense
    short = getattr(config, "moe_latent_size", None) or 0
    return int(2 * count + asked * (inner + hidden + max(inner, hidden) + 3) + dense + short)


def _reads_texts(blueprint: AnyBlueprint) -> TypeGuard[TextBlueprint]:
    """True for encoders of texts, whose rows attend to both sides."""
    return isinstance(blueprint, TextBlueprint) and not blueprint.checkpoint.causal


def _text_bytes(blueprint: TextBlueprint, stored: Mapping[str, StoredShape], threads: int) -> int:
    """`native_bytes` of an encoder of texts: the rows of a call with keys, values and scores, and tables of
    positions."""
    shape, rows, positions = blueprint.checkpoint.shape, blueprint.text_rows, blueprint.text_positions
    between, largest = _widths(stored, "layer.0.", "layers.0.")
    attended = shape.kv_heads * (shape.head_dim + -(-shape.head_dim // PANEL) * PANEL)
    own = max(64 * largest, BATCH * (rows + PANEL))
    tables = positions * (shape.hidden + 2 * shape.head_dim) + _of_places(blueprint.checkpoint.config, positions)
    return 4 * (rows * (between + largest + attended + 4) + threads * own + tables) + _ROOM


def _of_places(config: Any, positions: int) -> int:
    """The numbers of DeBERTa's keys and queries of places, and of the places of distances, in all layers."""
    if not getattr(config, "relative_attention", False):
        return 0
    longest = config.max_relative_positions if config.max_relative_positions > 0 else config.max_position_embeddings
    span = config.position_buckets if getattr(config, "position_buckets", -1) > 0 else longest
    each = 2 * config.hidden_size * (2 * span + 1 + PANEL) + 2 * positions
    return int(config.num_hidden_layers * each)


def _hears(blueprint: AnyBlueprint) -> bool:
    """True if the native library computes an encoder of items besides Whisper's."""
    config: Any = getattr(blueprint.checkpoint, "config", None)
    known = isinstance(blueprint, CrossedBlueprint | FrameBlueprint) and config.model_type in SPEECH_TYPES
    wide = known and config.model_type in CONFORMERS and config.encoder_config.hidden_size % PANEL
    return known and not wide and Blueprint.not_native(blueprint) is None


def _is_of_transducer(blueprint: AnyBlueprint, name: str) -> bool:
    """True for matrices of prediction and joint networks that the native library computes."""
    known = isinstance(blueprint, FrameBlueprint) and blueprint.not_native_part("") is None
    return known and _OF_TRANSDUCERS.search(name) is not None


def _has_tower(blueprint: AnyBlueprint) -> TypeGuard[TextBlueprint]:
    """True if the native library computes the encoder of images or audio within a language model."""
    if not isinstance(blueprint, TextBlueprint) or blueprint.checkpoint.config.model_type not in TOWER_TYPES:
        return False
    return (unknown_config(blueprint.checkpoint.config) or blueprint.not_native_part("")) is None


def _is_of_items(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> bool:
    """True if the tensor is a matrix of an encoder of items or of a tower that the native library computes."""
    if len(stored.shape) < 2:
        return False
    return (_hears(blueprint) and _OF_SPEECH.search(name) is not None) or (
        _has_tower(blueprint) and _OF_TOWERS.search(name) is not None
    )


def _clip_bytes(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape], threads: int) -> int:
    """The part of `native_bytes` that an encoder of speech adds: the rows of the longest clip with keys, values and
    scores, a call of the stem, and tables of positions."""
    config: Any = getattr(blueprint.checkpoint, "config", None)
    between, largest = _widths(stored, "encoder.layers.0.", "encoder.block.0.")
    packed = {name: one.shape for name, one in stored.items() if _is_of_items(blueprint, name, one)}
    rows, hidden = blueprint.decoder.embeddings, min(shape[0] for shape in packed.values())
    stem = max((prod(shape[1:]) for name, shape in packed.items() if name.endswith(_STEMS)), default=0)
    wide = max(prod(shape[1:]) for name, shape in packed.items() if not name.endswith(_STEMS))
    own = max(64 * wide, BATCH * (rows + PANEL))
    convolved = config.model_type in CONFORMERS
    found = rows * (between + max(wide, largest) + (3 + convolved) * hidden) + threads * own  # the layers
    found += NATIVE_ROWS * stem + threads * 64 * stem  # the stem
    if blueprint.state_bytes:  # keys and values of rows that were heard before
        kept = config.encoder_config.sliding_window
        found += MOST_STATES * kept * 2 * hidden + threads * BATCH * kept
    found += 4 * sum(one.shape[0] for name, one in stored.items() if "encoder.layers." in name and one.shape)
    return 4 * found + (1 + (stem > 0)) * _ROOM


def _widths(stored: Mapping[str, StoredShape], *layers: str) -> tuple[int, int]:
    """Returns the sum of the outputs of a layer's matrices without experts, and the most outputs or inputs of a single
    one."""
    names = [name for name in stored if any(part in name for part in layers) and ".experts." not in name]
    own = [stored[name].shape for name in names if len(stored[name].shape) == 2]
    return sum(outputs for outputs, _ in own), max(map(max, own), default=0)


def _recurrent_widths(stored: Mapping[str, StoredShape], layers: int) -> tuple[int, int]:
    """Returns `_widths` of a decoder whose layers are of several kinds, which have buffers of their own: twice as many
    for recurrent parts, since there are some between their operations."""
    names = [f"layers.{index}." for index in range(layers)]
    kinds, entering = {_widths(stored, layer) for layer in names}, [name for name in stored if _ENTERS.search(name)]
    entered = [sum(stored[name].shape[0] for name in entering if layer in name) for layer in names]
    return sum(wide for wide, _ in kinds) + max(entered), max(most for _, most in kinds)


def may_be_native(blueprint: AnyBlueprint) -> bool:
    """True if the native library computes the model, as far as it is known before the weights are read."""
    config: Any = getattr(blueprint.checkpoint, "config", None)
    if isinstance(blueprint, TextBlueprint):
        types = MODEL_TYPES if blueprint.checkpoint.causal else ENCODER_TYPES
        known = config.get_text_config().model_type in types and not other_turns(config.get_text_config())
    else:
        known = isinstance(blueprint, WhisperBlueprint) or config.model_type in CROSSED_TYPES
    return known and blueprint.not_native() is None


def _is_table(name: str) -> bool:
    """True if the tensor has embeddings of positions."""
    return name.endswith((".embed_positions.weight", "wpe.weight"))


def _used(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> Iterator[tuple[str, StoredShape]]:
    """Yields the tensors that are read. A head that equals the token embedding is left out."""
    tied = isinstance(blueprint, TextBlueprint) and getattr(blueprint.checkpoint.config, "tie_word_embeddings", False)
    return ((name, one) for name, one in stored.items() if not (tied and name.endswith(_HEADS)))


def _bytes_of(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> int:
    count, width = prod(stored.shape), blueprint.dtype.itemsize
    computed = may_be_native(blueprint) or _hears(blueprint) or _has_tower(blueprint)
    native = computed or _is_of_transducer(blueprint, name)
    if native and isinstance(blueprint, WhisperBlueprint) and name.endswith(".scales"):
        return 0  # a part of the packed matrix
    if native and _is_packed(blueprint, name, stored):
        return _packed_bytes(blueprint, name, stored)
    if native and (len(stored.shape) == 1 or name.endswith("_proj_bias")):  # perhaps a bias: float32
        return 4 * count
    if not stored.dtype.is_floating_point:
        return count * stored.dtype.itemsize
    if blueprint.config.quantization is not None and _is_quantized(blueprint, name, stored):
        return count + stored.shape[0] * width  # a scale for each output
    return count * width


def _is_packed(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> bool:
    """True if the tensor is a matrix with which the native library multiplies."""
    only = isinstance(blueprint, FrameBlueprint) or not (may_be_native(blueprint) or _hears(blueprint))
    if only or _is_of_items(blueprint, name, stored):
        return _is_of_items(blueprint, name, stored) or _is_of_transducer(blueprint, name)
    if isinstance(blueprint, TextBlueprint) and _FUSED.search(name):
        return True
    if len(stored.shape) != 2 or not name.endswith(".weight") or "positions" in name or _is_table(name):
        return False
    if _reads_texts(blueprint):
        return _OF_TEXTS.search(name) is not None
    if isinstance(blueprint, TextBlueprint):
        return not any(part in name for part in _ENCODERS)
    if isinstance(blueprint, WhisperBlueprint):
        return True
    if name.endswith(_SHARED):
        return bool(blueprint.checkpoint.config.tie_word_embeddings)  # otherwise nothing reads this tensor
    return not _DECODERS.isdisjoint(name.split(".")) and not name.endswith(_PROJECTED)


def _packed_bytes(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> int:
    """The bytes of a packed matrix. Its outputs are padded to whole panels and, in int8, its inputs to whole groups.
    Values of 16 bits keep 16 bits."""
    outputs, inputs = stored.shape[0], prod(stored.shape[1:])
    panels = -(-outputs // PANEL)
    if _FUSED.search(name):
        count, outputs, inputs = stored.shape
        panels = count * -(-outputs // PANEL)
    if _ROUTERS.search(name):
        width = blueprint.dtype.itemsize
        return width * outputs * inputs + panels * PANEL * (inputs + inputs % 2) * min(width, stored.dtype.itemsize)
    if _hears(blueprint) and name.endswith(_FAR):
        return 4 * outputs * -(-(2 * blueprint.decoder.embeddings + 1) // PANEL) * PANEL
    if stored.kind is not None:
        return Section(stored.kind, panels).bytes_for(inputs) + 4 * inputs
    quantized = blueprint.config.quantization is not None and _is_quantized(blueprint, name, stored)
    kind = kind_of(name.removesuffix(".weight"), stored.shape)
    if quantized and kind is not None and _is_rounded(blueprint, name, stored):
        return Section(kind, panels).bytes_for(inputs)
    if quantized or stored.dtype == torch.int8:
        return panels // -(-outputs // PANEL) * _int8_bytes(outputs, inputs, 4 if stored.dtype == torch.int8 else 2)
    if blueprint.dtype == torch.bfloat16:  # in pairs of inputs
        return panels * PANEL * (inputs + inputs % 2) * 2
    scaled = isinstance(blueprint, WhisperBlueprint) and name.endswith(_SCALED)  # scaling may not be exact in 16 bits
    return panels * PANEL * inputs * (4 if scaled else min(4, stored.dtype.itemsize))


def _is_rounded(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> bool:
    """True if int4 makes blocks of a packed matrix, which no tower has."""
    int4, text = blueprint.config.quantization == "int4", isinstance(blueprint, TextBlueprint)
    left = any(part in name for part in _WHOLE) or (text and _is_of_items(blueprint, name, stored))
    return int4 and stored.dtype != torch.int8 and not left


def _int8_bytes(outputs: int, inputs: int, of_scale: int) -> int:
    return -(-outputs // PANEL) * -(-inputs // GROUP) * (of_scale + GROUP) * PANEL


def _is_quantized(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> bool:
    """True if quantization applies to the tensor: a linear layer's matrix or a token embedding, in the part that
    decodes."""
    if _is_of_items(blueprint, name, stored) or _is_of_transducer(blueprint, name):
        return True
    if may_be_native(blueprint) and (_ROUTERS.search(name) or name.endswith("shared_expert_gate.weight")):
        return False
    if may_be_native(blueprint) and _FUSED.search(name):
        return True
    if len(stored.shape) != 2 or not name.endswith(".weight"):
        return False
    if isinstance(blueprint, FrameBlueprint):
        return name.startswith("encoder.")
    if not isinstance(blueprint, TextBlueprint):
        unread = name.endswith(_SHARED) and may_be_native(blueprint) and not _is_packed(blueprint, name, stored)
        return "embed_positions" not in name and not name.endswith(_PROJECTED) and not unread
    if _reads_texts(blueprint) and may_be_native(blueprint):
        return _is_packed(blueprint, name, stored)
    scales = "embed" in name and _SCALES in str(blueprint.checkpoint.config.model_type)
    left = ".experts." in name or scales  # for torch, all experts of a layer are no linear layer
    if _is_table(name) if may_be_native(blueprint) else left:
        return False
    return blueprint.checkpoint.family is None or not any(part in name for part in _ENCODERS)

"""How many bytes an engine will hold, before anything is loaded: by what the checkpoint's files say, and the settings.

The estimate is an upper bound but for odds and ends: a matrix counts with all its values in the dtype that it is
computed in, although it may be packed or shared when it is loaded, and keys and values as if memory were plentiful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from attrs import frozen

from ...core.config import EngineConfig
from ...core.plan import DeviceMemory
from ..checkpoints.files import find_weights
from ..checkpoints.stored import open_weights
from ..memory.budget import Available, Budget
from .blueprint import name_devices
from .read import AnyBlueprint, Blueprints
from .text import TextBlueprint

ODDS = 1 << 20  # bytes for buffers, mel filters and the like
_HEADS = ("lm_head.weight", "embed_out.weight")
_ENCODERS = ("visual", "vision", "audio", "projector", "connector")  # in names of weights: parts that are not quantized
_DECODERS = frozenset({"decoder", "lm_head", "proj_out", "final_logits_bias"})  # of encoder-decoders
_SCALES = "gemma"  # in model types: token embeddings that scale, and are not quantized


@frozen
class StoredShape:
    """What a checkpoint's file says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def estimate(model: str | Path, config: EngineConfig) -> DeviceMemory:
    """What an engine of the checkpoint ``model`` will hold, by owner, and at most. Downloads the checkpoint where it is
    not here; reads no weight.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
        UnsupportedModel: of an architecture that the engine cannot run.
        InvalidRequest: a device that is not there, or sizes too small for one sequence.
    """
    blueprints = Blueprints.read(model, config)
    weights = sum(weight_bytes(blueprint, stored_shapes(blueprint)) for blueprint in blueprints.all)
    return planned(blueprints, weights + ODDS)


def planned(blueprints: Blueprints, weights: int) -> DeviceMemory:
    """With so many bytes of ``weights``: their keys and values, and the encoder cache."""
    main, draft = blueprints.main, blueprints.draft
    together = main.sizes if draft is None else main.sizes.beside(draft.sizes)
    budget = Budget.choose(
        main.config, main.sizes, together, Available.at_most(main.devices or (main.device,), weights)
    )
    pages = budget.pages + 1 if together.page else 0
    return DeviceMemory(
        device=name_devices(main),
        by_owner={
            "weights": weights,
            "self_kv": pages * together.page,
            "cross_kv": budget.slots * together.slot,
            "encoder_outputs": main.config.encoder_cache_bytes if encodes(main) else 0,
        },
    )


def encodes(blueprint: AnyBlueprint) -> bool:
    """Whether the model has an encoder whose outputs are kept."""
    return not isinstance(blueprint, TextBlueprint) or blueprint.checkpoint.family is not None


def stored_shapes(blueprint: AnyBlueprint) -> dict[str, StoredShape]:
    """The tensors of the checkpoint's files, by name."""
    found: dict[str, StoredShape] = {}
    for path in find_weights(blueprint.checkpoint.folder):
        found.update((name, StoredShape(one.shape, one.dtype)) for name, one in open_weights(path).items())
    return found


def weight_bytes(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> int:
    """Bytes of the tensors when they are loaded."""
    return sum(_bytes_of(blueprint, name, one) for name, one in _used(blueprint, stored))


def _used(blueprint: AnyBlueprint, stored: Mapping[str, StoredShape]) -> Iterator[tuple[str, StoredShape]]:
    """Without a head that is the token embedding; without a decoder, where the engine has none."""
    if not blueprint.config.decodes:
        return ((name, one) for name, one in stored.items() if _is_of_encoder(blueprint, name))
    tied = isinstance(blueprint, TextBlueprint) and getattr(blueprint.checkpoint.config, "tie_word_embeddings", False)
    return ((name, one) for name, one in stored.items() if not (tied and name.endswith(_HEADS)))


def _is_of_encoder(blueprint: AnyBlueprint, name: str) -> bool:
    if isinstance(blueprint, TextBlueprint):
        return any(part in name for part in _ENCODERS)
    return _DECODERS.isdisjoint(name.split("."))


def _bytes_of(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> int:
    count, width = prod(stored.shape), blueprint.dtype.itemsize
    if not stored.dtype.is_floating_point:
        return count * stored.dtype.itemsize
    if blueprint.config.quantization is not None and _is_quantized(blueprint, name, stored):
        return count + stored.shape[0] * width  # a scale for each output
    return count * width


def _is_quantized(blueprint: AnyBlueprint, name: str, stored: StoredShape) -> bool:
    """Whether quantization takes it: a linear layer's matrix or a token embedding, of the part that decodes."""
    if len(stored.shape) != 2 or not name.endswith(".weight"):
        return False
    if not isinstance(blueprint, TextBlueprint):
        return "embed_positions" not in name
    if "embed" in name and _SCALES in str(blueprint.checkpoint.config.model_type):
        return False
    return blueprint.checkpoint.family is None or not any(part in name for part in _ENCODERS)

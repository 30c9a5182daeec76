"""The sizes of keys and values of each layer of a decoder, as its configuration says them. The comparison when an
engine opens checks them against what the layers pass to attention.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve

from ...core.model import LayerKV
from ..checkpoints.modules import whole

RECURRENT = frozenset(
    {
        *(
            "bamba",
            "falcon_h1",
            "granitemoehybrid",
            "lfm2",
            "lfm2_moe",
            "lfm3",
            "mamba2",
            "nemotron_h",
            "qwen3_5_moe_text",
        ),
        *("olmo_hybrid", "qwen3_5_text", "qwen3_next"),
    }
)
"""The model types with recurrent layers that the native library computes."""

WITHOUT_KV = frozenset({"conv", "linear_attention", "mlp", "moe"})
"""The types of layers that have no keys and values."""

DIFFERING = frozenset({"head_dim", "num_key_value_heads"})
"""The settings that may differ from layer to layer."""


def layer_sizes(folder: Path, text: Any) -> tuple[LayerKV, ...]:
    """Returns the keys and values of each layer.

    Raises:
        UnsupportedModel: a number is missing, or is not a positive integer.
    """
    layers = whole(folder, text, "num_hidden_layers")
    if getattr(text, "is_heterogeneous", False):
        return _shared(text, tuple(_plain(folder, text.per_layer_config[index]) for index in range(layers)))
    if not WITHOUT_KV.isdisjoint(kinds := getattr(text, "layer_types", None) or ()):
        none = LayerKV(heads=0, size=0, value_size=0)
        return tuple(none if kind in WITHOUT_KV else _plain(folder, text) for kind in kinds)
    latent = getattr(text, "kv_lora_rank", None) is not None and hasattr(text, "qk_nope_head_dim")
    return _shared(text, ((_latent if latent else _plain)(folder, text),) * layers)


def _plain(folder: Path, text: Any) -> LayerKV:
    number = partial(whole, folder, text)
    heads, sized = number("num_attention_heads"), getattr(text, "head_dim", None) is not None
    size = number("head_dim") if sized else number("hidden_size") // heads
    grouped = getattr(text, "num_key_value_heads", None) is not None
    return LayerKV(heads=number("num_key_value_heads") if grouped else heads, size=size, value_size=size)


def _latent(folder: Path, text: Any) -> LayerKV:
    """The keys and values that are made of latent ones (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1)."""
    number = partial(whole, folder, text)
    return LayerKV(
        heads=number("num_attention_heads"),
        size=number("qk_nope_head_dim") + number("qk_rope_head_dim"),
        value_size=number("v_head_dim"),
    )


def _shared(text: Any, layers: tuple[LayerKV, ...]) -> tuple[LayerKV, ...]:
    """Returns ``layers`` with the sources of the last ones, each of which reads the keys and values of the last layer
    of its kind that writes some."""
    own, kinds = len(layers) - (getattr(text, "num_kv_shared_layers", None) or 0), getattr(text, "layer_types", None)
    if own == len(layers) or kinds is None:
        return layers
    sources = {kind: index for index, kind in enumerate(kinds[:own])}
    later = (evolve(one, source=sources.get(kind)) for one, kind in zip(layers[own:], kinds[own:], strict=True))
    return (*layers[:own], *later)

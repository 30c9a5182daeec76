"""The attention function that transformers' layers call in place of their own: paged, over a flattened batch.

transformers looks an implementation up by name (`AttentionInterface`) and hands it what the layer has computed. What a
layer asks for and we do not know must not be left out silently: it is refused, see `check_request`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, frozen
from torch import Tensor, nn

from ...core.errors import UnsupportedModel

PAGED = "triolet_paged"
"""Our name among transformers' attention implementations."""

_HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords of which the attention's numbers do not depend: they come along from the model's own call."""


PAGED_APART = "triolet_paged_apart"
"""The same, for layers that are compiled: it is left out of their code, and called between."""


def register(name: str) -> None:
    """Makes `PAGED` or `PAGED_APART` known to transformers; doing it again changes nothing."""
    import torch
    from transformers import AttentionInterface

    disable: Any = torch.compiler.disable  # untyped there
    AttentionInterface.register(name, disable(attend_paged) if name == PAGED_APART else attend_paged)


@frozen(kw_only=True)
class LayerRequest:
    """The request that one layer makes to attention."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None

    @classmethod
    def of(cls, layer: int, key: Tensor, value: Tensor, window: int | None = None) -> LayerRequest:
        """The request of a layer with keys and values [1, kv_heads, rows, head_dim]."""
        return cls(
            layer=layer,
            kv_heads=key.shape[1],
            head_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=window,
        )


Witness = Callable[[LayerRequest], None]
"""Hears what the layers ask for, before they are answered, and may raise `UnsupportedModel`; see `comparison.py`."""


@define(kw_only=True, eq=False)
class PagedCall:
    """The argument that the model's forward hands to every layer. Clear ``step`` when the forward has ended:
    compiled code keeps the call that it was made with."""

    step: Any  # `paged.PagedStep`, or what attends as it does
    witness: Witness | None = None


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    triolet: PagedCall | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows,
    head_dim]; returns [1, rows, heads, head_dim].

    Raises:
        UnsupportedModel: the layer asks for something else than causal attention with a window and a soft cap.
    """
    layer = getattr(module, "layer_idx", None)
    if triolet is None or triolet.step is None or not isinstance(layer, int):
        raise UnsupportedModel(
            f"{type(module).__name__} of transformers does not hand the engine's keywords and its own number to the "
            "attention function; allowed: decoders whose layers do, such as Llama, Mistral, Qwen, Gemma and Phi"
        )
    if triolet.witness is not None:
        asked = {
            "dropout": dropout > 0,
            "attention in both directions": is_causal is False or getattr(module, "is_causal", True) is False,
            "attention sinks": getattr(module, "sinks", None) is not None,
        }
        allowed = "causal attention with grouped heads, a sliding window and a soft cap"
        check_request(module, attention_mask, others, asked, allowed)
        triolet.witness(LayerRequest.of(layer, key, value, sliding_window))
    attended = triolet.step.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=float(query.shape[-1]) ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return attended[None], None


def check_request(
    module: nn.Module, mask: Tensor | None, others: Mapping[str, Any], asked: Mapping[str, bool], allowed: str
) -> None:
    """Raises `UnsupportedModel` where a layer asks for more than our attention does.

    Args:
        mask: of the layer's own.
        others: keywords that our attention does not know.
        asked: names of further wishes, and whether the layer has them.
    """
    wishes = {"a mask of its own": mask is not None, **asked}
    wishes |= {name: bool(value is not None and value is not False) for name, value in others.items()}
    found = sorted(name for name, wished in wishes.items() if wished and name not in _HARMLESS)
    if found:
        raise UnsupportedModel(
            f"{type(module).__name__} of transformers asks for {', '.join(found)}; allowed: {allowed}"
        )

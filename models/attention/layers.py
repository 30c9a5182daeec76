"""The attention function that transformers' layers call in place of their own: paged, over a flattened batch.

transformers looks up an implementation by name (`AttentionInterface`) and passes it the queries, keys and values of the
layer. An argument that we do not know must not be ignored silently, so `check_request` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor, nn

from ...core.errors import UnsupportedModel

PAGED = "triolet_paged"
"""Our name among transformers' attention implementations."""

_HARMLESS = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that do not change the result of attention; the model's own call passes them."""


def register() -> None:
    """Registers `PAGED` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, attend_paged)


@frozen(kw_only=True)
class LayerRequest:
    """The sizes and the window with which one layer calls attention."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None

    @classmethod
    def of(cls, layer: int, key: Tensor, value: Tensor, window: int | None = None) -> LayerRequest:
        """Makes the request of a layer with ``key`` and ``value`` [1, kv_heads, rows, head_dim]."""
        return cls(
            layer=layer,
            kv_heads=key.shape[1],
            head_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=window,
        )


Witness = Callable[[LayerRequest], None]
"""Called with the request of each layer before attention is computed; may raise `UnsupportedModel`. See
`comparison.py`."""


@frozen(kw_only=True, eq=False)
class PagedCall:
    """The argument that the model's forward passes to every layer."""

    step: Any  # `paged.PagedStep`, or an object with the same `attend`
    witness: Witness | None = None
    added: tuple[Tensor, ...] = ()  # to the outputs of the first layers, each [rows, hidden], see `Family.deeper`


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
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    triolet: PagedCall | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface: query [1, heads, rows, head_dim], key and value [1, kv_heads, rows,
    head_dim], whose values may have another width; returns [1, rows, heads, value_dim].

    Raises:
        UnsupportedModel: the layer asks for more than causal attention with a window, a soft cap and sinks.
    """
    layer = getattr(module, "layer_idx", None)
    if triolet is None or not isinstance(layer, int):
        raise UnsupportedModel(
            f"{type(module).__name__} of transformers does not pass the engine's keywords and its layer number to "
            "the attention function; allowed: decoders whose layers pass them, such as Llama, Mistral, Qwen, Gemma "
            "and Phi"
        )
    if triolet.witness is not None:
        asked = {
            "dropout": dropout > 0,
            "attention in both directions": is_causal is False or getattr(module, "is_causal", True) is False,
            "attention sinks that it does not pass": s_aux is None and getattr(module, "sinks", None) is not None,
        }
        allowed = "causal attention with grouped heads, a sliding window, a soft cap and sinks"
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
        sinks=s_aux,
    )
    return attended[None], None


def check_request(
    module: nn.Module, mask: Tensor | None, others: Mapping[str, Any], asked: Mapping[str, bool], allowed: str
) -> None:
    """Raises `UnsupportedModel` if a layer asks for more than our attention does.

    Args:
        mask: the layer's own mask, if it has one.
        others: keyword arguments that our attention does not know.
        asked: further features by name, and whether the layer asks for them.
    """
    wishes = {"a mask of its own": mask is not None, **asked}
    wishes |= {name: bool(value is not None and value is not False) for name, value in others.items()}
    found = sorted(name for name, wished in wishes.items() if wished and name not in _HARMLESS)
    if found:
        raise UnsupportedModel(
            f"{type(module).__name__} of transformers asks for {', '.join(found)}; allowed: {allowed}"
        )

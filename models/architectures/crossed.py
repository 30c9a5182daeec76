"""Encoder-decoders besides Whisper: where the parts of each lie, how large they are, and how items are encoded.

A family knows some ``model_type`` of transformers, whose modules compute: the encoder with attention of its own, the
decoder with ours, which reads pages and cross-attention slots. Most of what they need is found in all of them; what a
module does not let itself be told by an argument is told by `CrossedFamily.instead`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.errors import UnsupportedModel
from ...core.model import Preparer
from ..checkpoints.loading import apart, load_part, place_of
from .items import AudioItems, ItemSettings, TextItems

Forward = tuple[nn.Module, Callable[..., Any]]
"""A module, and what is called instead of its ``forward`` during a call; see `memory.module.forwards`."""

_MOST_SECONDS = 30  # of an item of Moonshine, whose training has none longer (Jeffries et al. 2024)
_USUAL_POSITIONS = 512  # of T5, whose relative positions have no end of their own


@frozen(kw_only=True)
class CrossedShape:
    """The sizes of an encoder-decoder; of keys and values, those that the module hands to its attention."""

    layers: int  # of the decoder
    kv_heads: int
    head_dim: int
    hidden: int  # numbers of one embedding of an encoder output
    vocabulary: int
    positions: int  # of the decoder
    embeddings: int  # most rows of an encoder output


class CrossedFamily(Protocol):
    """One kind of encoder-decoder. It has no state."""

    @property
    def loader(self) -> str:
        """The class of transformers that loads it."""

    @property
    def crossing(self) -> str:
        """The name that its cross-attention modules have in their layers."""

    def shape(self, folder: Path, config: Any) -> CrossedShape:
        """The sizes that ``config`` tells of the checkpoint in ``folder``.

        Raises:
            UnsupportedModel: one is missing.
        """

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The outputs of payloads of one length, [embeddings, hidden], each in storage of its own."""

    def distances(self, module: nn.Module, positions: int) -> Tensor | None:
        """What the decoder adds to its scores by the distance of query and key, [distances, heads], where the last row
        is that of all farther ones, up to ``positions``; ``None``: nothing."""

    def instead(self, module: nn.Module, positions: Tensor, distances: Tensor | None) -> list[Forward]:
        """What tells the decoder the ``positions`` [rows] of its rows, and what it adds by distance."""

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:
        """What turns text or audio into encoder items."""


def find_crossed_family(model_type: object) -> CrossedFamily | None:
    """The family of a ``model_type``; ``None``: it is not known here."""
    return _families().get(model_type) if isinstance(model_type, str) else None


def crossed_model_types() -> tuple[str, ...]:
    """Every ``model_type`` with a family."""
    return tuple(_families())


def _families() -> dict[str, CrossedFamily]:
    return {
        "moonshine": Moonshine(),
        "bart": Bart("BartForConditionalGeneration"),
        "mbart": Bart("MBartForConditionalGeneration"),
        "pegasus": Bart("PegasusForConditionalGeneration"),
        "t5": T5("T5ForConditionalGeneration"),
        "mt5": T5("MT5ForConditionalGeneration"),
    }


@frozen
class Moonshine:
    """Speech of any length up to 30 seconds, as raw samples (Jeffries et al. 2024): rotary positions, heads that are
    filled up to a multiple."""

    loader: str = "MoonshineForConditionalGeneration"
    crossing: str = "encoder_attn"

    def shape(self, folder: Path, config: Any) -> CrossedShape:
        """See `CrossedFamily`."""
        number = partial(whole, folder, config)
        heads, hidden = number("decoder_num_attention_heads"), number("hidden_size")
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        multiple = config.pad_head_dim_to_multiple_of or 1
        return CrossedShape(
            layers=number("decoder_num_hidden_layers"),
            kv_heads=number("decoder_num_key_value_heads"),
            head_dim=-(-head_dim // multiple) * multiple,
            hidden=hidden,
            vocabulary=number("vocab_size"),
            positions=number("max_position_embeddings"),
            embeddings=moonshine_embeddings(_MOST_SECONDS * 16_000),
        )

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """See `CrossedFamily`. Silence that fills a batch up would change the first norm, which is over all samples."""
        return _encode(module, "input_values", payloads, place_of(module)[1])

    def distances(self, module: nn.Module, positions: int) -> None:
        """See `CrossedFamily`."""

    def instead(self, module: nn.Module, positions: Tensor, distances: Tensor | None) -> list[Forward]:  # noqa: ARG002
        """See `CrossedFamily`."""
        decoder = _decoder(module)
        return [(decoder, partial(told, decoder.forward, {"position_ids": positions[None]}))]

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:  # noqa: ARG002
        """See `CrossedFamily`."""
        extractor = load_part("AutoFeatureExtractor", folder, trust_remote_code=False)
        if type(extractor).__name__ != "Wav2Vec2FeatureExtractor":
            raise UnsupportedModel(
                f"the feature extractor of {folder} is a {type(extractor).__name__}; allowed: Wav2Vec2FeatureExtractor"
            )
        rate = int(extractor.sampling_rate)
        return AudioItems.of(
            tokenizer,
            settings,
            read=partial(_normalized, extractor) if extractor.do_normalize else np.asarray,
            sampling_rate=rate,
            most_samples=_MOST_SECONDS * rate,
            count=moonshine_embeddings,
        )


def _normalized(extractor: Any, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the extractor makes of one piece of audio. A call of it would leave a cycle behind, for the collector."""
    read: np.ndarray[Any, Any] = extractor.zero_mean_unit_var_norm([samples], attention_mask=None)[0]
    return read


def moonshine_embeddings(samples: int) -> int:
    """Embeddings of so many samples: three convolutions; 0 or less where there are too few."""
    for size, stride in ((127, 64), (7, 3), (3, 2)):
        samples = (samples - size) // stride + 1
    return samples


@frozen
class Bart:
    """BART (Lewis et al. 2020) and its kin: text in, text out, learned positions."""

    loader: str
    crossing: str = "encoder_attn"

    def shape(self, folder: Path, config: Any) -> CrossedShape:
        """See `CrossedFamily`."""
        number = partial(whole, folder, config)
        heads, hidden = number("decoder_attention_heads"), number("d_model")
        return CrossedShape(
            layers=number("decoder_layers"),
            kv_heads=heads,
            head_dim=hidden // heads,
            hidden=hidden,
            vocabulary=number("vocab_size"),
            positions=number("max_position_embeddings"),
            embeddings=number("max_position_embeddings"),
        )

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """See `CrossedFamily`."""
        return _encode(module, "input_ids", payloads, torch.long)

    def distances(self, module: nn.Module, positions: int) -> None:
        """See `CrossedFamily`."""

    def instead(self, module: nn.Module, positions: Tensor, distances: Tensor | None) -> list[Forward]:  # noqa: ARG002
        """See `CrossedFamily`. The decoder counts the positions itself, so its table of them is told instead."""
        table = _decoder(module).embed_positions
        return [(table, partial(_look_up, table.forward, positions))]

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:  # noqa: ARG002
        """See `CrossedFamily`."""
        return TextItems.of(tokenizer, settings)


@frozen
class T5:
    """T5 (Raffel et al. 2020) and its kin: text in, text out. Scores are not scaled, and change with the distance."""

    loader: str
    crossing: str = "EncDecAttention"

    def shape(self, folder: Path, config: Any) -> CrossedShape:
        """See `CrossedFamily`."""
        number = partial(whole, folder, config)
        positions = getattr(config, "n_positions", None) or _USUAL_POSITIONS
        return CrossedShape(
            layers=number("num_decoder_layers"),
            kv_heads=number("num_heads"),
            head_dim=number("d_kv"),
            hidden=number("d_model"),
            vocabulary=number("vocab_size"),
            positions=positions,
            embeddings=positions,
        )

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """See `CrossedFamily`."""
        return _encode(module, "input_ids", payloads, torch.long)

    def distances(self, module: nn.Module, positions: int) -> Tensor:
        """See `CrossedFamily`: the module's own numbers for its last query, which sees every distance."""
        attention = _first_attention(module)
        count = min(positions, attention.relative_attention_max_distance + 1)
        with torch.no_grad():
            row: Tensor = attention.compute_bias(1, count, past_seen_tokens=count - 1)
        return row[0, :, 0].flip(-1).T.contiguous()

    def instead(self, module: nn.Module, positions: Tensor, distances: Tensor | None) -> list[Forward]:  # noqa: ARG002
        """See `CrossedFamily`. The first layer hands on to all others what it is given."""
        attention = _first_attention(module)
        return [(attention, partial(told, attention.forward, {"position_bias": distances}))]

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:  # noqa: ARG002
        """See `CrossedFamily`."""
        return TextItems.of(tokenizer, settings)


def told(forward: Callable[..., Any], what: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` with further keyword arguments, which go before its caller's."""
    return forward(*args, **{**kwargs, **what})


def _look_up(forward: Callable[..., Any], positions: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return forward(None, position_ids=positions)


def _decoder(module: Any) -> Any:
    return module.get_decoder()


def _first_attention(module: Any) -> Any:
    return _decoder(module).block[0].layer[0].SelfAttention


def _encode(module: Any, name: str, payloads: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> list[Tensor]:
    device, own = place_of(module)
    batch = torch.stack([payload[name] for payload in payloads]).to(device, dtype)
    with torch.no_grad():
        hidden: Tensor = module.get_encoder()(**{name: batch}).last_hidden_state
    return apart(list(hidden.to(own)))


def whole(folder: Path, config: Any, name: str) -> int:
    """The number ``name`` of a transformers configuration.

    Raises:
        UnsupportedModel: it is missing, or no positive integer.
    """
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{folder / 'config.json'} has {name}={value!r}; allowed: an integer, 1 or more")
    return value

"""Encoder-decoders besides Whisper: where their parts lie, how large these are, and how items are encoded.

A family covers some ``model_type`` of transformers. The modules of transformers compute. The encoder uses its own
attention. The decoder uses ours, which reads pages and cross-attention slots. Most inputs are arguments that all
decoders accept; `CrossedFamily.instead` supplies those for which a decoder has no argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import UnsupportedModel
from ...core.model import Preparer
from ..checkpoints.loading import apart, load_part, place_of, stacked
from ..checkpoints.modules import DecoderShape, whole
from .items import AudioItems, ItemSettings, TextItems
from .prompts import settled

Forward = tuple[nn.Module, Callable[..., Any]]
"""A module, and the function that replaces its ``forward`` during a call; see `memory.module.forwards`."""

_MOST_SECONDS = 30  # the longest audio in Moonshine's training (Jeffries et al. 2024); others cut longer audio
_FRAMES = 100  # of a spectrogram, in a second
_JOINED = 4  # frames of samples that become one embedding of Moonshine streaming
_CAUSAL = 4  # embeddings before one that its convolutions see at most
_USUAL_POSITIONS = 512  # for T5, whose relative positions have no limit


@frozen
class CrossedFamily:
    """One kind of encoder-decoder. It has no state."""

    loader: str  # the class of transformers that loads it
    crossing: str = "encoder_attn"  # the name of the cross-attention module in each layer
    states: str = "key_value_states"  # the argument of these modules that is the encoder output

    def shape(self, folder: Path, config: Any) -> DecoderShape:
        """Returns the sizes that ``config`` names for the checkpoint in ``folder``.

        Raises:
            UnsupportedModel: a size is missing.
        """
        raise NotImplementedError

    def encoder(self, module: Any) -> Any:
        """Returns the encoder in ``module``."""
        return module.get_encoder()

    def fresh(self, module: Any, payload: Mapping[str, Tensor]) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Returns the part of ``payload`` that must be encoded."""
        return payload

    def finished(self, module: Any, rows: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002
        """Returns the encoder output of the payload ``inputs``, by the ``rows`` that the layers make of the part of it
        that is `fresh`."""
        return rows

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Returns the encoder outputs of ``payloads``, which have equal lengths. Each is [embeddings, hidden], in
        storage of its own, without embeddings that the encoder masks.
        """
        with torch.no_grad():
            output = self.encoder(module)(**stacked(module, payloads))
        hidden, mask = output.last_hidden_state.to(place_of(module)[1]), getattr(output, "attention_mask", None)
        length = hidden.shape[1] if mask is None else int(mask[0].sum())  # equal lengths have equal masks
        return apart(list(hidden[:, :length]))

    def projected(self, module: nn.Module, output: Tensor) -> Tensor:  # noqa: ARG002
        """Returns what the decoder makes of an encoder ``output`` before its layers read it."""
        return output

    def distances(self, module: nn.Module, positions: int) -> Tensor | None:  # noqa: ARG002
        """Returns the numbers [distances, heads] that the decoder adds to its scores by the distance of query and key.
        The last row applies to all greater distances, up to ``positions``. ``None``: nothing is added."""
        return None

    def instead(self, module: nn.Module, positions: Tensor, distances: Tensor | None) -> list[Forward]:  # noqa: ARG002
        """Returns the calls that replace some of the decoder's own. Through them the decoder gets the ``positions``
        [rows] of its rows, here as an argument, and the ``distances`` that it adds to its scores.
        """
        decoder = _decoder(module)
        return [(decoder, partial(told, decoder.forward, {"position_ids": positions[None]}))]

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:  # noqa: ARG002
        """Returns the preparer that turns text or audio into encoder items."""
        return TextItems(tokenizer=settled(tokenizer), settings=settings)


def find_crossed_family(model_type: object) -> CrossedFamily | None:
    """The family of a ``model_type``; ``None``: no family knows this type."""
    return _families().get(model_type) if isinstance(model_type, str) else None


def crossed_model_types() -> tuple[str, ...]:
    """Every ``model_type`` with a family."""
    return tuple(_families())


def _families() -> dict[str, CrossedFamily]:
    return {
        "moonshine": Moonshine(),
        "moonshine_streaming": MoonshineStreaming(),
        "cohere_asr": Conformer("CohereAsrForConditionalGeneration"),
        "canary": Conformer("CanaryForConditionalGeneration"),
        "bart": Bart("BartForConditionalGeneration"),
        "mbart": Bart("MBartForConditionalGeneration"),
        "pegasus": Bart("PegasusForConditionalGeneration"),
        "t5": T5("T5ForConditionalGeneration"),
        "mt5": T5("MT5ForConditionalGeneration"),
    }


@frozen
class Moonshine(CrossedFamily):
    """Speech of any length up to 30 seconds, as raw samples (Jeffries et al. 2024): rotary positions, heads that are
    padded to a multiple of some size."""

    loader: str = "MoonshineForConditionalGeneration"

    def shape(self, folder: Path, config: Any) -> DecoderShape:
        number = partial(whole, folder, config)
        heads, hidden = number("decoder_num_attention_heads"), number("hidden_size")
        if (head_dim := getattr(config, "head_dim", None) or hidden // heads) == 0:
            raise UnsupportedModel(
                f"{folder} has decoder_num_attention_heads={heads}; allowed: up to {hidden}, its width"
            )
        multiple = config.pad_head_dim_to_multiple_of or 1
        return DecoderShape(
            layers=number("decoder_num_hidden_layers"),
            kv_heads=number("decoder_num_key_value_heads"),
            head_dim=-(-head_dim // multiple) * multiple,
            hidden=hidden,
            vocabulary=number("vocab_size"),
            positions=number("max_position_embeddings"),
            embeddings=moonshine_embeddings(_MOST_SECONDS * 16_000),
        )

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:  # noqa: ARG002
        extractor = _extractor(folder, "Wav2Vec2FeatureExtractor")
        rate = int(extractor.sampling_rate)
        return AudioItems(
            tokenizer=settled(tokenizer),
            settings=settings,
            read=partial(_samples, extractor),
            sampling_rate=rate,
            most_samples=_MOST_SECONDS * rate,
            count=moonshine_embeddings,
        )


def _extractor(folder: Path, *allowed: str) -> Any:
    """Returns the feature extractor in ``folder``. Raises `UnsupportedModel` unless its class is ``allowed``."""
    extractor = load_part("AutoFeatureExtractor", folder, trust_remote_code=False)
    if type(extractor).__name__ not in allowed:
        raise UnsupportedModel(
            f"the feature extractor of {folder} is a {type(extractor).__name__}; allowed: {' or '.join(allowed)}"
        )
    return extractor


def _samples(extractor: Any, samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    """Reads one piece of audio as the feature extractor does. A call of the extractor itself would leave a reference
    cycle.
    """
    read = extractor.zero_mean_unit_var_norm([samples], attention_mask=None)[0] if extractor.do_normalize else samples
    return {"input_values": torch.from_numpy(np.array(read, np.float32))}


def moonshine_embeddings(samples: int) -> int:
    """The number of embeddings that the three convolutions make of ``samples`` samples; 0 or less if there are too
    few."""
    for size, stride in ((127, 64), (7, 3), (3, 2)):
        samples = (samples - size) // stride + 1
    return samples


@frozen
class MoonshineStreaming(CrossedFamily):
    """Speech as raw samples, whose embeddings see only some others around them, to a decoder with rotary positions. The
    decoder adds positions of its own to the encoder output."""

    loader: str = "MoonshineStreamingForConditionalGeneration"

    def shape(self, folder: Path, config: Any) -> DecoderShape:
        number, encoder = partial(whole, folder, config), config.encoder_config
        positions, multiple = number("max_position_embeddings"), config.pad_head_dim_to_multiple_of or 1
        return DecoderShape(
            layers=number("num_hidden_layers"),
            kv_heads=number("num_key_value_heads"),
            head_dim=-(-number("head_dim") // multiple) * multiple,
            hidden=whole(folder, encoder, "hidden_size"),
            vocabulary=number("vocab_size"),
            positions=positions,
            embeddings=min(positions, streaming_embeddings(_MOST_SECONDS * encoder.sample_rate, frame=_frame(encoder))),
        )

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Calls the encoder's parts as the encoder does. Its own masks would leave reference cycles."""
        device, own = place_of(module)
        encoder = self.encoder(module)
        with torch.no_grad():
            samples = torch.stack([self.fresh(module, payload)["input_values"] for payload in payloads])
            hidden, _ = encoder.embedder(samples.to(device, own))
            places = torch.arange(hidden.shape[1], device=device)
            before = places[:, None] - places
            for layer, (left, right) in zip(encoder.layers, encoder.config.sliding_windows, strict=True):
                seen = (before < left) & (before > -max(right, 1))
                mask = torch.zeros_like(before, dtype=own).masked_fill(~seen, -torch.inf)
                hidden = layer(hidden, attention_mask=mask[None, None])
            hidden = encoder.final_norm(hidden)
        return apart([self.finished(module, rows, one) for rows, one in zip(hidden, payloads, strict=True)])

    def fresh(self, module: Any, payload: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Leaves out what no new embedding of an audio sees whose beginning is "known"."""
        config = self.encoder(module).config
        first, _ = _new_embeddings(config, payload)
        return {"input_values": payload["input_values"][first * _JOINED * _frame(config) :]}

    def finished(self, module: Any, rows: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        first, kept = _new_embeddings(self.encoder(module).config, inputs)
        return torch.cat((inputs["known"][:kept], rows[kept - first :])) if kept else rows

    def projected(self, module: nn.Module, output: Tensor) -> Tensor:
        decoder = _decoder(module)
        projected: Tensor = decoder.proj(output + decoder.pos_emb.weight[: len(output)])
        return projected

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:
        extractor, frame = _extractor(folder, "Wav2Vec2FeatureExtractor"), _frame(config.encoder_config)
        return AudioItems(
            tokenizer=settled(tokenizer),
            settings=settings,
            read=partial(_framed, extractor, frame),
            sampling_rate=int(extractor.sampling_rate),
            most_samples=settings.most_embeddings * _JOINED * frame,
            count=partial(streaming_embeddings, frame=frame),
            extends=not extractor.do_normalize,
        )


def _new_embeddings(encoder: Any, payload: Mapping[str, Tensor]) -> tuple[int, int]:
    """Returns the first embedding that new ones see, and the first new one, of an audio whose beginning is "known"."""
    if "known" not in payload:
        return 0, 0
    lefts, rights = zip(*encoder.sliding_windows, strict=True)
    kept = max(len(payload["known"]) - 1 - sum(max(right - 1, 0) for right in rights), 0)
    return max(kept - sum(lefts) - _CAUSAL, 0), kept


def _frame(encoder: Any) -> int:
    return int(encoder.sample_rate * encoder.frame_ms / 1000 + 0.5)


def _framed(extractor: Any, frame: int, samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    """Reads samples as the processor does. It fills the last frame and masks what it has filled, so that the whole
    frame is zero."""
    values = _samples(extractor, samples)["input_values"]
    whole_frames = values[: len(values) // frame * frame]
    return {"input_values": functional.pad(whole_frames, (0, -(-len(values) // frame) * frame - len(whole_frames)))}


def streaming_embeddings(samples: int, *, frame: int) -> int:
    """The number of embeddings that two convolutions of stride 2 make of frames of ``frame`` samples; 0 if no frame is
    full."""
    return -(-samples // (_JOINED * frame)) if samples >= frame else 0


@frozen
class Conformer(CrossedFamily):
    """Speech as a log-mel spectrogram, through a FastConformer (Rekesh et al. 2023) to a decoder with a table of
    positions: Cohere Transcribe, Canary."""

    states: str = "encoder_hidden_states"

    def shape(self, folder: Path, config: Any) -> DecoderShape:
        encoder, number = config.encoder_config, partial(whole, folder, config.get_text_config())
        most = whole(folder, encoder, "max_position_embeddings") - 1  # one more for padding, which is masked
        return DecoderShape(
            layers=number("num_hidden_layers"),
            kv_heads=number("num_key_value_heads"),
            head_dim=number("head_dim"),
            hidden=whole(folder, encoder, "hidden_size"),
            vocabulary=number("vocab_size"),
            positions=number("max_position_embeddings"),
            embeddings=min(most, _MOST_SECONDS * _FRAMES // encoder.subsampling_factor),
        )

    def projected(self, module: nn.Module, output: Tensor) -> Tensor:
        projected: Tensor = getattr(_decoder(module), "proj", nn.Identity())(output)
        return projected

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> Preparer:
        extractor = _extractor(folder, "CohereAsrFeatureExtractor", "ParakeetFeatureExtractor")
        rate, factor = int(extractor.sampling_rate), config.encoder_config.subsampling_factor
        cuts = hasattr(extractor, "max_audio_clip_s")  # the extractor cuts what is longer
        uncut = extractor.max_audio_clip_s - extractor.overlap_chunk_second if cuts else _MOST_SECONDS
        return AudioItems(
            tokenizer=settled(tokenizer),
            settings=settings,
            read=partial(_features, extractor),
            sampling_rate=rate,
            most_samples=min(int(uncut * rate), settings.most_embeddings * factor * extractor.hop_length),
            count=partial(conformer_embeddings, hop=extractor.hop_length, factor=factor),
        )


def _features(extractor: Any, samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    read = extractor([samples], sampling_rate=extractor.sampling_rate, return_tensors="pt")
    return {"input_features": read["input_features"][0], "attention_mask": read["attention_mask"][0].bool()}


def conformer_embeddings(samples: int, *, hop: int, factor: int) -> int:
    """The number of embeddings that convolutions of stride 2, which together make one of ``factor`` frames, make of
    ``samples`` samples; 0 if there are fewer than two frames, which have no variance."""
    frames = samples // hop
    return -(-frames // factor) if frames > 1 else 0


@frozen
class Bart(CrossedFamily):
    """BART (Lewis et al. 2020) and its kin: text in, text out, learned positions."""

    def shape(self, folder: Path, config: Any) -> DecoderShape:
        number = partial(whole, folder, config)
        heads, hidden = number("decoder_attention_heads"), number("d_model")
        return DecoderShape(
            layers=number("decoder_layers"),
            kv_heads=heads,
            head_dim=hidden // heads,
            hidden=hidden,
            vocabulary=number("vocab_size"),
            positions=number("max_position_embeddings"),
            embeddings=number("max_position_embeddings"),
        )

    def instead(self, module: nn.Module, positions: Tensor, distances: Tensor | None) -> list[Forward]:  # noqa: ARG002
        """Replaces the look-up in the position table. The decoder counts positions itself, so the table ignores that
        count and looks up the rows' positions.
        """
        table = _decoder(module).embed_positions
        return [(table, partial(_look_up, table.forward, positions))]


@frozen
class T5(CrossedFamily):
    """T5 (Raffel et al. 2020) and its kin: text in, text out. Attention scores are not scaled, and depend on the
    distance of query and key."""

    crossing: str = "EncDecAttention"

    def shape(self, folder: Path, config: Any) -> DecoderShape:
        number = partial(whole, folder, config)
        positions = getattr(config, "n_positions", None) or _USUAL_POSITIONS
        return DecoderShape(
            layers=number("num_decoder_layers"),
            kv_heads=number("num_heads"),
            head_dim=number("d_kv"),
            hidden=number("d_model"),
            vocabulary=number("vocab_size"),
            positions=positions,
            embeddings=positions,
        )

    def distances(self, module: nn.Module, positions: int) -> Tensor:
        """Returns the numbers that the module itself adds for the last query. Every distance occurs there."""
        attention = _first_attention(module)
        count = min(positions, attention.relative_attention_max_distance + 1)
        with torch.no_grad():
            row: Tensor = attention.compute_bias(1, count, past_seen_tokens=count - 1)
        return row[0, :, 0].flip(-1).T.contiguous()

    def instead(self, module: nn.Module, positions: Tensor, distances: Tensor | None) -> list[Forward]:  # noqa: ARG002
        """Replaces the call of the first layer's attention alone, since that layer passes its ``position_bias`` on to
        all others."""
        attention = _first_attention(module)
        return [(attention, partial(told, attention.forward, {"position_bias": distances}))]


def told(forward: Callable[..., Any], what: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``forward`` with the keyword arguments in ``what`` in place of the caller's."""
    return forward(*args, **{**kwargs, **what})


def _look_up(forward: Callable[..., Any], positions: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return forward(None, position_ids=positions)


def _decoder(module: Any) -> Any:
    return module.get_decoder()


def _first_attention(module: Any) -> Any:
    return _decoder(module).block[0].layer[0].SelfAttention

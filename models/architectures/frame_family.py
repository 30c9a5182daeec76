"""CTC models and transducers: where their parts lie, how large these are, and how audio is encoded.

A family covers some ``model_type`` of transformers. The modules of transformers compute; `core.emissions` and
`models.networks.frame_network` read the frames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.nn import functional

from ...core.emissions import Emissions
from ...core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from ...core.request import EncoderItem
from ..checkpoints.loading import apart, load_part, place_of, stacked
from ..checkpoints.modules import DecoderShape, whole
from .frontends import PairedDeltaMel
from .items import AudioItems, ItemSettings
from .prompts import settled
from .streamed_encoder import Chunks, Pieces

_MOST_SECONDS = 40  # cuts at pauses hurt little there, the pieces of a recording run together, and the encoder's
# attention, whose memory grows with the square of the length, stays below 10 MB a head
ReadSamples = Callable[[np.ndarray[Any, Any]], Mapping[str, Tensor]]
"""Makes the inputs of an encoder of samples."""
_CODE = re.compile(r"[a-z]{2,3}(-[A-Z]{2})?")
_REFUSED = {"nemotron3_5_transcribe": "its decoder is a language model with Mamba layers"}


@frozen
class FrameFamily:
    """One kind of CTC model or transducer. It has no state."""

    loader: str  # the class of transformers that loads it
    predicts: bool = True  # false: CTC, without a prediction network
    causal: bool = False  # the subsampling convolutions see no later frames

    def emissions(self, folder: Path, config: Any) -> Emissions:
        """Returns the rules by which the labels become emissions.

        Raises:
            CheckpointError: the blank is not in the vocabulary.
            UnsupportedModel: a setting is missing, or the durations are not 0, 1, 2 and so on.
        """
        name, durations = "blank_token_id" if self.predicts else "pad_token_id", list(getattr(config, "durations", ()))
        blank = getattr(config, name)
        if not isinstance(blank, int) or not 0 <= blank < config.vocab_size:
            raise CheckpointError(
                f"{folder / 'config.json'} has {name}={blank!r}; allowed: 0 to {config.vocab_size - 1}, the vocabulary"
            )
        if durations != list(range(len(durations))):
            raise UnsupportedModel(f"{folder} has durations={durations}; allowed: 0, 1, 2 and so on")
        symbols = whole(folder, config, "max_symbols_per_step") if self.predicts else 0
        return Emissions(blank=blank, most_symbols=symbols, durations=len(durations))

    def shape(self, folder: Path, config: Any) -> DecoderShape:
        """Returns the sizes that ``config`` names. ``head_dim`` is the width of a state, and ``layers`` the number of
        layers of the prediction network.

        Raises:
            UnsupportedModel: a size is missing.
        """
        number, symbols = partial(whole, folder, config), self.emissions(folder, config).most_symbols
        embeddings = self.embeddings(config, self.most_hops(folder, config))
        width = number("decoder_hidden_size") if self.predicts else whole(folder, config.encoder_config, "hidden_size")
        return DecoderShape(
            layers=number("num_decoder_layers") if self.predicts else 0,
            kv_heads=1,
            head_dim=width if self.predicts else 1,
            hidden=width,
            vocabulary=number("vocab_size"),
            positions=1 + embeddings * max(1, symbols),
            embeddings=embeddings,
        )

    def most_hops(self, folder: Path, config: Any) -> int:
        """Returns the most hops of 10 ms that the model reads at once: `_MOST_SECONDS`, or fewer if its encoder has
        fewer positions."""
        positions = whole(folder, config.encoder_config, "max_position_embeddings")
        return min(100 * _MOST_SECONDS, (positions - 1) * self.factor(config))

    def factor(self, config: Any) -> int:
        """Returns the number of hops of one frame."""
        return int(config.encoder_config.subsampling_factor)

    def embeddings(self, config: Any, hops: int) -> int:
        """Returns the number of frames that the encoder makes of ``hops`` spectra; 0 if there are too few."""
        settings = config.encoder_config
        size, stride = settings.subsampling_conv_kernel_size, settings.subsampling_conv_stride
        around = size - 1 + stride - 1 if self.causal else (size - 1) // 2 * 2
        left = settings.subsampling_factor
        while left > 1:
            hops, left = (hops + around - size) // stride + 1, left // 2
        return max(hops, 0)

    def state_bytes(self, config: Any, dtype: torch.dtype) -> int:
        """The most bytes of the state of an encoder that hears audio piece by piece; 0: it hears whole windows."""
        if not self.causal:
            return 0
        encoder = config.encoder_config
        of_a_layer = encoder.hidden_size * (2 * encoder.sliding_window + encoder.conv_kernel_size)
        of_subsampling = 2 * encoder.subsampling_conv_channels * encoder.num_mel_bins
        return int(encoder.num_hidden_layers * of_a_layer + of_subsampling) * dtype.itemsize

    def encoder(self, module: Any) -> Any:
        """Returns the encoder in ``module``."""
        return module.encoder

    def fresh(self, module: Any, payload: Mapping[str, Tensor]) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Returns the part of ``payload`` that must be encoded."""
        return payload

    def finished(self, module: Any, rows: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns an encoder output of the ``rows`` that its layers end with, projected as the joint network reads it,
        perhaps in the language among the ``inputs``."""
        if hasattr(module, "prompt_projector"):
            language = inputs.get("prompt_ids", torch.tensor(module.config.default_prompt_id))
            marks = functional.one_hot(language, module.config.num_prompts).to(rows.dtype)
            rows = module.prompt_projector(torch.cat((rows, marks.expand(len(rows), -1)), -1))
        projected: Tensor = module.encoder_projector(rows) if self.predicts else rows
        return projected

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Returns the encoder outputs of ``payloads``, which have equal lengths. Each is [frames, width], in storage of
        its own, projected as the joint network reads it.
        """
        inputs: dict[str, Any] = stacked(module, payloads)
        if "num_lookahead_tokens" in inputs:
            inputs["num_lookahead_tokens"] = int(inputs["num_lookahead_tokens"][0])
        model: Any = module
        with torch.no_grad():
            heard = (model.get_audio_features if self.predicts else model.encoder)(**inputs, output_attention_mask=True)
        rows = heard.pooler_output if self.predicts else heard.last_hidden_state
        lengths = heard.attention_mask.sum(-1).tolist()
        return apart([row[:length] for row, length in zip(rows.to(place_of(module)[1]), lengths, strict=True)])

    def ahead(self, folder: Path) -> int:
        """Returns the later frames that a frame of a causal encoder sees."""
        return int(load_part("AutoProcessor", folder, trust_remote_code=False).default_num_lookahead_tokens)

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> FrameItems:
        """Returns the preparer that turns audio into encoder items.

        Raises:
            CheckpointError: the settings of the feature extractor are missing or damaged.
        """
        processor = load_part("AutoProcessor", folder, trust_remote_code=False)
        extractor, languages = processor.feature_extractor, getattr(processor, "prompt_dictionary", {})
        chosen, hop = dict[str, Tensor](), int(extractor.hop_length)
        if self.causal:
            chosen["num_lookahead_tokens"] = torch.tensor(processor.default_num_lookahead_tokens)
        if languages:
            chosen["prompt_ids"] = torch.tensor(languages["auto"])
        read, pieces, factor = partial(_features, extractor, chosen), None, self.factor(config)
        if self.causal:
            pieces = Pieces(
                read=read,
                hop=hop,
                reach=int(extractor.n_fft) // 2,
                chunks=Chunks(factor=factor, ahead=int(processor.default_num_lookahead_tokens), lacks=factor - 1),
                most=settings.most_embeddings,
            )
        items = self.items(folder, tokenizer, config, settings, read, hop, int(extractor.sampling_rate))
        return evolve(items, languages=_by_code(languages), pieces=pieces)

    def items(
        self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings, read: ReadSamples, hop: int, rate: int
    ) -> FrameItems:
        """Returns the preparer of a front end: ``read`` makes spectra, ``hop`` samples apart, at ``rate`` Hz."""
        return FrameItems(
            tokenizer=settled(tokenizer),
            settings=settings,
            read=read,
            sampling_rate=rate,
            most_samples=self.most_hops(folder, config) * hop,
            count=partial(self._count, config, hop),
            frame_seconds=self.factor(config) * hop / rate,
        )

    def _count(self, config: Any, hop: int, samples: int) -> int:
        hops = samples // hop
        return self.embeddings(config, hops) if hops > 1 else 0  # spectra are divided by their spread


@frozen
class GraniteFamily(FrameFamily):
    """Granite Speech 5, a CTC model: two spectra with their changes are one row, and some layers halve the rows. Its
    attention sees blocks, so that the length has no limit of its own."""

    def most_hops(self, folder: Path, config: Any) -> int:  # noqa: ARG002
        return 100 * _MOST_SECONDS

    def factor(self, config: Any) -> int:
        return int(2 << len(config.encoder_config.subsample_layers))

    def embeddings(self, config: Any, hops: int) -> int:
        return -(-hops // 2) >> len(config.encoder_config.subsample_layers)

    def preparer(self, folder: Path, tokenizer: Any, config: Any, settings: ItemSettings) -> FrameItems:
        front = PairedDeltaMel.read(folder)
        read = partial(_rows, front)
        return self.items(folder, tokenizer, config, settings, read, front.hop_length, front.sampling_rate)


def _rows(front: PairedDeltaMel, samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    """Returns the rows of one piece of audio, all of which count."""
    rows = front(samples)
    return {"input_features": rows, "attention_mask": torch.ones(len(rows), dtype=torch.bool)}


def _features(extractor: Any, chosen: Mapping[str, Tensor], samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    """Returns the spectra of one piece of audio as the feature extractor makes them, which of them count, and the
    inputs in ``chosen``."""
    made = extractor([samples], sampling_rate=extractor.sampling_rate, return_tensors="pt")
    return {"input_features": made["input_features"][0], "attention_mask": made["attention_mask"][0], **chosen}


def _by_code(numbers: Mapping[str, int]) -> dict[str, int]:
    """Returns the ``numbers`` of languages by the codes of the languages and, in small letters, of their regions. Of a
    language that is named with regions only, the first stands for it."""
    found = {name.lower(): number for name, number in numbers.items() if _CODE.fullmatch(name)}
    for name, number in list(found.items()):
        found.setdefault(name.partition("-")[0], number)
    return found


@frozen(kw_only=True)
class FrameItems(AudioItems):
    """Audio for models that read frames: the decoder begins with the blank, and no text comes before."""

    frame_seconds: float
    languages: Mapping[str, int] = field(
        factory=dict
    )  # "de" -> the number that the encoder reads; empty: it reads none
    pieces: Pieces | None = field(default=None, repr=False)  # None: the encoder hears whole windows

    def spoken(self, item: EncoderItem, language: str) -> EncoderItem:
        """Returns ``item`` as it is read in one of ``languages``."""
        payload, number = self.in_language(item.payload, language), self.languages[language]
        return evolve(item, key=f"{item.key}, language {number}", payload=payload)

    def in_language(self, inputs: Mapping[str, Tensor], language: str | None) -> dict[str, Tensor]:
        """Returns the ``inputs`` of the encoder for one of ``languages``; ``None``: unchanged."""
        return dict(inputs) if language is None else {**inputs, "prompt_ids": torch.tensor(self.languages[language])}

    def begin(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Returns the start token alone. Raises `InvalidRequest` if there is a prompt."""
        start = (self.settings.start_id,)
        if prompt and (isinstance(prompt, str) or tuple(prompt) != start):
            raise InvalidRequest(
                f"a prompt of {len(prompt)} tokens or characters is given, but the model writes what it hears from the "
                "first frame on; allowed: audio=... alone"
            )
        return start


def find_frame_family(folder: Path, config: Mapping[str, Any]) -> FrameFamily | None:
    """Returns the family of a checkpoint by its config.json; ``None``: no family knows it.

    Raises:
        UnsupportedModel: the model is known, and cannot be run.
    """
    kind = config.get("model_type")
    if kind in _REFUSED:
        raise UnsupportedModel(
            f"{folder} ({kind}) is not supported, since {_REFUSED[kind]}; allowed: {', '.join(frame_model_types())}"
        )
    family = _families().get(kind) if isinstance(kind, str) else None
    return family if family is not None and config.get("architectures") == [family.loader] else None


def frame_model_types() -> tuple[str, ...]:
    """Every ``model_type`` with a family."""
    return tuple(_families())


def _families() -> dict[str, FrameFamily]:
    return {
        "parakeet_ctc": FrameFamily("ParakeetForCTC", predicts=False),
        "parakeet_rnnt": FrameFamily("ParakeetForRNNT"),
        "parakeet_tdt": FrameFamily("ParakeetForTDT"),
        "nemotron_asr_streaming": FrameFamily("NemotronAsrStreamingForRNNT", causal=True),
        "nemotron3_5_asr": FrameFamily("Nemotron3_5AsrForRNNT", causal=True),
        "granite_speech5_ctc": GraniteFamily("GraniteSpeech5ForCTC", predicts=False),
    }

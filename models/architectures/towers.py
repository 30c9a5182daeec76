"""Speech models whose processors in transformers need packages that are not installed with Triolet: mistral_common,
torchaudio, torchvision or peft. Prompts and features are made here instead, and adapters are merged when the model is
loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from ...core.errors import CheckpointError
from ..checkpoints.loading import load_part, place_of
from ..checkpoints.lora import merge_adapter
from .frontends import PairedMel, StackedFbank, TorchFeatures
from .heard import HeardAudio, check_samples
from .prompts import MediaPreparer, ReadItem

_VOXTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}[BEGIN_AUDIO][AUDIO]{% endif %}"
    "{% endfor %}{% endif %}[/INST]"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('roles are user and assistant') }}{% endif %}{% endfor %}"
)


@frozen(kw_only=True)
class Voxtral(HeardAudio):
    """Voxtral (Liu et al. 2025): audio of any length, filled up to whole windows of 30 seconds with 375 embeddings
    each."""

    architecture: str = "VoxtralForConditionalGeneration"
    around_audio: tuple[str, str] = ("[BEGIN_AUDIO]", "")
    windows: bool = True

    def processor(self, folder: Path, config: Any) -> Any:
        extractor = load_part("AutoFeatureExtractor", folder, trust_remote_code=False)
        self.check_windows(extractor, folder, config)
        return extractor

    def buffer_bytes(self, config: Any, dtype: torch.dtype) -> int:  # noqa: ARG002
        return 2 * int(config.audio_config.max_source_positions * config.audio_config.hidden_size)  # positions

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:
        lost = {"[INST]", "[/INST]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"} - tokenizer.get_vocab().keys()
        if lost:
            raise CheckpointError(f"the tokenizer has no {', '.join(sorted(lost))}; download the checkpoint again")
        return super().around(tokenizer, config)

    def template(self, processor: Any, tokenizer: Any) -> str | None:  # noqa: ARG002
        """Returns a template with the tokens of mistral_common for checkpoints without a template."""
        return None if tokenizer.chat_template else _VOXTRAL_CHAT

    def read(self, processor: Any, config: Any, token: str, item: np.ndarray[Any, Any]) -> ReadItem:
        check_samples(item, processor.sampling_rate)
        filled = {"padding": True, "pad_to_multiple_of": processor.n_samples, "truncation": False}
        made = processor(item, sampling_rate=processor.sampling_rate, return_tensors="pt", **filled)
        windows = made["input_features"][0].unflatten(1, (-1, processor.nb_max_frames)).transpose(0, 1).contiguous()
        audio = config.audio_config
        rows = len(windows) * audio.max_source_positions * audio.hidden_size // audio.intermediate_size
        return heard(windows, rows, token)


@frozen(kw_only=True)
class Fronted(HeardAudio):
    """A model that reads `TorchFeatures`."""

    front: type[TorchFeatures]
    alone: bool = True

    def processor(self, folder: Path, config: Any) -> Any:  # noqa: ARG002
        return self.front.read(folder)

    def features(self, front: Any, item: np.ndarray[Any, Any]) -> Tensor:
        """Returns the features [1, rows, values] of ``item``. Raises `InvalidRequest` for too few or too many
        samples."""
        check_samples(item, front.sampling_rate, least=front.least, most=front.longest)
        made: Tensor = front(item)[None]
        return made


@frozen(kw_only=True)
class GraniteSpeech(Fronted):
    """Granite Speech (Saon et al. 2025). Some checkpoints have an adapter in the decoder for prompts with audio. It is
    merged into the weights, and prompts without audio are refused."""

    front: type[TorchFeatures] = PairedMel

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        module = super().load(folder, dtype)
        config: Any = module.config
        if config.has_lora_adapter:
            merge_adapter(self.text(module), folder)
        return module

    def preparer(self, folder: Path, tokenizer: Any, config: Any, **about: Any) -> MediaPreparer:
        return evolve(super().preparer(folder, tokenizer, config, **about), needs_item=config.has_lora_adapter)

    def read(self, processor: Any, config: Any, token: str, item: np.ndarray[Any, Any]) -> ReadItem:
        features = self.features(processor, item)
        windows = -(-features.shape[1] // config.window_size)
        return heard(features, windows * (config.window_size // config.downsample_rate), token)


@frozen(kw_only=True)
class FunAsr(Fronted):
    """Fun-ASR-Nano (An et al. 2025): an embedding for each 60 ms of up to two minutes."""

    architecture: str = "FunAsrNanoForConditionalGeneration"
    front: type[TorchFeatures] = StackedFbank

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        module = super().load(folder, dtype)
        config: Any = module.config
        config.adaptor_config._attn_implementation = "eager"  # transformers chooses it too, with a warning
        return module

    def buffer_bytes(self, config: Any, dtype: torch.dtype) -> int:  # noqa: ARG002
        audio = config.audio_config
        return 4 * int(audio.max_position_embeddings * audio.input_size)

    def processor(self, folder: Path, config: Any) -> Any:
        front: Any = super().processor(folder, config)
        return evolve(front, longest=front.most_samples(config.audio_config.max_position_embeddings - 1))

    def read(self, processor: Any, config: Any, token: str, item: np.ndarray[Any, Any]) -> ReadItem:  # noqa: ARG002
        features = self.features(processor, item)
        rows = features.shape[1]
        return heard(features, rows, token, input_features_mask=torch.ones(1, rows, dtype=torch.long))


@frozen(kw_only=True)
class Phi4Multimodal(HeardAudio):
    """Phi-4-multimodal (Abouelenin et al. 2025) for audio. Its adapter for speech is merged into the weights of the
    decoder, so prompts without audio are refused. Images would need the other adapter: their encoder is not loaded."""

    architecture: str = "Phi4MultimodalForCausalLM"
    language: str = "model"
    left_out: str = "model.embed_tokens_extend.image_embed"

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        """Moves the encoder of audio out of the decoder's module."""
        loaded = super().load(folder, dtype)
        module: Any = loaded
        within, config = module.model.embed_tokens_extend, module.config
        module.audio_embed = within.audio_embed
        del within.audio_embed
        within.config = copy(config)
        config.audio_config = config.vision_config = None  # else the encoder would get the attention of the decoder
        merge_adapter(module.model, folder, "speech-lora")
        return loaded

    def preparer(self, folder: Path, tokenizer: Any, config: Any, **about: Any) -> MediaPreparer:
        return evolve(super().preparer(folder, tokenizer, config, **about), needs_item=True)

    def placeholder(self, tokenizer: Any, config: Any) -> int:  # noqa: ARG002
        return int(config.audio_config.audio_token_id)

    def unread(self, config: Any) -> tuple[int, ...]:
        return (config.vision_config.image_token_id,)

    def processor(self, folder: Path, config: Any) -> Any:  # noqa: ARG002
        return load_part("Phi4MultimodalFeatureExtractor", folder)

    def read(self, processor: Any, config: Any, token: str, item: np.ndarray[Any, Any]) -> ReadItem:  # noqa: ARG002
        check_samples(item, processor.sampling_rate, least=processor.win_length)
        made = processor(item, sampling_rate=processor.sampling_rate, return_tensors="pt")
        return heard(made["audio_input_features"], int(made["audio_embed_sizes"]), token)

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes the items one by one, since the encoder reads the padding of shorter ones."""
        made: Any = module.audio_embed
        rows = list[Tensor]()
        with torch.no_grad():
            for payload in payloads:
                hidden = made.encoder(payload["input_features"].to(*place_of(made)), None)
                hidden = nn.functional.gelu(made.up_proj_for_speech(hidden))
                rows.append(made.down_proj_for_speech(hidden)[0])
        return rows


def heard(features: Tensor, rows: int, token: str, **others: Tensor) -> ReadItem:
    """Returns an item with ``rows`` embeddings. ``others`` are further inputs of the encoder."""
    payload = {"input_features": features, **others, "embeddings": torch.tensor(rows)}
    return ReadItem(payload=payload, text=token * rows, embeddings=rows)

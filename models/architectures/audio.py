"""The family that reads audio among the tokens of a prompt: Qwen2-Audio (Chu et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.errors import InvalidRequest
from ..checkpoints.loading import apart, load_part, stacked
from .heard import HeardAudio, check_samples
from .prompts import ReadItem


@frozen(kw_only=True)
class QwenAudio(HeardAudio):
    """Qwen2-Audio: a window of up to 30 seconds becomes one embedding for each 40 ms."""

    architecture: str = "Qwen2AudioForConditionalGeneration"
    windows: bool = True

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes one batch of padded windows. The padding after each window's audio is masked, and its embeddings are
        cut off."""
        inputs = stacked(module, payloads)
        features, frames = inputs["input_features"], inputs["frames"]
        model: Any = module.get_submodule("model")
        with torch.no_grad():
            heard, embeddings = model.audio_tower._get_feat_extract_output_lengths(frames)
            mask = self._mask(model, heard, (features.shape[-1] - 2) // 2 + 1, features.dtype)
            hidden = model.audio_tower(features, attention_mask=mask).last_hidden_state
            rows = model.multi_modal_projector(hidden)
        return apart([row[:length] for row, length in zip(rows, embeddings.tolist(), strict=True)])

    def _mask(self, model: Any, heard: Tensor, length: int, dtype: torch.dtype) -> Any:
        """Returns the mask of transformers' own forward. The first ``heard`` positions of each window attend to each
        other.
        """
        from transformers.masking_utils import create_bidirectional_mask

        shown = torch.arange(length, device=heard.device) < heard[:, None]
        shape = torch.zeros(len(heard), length, 1, dtype=dtype, device=heard.device)
        mask: Any = create_bidirectional_mask(
            config=model.audio_tower.config, inputs_embeds=shape, attention_mask=shown.long()
        )
        return mask

    def processor(self, folder: Path, config: Any) -> Any:
        extractor = load_part("AutoFeatureExtractor", folder, trust_remote_code=False)
        self.check_windows(extractor, folder, config)
        return extractor

    def template(self, processor: Any, tokenizer: Any) -> str | None:
        """Returns the template that transformers' processor has for checkpoints without a template."""
        from transformers import Qwen2AudioProcessor

        if tokenizer.chat_template:
            return None
        make: Any = Qwen2AudioProcessor  # untyped there
        template: str = make(processor, tokenizer).chat_template
        return template

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:  # noqa: ARG002
        """Returns the begin and end tokens of audio. The checkpoint's processor knows them only by these names."""
        known = tokenizer.get_vocab()
        begin, end = (text if text in known else "" for text in ("<|audio_bos|>", "<|audio_eos|>"))
        return begin, end

    def read(self, processor: Any, config: Any, token: str, item: np.ndarray[Any, Any]) -> ReadItem:  # noqa: ARG002
        check_samples(item, processor.sampling_rate, most=processor.n_samples)
        outputs = processor(
            [item],
            sampling_rate=processor.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = outputs["attention_mask"][0].sum()
        embeddings = ((int(frames) - 1) // 2 + 1 - 2) // 2 + 1  # a convolution of stride 2, then means of two
        if embeddings < 1:
            raise InvalidRequest(
                f"the audio has {len(item)} samples, too few for one embedding; allowed: 40 ms or more"
            )
        return ReadItem(
            payload={"input_features": outputs["input_features"][0], "frames": frames},
            text=token * embeddings,
            embeddings=embeddings,
        )

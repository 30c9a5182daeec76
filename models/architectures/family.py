"""`Family`: how a multimodal checkpoint's images or audio are encoded, and where their embeddings stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.request import Placeholder
from ..checkpoints.loading import load_module, load_part, processor_template
from ..checkpoints.parts import Find
from .prompts import MediaPreparer, Read


@frozen
class Family:
    """One kind of multimodal checkpoint. It has no state."""

    architecture: str  # the class of transformers that loads it
    language: str = "model.language_model"  # the name of the language model, whose attention becomes ours
    medium: str = "image"  # or "audio"

    def load(self, folder: Path, dtype: torch.dtype, *, without: Find | None = None) -> nn.Module:
        """The model on the CPU, in eval mode: whole, or ``without`` some parts. See `load_module` for its errors."""
        return load_module(self.architecture, folder, dtype, without=without)

    def text(self, module: nn.Module) -> nn.Module:
        """The language model."""
        part: nn.Module = module.get_submodule(self.language)
        return part

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings of each payload, [embeddings, hidden], each in storage of its own."""
        raise NotImplementedError

    def read(self, processor: Any, config: Any, token: str, item: Any) -> Read:
        """One image or audio as ``processor`` reads it; ``token`` stands for each of its embeddings. Called in threads.

        Raises:
            InvalidRequest: it cannot be read; the message does not say which item it is.
        """
        raise NotImplementedError

    def positions(
        self,
        module: nn.Module,  # noqa: ARG002
        token_ids: Sequence[int],  # noqa: ARG002
        placeholders: Sequence[Placeholder],  # noqa: ARG002
    ) -> tuple[Tensor, int] | None:
        """Positions of a prompt in three dimensions, int64 [3, len], and the number that is added to a later token's
        index to give its position in each of them. ``None``: a position is the index."""
        return None

    def preparer(
        self, folder: Path, tokenizer: Any, config: Any, *, identity: str, hidden: int, dtype: torch.dtype
    ) -> MediaPreparer:
        """The preparer that turns prompts into tokens and items of ``hidden`` numbers of ``dtype`` for each embedding;
        ``identity`` names the weights, and goes into content keys.

        Raises:
            UnsupportedModel: a variant that is not read.
        """
        processor, placeholder_id = self.processor(folder, config), getattr(config, f"{self.medium}_token_id")
        return MediaPreparer.reading(
            tokenizer,
            partial(self.read, processor, config, tokenizer.convert_ids_to_tokens(placeholder_id)),
            medium=self.medium,
            sampling_rate=getattr(processor, "sampling_rate", 0),
            placeholder_id=placeholder_id,
            identity=(identity, config.model_type, str(dtype), processor.to_json_string()),
            embedding_bytes=hidden * dtype.itemsize,
            chat_template=processor_template(folder) or self.template(processor, tokenizer),
            unread_ids=self.unread(config),
            around=self.around(tokenizer, config),
        )

    def processor(self, folder: Path, config: Any) -> Any:  # noqa: ARG002
        """transformers' processor of images, or of audio. Raises as `preparer`."""
        return load_part("AutoImageProcessor", folder, backend="pil", trust_remote_code=False)

    def template(self, processor: Any, tokenizer: Any) -> str | None:  # noqa: ARG002
        """The chat template of checkpoints that have none in a file of its own; ``None``: the tokenizer's."""
        return None

    def unread(self, config: Any) -> tuple[int, ...]:  # noqa: ARG002
        """The tokens that stand for what is not read, such as videos."""
        return ()

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:  # noqa: ARG002
        """The texts that the model knows before and after the placeholder of an item."""
        return "", ""

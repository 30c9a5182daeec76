"""`Family`: the encoding of a multimodal checkpoint's images or audio, and the places of their embeddings in the
prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.aligning import TextAligner
from ...core.errors import CheckpointError
from ...core.request import Placeholder
from ..checkpoints.loading import load_module, load_part, processor_template
from .prompts import MediaPreparer, ReadItem, settled, tokenize


@frozen
class Family:
    """One kind of multimodal checkpoint. It has no state."""

    architecture: str  # the class of transformers that loads it
    language: str = "model.language_model"  # the submodule of the language model, whose attention becomes ours
    medium: str = "image"  # or "audio"
    left_out: str = ""  # the submodule that is not loaded; its weights' names in the files begin with it
    mutual: bool = False  # the rows of an item see each other, those behind them too
    in_windows: bool = False  # they do so in layers with windows alone
    added: bool = False  # the embeddings of a prompt's one item are added to those of its tokens and of later ones

    def of(self, config: Any) -> Self | None:  # noqa: ARG002
        """Returns the family as a configuration has it; ``None``: such a model reads text alone."""
        return self

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        """Returns the model on the CPU, in eval mode. Raises the errors of `load_module`."""
        module = load_module(self.architecture, folder, dtype, left_out=self.left_out)
        if self.deeper(module.config):
            self.text(module).register_forward_pre_hook(_tell_layers, with_kwargs=True)
        return module

    def text(self, module: nn.Module) -> nn.Module:
        """The language model within ``module``."""
        part: nn.Module = module.get_submodule(self.language)
        return part

    def as_text(self, module: nn.Module) -> nn.Module:
        """The model as transformers computes text alone."""
        return module

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Returns the embeddings [embeddings, (1 + deeper) * hidden] of each payload, in storage of their own."""
        raise NotImplementedError

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:
        """Reads one image or audio with ``processor``. In the prompt, one ``token`` stands for each embedding. Called
        in threads.

        Raises:
            InvalidRequest: the item cannot be read; the message does not say which item it is.
        """
        raise NotImplementedError

    def positions(
        self,
        module: nn.Module,  # noqa: ARG002
        token_ids: Sequence[int],  # noqa: ARG002
        placeholders: Sequence[Placeholder],  # noqa: ARG002
    ) -> tuple[Tensor, int] | None:
        """Returns the positions of a prompt in three dimensions, int64 [3, len], and an offset. A later token has its
        index plus the offset as its position in all three. ``None``: every position is the token's index.
        """
        return None

    def preparer(
        self, folder: Path, tokenizer: Any, config: Any, *, identity: str, hidden: int, dtype: torch.dtype
    ) -> MediaPreparer:
        """The preparer that turns prompts into tokens and items. Each embedding has ``hidden`` numbers of ``dtype``.
        ``identity`` names the weights, and goes into content keys.

        Raises:
            UnsupportedModel: the checkpoint is a variant that is not supported.
            CheckpointError: the tokenizer does not know the placeholder.
        """
        processor, placeholder_id = self.processor(folder, config), self.placeholder(tokenizer, config)
        embedded_id = self.embedded(tokenizer, config)
        placeholder = tokenizer.convert_ids_to_tokens(placeholder_id)
        if placeholder is None or tokenize(tokenizer, placeholder, special=False).count(placeholder_id) != 1:
            raise CheckpointError(
                f"config.json has {placeholder_id} for the placeholder of an item, but the tokenizer does not find "
                "this token in text; save the tokenizer with its special tokens"
            )
        before, after = self.around(tokenizer, config)
        unread = [(tokenizer.convert_ids_to_tokens(token), token) for token in self.unread(config)]
        names = (identity, config.model_type, str(dtype), processor.to_json_string())
        return MediaPreparer(
            tokenizer=settled(tokenizer),
            processor=processor,
            read=partial(self.read, processor, config, tokenizer.convert_ids_to_tokens(embedded_id)),
            medium=self.medium,
            start=self.start(processor, tokenizer, placeholder_id),
            needs_prompt=not self.added,
            media=frozenset({self.medium}),
            sampling_rate=getattr(processor, "sampling_rate", 0),
            placeholder=placeholder,
            placeholder_id=placeholder_id,
            embedded_id=embedded_id,
            written="" if self.added else before + placeholder + after,
            identity=hashlib.blake2b("\0".join(names).encode()).hexdigest(),
            embedding_bytes=hidden * (1 + self.deeper(config)) * dtype.itemsize,
            chat_template=processor_template(folder) or self.template(processor, tokenizer),
            unread=tuple(one for one in unread if one[0]),  # a tokenizer may know none of videos
        )

    def deeper(self, config: Any) -> int:
        """The number of layers of the decoder, from the first on, to whose outputs an item adds something too (Meng et
        al. 2024, "DeepStack"). An embedding has as many more parts of the decoder's width."""
        return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", ()))

    def placeholder(self, tokenizer: Any, config: Any) -> int:  # noqa: ARG002
        """The token that stands for an item in a prompt."""
        return int(getattr(config, f"{self.medium}_token_id"))

    def embedded(self, tokenizer: Any, config: Any) -> int:
        """The token that stands for each embedding of an item."""
        return self.placeholder(tokenizer, config)

    def aligner(self, folder: Path, config: Any, preparer: MediaPreparer) -> TextAligner | None:  # noqa: ARG002
        """Returns the aligner of a checkpoint that classifies tokens by time (`Kind.ALIGNER`)."""
        return None

    def processor(self, folder: Path, config: Any) -> Any:  # noqa: ARG002
        """Returns transformers' processor for images or audio. Raises the errors of `preparer`."""
        return load_part("AutoImageProcessor", folder, backend="pil", trust_remote_code=False)

    def template(self, processor: Any, tokenizer: Any) -> str | None:  # noqa: ARG002
        """Returns the chat template for checkpoints that have no file with a template; ``None``: the tokenizer's
        template is used."""
        return None

    def buffer_bytes(self, config: Any, dtype: torch.dtype) -> int:  # noqa: ARG002
        """The bytes of the encoder beside its stored weights in the engine's ``dtype``: tables that are computed when
        it is loaded, and float32 that stays float32, less what is not loaded."""
        return 0

    def state_bytes(self, config: Any, dtype: torch.dtype) -> int:  # noqa: ARG002
        """The most bytes of the state of an encoder that hears audio piece by piece; 0: it hears whole items."""
        return 0

    def start(self, processor: Any, tokenizer: Any, placeholder: int) -> tuple[int, ...]:  # noqa: ARG002
        """Returns the prompt of an item that is `added`, if the caller gives none."""
        return ()

    def read_as(self, config: Any) -> Mapping[int, int]:  # noqa: ARG002
        """Tokens that the decoder reads as others, wherever no item stands."""
        return {}

    def together(self, folder: Path, config: Any) -> int:  # noqa: ARG002
        """The most rows that see each other; 0: none do. Raises the errors of `preparer`."""
        return 0

    def unread(self, config: Any) -> tuple[int, ...]:  # noqa: ARG002
        """The ids of tokens that stand for media which are not read, such as videos."""
        return ()

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:  # noqa: ARG002
        """The texts that the model expects before and after the placeholder of an item."""
        return "", ""


def _tell_layers(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Gives the decoder what is added to the outputs of its layers, which the model itself would only read beside
    pixels."""
    added = getattr(given.get("triolet"), "added", ())
    if not added:
        return None
    rows = torch.ones(added[0].shape[:1], dtype=torch.bool, device=added[0].device)[None]
    return args, {**given, "visual_pos_masks": rows, "deepstack_visual_embeds": added}

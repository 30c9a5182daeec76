"""Families whose images are encoded one by one: transformers' `get_image_features` makes the embeddings of an image,
and its processor's rules say which tokens they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ..checkpoints.loading import placed
from .family import Family
from .prompts import ReadItem
from .vision import process

_GOT_CHAT = (
    "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<img><imgpad></img>\n{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@frozen(kw_only=True)
class Pictures(Family):
    """A family with one projector behind its encoder. Subclasses write the tokens of an image.

    Args:
        inputs: what `get_image_features` reads, of what the image processor makes.
        around_image: the texts that a chat template writes around the placeholder.
    """

    inputs: tuple[str, ...] = ("pixel_values",)
    around_image: tuple[str, str] = ("", "")

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes the images one by one, since each has a size and a number of parts of its own."""
        model: Any = module.get_submodule("model")
        with torch.no_grad():
            found = [model.get_image_features(**placed(module, payload), return_dict=True) for payload in payloads]
        return [torch.cat([part.flatten(0, -2) for part in one.pooler_output]) for one in found]

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:
        outputs = process(processor, item, **self.options(config))
        payload = {name: torch.as_tensor(outputs[name]) for name in self.inputs}
        text = self.written(config, payload, token)
        return ReadItem(payload=payload, text=text, embeddings=text.count(token))

    def options(self, config: Any) -> dict[str, Any]:  # noqa: ARG002
        """Returns what transformers' processor tells the image processor."""
        return {}

    def written(self, config: Any, payload: Mapping[str, Tensor], token: str) -> str:
        """Returns the text of an image in the prompt, with a ``token`` for each embedding."""
        raise NotImplementedError

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:  # noqa: ARG002
        return self.around_image


@frozen(kw_only=True)
class InternVL(Pictures):
    """InternVL (Chen et al. 2024): an image is cut into tiles, and the whole image is the last one."""

    architecture: str = "InternVLForConditionalGeneration"
    around_image: tuple[str, str] = ("", "\n")

    def options(self, config: Any) -> dict[str, Any]:  # noqa: ARG002
        return {"crop_to_patches": True}

    def written(self, config: Any, payload: Mapping[str, Tensor], token: str) -> str:
        return f"<img>{token * config.image_seq_length * len(payload['pixel_values'])}</img>"


@frozen(kw_only=True)
class GotOcr(Pictures):
    """GOT-OCR 2.0 (Wei et al. 2024): every page becomes one square. Its request is the text " OCR: "."""

    architecture: str = "GotOcr2ForConditionalGeneration"
    around_image: tuple[str, str] = ("<img>", "</img>\n")

    def template(self, processor: Any, tokenizer: Any) -> str | None:  # noqa: ARG002
        """Returns a template with the conversation that transformers' processor writes, since checkpoints have none."""
        return None if tokenizer.chat_template else _GOT_CHAT

    def options(self, config: Any) -> dict[str, Any]:  # noqa: ARG002
        return {"crop_to_patches": False}

    def written(self, config: Any, payload: Mapping[str, Tensor], token: str) -> str:
        side: int = (
            payload["pixel_values"].shape[-1] // config.vision_config.patch_size // 4
        )  # two convolutions halve it
        return token * side**2


@frozen(kw_only=True)
class Pixtral(Pictures):
    """Mistral 3 and Ministral 3, with the encoder of Pixtral (Agrawal et al. 2024): an image of any size, line by
    line."""

    architecture: str = "Mistral3ForConditionalGeneration"
    inputs: tuple[str, ...] = ("pixel_values", "image_sizes")

    def options(self, config: Any) -> dict[str, Any]:
        return {"patch_size": _side(config)}

    def written(self, config: Any, payload: Mapping[str, Tensor], token: str) -> str:
        height, width = _cells(config, payload)
        return "[IMG_BREAK]".join([token * width] * height) + "[IMG_END]"


@frozen(kw_only=True)
class LightOnOcr(Pictures):
    """LightOnOCR (2025), with the encoder of Pixtral."""

    architecture: str = "LightOnOcrForConditionalGeneration"
    inputs: tuple[str, ...] = ("pixel_values", "image_sizes")

    def written(self, config: Any, payload: Mapping[str, Tensor], token: str) -> str:
        height, width = _cells(config, payload)
        return token * (height * width)


def _side(config: Any) -> int:
    """The pixels of a side of the square that becomes one embedding."""
    return int(config.vision_config.patch_size * config.spatial_merge_size)


def _cells(config: Any, payload: Mapping[str, Tensor]) -> tuple[int, int]:
    height, width = payload["image_sizes"][0].tolist()
    return height // _side(config), width // _side(config)

"""Families whose images are encoded one by one: transformers' `get_image_features` makes the embeddings of an image,
and its processor's rules say which tokens they take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from PIL import Image
from torch import Tensor, nn

from ...core.errors import UnsupportedModel
from ..checkpoints.loading import placed
from .family import Family
from .prompts import ReadItem
from .vision import CLASS_TOKENS, process, text_of_tiles

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
        return [
            torch.cat([_joined(parts) for parts in (one.pooler_output, *getattr(one, "deepstack_features", ()))], 1)
            for one in found
        ]

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:
        return self.made(config, token, process(processor, item, **self.options(config)))

    def made(self, config: Any, token: str, outputs: Mapping[str, Any]) -> ReadItem:
        """Returns the image of which the image processor made ``outputs``."""
        payload = {name: torch.as_tensor(outputs[name]) for name in self.inputs if name in outputs}
        text = self.written(config, outputs, token)
        return ReadItem(payload=payload, text=text, embeddings=text.count(token))

    def options(self, config: Any) -> dict[str, Any]:  # noqa: ARG002
        """Returns what transformers' processor tells the image processor."""
        return {}

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        """Returns the text of an image in the prompt, with a ``token`` for each embedding. ``outputs``: of the image
        processor."""
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

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        return f"<img>{token * config.image_seq_length * len(outputs['pixel_values'])}</img>"


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

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        side: int = (
            outputs["pixel_values"].shape[-1] // config.vision_config.patch_size // 4
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

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        height, width = _cells(config, outputs)
        return "[IMG_BREAK]".join([token * width] * height) + "[IMG_END]"


@frozen(kw_only=True)
class LightOnOcr(Pictures):
    """LightOnOCR (2025), with the encoder of Pixtral."""

    architecture: str = "LightOnOcrForConditionalGeneration"
    inputs: tuple[str, ...] = ("pixel_values", "image_sizes")

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        height, width = _cells(config, outputs)
        return token * (height * width)


@frozen(kw_only=True)
class GraniteDocling(Pictures):
    """Granite for Docling (IBM 2026): a page is cut into square tiles, and the whole page is one more tile. Layers of
    the encoder also go to the first layers of the decoder."""

    architecture: str = "GraniteDoclingForConditionalGeneration"
    language: str = "model.text_model"
    inputs: tuple[str, ...] = ("pixel_values", "pixel_attention_mask", "tile_fine_mask")

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        vision, rows, columns = config.vision_config, outputs["rows"][0][0], outputs["cols"][0][0]
        side = vision.image_size // vision.patch_size // vision.scale_factor
        tile = token * (2 * side if "tile_fine_mask" in outputs else side) ** 2
        if rows * columns == 1:
            return f"<fake_token_around_image><row_1_col_1>{tile}\n"
        return text_of_tiles(rows, columns, tile)


@frozen(kw_only=True)
class LlavaNext(Pictures):
    """LLaVA-NeXT (Liu et al. 2024): the whole image as a square, then the tiles of one of the sizes that the
    configuration names. What fills up the tiles is left out, and each line ends with an embedding of its own."""

    architecture: str = "LlavaNextForConditionalGeneration"
    inputs: tuple[str, ...] = ("pixel_values", "image_sizes")
    around_image: tuple[str, str] = ("", "\n")

    def processor(self, folder: Path, config: Any) -> Any:
        kind, strategy = config.vision_config.model_type, config.vision_feature_select_strategy
        if CLASS_TOKENS.get(kind) != (strategy == "default"):
            raise UnsupportedModel(
                f"the LLaVA checkpoint has a {kind} encoder and vision_feature_select_strategy={strategy!r}; allowed: "
                "clip_vision_model and 'default', or siglip_vision_model and 'full'"
            )
        return super().processor(folder, config)

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        from transformers.models.llava_next import modeling_llava_next as of_llava

        own: Any = of_llava
        vision, size = config.vision_config, tuple(map(int, outputs["image_sizes"][0]))
        side, sizes = vision.image_size // vision.patch_size, config.image_grid_pinpoints
        rows, columns = own.get_anyres_image_grid_shape(size, sizes, vision.image_size)
        shown = own.unpad_image(torch.empty(1, rows * side, columns * side, dtype=torch.bool, device="meta"), size)
        height, width = self.lines(config, *shown.shape[1:])
        return token * int(side**2 + height * (width + 1))

    def lines(self, config: Any, height: int, width: int) -> tuple[int, int]:  # noqa: ARG002
        """Returns how many lines of how many embeddings are made of as many of the encoder."""
        return height, width


@frozen(kw_only=True)
class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision (Li et al. 2024): as LLaVA-NeXT, but lines are made smaller if there are many. Of several images
    in a prompt, each is the square alone."""

    architecture: str = "LlavaOnevisionForConditionalGeneration"
    inputs: tuple[str, ...] = ("pixel_values", "image_sizes", "batch_num_images")

    def unread(self, config: Any) -> tuple[int, ...]:
        return (config.video_token_id,)

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:
        dot = Image.new("RGB", (1, 1))
        both = process(lambda images, **told: processor([[*images, dot]], **told), item)
        beside = self.made(config, token, {name: both[name][:1] for name in self.inputs})
        return evolve(super().read(processor, config, token, item), beside=beside)

    def written(self, config: Any, outputs: Mapping[str, Any], token: str) -> str:
        if int(outputs["batch_num_images"][0]) == 1:
            return super().written(config, outputs, token)
        side: int = config.vision_config.image_size // config.vision_config.patch_size
        return token * (side**2 + 1)

    def lines(self, config: Any, height: int, width: int) -> tuple[int, int]:
        side, most = config.vision_config.image_size // config.vision_config.patch_size, config.vision_aspect_ratio
        ratio = math.sqrt(height * width / (int(most.removeprefix("anyres_max_")) * side**2))
        return (int(height // ratio), int(width // ratio)) if ratio > 1.1 else (height, width)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the embeddings of the tiles of an image, one after the other."""
    return torch.cat([part.flatten(0, -2) for part in parts])


def _side(config: Any) -> int:
    """The pixels of a side of the square that becomes one embedding."""
    return int(config.vision_config.patch_size * config.spatial_merge_size)


def _cells(config: Any, outputs: Mapping[str, Any]) -> tuple[int, int]:
    height, width = map(int, outputs["image_sizes"][0])
    return height // _side(config), width // _side(config)

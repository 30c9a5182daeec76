"""Tiny multimodal checkpoints for tests, each with transformers' own processor, and pictures and sounds of noise."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import asdict, frozen
from PIL import Image
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

from triolet.models.architectures.families import Family, find_family
from triolet.models.architectures.gemma4 import Squares
from triolet.models.architectures.lfm2_vl import TiledPatches
from triolet.models.architectures.prompts import MediaPreparer
from triolet.models.checkpoints.loading import read_tokenizer

from .towers import TOWERS, processed, reference_of

HIDDEN = 48
_HEARD = {
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "glmasr": "<|begin_of_audio|><|pad|><|end_of_audio|>",
    "audioflamingo3": "<sound>",
    "moss_transcribe_diarize": "<|audio_start|><|audio_pad|><|audio_end|>",
    "vibevoice_asr": "<|object_ref_start|><|box_start|><|object_ref_end|>",
}
PLACEHOLDERS = {  # one item, as a user writes it
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3_vision": "<start_of_image>",
    "gemma4_vision": "<|image|>",
    "gemma4_unified": "<|image|>",
    "llava": "<image>",
    "llava_next": "<image>",
    "llava_onevision": "<image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "internvl": "<IMG_CONTEXT>",
    "lfm2_vl": "<image>",
    "mistral3": "[IMG]",
    "lighton_ocr": "<|image_pad|>",
    "granite_docling": "<image>",
    "got_ocr2": "<img><imgpad></img>",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    **dict.fromkeys(("glm_ocr", "glm4v", "glm4v_moe", "glm46v"), "<|begin_of_image|><|image|><|end_of_image|>"),
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    **_HEARD,
    **TOWERS,
}
SPEECH = tuple(_HEARD)  # their folders have processors of their own
HEARING = ("qwen2_audio", *SPEECH, *TOWERS)
_PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLProcessor", {"video_processor": None}),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", {"video_processor": None}),
    "qwen3_vl": ("Qwen3VLProcessor", {"video_processor": None}),
    "qwen3_vl_moe": ("Qwen3VLProcessor", {"video_processor": None}),
    "qwen3_5": ("Qwen3VLProcessor", {"video_processor": None}),
    "gemma3_vision": ("Gemma3Processor", {"image_seq_length": 9}),
    "gemma4_vision": ("Gemma4Processor", {"feature_extractor": None, "video_processor": None}),
    "gemma4_unified": ("Gemma4UnifiedProcessor", {"feature_extractor": None, "video_processor": None}),
    "llava": (
        "LlavaProcessor",
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": (
        "LlavaNextProcessor",
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        {
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
            "video_processor": None,
        },
    ),
    "idefics3": ("Idefics3Processor", {"image_seq_len": 4}),
    "smolvlm": ("SmolVLMProcessor", {"image_seq_len": 4, "video_processor": None}),
    "internvl": ("InternVLProcessor", {"image_seq_length": 4, "video_processor": None}),
    "lfm2_vl": ("Lfm2VlProcessor", {}),
    "mistral3": ("PixtralProcessor", {"patch_size": 8, "spatial_merge_size": 2}),
    "lighton_ocr": ("LightOnOcrProcessor", {"patch_size": 8, "spatial_merge_size": 2}),
    "got_ocr2": ("GotOcr2Processor", {}),
    "granite_docling": ("GraniteDoclingProcessor", {"image_seq_len": 4}),
    "paddleocr_vl": ("PaddleOCRVLProcessor", {}),
    **dict.fromkeys(("glm_ocr", "glm4v", "glm4v_moe", "glm46v"), ("Glm46VProcessor", {"video_processor": None})),
    "qwen2_audio": ("Qwen2AudioProcessor", {}),
}
_MODULES = {  # of processors
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "gemma3_vision": "gemma3",
    "gemma4_vision": "gemma4",
    "mistral3": "pixtral",
    **dict.fromkeys(("glm_ocr", "glm4v", "glm4v_moe"), "glm46v"),
}


@frozen(kw_only=True, eq=False)
class Checkpoint:
    name: str
    folder: Path
    family: Family
    module: Any
    config: Any
    tokenizer: Any
    preparer: MediaPreparer
    reference: Any  # generates as transformers does

    @classmethod
    def open(cls, name: str, folder: Path) -> Checkpoint:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = read_tokenizer(folder)
        family = find_family(config)
        assert family is not None
        module = family.load(folder, torch.float32)
        return cls(
            name=name,
            folder=folder,
            family=family,
            module=module,
            reference=reference_of(name, folder, module),
            config=config,
            tokenizer=tokenizer,
            preparer=make_preparer(folder, family, config, tokenizer),
        )

    @property
    def placeholder(self) -> str:
        return PLACEHOLDERS[self.name]

    def items(self, *seeds: int) -> list[Any]:
        """Pictures, or sounds, each of another size."""
        if self.name in TOWERS:
            return [sound(3000 + 16_000 * seed, seed) for seed in seeds]
        if self.name in SPEECH:  # up to three windows
            return [sound(3000 + 12_000 * seed, seed) for seed in seeds]
        if self.name == "qwen2_audio":
            return [sound(2000 + 3000 * seed, seed) for seed in seeds]
        sizes = [(40, 60), (64, 30), (17, 90)]
        return [picture(*sizes[seed % 3], seed) for seed in seeds]

    def prepare(self, prompt: Any, items: list[Any]) -> Any:
        medium = "audio" if self.name in HEARING else "images"
        return self.preparer.prepare(prompt, **{medium: items})

    def process(self, prompt: str, items: list[Any]) -> dict[str, Any]:
        """What the checkpoint's own processor makes of it."""
        if self.name in TOWERS:
            return processed(self.folder, self.reference, self.tokenizer, prompt, items)
        processor = make_processor(self.name, self.folder)
        if self.name in SPEECH:
            return listened(processor, prompt, items)
        if self.name == "qwen2_audio":
            rate = processor.feature_extractor.sampling_rate
            return dict(processor(text=prompt, audio=items, sampling_rate=rate, return_tensors="pt"))
        more = {"num_image_tokens": 4} if self.name == "got_ocr2" else {}
        given = (
            [items] if self.name == "llava_onevision" else items
        )  # the images of one prompt, as its template has them
        return dict(processor(text=[prompt], images=given, return_tensors="pt", **more))


def listened(processor: Any, prompt: str, items: list[Any]) -> dict[str, Any]:
    """What a speech model's processor makes of a prompt and of each item alone, since Qwen3-ASR's gives a shorter item
    other features in a batch."""
    made = dict(processor(text=[prompt], audio=items, return_tensors="pt"))
    alone = [processor(text=[processor.audio_token], audio=[item], return_tensors="pt") for item in items]
    for name in made.keys() - {"input_ids", "attention_mask"}:
        parts = [each[name] for each in alone]
        longest = max(part.shape[-1] for part in parts)
        made[name] = torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts])
    return {**made, "sample": False} if "input_values" in made else made  # VibeVoice's


def make_preparer(folder: Path, family: Family, config: Any, tokenizer: Any, **changes: Any) -> Any:
    options = {"identity": "weights", "hidden": HIDDEN, "dtype": torch.float32, **changes}
    return family.preparer(folder, tokenizer, config, **options)


@cache
def make_processor(name: str, folder: Path) -> Any:
    """transformers' processor; where it wants one for videos, which needs torchvision, it gets none, and where it wants
    one audio in each prompt, it takes several."""
    if name in SPEECH:
        found: Any = AutoProcessor.from_pretrained(folder)
        found.__class__ = type("Lenient", (type(found),), {"validate_inputs": lambda self, **given: None})
        return found
    class_name, options = _PROCESSORS[name]
    module = _MODULES.get(name, name)
    if module == "pixtral":  # its processor imports a function from the other form, which needs torchvision
        source = "transformers.models.pixtral.image_processing{}_pixtral"
        sys.modules.setdefault(source.format(""), importlib.import_module(source.format("_pil")))
    wanted = getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), class_name)

    class Processor(wanted):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None or isinstance(argument, Tiles):
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name == "qwen2_audio":
        part = {"feature_extractor": AutoFeatureExtractor.from_pretrained(folder)}
    elif name == "lfm2_vl":
        part = {"image_processor": Tiles(TiledPatches.read(folder))}
    elif name == "gemma4_unified":
        part = {"image_processor": FilledUp(Squares.read(folder))}
    else:
        part = {"image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil")}
    return Processor(**part, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **options)


class Tiles:
    """LFM2-VL's image processor, as its processor calls it. transformers' own needs torchvision; where this is
    installed, its patches are the same, bit by bit."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        for name, value in asdict(settings).items():
            setattr(self, name, value)

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> Any:
        made = [self.settings([image]) for image in images[0]]
        told = {name: torch.cat([one[name] for one in made]) for name in made[0] if name != "grid"}
        rows, columns = zip(*(one["grid"] for one in made), strict=True)
        sizes = [(one["spatial_shapes"][-1] * self.settings.encoder_patch_size).tolist() for one in made]
        return {**told, "image_rows": rows, "image_cols": columns, "image_sizes": sizes}


class FilledUp(Tiles):
    """Likewise that of Gemma 4 without encoders. Images are filled up to the most squares."""

    def __call__(self, images: Any, **_: Any) -> Any:
        made = [self.settings([image]) for row in images for image in row]
        counts = [one["pixel_values"].shape[1] for one in made]
        told = {
            name: torch.cat(
                [
                    torch.nn.functional.pad(one[name], (0, 0, 0, self.settings.max_soft_tokens - count), value=value)
                    for one, count in zip(made, counts, strict=True)
                ]
            )
            for name, value in (("pixel_values", 0), ("image_position_ids", -1))
        }
        return {**told, "num_soft_tokens_per_image": counts}


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sound(samples: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(0.0, 0.1, samples).astype(np.float32)

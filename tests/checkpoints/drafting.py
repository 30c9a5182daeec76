"""Tiny checkpoints of Qwen3.5 with a draft head, as its checkpoints store one, and of Gemma 4 with an assistant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from .families import make_checkpoint


def add_draft_head(folder: Path, *, right: bool = False, seed: int = 3) -> None:
    """Adds a draft head with random weights to the checkpoint in ``folder``; ``right``: every layer of the checkpoint
    and of the head adds nothing, so a token depends on the one before alone, and the head is always right."""
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    weights, layer = load_file(path), "model.layers.1."  # which attends to all positions
    width = weights["model.norm.weight"].shape[0]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32) * 0.3

    head = {f"layers.0.{name.removeprefix(layer)}": each.clone() for name, each in weights.items() if layer in name}
    head |= {name: each + 0.1 * each.std() * drawn(*each.shape) for name, each in head.items() if each.dim() > 1}
    head |= {f"{name}.weight": drawn(width) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    head["fc.weight"] = drawn(width, 2 * width)
    if right:
        ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        for each in (name for name in (*weights, *head) if name.endswith(ends)):
            (weights if each in weights else head)[each].zero_()
        head["fc.weight"] = torch.cat(
            [torch.eye(width, dtype=torch.float32), torch.zeros(width, width, dtype=torch.float32)], 1
        )
        head |= {name: torch.zeros(width, dtype=torch.float32) for name in ("pre_fc_norm_embedding.weight",)}
        head["norm.weight"] = weights["model.norm.weight"].clone()
    stored = {**weights, **{f"mtp.{name}": each.contiguous() for name, each in head.items()}}
    save_file(stored, path, metadata={"format": "pt"})


def make_drafting(folder: Path, *, right: bool = False) -> Path:
    """Writes a checkpoint with a draft head to ``folder``, and returns it."""
    make_checkpoint("qwen3_5_text", folder)
    add_draft_head(folder, right=right)
    return folder


@contextmanager
def assistants_allowed() -> Iterator[None]:
    """Lets transformers make an assistant: 5.23 refuses layers of which all share keys and values, 5.24 does not."""
    kind = transformers.Gemma4TextConfig
    plain = kind.kv_sharing_modes

    def modes(config: transformers.Gemma4TextConfig) -> list[str | None]:
        every = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if every else plain.fget(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "kv_sharing_modes", property(modes))
        yield


def make_assisted(
    folder: Path, *, right: bool = False, centroids: int = 4, family: str = "gemma4", **others: object
) -> Path:
    """Writes a checkpoint of Gemma 4 to ``folder``, and one of its assistant to ``folder / "assistant"``, which it
    returns.

    Args:
        right: as for `add_draft_head`.
        centroids: of the assistant's tokens; 0: it chooses among all tokens.
        family: the model's.
        others: settings of the assistant's layers that differ from the model's.
    """
    make_checkpoint(family, folder)
    told = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    places = map(told.layer_types.index, ("sliding_attention", "full_attention"))
    width, vocabulary, near, far = told.hidden_size, told.vocab_size, *map(told.per_layer_config.__getitem__, places)
    text = transformers.Gemma4TextConfig(
        **{
            "hidden_size": width if right else 32,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            **{name: getattr(told, name) for name in ("num_attention_heads", "attention_k_eq_v", "vocab_size")},
            **{name: getattr(told, name) for name in ("sliding_window", "tie_word_embeddings")},
            **{name: getattr(near, name) for name in ("head_dim", "num_key_value_heads")},
            "global_head_dim": far.head_dim,
            "num_global_key_value_heads": far.num_key_value_heads,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            **others,
        }
    )
    chosen = {"num_centroids": centroids, "centroid_intermediate_top_k": centroids if right else 2}
    told = {"backbone_hidden_size": width, "use_ordered_embeddings": centroids > 0, **(chosen if centroids else {})}
    config = transformers.Gemma4AssistantConfig(text_config=text, **told)
    torch.manual_seed(5)
    with assistants_allowed():
        own = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for each in own.parameters():
            each.copy_(torch.randn_like(each) * (0.3 if each.dim() > 1 else 0.1) + (each.dim() == 1))
        if centroids:
            own.masked_embedding.token_ordering.copy_(torch.randperm(vocabulary))
        if right:
            _make_sure(folder, own)
    own.save_pretrained(folder / "assistant")
    return folder / "assistant"


def _make_sure(folder: Path, own: transformers.Gemma4AssistantForCausalLM) -> None:
    path = folder / "model.safetensors"
    weights, (unused,) = load_file(path), own.pre_projection.weight.shape[:1]
    ends = ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")
    for name in (name for name in weights if name.endswith(ends)):
        weights[name].zero_()
    save_file(weights, path, metadata={"format": "pt"})
    for name, each in own.named_parameters():
        if name.endswith(ends):
            each.zero_()
    own.pre_projection.weight.copy_(torch.cat([torch.eye(unused), torch.zeros(unused, unused)], 1))
    own.model.norm.weight.copy_(weights["model.norm.weight"])
    own.lm_head.weight.copy_(weights["model.embed_tokens.weight"])

"""Parts of tiny checkpoints: sizes, random weights, and how a model is saved with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HIDDEN = 48
LAYERS = 2
POSITIONS = 512  # of the text models
TARGETS = 256  # positions of the encoder-decoders
FAST_CONFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_kernel_size": 9,
    "subsampling_factor": 8,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
}
"""The settings of a small FastConformer: an embedding for each 80 ms of audio."""


def classes() -> Any:
    """Returns transformers without its types, which are stricter than its code."""
    import transformers

    return transformers


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of the tokens that begin, end and pad texts, by their names in a configuration."""
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def text_settings(tokenizer: Any) -> dict[str, Any]:
    """Returns the settings that the configurations of all decoders share."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "vocab_size": len(tokenizer),
        **special_ids(tokenizer),
        "tie_word_embeddings": False,
    }


def random_model(model: Any, config: Any, seed: int) -> Any:
    """Returns a model with weights sampled from ``seed``. The caller's random state stays as it is."""
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(seed)
    made = model(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, _spread(weight[0] if ".experts." in name else weight))
            else:  # norms around their initial values, biases around zero
                weight.add_(torch.randn_like(weight) * 0.1)
        if getattr(made.config, "tie_word_embeddings", False):  # else the last token is likeliest
            made.get_input_embeddings().weight.mul_(0.1)
            decoder = made.get_decoder()
            norm = next((one for one in ("norm", "final_layer_norm", "embedding_norm") if hasattr(decoder, one)), None)
            if norm is not None:
                getattr(decoder, norm).weight.add_(10.0)
    torch.set_rng_state(before)
    return made


def _spread(weight: Any) -> float:
    """Returns the standard deviation that makes a layer's output about as large as its input, or somewhat larger. So
    every layer has an effect, and no layer hides the others."""
    return float(1.5 / weight[0].numel() ** 0.5)


def rewrite(path: Path, *left_out: str, **changes: Any) -> Path:
    """Changes settings in a JSON file, and leaves some out. A function gets the old value of its setting."""
    old = json.loads(path.read_text())
    new = {name: value(old[name]) if callable(value) else value for name, value in changes.items()}
    path.write_text(json.dumps({name: value for name, value in {**old, **new}.items() if name not in left_out}))
    return path


def save_checkpoint(folder: Path, model: Any, tokenizer: Any, **generation: Any) -> None:
    """Saves ``model`` with its ``tokenizer``. ``generation`` has further settings for generation_config.json."""
    ids = {name: token_id for name, token_id in special_ids(tokenizer).items() if token_id is not None}
    if model.can_generate():
        model.generation_config = classes().GenerationConfig(**{**ids, **generation})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

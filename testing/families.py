"""Tiny random checkpoints of every family that the engine reads, made in a moment, so that tests need no download.

Two layers, a vocabulary of bytes, and weights so large that what is drawn differs from token to token: comparing tokens
with transformers' own means something. Sizes and settings are the least that still has every part of the real thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

_HIDDEN = 48
_LAYERS = 2
_POSITIONS = 512  # of the language models
_MERGES = ("t h", "Ġ a", "i n", "th e", "Ġ the", "o n", "Ċ Ċ")  # Ċ Ċ: two newlines are one token, as in real ones

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}MEDIA{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@frozen(kw_only=True)
class _Words:
    """A tokenizer: which special tokens it has beside the bytes, and which of them it writes around every text."""

    special: tuple[str, ...]
    named: Mapping[str, str]  # "bos_token" -> "<s>"
    template: str = "$A"  # of a post-processor; $A is the text
    chat: str | None = None

    def make(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        pieces = [*_byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES)]
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _MERGES)]
        tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.special])
        around = [text for text in self.special if text in self.template]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=self.template, special_tokens=[(text, tokenizer.token_to_id(text)) for text in around]
                ),
            ]
        )
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=self.chat, **self.named)


_LLAMA = _Words(
    special=("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"),
    named={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"},
    template="<s> $A",
    chat=_LLAMA_CHAT,
)
_QWEN = _Words(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    named={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    chat=_CHATML,
)
_BERT = _Words(
    special=("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
    named={"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
    template="[CLS] $A [SEP]",
)


def make_checkpoint(family: str, folder: str | Path, *, seed: int = 0) -> Path:
    """Writes a tiny checkpoint with random weights, tokenizer and settings to ``folder``, and returns it.

    Args:
        family: one of `FAMILIES`.
        seed: of the weights; equal seeds give equal weights.

    Raises:
        ValueError: there is no such family.
    """
    if family not in _MAKERS:
        raise ValueError(f"family={family!r}; allowed: {', '.join(_MAKERS)}")
    target = Path(folder)
    _MAKERS[family](target, seed)
    return target


def _llama(folder: Path, seed: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _save_text(folder, seed, LlamaForCausalLM, LlamaConfig, _LLAMA, num_key_value_heads=2)


def _save_text(folder: Path, seed: int, model: Any, config: Any, words: _Words, **changes: Any) -> None:
    """A model of text only, and its tokenizer."""
    tokenizer = words.make()
    settings = config(**{**_text_settings(tokenizer), **changes})
    _save(folder, _random(model, settings, seed), tokenizer)


def _text_settings(tokenizer: Any) -> dict[str, Any]:
    """What the configurations of all decoders share."""
    return {
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": _POSITIONS,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }


def _random(model: Any, config: Any, seed: int) -> Any:
    """A model with weights drawn from ``seed``; the caller's random state stays as it is."""
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(seed)
    made = model(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, _spread(weight))
            else:  # norms around what they start from, biases around zero
                weight.add_(torch.randn_like(weight) * 0.1)
    torch.set_rng_state(before)
    return made


def _spread(weight: Any) -> float:
    """The standard deviation that makes a layer's output about as large as its input, or somewhat larger: then every
    layer says something, and none drowns the others."""
    return float(1.5 / weight[0].numel() ** 0.5)


def _save(folder: Path, model: Any, tokenizer: Any) -> None:
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}
    if model.can_generate():
        model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_alphabet() -> list[str]:
    """GPT-2's spelling of the 256 bytes: printable ones as they are, the others as characters from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    "llama": _llama,
}

FAMILIES = tuple(_MAKERS)
"""What `make_checkpoint` can make."""

"""The tokenizers of the tiny checkpoints: bytes, a few merges, and the special tokens and chat template of each
family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

_MERGES = ("t h", "Ġ a", "i n", "th e", "Ġ the", "o n", "Ċ Ċ")  # Ċ Ċ: two newlines are one token, as in real tokenizers

_PARTS = (  # the content of a message: text as it is, and placeholders for images and audio
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}MEDIA{% endif %}{% endfor %}{% endif %}"
)
_TOOLS = (  # as Hermes and Qwen write tools
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool['function'] | tojson }}{% endfor %}\n"
    "</tools><|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in message['tool_calls'] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_CHATML = (
    _TOOLS + "{% for message in messages %}<|im_start|>{{ message['role'] }}\n" + _PARTS + _CALLS + "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "<|{{ message['role'] }}|>" + _PARTS + "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n" + _PARTS + "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_TILED_CHAT = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}: " + _PARTS + "<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Returns GPT-2's spelling of the 256 bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelling: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return [spelling[byte] for byte in range(256)]


@frozen(kw_only=True)
class Words:
    """A tokenizer with its special tokens beside the bytes, and the template of the tokens that it writes around every
    text.
    """

    special: tuple[str, ...]
    named: Mapping[str, str]  # "bos_token" -> "<s>"
    template: str = "$A"  # for a post-processor; $A is the text
    chat: str | None = None

    def with_media(self, *special: str, media: str) -> Words:
        """Returns a copy with more special tokens, and with ``media`` in the chat template for each image or audio."""
        return evolve(self, special=(*self.special, *special), chat=(self.chat or "").replace("MEDIA", media))

    def make(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        make: Any = PreTrainedTokenizerFast  # transformers has no types for it

        pieces = [*byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES)]
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
        return make(tokenizer_object=tokenizer, chat_template=self._chat(), **self.named)

    def _chat(self) -> str | None:
        return self.chat and self.chat.replace("MEDIA", "")


LLAMA = Words(
    special=("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"),
    named={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"},
    template="<s> $A",
    chat=_LLAMA_CHAT,
)
QWEN = Words(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    named={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    chat=_CHATML,
)
GEMMA = Words(
    special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    named={"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    template="<bos> $A",
    chat=_GEMMA_CHAT,
)
BERT = Words(
    special=("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
    named={"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
    template="[CLS] $A [SEP]",
)
LLAVA = LLAMA.with_media("<image>", media="<image>\n")
QWEN_VISION = QWEN.with_media(
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    media="<|vision_start|><|image_pad|><|vision_end|>",
)
QWEN_AUDIO = QWEN.with_media("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", media="<|audio_bos|><|AUDIO|><|audio_eos|>")
TILED = Words(
    special=("<|endoftext|>", "<|im_start|>", "<end_of_utterance>"),
    named={"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|endoftext|>"},
    chat=_TILED_CHAT,
).with_media(
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    media="<image>",
)
GEMMA_MARKS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
GEMMA_VISION = evolve(
    GEMMA.with_media(*GEMMA_MARKS.values(), media="<start_of_image>"),
    named={**GEMMA.named, "extra_special_tokens": GEMMA_MARKS},
)
BART = Words(
    special=("<s>", "<pad>", "</s>"),
    named={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    template="<s> $A </s>",
)
T5 = Words(
    special=("<pad>", "</s>"),
    named={"eos_token": "</s>", "pad_token": "<pad>"},
    template="$A </s>",
)

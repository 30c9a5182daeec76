"""Random-weight Whisper checkpoints with the real layout and sizes, so that tests need no download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.words import byte_alphabet

if TYPE_CHECKING:
    from transformers import WhisperTokenizer

_TEXT_TOKENS = 50_257  # Whisper's multilingual vocabulary without its special tokens
_LANGUAGES = 99
_LIVELINESS = 5.0  # with the usual small weights the decoder repeats its last token and hardly reads the audio
_TIMESTAMPS = 1501  # <|0.00|> to <|30.00|> in steps of 20 ms


SIZES = {"tiny": (384, 4, 6), "base": (512, 6, 8)}  # width, layers, heads: Radford et al. 2022, table 1


def random_whisper(folder: str | Path, size: str, *, seed: int = 0) -> Path:
    """Writes a checkpoint of Whisper's ``size`` (a key of `SIZES`) with random weights and 51,865 tokens to ``folder``.

    The text tokens are single bytes and made-up pairs of bytes: the model writes nonsense, but every id decodes.
    """
    import torch
    import transformers

    width, layers, heads = SIZES[size]
    tokenizer = _tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    languages = _languages()
    end = _TEXT_TOKENS
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            d_model=width,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            vocab_size=len(tokenizer),
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            decoder_start_token_id=end + 1,
            suppress_tokens=None,
            begin_suppress_tokens=[220, end],
        )
    )
    torch.set_rng_state(generator_state)
    with torch.no_grad():
        for weight in model.model.decoder.layers.parameters():
            if weight.dim() == 2:
                weight.mul_(_LIVELINESS)
    make_generation_config: Any = transformers.GenerationConfig  # untyped there
    model.generation_config = make_generation_config(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=end + 1,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids(f"<|{code}|>") for code in languages},
        task_to_id={task: ids(f"<|{task}|>") for task in ("transcribe", "translate")},
        no_timestamps_token_id=ids("<|notimestamps|>"),
        prev_sot_token_id=ids("<|startofprev|>"),
        max_initial_timestamp_index=50,
        begin_suppress_tokens=[220, end],
        suppress_tokens=[1, 2, 7, 8, 9, 10, 14, 25],
        max_length=448,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_feature_extractor: Any = transformers.WhisperFeatureExtractor
    make_feature_extractor().save_pretrained(folder)
    return Path(folder)


def _languages() -> list[str]:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return list(LANGUAGES)[:_LANGUAGES]


def _tokenizer() -> WhisperTokenizer:
    from tokenizers import AddedToken
    from transformers import WhisperTokenizer

    alphabet = byte_alphabet()
    pairs = (first + second for first in alphabet for second in alphabet)
    texts = [*alphabet, *(pair for pair, _ in zip(pairs, range(_TEXT_TOKENS - len(alphabet)), strict=False))]
    tokenizer = WhisperTokenizer(vocab={text: index for index, text in enumerate(texts)}, merges=[])
    names = ["endoftext", "startoftranscript", *_languages(), "translate", "transcribe", "startoflm", "startofprev"]
    names += ["nospeech", "notimestamps"]
    special = [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(f"<|{index * 0.02:.2f}|>", normalized=False) for index in range(_TIMESTAMPS)])
    return tokenizer

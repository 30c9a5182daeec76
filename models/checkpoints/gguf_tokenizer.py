"""Makes the tokenizer of a GGUF file in the form that transformers reads: tokenizer.json and tokenizer_config.json.

A file lists tokens with their scores and types, and names the rule by which its converter saw texts cut. Such a rule is
a row of `_CUTS`; a file with another is refused, since other cuts give other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Final

import numpy as np
from attrs import define, field
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...core.errors import CheckpointError, UnsupportedModel
from ...core.model import Lengths
from .gguf_file import GgufFile
from .settings import is_integer

_MISSING = 2  # the type of the token for unknown words
_CONTROL, _OWN = 3, 4  # types of tokens: special ones, and those that their makers added to the vocabulary
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORD % ('', '')}|\p{{N}}{_SLASHED}"
_GPT4O = rf"{_WORD % (f'{_CONTRACTED}?', f'{_CONTRACTED}?')}|\p{{N}}{{1,3}}{_SLASHED}"
_QWEN35 = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (  # one after the other
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CASED = (  # not those of all alphabets
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df1e}]]"
)
_ASIAN = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
_MARKS = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_LLM = r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_MARKS}", r"\s+$", _ASIAN, r"\p{N}+"
_DEEPSEEK_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    r"\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK[-1],
)
_KIMI = rf"\p{{Han}}+|{_WORD % (f'{_CONTRACTED}?', f'{_CONTRACTED}?')}|\p{{N}}{{1,3}}{_REST}".replace(
    r"\p{M}]", r"\p{M}&&[^\p{Han}]]"
)
_EXAONE_MOE = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "".join(rf"\s{{{1 << count}}}(?!\S)|" for count in range(9, 1, -1))
_JAIS2 += r"\s{1,2}(?!\S)|\s"
_GPT2, _DIGITS = "gpt-2", "digits"  # the cuts of GPT-2; and each digit alone before them
_CUTS: Final[dict[str, str | tuple[str, ...]]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open"), _QWEN2),
    **dict.fromkeys(
        ("gpt-2", "olmo", "phi-2", "mpt", "jais", "exaone4", "trillion", "gigachat", "a.x-4.0", "mellum"), _GPT2
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK),
    "tekken": _TEKKEN,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "kimi-k2": _KIMI,
    "seed-coder": _QWEN2.replace(r"]+[\r\n]*|", r"]+|"),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    "exaone-moe": _EXAONE_MOE,
    "jais-2": _JAIS2,
    "afmoe": _AFMOE,
    "qwen35": _QWEN35,
    **dict.fromkeys(("modern-bert", "roberta-bpe"), _GPT2),
}
_WHOLE_FIRST = {"midm-2.0", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
"""Rules under which a piece that is a token is not merged of others; such vocabularies begin texts with BOS."""
_COMPOSED = {"qwen2", "deepseek-r1-qwen", "megrez", "qwen35", "modern-bert"}
_ENDS = (  # tokens at which llama.cpp ends a text, whatever the file says
    *(
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "<|end_of_text|>",
    ),
    *("<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "[EOT]", "[EOS]"),
    *("<turn|>", "<|tool_response>"),
)
_MESSAGE_END, _HARMONY = "<|end|>", {"<|return|>", "<|call|>"}  # of gpt-oss, whose texts have several messages
_SPACE = "▁"
_GEMMA4 = "gemma4"
_MERGED = (_GEMMA4, "bpe")  # vocabularies of SentencePiece with merges
_CLASS, _SEPARATOR, _UNKNOWN = "[CLS]", "[SEP]", "[UNK]"  # of BERT
_LONGEST = 4096  # characters of a token, which is tried to be made of two at each of them


@define(eq=False, slots=False)
class GgufTokenizer:
    """transformers' tokenizer for the settings of a GGUF file. It is made when a text is first read or written, since
    a vocabulary of 262,144 tokens takes long. What an engine asks for when it opens is known before."""

    lengths: Lengths | None
    _known: Mapping[str, Any] = field(repr=False)
    _make: Callable[[], Any] = field(repr=False)
    whole: Any = field(init=False, repr=False)  # transformers' tokenizer; `CheckpointError` if its files are gone

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            return self._whole()
        if name.startswith("_"):
            raise AttributeError(name)
        known = name in self._known and not self.is_made  # a program may change what has been made
        return self._known[name] if known else getattr(self.whole, name)

    @property
    def is_made(self) -> bool:
        """True once it is made: nobody waits for it then."""
        return "whole" in vars(self)

    def __len__(self) -> int:
        return len(self.whole)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Calls transformers' tokenizer."""
        return self.whole(*texts, **options)

    def _whole(self) -> Any:
        """Makes the tokenizer once. No lock but the turn is held, for which a thread that reads a model never waits:
        `cached_property` has a lock for all tokenizers, and the two would wait for each other."""
        from .turns import TURNS

        with TURNS.turn():
            if not self.is_made:  # another thread may have made it meanwhile
                self.whole = self._make()
            return vars(self)["whole"]


def make_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any], list[int]]:
    """Returns the tokenizer, its settings for transformers, and the tokens that end a text.

    Raises:
        CheckpointError: the vocabulary is missing or damaged.
        UnsupportedModel: the kind of vocabulary, or the rule by which it cuts texts, is not known.
    """
    tokens, types = (file.listed(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not tokens or (types and len(types) != len(tokens)) or not all(isinstance(one, str) for one in tokens):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens with {len(types)} types; download it again")
    if _is_gemma(file):  # its runs of spaces are written as such
        tokens = [_SPACE * len(text) if text and not text.strip(" ") else text for text in tokens]
    kind, cut = (file.settings.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind == "gpt2":
        made = _byte_level(file, tokens, cut)
    elif kind in {"llama", *_MERGED}:
        made = _sentence_pieces(file, tokens)
    elif kind == "bert":
        tokens = _word_pieces(tokens, types)
        made = _of_word_pieces(file, tokens)
    elif kind == "t5":
        made = _unigram(file, tokens, types)
    else:
        raise UnsupportedModel(
            f"{file.path} has a vocabulary of the kind {kind!r}; allowed: gpt2, llama, gemma4, bpe, bert and t5"
        )
    added = [
        AddedToken(text, normalized=False, special=one == _CONTROL)
        for text, one in zip(tokens, types, strict=False)
        if one in {_CONTROL, _OWN}
    ]
    made.add_tokens(added)
    named = {name: _token(file, tokens, name) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    if kind == "bert":  # texts begin and end with other tokens
        places = {"bos": ("cls", _CLASS), "eos": ("seperator", _SEPARATOR)}
        named |= {one: _token(file, tokens, name) or made.token_to_id(text) for one, (name, text) in places.items()}
    begins = file.settings.get("tokenizer.ggml.add_bos_token", kind in {"llama", "bert"} or cut in _WHOLE_FIRST)
    begins = begins or kind == _GEMMA4  # early files say otherwise
    ends = file.settings.get("tokenizer.ggml.add_eos_token", kind in {"bert", "t5"})
    around = [named["bos"]] if begins else [], [named["eos"]] if ends else []
    if None in (*around[0], *around[1]):
        raise CheckpointError(f"{file.path} says that texts begin or end with a token, but not with which")
    special = {tokens[one]: one for part in around for one in part if one is not None}
    single = [*(tokens[one] for one in around[0] if one is not None), "$A"]
    single += [tokens[one] for one in around[1] if one is not None]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {theirs: tokens[one] for theirs, ours in names.items() if (one := named[ours]) is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    ending = dict.fromkeys([named["eos"], named["eot"], named["eom"]])
    ending |= dict.fromkeys(map(made.token_to_id, _ENDS))
    if None not in map(made.token_to_id, _HARMONY):
        ending.pop(made.token_to_id(_MESSAGE_END), None)
    return made, settings, [one for one in ending if one is not None]


def _is_gemma(file: GgufFile) -> bool:
    return str(file.settings.get("general.architecture")).startswith("gemma")


def _token(file: GgufFile, tokens: Sequence[str], name: str) -> int | None:
    found = file.settings.get(f"tokenizer.ggml.{name}_token_id")
    if found is not None and (not is_integer(found) or not 0 <= found < len(tokens)):
        raise CheckpointError(
            f"{file.path} has tokenizer.ggml.{name}_token_id={found!r}; allowed: 0 to {len(tokens) - 1}. Download it "
            "again"
        )
    return found


def _byte_level(file: GgufFile, tokens: Sequence[str], cut: Any) -> Tokenizer:
    if cut not in _CUTS:
        raise UnsupportedModel(
            f"{file.path} has a vocabulary whose texts are cut by the rule {cut!r} (tokenizer.ggml.pre); allowed: "
            f"{', '.join(_CUTS)}. Give the checkpoint that it was converted from"
        )
    made = _merging(file, tokens, _listed_merges(file), ignore_merges=cut in _WHOLE_FIRST)
    rule = _CUTS[cut]
    if rule in {_GPT2, _DIGITS}:
        parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        parts = [pre_tokenizers.Digits(individual_digits=True), *parts] if rule == _DIGITS else parts
    else:
        rules = [rule] if isinstance(rule, str) else rule
        cutting = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in rules]
        parts = [*cutting, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    if cut in _COMPOSED:
        made.normalizer = normalizers.NFC()
    return made


def _listed_merges(file: GgufFile) -> list[tuple[str, ...]]:
    """Returns the merges that a file has, the first one first. Raises `CheckpointError` if they are damaged."""
    told = file.listed("tokenizer.ggml.merges")
    if not all(isinstance(one, str) for one in told):
        raise CheckpointError(f"{file.path} has merges (tokenizer.ggml.merges) that are not texts; download it again")
    return [tuple(one.split(" ")) for one in told]


def _sentence_pieces(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """A vocabulary of SentencePiece. Without merges the pair whose token has the best score is merged first."""
    kind = file.settings["tokenizer.ggml.model"]
    merges = _listed_merges(file) if kind in _MERGED else []
    unknown = _token(file, tokens, "unknown")
    made = _merging(
        file,
        tokens,
        merges or _merges(file, tokens),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    spaced = normalizers.Replace(" ", _SPACE)
    prefixed = bool(file.settings.get("tokenizer.ggml.add_space_prefix", kind != _GEMMA4))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaced]) if prefixed else spaced
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return made


def _scores(file: GgufFile, tokens: Sequence[str]) -> list[Any]:
    scores = file.listed("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or not all(isinstance(one, int | float) and isfinite(one) for one in scores):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens with {len(scores)} scores; download it again")
    return scores


def _unigram(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """A vocabulary of XLM-R: a word is cut where the sum of the scores is best."""
    unknown = _token(file, tokens, "unknown")
    unknown = types.index(_MISSING) if unknown is None and _MISSING in types else unknown
    letters = file.listed("tokenizer.ggml.precompiled_charsmap")
    table = bytes(one & 0xFF for one in letters if is_integer(one))
    if unknown is None or len(table) != len(letters) or not _is_sound(table):
        told = "no token for unknown words" if unknown is None else "a damaged table of letters (precompiled_charsmap)"
        raise CheckpointError(f"{file.path} has {told}; download it again")
    try:
        made = Tokenizer(models.Unigram(list(zip(tokens, _scores(file, tokens), strict=True)), unknown))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"the vocabulary of {file.path} is damaged: {error}; download it again") from error
    if table:
        made.normalizer = normalizers.Precompiled(table)
    scheme = "always" if file.settings.get("tokenizer.ggml.add_space_prefix", True) else "never"
    spaced = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaced])
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made


def _is_sound(table: bytes) -> bool:
    """True if SentencePiece's table of letters can be followed: it has the bytes of its trie, and then texts. The
    library would panic at a place that the table does not have."""
    if not table:
        return True
    size, texts = int.from_bytes(table[:4], "little"), np.frombuffer(table, np.uint8)[4:]
    if len(table) < 4 or size % 4 or not 0 < size <= len(texts):
        return False
    units, texts = np.frombuffer(table[4 : 4 + size], "<u4").astype(np.int64), texts[size:]
    inner = units < 1 << 31
    below = np.arange(len(units)) ^ (units >> 10 << ((units & 512) >> 6))
    if (below[inner] | 255).max(initial=0) >= len(units):
        return False
    places = units[below[inner & (units & 256 != 0)]] & ((1 << 31) - 1)
    try:
        bytes(texts).decode()
    except UnicodeDecodeError:
        return False
    return bool(places.max(initial=0) < len(texts)) and bool((texts[places] & 0xC0 != 0x80).all())


def _word_pieces(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Returns the tokens as BERT has them: pieces within a word are marked, not those at its beginning."""
    return [
        text if one == _CONTROL else text[1:] if text.startswith(_SPACE) else f"##{text}"
        for text, one in zip(tokens, types or [0] * len(tokens), strict=True)
    ]


def _of_word_pieces(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """A vocabulary of BERT. If the file does not say whether texts lose their capitals, its tokens do."""
    unknown = _token(file, tokens, "unknown")
    places = {text: one for one, text in enumerate(tokens)}
    name = _UNKNOWN if unknown is None else tokens[unknown]
    if name not in places:
        raise CheckpointError(f"{file.path} has no token for unknown words; download it again")
    made = Tokenizer(models.WordPiece(places, unk_token=name))
    asked = ("lowercase", "strip_accents")
    told: dict[str, Any] = {name: file.settings.get(f"tokenizer.ggml.normalizer.{name}") for name in asked}
    if not all(isinstance(one, bool | None) for one in told.values()):
        raise CheckpointError(
            f"{file.path} has tokenizer.ggml.normalizer={told}; allowed: true or false. Download it again"
        )
    if told["lowercase"] is None:
        told["lowercase"] = not any(text != text.lower() for text in tokens if not text.startswith("["))
    made.normalizer = normalizers.BertNormalizer(**told)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def _merging(file: GgufFile, tokens: Sequence[str], merges: Sequence[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE({text: one for one, text in enumerate(tokens)}, list(merges), **options))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"the vocabulary of {file.path} is damaged: {error}; download it again") from error


def _merges(file: GgufFile, tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Returns all ways to make a token of two, the best token first."""
    by_place = [-float(index) for index in range(len(tokens))]
    scores = by_place if _is_gemma(file) else _scores(file, tokens)  # Gemma's are of another order than its merges
    if (longest := max(map(len, tokens))) > _LONGEST:
        raise CheckpointError(
            f"{file.path} has a token of {longest} characters; allowed: {_LONGEST}. Download it again"
        )
    places = {text: one for one, text in enumerate(tokens)}
    found = list[tuple[float, int, int, int]]()
    for one, text in enumerate(tokens):
        for middle in range(1, len(text)):
            left, right = places.get(text[:middle]), places.get(text[middle:])
            if left is not None and right is not None:
                found.append((-scores[one], one, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]

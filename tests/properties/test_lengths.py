"""No prompt that fits is refused by its length, whatever the tokenizer: small random ones of every kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from triolet.api.inputs import lengths
from triolet.api.inputs.lengths import NEVER, Limit
from triolet.core.errors import ContextLengthExceeded
from triolet.core.model import Lengths
from triolet.models.checkpoints.lengths import lengths_of

LETTERS = "ab  A\u0301\u0308e\u0345\u03b1\u0313\x12\n,é漢😀가각"
TEXTS = st.text(LETTERS, max_size=60) | st.builds(
    lambda one, times: one * times, st.text(LETTERS, max_size=4), st.integers(0, 40)
)
CORPORA = st.lists(st.text(LETTERS, max_size=12), min_size=1, max_size=6)
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "lower": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
    "sentencepiece": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "shrinking": normalizers.Replace("ab", "a"),
    "dropping": normalizers.Replace("a", ""),
    "blanks": normalizers.Replace(Regex(r"\s+"), " "),
    "BERT's": normalizers.BertNormalizer(),
    "stripped": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
}
PARTINGS: dict[str, Any] = {
    "none": None,
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits and bytes": pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
    "words": pre_tokenizers.Whitespace(),
    "metaspace": pre_tokenizers.Metaspace(),
    "removed": pre_tokenizers.Split(" ", "removed"),
}
MODELS: dict[str, Any] = {
    "bytes": (models.BPE, {}, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}),
    "some bytes": (models.BPE, {}, {"initial_alphabet": sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set("aĒĊ"))}),
    "unknown": (models.BPE, {"unk_token": "<unk>"}, {"special_tokens": ["<unk>"]}),
    "unknown, fused": (models.BPE, {"unk_token": "<unk>", "fuse_unk": True}, {"special_tokens": ["<unk>"]}),
    "nothing for the unknown": (models.BPE, {}, {}),
    "word pieces": (models.WordPiece, {"unk_token": "<unk>"}, {"special_tokens": ["<unk>"]}),
    "words": (models.WordLevel, {"unk_token": "<unk>"}, {"special_tokens": ["<unk>"]}),
}
TRAINERS: dict[Any, Any] = {
    models.BPE: trainers.BpeTrainer,
    models.WordPiece: trainers.WordPieceTrainer,
    models.WordLevel: trainers.WordLevelTrainer,
}
ADDED = ["none", "plain", "with blanks"]


def tokenizer_of(model: str, normalizer: str, parting: str, added: str, corpus: list[str]) -> Any:
    """Trained on ``corpus``, with the methods that the engine asks for."""
    kind, given_, trained = MODELS[model]
    made = Tokenizer(kind(**given_))
    if NORMALIZERS[normalizer] is not None:
        made.normalizer = NORMALIZERS[normalizer]
    if PARTINGS[parting] is not None:
        made.pre_tokenizer = PARTINGS[parting]
    made.train_from_iterator(corpus * 3, TRAINERS[kind](vocab_size=300, show_progress=False, **trained))
    if added != "none":
        made.add_special_tokens([AddedToken("ab, ab", lstrip=added == "with blanks", rstrip=added == "with blanks")])

    def encode(text: str, **_: object) -> list[int]:
        return made.encode(text, add_special_tokens=False).ids

    return SimpleNamespace(backend_tokenizer=made, encode=encode)


TOKENIZERS = st.builds(
    tokenizer_of, *map(st.sampled_from, (list(MODELS), list(NORMALIZERS), list(PARTINGS), ADDED)), CORPORA
)


def limit_of(tokenizer: Any, most: int) -> Limit:
    found: Any = SimpleNamespace(
        tokenizer=tokenizer, preparer=None, lengths=lengths_of(tokenizer), max_positions=most + 1
    )
    return Limit.of_prompts(found)


@given(TOKENIZERS, TEXTS)
def test_a_text_that_fits_is_never_refused_by_its_length(tokenizer: Any, text: str) -> None:
    fits = len(tokenizer.encode(text))
    limit_of(tokenizer, fits).check_length("a prompt", (text,))


@given(TOKENIZERS, TEXTS, st.integers(1, 20))
def test_a_text_that_fits_is_never_refused_while_it_is_counted(tokenizer: Any, text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "PIECE", piece)
        patch.setattr(lengths, "_SURELY_FEW", 0)
        limit_of(tokenizer, len(tokenizer.encode(text))).check_count("a prompt", text, NEVER)


@pytest.mark.parametrize("normalizer", ["none", "NFC", "lower", "sentencepiece"])
@pytest.mark.parametrize(
    ("model", "parting"), [("bytes", "bytes"), ("bytes", "digits and bytes"), ("unknown", "metaspace")]
)
def test_the_usual_tokenizers_have_a_longest_token(model: str, parting: str, normalizer: str) -> None:
    """Of no use is a bound that is never there. A text that is too long by far is refused."""
    tokenizer = tokenizer_of(model, normalizer, parting, "plain", ["ab ab"])
    assert lengths_of(tokenizer) is not None
    with pytest.raises(ContextLengthExceeded, match=r"a prompt of 4,000 characters has .* allowed: up to 5 tokens"):
        limit_of(tokenizer, 5).check_length("a prompt", ("ab, " * 1_000,))


@pytest.mark.parametrize(
    ("model", "normalizer", "parting", "added"),
    [
        ("bytes", "dropping", "bytes", "none"),
        ("bytes", "blanks", "bytes", "none"),
        ("bytes", "stripped", "bytes", "none"),
        ("bytes", "none", "words", "none"),
        ("bytes", "none", "removed", "none"),
        ("bytes", "none", "bytes", "with blanks"),
        ("unknown, fused", "none", "metaspace", "none"),
        ("nothing for the unknown", "none", "metaspace", "none"),
        ("word pieces", "BERT's", "words", "none"),
        ("words", "none", "words", "none"),
    ],
)
def test_where_a_token_may_stand_for_anything_texts_are_counted(
    model: str, normalizer: str, parting: str, added: str
) -> None:
    assert lengths_of(tokenizer_of(model, normalizer, parting, added, ["ab ab"])) is None


def test_bytes_that_the_vocabulary_lacks_are_no_tokens() -> None:
    tokenizer = tokenizer_of("some bytes", "none", "bytes", "none", ["b"])
    found = lengths_of(tokenizer)
    assert found is not None
    assert set(found.unread) == {"a", "\x12", "\n"}
    assert found.least_tokens("a" * 1_000) == 0 == len(tokenizer.encode("a" * 1_000))
    assert lengths_of(tokenizer_of("some bytes", "NFC", "bytes", "none", ["b"])) is None, "NFC may make an a"


def test_the_time_for_a_length_depends_on_the_positions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_of(tokenizer_of("some bytes", "none", "bytes", "none", ["b"]), 5)
    found = limit.description.lengths
    assert found is not None
    looked: list[int] = []
    original = Lengths.least_tokens
    monkeypatch.setattr(Lengths, "least_tokens", lambda one, text: looked.append(len(text)) or original(one, text))
    limit.check_length("a prompt", ("a" * 1_000_000,))
    limit.check_length("a conversation", ("a" * 10,) * 100_000)
    assert sum(looked) == 2 * 2 * 6 * found.longest
    with pytest.raises(ContextLengthExceeded):
        limit.check_length("a prompt", ("ab" * 1_000_000,))


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (normalizers.NFC(), "\u03b1\u0313\u0300\u0345"),
        (normalizers.NFKC(), "\u03b1\u0313\u0300\u0345"),
        (normalizers.Replace("abc", "a"), "abc"),
        (normalizers.Sequence([normalizers.Replace("ab", "a"), normalizers.Replace("aa", "a")]), "abab"),
    ],
)
def test_what_a_normalizer_makes_one_is_counted_as_one(normalizer: Any, text: str) -> None:
    """Tokens of one character each, and as many characters made one as the normalizer can."""
    made = Tokenizer(models.BPE({"a": 0}, [], unk_token="a"))
    made.normalizer = normalizer
    found = lengths_of(SimpleNamespace(backend_tokenizer=made))
    assert found is not None
    assert len(made.encode(text * 10).ids) == 10
    assert found.least_tokens(text * 10) == 10

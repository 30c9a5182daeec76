"""From tokens to text: what comes piece by piece is the whole text, for the decoders of real tokenizers."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from triolet import Completion, Delta, FinishReason, InvalidRequest
from triolet.api.outputs.results import Usage
from triolet.api.outputs.text import Output, StopStrings, completion_of
from triolet.core import detokenizer
from triolet.core.detokenizer import TextDeltas, TokenBytes
from triolet.core.plan import SampledToken
from triolet.core.reasoning import Reasoning, Stage, Track

from ..models.conftest import make_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
WORDS = ["▁", "a", "b", "▁a", "▁ab", "ab", "é", "▁the", "."]


def sentencepiece(strip: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are written as ▁, the first one of a text is dropped, unknown characters are bytes."""
    vocabulary = {text: index for index, text in enumerate(["<unk>", *WORDS])}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """As T5's."""
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(WORDS)}, unk_token="."))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT's."""
    words = ["the", "##re", "is", "a", "##b", ".", "[UNK]"]
    tokenizer = Tokenizer(models.WordPiece({text: index for index, text in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def of_words(decoder: Any, words: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, with this decoder, and with special and other added tokens."""
    backend = Tokenizer(models.Unigram([(text, 0.0) for text in words], unk_id=0))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<s>", **options)
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("<a b>", special=True)])
    return tokenizer


CLOSING = 257
BYTES = make_tokenizer()  # as GPT-2's and Whisper's: a token may be any part of a character; special ones from 256 on
CLEANED = [".", "?", "!", ",", "'", "n", "'t", "t", "n't", "'m", "'s", "'ve", "'re", "v", "re", "is", " ", "x"]
SPACED = [*WORDS, "▁▁", "▁▁▁▁", *(f"▁{text}" for text in CLEANED)]
TOKENIZERS: dict[str, Any] = {
    "bytes": BYTES,
    "sentencepiece": sentencepiece(),
    "sentencepiece without strip": sentencepiece(strip=False),  # as Gemma's
    "metaspace": metaspace(),
    "wordpiece": wordpiece(),
    "unigram": of_words(decoders.Metaspace(), SPACED),
    "unigram, cleaned up": of_words(decoders.Metaspace(), SPACED, clean_up_tokenization_spaces=True),
    "unigram, never first": of_words(decoders.Metaspace(prepend_scheme="never"), SPACED),
    "no decoder": of_words(None, WORDS),
    "no decoder, cleaned up": of_words(None, CLEANED, clean_up_tokenization_spaces=True),
    "cleaned by its decoder": of_words(decoders.WordPiece(cleanup=True), [*CLEANED, "##re", "do not"]),
    "words with suffixes": of_words(decoders.BPEDecoder(suffix="</w>"), ["lo", "w</w>", "he</w>", "he", ".</w>"]),
    "ByT5": ByT5Tokenizer(),  # no fast tokenizer: its ids are bytes, and it drops those that are no characters
}


def pieces(tokenizer: Any, token_ids: list[int], *, skip: bool = True) -> list[str]:
    texts = TextDeltas(TokenBytes(tokenizer, skip), frozenset())
    return [*(texts.add(token) for token in token_ids), texts.rest()]


def completed(tokenizer: Any, token_ids: list[int], tokens: TokenBytes, *stops: str) -> list[str]:
    """The pieces of a request that has stop strings."""
    out = Output(3, frozenset(), TextDeltas(tokens, frozenset()), StopStrings(stops), tops=False)
    for token in token_ids:
        out.take(SampledToken(token_id=token))
    if not out.ended:
        out.end(FinishReason.LENGTH)
    return [delta.text for delta in out.ready]


def check_one_text(tokenizer: Any, token_ids: list[int], tokens: TokenBytes) -> bool:
    """Checks that a text is the same in pieces, at once, and with a stop string that never comes; that it is
    transformers' own; and that a stop string that is in it ends it there. Returns whether it was well-formed."""
    whole = TextDeltas(tokens, frozenset()).whole(token_ids)
    for stops in ((), ("never \x00",)):
        assert "".join(completed(tokenizer, token_ids, tokens, *stops)) == whole
    middle = whole[len(whole) // 2 : len(whole) // 2 + 2]
    if middle:
        assert "".join(completed(tokenizer, token_ids, tokens, middle)) == whole[: whole.index(middle)]
    theirs = tokenizer.decode(token_ids, skip_special_tokens=tokens.skip) if token_ids else ""
    if BROKEN in theirs or BROKEN in whole:
        return False
    assert whole == theirs
    return True


def sequences(rng: random.Random, tokenizer: Any) -> Iterator[list[int]]:
    """Random tokens: any, or few of them again and again."""
    while True:
        count = len(tokenizer)
        few = rng.sample(range(count), min(count, rng.choice([2, 5, 500])))
        drawn = rng.choices(few, k=rng.randint(0, 16))
        # of Whisper, all that is between these two is no answer but its prompt, which its tokenizer drops
        yield [token for token in drawn if tokenizer.convert_ids_to_tokens(token) != "<|startofprev|>"]


def many(name: str, tokenizer: Any, number: int) -> int:
    """Checks ``number`` random texts. Returns the number of those that were well-formed."""
    rng = random.Random(name)
    found = sequences(rng, tokenizer)
    both = [TokenBytes(tokenizer), TokenBytes(tokenizer, skip=False)]
    return sum(check_one_text(tokenizer, next(found), rng.choice(both)) for _ in range(number))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_the_same_in_pieces_at_once_and_with_stops(name: str) -> None:
    """Characters cut anywhere, bytes that are no characters, special tokens in the middle, and the words of every
    decoder with their spaces."""
    assert many(name, TOKENIZERS[name], 150) > 10


@pytest.mark.thorough
def test_a_hundred_thousand_texts_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokenizers of the checkpoints below TRIOLET_TEST_CHECKPOINTS, if it is set."""
    folder = os.environ.get("TRIOLET_TEST_CHECKPOINTS")
    real = sorted(Path(folder).glob("*/tokenizer.json")) if folder else []
    tokenizers = TOKENIZERS | {path.parent.name: AutoTokenizer.from_pretrained(path.parent) for path in real}
    each = math.ceil(100_000 / len(tokenizers))
    for name, tokenizer in tokenizers.items():
        well_formed = many(name, tokenizer, each)
        with capsys.disabled():
            print(f"{name}: {each} texts, {well_formed} of them well-formed, 0 differences")  # noqa: T201


@settings(max_examples=100)
@given(st.lists(st.sampled_from([*b"ab \xf0\x9f\x98\x80\xe4\xbd\xa0\xc3\xa9\xff\xed\xa0"]), max_size=12))
def test_bytes_that_become_no_character_are_told_at_once_and_three_are_held(codes: list[int]) -> None:
    """By the Unicode standard's practice, as Python's, in both kinds of vocabularies."""
    sentencepiece = TOKENIZERS["sentencepiece"]
    for tokenizer, first in ((BYTES, 0), (sentencepiece, sentencepiece.convert_tokens_to_ids("<0x00>"))):
        texts = TextDeltas(TokenBytes(tokenizer), frozenset())
        shown = texts.add(first + ord("a"))
        for place, code in enumerate(codes, 1):
            shown += texts.add(first + code)
            told = [b"a" + bytes(codes[: place - held]) for held in range(min(4, place + 1))]
            assert any(one.decode(errors="replace") == shown for one in told), (codes, shown)
        assert shown + texts.rest() == (b"a" + bytes(codes)).decode(errors="replace")


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.count = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.count += len(token_ids)
        return str(self.tokenizer.decode(token_ids, **options))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_token_is_decoded_twice_behind_the_same(name: str) -> None:
    """Neither in one text nor in those of several requests, which share the bytes of the tokens."""
    tokenizer = TOKENIZERS[name]
    token_ids = [*range(0, len(tokenizer), len(tokenizer) // 9 + 1)]
    counted = Counted(tokenizer)
    shared = TokenBytes(counted)
    for _ in range(20):
        assert TextDeltas(shared, frozenset()).whole(token_ids * 2) == "".join(pieces(tokenizer, token_ids * 2))
    assert counted.count <= 5 * 2 * len(token_ids)


def test_what_is_kept_of_pairs_of_tokens_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenizer, "_MOST_KNOWN", 4)
    tokens = TokenBytes(TOKENIZERS["ByT5"])
    assert TextDeltas(tokens, frozenset()).whole(range(100, 120)) == "abcdefghijklmnopqrst"
    assert len(tokens._known) <= 4


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_cost_of_a_text_is_linear(name: str) -> None:
    """Whatever the tokens are: parts of characters that never end, too."""
    tokenizer = TOKENIZERS[name]
    for token in range(0, len(tokenizer), len(tokenizer) // 9 + 1):
        counted = Counted(tokenizer)
        pieces(counted, [token] * 300)
        assert counted.count <= 5 * 300


class Typed:
    """A tokenizer of these texts, which cleans up whole texts."""

    clean_up_tokenization = PreTrainedTokenizerFast.clean_up_tokenization

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.clean_up_tokenization_spaces = texts, True

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(self.texts[token] for token in token_ids)


@settings(max_examples=200)
@given(st.lists(st.text(" '.nt,sver", min_size=1, max_size=9), max_size=12) | st.text(" 'nt", max_size=9).map(list))
@example([" n", " ' ", "t"])  # the blanks around the apostrophe go, and then the one before "n't"
@example([*" ' ' ' s"])
@example([" " * 40, "' " * 40, "x"])
def test_of_a_text_that_is_cleaned_up_seven_characters_are_held_at_most(texts: list[str]) -> None:
    """It may have any number of blanks and apostrophes."""
    tokenizer = Typed(texts)
    deltas, told = TextDeltas(TokenBytes(tokenizer), frozenset()), ""
    for token in range(len(texts)):
        told += deltas.add(token)
        assert len(deltas._held) <= 7
    assert told + deltas.rest() == tokenizer.clean_up_tokenization("".join(texts))


def test_an_answer_that_is_cut_within_a_character_is_the_same_everywhere() -> None:
    """With byte fallback, tokenizers make all bytes beside a broken one broken, which a stream has shown already."""
    tokenizer = TOKENIZERS["sentencepiece"]
    token_ids = tokenizer.encode("the 😀😀", add_special_tokens=False)[:-1]
    assert "".join(pieces(tokenizer, token_ids)) == "the 😀" + BROKEN
    assert tokenizer.decode(token_ids) == "the " + 7 * BROKEN


@settings(max_examples=150)
@given(st.text("ab é你😀.", max_size=12))
def test_characters_spelled_in_bytes_between_words_come_whole(text):
    """The bytes of 你 and 😀 are tokens of their own: no piece ends within a character."""
    tokenizer = TOKENIZERS["sentencepiece"]
    parts = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_decoder_that_takes_text_back_loses_nothing_new():
    class Cleaning:
        """Drops the space before a full stop, as BERT's tokenizer may."""

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join("a .b"[token] for token in token_ids).replace(" .", ".")

    assert "".join(pieces(Cleaning(), [0, 1, 2, 3])) == "a .b"


def test_special_tokens_are_no_text():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|x|>", special=True)], special_tokens=True)
    texts = TextDeltas(TokenBytes(tokenizer), frozenset({260}))
    assert [texts.add(token) for token in (97, 260, 98)] == ["a", "", "b"]


# -- outputs ---------------------------------------------------------------------------------------------------------


def output(*stops: str, tops: bool = False, tokenizer: Any = BYTES, reasoning: Reasoning | None = None) -> Output:
    return Output(
        prompt_tokens=3,
        stop_ids=frozenset({256}),
        texts=TextDeltas(TokenBytes(tokenizer), frozenset()),
        stops=StopStrings(stops),
        tops=tops,
        reasoning=reasoning,
    )


def deltas_of(out: Output, text: str, end: FinishReason | None = None) -> list[Delta]:
    for token in text.encode():
        out.take(SampledToken(token_id=token, logprob=-1.0, top=((token, -1.0),)))
    if end is not None:
        out.end(end)
    deltas = list(out.ready)
    out.ready.clear()
    assert out.over is (deltas[-1].finish_reason is not None)
    return deltas


def test_a_stop_string_over_several_tokens_ends_the_text_before_it_and_withdraws_its_request_once():
    withdrawn: list[bool] = []
    out = output("STOP")
    out.withdraw = withdrawn.append
    deltas = deltas_of(out, "go STOP on")
    assert withdrawn == [True]
    assert "".join(delta.text for delta in deltas) == "go "
    assert [delta.token_ids for delta in deltas] == [(token,) for token in b"go STOP"]
    assert [delta.finish_reason for delta in deltas] == [None] * 6 + [FinishReason.STOP]
    assert deltas[-1].usage == Usage(prompt_tokens=3, completion_tokens=7)


def test_what_was_held_back_for_a_stop_string_comes_with_the_end():
    deltas = deltas_of(output("STOP"), "go STO", FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["g", "o", " ", "", "", "", "STO"]
    assert deltas[-1] == Delta(
        text="STO",
        token_ids=(),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=3, completion_tokens=6),
    )


def test_a_stop_string_that_the_end_makes_certain_is_why_it_ended():
    deltas = deltas_of(output("bc", "abcd"), "xabc", FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "xa"
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_the_end_of_text_counts_as_a_token_but_is_none_of_the_output():
    out = output(tops=True)
    out.take(SampledToken(token_id=97, logprob=-0.5, top=((97, -0.5), (98, -2.0))))
    out.take(SampledToken(token_id=256))
    out.end(FinishReason.STOP)
    first, last = out.ready
    assert first == Delta(text="a", token_ids=(97,), logprobs=(-0.5,), top_logprobs=(((97, -0.5), (98, -2.0)),))
    assert (last.token_ids, last.top_logprobs, last.usage.completion_tokens) == ((), (), 2)


def test_a_completion_is_its_deltas_together():
    deltas = deltas_of(output("STOP", tops=True), "a STOP")
    assert completion_of(deltas) == Completion(
        text="a ",
        token_ids=tuple(b"a STOP"),
        finish_reason=FinishReason.STOP,
        logprobs=(-1.0,) * 6,
        top_logprobs=tuple(((token, -1.0),) for token in b"a STOP"),
        usage=Usage(prompt_tokens=3, completion_tokens=6),
    )


def test_a_fault_of_the_request_alone_is_raised_when_it_is_read_and_ends_its_output():
    withdrawn: list[bool] = []
    out = output()
    out.withdraw = withdrawn.append
    out.take(SampledToken(token_id=256, error="too complex"))
    out.take(SampledToken(token_id=97))
    assert (withdrawn, list(out.ready), out.over) == ([False], [], False)
    with pytest.raises(InvalidRequest, match="too complex"):
        out.raise_fault()
    out.raise_fault()
    assert out.over


@given(
    st.sampled_from([Stage.UNDECIDED, Stage.OPENED, Stage.REASONS]),
    st.lists(
        st.sampled_from([b"<think>", b"</think>", b"</thi", b"\n", b" ", "ü".encode(), b"\xc3", b"ab", b"\0"]),
        max_size=9,
    ),
    st.sampled_from([{}, {"structured": True}, {"call": "ab"}, {"around": ("ab", "ab")}, {"pauses": ("</thib",)}]),
)
def test_callers_and_the_sampler_see_the_same_end_of_reasoning(
    stage: Stage, written: list[bytes], others: dict[str, Any]
) -> None:
    """By text and by bytes, whole and as a stream, where a byte is a token and a zero a special one for the mark."""
    tokens = [byte or CLOSING for byte in b"".join(written)]
    marks = Reasoning("<think>", "</think>", stage=stage, spelled=((CLOSING, "</think>"),), **others)
    out = output(reasoning=marks)
    for token in tokens:
        out.take(SampledToken(token_id=token))
    out.end(FinishReason.LENGTH)
    streamed = completion_of(out.ready)
    sampled = [SampledToken(token_id=token) for token in tokens]
    texts = partial(TextDeltas, TokenBytes(BYTES), frozenset())
    whole = output(reasoning=marks).completion(sampled, FinishReason.LENGTH, texts)
    assert evolve(streamed, top_logprobs=None) == evolve(whole, top_logprobs=None)
    assert sum(delta.reasoning_tokens for delta in out.ready) == whole.usage.reasoning_tokens
    place = Track.of(marks, TokenBytes(BYTES)).at(tokens)
    behind = set(tokens[place.before : whole.usage.reasoning_tokens])
    assert behind <= (set() if marks.structured else {CLOSING, *b"\n", *marks.before.encode()}), "of the mark"
    assert bool(whole.text) <= (place.answer is not None or stage is Stage.UNDECIDED)
    told = [delta for delta in out.ready if delta.text or delta.reasoning]
    assert told == sorted(told, key=lambda delta: bool(delta.text)), "reasoning comes first"


SO, RESPONSE = Stage.REASONS, {"around": ("<response>", "</response>")}
CHANNELS = {"around": ("<final>", ""), "pauses": ("<end><more>",)}


@pytest.mark.parametrize(
    ("written", "marks", "reasoning", "text", "before"),
    [
        ("so</think>\n\nyes", {}, "so", "yes", 12),
        ("so</think>\n\n", {}, "so", "", 12),
        ("so</think>\nü", {}, "so", "ü", 11),
        ("so</think>\n\nyes", {"structured": True}, "so", "\n\nyes", 10),
        ("so</think>a<think>b</think>c", {}, "so", "a<think>b</think>c", 10),  # opened again: as vLLM and SGLang do
        ("so</think>\n<response>\nyes\n</response>\n", RESPONSE, "so", "yes", 22),
        ("so</think><response>a </response> b", RESPONSE, "so", "a </response> b", 20),
        ("so</think><resp", RESPONSE, "so", "<resp", 10),
        ("so</think><b>", RESPONSE, "so", "<b>", 10),
        ("so</think><response>yes</respo", RESPONSE, "so", "yes</respo", 20),
        ("so</think>ok </response>", {**RESPONSE, "structured": True}, "so", "ok </response>", 10),
        ("so\n<tool_call>x", {"call": "<tool_call>"}, "so", "<tool_call>x", 13),
        ("a <tool_call> b</think>c", {"call": "<tool_call>"}, "a <tool_call> b", "c", 23),
        ("so\n<tool", {"call": "<tool_call>"}, "so", "", 8),
        ("so<end><more>on</think>yes", CHANNELS, "so\non", "yes", 23),
        ("<final>yes", {**CHANNELS, "stage": Stage.UNDECIDED}, "", "yes", 7),
        ("<fi", {**CHANNELS, "stage": Stage.UNDECIDED}, "", "<fi", 0),
    ],
)
def test_what_stands_around_reasoning_and_answer_is_part_of_neither(
    written: str, marks: dict[str, Any], reasoning: str, text: str, before: int
) -> None:
    """Whole, as a stream, and where tokens are read as they come. The first ``before`` tokens are no answer's."""
    given = Reasoning("<think>", "</think>", **{"stage": SO, **marks})
    sampled = [SampledToken(token_id=token) for token in written.encode()]
    whole = output(reasoning=given).completion(
        sampled, FinishReason.LENGTH, partial(TextDeltas, TokenBytes(BYTES), frozenset())
    )
    assert (whole.reasoning, whole.text, whole.usage.reasoning_tokens) == (reasoning, text, before)
    for out in (output(reasoning=given), output("never", reasoning=given)):
        for one in sampled:
            out.take(one)
        out.end(FinishReason.LENGTH)
        assert evolve(completion_of(out.ready), top_logprobs=None) == evolve(whole, top_logprobs=None)
        ends, places = list[int](), accumulate(len(delta.token_ids) for delta in out.ready)
        for place, delta in zip(places, out.ready, strict=True):
            ends += [place - len(delta.token_ids) + delta.reasoning_tokens] if delta.reasoning_tokens else []
        assert (ends[-1] if ends else 0) == before, "they come first in the stream, too"


def test_half_a_character_before_a_mark_belongs_to_the_reasoning():
    out = output(reasoning=Reasoning("<think>", "</think>", stage=Stage.REASONS, spelled=((CLOSING, "</think>"),)))
    for token in (97, 0xC3, CLOSING, 98):
        out.take(SampledToken(token_id=token))
    out.end(FinishReason.STOP)
    told = completion_of(out.ready)
    assert (told.reasoning, told.text, told.usage.reasoning_tokens) == (f"a{BROKEN}", "b", 3)


def test_a_tokenizer_that_fails_is_told_to_the_reader_alone():
    class Failing:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            raise OverflowError("no such token")

    out = output("stop", tokenizer=Failing())
    out.take(SampledToken(token_id=97))
    with pytest.raises(OverflowError):
        out.raise_fault()

"""From tokens to text: what comes piece by piece is the whole text, for the decoders of real tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from triolet import Completion, Delta, FinishReason, InvalidRequest
from triolet.api.outputs.results import Usage
from triolet.api.outputs.stops import StopStrings
from triolet.api.outputs.text import Output, TextDeltas, completion_of
from triolet.core.plan import SampledToken

from ..models.conftest import make_tokenizer

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


BYTES = make_tokenizer()  # as GPT-2's and Whisper's: a token may be any part of a character; special ones from 256 on
TOKENIZERS = {  # and how many of their tokens are tried
    "bytes": (BYTES, 262),
    "sentencepiece": (sentencepiece(), len(WORDS) + 1),
    "metaspace": (metaspace(), len(WORDS)),
    "wordpiece": (wordpiece(), 7),
}


def pieces(tokenizer: PreTrainedTokenizerFast, token_ids: list[int], *, skip: bool = True) -> list[str]:
    texts = TextDeltas(tokenizer, frozenset(), skip=skip)
    return [*(texts.add(token) for token in token_ids), texts.rest()]


@pytest.mark.parametrize("skip", [True, False], ids=["without special tokens", "with special tokens"])
@settings(max_examples=100)
@given(name=st.sampled_from(sorted(TOKENIZERS)), data=st.data())
def test_what_comes_piece_by_piece_is_what_comes_at_once(name: str, data: st.DataObject, skip: bool) -> None:
    """Characters cut anywhere, bytes that are no characters, and the words of every decoder with their spaces."""
    tokenizer, count = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, count - 1), max_size=16))
    text = "".join(pieces(tokenizer, token_ids, skip=skip))
    assert text == (tokenizer.decode(token_ids, skip_special_tokens=skip) if token_ids else "")
    if name == "bytes" and not skip:
        assert text.count("|>") >= sum(token >= 256 for token in token_ids)


@settings(max_examples=150)
@given(st.text("ab é你😀.", max_size=12))
def test_characters_spelled_in_bytes_between_words_come_whole(text):
    """The bytes of 你 and 😀 are tokens of their own: no piece ends within a character."""
    tokenizer, _ = TOKENIZERS["sentencepiece"]
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
    texts = TextDeltas(tokenizer, frozenset({260}))
    assert [texts.add(token) for token in (97, 260, 98)] == ["a", "", "b"]


# -- outputs ---------------------------------------------------------------------------------------------------------


def output(*stops: str, tops: bool = False) -> Output:
    return Output(
        prompt_tokens=3,
        stop_ids=frozenset({256}),
        texts=TextDeltas(BYTES, frozenset()),
        stops=StopStrings(stops),
        tops=tops,
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
    withdrawn: list[int] = []
    out = output("STOP")
    out.withdraw = lambda: withdrawn.append(1)
    deltas = deltas_of(out, "go STOP on")
    assert withdrawn == [1]
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
    withdrawn: list[int] = []
    out = output()
    out.withdraw = lambda: withdrawn.append(1)
    out.take(SampledToken(token_id=256, error="too complex"))
    out.take(SampledToken(token_id=97))
    assert (withdrawn, list(out.ready), out.over) == ([1], [], False)
    with pytest.raises(InvalidRequest, match="too complex"):
        out.raise_fault()
    out.raise_fault()
    assert out.over


def test_a_tokenizer_that_fails_is_told_to_the_reader_alone():
    class Broken:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            raise OverflowError("no such token")

    out = output("stop")
    out.texts = TextDeltas(Broken(), frozenset())
    out.take(SampledToken(token_id=97))
    with pytest.raises(OverflowError):
        out.raise_fault()

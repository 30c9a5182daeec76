"""Encoder outputs that one executor computes and another one uses: bit for bit the same, and the same tokens."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve

from triolet.core.config import Speculation
from triolet.core.errors import BorrowFailed
from triolet.core.model import ModelDescription
from triolet.core.plan import LentOutput
from triolet.core.request import EncoderItem
from triolet.models.executor import TorchExecutor

from .media import items_of
from .texts import SMALL, encode_job

Opens = Callable[..., tuple[TorchExecutor, ModelDescription]]


def sent(output: LentOutput) -> LentOutput:
    """As it comes out of another process: of arrays that nobody may write to."""
    there: LentOutput = pickle.loads(pickle.dumps(output))
    for array in there.arrays:
        array.data.flags.writeable = False
    return there


def outputs(executor: TorchExecutor, key: str) -> list[torch.Tensor]:
    return [kept.get(key) for _, kept in executor._open.crossed()]


def lend(lender: TorchExecutor, borrower: TorchExecutor, job: EncoderItem) -> None:
    """And compare what came with what the borrower would have computed."""
    lender.encode((job,))
    output = sent(lender.take_out(job.key))
    assert output.size == job.size, "books balance: its bytes are those that the ledger counts"
    borrower.put_in(output)
    came = outputs(borrower, job.key)
    borrower.free((job.key,))
    borrower.encode((job,))
    for ours, theirs in zip(outputs(borrower, job.key), came, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), "bit for bit"
        assert theirs.untyped_storage().nbytes() == theirs.nbytes, "in storage of its own"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_audio", "moonshine", "moonshine_streaming", "cohere_asr", "bart"])
def test_items_are_lent_bit_for_bit(name: str, opens: Opens, folder: Callable[[str], Path]) -> None:
    """Images and audio among the tokens, and the items of encoder-decoders."""
    (lender, description), (borrower, _) = opens(folder(name)), opens(folder(name))
    for item in items_of(name, folder(name), description):
        lend(lender, borrower, item)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_windows_are_lent_bit_for_bit_in_every_dtype(dtype: str, opens: Opens, checkpoint: Path, audio) -> None:
    config = evolve(SMALL, dtype=dtype)
    (lender, description), (borrower, _) = opens(checkpoint, config), opens(checkpoint, config)
    lend(lender, borrower, encode_job(description, "k", audio(1)))


def test_the_output_of_a_draft_model_goes_along(opens: Opens, checkpoint: Path, audio) -> None:
    config = evolve(SMALL, speculation=Speculation(draft=str(checkpoint)))
    (lender, description), (borrower, _) = opens(checkpoint, config), opens(checkpoint, config)
    lend(lender, borrower, encode_job(description, "k", audio(1)))
    (alone, _), job = opens(checkpoint), encode_job(description, "k", audio(2))
    alone.encode((job,))
    borrower.free((job.key,))
    with pytest.raises(BorrowFailed, match="the same model and settings"):
        borrower.put_in(alone.take_out(job.key))


def test_tokens_of_a_borrowed_output_are_those_of_an_own_encoding(driver, open_driver, checkpoint, job, audio, ids):
    driver.encode(k=audio(1))
    borrower = open_driver(checkpoint)
    borrower.executor.put_in(sent(driver.executor.take_out("k")))
    asked = job(key="k", prompt=(ids.start, ids.en, ids.transcribe))
    (own,), (borrowed,) = driver.run(asked), borrower.run(asked)
    assert own.tokens
    assert own.tokens == borrowed.tokens
    assert own.logprobs == borrowed.logprobs


def test_what_was_taken_out_is_a_copy(opens: Opens, checkpoint: Path, audio) -> None:
    (lender, description) = opens(checkpoint)
    lender.encode((encode_job(description, "k", audio(1)),))
    (array,), (resident,) = lender.take_out("k").arrays, outputs(lender, "k")
    before = resident.clone()
    array.data[:] = 0
    assert torch.equal(resident, before)
    lender.free(("k",))
    with pytest.raises(AssertionError, match="not resident"):
        lender.take_out("k")


def test_what_is_not_what_was_reserved_for_is_refused(opens: Opens, checkpoint: Path, audio) -> None:
    (lender, description), (other, _) = opens(checkpoint), opens(checkpoint, evolve(SMALL, dtype="bfloat16"))
    lender.encode((encode_job(description, "k", audio(1)),))
    output = lender.take_out("k")
    with pytest.raises(BorrowFailed, match=r"bytes of float32; allowed: .* bytes of bfloat16"):
        other.put_in(output)
    with pytest.raises(AssertionError, match="although resident"):
        lender.put_in(output)

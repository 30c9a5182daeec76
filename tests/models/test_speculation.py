"""Guessers at the executor: what goes wrong with a guess is nobody's failure."""

from __future__ import annotations

import pytest
import torch
import transformers

from triolet.core.config import Speculation
from triolet.core.plan import Chunk, StepPlan
from triolet.testing.families import make_checkpoint

from .texts import first_step

UNREADABLE = 97
"""A token that the comparison at open does not read."""


@pytest.fixture
def broken_draft(tmp_path):
    """The checkpoint in ``tmp_path / "model"``, but it gives NaN for whatever follows one token."""
    folder, target = make_checkpoint("llama", tmp_path / "model"), tmp_path / "draft"
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        module.get_input_embeddings().weight[UNREADABLE] = torch.nan
    module.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return str(target)


def test_a_draft_whose_numbers_break_down_guesses_nothing_and_fails_no_step(open_driver, tmp_path, broken_draft):
    """One of two prompts has the token that it cannot read; the other's proposed are right, since it is the model."""
    executor = open_driver(tmp_path / "model", speculation=Speculation(tokens=3, draft=broken_draft)).executor
    prompts = ((5, UNREADABLE, 6), (5, 7, 6))
    broken, whole = executor.step(first_step(prompts, pages=2, draft_tokens=3)).sampled
    assert broken.token_id is not None
    assert not broken.accepted
    assert len(whole.accepted) == 3


def test_a_step_for_which_nothing_was_guessed_is_recorded_as_any(open_driver, tmp_path):
    """Where proposed are allowed but none is found, a graph does the same work."""
    folder = make_checkpoint("llama", tmp_path)
    executor = open_driver(folder, speculation=Speculation(tokens=3), graphs="eager").executor
    graphs = executor._open.main.network.graphs
    replayed = graphs.replays
    (sampled,) = executor.step(first_step([(5, 6, 7)], pages=2, draft_tokens=3)).sampled
    assert (graphs.replays, sampled.accepted) == (replayed, ())
    decode = Chunk(sequence_id=0, start=3, length=1, page_table=(0, 1), cross_slot=None, samples=True, draft_tokens=3)
    executor.step(StepPlan(step_id=1, epoch=0, started=(), ended=(), cross_writes=(), chunks=(decode,)))
    assert graphs.replays == replayed + 1

"""Guesses at the executor, with recorded steps."""

from __future__ import annotations

from triolet.core.config import Speculation
from triolet.core.plan import Chunk, StepPlan

from ..checkpoints.families import make_checkpoint
from .texts import first_step


def test_a_step_for_which_nothing_was_guessed_is_recorded_as_any(open_driver, tmp_path):
    """Where proposed are allowed but none is found, a graph does the same work."""
    folder = make_checkpoint("llama", tmp_path)
    executor = open_driver(folder, speculation=Speculation(tokens=3), graphs="eager").executor
    graphs = executor._open.parts.network.graphs
    replayed = graphs.replays
    (sampled,) = executor.step(first_step([(5, 6, 7)], pages=2, draft_tokens=3)).sampled
    assert (graphs.replays, sampled.accepted) == (replayed, ())
    decode = Chunk(sequence_id=0, start=3, length=1, page_table=(0, 1), cross_slot=None, samples=True, draft_tokens=3)
    executor.step(StepPlan(step_id=1, epoch=0, started=(), ended=(), cross_writes=(), chunks=(decode,)))
    assert graphs.replays == replayed + 1

"""Hypothesis strategies for your own properties: requests, schedules and whole scenarios.

::

    @given(scenarios(), schedules())
    def test_the_engine_keeps_its_promises(scenario, schedule):
        simulate(scenario, schedule)

Every sampled value is frozen, and its ``repr`` is Python that makes it again.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from triolet.core.config import Speculation
from triolet.core.model import Kind
from triolet.core.request import Pooling

from .clients import FOREVER, Client, Scenario
from .sim_model import IMAGE, MOST_IMAGE, START, SimModel
from .trio_tools.schedules import Listed, Pct, Schedule, Uniform

__all__ = ["image_requests", "requests", "scenarios", "schedules"]

MOST_PROMPT, MOST_TOKENS, MOST_IMAGES = 6, 8, 3
_MOMENTS = (0.0, 0.31, 0.33, 0.35, 0.5, 1.0)  # an encoding of the simulated device takes 0.3 s, a step 0.02 s


def requests(*, audios: int = 4) -> st.SearchStrategy[Client]:
    """Samples one client on one of ``audios`` recordings. The client arrives at one of a few moments that coincide with
    the device's calls. Some clients leave early, some read slowly."""
    return st.builds(
        Client,
        audio=st.integers(0, audios - 1),
        prompt=st.lists(st.integers(START, 9), max_size=MOST_PROMPT - 1).map(lambda rest: (START, *rest)),
        **_HABITS,
    )


@st.composite
def image_requests(draw: st.DrawFn, *, images: int = 4) -> Client:
    """Samples one client of a decoder. Its prompt has up to three of ``images`` images among few different tokens, so
    that prompts often begin alike. Some clients request a vector."""
    pieces = draw(st.lists(st.integers(0, images + 1), max_size=MOST_PROMPT - 1))
    shown = tuple(piece - 2 for piece in pieces if piece >= 2)[:MOST_IMAGES]
    left = iter(shown)
    prompt = [piece + 2 if piece < 2 else IMAGE if next(left, None) is not None else START for piece in pieces]
    return draw(
        st.builds(
            Client,
            images=st.just(shown),
            prompt=st.just((START, *prompt)),
            pooling=st.sampled_from((None, None, None, Pooling(kind="last"), Pooling(kind="mean"))),
            **_HABITS,
        )
    )


_HABITS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, MOST_TOKENS),
    "priority": st.integers(0, 2),
    "arrives": st.sampled_from(_MOMENTS),
    "patience": st.sampled_from((FOREVER, FOREVER, 1.0, 0.4, 0.32, 0.05)),
    "pause": st.sampled_from((0.0, 0.0, 0.01, 0.5)),
}


def schedules() -> st.SearchStrategy[Schedule]:
    """Samples schedules. A `Listed` schedule shrinks to the few choices that matter; `Uniform` and `Pct` stay unfair
    for the whole run."""
    choices = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12)  # Hypothesis makes lists of lists longer
    seeds = st.integers(0, 2**16)
    return st.one_of(
        st.builds(Listed, choices.map(lambda runs: tuple(choice for run in runs for choice in run))),
        st.builds(Uniform, seeds),
        st.builds(Pct, seeds, depth=st.integers(1, 5), ticks=st.sampled_from((50, 200, 800))),
    )


@st.composite
def scenarios(draw: st.DrawFn, *, most_clients: int = 4) -> Scenario:
    """Samples up to ``most_clients`` clients and an engine that is too small for them: few pages, few cross slots, an
    encoder cache of one to three outputs, short queues. Sometimes the block ends while clients are busy. Some models
    read audio, the others images. Some have recurrent layers, and few states."""
    page_size = draw(st.sampled_from((4, 2, 3)))
    kind = draw(st.sampled_from((Kind.ENCODER_DECODER, Kind.DECODER)))
    windows = kind is Kind.ENCODER_DECODER
    positions = MOST_PROMPT + MOST_TOKENS + (0 if windows else MOST_IMAGES * (MOST_IMAGE - 1))
    least = -(-positions // page_size)  # the pages of one sequence
    model = SimModel(
        max_positions=positions,
        page_size=page_size,
        pages=least + draw(st.integers(0, 2 * least)),
        cross_slots=draw(st.integers(1, 3)),
        kind=kind,
        states=draw(st.sampled_from((0, 0, 1, 2, 4))),
    )
    asked = requests() if windows else image_requests()
    clients = draw(st.lists(asked, min_size=1, max_size=most_clients).map(tuple))
    leaves = draw(st.sampled_from((FOREVER, FOREVER, 0.36, 0.6)))
    return Scenario(name="sampled", clients=clients, model=model, config=draw(_settings(model)), leaves=leaves)


def _settings(model: SimModel) -> st.SearchStrategy[dict[str, object]]:
    """Samples settings of `triolet.EngineConfig`."""
    size, embeddings = model.encoder_bytes, model.encoder_embeddings
    if model.kind is not Kind.ENCODER_DECODER:  # the largest image must fit
        size, embeddings = MOST_IMAGE * size // embeddings, MOST_IMAGE
    return st.fixed_dictionaries(
        {
            "encoder_cache_bytes": st.integers(1, 3).map(lambda count: count * size),
            "encode_batch_embeddings": st.integers(1, 2).map(lambda count: count * embeddings),
            "max_pending": st.integers(1, 4),
            "max_running": st.integers(1, 4),
            "max_step_tokens": st.sampled_from((64, 1, 4)),
            "steps_in_flight": st.integers(1, 2),
            "encoder_idle_seconds": st.sampled_from((30.0, 0.1)),
            "prefix_caching": st.booleans(),
            "speculation": st.sampled_from((None, None, Speculation(tokens=1), Speculation(tokens=3))),
        }
    )

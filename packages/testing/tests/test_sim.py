"""The simulated model behind the engine's own front: prompts with images, and what its preparer refuses."""

from __future__ import annotations

import numpy as np
import pytest

from triolet import EngineConfig, InvalidRequest, SamplingParams
from triolet.core.model import Kind
from triolet_testing.clients import Client, true_tokens
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.sim_model import IMAGE, START, SimModel, SimPreparer

DECODER = SimModel(kind=Kind.DECODER)
PROMPT = (START, IMAGE, 5, IMAGE, 6)


def picture(number: int) -> np.ndarray:
    return np.full((2, 2, 3), number, np.uint8)


async def test_a_decoder_reads_images_among_its_tokens(autojump_clock):
    """Through `Engine.generate`; the second request finds the pages of the first."""
    async with sim_engine(SimExecutor(DECODER), config=EngineConfig(verify=True)) as engine:
        for numbers in ((3, 2), (3, 1)):
            done = await engine.generate(
                prompt_token_ids=PROMPT,
                images=[picture(number) for number in numbers],
                sampling=SamplingParams(max_tokens=6),
            )
            client = Client(images=numbers, prompt=PROMPT, max_tokens=6)
            assert done.token_ids == true_tokens(client, DECODER)
        assert engine.statistics().requests.tokens_cached == 4, "the page with the image that both have"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"images": [1]}, "1 images are given; allowed: 2"),
        ({"images": [1, 2], "audio": [0]}, "reads no audio"),
    ],
)
def test_a_prompt_that_does_not_fit_its_images_is_refused(arguments, says):
    with pytest.raises(InvalidRequest, match=says):
        SimPreparer(model=DECODER).prepare(PROMPT, **arguments)


def test_a_simulated_model_has_no_chat_template():
    preparer = SimPreparer(model=DECODER)
    assert not preparer.converses
    with pytest.raises(InvalidRequest, match="no chat template"):
        preparer.render([{"role": "user", "content": "hello"}])
    assert preparer.prepare(preparer.with_items("bc", 1), images=[2]).items[0].spans == ((0, 3),)

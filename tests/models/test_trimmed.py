"""Windows with fewer embeddings than the model's: encoded, kept, read and aligned as transformers would."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triolet.core.errors import InvalidRequest
from triolet.core.request import EncoderItem, LogitRules, SamplingParams

from .conftest import greedy

FREE = {"rules": LogitRules(), "sampling": SamplingParams(ignore_eos=True)}


def window(key, samples, embeddings):
    return EncoderItem(key=key, payload=samples, embeddings=embeddings, size=1)


def shortened(model, features, samples, embeddings):
    """The output of transformers' encoder that has so many positions."""
    encoder = copy.deepcopy(model.model.encoder)
    positions = torch.nn.Embedding.from_pretrained(encoder.embed_positions.weight[:embeddings])
    encoder.embed_positions, encoder.config.max_source_positions = positions, embeddings
    with torch.inference_mode():
        return encoder(features(samples)[..., : 2 * embeddings]).last_hidden_state[0]


@pytest.mark.parametrize("embeddings", [1, 37, 99])
def test_a_trimmed_window_is_transformers_encoder_without_the_silence(driver, reference, features, audio, embeddings):
    """Positions and features are those of the beginning; other lengths in the batch change nothing."""
    samples = audio(1)[: embeddings * 320]
    driver.executor.encode((window("a", samples, embeddings), window("b", audio(2), 100), window("c", audio(3)[:9], 5)))
    found = driver.executor._open.outputs.get("a").clone()
    expected = shortened(reference, features, samples, embeddings)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert [len(driver.executor._open.outputs.get(key)) for key in "bc"] == [100, 5]


def test_samples_must_fit_into_their_embeddings(driver, audio):
    with pytest.raises(InvalidRequest, match=r"samples of shape \(321,\); allowed: \(1..320,\)"):
        driver.executor.encode((window("a", audio(1)[:321], 1),))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([7, 40, 41, 100]), min_size=1, max_size=6), st.booleans(), st.integers(0, 3))
def test_windows_of_several_lengths_are_read_side_by_side(
    open_driver, checkpoint, reference, audio, ids, job, lengths, shared, late
):
    """Each as transformers' decoder reads its output. The second time slots that held longer ones hold shorter ones,
    and the other way round: nothing of the ones before is read."""
    driver = open_driver(checkpoint)
    driver.share_slots = shared
    prompt = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    for turn, asked in enumerate((lengths, lengths[::-1])):
        keys = [f"{turn}-{index}" for index in range(len(asked))]
        jobs = [window(key, audio(index, 0.1), most) for index, (key, most) in enumerate(zip(keys, asked, strict=True))]
        driver.executor.encode(tuple(jobs))
        outputs = {key: driver.executor._open.outputs.get(key).clone() for key in keys}
        played = [job(key=key, prompt=prompt, max_tokens=5, joins=late * at, **FREE) for at, key in enumerate(keys)]
        found = driver.run(*played, *played[:1])
        expected = [greedy(reference, outputs[key], prompt, 5) for key in keys]
        assert [one.tokens for one in found] == [*expected, expected[0]]
        driver.executor.free(tuple(keys))

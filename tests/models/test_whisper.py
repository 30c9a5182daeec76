"""The encoder's outputs and the decoder's logits are transformers'."""

from __future__ import annotations

import pytest
import torch

from triolet.core.request import LogitRules, Probe


def encoder_output(driver, key):
    return driver.executor._open.outputs.get(key)


def test_encoder_outputs_equal_transformers(driver, audio, reference, features):
    """Windows of different lengths in one batch, each within 2e-5 of transformers' encoder."""
    clips = {"long": audio(1), "short": audio(2, 0.4), "tiny": audio(3, 0.01)}
    driver.encode(**clips)
    for key, samples in clips.items():
        with torch.inference_mode():
            expected = reference.model.encoder(features(samples)).last_hidden_state[0]
        torch.testing.assert_close(encoder_output(driver, key), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "relu"},
        {"scale_embedding": True},
        {"decoder_layers": 1, "encoder_layers": 3},
        {"num_mel_bins": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 6},
        {"tie_word_embeddings": False},
        {"encoder_layers": 32, "decoder_layers": 4, "num_mel_bins": 128},  # large-v3-turbo
    ],
    ids=str,
)
def test_every_configuration_gives_transformers_logits(
    open_driver, save, make, job, audio, features, ids, tmp_path, changes
):
    """Log-probabilities of the whole vocabulary after each prompt position, for configurations off the main road."""
    model = make(seed=3, **changes)
    driver = open_driver(save(tmp_path, model))
    samples, prompt = audio(4, 1.2), (ids.start, ids.en, 65, 66, 67, 68)
    with torch.inference_mode():
        logits = model(features(samples, model.config.num_mel_bins), decoder_input_ids=torch.tensor([prompt])).logits[0]
    driver.encode(clip=samples)
    everything = tuple(range(ids.vocabulary))
    for position in (0, 3, 5):
        one = job(
            key="clip", prompt=prompt, probe=Probe(position=position, token_ids=everything), max_tokens=1, chunk=4
        )
        (found,) = driver.run(one)[0].probes
        torch.testing.assert_close(torch.tensor(found), logits[position].log_softmax(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_is_close(open_driver, checkpoint, job, audio, ids, reference, features, dtype):
    """In half precision the numbers are near those of float32; only float32 promises equal tokens."""
    driver = open_driver(checkpoint, dtype=dtype)
    assert driver.description.dtype == dtype
    driver.encode(a=audio(1), b=audio(2, 0.5))
    output = encoder_output(driver, "a")
    assert output.dtype is getattr(torch, dtype)
    assert output.numel() * output.element_size() == driver.description.encoder_bytes
    with torch.inference_mode():
        expected = reference.model.encoder(features(audio(1))).last_hidden_state[0]
    assert torch.nn.functional.cosine_similarity(output.float(), expected).min() > 0.98
    jobs = [
        job(key=key, prompt=(ids.start, ids.en), rules=LogitRules(suppress=(1,)), joins=step)
        for step, key in enumerate("ab")
    ]
    assert all(len(one.tokens) == 24 or one.tokens[-1] == ids.eos for one in driver.run(*jobs))

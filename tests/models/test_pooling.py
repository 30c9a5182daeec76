"""One vector of a prompt: as transformers' hidden states give it, however it is batched and chunked. Vectors of BERT
and scores are compared through the whole engine, in ``tests/api/test_pooling.py``."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    EsmConfig,
    EsmModel,
    FNetConfig,
    FNetModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    RobertaConfig,
    RobertaModel,
    XmodConfig,
    XmodModel,
)

from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.core.model import Kind
from triolet.core.request import Pooling

from ..checkpoints.families import make_checkpoint
from .texts import Job, noise

LENGTHS = (3, 40, 1, 9, 12, 41)
KINDS = ("mean", "cls", "last")


def expected(hidden, pooling):
    """Of the last hidden states [rows, hidden]."""
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling.kind]
    return (vector / vector.norm() if pooling.normalize else vector).tolist()


def hidden_states(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_vl"])
def test_vectors_of_a_decoder_equal_transformers(open_driver, tmp_path, family):
    """Every kind, in chunks and whole, beside each other and beside sequences that generate."""
    folder = make_checkpoint(family, tmp_path)
    driver = open_driver(folder)
    asked = [Pooling(kind=kind, normalize=normal) for kind in KINDS for normal in (False, True)]
    jobs = [
        Job(prompt=noise(length, length), pooling=pooling, chunk=(1000, 7)[index % 2], joins=index)
        for index, (length, pooling) in enumerate(zip(LENGTHS, asked, strict=True))
    ]
    generating = Job(prompt=noise(20, 20), max_tokens=6)
    alone = driver.run(generating)[0].tokens
    *results, generated = driver.run(*jobs, generating)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for job, result in zip(jobs, results, strict=True):
        assert result.tokens == []
        told = expected(hidden_states(model, job.prompt), job.pooling)
        assert result.vector == pytest.approx(told, abs=2e-4)
    assert generated.tokens == alone


def test_similar_lengths_share_a_batch_of_torch_and_others_do_not(open_driver, tmp_path, monkeypatch, without_native):
    """At most a quarter of a batch fills it up."""
    driver = open_driver(make_checkpoint("bert", tmp_path))
    shapes = []
    forward = type(driver.executor._open.parts.model.module).forward

    def noted(self, *, input_ids, attention_mask):
        shapes.append(tuple(input_ids.shape))
        assert (attention_mask == 0).sum() <= 0.25 * attention_mask.numel()
        return forward(self, input_ids=input_ids, attention_mask=attention_mask)

    monkeypatch.setattr(type(driver.executor._open.parts.model.module), "forward", noted)
    driver.run(*[Job(prompt=noise(length, 1), pooling=Pooling(kind="cls")) for length in (10, 60, 11, 9, 61, 2)])
    assert sorted(shapes) == [(1, 2), (2, 61), (3, 11)]


# -- what sentence-transformers' files ask for -------------------------------------------------------------------------


def write_modules(folder, *kinds, **pooling):
    entries = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"st.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("kinds", "settings", "told"),
    [
        (("Pooling",), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling(kind="cls")),
        (("Pooling", "Normalize"), {"pooling_mode_lasttoken": True}, Pooling(kind="last", normalize=True)),
        (("Pooling", "Normalize"), {"pooling_mode": "mean"}, Pooling(kind="mean", normalize=True)),
        (("Pooling",), {"pooling_mode": "lasttoken"}, Pooling(kind="last")),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_default_poolings_are_read(open_driver, tmp_path, family, kinds, settings, told):
    """Also of a decoder that could generate: it is loaded without its head, and gives vectors."""
    folder = make_checkpoint(family, tmp_path)
    write_modules(folder, "Transformer", *kinds, **settings)
    driver = open_driver(folder)
    assert driver.description.kind is Kind.POOLING
    assert driver.description.default_pooling == told
    prompt = noise(17, 1)
    (result,) = driver.run(Job(prompt=prompt, pooling=told, chunk=1000 if family == "bert" else 5))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert result.vector == pytest.approx(expected(hidden_states(model, prompt), told), abs=2e-4)


@pytest.mark.parametrize(
    ("kinds", "settings", "error", "told"),
    [
        (("Pooling", "Dense"), {"pooling_mode": "mean"}, UnsupportedModel, "Dense"),
        (("Pooling",), {"pooling_mode_max_tokens": True}, UnsupportedModel, "pooling_mode_max_tokens"),
        (
            ("Pooling",),
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            UnsupportedModel,
            "cls, mean",
        ),
        (("Pooling",), {"pooling_mode_cls_token": "yes"}, CheckpointError, "true or false"),
    ],
    ids=str,
)
def test_other_modules_and_poolings_are_refused(open_driver, tmp_path, kinds, settings, error, told):
    """And damaged settings are told."""
    folder = make_checkpoint("bert", tmp_path)
    write_modules(folder, "Transformer", *kinds, **settings)
    with pytest.raises(error, match=told):
        open_driver(folder)


def test_damaged_modules_are_told(open_driver, tmp_path):
    """No list, no JSON, no settings of the pooling."""
    folder = make_checkpoint("bert", tmp_path)
    for text, told in (("{}", "not a list of modules"), ("[", "cannot be read")):
        (folder / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match=told):
            open_driver(folder)
    write_modules(folder, "Transformer", "Pooling", pooling_mode="mean")
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"its folder has no config\.json"):
        open_driver(folder)


# -- other encoders ----------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def others():
    """An encoder behind another head; one whose positions begin behind the padding; a decoder that looks both ways."""
    bidirectional = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "use_bidirectional_attention": True}
    return {
        "masked_lm": lambda: BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=64)),
        "roberta": lambda: RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=66, pad_token_id=1)),
        "esm": lambda: EsmModel(EsmConfig(**SIZES, max_position_embeddings=66, pad_token_id=1, mask_token_id=2)),
        "gemma": lambda: Gemma3TextModel(Gemma3TextConfig(**SIZES, **bidirectional, max_position_embeddings=64)),
    }


@pytest.mark.parametrize("kind", others())
def test_encoders_without_a_line_of_their_own(open_driver, tmp_path, kind):
    """Up to their last position."""
    torch.manual_seed(0)
    model = others()[kind]().eval()
    make_checkpoint("bert", tmp_path)
    (tmp_path / "config.json").unlink()
    model.save_pretrained(tmp_path)
    driver = open_driver(tmp_path)
    assert driver.description.max_positions == 64
    assert driver.description.whole_prompts
    jobs = [Job(prompt=noise(length, length), pooling=Pooling(kind="mean")) for length in (64, 50, 5)]
    for job, result in zip(jobs, driver.run(*jobs), strict=True):
        told = hidden_states(model.base_model, job.prompt).mean(0).tolist()
        assert result.vector == pytest.approx(told, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FNetModel(FNetConfig(**SIZES, max_position_embeddings=64)), "read beside a longer one"),
        (
            lambda: XmodModel(XmodConfig(**SIZES, max_position_embeddings=66)),
            "transformers itself.*its XmodModel fails",
        ),
    ],
    ids=["mixes", "asks for more"],
)
def test_an_encoder_whose_vectors_would_depend_on_the_batch_is_refused(open_driver, tmp_path, make, told):
    """Fourier transforms know no mask; and what cannot be called at all is told when it is opened, not by a request."""
    torch.manual_seed(0)
    make_checkpoint("bert", tmp_path)
    (tmp_path / "config.json").unlink()
    make().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=told):
        open_driver(tmp_path)


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_what_a_model_cannot_give_is_our_bug(open_driver, tmp_path):
    """Tokens of an encoder, a part of its prompt, a mean behind a shared prefix."""
    encoder = open_driver(make_checkpoint("bert", tmp_path / "bert"))
    with pytest.raises(AssertionError, match="gives vectors only"):
        encoder.run(Job(prompt=noise(5, 1)))
    with pytest.raises(AssertionError, match="a prompt is read whole, not to 3"):
        encoder.run(Job(prompt=noise(5, 1), pooling=Pooling(kind="mean"), chunk=3))
    decoder = open_driver(make_checkpoint("llama", tmp_path / "llama"))
    for driver in (encoder, decoder):
        with pytest.raises(AssertionError, match="no classification head"):
            driver.run(Job(prompt=noise(5, 1), pooling=Pooling(kind="classify")))
    shared = [
        Job(prompt=noise(9, 1), pooling=Pooling(kind="last")),
        Job(prompt=noise(9, 1), pooling=Pooling(kind="mean"), shared=1, joins=1),
    ]
    with pytest.raises(AssertionError, match="mean needs all positions"):
        decoder.run(*shared)

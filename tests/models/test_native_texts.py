"""Encoders of texts by the native library: as transformers, one text beside others with the bits that it has alone."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from triolet.core.config import EngineConfig
from triolet.core.request import Pooling
from triolet.models.blueprints.comparison import _feed, _record
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.linear.modules import QuantizedLinear
from triolet.models.native.encoders import TextEncoder
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner
from triolet.models.networks.encoder import _side_by_side

from ..checkpoints.families import make_checkpoint
from .test_estimate import held
from .texts import Job, noise

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 202,
    "pad_token_id": 0,
}
_DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": "c2p|p2c",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
NAMES = {  # the beginnings of the names of classes, and settings
    "Bert": {},
    "Roberta": {"pad_token_id": 1},
    "XLMRoberta": {"pad_token_id": 1},
    "Camembert": {"pad_token_id": 1},
    "Electra": {"embedding_size": 64},
    "DistilBert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96},
    "Ernie": {"use_task_id": True},
    "EuroBert": {"num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2},
    "MPNet": {"pad_token_id": 1},
    "NomicBert": {},
    "Gte": {"type_vocab_size": 2},
    "ModernBert": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
    },
    "DebertaV2": _DISENTANGLED | {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
}
DEBERTA = {  # settings of DeBERTa's attention; of each kind of place and of embeddings of distances
    "near": {**_DISENTANGLED, "max_relative_positions": 20, "pos_att_type": "p2c", "type_vocab_size": 2},
    "far": {**_DISENTANGLED, "max_relative_positions": 300, "pos_att_type": "c2p", "position_biased_input": True},
    "absolute": {"relative_attention": False},
    "unknown": {**_DISENTANGLED, "pos_att_type": "c2p|p2p"},  # transformers skips what it does not know
}
LENGTHS = (5, 33, 1, 60, 150)


@cache
def encoder_of(name: str, kind: str = "Model", **changes: Any) -> Any:
    """A random model whose layers change a row about as much as trained ones do."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **NAMES[name], **changes})
    made = getattr(transformers, f"{name}{kind}")(config).eval()
    for module in made.modules():
        for parameter in module.parameters(recurse=False):
            size = 0.3 if isinstance(module, nn.Embedding) else 1.2 * parameter.shape[-1] ** -0.5
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=size)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return made


@cache
def packed(model: Any, int8: bool, again: bool) -> TextEncoder:
    """``again``: packed once more, for what is compared to the bit."""
    encoder = TextEncoder(copy.deepcopy(model))
    assert encoder.unknown() is None
    encoder.pack(int8=int8)
    return encoder


def opened(model: Any, *, int8: bool = False, level: int = 0, rows: int = 256, again: bool = False) -> Runner:
    program, library = packed(model, int8, again).program(200), Library.load()
    assert library is not None
    positions = 200 if program.uncounted is None else 201
    return Runner.open(library, program, None, rows=rows, positions=positions, threads=2, level=level)


def hidden_states(runner: Runner, texts: list[list[int]]) -> list[Tensor]:
    feeds = [_feed(_record(0, text, Pooling(kind="classify")), 0, len(text)) for text in texts]
    rows, fed = _side_by_side(feeds, runner.uncounted), [token for text in texts for token in text]
    return list(runner.step(fed, rows).split([len(text) for text in texts]))


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_equal_transformers(name: str) -> None:
    """In int8, too, but for the rounding."""
    texts = [noise(length, length) for length in LENGTHS]
    with torch.inference_mode():
        expected = [encoder_of(name)(torch.tensor([text])).last_hidden_state[0] for text in texts]
    for int8 in (False, True):
        runner = opened(encoder_of(name), int8=int8)
        for theirs, ours in zip(expected, hidden_states(runner, texts), strict=True):
            if int8:
                least = 0.999 if len(ours) > 1 else 0.997
                assert float(torch.cosine_similarity(theirs.mean(0), ours.mean(0), 0)) > least
            else:
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        runner.release()


def test_mpnet_has_32_buckets_however_many_are_stored() -> None:
    model, text = encoder_of("MPNet", relative_attention_num_buckets=64), noise(150, 1)
    runner = opened(model)
    with torch.inference_mode():
        theirs = model(torch.tensor([text])).last_hidden_state[0]
    torch.testing.assert_close(hidden_states(runner, [text])[0], theirs, atol=1e-5, rtol=0)
    runner.release()


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("kind", DEBERTA)
def test_kinds_of_disentangled_attention_equal_transformers(kind: str, level: int) -> None:
    model = encoder_of("DebertaV2", **DEBERTA[kind])
    runner, texts = opened(model, level=level), [noise(length, length) for length in LENGTHS]
    for text, ours in zip(texts, hidden_states(runner, texts), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    runner.release()


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(NAMES)),
    lengths=st.lists(st.sampled_from([1, 2, 9, 32, 33, 48, 49, 120]), min_size=1, max_size=7),
    int8=st.booleans(),
    level=st.sampled_from([1, 3, 4]),
    rows=st.sampled_from([200, 256, 1000]),
    order=st.randoms(use_true_random=False),
)
def test_a_text_has_the_bits_that_it_has_alone(
    name: str, lengths: list[int], int8: bool, level: int, rows: int, order: random.Random
) -> None:
    """Whatever stands beside it, in whatever order, in one call of the library or several."""
    texts = [noise(length, index) for index, length in enumerate(lengths)]
    alone = opened(encoder_of(name), int8=int8, level=level, rows=200)
    together = opened(encoder_of(name), int8=int8, level=level, rows=rows, again=True)
    expected = [hidden_states(alone, [text])[0] for text in texts]
    places = list(range(len(texts)))
    order.shuffle(places)
    for place, found in zip(places, hidden_states(together, [texts[place] for place in places]), strict=True):
        assert torch.equal(found, expected[place])
    alone.release()
    together.release()


def as_checkpoint(model: Any, folder: Any) -> Any:
    """Writes ``model`` beside a tokenizer, and returns the folder."""
    make_checkpoint("bert", folder)
    (folder / "config.json").unlink()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_an_engine_equal_transformers(open_driver: Any, tmp_path: Any, name: str, kind: Any) -> None:
    """Beside others and alone, to the same bits."""
    driver = open_driver(as_checkpoint(encoder_of(name), tmp_path))
    assert driver.executor._open.parts.network.native is not None
    jobs = [Job(prompt=noise(length, length), pooling=Pooling(kind=kind)) for length in LENGTHS]
    for job, result in zip(jobs, driver.run(*jobs), strict=True):
        with torch.inference_mode():
            hidden = encoder_of(name)(torch.tensor([job.prompt])).last_hidden_state[0]
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[kind]
        assert result.vector == pytest.approx(expected.tolist(), abs=1e-5)
        assert driver.run(job)[0].vector == result.vector


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_of_a_cross_encoder_equal_transformers(
    open_driver: Any, tmp_path: Any, name: str, quantization: Any
) -> None:
    """The second text of a pair has type 1, where the model has types."""
    model = encoder_of(name, "ForSequenceClassification", num_labels=3)
    typed = getattr(model.config, "type_vocab_size", 0) > 1 and name not in {"DistilBert", "MPNet"}
    driver = open_driver(as_checkpoint(model, tmp_path), quantization=quantization)
    assert driver.executor._open.parts.network.native is not None
    pooling = [Pooling(kind="classify", second=length // 3 if typed and length > 9 else None) for length in LENGTHS]
    jobs = [Job(prompt=noise(len_, len_), pooling=one) for len_, one in zip(LENGTHS, pooling, strict=True)]
    for job, result in zip(jobs, driver.run(*jobs), strict=True):
        second, types = job.pooling.second, {}
        if second is not None:
            types["token_type_ids"] = (torch.arange(len(job.prompt)) >= second).long()[None]
        with torch.inference_mode():
            expected = model(torch.tensor([job.prompt]), **types).logits[0]
        allowed = 2e-5 if quantization is None else 0.15 * float(expected.abs().max())
        assert result.vector == pytest.approx(expected.tolist(), abs=allowed)
        assert driver.run(job)[0].vector == result.vector


@pytest.mark.parametrize(("name", "pad"), [("MPNet", 0), ("Roberta", 0), ("Roberta", 7)])
def test_the_longest_text_equals_transformers(open_driver: Any, tmp_path: Any, name: str, pad: int) -> None:
    """Its positions begin behind the padding token; those of MPNet behind 1, whatever its padding token is."""
    model = encoder_of(name, pad_token_id=pad)
    driver = open_driver(as_checkpoint(model, tmp_path))
    most = 202 - 1 - (1 if name == "MPNet" else pad)
    assert driver.description.max_positions == most
    prompt = noise(most, 1)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).last_hidden_state[0].mean(0).tolist()
    found = driver.run(Job(prompt=prompt, pooling=Pooling(kind="mean")))[0].vector
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_head_may_read_all_rows(open_driver: Any, tmp_path: Any, pooling: str) -> None:
    model = encoder_of("ModernBert", "ForSequenceClassification", classifier_pooling=pooling)
    driver = open_driver(as_checkpoint(model, tmp_path))
    job = Job(prompt=noise(23, 5), pooling=Pooling(kind="classify"))
    with torch.inference_mode():
        expected = model(torch.tensor([job.prompt])).logits[0].tolist()
    assert driver.run(job)[0].vector == pytest.approx(expected, abs=1e-5)


def test_distances_of_mpnet_have_32_places_whatever_its_settings_say() -> None:
    """So it is in transformers."""
    model, text = encoder_of("MPNet", relative_attention_num_buckets=40), noise(90, 1)
    runner = opened(model)
    with torch.inference_mode():
        expected = model(torch.tensor([text])).last_hidden_state[0]
    torch.testing.assert_close(hidden_states(runner, [text])[0], expected, atol=1e-5, rtol=0)
    runner.release()


@pytest.mark.parametrize(("place", "why"), [("value", "its linear layers are in int8 in part"), ("output", None)])
def test_neighbours_are_in_int8_together(place: str, why: str | None) -> None:
    """Queries, keys and values are one matrix."""
    model = copy.deepcopy(encoder_of("Bert"))
    layer = model.encoder.layer[1].attention
    parent, name = (layer.self, "value") if place == "value" else (layer.output, "dense")
    linear = getattr(parent, name)
    setattr(parent, name, QuantizedLinear(torch.ones(64, 64, dtype=torch.int8), torch.ones(64), linear.bias))
    assert TextEncoder(model).unknown() == why


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_an_estimate_is_no_less_than_what_an_encoder_holds(tmp_path: Any, name: str, quantization: Any) -> None:
    folder = as_checkpoint(encoder_of(name, "ForSequenceClassification"), tmp_path)
    config = EngineConfig(device="cpu", threads=2, quantization=quantization)
    thought, found = estimate(folder, config).by_owner, held(folder, config)
    assert found["weights"] <= thought["weights"] <= 1.1 * found["weights"] + ODDS
    assert found["native"] <= thought["native"] <= found["native"] + (1 << 20)


def test_projections_of_distances_are_in_the_estimate_as_they_are(tmp_path: Any) -> None:
    """They are not packed, and stay in float32."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "position_buckets": 16, "share_att_key": False}
    folder = as_checkpoint(encoder_of("DebertaV2", **sizes), tmp_path)
    config = EngineConfig(device="cpu", threads=2, quantization="int8")
    thought, found = estimate(folder, config).by_owner, held(folder, config)
    assert found["weights"] <= thought["weights"] <= 1.1 * found["weights"] + ODDS


def test_scores_of_many_threads_are_in_the_estimate(tmp_path: Any) -> None:
    """Each has room for those of a whole call, however short the texts are."""
    folder, config = (
        as_checkpoint(encoder_of("Bert"), tmp_path),
        EngineConfig(device="cpu", threads=16, max_positions=20),
    )
    thought, found = estimate(folder, config).by_owner, held(folder, config)
    assert found["native"] <= thought["native"] <= found["native"] + (1 << 20)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("Albert", {}, "its layers are none; known: BertLayer"),
        ("Bert", {"hidden_act": "mish"}, "its activation is mish; known: silu"),
        ("Bert", {"hidden_size": 40}, "its widths are 40 and 96; known: multiples of 16, and of 32 with gates"),
        ("NomicBert", {"intermediate_size": 80}, "its widths are 64 and 80; known"),
        ("EuroBert", {"num_key_value_heads": 2}, "it has fewer heads of keys than of queries"),
        ("Electra", {"embedding_size": 32}, "its embeddings are narrower than its layers"),
        ("Deberta", {}, "its layers are DebertaLayer; known"),
        ("DebertaV2", {"conv_kernel_size": 3}, "it has a convolution"),
        ("DebertaV2", {"embedding_size": 32}, "its embeddings are narrower than its layers"),
        ("DebertaV2", {"position_buckets": 64, "max_relative_positions": 32}, "the buckets of its distances are in no"),
    ],
)
def test_what_the_library_does_not_know_is_told(name: str, changes: dict[str, Any], why: str) -> None:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **NAMES.get(name, {}), **changes})
    told = TextEncoder(getattr(transformers, f"{name}Model")(config)).unknown()
    assert told is not None
    assert told.startswith(why)

"""`EngineConfig.quantization` is "int4": linear layers become blocks of 4 bits when a model is loaded."""

from __future__ import annotations

import logging
from typing import Any

import gguf
import pytest
import torch
import transformers

from triolet.core.config import EngineConfig
from triolet.core.errors import InvalidRequest
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.linear.rounded import int4_blocks, int8_blocks
from triolet.models.native.crossed_decoder import CrossedDecoder
from triolet.models.native.panels import Panels
from triolet.models.native.parts import PackedLinear

from ..checkpoints.checkpoints import random_model, save_checkpoint, special_ids
from ..checkpoints.ctranslate2 import convert
from ..checkpoints.families import make_checkpoint
from ..checkpoints.quantized_checkpoints import gptq, make_wide, quantize
from ..checkpoints.words import LLAMA
from .test_encoder_decoders import jobs_of
from .test_estimate import held
from .texts import Job, encode_job, noise

JOBS = [Job(prompt=noise(length, length)) for length in (3, 17)]


def decoded(blocks, kind):
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def test_a_block_of_what_4_bits_hold_is_exact():
    """Whatever the least value and the scale, if float16 holds them."""
    dice = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 16, (64, 32), generator=dice).float()
    numbers[:, :2] = torch.tensor([0.0, 15.0])
    scales, least = torch.rand(64, 1, generator=dice).half(), torch.randn(64, 1, generator=dice).half()
    values = numbers * scales.float() + least.float()
    assert torch.allclose(decoded(int4_blocks(values), "Q4_1"), values, atol=2e-3)


def test_blocks_fit_better_than_the_nearest_numbers():
    values = torch.randn(512, 32, generator=torch.Generator().manual_seed(5)) * 0.02
    low, high = values.aminmax(dim=1, keepdim=True)
    scale = (high - low) / 15
    nearest = ((values - low) / scale).round() * scale + low
    found = (decoded(int4_blocks(values), "Q4_1") - values).square().mean()
    assert found < 0.9 * (nearest - values).square().mean()
    assert (decoded(int8_blocks(values), "Q8_0") - values).abs().max() < values.abs().max() / 200


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_block_of_equal_values_is_that_value(value):
    values = torch.full((2, 32), value)
    assert torch.equal(decoded(int4_blocks(values), "Q4_1"), values)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return make_wide(tmp_path_factory.mktemp("wide") / "model")


def sections(driver):
    return {name.rpartition(".")[2]: [each.kind for each in one.sections] for name, one in linears(driver).items()}


def linears(driver):
    module = driver.executor._open.parts.model.module
    return {name: one for name, one in module.named_modules() if isinstance(one, PackedLinear)}


def test_linear_layers_are_held_in_4_bits(open_driver, wide):
    driver = open_driver(wide, quantization="int4")
    found = sections(driver)
    assert found["q_proj"] == ["Q4_1", "Q8_0"]  # of queries and keys, and of values, which are one matrix
    assert found["down_proj"] == ["Q4_1"]
    assert found["lm_head"] == []
    together = driver.run(*JOBS)
    assert [one.tokens for one in together] == [driver.run(job)[0].tokens for job in JOBS]
    config = EngineConfig(device="cpu", threads=1, dtype="float32", quantization="int4")
    thought, held_by = estimate(wide, config), held(wide, config)
    assert abs(thought.by_owner["weights"] - ODDS - held_by["weights"]) < 10_000


def test_layers_whose_inputs_are_rows_are_held_in_4_bits_too(open_driver, tmp_path):
    """GPT-2's, with queries, keys and values in one."""
    tokenizer = LLAMA.make()
    sizes: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 128}
    config = transformers.GPT2Config(vocab_size=len(tokenizer), **special_ids(tokenizer), **sizes)
    model = random_model(transformers.GPT2LMHeadModel, config, 0)
    save_checkpoint(tmp_path, model, tokenizer)
    driver = open_driver(tmp_path, quantization="int4")
    found = {name: one for name, one in linears(driver).items() if name != "lm_head"}
    assert len(found) == 8
    for name, one in found.items():
        rows = model.get_submodule(name).weight.detach().T
        blocks = decoded(int4_blocks(rows.reshape(-1, 32)), "Q4_1").view(rows.shape)
        assert torch.equal(one.panels().part(0, len(rows)), blocks)
    settings = EngineConfig(device="cpu", threads=1, dtype="float32", quantization="int4")
    thought, held_by = estimate(tmp_path, settings), held(tmp_path, settings)
    assert abs(thought.by_owner["weights"] - ODDS - held_by["weights"]) < 10_000
    together = driver.run(*JOBS)
    assert [one.tokens for one in together] == [driver.run(job)[0].tokens for job in JOBS]


def test_a_layer_of_few_outputs_keeps_no_neighbour_from_4_bits(open_driver, tmp_path):
    """Qwen3.5's strengths and decays have an output for each head, and are one matrix with what is convolved."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "linear_value_head_dim": 16}
    made = transformers.AutoConfig.from_pretrained(make_checkpoint("qwen3_5_text", tmp_path), **sizes)
    random_model(transformers.Qwen3_5ForCausalLM, made, 2).save_pretrained(tmp_path)
    found = sections(open_driver(tmp_path, quantization="int4"))
    assert found["in_proj_qkv"] == found["in_proj_z"] == found["in_proj_a"] == ["Q4_1", "Q8_0"]
    assert found["q_proj"] == ["Q4_1", "Q8_0", "Q4_1"]  # queries, few keys and values, and gates of queries
    assert found["out_proj"] == ["Q4_1"]
    settings = EngineConfig(device="cpu", threads=1, dtype="float32", quantization="int4")
    thought, held_by = estimate(tmp_path, settings), held(tmp_path, settings)
    assert 0 <= thought.by_owner["weights"] - ODDS - held_by["weights"] < 10_000


def test_what_has_4_bits_in_the_checkpoint_keeps_them(open_driver, wide, tmp_path):
    driver = open_driver(quantize(wide, tmp_path, *gptq())[0], quantization="int4")
    found: Any = sections(driver)
    assert set(found["q_proj"]) == {"INT4_32"}


WIDE: dict[str, Any] = {  # encoder-decoders whose rows are whole blocks
    "moonshine": {"hidden_size": 64, "intermediate_size": 128},
    "t5": {"d_model": 64, "d_ff": 128, "tie_word_embeddings": True},
    "cohere_asr": {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128},
}
WHISPER = {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}


@pytest.fixture
def crossed(tmp_path, make, save):
    """``crossed(name)``: a checkpoint of an encoder-decoder, and its model."""

    def start(name):
        path = tmp_path / name
        if name == "whisper":
            return save(path, model := make(2, **WHISPER)), model
        made = transformers.AutoConfig.from_pretrained(make_checkpoint(name, path), **WIDE[name])
        if name == "cohere_asr":
            made.encoder_config.subsampling_conv_channels = 16
        model = random_model(getattr(transformers, made.architectures[0]), made, 2)
        model.save_pretrained(path)
        return path, model

    return start


def round_as_held(model):
    """Rounds the linear layers of transformers' ``model`` to what is documented: 4 bits, or 8."""
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or module is model.get_output_embeddings():
            continue
        last, cross = name.rpartition(".")[2], "encoder_attn" in name or "EncDecAttention" in name
        values = module.weight.detach().view(-1, 32)
        if last in {"v_proj", "v"} or (cross and last in {"k_proj", "k"}):
            rounded = decoded(int8_blocks(values), "Q8_0")
        else:
            rounded = decoded(int4_blocks(values), "Q4_1")
        module.weight.data.copy_(rounded.view(module.weight.shape))


def heard(driver, name, audio):
    """The encoder outputs of two items, and what is written to both at once, and to each alone."""
    if name == "whisper":
        items, prompt = [encode_job(driver.description, str(seed), audio(seed)) for seed in (1, 2)], (257, 259, 262)
    else:
        items, prompt = jobs_of(driver.description, name)[:2], (1,)
    driver.executor.encode(tuple(items))
    jobs = [Job(key=item.key, prompt=prompt) for item in items]
    outputs = [driver.executor._open.outputs.get(item.key).clone() for item in items]
    return outputs, driver.run(*jobs), [driver.run(job)[0] for job in jobs]


@pytest.fixture
def with_whole_inputs(monkeypatch):
    """Rows have 16 bits where they are multiplied, and words are as in the checkpoint."""
    of_blocks, pack_words = Panels.of_blocks, CrossedDecoder.pack_words
    monkeypatch.setattr(Panels, "of_blocks", lambda *given, planes: of_blocks(*given, planes=2))
    monkeypatch.setattr(CrossedDecoder, "pack_words", lambda decoder, **_: pack_words(decoder, int8=False))


@pytest.mark.parametrize("name", ["whisper", "moonshine", "t5"])
def test_an_encoder_decoder_is_that_of_its_rounded_weights(open_driver, crossed, audio, name, with_whole_inputs):
    """Token for token. Moonshine's convolutions are in int8."""
    folder, model = crossed(name)
    most = 0.2 if name == "moonshine" else 1e-3
    exact, *_ = heard(open_driver(folder), name, audio)
    found, together, alone = heard(open_driver(folder, quantization="int4", kv_dtype="float32"), name, audio)
    round_as_held(model)
    model.save_pretrained(folder)
    expected, written, _ = heard(open_driver(folder), name, audio)
    for own, rounded, unrounded in zip(found, expected, exact, strict=True):
        assert (own - rounded).norm() < most * (unrounded - rounded).norm()
    assert [one.tokens for one in together] == [one.tokens for one in written]
    assert together == alone


def check_saved(folder):
    """What int4 saves beside int8 is what was thought."""
    eight, four = (EngineConfig(device="cpu", threads=1, quantization=one) for one in ("int8", "int4"))
    thought = estimate(folder, eight).by_owner["weights"] - estimate(folder, four).by_owner["weights"]
    assert thought == held(folder, eight)["weights"] - held(folder, four)["weights"] > 0


@pytest.mark.parametrize("name", ["whisper", *WIDE])
def test_an_encoder_decoder_is_held_in_4_bits(open_driver, crossed, audio, name):
    """Rows have the same bits beside others as alone."""
    folder, _ = crossed(name)
    driver = open_driver(folder, quantization="int4")
    _, together, alone = heard(driver, name, audio)
    assert together == alone
    kinds = {name: [each.kind for each in one.sections] for name, one in linears(driver).items()}
    own = [one for name, one in kinds.items() if name.endswith((".q_proj", ".q"))]
    assert own.count(["Q4_1", "Q8_0"]) == 4, "self-attention of two layers each"
    assert own.count(["Q4_1"]) == 2
    assert all(one == ["Q4_1"] for name, one in kinds.items() if name.endswith((".fc2", ".wo", ".linear2")))
    check_saved(folder)


def test_an_encoder_beside_a_decoder_of_texts_stays_in_int8(folder):
    check_saved(folder("qwen3_asr"))


def test_what_ctranslate2_stored_in_int8_stays_so(crossed, tmp_path):
    model = convert(crossed("whisper")[0], tmp_path / "ct2", "int8")
    both = [EngineConfig(device="cpu", threads=1, quantization=one) for one in ("int4", "int8")]
    assert held(model, both[0]) == held(model, both[1])
    assert estimate(model, both[0]) == estimate(model, both[1])


def test_what_reads_frames_is_refused(open_driver, folder):
    with pytest.raises(InvalidRequest, match=r"quantization='int4'.*it reads frames; allowed: quantization='int8'"):
        open_driver(folder("parakeet_ctc"), quantization="int4")


def test_an_encoder_that_torch_computes_is_refused(open_driver, changed):
    """It would be in int8, beside a decoder in 4 bits."""
    folder = changed("moonshine", encoder_hidden_act="mish")
    told = r"quantization='int4'.*native library.*the activation of its encoder is mish.*allowed: quantization='int8'"
    with pytest.raises(InvalidRequest, match=told):
        open_driver(folder, quantization="int4")


def test_that_vectors_change_is_said(open_driver, folder, caplog):
    for name in ("bert", "llama"):
        open_driver(folder(name), quantization="int4")
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [one.partition(" more than")[0] for one in warnings] == [
        "quantization='int4' changes the vectors and scores of BertModel"
    ]
    assert "82 percent keep their nearest text, and with 'int8' 97 percent" in warnings[0]


def test_torch_alone_has_no_4_bits(open_driver, wide, checkpoint, without_native):
    for folder in (wide, checkpoint):
        with pytest.raises(InvalidRequest, match=r"quantization='int4'.*native library.*allowed: quantization='int8'"):
            open_driver(folder, quantization="int4")

"""A model on several devices: the tokens of one, each part where it belongs, and nothing left behind.

The stages are of one device where there is but one. The meta device, which refuses to compute with what is on another,
shows that nothing is on the wrong device.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from attrs import evolve
from transformers import LlamaConfig, LlamaForCausalLM

from triolet.core.config import EngineConfig
from triolet.core.errors import DeviceOutOfMemory, InvalidRequest, UnsupportedModel
from triolet.models.blueprints.comparison import _feed, _record
from triolet.models.launch import pipeline as module
from triolet.models.launch.pipeline import Pipeline, Places, StagedKV, cut
from triolet.models.memory.encoder_outputs import EncoderOutputs
from triolet.models.networks.causal import CausalNetwork
from triolet.models.networks.network import Feed

from .conftest import on_cuda
from .media import PLACEHOLDERS
from .texts import Job, first_step, generate, noise

TWO = ("cpu", "cpu:0")
LENGTHS = (1, 5, 23, 40, 70)
CPU, META = torch.device("cpu"), torch.device("meta")


def cuda(count):
    return [
        pytest.mark.cuda,
        pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"no {count} CUDA devices"),
    ]


PLACES = pytest.mark.parametrize(
    "devices",
    [
        TWO,
        pytest.param(("cuda:0", "cuda:0"), marks=cuda(1)),
        pytest.param(("cuda:0", "cuda:1"), marks=cuda(2)),
    ],
    ids=str,
)


@pytest.fixture
def start(open_driver, folder):
    """``start(family, devices, **config_changes)``; no devices: one."""

    def open_one(family, devices=TWO, **changes):
        alone = {} if devices else {"device": "cpu"}
        return open_driver(folder(family), **{"device": "auto", **alone, "devices": devices, **changes})

    return open_one


def jobs_of(driver):
    pooling = driver.description.default_pooling
    return [
        Job(
            prompt=noise(length, length),
            joins=3 * index,
            chunk=(1000, 7, 18)[index % 3],
            max_tokens=10,
            pooling=pooling,
            preempted_at=0 if pooling else 4 * (index % 2),
        )
        for index, length in enumerate(LENGTHS)
    ]


def work(driver):
    return [(one.tokens, one.vector) for one in driver.run(*jobs_of(driver)[1:4])]


def traces_of(executor):
    """What a call has left in the modules."""
    modules = list(executor._open.main.model.module.modules())
    return [each for each in modules if "forward" in vars(each) or each._forward_pre_hooks]


# -- the same tokens ---------------------------------------------------------------------------------------------------


@PLACES
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "llama_classifier"])
def test_two_stages_give_what_one_device_gives(start, family, devices):
    """Prefill and decode together, chunks, joins, preemption; vectors too."""
    driver = start(family, devices)
    assert len(driver.executor._open.main.paged.parts) == 2
    single = start(family, (), device=str(torch.device(devices[0])))
    for found, expected in zip(driver.run(*jobs_of(driver)), single.run(*jobs_of(single)), strict=True):
        assert found.tokens == expected.tokens
        if expected.vector is not None:
            assert found.vector == pytest.approx(expected.vector, abs=1e-5)


@PLACES
@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3", "qwen2_audio"])
def test_images_and_audio_are_read_on_the_first_device(open_driver, opened, name, devices):
    """The tokens are transformers' own."""
    checkpoint = opened(name)
    driver = open_driver(checkpoint.folder, device="auto", devices=devices)
    prompt, items = f"See {checkpoint.placeholder} here", checkpoint.items(1)
    prepared = driver.description.preparer.prepare(prompt, **{"audio" if "audio" in name else "images": items})
    driver.executor.encode(prepared.items)
    placeholders = tuple(item.placeholder for item in prepared.items)
    job = Job(prompt=prepared.token_ids, placeholders=placeholders, chunk=9, max_tokens=8)
    inputs = checkpoint.process(prompt, items)
    inputs.pop("input_ids")
    expected = generate(checkpoint.module, prepared.token_ids, 8, **{"attention_mask": None, **inputs})
    assert driver.run(job)[0].tokens == expected
    outputs = driver.executor._open.outputs.tensors()
    assert {output.device for output in outputs} == {torch.device(devices[0])} or devices == TWO


@pytest.mark.parametrize("name", [*PLACEHOLDERS, "voxtral_realtime", "kyutai_speech_to_text"])
def test_all_that_encodes_is_on_the_first_device(start, name):
    """Wherever transformers has it in the model: after the decoder, too."""
    executor = start(name).executor
    places = executor._blueprints.main._places(executor._open.main.model)
    assert [each.rpartition(".")[2] for each in places.last] == ["norm", "lm_head"]


@pytest.mark.parametrize(
    ("layers", "count", "borders"), [(2, 2, [0, 1, 2]), (5, 2, [0, 2, 5]), (7, 3, [0, 2, 4, 7]), (3, 3, [0, 1, 2, 3])]
)
def test_layers_are_shared_out_evenly(layers, count, borders):
    """The later stages have the odd ones: the first has the embedding."""
    stages = cut(layers, [CPU] * count)
    assert [stage.first for stage in stages] == borders[:-1]
    assert [stage.stop for stage in stages] == borders[1:]


def test_three_stages_of_five_layers(open_driver, folder, tmp_path):
    """Each hands on to the next."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    for path in folder("llama").glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    driver = open_driver(tmp_path, device="auto", devices=("cpu",) * 3)
    assert [len(part._pool) for part in driver.executor._open.main.paged.parts] == [1, 2, 2]
    model.generation_config.eos_token_id = list(driver.description.eos_token_ids)
    model.generation_config.pad_token_id = 0
    jobs = [Job(prompt=noise(length, length), chunk=7, max_tokens=8) for length in (1, 9, 30)]
    assert [result.tokens for result in driver.run(*jobs)] == [generate(model, job.prompt, 8) for job in jobs]


# -- where things are --------------------------------------------------------------------------------------------------


def on_meta(executor):
    """The same network with its last stage on the meta device."""
    network = executor._open.main.network
    stages = cut(len(network.paged.parts), [CPU, META])
    whole = network.model.module
    places = Places.find(whole, network.decoder, stages, whole.get_output_embeddings())
    model = network.model.placed(places.device)
    pages = network.paged.parts[0]
    paged = StagedKV(tuple(pages.another(pages=20, page_size=4, device=stage.device) for stage in stages))
    return CausalNetwork(
        model=model,
        paged=paged,
        positions=network.positions,
        device=CPU,
        generates=network.generates,
        family=network.family,
        pipeline=Pipeline.of(model, places),
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_vl", "idefics3", "qwen2_audio"])
def test_what_a_stage_computes_with_is_on_its_device(start, family, monkeypatch):
    """Long chunks, short ones and single rows. What two stages need is moved once in a step."""
    driver = start(family)
    with torch.inference_mode():
        network = on_meta(driver.executor)
        network.attach()
        names = {
            name: {p.device.type for p in each.parameters()} for name, each in network.model.module.named_modules()
        }
        moves = []
        on = module._on

        def count(device, value, moved):
            known = len(moved)
            result = on(device, value, moved)
            if isinstance(value, torch.Tensor):
                moves.append(len(moved) - known)
            return result

        monkeypatch.setattr(module, "_on", count)
        records = [_record(number, list(noise(length, length))) for number, length in enumerate((9, 40, 1))]
        for record in records:
            network.start(record)
        feeds = [_feed(record, 0, len(record.tokens)) for record in records]
        feeds = [
            Feed(part=evolve(feed.part, page_table=tuple(range(6 * index, 6 * index + 12))), record=feed.record)
            for index, feed in enumerate(feeds)
        ]
        feeds = [evolve(feed, part=evolve(feed.part, page_table=tuple(range(12)))) for feed in feeds]
        logits = network.rows(feeds, [(0, 8), (2, 0)], EncoderOutputs())
        assert logits.device == META
        assert logits.shape == (2, driver.description.vocabulary_size)
        assert 0 < sum(moves) <= 6
        later = [_feed(records[1], 20, 20), _feed(records[0], 8, 1)]
        later = [evolve(feed, part=evolve(feed.part, page_table=tuple(range(12)))) for feed in later]
        assert network.rows(later, [(0, 19)], EncoderOutputs()).device == META
    places = driver.executor._blueprints.main._places(driver.executor._open.main.model)
    assert names[f"{places.layers}.0"] == {"cpu"}
    assert names[f"{places.layers}.1"] == {"meta"}
    assert all(names[name] == {"meta"} for name in places.last)
    assert all(names[name] == {"cpu"} for name in places.before)
    assert {name.split(".")[-1] for name in places.last} >= {"norm", "lm_head"}
    assert any(name.endswith("embed_tokens") for name in places.before)


def test_a_head_that_is_the_embedding_is_on_both_devices(start):
    """And is one tensor where both are on one."""
    executor = start("gemma2").executor
    shared = executor._open.main.model.module
    assert shared.lm_head.weight is shared.get_input_embeddings().weight
    with torch.inference_mode():
        apart = on_meta(executor).model.module
    assert apart.lm_head.weight.is_meta
    assert not apart.get_input_embeddings().weight.is_meta


# -- memory ------------------------------------------------------------------------------------------------------------


def test_s3_a_step_that_fails_leaves_nothing_in_the_modules(books, start, watch):
    """At whichever of its storages: nothing in a module, no tensor, though the error is kept."""
    driver = start("gemma2")
    executor, plan, kept = driver.executor, first_step([noise(length, length) for length in (1, 30)]), []
    with watch() as watched:
        executor.step(plan)
    assert watched.alive == 0
    for number in range(1, len(watched.made), 7):
        executor.reset()
        with watch(fail_at=number) as failed, pytest.raises(DeviceOutOfMemory) as error:
            executor.step(plan)
        kept.append(error.value)
        assert failed.alive == 0, f"storage {number}: {error.value}"
        assert traces_of(executor) == []
    books.check(executor)
    executor.reset()
    assert work(driver)
    executor.close()
    assert books.live() == {}


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no CUDA device")
@PLACES
def test_every_device_gets_every_byte_back(start, devices, no_collector):
    """By the allocators' own count, asleep and closed."""
    if devices == TWO:
        pytest.skip("the allocator's count is CUDA's")

    def allocated():
        torch._C._cuda_clearCublasWorkspaces()
        return [torch.cuda.memory_allocated(name) for name in devices]

    start("llama", devices).executor.close()
    before = allocated()
    driver = start("llama", devices)
    first = [tokens for tokens, _ in work(driver)]
    for keep_weights in (True, False):
        driver.executor.sleep(keep_weights=keep_weights)
        assert allocated() == before
        driver.executor.wake()
        assert [tokens for tokens, _ in work(driver)] == first
    driver.executor.close()
    assert allocated() == before


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"devices": ("cpu",)}, "tuple of two or more devices"),
        ({"devices": ["cpu", "cpu"]}, "tuple of two or more devices"),
        ({"devices": ("cpu", 1)}, "tuple of two or more devices"),
        ({"devices": TWO, "device": "cpu"}, "allowed: one of the two"),
        ({"devices": TWO, "graphs": "eager"}, "allowed: 'auto' or 'off' on several devices"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(settings, told):
    """With what is allowed."""
    with pytest.raises(InvalidRequest, match=told):
        EngineConfig(**settings)


@pytest.mark.parametrize("family", ["whisper", "bert"])
def test_only_decoders_have_stages(books, open_driver, checkpoint, folder, family):
    """Whisper and encoders say what is allowed."""
    path = checkpoint if family == "whisper" else folder(family)
    with pytest.raises(InvalidRequest, match=r"allowed: decoder-only models. Use device='cpu'"):
        open_driver(path, device="auto", devices=TWO)
    assert books.live() == {}


def test_more_stages_than_layers_are_refused(start):
    """With how many there may be."""
    with pytest.raises(InvalidRequest, match="allowed: up to 2, since the model has 2 layers"):
        start("llama", ("cpu",) * 3)


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(start, name):
    """As for one device."""
    with pytest.raises(InvalidRequest, match=f"device='{name}'"):
        start("llama", ("cpu", name))


@on_cuda
def test_devices_of_two_kinds_are_refused(start):
    """They would not share a dtype's numbers."""
    with pytest.raises(InvalidRequest, match="devices of one kind"):
        start("llama", ("cpu", "cuda"))


def test_a_model_without_a_list_of_layers_is_refused(start):
    """Where nobody can say what lies between the embedding and the head."""
    language = start("llama").executor._open.main.network.decoder
    with pytest.raises(UnsupportedModel, match="has 0 lists of 3 numbered layers; several devices"):
        Places.find(language, language, cut(3, [CPU, CPU]))

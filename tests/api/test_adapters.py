"""Adapters of requests: the tokens are those of transformers' model with the same adapter merged into its weights,
whoever runs beside a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from triolet import (
    CheckpointError,
    Completion,
    Engine,
    EngineConfig,
    InvalidRequest,
    ModelSpec,
    Speculation,
    Structure,
    UnknownModel,
    UnsupportedModel,
)

from ..checkpoints.adapters import linears_of, merged, save_adapter, tokens_of
from ..checkpoints.families import make_checkpoint
from .paper import run

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
TOKENS = 8


def config(**others: Any) -> EngineConfig:
    told = {"adapters": 2, "adapter_rank": 6, "device": "cpu", "page_size": 4, "max_positions": 64}
    return EngineConfig(**{**told, **others})


async def ask(engine: Engine, adapter: str | None, **others: Any) -> Completion:
    told = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **others}
    return await engine.generate(adapter=adapter, **told)


async def ask_all(engine: Engine, adapters: list[str | None], **others: Any) -> list[Completion]:
    found: dict[int, Completion] = {}

    async def one(index: int, adapter: str | None) -> None:
        found[index] = await ask(engine, adapter, **others)

    async with trio.open_nursery() as nursery:
        for index, adapter in enumerate(adapters):
            nursery.start_soon(one, index, adapter)
    return [found[index] for index in range(len(adapters))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and three adapters of it: of all layers, of some, and with another scale and rank."""
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder / "model")
    shapes = linears_of(folder / "model")
    save_adapter(folder / "all", shapes, seed=1, rank=4)
    some = {name: shape for name, shape in shapes.items() if name.endswith(("q_proj", "v_proj"))}
    save_adapter(folder / "some", some, seed=2, rank=6, lora_alpha=12)
    save_adapter(folder / "scaled", shapes, seed=3, rank=2, use_rslora=True)
    return folder


NAMES = ["all", "some", "scaled"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_next"])  # gated; activated; recurrent, with ordered outputs
async def test_tokens_are_those_of_the_merged_model(family: str, tmp_path: Path) -> None:
    """Three adapters of two slots, and the model itself, in one batch; and again over what the first ones left."""
    make_checkpoint(family, tmp_path / "model")
    allowed = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "o_proj"]  # not the router or its like
    shapes = linears_of(tmp_path / "model", allowed if family == "qwen3_next" else None)
    adapters = [save_adapter(tmp_path / f"{seed}", shapes, seed=seed, rank=2 + seed) for seed in range(3)]
    expected = [tokens_of(merged(tmp_path / "model", adapter), PROMPT, TOKENS) for adapter in (None, *adapters)]
    assert len({tuple(one) for one in expected}) == 4
    async with Engine(tmp_path / "model", config=config()) as engine:
        for adapter in adapters:
            await engine.load_adapter(adapter.name, adapter)
        assert engine.adapters == ("0", "1", "2")
        for _ in range(2):
            found = await ask_all(engine, [None, "0", "1", "2"])
            assert [list(one.token_ids) for one in found] == expected


async def test_a_row_has_the_same_bits_alone_and_beside_other_adapters(llama: Path) -> None:
    """And a row without an adapter those of an engine without adapters."""
    async with Engine(llama / "model", config=config(adapters=0)) as engine:
        plain = await ask(engine, None)
    async with Engine(llama / "model", config=config(adapters=3, prefix_caching=False)) as engine:
        for name in NAMES:
            await engine.load_adapter(name, llama / name)
        together = await ask_all(engine, [None, *NAMES, "all", None])
        alone = [await ask(engine, name) for name in (None, *NAMES)]
    assert [one.logprobs for one in together] == [one.logprobs for one in (*alone, alone[1], alone[0])]
    assert plain.logprobs == alone[0].logprobs


async def test_searches_drafts_and_forms_go_by_the_adapter(llama: Path) -> None:
    module = merged(llama / "model", llama / "all")
    repeated = PROMPT * 3
    async with Engine(llama / "model", config=config(speculation=Speculation(tokens=4))) as engine:
        await engine.load_adapter("all", llama / "all")
        found = await ask(engine, "all", prompt_token_ids=repeated)
        assert list(found.token_ids) == tokens_of(module, repeated, TOKENS)
        searched = await ask(engine, "all", beam_size=3)
        sampled = await ask(engine, "all", temperature=1.0, seed=3, n=2)
        formed = await ask(engine, "all", structure=Structure(kind="regex", text="[ab]{3}"), ignore_eos=False)
    assert sampled.token_ids != sampled.alternatives[0].token_ids
    assert set(formed.text) <= set("ab")
    async with Engine(llama / "model", config=config(adapters=0)) as engine:
        assert searched.token_ids != (await ask(engine, None, beam_size=3)).token_ids


async def test_a_name_that_is_loaded_again_has_the_new_weights(llama: Path) -> None:
    """Though its prompt's pages are still cached; the same weights under another name share them."""
    async with Engine(llama / "model", config=config()) as engine:
        await engine.load_adapter("mine", llama / "all")
        before = await ask(engine, "mine")
        await engine.load_adapter("mine", llama / "some")
        after = await ask(engine, "mine")
        cached = engine.statistics().requests.tokens_cached
        await engine.load_adapter("theirs", llama / "some")
        assert (await ask(engine, "theirs")).token_ids == after.token_ids
        assert engine.statistics().requests.tokens_cached > cached == 0
    assert list(before.token_ids) == tokens_of(merged(llama / "model", llama / "all"), PROMPT, TOKENS)
    assert list(after.token_ids) == tokens_of(merged(llama / "model", llama / "some"), PROMPT, TOKENS)


async def test_requests_end_as_they_began_when_their_adapter_is_unloaded(llama: Path) -> None:
    expected = tokens_of(merged(llama / "model", llama / "all"), PROMPT, 40)
    async with Engine(llama / "model", config=config()) as engine:
        await engine.load_adapter("all", llama / "all")
        await engine.load_adapter("some", llama / "some")
        loaded = engine.statistics().device.by_owner["loaded_adapters"]
        async with engine.stream(prompt_token_ids=PROMPT, adapter="all", max_tokens=40, ignore_eos=True) as deltas:
            told = list((await anext(deltas)).token_ids)
            await engine.unload_adapter("all")
            with pytest.raises(UnknownModel, match=r"no adapter 'all'; allowed: some\."):
                await ask(engine, "all")
            async for delta in deltas:
                told += delta.token_ids
        assert told == expected
        await ask(engine, "some")
        await engine.unload_adapter("some")
        await ask(engine, None)
        with pytest.raises(UnknownModel, match="allowed: none, since none is loaded"):
            await engine.unload_adapter("some")
        assert engine.statistics().device.by_owner["loaded_adapters"] == 0 < loaded


async def test_what_adapters_take_is_known_before_they_are_loaded(llama: Path) -> None:
    """The slots, the files, and the room that rows need: by owner, no less than is held, and not much more."""
    spec = ModelSpec(llama / "model", config=config(adapters=0), adapters={name: llama / name for name in NAMES})
    thought = spec.needs().by_owner
    async with spec.new_engine() as engine:
        for name, folder in spec.adapters.items():
            await engine.load_adapter(name, folder)
        held = engine.statistics().device.by_owner
    for owner in ("adapters", "loaded_adapters", "native"):
        assert held[owner] <= thought[owner] <= 1.5 * held[owner], owner
    assert sum(held.values()) <= sum(thought.values())


async def test_adapters_outlive_sleep(llama: Path) -> None:
    async with Engine(llama / "model", config=config(sleep_keeps_weights=False)) as engine:
        await engine.load_adapter("all", llama / "all")
        before = await ask(engine, "all")
        await engine.sleep()
        await engine.load_adapter("some", llama / "some")
        await engine.wake()
        assert (await ask(engine, "all")).token_ids == before.token_ids != (await ask(engine, "some")).token_ids


async def test_what_is_no_adapter_of_the_model_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    shapes = linears_of(llama / "model", ["q_proj"])
    (name, shape), *_ = shapes.items()
    wrong = {
        "use_dora": save_adapter(tmp_path / "dora", shapes, seed=1, use_dora=True),
        "bias='all'": save_adapter(tmp_path / "bias", shapes, seed=1, bias="all"),
        "modules_to_save": save_adapter(tmp_path / "saved", shapes, seed=1, modules_to_save=["lm_head"]),
        "trainable_token_indices": save_adapter(tmp_path / "tokens", shapes, seed=1, trainable_token_indices=[1]),
        "pissa": save_adapter(tmp_path / "pissa", shapes, seed=1, init_lora_weights="pissa_niter_4"),
        "changes lm_head; allowed: down_proj, gate": save_adapter(tmp_path / "head", {"lm_head": (269, 64)}, seed=1),
        r"adapter_rank=6. Open .*adapter_rank=8\)": save_adapter(tmp_path / "rank", shapes, seed=1, rank=8),
    }
    async with Engine(llama / "model", config=config()) as engine:
        for told, folder in wrong.items():
            with pytest.raises(UnsupportedModel, match=told):
                await engine.load_adapter("mine", folder)
        with pytest.raises(CheckpointError, match="is of another model"):
            await engine.load_adapter("mine", save_adapter(tmp_path / "o", {name: (shape[0], 32)}, seed=1))
        with pytest.raises(CheckpointError, match="lacks an adapter"):
            await engine.load_adapter("mine", tmp_path / "nowhere")
        with pytest.raises(InvalidRequest, match="an adapter is named ' '"):
            await engine.load_adapter(" ", llama / "all")
        assert engine.adapters == ()
    async with Engine(llama / "model", config=config(adapters=0)) as engine:
        with pytest.raises(InvalidRequest, match="adapters=0; allowed: 1 or more"):
            await engine.load_adapter("all", llama / "all")


@pytest.mark.parametrize(("family", "told"), [("bert", "not a decoder-only model"), ("llama", "graphs='eager'")])
async def test_a_model_that_the_library_does_not_decode_has_no_adapters(family: str, told: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    with pytest.raises(InvalidRequest, match=f"adapters=2, but .* can have no adapters: .*{told}"):
        async with Engine(tmp_path, config=config(graphs="eager" if family == "llama" else "auto", max_positions=0)):
            raise AssertionError("it opened")


def test_a_command_writes_by_the_adapter_of_a_folder(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose rank it finds out itself."""
    asked = ["generate", str(llama / "model"), "abcdefgh", "--raw", "--max-tokens", "6", "--device", "cpu", "--json"]
    assert run([*asked, "--adapter", str(llama / "some")]) == 0
    found = json.loads(capsys.readouterr().out)["tokens"]

    async def expected() -> Completion:
        async with Engine(llama / "model", config=config()) as engine:
            await engine.load_adapter("some", llama / "some")
            return await engine.generate("abcdefgh", adapter="some", max_tokens=6)

    assert found == list(trio.run(expected).token_ids)
    assert run([*asked, "--adapter", str(llama / "nowhere")]) == 1
    assert "lacks an adapter" in capsys.readouterr().err


async def test_a_load_that_nobody_waits_for_is_taken_back(llama: Path) -> None:
    async with Engine(llama / "model", config=config()) as engine:
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.load_adapter("all", llama / "all")
        await ask(engine, None)
        assert engine.adapters == ()
        assert engine.statistics().device.by_owner["loaded_adapters"] == 0

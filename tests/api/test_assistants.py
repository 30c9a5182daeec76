"""An assistant of Gemma 4 proposes what transformers' proposes. It changes how many steps a text takes, and nothing
else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import triolet
from triolet import EngineConfig, SamplingParams, Speculation
from triolet.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from triolet.core.plan import Chunk
from triolet.models.blueprints import text_blueprint
from triolet.models.blueprints.estimate import estimate
from triolet.models.checkpoints.loading import read_tokenizer
from triolet.models.executor import TorchExecutor
from triolet.models.native.library import Library
from triolet.models.native.program import Program
from triolet.models.native.runner import Runner
from triolet.models.networks.network import Feed

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.drafting import assistants_allowed, make_assisted
from ..checkpoints.families import make_checkpoint
from ..models.media import Checkpoint, picture
from ..models.texts import first_step, start_of
from .scarcity import ask_until_preempted, settled
from .test_families import Reference, scarce

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

DRAFTS, LONG = 3, SamplingParams(max_tokens=40, ignore_eos=True)


def proposals(module: Any, own: Any, tokens: Sequence[int], most: int) -> list[int]:
    """What transformers proposes behind ``tokens``, which the model has read at once but for the last one. Of a step
    with wrong draft tokens, transformers shows an assistant the key of the first one, too."""
    read, own.generation_config.num_assistant_tokens = torch.tensor(tokens)[None], most
    outputs = module(read[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    limits = transformers.GenerationConfig(max_length=1000)
    one = SinglePositionMultiTokenCandidateGenerator(own, module.get_input_embeddings(), limits)
    found, _ = one.get_candidates(read, {}, outputs, is_first_iteration=False, n_last_matches=0)
    return found[0, len(tokens) :].tolist()


def models_of(folder: Path, head: Path) -> tuple[Any, Any]:
    """The model and its assistant, as transformers has them."""
    with assistants_allowed():
        own = transformers.Gemma4AssistantForCausalLM.from_pretrained(head).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), own


async def test_an_assistant_proposes_what_transformers_computes(tmp_path: Path, proposed: list[Any]) -> None:
    """Behind a prompt that takes several steps, and beyond the window."""
    head = make_assisted(tmp_path)
    config = EngineConfig(dtype="float32", max_step_tokens=20, speculation=Speculation(tokens=DRAFTS), draft_head=head)
    async with triolet.Engine(tmp_path, config=config) as engine:
        answer = await engine.generate("a cat on the mat and the dog in the hat", sampling=LONG)
    assert len(proposed) > 3
    assert len(proposed[0][0]) == answer.usage.prompt_tokens + 1, "the first token is followed by draft tokens"
    model, own = models_of(tmp_path, head)
    with torch.inference_mode():
        for known, found in proposed:
            assert list(found) == proposals(model, own, known, len(found))


def begun(executor: TorchExecutor) -> list[Feed]:
    """The next chunks of three sequences whose prompts are read in one step."""
    executor.step(first_step([range(5, 45), range(60, 63), range(90, 120)], pages=3))
    feeds = list[Feed]()
    for index, record in executor._records.items():
        pages, last = tuple(range(3 * index, 3 * index + 3)), len(record.tokens) - 1
        part = Chunk(index, last, 1, page_table=pages, cross_slot=None, samples=True, draft_tokens=DRAFTS)
        feeds.append(Feed(part=part, record=record))
    return feeds


@pytest.mark.parametrize("centroids", [4, 0])
def test_proposals_are_the_same_alone_and_beside_others(
    centroids: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In calls of fewer rows, too, and after a sleep."""
    monkeypatch.setattr(text_blueprint, "CHAINS", 2)
    head = make_assisted(tmp_path, centroids=centroids)
    drafts = {"speculation": Speculation(tokens=DRAFTS), "draft_head": head}
    executor = TorchExecutor(tmp_path, EngineConfig(device="cpu", dtype="float32", **drafts))
    executor.open()
    with torch.inference_mode():
        feeds, proposer = begun(executor), executor._open.proposer
        together = proposer.propose(feeds)
        assert together == [proposer.propose([feed])[0] for feed in feeds]
        model, own = models_of(tmp_path, head)
        for feed, found in zip(feeds, together, strict=True):
            assert list(found) == proposals(model, own, feed.record.tokens, DRAFTS)
        for kept in (True, False):
            executor.sleep(keep_weights=kept)
            executor.wake()
            assert executor._open.proposer.propose(begun(executor)) == together
    executor.close()


def test_proposals_are_the_same_beside_a_chunk_that_ends_within_an_image(tmp_path: Path) -> None:
    """The rows of the image behind the chunk are computed, too."""
    head, text = make_assisted(tmp_path, family="gemma4_vision", centroids=5), tuple(range(5, 45))
    image = Checkpoint.open("gemma4_vision", tmp_path).prepare("<|image|>", [picture(30, 50, 1)])
    (item,), start = image.items, start_of(0, image.token_ids, placeholders=(image.items[0].placeholder,))
    cut, pages = item.spans[0][0] + 5, tuple(range(20))
    assert cut < item.spans[0][1]
    chunk = Chunk(0, 0, cut, page_table=pages, cross_slot=None, samples=False)
    drafts = {"speculation": Speculation(tokens=DRAFTS), "draft_head": head}
    executor, found = TorchExecutor(tmp_path, EngineConfig(device="cpu", dtype="float32", **drafts)), []
    executor.open()
    executor.encode((item,))
    for index, before in enumerate(((), (chunk,))):
        plain = first_step([text])
        own = evolve(plain.chunks[0], sequence_id=index + 1, page_table=tuple(range(20, 40)))
        started = (*[start] * len(before), start_of(index + 1, text))
        executor.step(evolve(plain, started=started, chunks=(*before, own)))
        part = evolve(own, start=len(text), length=1, draft_tokens=DRAFTS)
        feed = Feed(part=part, record=executor._records[index + 1])
        with torch.inference_mode():
            found += executor._open.proposer.propose([feed])
    executor.close()
    assert len(found[0]) == DRAFTS
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", [None, "int8"])
async def test_an_assistant_that_is_right_saves_steps(quantization: str | None, tmp_path: Path) -> None:
    head, steps, texts = make_assisted(tmp_path, right=True), list[int](), list[tuple[int, ...]]()
    for named in (None, str(head)):
        drafts = Speculation(tokens=DRAFTS) if named else None
        config = EngineConfig(
            dtype="float32", speculation=drafts, draft_head=named, quantization=quantization, verify=True
        )
        async with triolet.Engine(tmp_path, config=config) as engine:
            texts.append((await engine.generate("a cat", sampling=LONG)).token_ids)
            requests = (await settled(engine)).requests
            steps.append(requests.steps)
    assert requests.tokens_accepted >= requests.tokens_drafted - DRAFTS  # the last ones may be cut
    assert texts[0] == texts[1]
    assert steps[1] < steps[0] / 3


async def test_drafts_of_an_assistant_change_no_token(tmp_path: Path) -> None:
    """Among others, with too few pages, in steps shorter than prompts."""
    head = make_assisted(tmp_path)
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    reference = Reference(name="gemma4", folder=tmp_path, module=module, tokenizer=read_tokenizer(tmp_path))
    asks = sorted(reference.asks(5) * 2, key=lambda ask: -ask.priority)
    config = scarce(reference, asks, speculation=Speculation(tokens=DRAFTS), draft_head=head)
    async with triolet.Engine(tmp_path, config=config) as engine:
        await ask_until_preempted(engine, asks, partial(reference.ask, engine), reference.generate, at_once=4)
        statistics = await settled(engine)
        assert not engine.statistics().device.by_owner.get("draft_kv"), "its keys are the model's"
    assert statistics.requests.tokens_drafted


def test_an_assistant_is_counted_before_it_is_loaded(tmp_path: Path) -> None:
    found, thought = list[dict[str, int]](), list[dict[str, int]]()
    for head in (None, make_assisted(tmp_path)):
        config = EngineConfig(device="cpu", threads=1, max_positions=64, draft_head=head)
        thought.append(dict(estimate(tmp_path, config).by_owner))
        executor = TorchExecutor(tmp_path, config)
        executor.open()
        found.append(dict(executor.memory().by_owner))
        executor.close()
        assert not executor.released.kept
    for owner in ("weights", "native"):
        held, counted = (one[1][owner] - one[0][owner] for one in (found, thought))
        assert 0 < held <= counted < 1.1 * held, owner


OTHERS = {
    "width": ({}, {"backbone_hidden_size": 32}, "width 32; allowed: those of the model, 48"),
    "vocabulary": ({"vocab_size": 264}, {}, "vocabulary 264; allowed: those of the model, 268"),
    "window": ({"sliding_window": 15}, {}, "window 15; allowed: those of the model, 16"),
    "keys": ({"head_dim": 32}, {}, "keys and values of layers .*1 heads of 24 and 24"),
    "turns": ({"rope_parameters": None}, {}, "rotary positions"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_assistant_of_another_model_is_refused(case: str, tmp_path: Path) -> None:
    text, own, told = OTHERS[case]
    head = make_assisted(tmp_path)
    rope = {kind: {"rope_type": "default", "rope_theta": 5.0} for kind in ("sliding_attention", "full_attention")}
    text = {name: rope if value is None else value for name, value in text.items()}
    rewrite(head / "config.json", text_config=lambda old: {**old, **text}, **own)
    with pytest.raises(InvalidRequest, match=f"draft_head='{head}': it is made for another model than .*: {told}"):
        TorchExecutor(tmp_path, EngineConfig(draft_head=head)).open()


@pytest.mark.parametrize("told", [{"num_centroids": 5}, {"centroid_intermediate_top_k": 5}])
def test_an_assistant_of_odd_centroids_is_refused(told: dict[str, int], tmp_path: Path) -> None:
    head = make_assisted(tmp_path)
    rewrite(head / "config.json", **told)
    with pytest.raises(InvalidRequest, match=r"it has num_centroids=. and .* for 268 tokens; allowed: as many tok"):
        TorchExecutor(tmp_path, EngineConfig(draft_head=head)).open()


def test_what_cannot_propose_is_refused_by_name(tmp_path: Path) -> None:
    model, llama = tmp_path / "model", make_checkpoint("llama", tmp_path / "llama")
    head = make_assisted(model)
    for folder, named, more, told in (
        (model, llama, {}, "it is of model_type 'llama'; allowed: model_type 'gemma4_assistant'"),
        (llama, head, {}, "it is made for Gemma 4, and LlamaForCausalLM is of model_type 'llama'"),
        (model, head, {"speculation": None}, "no draft tokens are wanted"),
        (model, head, {"dtype": "float16", "speculation": None}, "it computes in float16"),
        (make_checkpoint("bart", tmp_path / "bart"), head, {}, "draft_head is given for Bart"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            TorchExecutor(folder, EngineConfig(device="cpu", draft_head=named, **more)).open()
    with pytest.raises(UnsupportedModel, match="give it as draft_head of that model"):
        TorchExecutor(head, EngineConfig(device="cpu")).open()
    with pytest.raises(CheckpointError, match="there is no folder"):
        TorchExecutor(model, EngineConfig(draft_head=tmp_path / "none")).open()
    path = head / "model.safetensors"
    weights = load_file(path)
    save_file({name: one for name, one in weights.items() if "post_proj" not in name}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{head} has other weights .*: post_projection.weight;"):
        TorchExecutor(model, EngineConfig(draft_head=head)).open()


def test_experts_of_other_rows_than_those_that_chose_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, plain = make_assisted(tmp_path), Runner.open

    def opened(library: Library, program: Program, *given: Any, **sizes: Any) -> Runner:
        last = program._operations[-1]
        if last.kv_heads == 4 and last.wanted:  # the experts of centroids
            last.wanted = 0
        return plain(library, program, *given, **sizes)

    monkeypatch.setattr(Runner, "open", opened)
    with pytest.raises(AssertionError, match="an operation would leave the buffers"):
        TorchExecutor(tmp_path, EngineConfig(draft_head=head)).open()

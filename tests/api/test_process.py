"""Engines share a process with each other and with the program: none of them disturbs another, and all of them leave
the process as they found it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
import trio
import trio.lowlevel
from attrs import define, field
from hypothesis import given, settings

from triolet import Engine, EngineConfig, SyncEngine, demo
from triolet.models.checkpoints.turns import TURNS, _tie_weights

from .process import EVERY, Folders, answer, both_say, changed, of_new_thread, state

pytestmark = pytest.mark.real_time

ROOT = Path(__file__).parents[2]
NET = 300  # seconds: only a fault takes so long
FOREIGN = (torch.bfloat16, torch.float16, torch.float64)
PAIRS = tuple(combinations_with_replacement(EVERY, 2))
TIED = ("gemma2", "smollm2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("every"))


async def opened(folder: Path, config: EngineConfig | None = None) -> object:
    async with Engine(folder, config=config) as engine:
        return await answer(engine)


@pytest.fixture(scope="module")
def alone(folders: Folders) -> Any:
    """``alone(family)`` is what the family's model says when it is the only one of the process."""
    said: dict[str, object] = {}

    def ask(family: str) -> object:
        if family not in said:
            said[family] = trio.run(opened, folders[family])
        return said[family]

    return ask


@pytest.fixture(autouse=True)
def untouched(alone: Any) -> Iterator[None]:
    """Whatever a test does, the process is as before. What the first engine of a process imports is not counted."""
    for family in TIED:
        alone(family)
    before = state()
    yield
    assert changed(before) == {}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@define
class Held:
    """A load that stands still while transformers makes its module."""

    reached: threading.Event = field(factory=threading.Event)
    go: threading.Event = field(factory=threading.Event)


@contextmanager
def held(model: Any) -> Iterator[Held]:
    """Holds the next load of transformers' class ``model``, as the making of a large module would take seconds."""
    found, begin = Held(), model.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if not found.reached.is_set():
            found.reached.set()
            assert found.go.wait(NET)

    model.__init__ = init
    try:
        yield found
    finally:
        model.__init__ = begin
        found.go.set()


def own_load(folder: Path) -> tuple[bool, list[int]]:
    """Loads the model as a program does that has no engine. Returns whether its head is tied, and what it writes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert model.dtype == torch.bfloat16
    return model.lm_head.weight is model.model.embed_tokens.weight, tokens[0].tolist()


# -- loads that overlap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "families", [("gemma2", "gemma2"), ("smollm2", "bert"), ("whisper", "llava", "moonshine", "t5")]
)
async def test_models_that_are_loaded_at_once_say_what_they_say_alone(
    families: tuple[str, ...], folders: Folders, alone: Any
) -> None:
    expected = await trio.to_thread.run_sync(lambda: [alone(family) for family in families])
    assert await both_say(folders, families) == expected


@pytest.mark.thorough
def test_every_pair_of_families_that_is_loaded_at_once_says_what_it_says_alone(folders: Folders, alone: Any) -> None:
    before = state()
    failed = []
    for pair in PAIRS:
        expected = [alone(family) for family in pair]
        try:
            said = trio.run(both_say, folders, pair)
        except Exception as error:  # noqa: BLE001  (told with its pair)
            said = [error]
        if said != expected or changed(before):
            failed.append((pair, said, changed(before)))
    print(f"{len(PAIRS)} pairs, warm: {len(failed)} failures")  # noqa: T201  (a figure)
    assert failed == []


@pytest.mark.parametrize("user_first", [True, False])
def test_a_load_of_the_program_beside_an_engines_goes_right_and_so_does_the_engines(
    user_first: bool, folders: Folders, alone: Any, threads: ThreadPoolExecutor
) -> None:
    """transformers changes the whole process while it makes a module. Of both loads each once begins within the other,
    and once ends within it. Both heads are tied."""
    expected, theirs = alone("smollm2"), own_load(folders["gemma2"])
    assert theirs[0], "tied"
    classes = (transformers.Gemma2ForCausalLM, transformers.LlamaForCausalLM)
    with held(classes[0]) as user, held(classes[1]) as engine:
        loads = [(user, own_load, (folders["gemma2"],)), (engine, trio.run, (opened, folders["smollm2"]))]
        begun: list[Future[Any]] = []
        for one, call, arguments in loads if user_first else reversed(loads):
            begun.append(threads.submit(call, *arguments))
            assert one.reached.wait(NET)
        seen = of_new_thread(torch.get_default_dtype), transformers.PreTrainedModel.tie_weights.__name__
        if user_first:
            assert seen == (torch.bfloat16, "empty_func"), "as the program's own load leaves it meanwhile"
        for one, _, _ in loads if user_first else reversed(loads):  # the first ends first: not as blocks end
            one.go.set()
            begun[0].result(NET)
            begun.append(begun.pop(0))
    found = [one.result(NET) for one in begun]
    assert found == ([theirs, expected] if user_first else [expected, theirs])


def test_an_engine_that_makes_its_module_changes_nothing_for_other_threads(
    folders: Folders, threads: ThreadPoolExecutor
) -> None:
    """In bfloat16. Only transformers' log is quiet, and Python switches quickly between threads, as in each call of the
    device. The function that makes modules within modules does for other threads what it did."""
    before = state()
    with held(transformers.LlamaForCausalLM) as engine:
        load = threads.submit(trio.run, opened, folders["smollm2"], EngineConfig(dtype="bfloat16"))
        assert engine.reached.wait(NET)
        meanwhile = changed(before)
        engine.go.set()
        load.result(NET)
    assert meanwhile.keys() <= {"verbosity", "levels", "bars", "switch interval", "transformers' making"}
    assert {*meanwhile["transformers' making"][0]} == {"local_torch_dtype"}


def test_a_process_that_the_program_has_spoiled_still_opens_engines(
    folders: Folders, alone: Any, threads: ThreadPoolExecutor
) -> None:
    """Two loads of the program that overlap leave `tie_weights` empty for good."""
    expected, genuine = alone("smollm2"), (transformers.PreTrainedModel.tie_weights, torch.linspace)
    paths = [folders[family] for family in ("gemma2", "llama")]
    classes = (transformers.Gemma2ForCausalLM, transformers.LlamaForCausalLM)
    with held(classes[0]) as first, held(classes[1]) as second:
        loads = []
        for one, path in zip((first, second), paths, strict=True):
            loads.append(threads.submit(transformers.AutoModelForCausalLM.from_pretrained, path))
            assert one.reached.wait(NET)
        first.go.set()
        loads[0].result(NET)
        second.go.set()
        loads[1].result(NET)
    try:
        assert transformers.PreTrainedModel.tie_weights is not genuine[0]
        _tie_weights.cache_clear()  # as if no engine had been opened before
        assert trio.run(opened, folders["smollm2"]) == expected
    finally:
        transformers.PreTrainedModel.tie_weights, torch.linspace = genuine
        _tie_weights.cache_clear()


async def test_an_engine_that_waits_for_anothers_load_can_be_cancelled_at_once(
    folders: Folders, threads: ThreadPoolExecutor
) -> None:
    """Its block ends, and its thread too, while the other load stands still. The loop goes on."""
    with held(transformers.LlamaForCausalLM) as engine:
        load = threads.submit(trio.run, opened, folders["smollm2"])
        await trio.to_thread.run_sync(engine.reached.wait, NET)
        running = threading.active_count()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opened, folders["gemma2"])
            while len(TURNS._queue) < 2:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert not load.done()
        assert threading.active_count() <= running
    load.result(NET)


def cold(folders: Folders, groups: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the answers of models that are loaded at once, as text. Each group has a process that has not imported
    transformers."""
    for family in {family for group in groups for family in group}:
        folders[family]
    told = "".join(json.dumps(group) + "\n" for group in groups)
    command = [sys.executable, "-m", "tests.api.cold_loads", str(folders.root)]
    found = subprocess.run(command, input=told, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_models_that_are_loaded_at_once_in_a_new_process_say_the_same(folders: Folders, alone: Any) -> None:
    """transformers imports its modules when they are first asked for, which is not safe for threads."""
    group = ("smollm2", "llava", "bert", "moonshine")
    assert cold(folders, [group]) == [repr([alone(family) for family in group])]


@pytest.mark.thorough
def test_every_pair_of_families_that_is_loaded_at_once_in_a_new_process_says_the_same(
    folders: Folders, alone: Any
) -> None:
    said = cold(folders, PAIRS)
    failed = [pair for pair, one in zip(PAIRS, said, strict=True) if one != repr([alone(family) for family in pair])]
    print(f"{len(PAIRS)} pairs, cold: {len(failed)} failures")  # noqa: T201  (a figure)
    assert failed == []


# -- the program's default dtype -------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


QUICK = [
    ("whisper", torch.bfloat16),
    ("smolvlm", torch.float64),
    ("granite_speech", torch.bfloat16),
    ("bert", torch.float16),
]
FOREIGNERS = [
    pytest.param(family, dtype, marks=[] if (family, dtype) in QUICK else pytest.mark.thorough)
    for family in EVERY
    for dtype in FOREIGN
]


@pytest.mark.parametrize(("family", "dtype"), FOREIGNERS)
def test_a_foreign_default_dtype_changes_no_answer(
    dtype: torch.dtype, family: str, folders: Folders, alone: Any
) -> None:
    """Whether the program sets it before the engine opens, or before a request, or changes it again and again while
    the engine opens and answers."""
    expected = alone(family)
    with default_dtype(dtype):
        assert trio.run(opened, folders[family]) == expected
        assert torch.get_default_dtype() == dtype

    async def later() -> object:
        async with Engine(folders[family]) as engine:
            with default_dtype(dtype):
                return await answer(engine)

    assert trio.run(later) == expected


@pytest.mark.parametrize("family", ["smolvlm", "granite_speech"])
def test_a_default_dtype_that_changes_all_the_time_changes_no_answer(family: str, folders: Folders, alone: Any) -> None:
    expected, done = alone(family), threading.Event()

    def flip() -> None:
        while not done.is_set():
            for dtype in (torch.bfloat16, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                done.wait(1e-4)

    with default_dtype(torch.float32):
        thread = threading.Thread(target=flip)
        thread.start()
        try:
            assert trio.run(opened, folders[family]) == expected
        finally:
            done.set()
            thread.join()


# -- whatever the order ----------------------------------------------------------------------------------------------

USES: dict[str, Callable[[SyncEngine], object]] = {
    "gemma2": lambda engine: engine.generate("the cat", max_tokens=2),
    "whisper": lambda engine: engine.transcribe(demo.samples()[0].path, voice_activity="off"),
    "bert": lambda engine: engine.embed("the cat"),
}
KINDS = st.sampled_from(sorted(USES))
ACTS = st.lists(st.tuples(KINDS, st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=4)


@settings(max_examples=4)
@given(acts=ACTS)
def test_engines_that_open_and_close_in_any_order_leave_nothing_changed(folders: Folders, acts: Any) -> None:
    """Each has its number of threads, or torch's; its place in the order of closing is drawn, too."""
    before = state()

    begun = []
    for number, (family, threads, place) in enumerate(acts):
        engine = SyncEngine(folders[family], config=EngineConfig(threads=threads))
        engine.open()
        assert of_new_thread(torch.get_num_threads) == (threads or before["threads"])
        begun.append((place, number, family, engine))
    for _, _, family, engine in sorted(begun, key=lambda one: one[:2]):
        USES[family](engine)
        engine.close()
    assert changed(before) == {}


# -- a fork in the middle --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
def test_a_child_that_is_forked_while_another_thread_loads_can_load(
    folders: Folders, alone: Any, threads: ThreadPoolExecutor
) -> None:
    """It inherits the turn of a thread that does not exist there."""
    expected = repr(alone("gemma2"))
    with held(transformers.LlamaForCausalLM) as engine:
        load = threads.submit(trio.run, opened, folders["smollm2"])
        assert engine.reached.wait(NET)
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(NET)
            try:
                said = repr(trio.run(opened, folders["gemma2"]))
            except BaseException as error:  # noqa: BLE001  (told in place of the answer)
                said = repr(error)
            os.write(writes, said.encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as told:
            assert told.read() == expected
        os.waitpid(child, 0)
        engine.go.set()
        load.result(NET)

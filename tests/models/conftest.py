"""Tiny random checkpoints with Whisper's layout of special tokens, and a driver that plays the planner's part."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, field, frozen
from tokenizers import AddedToken
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.generation import GenerationMixin, LogitsProcessorList
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput

from triolet.core.config import EngineConfig
from triolet.core.model import ModelDescription
from triolet.core.request import TimestampRules
from triolet.models.blueprints.passed import PassedComparisons
from triolet.models.executor import TorchExecutor
from triolet.models.memory.resources import ResourceStack, reachable_tensors, storages
from triolet.models.native.library import Library
from triolet_testing.tensors import live_storages

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import make_checkpoint
from .media import Checkpoint
from .texts import SMALL, Driver, Job


@pytest.fixture
def without_native(monkeypatch):
    """As where the package was installed without a compiler."""
    monkeypatch.setattr(Library, "load", classmethod(lambda _: None))


CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LANGUAGES = ("en", "de", "es")
CHUNK_SECONDS = 2
POSITIONS = 64


@frozen
class Ids:
    """Special tokens of the tiny vocabulary: 256 bytes, then these in Whisper's order, then 101 timestamps."""

    eos: int = 256
    start: int = 257
    en: int = 258
    translate: int = 261
    transcribe: int = 262
    previous: int = 264
    no_speech: int = 265
    no_timestamps: int = 266
    timestamps: int = 267
    vocabulary: int = 267 + 50 * CHUNK_SECONDS + 1


def on_cuda(test: Callable[..., None]) -> Any:
    """Marks a test that needs a CUDA device."""
    return CUDA[0](CUDA[1](test))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that more threads only wait for each other, long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def every_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that was passed is repeated: tests plant faults in what it finds."""
    monkeypatch.setattr(PassedComparisons, "once", lambda passed, key, prove: prove())


@pytest.fixture(scope="session")
def ids() -> Ids:
    return Ids()


def byte_alphabet() -> list[str]:
    """GPT-2's reversible byte alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(extra)) for byte in range(256)]


def make_tokenizer() -> WhisperTokenizer:
    tokenizer = WhisperTokenizer(vocab={text: byte for byte, text in enumerate(byte_alphabet())}, merges=[])
    names = ["endoftext", "startoftranscript", *LANGUAGES, "translate", "transcribe", "startoflm", "startofprev"]
    names += ["nospeech", "notimestamps"]
    special = [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names]
    tokenizer.add_tokens(special, special_tokens=True)
    times = [AddedToken(f"<|{index * 0.02:.2f}|>", normalized=False) for index in range(50 * CHUNK_SECONDS + 1)]
    tokenizer.add_tokens(times)
    return tokenizer


def make_model(seed: int = 0, **changes: Any) -> WhisperForConditionalGeneration:
    """A random model with a window of two seconds, and weights large enough for lively greedy output."""
    ids, frames = Ids(), 100 * CHUNK_SECONDS
    settings: dict[str, Any] = {
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_mel_bins": 80,
        "max_source_positions": frames // 2,
        "max_target_positions": POSITIONS,
        "vocab_size": ids.vocabulary,
        "bos_token_id": ids.eos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.eos,
        "decoder_start_token_id": ids.start,
        "suppress_tokens": None,
        "begin_suppress_tokens": [32, ids.eos],
    }
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder.embed_positions" not in name:
                spread = 1.0 if "embed_positions" in name or "encoder_attn" in name else 0.2
                parameter.normal_(1.0 if "layer_norm.weight" in name else 0.0, spread)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids.start,
        eos_token_id=ids.eos,
        pad_token_id=ids.eos,
        bos_token_id=ids.eos,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids.en + index for index, code in enumerate(LANGUAGES)},
        task_to_id={"transcribe": ids.transcribe, "translate": ids.translate},
        no_timestamps_token_id=ids.no_timestamps,
        prev_sot_token_id=ids.previous,
        max_length=POSITIONS,
        max_initial_timestamp_index=20,
        begin_suppress_tokens=[32, ids.eos],
        suppress_tokens=[1, 2, 3],
    )
    return model


def save_checkpoint(folder: Path, model: WhisperForConditionalGeneration, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=model.config.num_mel_bins, chunk_length=CHUNK_SECONDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference() -> WhisperForConditionalGeneration:
    """transformers' own model of the checkpoint."""
    return make_model()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, reference: WhisperForConditionalGeneration) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), reference)


@pytest.fixture(scope="session")
def save() -> Callable[..., Path]:
    """``save(folder, model, **save_pretrained_options)`` writes a whole checkpoint."""
    return save_checkpoint


@pytest.fixture(scope="session")
def make() -> Callable[..., WhisperForConditionalGeneration]:
    """``make(seed, **config_changes)`` gives a random model."""
    return make_model


def small_config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "dtype": "float32", "max_running": 8, "page_size": 4, **changes})


@pytest.fixture(scope="session")
def config() -> Callable[..., EngineConfig]:
    return small_config


def make_audio(seed: int, seconds: float = CHUNK_SECONDS) -> np.ndarray:
    """A sweep in noise: deterministic, different for each seed."""
    time = np.arange(int(seconds * 16_000)) / 16_000
    noise = np.random.default_rng(seed).standard_normal(len(time))
    return (0.3 * np.sin(2 * np.pi * (200 + 150 * seed + 300 * time) * time) + 0.05 * noise).astype(np.float32)


@pytest.fixture(scope="session")
def audio() -> Callable[..., np.ndarray]:
    return make_audio


def greedy(model, encoded, prompt, count):
    """What transformers' decoder writes to an encoder output, with no rule for what it may write."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            outputs = BaseModelOutput(last_hidden_state=encoded[None])
            logits = model(encoder_outputs=outputs, decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


class Watch(TorchDispatchMode):
    """Notes every storage that torch's operations make while it is entered.

    Args:
        fail_at: the storage at which memory runs out, counted from 1; never by default.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}
        self._older: dict[int, StorageWeakRef] = {}
        self._fail_at = fail_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note((args, kwargs), self._older)
        result = func(*args, **kwargs)
        self._note(result, self.made)
        return result

    def _note(self, values: Any, notes: dict[int, StorageWeakRef]) -> None:
        for value in tree_leaves(values):
            storage = value.untyped_storage() if isinstance(value, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.made and storage._cdata not in self._older:
                notes[storage._cdata] = StorageWeakRef(storage)
                if notes is self.made and len(notes) == self._fail_at:
                    raise torch.OutOfMemoryError(f"no memory at storage {self._fail_at}")

    @property
    def alive(self) -> int:
        """How many of the storages live now."""
        return sum(not reference.expired() for reference in self.made.values())


@pytest.fixture(scope="session")
def watch() -> type[Watch]:
    return Watch


@define
class Books:
    """Compares what an executor counts with the tensors that have come into being since this was made."""

    _before: dict[int, StorageWeakRef] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._before = {identity: StorageWeakRef(storage) for identity, storage in live_storages().items()}

    def live(self) -> dict[int, int]:
        """Bytes of the storages that have come into being since, by identity."""
        before = {identity for identity, reference in self._before.items() if not reference.expired()}
        return {key: nbytes for key, nbytes in _sizes(live_storages()).items() if key not in before}

    def check(self, executor: TorchExecutor) -> dict[str, int]:
        """Nothing lives that nobody counts, nothing is counted that does not live, and nothing twice. Returns the bytes
        by owner."""
        live = self.live()
        owners: dict[int, tuple[str, ...]] = {}
        for stack in (executor._stack, executor._parked):
            for identity, names in stack.owners().items():
                owners[identity] = (*owners.get(identity, ()), *names)
        twice = {identity: names for identity, names in owners.items() if len(names) > 1}
        assert not twice, f"counted twice: {list(twice.values())}"
        led_to = _sizes(storages(reachable_tensors(executor)))  # no tensors here: a failure would keep them
        unowned = sorted(nbytes for identity, nbytes in led_to.items() if identity not in owners and nbytes)
        assert not unowned, f"the executor leads to {unowned} bytes that nobody counts"
        uncounted = sorted(nbytes for identity, nbytes in live.items() if identity not in owners)
        assert not uncounted, f"{uncounted} bytes live that nobody counts"
        counted = dict.fromkeys(executor.memory().by_owner, 0)
        for identity, (owner,) in owners.items():
            counted[owner] += live.get(identity, 0)
        told = executor.memory().by_owner
        assert told == counted, f"told {told}, but there live {counted}"
        return counted


def _sizes(found: dict[int, torch.UntypedStorage]) -> dict[int, int]:
    return {identity: storage.nbytes() for identity, storage in found.items()}


@pytest.fixture
def books(no_collector: None) -> Books:
    """Made before the executor is opened."""
    return Books()


@pytest.fixture
def registrations(books: Books, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``registrations(executor, call, when)`` opens the executor, then once more for each registration by ``call``
    ("own" or "callback"), which fails before or after the owner is known; nothing lives then, though the errors are
    kept. Returns the owners."""

    def run(executor: TorchExecutor, call: str, when: str) -> list[str]:
        register, calls, kept = getattr(ResourceStack, call), list[str](), []

        def failing(number: int) -> None:
            def registering(self: ResourceStack, *arguments: Any) -> Any:
                calls.append(arguments[0])
                if len(calls) == number and when == "before":
                    raise RuntimeError("planted")
                result = register(self, *arguments)
                if len(calls) == number:
                    raise RuntimeError("planted")
                return result

            calls.clear()
            monkeypatch.setattr(ResourceStack, call, registering)

        failing(0)
        executor.open()
        executor.close()
        owners = list(calls)
        for number in range(1, len(owners) + 1):
            failing(number)
            with pytest.raises(RuntimeError, match="planted") as error:
                executor.open()
            kept.append(error)
            assert calls == owners[:number]
            assert books.live() == {}, f"at {owners[number - 1]}"
            assert executor.memory().by_owner == {}
        return owners

    return run


@pytest.fixture(scope="session")
def job() -> Callable[..., Job]:
    """Makes jobs of up to 24 tokens."""
    return functools.partial(Job, max_tokens=24)


@pytest.fixture
def opens() -> Iterator[Callable[..., tuple[TorchExecutor, ModelDescription]]]:
    """``opens(path, config)`` gives an open executor and what it says of its model; closed after the test."""
    executors: list[TorchExecutor] = []

    def start(path: Path, config: EngineConfig = SMALL) -> tuple[TorchExecutor, ModelDescription]:
        executors.append(TorchExecutor(path, config))
        return executors[-1], executors[-1].open()

    yield start
    for executor in executors:
        executor.close()
        assert executor.memory().total == 0
        assert executor.released.kept == {}, "everything is given back"


@pytest.fixture
def open_driver() -> Iterator[Callable[..., Driver]]:
    """``open_driver(folder, make_executor, **config_changes)``; closed after the test."""
    opened: list[TorchExecutor] = []

    def start(folder: Path, make_executor: Callable[..., TorchExecutor] = TorchExecutor, **changes: Any) -> Driver:
        executor = make_executor(folder, small_config(**changes))
        opened.append(executor)
        return Driver(executor, executor.open())

    yield start
    for executor in opened:
        executor.close()
        assert executor.memory().total == 0


@pytest.fixture
def start(open_driver: Callable[..., Driver], folder: Callable[[str], Path]) -> Callable[..., Driver]:
    """``start(family, **config_changes)`` opens a tiny checkpoint of the family."""
    return lambda family, **changes: open_driver(folder(family), **changes)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def driver(open_driver: Callable[..., Driver], checkpoint: Path) -> Driver:
    return open_driver(checkpoint)


@define
class Generate:
    """transformers' base ``generate``: one window, greedy unless told otherwise."""

    model: WhisperForConditionalGeneration

    def __call__(self, samples: np.ndarray, job: Job) -> list[int]:
        features = extract_features(samples, self.model.config.num_mel_bins)
        processors = LogitsProcessorList()
        rules, penalty, length = job.rules, job.sampling.repetition_penalty, len(job.prompt)
        if not rules.counts_prompt:
            ngrams = NoRepeatNGramLogitsProcessor(max(rules.no_repeat_ngram, 1))
            processors.append(RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=length))
            processors.append(lambda ids, scores: ngrams(ids[:, length:], scores) if rules.no_repeat_ngram else scores)
        if rules.timestamps is not None:
            generation = GenerationConfig(
                no_timestamps_token_id=rules.timestamps.no_timestamps_id,
                eos_token_id=Ids().eos,
                max_initial_timestamp_index=rules.timestamps.max_initial,
            )
            processors.append(WhisperTimeStampLogitsProcessor(generation, begin_index=len(job.prompt)))
        output = GenerationMixin.generate(
            self.model,
            features,
            generation_config=GenerationConfig(
                eos_token_id=Ids().eos,
                pad_token_id=Ids().eos,
                max_length=len(job.prompt) + job.max_tokens,
                min_new_tokens=job.sampling.min_tokens or None,
                suppress_tokens=list(rules.suppress) or None,
                begin_suppress_tokens=list(rules.begin_suppress) or None,
                repetition_penalty=penalty if rules.counts_prompt else 1.0,
                sequence_bias=[[[token], bias] for token, bias in job.sampling.logit_bias] or None,
                decoder_start_token_id=Ids().start,
            ),
            decoder_input_ids=torch.tensor([job.prompt]),
            logits_processor=processors,
        )
        return output[0, len(job.prompt) :].tolist()


def extract_features(samples: np.ndarray, mels: int = 80) -> torch.Tensor:
    extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=CHUNK_SECONDS)
    return extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features


@pytest.fixture(scope="session")
def generate(reference: WhisperForConditionalGeneration) -> Generate:
    model = copy.deepcopy(reference)
    # What a generation config leaves open, `generate` takes from the model's own: only the job shall suppress tokens.
    model.generation_config = GenerationConfig(eos_token_id=Ids().eos, pad_token_id=Ids().eos)
    return Generate(model)


@pytest.fixture(scope="session")
def features() -> Callable[..., torch.Tensor]:
    return extract_features


@pytest.fixture(scope="session")
def timestamp_rules(ids: Ids) -> TimestampRules:
    return TimestampRules(begin_id=ids.timestamps, no_timestamps_id=ids.no_timestamps, max_initial=20)


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """``opened(name)`` gives the tiny multimodal checkpoint of that name. Nobody changes it."""

    @functools.cache
    def open_once(name: str) -> Checkpoint:
        return Checkpoint.open(name, make_checkpoint(name, tmp_path_factory.mktemp(name)))

    return open_once


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folder(family)`` gives the folder of a tiny checkpoint of the family. Nobody changes it."""
    return functools.cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def changed(folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """``changed(name, file, key=value)``: a copy of the checkpoint with other settings, as `rewrite` writes them."""

    def make(name: str, file: str = "config.json", **settings: Any) -> Path:
        copied = shutil.copytree(folder(name), tmp_path / "copy")
        return rewrite(copied / file, **settings).parent

    return make

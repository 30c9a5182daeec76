"""The state of the whole process, and a question to an engine of any family."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from PIL import Image

from triolet import Engine, Engines, demo
from triolet.core.model import Kind

from ..checkpoints.families import FAMILIES, make_checkpoint

EVERY = (*FAMILIES, "whisper")
TEXT = "a cat on the mat and the dog in the hat saw "
_LIBRARIES = ("", "transformers", "huggingface_hub", "torch", "asyncio", "filelock", "triolet")


class Folders:
    """A checkpoint of each family, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, family: str) -> Path:
        if family == "whisper":
            return Path(demo.checkpoint())
        folder = self.root / family
        return folder if (folder / "config.json").exists() else make_checkpoint(family, folder)


def state() -> dict[str, object]:
    """Returns the state that an engine, torch or transformers could leave changed, without what only an import adds."""
    import transformers
    from transformers import PreTrainedModel, modeling_utils

    verbosity: Any = transformers.utils.logging
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "threads of a new thread": of_new_thread(torch.get_num_threads),
        "interop threads": torch.get_num_interop_threads(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "modes": torch._C._len_torch_function_stack(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "numpy's random state": repr(np.random.get_state()),
        "numpy's errors": np.geterr(),
        "numpy's print options": repr(np.get_printoptions()),
        "Python's random state": random.getstate(),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "warnings": tuple(warnings.filters),
        "showwarning": warnings.showwarning,
        "environment": {name: told for name, told in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
        "path": tuple(sys.path),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "trace": (sys.gettrace(), sys.getprofile()),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "levels": {name: logging.getLogger(name).level for name in _LIBRARIES},
        "handlers": {name: tuple(logging.getLogger(name).handlers) for name in _LIBRARIES},
        "disabled levels": logging.root.manager.disable,
        "verbosity": verbosity.get_verbosity(),
        "bars": (verbosity.is_progress_bar_enabled(), _hub_bars()),
        "torch's functions": {
            name: getattr(torch, name) for name in ("linspace", "empty", "zeros", "tensor", "arange")
        },
        "torch's first weights": {name: one for name, one in vars(torch.nn.init).items() if callable(one)},
        "transformers' models": {name: one for name, one in vars(PreTrainedModel).items() if callable(one)},
        "transformers' making": {name: one for name, one in vars(modeling_utils).items() if callable(one)},
        "half imported": [
            name for name, one in sys.modules.items() if getattr(getattr(one, "__spec__", None), "_initializing", False)
        ],
        "imported": {name for name in ("torch", "transformers", "numpy") if name in sys.modules},
    }


def _hub_bars() -> bool:
    from huggingface_hub.utils import are_progress_bars_disabled

    return bool(are_progress_bars_disabled())


def changed(before: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Returns what differs from ``before``; of names with values, only those that do."""
    after, found = state(), {}
    for name, had in before.items():
        one, now = had, after[name]
        if isinstance(one, dict) and isinstance(now, dict):
            keys = [key for key in one | now if one.get(key) != now.get(key)]
            one, now = {key: one.get(key) for key in keys}, {key: now.get(key) for key in keys}
        if one != now:
            found[name] = one, now
    return found


def of_new_thread(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def noise(rate: int, seconds: float) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(0).standard_normal(int(rate * seconds)) * 0.1).astype(np.float32)


async def answer(engine: Engine, tokens: int = 6) -> object:
    """Returns what all parts of the model say: to a text, with an image or sound where it reads them."""
    model = engine.model
    if model.kind is Kind.POOLING:
        if model.labels:
            return [dict(one) for one in await engine.classify([TEXT, "the dog"])]
        return [np.asarray(one).tolist() for one in await engine.embed([TEXT, "the dog"])]
    if model.kind is Kind.ALIGNER:
        return await engine.align(noise(model.sampling_rate, 2.0), "a cat on the mat")
    if model.kind is Kind.DIARIZER:
        return await engine.diarize(noise(model.sampling_rate, 2.0))
    if model.architecture.startswith("Whisper"):
        return (await engine.transcribe(demo.samples()[0].path, language="de", beam_size=1)).text
    if model.speech is not None:
        named = {"language": "en"} if model.architecture.startswith(("Cohere", "Canary")) else {}
        heard = noise(model.sampling_rate, 1.0)
        found = await engine.transcribe(heard, voice_activity="off", max_new_tokens=tokens, **named)
        return [segment.token_ids for segment in found.segments]
    media = set() if model.preparer is None else model.preparer.media
    if "image" in media:
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8))
        given: dict[str, Any] = {"images": [picture]}
    else:
        given = {"audio": [noise(model.sampling_rate, 1.0)]} if "audio" in media else {}
    begin = getattr(model.preparer, "written", "") or getattr(model.preparer, "placeholder", "") if given else ""
    return (await engine.generate(begin + 2 * TEXT, **given, max_tokens=tokens, temperature=0.0)).token_ids


async def both_say(folders: Folders, families: tuple[str, ...]) -> list[object]:
    """The answers of models that are loaded and asked at once."""
    said: dict[int, object] = {}
    names = [f"{number}" for number in range(len(families))]
    async with Engines({name: folders[family] for name, family in zip(names, families, strict=True)}) as engines:

        async def use(number: int) -> None:
            async with engines.use(names[number]) as engine:
                said[number] = await answer(engine)

        async with trio.open_nursery() as nursery:
            for number in range(len(families)):
                nursery.start_soon(use, number)
    return [said[number] for number in range(len(families))]

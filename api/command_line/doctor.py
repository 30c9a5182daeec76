"""The command ``triolet doctor``: checks this machine, and says what to do if something is wrong or slow."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import click
import trio
from attrs import asdict

from ...core import log_lines
from ...core.config import EngineConfig
from ...core.errors import TrioletError
from . import checks
from .checks import Finding
from .devices import Processor, find_devices
from .pages import Page
from .terminal import FAILED, OpenEngine, stdout, until_interrupted, write

_WIDTH, _INDENT = 80, 21


@click.command(
    cls=Page,
    examples=(
        ("triolet doctor", ""),
        ("triolet doctor demo", "also says what the demo checkpoint takes"),
        ("triolet doctor --json > machine.json", "for the report of a bug"),
    ),
    short_help="Check this machine, and say what to do.",
)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object: ok and the findings.")
@click.pass_obj
def doctor(open_engine: OpenEngine, /, *, models: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, and say what to do about each thing that is wrong or slow.

    The checks look at packages, torch, devices, threads and how Python switches between them, memory, instruction
    sets, audio libraries and cache folders. The last check transcribes a recording with the demo checkpoint. For each
    MODEL, a checkpoint's folder or hub id, follow the memory that it takes and the length of its context. The exit
    status is 0 if all is well, and 1 if something is wrong or slow.
    """
    out, found = stdout(), []
    for finding in (*_examine(open_engine), *map(_model, models)):
        found.append(finding)
        if not as_json:
            _write(finding, out)
    bad = [finding for finding in found if finding.state != "ok"]
    if as_json:
        write(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in found]}), out)
    else:
        write(f"{len(bad)} of {len(found)} could be better" if bad else "all is well", out)
    return FAILED if bad else 0


def _write(finding: Finding, out: TextIO) -> None:
    lines = textwrap.TextWrapper(
        _WIDTH, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False
    )
    lines.initial_indent = f"{finding.state:<6} {finding.name:<{_INDENT - 8}} "
    write(lines.fill(finding.found), out)
    lines.initial_indent = lines.subsequent_indent
    if finding.advice:
        write(lines.fill(f"-> {finding.advice}"), out)


def _examine(open_engine: OpenEngine) -> Iterator[Finding]:
    """Yields each finding as soon as it is made. Without torch, devices are not checked."""
    yield Finding("python", "ok", f"{platform.python_version()}, triolet {importlib.metadata.version('triolet')}")
    yield from _packages()
    has_torch = True
    try:
        processor = Processor.find()
    except (ImportError, OSError) as error:  # torch, or a library that torch needs, is missing
        has_torch = False
        yield _unimportable("torch", error)
    else:
        yield from _machine(processor)
    yield from _audio()
    yield from _caches()
    if has_torch:
        yield _demo(open_engine)


def _packages() -> list[Finding]:
    from packaging.requirements import Requirement

    requirements, installed = importlib.metadata.requires("triolet") or [], dict[str, str]()
    for name in {Requirement(requirement).name for requirement in requirements}:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return checks.check_packages(requirements, installed)


def _unimportable(name: str, error: Exception) -> Finding:
    found = f"it cannot be imported ({type(error).__name__}: {error})"
    return Finding(name, "wrong", found, f"install it again: pip install --force-reinstall {name}")


def _machine(processor: Processor) -> Iterator[Finding]:
    import torch

    from ...actors.switch_interval import SHORT
    from ...models.machine.devices import computes_in_bfloat16
    from ...models.machine.host import cpu_flags, memory_limit, read_file
    from ...models.native.library import Library

    backends: Any = torch.backends
    libraries = {"MKL": backends.mkl.is_available(), "oneDNN": backends.mkldnn.is_available()}
    yield checks.check_torch(
        torch.__version__,
        cuda=torch.version.cuda,
        sees_cuda=torch.cuda.is_available(),
        has_nvidia=Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
        libraries={name for name, there in libraries.items() if there},
    )
    yield from map(checks.check_device, find_devices(processor))
    yield checks.check_threads(processor.cores, processor.threads, os.environ)
    yield checks.check_waiting(processor.policy)
    yield checks.check_switching(sys.getswitchinterval(), SHORT)
    library = Library.load()
    yield checks.check_native(None if library is None else library.level)
    yield checks.check_memory(processor.memory, processor.available, memory_limit(read_file))
    capability = torch.backends.cpu.get_cpu_capability()
    yield checks.check_instructions(cpu_flags(read_file), capability, bfloat16=computes_in_bfloat16())


# ---- audio -----------------------------------------------------------------------------------------------------------


def _audio() -> Iterator[Finding]:
    faults = False
    for name in ("av", "soundfile", "soxr"):
        try:
            yield Finding(name, "ok", _version_of(name))
        except (ImportError, OSError) as error:
            faults = True
            yield _unimportable(name, error)
    if not faults:
        yield _decoding()


def _version_of(name: str) -> str:
    module: Any = importlib.import_module(name)
    if name == "av":
        codec = ".".join(map(str, module.library_versions.get("libavcodec", ())))
        return f"PyAV {module.__version__}, FFmpeg's libavcodec {codec}"
    native = f"lib{name.replace('sound', 'snd')}"
    return f"{name} {module.__version__}, {native} {getattr(module, f'__{native}_version__')}"


def _decoding() -> Finding:
    """Decodes and resamples a recording in each of the formats that the package brings."""
    from ... import demo
    from ..inputs.audio import load_audio

    files = {sample.path.suffix.removeprefix("."): sample.path for sample in demo.samples()}
    faults = []
    for kind, path in sorted(files.items()):
        try:
            load_audio(path, sampling_rate=22_050)
        except TrioletError as error:
            faults.append(f"{kind}: {error}")
    advice = "install these again: pip install --force-reinstall av soundfile soxr"
    return checks.judged("decoding", "; ".join(faults) or ", ".join(sorted(files)), (faults, "wrong", advice))


# ---- folders ---------------------------------------------------------------------------------------------------------


def _caches() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from ...models.machine.cache import CacheFile

    own, hub = str(CacheFile.of_user("").path), str(HF_HUB_CACHE)
    yield checks.check_cache(own, _write_fault(own))
    yield checks.check_hub(hub, _write_fault(hub), shutil.disk_usage(_nearest(hub)).free)


def _nearest(path: str) -> Path:
    """The folder itself if it exists, or else the nearest existing folder above it, as far as this user may look."""
    return next(folder for folder in (Path(path).absolute(), *Path(path).absolute().parents) if os.path.exists(folder))


def _write_fault(path: str) -> str:
    nearest = _nearest(path)
    if not nearest.is_dir():
        return f"{nearest} is a file"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"nothing can be written in {nearest}"


# ---- the demo --------------------------------------------------------------------------------------------------------


def _demo(open_engine: OpenEngine) -> Finding:
    """Checks a whole transcription: its text must be right."""
    from ... import demo

    sample = next(sample for sample in demo.samples() if sample.path.stem == "en-command")
    found: list[Finding] = []

    async def look() -> int:
        begin = trio.current_time()
        try:
            async with open_engine(str(demo.checkpoint()), EngineConfig()) as engine:
                opened = trio.current_time()
                text = (await engine.transcribe(sample.path)).text
                ended = trio.current_time()
        except TrioletError as error:
            advice = "correct what is wrong above; if nothing is wrong there, report this"
            found.append(Finding("demo", "wrong", f"{type(error).__name__}: {error}", advice))
        else:
            told = f"open in {opened - begin:.1f} s, {sample.duration:.1f} s of speech in {ended - opened:.1f} s"
            if is_wrong := text != sample.text:
                told += f"; it understood {text!r}, and {sample.text!r} was said"
            advice = "this machine or its torch computes wrong numbers: try another build of torch, and report this"
            found.append(checks.judged("demo", told, (is_wrong, "wrong", advice)))
        return 0

    if trio.run(until_interrupted, look):
        raise KeyboardInterrupt
    return found[0]


# ---- models ----------------------------------------------------------------------------------------------------------


def _model(name: str) -> Finding:
    """Estimates what a model would take now; reads no weight."""
    from ... import demo
    from ...models.blueprints.estimate import estimate_context
    from ...models.machine.host import available_memory, read_file
    from ...models.memory.budget import Available

    try:
        folder = demo.checkpoint() if name == "demo" else name
        needs, context = estimate_context(folder, EngineConfig(), Available.of)
    except TrioletError as error:
        return Finding(name, "wrong", str(error), "correct the name, the files or the options")
    free = available_memory(read_file)
    lacks = free is not None and needs.device == "cpu" and needs.total > free
    advice = "give --max-model-len, --kv-dtype bfloat16 or --quantization int8, or free some memory"
    told = f"{log_lines.owners(needs)}. {context.replace('max_positions=', '--max-model-len ')}"
    return checks.judged(name, told, (lacks, "wrong", advice))

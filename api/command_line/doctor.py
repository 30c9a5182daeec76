"""The commands ``triolet devices``, which lists what a model can run on, and ``triolet doctor``: facts of this machine,
and what to do where something is wrong or slow."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal

import click
import trio
from attrs import asdict, frozen

from ...core import log_lines
from ...core.config import EngineConfig
from ...core.errors import EngineError, TrioletError
from ...core.log_lines import one_line
from .models import MODELS_OPTION
from .pages import HelpPage
from .terminal import FAILED, OpenEngine, gibibytes, stdout, until_interrupted, write

if TYPE_CHECKING:
    from ...models.machine.host import Cores
    from ...models.machine.openmp import WaitPolicy


@click.command(
    cls=HelpPage,
    examples=(
        ("triolet devices", ""),
        ("CUDA_VISIBLE_DEVICES=1 triolet devices", "the devices that a program sees under this setting"),
    ),
    short_help="List the devices that a model can run on.",
)
def devices() -> int:
    """List the devices that a model can run on. A star marks the default.

    The lines below the CPU say which of its cores are used, and how its threads wait.
    """
    out, cpu = stdout(), Processor.find()
    for device in find_devices(cpu):
        write(f"{'*' if device.is_default else ' '} {device.name}  {device.told}", out)
    write(f"       cores: {cpu.cores.count} usable of {cpu.cores.reason}", out)
    write(f"       waiting threads: {cpu.policy.setting or 'spin'}, {cpu.policy.reason}", out)
    return 0


@frozen
class Device:
    """A device that a model can run on: one line for people, with the dtype in which "auto" computes there."""

    name: str
    told: str
    is_default: bool
    answers: bool = True


@frozen(kw_only=True)
class Processor:
    """The CPU as this process may use it. Bytes of memory; ``None`` if the system does not report it."""

    cores: Cores
    threads: int
    memory: int
    available: int | None
    policy: WaitPolicy

    @classmethod
    def find(cls) -> Processor:
        """Describes the CPU of this machine. Imports torch, but first sets the variables that torch reads at its
        import.
        """
        from ...models.machine.host import affinity, available_memory, choose_threads, read_file, usable_cores
        from ...models.machine.openmp import prepare_openmp

        policy = prepare_openmp()
        import torch

        return cls(
            cores=usable_cores(read_file, affinity(), os.cpu_count() or 1),
            threads=choose_threads(torch.get_num_threads()),
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            available=available_memory(read_file),
            policy=policy,
        )


def find_devices(cpu: Processor) -> Iterator[Device]:
    """The devices that torch sees, the CPU last."""
    import torch

    from ...models.machine.host import cpu_name, read_file

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        name, is_default = f"cuda:{index}", False
        try:
            is_default = index == torch.cuda.current_device()
            free, total = map(gibibytes, torch.cuda.mem_get_info(index))
            about = f"{torch.cuda.get_device_properties(index).name}, {total} ({free} free), float16"
        except RuntimeError as error:  # CUDA's errors, too: another program has the device for itself, or it is lost
            yield Device(name, f"cannot be asked: {one_line(str(error))}", is_default, answers=False)
        else:
            yield Device(name, about, is_default)
    left = "" if cpu.available is None else f" ({gibibytes(cpu.available)} available)"
    told = f"{cpu_name(read_file)}, {gibibytes(cpu.memory)}{left}, float32, {cpu.threads} threads"
    yield Device("cpu", told, not count)


# ---- the command doctor ----------------------------------------------------------------------------------------------


State = Literal["ok", "slow", "wrong"]

_LEAST_MEMORY = 1 << 30  # bytes that should be available
_LEAST_DISK = 2 << 30
_MATTER = ("torch", "transformers", "tokenizers", "trio", "numpy")
_SETS = {3: "AVX2", 4: "AVX-512", 5: "AVX-512 and bfloat16"}  # by the level of the native library


@frozen
class Finding:
    """One fact of the report. ``advice`` says what to do; it is empty if the state is ``"ok"``."""

    name: str
    state: State
    found: str
    advice: str = ""


def judged(name: str, found: str, *faults: tuple[object, State, str]) -> Finding:
    """The finding for the first of ``faults`` that is there: whether it is, its state, and the advice."""
    state, advice = next(((state, advice) for there, state, advice in faults if there), ("ok", ""))
    return Finding(name, state, found, advice)


@click.command(
    cls=HelpPage,
    examples=(
        ("triolet doctor", ""),
        ("triolet doctor demo", "also says what the demo checkpoint takes"),
        ("triolet doctor --json > machine.json", "for the report of a bug"),
    ),
    short_help="Check this machine, and say what to do.",
)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@MODELS_OPTION
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object: ok and the findings.")
@click.pass_obj
def doctor(open_engine: OpenEngine, /, *, models: tuple[str, ...], named: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, and say what to do about each thing that is wrong or slow.

    The checks look at packages, torch, devices, threads and how Python switches between them, memory, instruction
    sets, audio libraries and cache folders. The last check transcribes a recording with the demo checkpoint. Then come
    the memory and the context length of each MODEL, a checkpoint's folder or hub id. The exit status is 0 if all is
    well, and 1 if something is wrong or slow.
    """
    out, found = stdout(), list[Finding]()
    for finding in (*_examine(open_engine), *map(_model, (*models, *named))):
        found.append(finding)
        if not as_json:
            write(f"{finding.state:<6} {finding.name:<13} {finding.found}", out)
            if finding.advice:
                write(f"{'':20} -> {finding.advice}", out)
    bad = [finding for finding in found if finding.state != "ok"]
    if as_json:
        write(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in found]}), out)
    else:
        write(f"{len(bad)} of {len(found)} could be better" if bad else "all is well", out)
    return FAILED if bad else 0


def _examine(open_engine: OpenEngine) -> Iterator[Finding]:
    """Yields each finding as soon as it is made. Without torch, devices are not checked."""
    yield Finding("python", "ok", f"{platform.python_version()}, triolet {importlib.metadata.version('triolet')}")
    yield from _packages()
    processor: Processor | None = None
    try:
        processor = Processor.find()
    except (ImportError, OSError) as error:  # torch, or a library that torch needs, is missing
        found = f"it cannot be imported ({type(error).__name__}: {error})"
        yield Finding("torch", "wrong", found, "install it again: pip install --force-reinstall torch")
    else:
        yield from _machine(processor)
    yield _audio()
    yield from _folders()
    if processor is not None:
        yield _demo(open_engine)


def _packages() -> Iterator[Finding]:
    """Compares the versions of packages with the ranges of pyproject.toml; those of an extra only if they are
    installed."""
    from packaging.requirements import Requirement

    versions, is_ok = dict[str, str](), True
    for one in map(Requirement, importlib.metadata.requires("triolet") or []):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[one.name] = importlib.metadata.version(one.name)
        version = versions.get(one.name)
        if version is None and one.marker is not None:
            continue
        if version is None or not one.specifier.contains(version, prereleases=True):
            is_ok, advice = False, f"pip install '{one.name}{one.specifier}'"
            found = "is not installed" if version is None else f"{version}; allowed: {one.specifier}"
            yield Finding("packages", "wrong", f"{one.name} {found}", advice)
    if is_ok:
        told = ", ".join(f"{name} {versions[name]}" for name in _MATTER if name in versions)
        yield Finding("packages", "ok", f"within the ranges of pyproject.toml: {told}")


def _machine(cpu: Processor) -> Iterator[Finding]:
    import torch

    from ...actors.switch_interval import SHORT
    from ...models.machine.devices import computes_in_bfloat16
    from ...models.machine.host import INSTRUCTIONS, cpu_flags, memory_limit, read_file

    cuda = torch.version.cuda
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    blind = "torch does not find the GPU: check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
    yield judged(
        "torch",
        f"{torch.__version__}, {'CPU build' if cuda is None else f'built for CUDA {cuda}'}",
        (driver and cuda is None, "slow", "torch cannot use the NVIDIA GPU: install a build for CUDA (pytorch.org)"),
        (driver and not torch.cuda.is_available(), "wrong", blind),
    )
    left_out = "check nvidia-smi; to leave this device out, set CUDA_VISIBLE_DEVICES to the others, or to nothing"
    for device in find_devices(cpu):
        found = f"{device.name}: {device.told}{', the default' if device.is_default else ''}"
        yield judged("device", found, (not device.answers, "wrong", left_out))
    count, threads = cpu.cores.count, cpu.threads
    yield judged(
        "threads",
        f"{threads} for {count} usable cores of {cpu.cores.reason}",
        (threads < count, "slow", f"cores are idle: set OMP_NUM_THREADS={count}, or unset it"),
        (threads > count, "slow", f"threads wait for each other: set OMP_NUM_THREADS={count}, or unset it"),
    )
    setting, reason = cpu.policy.setting, cpu.policy.reason
    spins = setting is None or setting.upper() == "OMP_WAIT_POLICY=ACTIVE"
    passive = "set OMP_WAIT_POLICY=PASSIVE: threads that spin take the cores from other processes"
    yield judged("waiting", f"{setting or 'threads spin'}, {reason}", (spins, "slow", passive))
    switching = f"{sys.getswitchinterval() * 1e3:g} ms; while an engine works at most {SHORT * 1e3:g} ms"
    yield Finding("switching", "ok", f"{switching}, unless switch_interval='kept'")
    yield _native()
    limit = memory_limit(read_file)
    bound = "" if limit is None or limit >= cpu.memory else f", {gibibytes(limit)} by the cgroup"
    left = "" if cpu.available is None else f", {gibibytes(cpu.available)} available"
    scarce = cpu.available is not None and cpu.available < _LEAST_MEMORY
    more = "most models need more: end other programs, or raise the container's limit"
    yield judged("memory", f"{gibibytes(cpu.memory)}{bound}{left}", (scarce, "wrong", more))
    flags, capability = cpu_flags(read_file), torch.backends.cpu.get_cpu_capability()
    able = " ".join(sorted(flags & INSTRUCTIONS)) or "none that matter"
    unused = "sse2" in flags and capability in ("DEFAULT", "NO AVX")
    vectors = "unset ATEN_CPU_CAPABILITY, or show AVX2 to the virtual machine (qemu: -cpu host)"
    yield judged(
        "instructions",
        f"{able}; torch uses {capability}, {'with' if computes_in_bfloat16() else 'without'} products in bfloat16",
        (unused, "slow", f"torch uses no vectors here: {vectors}"),
    )


def _native() -> Finding:
    from ...models.native.library import Library

    try:
        library = Library.load()
    except EngineError as error:
        told, _, todo = str(error).partition("; ")
        return Finding("native", "wrong", told, todo)
    level = None if library is None else _SETS.get(library.level, "no instruction set of its own")
    compiler = "install a C++ compiler, then triolet from its source again: pip install --force-reinstall --no-deps ."
    native = "missing: models on the CPU use torch's operations" if level is None else f"present, with {level}"
    return judged("native", native, (level is None, "slow", compiler))


def _audio() -> Finding:
    """Decodes and resamples a recording in each of the formats that the package brings."""
    from ... import demo

    try:
        import av
        import soundfile
        import soxr

        from ..inputs.audio import load_audio

        files = {sample.path.suffix.removeprefix("."): sample.path for sample in demo.samples()}
        for path in files.values():
            load_audio(path, sampling_rate=22_050)
    except (ImportError, OSError, TrioletError) as error:
        advice = "install these again: pip install --force-reinstall av soundfile soxr"
        return Finding("audio", "wrong", f"{type(error).__name__}: {error}", advice)
    codec = ".".join(map(str, av.library_versions.get("libavcodec", ())))
    told = f"PyAV {av.__version__} (libavcodec {codec}), soundfile {soundfile.__version__}, soxr {soxr.__version__}"
    return Finding("audio", "ok", f"{told}: {', '.join(sorted(files))} are read")


def _folders() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from ...models.machine.cache import CacheFile

    compared, needs = "models are compared with transformers at each start: ", "to a folder that can be written to"
    folders: tuple[tuple[str, State, str, str], ...] = (
        ("cache", "slow", str(CacheFile.of_user("").path), f"{compared}set XDG_CACHE_HOME {needs}"),
        ("models", "wrong", HF_HUB_CACHE, f"no model can be downloaded: set HF_HUB_CACHE {needs}"),
    )
    for name, state, path, advice in folders:
        try:
            os.makedirs(path, exist_ok=True)
            with TemporaryFile(dir=path):
                free = shutil.disk_usage(path).free
        except OSError as error:
            yield Finding(name, state, f"{path}: it cannot be written to ({error.strerror})", advice)
        else:
            room = "few models fit: make room, or set HF_HUB_CACHE to another disk"
            yield judged(name, f"{path}, {gibibytes(free)} free", (free < _LEAST_DISK, "wrong", room))


def _demo(open_engine: OpenEngine) -> Finding:
    """Checks a whole transcription: its text must be right."""
    from ... import demo

    sample = next(sample for sample in demo.samples() if sample.path.stem == "en-command")
    found = list[Finding]()

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
            found.append(judged("demo", told, (is_wrong, "wrong", advice)))
        return 0

    if trio.run(until_interrupted, look):
        raise KeyboardInterrupt
    return found[0]


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
    return judged(name, told, (lacks, "wrong", advice))

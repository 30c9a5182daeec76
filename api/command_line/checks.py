"""The checks of ``triolet doctor``, as pure functions of what is known of the machine.

Each returns a `Finding`. If something is slow or wrong, the finding has advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Literal, TypeAlias

from attrs import frozen

from ...models.machine.host import INSTRUCTIONS, Cores
from ...models.machine.openmp import WaitPolicy
from .terminal import gibibytes

if TYPE_CHECKING:
    from .devices import Device

State = Literal["ok", "slow", "wrong"]
Fault: TypeAlias = tuple[object, State, str]  # whether the fault is there, its state, the advice

_LEAST_MEMORY = 1 << 30  # bytes that should be available
_LEAST_DISK = 2 << 30
_MATTER = ("torch", "transformers", "tokenizers", "trio", "numpy", "av", "soundfile", "soxr")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@frozen
class Finding:
    """One line of the report. ``advice`` says what to do; it is empty if the state is ``"ok"``."""

    name: str
    state: State
    found: str
    advice: str = ""


def judged(name: str, found: str, *faults: Fault) -> Finding:
    """The finding for the first of ``faults`` that is present. If none is, its state is ``"ok"``."""
    for there, state, advice in faults:
        if there:
            return Finding(name, state, found, advice)
    return Finding(name, "ok", found)


def check_packages(requirements: Iterable[str], installed: Mapping[str, str]) -> list[Finding]:
    """Compares the versions of packages with the ranges of pyproject.toml.

    Args:
        requirements: those in the installed package's metadata. A requirement of an extra counts only if its package is
            installed.
        installed: versions by name; a name that is missing is not installed.
    """
    from packaging.requirements import Requirement

    known = [Requirement(text) for text in requirements]
    needed = [one for one in known if one.marker is None or one.marker.evaluate({"extra": ""})]
    others = [one for one in known if one not in needed and one.name in installed and one.name != "triolet"]
    wrong = []
    for one in dict.fromkeys([*needed, *others]):
        version = installed.get(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            found = "is not installed" if version is None else f"{version}; allowed: {one.specifier}"
            advice = f"pip install '{one.name}{one.specifier}'"
            wrong.append(Finding("packages", "wrong", f"{one.name} {found}", advice))
    versions = ", ".join(f"{name} {installed[name]}" for name in _MATTER if name in installed)
    return wrong or [Finding("packages", "ok", f"{len(needed)} within the ranges of pyproject.toml: {versions}")]


def check_torch(version: str, *, cuda: str | None, sees_cuda: bool, has_nvidia: bool, libraries: Set[str]) -> Finding:
    """Compares torch's build with the machine.

    Args:
        cuda: the version of CUDA that torch was built for; ``None``: none.
        has_nvidia: the system has NVIDIA's driver.
        libraries: the libraries with which torch multiplies matrices on the CPU: "MKL", "oneDNN".
    """
    build = "CPU build" if cuda is None else f"built for CUDA {cuda}"
    blind = has_nvidia and cuda is not None and not sees_cuda
    return judged(
        "torch",
        f"{version}, {build}, {', '.join(sorted(libraries)) or 'without MKL and oneDNN'}"
        + ("; NVIDIA's driver is here" if blind else ""),
        (
            has_nvidia and cuda is None,
            "slow",
            "torch cannot use the NVIDIA GPU: install a build for CUDA (pytorch.org)",
        ),
        (
            blind,
            "wrong",
            "torch does not find the GPU: check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES",
        ),
        (not libraries, "slow", "products on the CPU take longer: install a build of torch with oneDNN"),
    )


def check_device(device: Device) -> Finding:
    """Checks whether a device that torch sees also answers."""
    advice = "check nvidia-smi; to leave this device out, set CUDA_VISIBLE_DEVICES to the others, or to nothing"
    found = f"{device.name}: {device.told}{', the default' if device.is_default else ''}"
    return judged("device", found, (device.fault, "wrong", advice))


def check_threads(cores: Cores, threads: int, environment: Mapping[str, str]) -> Finding:
    """Compares the number of threads with the number of cores that are worth a thread."""
    named = ", ".join(f"{name}={environment[name]}" for name in _VARIABLES if name in environment)
    advice = f"unset it, or set it to {cores.count}" if named else f"set OMP_NUM_THREADS={cores.count}"
    return judged(
        "threads",
        f"{threads} for {cores.count} usable cores of {cores.reason}" + (f"; {named}" if named else ""),
        (threads < cores.count, "slow", f"cores are idle: {advice}"),
        (threads > cores.count, "slow", f"threads wait for each other: {advice}"),
    )


def check_waiting(policy: WaitPolicy) -> Finding:
    """Checks the way in which OpenMP's threads wait."""
    spins = (policy.setting or "").upper() == "OMP_WAIT_POLICY=ACTIVE"
    return judged(
        "waiting",
        f"{policy.setting}, {policy.reason}" if policy.setting else "threads spin",
        (policy.setting is None, "slow", f"set OMP_WAIT_POLICY=PASSIVE: {policy.reason}"),
        (spins, "slow", "unset it, or set it to PASSIVE: threads that spin take the cores from other processes"),
    )


def check_native(level: int | None) -> Finding:
    """Checks the native library and its instruction set. ``level``: x86-64's level; ``None``: the package has no
    library."""
    advice = "install a C++ compiler, then triolet from its source again: pip install --force-reinstall --no-deps ."
    name = {3: "AVX2", 4: "AVX-512"}.get(level or 0, "no instruction set of its own")
    found = f"present, with {name}: models on the CPU use it"
    if level is None:
        found = "missing: models on the CPU use torch's operations"
    return judged("native", found, (level is None, "slow", advice))


def check_switching(interval: float, while_working: float) -> Finding:
    """Checks how many seconds a Python thread that computes keeps other threads waiting: now (``present``), and while
    an engine works.
    """
    found = f"{interval * 1e3:g} ms"
    if interval > while_working:
        found += f", and {while_working * 1e3:g} ms while an engine works (switch_interval='kept': it stays)"
    return Finding("switching", "ok", found)


def check_memory(total: int, available: int | None, limit: int | None) -> Finding:
    """Checks the memory, in bytes: the machine's, the available part, and the cgroup's limit. ``None``: the number does
    not exist or is not known.
    """
    left = "" if available is None else f", {gibibytes(available)} available"
    bound = "" if limit is None or limit >= total else f", {gibibytes(limit)} by the cgroup"
    advice = "most models need more: end other programs" + (", or raise the container's limit" if bound else "")
    scarce = available is not None and available < _LEAST_MEMORY
    return judged("memory", f"{gibibytes(total)}{bound}{left}", (scarce, "wrong", advice))


def check_instructions(flags: Set[str], capability: str, *, bfloat16: bool) -> Finding:
    """Compares the CPU's instruction sets with those that torch uses.

    Args:
        flags: the CPU's features by their names in Linux; empty if the system does not list them.
        capability: the instruction set that torch reports: "AVX512", "AVX2", "DEFAULT" and others.
        bfloat16: true if the CPU multiplies in bfloat16.
    """
    able = " ".join(sorted(flags & INSTRUCTIONS)) or "none that matter"
    is_x86 = "sse2" in flags
    hidden = "products take much longer without AVX2: a virtual machine may hide it (qemu: -cpu host)"
    unused = "torch uses no vectors here: unset ATEN_CPU_CAPABILITY, or install another build of torch"
    return judged(
        "instructions",
        f"{able}; torch uses {capability}, {'with' if bfloat16 else 'without'} products in bfloat16",
        (is_x86 and "avx2" not in flags, "slow", hidden),
        (is_x86 and capability in ("DEFAULT", "NO AVX"), "slow", unused),
    )


def check_cache(path: str, fault: str) -> Finding:
    """Checks the folder in which engines remember what they find out. ``fault``: why nothing can be written there."""
    advice = (
        "models are compared with transformers at each start: set XDG_CACHE_HOME to a folder that can be written to"
    )
    return judged("cache", f"{path}: {fault}" if fault else path, (fault, "slow", advice))


def check_hub(path: str, fault: str, free: int) -> Finding:
    """Checks the folder of models from the hub, which has ``free`` bytes on its disk. ``fault``: why nothing can be
    written to the folder."""
    return judged(
        "models",
        f"{path}, {gibibytes(free)} free" + (f": {fault}" if fault else ""),
        (fault, "wrong", "no model can be downloaded: set HF_HUB_CACHE to a folder that can be written to"),
        (free < _LEAST_DISK, "wrong", "few models fit: make room, or set HF_HUB_CACHE to another disk"),
    )

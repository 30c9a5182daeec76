"""What ``triolet doctor`` finds wrong or slow, as pure functions of what is known of the machine.

Each gives a `Finding`: all is well, or something is slow or wrong, and then what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from ...models.machine.host import INSTRUCTIONS, Cores
from ...models.machine.openmp import WaitPolicy
from .terminal import gibibytes

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from .devices import Device

State = Literal["ok", "slow", "wrong"]

_LEAST_MEMORY = 1 << 30  # bytes that should be left
_LEAST_DISK = 2 << 30
_MATTER = ("torch", "transformers", "tokenizers", "trio", "numpy", "av", "soundfile", "soxr")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@frozen
class Finding:
    """One line of the report. ``advice`` is what to do, for all that is not ``"ok"``."""

    name: str
    state: State
    found: str
    advice: str = ""


def name_of(requirement: str) -> str:
    """The package that a requirement is of."""
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def check_packages(requirements: Iterable[str], installed: Mapping[str, str]) -> list[Finding]:
    """The versions of packages against the ranges of pyproject.toml.

    Args:
        requirements: of the installed package's metadata. Those of extras count where they are installed.
        installed: versions by name; a name that is missing is not installed.
    """
    from packaging.requirements import Requirement

    known = [Requirement(text) for text in requirements]
    needed = [one for one in known if one.marker is None or one.marker.evaluate({"extra": ""})]
    others = [one for one in known if one not in needed and one.name in installed and one.name != "triolet"]
    wrong = [
        Finding("packages", "wrong", _version_of(one, installed), f"pip install '{one.name}{one.specifier}'")
        for one in dict.fromkeys([*needed, *others])
        if one.name not in installed or not one.specifier.contains(installed[one.name], prereleases=True)
    ]
    told = ", ".join(f"{name} {installed[name]}" for name in _MATTER if name in installed)
    return wrong or [Finding("packages", "ok", f"{len(needed)} within the ranges of pyproject.toml: {told}")]


def _version_of(requirement: Requirement, installed: Mapping[str, str]) -> str:
    version = installed.get(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    return f"{requirement.name} {version}; allowed: {requirement.specifier}"


def check_torch(version: str, *, cuda: str | None, sees_cuda: bool, has_nvidia: bool, libraries: Set[str]) -> Finding:
    """torch's build against the machine.

    Args:
        cuda: the version of CUDA that it was built for.
        has_nvidia: the system has NVIDIA's driver.
        libraries: for products of matrices on the CPU: "MKL", "oneDNN".
    """
    build = "CPU build" if cuda is None else f"built for CUDA {cuda}"
    found = f"{version}, {build}, {', '.join(sorted(libraries)) or 'without MKL and oneDNN'}"
    if has_nvidia and cuda is None:
        return Finding("torch", "slow", found, "it cannot use the NVIDIA GPU: install a build for CUDA (pytorch.org)")
    if has_nvidia and not sees_cuda:
        advice = "it sees no GPU: look at nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
        return Finding("torch", "wrong", f"{found}; NVIDIA's driver is here", advice)
    if not libraries:
        return Finding("torch", "slow", found, "install a build of torch with oneDNN: products on the CPU take longer")
    return Finding("torch", "ok", found)


def check_device(device: Device) -> Finding:
    """A device that torch sees: whether it answers."""
    found = f"{device.name}: {device.told}{', the default' if device.is_default else ''}"
    if device.fault:
        advice = "look at nvidia-smi; to leave it out, set CUDA_VISIBLE_DEVICES to the others, or to nothing"
        return Finding("device", "wrong", found, advice)
    return Finding("device", "ok", found)


def check_threads(cores: Cores, threads: int, environment: Mapping[str, str]) -> Finding:
    """The number of threads against the cores that are worth one."""
    named = ", ".join(f"{name}={environment[name]}" for name in _VARIABLES if name in environment)
    found = f"{threads} for {cores.count} usable cores of {cores.reason}" + (f"; {named}" if named else "")
    advice = f"unset it, or set it to {cores.count}" if named else f"set OMP_NUM_THREADS={cores.count}"
    if threads < cores.count:
        return Finding("threads", "slow", found, f"cores are idle: {advice}")
    if threads > cores.count:
        return Finding("threads", "slow", found, f"threads wait for each other: {advice}")
    return Finding("threads", "ok", found)


def check_waiting(policy: WaitPolicy) -> Finding:
    """How OpenMP's threads wait."""
    if policy.setting is None:
        return Finding("waiting", "slow", "threads spin", f"set OMP_WAIT_POLICY=PASSIVE: {policy.reason}")
    found = f"{policy.setting}, {policy.reason}"
    if policy.setting.upper() == "OMP_WAIT_POLICY=ACTIVE":
        advice = "unset it, or set it to PASSIVE: threads that spin take the cores from other processes"
        return Finding("waiting", "slow", found, advice)
    return Finding("waiting", "ok", found)


def check_native(level: int | None) -> Finding:
    """Of the native library's instruction set, as x86-64 counts them; ``None``: the package has no library."""
    if level is None:
        advice = "install a C++ compiler, then triolet from its source again: pip install --force-reinstall --no-deps ."
        return Finding("native", "slow", "not there: models on the CPU run by torch's operations", advice)
    name = {3: "AVX2", 4: "AVX-512"}.get(level, "no instruction set of its own")
    return Finding("native", "ok", f"there, with {name}: models on the CPU run by it")


def check_switching(interval: float, while_working: float) -> Finding:
    """How long a Python thread that computes keeps the others waiting, in seconds: now, and while an engine works."""
    found = f"{interval * 1e3:g} ms"
    if interval > while_working:
        found += f", and {while_working * 1e3:g} ms while an engine works (switch_interval='kept': it stays)"
    return Finding("switching", "ok", found)


def check_memory(total: int, available: int | None, limit: int | None) -> Finding:
    """Memory in bytes: the machine's, what is left, and the cgroup's limit. ``None``: there is none, or nobody says."""
    left = "" if available is None else f", {gibibytes(available)} available"
    bound = "" if limit is None or limit >= total else f", {gibibytes(limit)} by the cgroup"
    found = f"{gibibytes(total)}{bound}{left}"
    if available is not None and available < _LEAST_MEMORY:
        advice = "end other programs" + (", or raise the container's limit" if bound else "")
        return Finding("memory", "wrong", found, f"most models need more: {advice}")
    return Finding("memory", "ok", found)


def check_instructions(flags: Set[str], capability: str, *, bfloat16: bool) -> Finding:
    """What the CPU can do, and what torch uses of it.

    Args:
        flags: as Linux names them; none where the system does not say.
        capability: what torch says of itself: "AVX512", "AVX2", "DEFAULT" and others.
        bfloat16: the CPU multiplies in bfloat16.
    """
    able = " ".join(sorted(flags & INSTRUCTIONS)) or "none that matter"
    found = f"{able}; torch uses {capability}, {'with' if bfloat16 else 'without'} products in bfloat16"
    is_x86 = "sse2" in flags
    if is_x86 and "avx2" not in flags:
        advice = "products take much longer without AVX2: a virtual machine may hide it (qemu: -cpu host)"
        return Finding("instructions", "slow", found, advice)
    if is_x86 and capability in ("DEFAULT", "NO AVX"):
        advice = "torch uses no vectors here: unset ATEN_CPU_CAPABILITY, or install another build of torch"
        return Finding("instructions", "slow", found, advice)
    return Finding("instructions", "ok", found)


def check_cache(path: str, fault: str) -> Finding:
    """The folder in which engines remember what they find out. ``fault``: why nothing can be written there."""
    if fault:
        advice = (
            "models are compared with transformers at each start: set XDG_CACHE_HOME to a folder that can be written"
        )
        return Finding("cache", "slow", f"{path}: {fault}", advice)
    return Finding("cache", "ok", path)


def check_hub(path: str, fault: str, free: int) -> Finding:
    """The folder of models from the hub, with ``free`` bytes on its disk. ``fault``: why nothing can be written."""
    found = f"{path}, {gibibytes(free)} free"
    if fault:
        advice = "no model can be downloaded: set HF_HUB_CACHE to a folder that can be written"
        return Finding("models", "wrong", f"{found}: {fault}", advice)
    if free < _LEAST_DISK:
        return Finding("models", "wrong", found, "few models fit: make room, or set HF_HUB_CACHE to another disk")
    return Finding("models", "ok", found)


def check_demo(text: str, right: str, took: str) -> Finding:
    """What the demo checkpoint understood of a recording against what is said in it."""
    if text != right:
        advice = "this machine or its torch computes something else: try another build of torch, and report this"
        return Finding("demo", "wrong", f"{took}; it understood {text!r}, and {right!r} was said", advice)
    return Finding("demo", "ok", took)

"""The cores and the memory that the process may use, by cgroups and affinity. In a container the numbers of the whole
machine are too large. `loky.cpu_count` is not used: it knows neither the quota of an outer cgroup nor memory, and gives
no reason.

Functions have a parameter ``read``, which returns a file's text or ``None``, so that tests can pass files of their own.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path, PurePosixPath

from attrs import frozen

ReadText = Callable[[str], str | None]

_CGROUPS = "/sys/fs/cgroup"
_CPUS = "/sys/devices/system/cpu"
INSTRUCTIONS = frozenset(
    {"avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"}
    | {"asimddp", "i8mm", "bf16", "sve"}  # on ARM
)
"""Instructions on which the results of products may depend."""

_UNLIMITED = 1 << 60  # bytes; version 1 of cgroups writes a number near 2 ** 63 if there is no limit


def read_file(path: str) -> str | None:
    """Returns the text of a file; ``None``: the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


@frozen(kw_only=True)
class Cores:
    """The number of cores that are worth a thread, and the limits that led to it."""

    count: int
    logical: int  # logical cores of the machine
    allowed: int  # logical cores that affinity allows
    physical: int  # physical cores among the allowed ones: hyperthreads of one core share its arithmetic units
    quota: float | None  # quota of the cgroup, in cores; None: no limit

    @property
    def reason(self) -> str:
        """The limits as one line for people."""
        told = [f"{self.logical} logical"]
        if self.allowed < self.logical:
            told.append(f"{self.allowed} by affinity")
        if self.physical < self.allowed:
            told.append(f"{self.physical} physical")
        if self.quota is not None:
            told.append(f"a cgroup quota of {self.quota:g}")
        return ", ".join(told)


def cpu_name(read: ReadText) -> str:
    """Returns the processor's name from the system, or else from Python."""
    rows = [line.partition(":") for line in (read("/proc/cpuinfo") or "").splitlines()]
    names = [value.strip() for name, _, value in rows if name.strip() == "model name"]
    return next(iter(names), platform.processor() or platform.machine())


def cpu_flags(read: ReadText) -> frozenset[str]:
    """Returns the instruction sets of the processor by Linux's names. The set is empty if the system does not say."""
    rows = [line.partition(":") for line in (read("/proc/cpuinfo") or "").splitlines()]
    found = [value for name, _, value in rows if name.strip() in {"flags", "Features"}]
    return frozenset(next(iter(found), "").split())


def affinity() -> frozenset[int]:
    """Returns the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(read: ReadText, allowed: Set[int], logical: int) -> Cores:
    """Returns the cores that are worth a thread: the physical cores among ``allowed``, but no more than the whole cores
    in the cgroup's quota, and at least one. A thread beyond the quota would be stopped while the others wait for it."""
    physical = len({_siblings(read, cpu) for cpu in allowed}) or 1
    quota = cpu_quota(read)
    count = physical if quota is None else max(1, min(physical, int(quota)))
    return Cores(count=count, logical=max(logical, len(allowed)), allowed=len(allowed), physical=physical, quota=quota)


def choose_threads(told: int, environment: Mapping[str, str] = os.environ, read: ReadText = read_file) -> int:
    """Returns the number of threads for computing, if the configuration does not set it.

    It is the number of usable cores, but at most ``told``, torch's own number. If OMP_NUM_THREADS or MKL_NUM_THREADS is
    set, it is ``told``, since torch has read these variables.
    """
    if any(name in environment for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return told
    return min(told, usable_cores(read, affinity(), os.cpu_count() or 1).count)


def _siblings(read: ReadText, cpu: int) -> str:
    """Returns a name of the physical core of the logical CPU ``cpu``. All hyperthreads of a core have the same name."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        told = read(f"{_CPUS}/cpu{cpu}/topology/{name}")
        if told is not None:
            return told.strip()
    return str(cpu)


def cpu_quota(read: ReadText) -> float | None:
    """Returns the smallest quota of the process's cgroup and the cgroups above, in cores; ``None``: no limit."""
    quotas = [quota for folder in _folders(read, "cpu") if (quota := _quota(read, folder)) is not None]
    return min(quotas, default=None)


def _quota(read: ReadText, folder: str) -> float | None:
    told = read(f"{folder}/cpu.max")
    if told is None:  # version 1 of cgroups
        told = f"{read(f'{folder}/cpu.cfs_quota_us') or -1} {read(f'{folder}/cpu.cfs_period_us') or 0}"
    quota, period = (_whole(part) for part in (*told.split(), "", "")[:2])
    return quota / period if quota is not None and period else None


def available_memory(read: ReadText) -> int | None:
    """Returns the bytes that the process can allocate without swapping, by the machine and by the cgroups of the
    process. ``None``: the system does not say."""
    machine = _fields(read("/proc/meminfo")).get("MemAvailable:")
    found = [machine, *(_cgroup_memory(read, folder) for folder in _folders(read, "memory"))]
    return min((count for count in found if count is not None), default=None)


def memory_limit(read: ReadText) -> int | None:
    """Returns the smallest memory limit of the process's cgroup and the cgroups above, in bytes; ``None``: no limit."""
    files = ("memory.max", "memory.limit_in_bytes")
    found = [_whole(read(f"{folder}/{name}")) for folder in _folders(read, "memory") for name in files]
    return min((count for count in found if count is not None and count < _UNLIMITED), default=None)


def _cgroup_memory(read: ReadText, folder: str) -> int | None:
    """Returns the bytes that a cgroup may still use; ``None``: no limit. Idle file pages count as free, since the
    system drops them first."""
    for limit, usage, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, used = _whole(read(f"{folder}/{limit}")), _whole(read(f"{folder}/{usage}"))
        if most is not None and used is not None and most < _UNLIMITED:
            return max(0, most - used + _fields(read(f"{folder}/memory.stat")).get(idle, 0))
    return None


def _fields(text: str | None) -> dict[str, int]:
    """Parses lines of a name and a number, which is in bytes or "kB". Returns bytes by name."""
    rows = [line.split() for line in (text or "").splitlines()]
    return {
        row[0]: int(row[1]) * (1024 if row[2:] == ["kB"] else 1) for row in rows if len(row) > 1 and row[1].isdigit()
    }


def _whole(text: str | None) -> int | None:
    """Parses a number of 0 or more; ``None`` for anything else, such as "max" and -1."""
    return int(text) if text is not None and text.strip().isdigit() else None


def _folders(read: ReadText, controller: str) -> Iterator[str]:
    """Yields the folders of the process's cgroup and of the cgroups above, for both versions of cgroups. In a container
    the path may be the host's. The folder does not exist then, and ``read`` returns ``None`` for its files.
    """
    for line in (read("/proc/self/cgroup") or "0::/").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if not names:
            roots = [_CGROUPS, f"{_CGROUPS}/unified"]
        elif controller in names.split(","):
            roots = [f"{_CGROUPS}/{names}", f"{_CGROUPS}/{controller}"]
        else:
            continue
        inner = PurePosixPath(path or "/")
        for root in roots:
            yield from (f"{root}{'' if str(one) == '/' else one}" for one in (inner, *inner.parents))

"""The cores and the memory that the process may use, by cgroups and affinity. In a container the machine's own
numbers are wrong. `loky.cpu_count` knows neither the quota of an outer cgroup nor memory, and gives no reason.

Every function takes ``read``, which gives a file's text or ``None``, so that tests bring their own files.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path, PurePosixPath

from attrs import frozen

Read = Callable[[str], str | None]

_CGROUPS = "/sys/fs/cgroup"
_CPUS = "/sys/devices/system/cpu"
INSTRUCTIONS = frozenset(
    {"avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"}
    | {"asimddp", "i8mm", "bf16", "sve"}  # of ARM
)
"""Those by which products differ."""

_UNLIMITED = 1 << 60  # bytes; version 1 writes a number near 2 ** 63 where there is no limit


def read_file(path: str) -> str | None:
    """The text of a file; ``None`` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


@frozen(kw_only=True)
class Cores:
    """The number of threads that computing is worth, and the limits of it."""

    count: int
    logical: int  # of the machine
    allowed: int  # logical ones, by affinity
    physical: int  # of the allowed ones: hyperthreads of one core share its arithmetic units
    quota: float | None  # of the cgroup, in cores; None: no limit

    @property
    def reason(self) -> str:
        """One line for people."""
        told = [f"{self.logical} logical"]
        if self.allowed < self.logical:
            told.append(f"{self.allowed} by affinity")
        if self.physical < self.allowed:
            told.append(f"{self.physical} physical")
        if self.quota is not None:
            told.append(f"a cgroup quota of {self.quota:g}")
        return ", ".join(told)


def cpu_name(read: Read) -> str:
    """The processor's name, as the system or else Python gives it."""
    rows = [line.partition(":") for line in (read("/proc/cpuinfo") or "").splitlines()]
    names = [value.strip() for name, _, value in rows if name.strip() == "model name"]
    return next(iter(names), platform.processor() or platform.machine())


def cpu_flags(read: Read) -> frozenset[str]:
    """The instructions that the processor has, as Linux names them; none where the system does not say."""
    rows = [line.partition(":") for line in (read("/proc/cpuinfo") or "").splitlines()]
    found = [value for name, _, value in rows if name.strip() in {"flags", "Features"}]
    return frozenset(next(iter(found), "").split())


def affinity() -> frozenset[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(read: Read, allowed: Set[int], logical: int) -> Cores:
    """The cores that are worth a thread: physical ones among the ``allowed``, as many whole ones as the cgroup's quota
    pays for, and at least one. A thread beyond the quota would be stopped while the others wait for it."""
    physical = len({_siblings(read, cpu) for cpu in allowed}) or 1
    quota = cpu_quota(read)
    count = physical if quota is None else max(1, min(physical, int(quota)))
    return Cores(count=count, logical=max(logical, len(allowed)), allowed=len(allowed), physical=physical, quota=quota)


def choose_threads(told: int, environment: Mapping[str, str] = os.environ, read: Read = read_file) -> int:
    """Threads for computing, where the configuration leaves them open: one for each usable core, but no more than torch
    was ``told``; what OMP_NUM_THREADS or MKL_NUM_THREADS say stays."""
    if any(name in environment for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return told
    return min(told, usable_cores(read, affinity(), os.cpu_count() or 1).count)


def _siblings(read: Read, cpu: int) -> str:
    """Names the physical core of a logical one: the same text for all its hyperthreads."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        told = read(f"{_CPUS}/cpu{cpu}/topology/{name}")
        if told is not None:
            return told.strip()
    return str(cpu)


def cpu_quota(read: Read) -> float | None:
    """The least quota of the process's cgroup and those above it, in cores; ``None``: no limit."""
    quotas = [quota for folder in _folders(read, "cpu") if (quota := _quota(read, folder)) is not None]
    return min(quotas, default=None)


def _quota(read: Read, folder: str) -> float | None:
    told = read(f"{folder}/cpu.max")
    if told is None:  # version 1
        told = f"{read(f'{folder}/cpu.cfs_quota_us') or -1} {read(f'{folder}/cpu.cfs_period_us') or 0}"
    quota, period = (_whole(part) for part in (*told.split(), "", "")[:2])
    return quota / period if quota is not None and period else None


def available_memory(read: Read) -> int | None:
    """Bytes that can be taken without swapping, of the machine and of the cgroups that the process is in; ``None``:
    the system does not say."""
    machine = _fields(read("/proc/meminfo")).get("MemAvailable:")
    found = [machine, *(_cgroup_memory(read, folder) for folder in _folders(read, "memory"))]
    return min((count for count in found if count is not None), default=None)


def memory_limit(read: Read) -> int | None:
    """The least limit in bytes of the process's cgroup and those above it; ``None``: no limit."""
    files = ("memory.max", "memory.limit_in_bytes")
    found = [_whole(read(f"{folder}/{name}")) for folder in _folders(read, "memory") for name in files]
    return min((count for count in found if count is not None and count < _UNLIMITED), default=None)


def _cgroup_memory(read: Read, folder: str) -> int | None:
    """The bytes left of a cgroup's limit. Idle file pages count as free: the system drops them first."""
    for limit, usage, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, used = _whole(read(f"{folder}/{limit}")), _whole(read(f"{folder}/{usage}"))
        if most is not None and used is not None and most < _UNLIMITED:
            return max(0, most - used + _fields(read(f"{folder}/memory.stat")).get(idle, 0))
    return None


def _fields(text: str | None) -> dict[str, int]:
    """Lines of a name and a number, which is in bytes or "kB"."""
    rows = [line.split() for line in (text or "").splitlines()]
    return {
        row[0]: int(row[1]) * (1024 if row[2:] == ["kB"] else 1) for row in rows if len(row) > 1 and row[1].isdigit()
    }


def _whole(text: str | None) -> int | None:
    """A number of 0 or more; "max" and -1 are none."""
    return int(text) if text is not None and text.strip().isdigit() else None


def _folders(read: Read, controller: str) -> Iterator[str]:
    """The folders of the process's cgroup and of those above it, of both versions. In a container the path may be the
    host's, and not be there: whoever reads there finds nothing."""
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

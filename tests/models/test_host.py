"""What the process may use of the machine, read from files that the tests write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.models.machine.host import available_memory, choose_threads, cpu_quota, memory_limit, usable_cores

V2 = {"/proc/self/cgroup": "0::/service/engine\n"}
V1 = {"/proc/self/cgroup": "5:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n"}
MEMINFO = {"/proc/meminfo": "MemTotal: 1000 kB\nMemAvailable:    800 kB\nHugePages_Total: 0\n"}
STAT = "anon 5\ninactive_file 10240\ntotal_inactive_file 10240\n"


def group(folder, **files):
    """Files of a cgroup in ``folder``, by their names with an underline for each point."""
    return {f"/sys/fs/cgroup/{folder}/{name.replace('_', '.', 1)}": str(told) for name, told in files.items()}


def limited(most):
    """The files of a cgroup of version 1."""
    return {"memory_limit_in_bytes": most, "memory_usage_in_bytes": 307_200}


def hyperthreads(count):
    """Of ``count`` physical cores, two each: 0 and ``count``, 1 and ``count`` + 1, ..."""
    cpus = "/sys/devices/system/cpu"
    return {
        f"{cpus}/cpu{cpu}/topology/core_cpus_list": f"{cpu % count},{cpu % count + count}\n" for cpu in range(2 * count)
    }


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({**V2, "/sys/fs/cgroup/service/engine/cpu.max": "max 100000\n"}, None),
        ({**V2, "/sys/fs/cgroup/service/engine/cpu.max": "150000 100000\n"}, 1.5),
        ({**V2, "/sys/fs/cgroup/service/cpu.max": "50000 100000", "/sys/fs/cgroup/cpu.max": "300000 100000"}, 0.5),
        ({"/proc/self/cgroup": "0::/docker/not-here\n", "/sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ({"/sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ({**V1, "/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "-1\n"}, None),
        ({**V1, **group("cpu", cpu_cfs_quota_us="250000\n", cpu_cfs_period_us="100000\n")}, 2.5),
        ({**V2, "/sys/fs/cgroup/service/cpu.max": ""}, None),
    ],
)
def test_the_quota_is_the_least_of_the_cgroup_and_those_above(files, quota):
    assert cpu_quota(files.get) == quota


@pytest.mark.parametrize(
    ("files", "allowed", "count", "reason"),
    [
        ({}, range(4), 4, "8 logical, 4 by affinity"),
        (hyperthreads(4), range(8), 4, "8 logical, 4 physical"),
        (hyperthreads(4), {0, 4}, 1, "8 logical, 2 by affinity, 1 physical"),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, range(8), 2, "8 logical, a cgroup quota of 2.5"),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, range(8), 1, "8 logical, a cgroup quota of 0.5"),
    ],
)
def test_a_thread_for_each_physical_core_that_may_be_used(files, allowed, count, reason):
    cores = usable_cores(files.get, set(allowed), 8)
    assert (cores.count, cores.reason) == (count, reason)


@given(
    st.sets(st.integers(0, 15), min_size=1),
    st.integers(1, 8),
    st.none() | st.integers(1, 3_000_000),
)
def test_threads_are_at_least_one_and_never_more_than_any_limit(allowed, physical, quota):
    files = hyperthreads(physical)
    if quota is not None:
        files["/sys/fs/cgroup/cpu.max"] = f"{quota} 100000"
    count = usable_cores(files.get, allowed, 16).count
    assert 1 <= count <= len(allowed)
    assert quota is None or count <= max(1, quota / 100_000)


def test_the_environment_decides_about_threads_where_it_says_something():
    none = {"/sys/fs/cgroup/cpu.max": "100000 100000"}
    assert choose_threads(7, {"OMP_NUM_THREADS": "7"}, none.get) == 7
    assert choose_threads(7, {}, none.get) == 1


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MEMINFO, 800 * 1024),
        ({**V2, **MEMINFO, "/sys/fs/cgroup/service/engine/memory.max": "max\n"}, 800 * 1024),
        ({**V2, **MEMINFO, **group("service", memory_max=409_600, memory_current=307_200, memory_stat=STAT)}, 112_640),
        ({**V1, **MEMINFO, **group("memory", **limited(409_600), memory_stat=STAT)}, 112_640),
        ({**V1, **MEMINFO, **group("memory", **limited(9_223_372_036_854_771_712))}, 800 * 1024),
        ({"/sys/fs/cgroup/memory.max": "100\n", "/sys/fs/cgroup/memory.current": "200\n"}, 0),
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_its_cgroups(files, free):
    assert available_memory(files.get) == free


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({**V2, "/sys/fs/cgroup/service/engine/memory.max": "max\n"}, None),
        ({**V2, **group("service/engine", memory_max=500), **group("service", memory_max=400)}, 400),
        ({**V1, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "409600\n"}, 409_600),
        ({**V1, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_the_limit_of_memory_is_the_least_of_the_cgroups(files, limit):
    assert memory_limit(files.get) == limit

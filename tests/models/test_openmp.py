"""How OpenMP's threads wait: chosen before torch is loaded, or told."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from triolet.models.machine.openmp import prepare_openmp

WATCHED = """
import os, sys
import triolet
from triolet import demo
assert "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ, "nothing is done at import"
from triolet.models.machine import openmp
real = openmp.prepare_openmp
def watch():
    policy = real()
    with open("/proc/self/maps") as maps:
        mapped = maps.read()
    print("torch" in sys.modules, "libgomp" in mapped, os.environ.get("OMP_WAIT_POLICY"), policy.reason)
    return policy
openmp.prepare_openmp = watch
import trio
async def live():
    async with triolet.Engine(demo.checkpoint(), config=triolet.EngineConfig(device="cpu")):
        print("torch" in sys.modules, os.environ.get("OMP_WAIT_POLICY"))
trio.run(live)
"""


@pytest.mark.real_time
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps")
def test_an_engine_chooses_before_openmp_is_loaded():
    """In a process of its own: the library reads its settings when it is mapped."""
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, encoding="utf-8", check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False False PASSIVE set before torch was loaded", "True PASSIVE"]


def test_what_somebody_chose_stays():
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "9"), ("KMP_BLOCKTIME", "200")):
        environment = {name: value}
        assert prepare_openmp(environment, ()).setting == f"{name}={value}"
        assert environment == {name: value}


def test_too_late_is_told_with_what_to_do(caplog):
    environment: dict[str, str] = {}
    with caplog.at_level(logging.INFO, "triolet"):
        policy = prepare_openmp(environment, {"torch"})
    assert policy.setting is None
    assert environment == {}
    assert "set OMP_WAIT_POLICY=PASSIVE in the environment" in caplog.text

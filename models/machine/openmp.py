"""The setting for how OpenMP's threads wait. By default the threads of GNU's library spin in every barrier. If another
process is busy on the machine, each barrier waits for a thread that has no core, and everything takes several times as
long.

The library reads its settings once, when torch loads it. They are therefore set right before torch is first imported.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Container, MutableMapping

from attrs import frozen

_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them decides how threads wait
_POLICY = ("OMP_WAIT_POLICY", "PASSIVE")  # of the OpenMP standard: the libraries of GNU, LLVM and Intel read it


@frozen(kw_only=True)
class WaitPolicy:
    """The way in which OpenMP's threads wait in this process."""

    setting: str | None  # "OMP_WAIT_POLICY=PASSIVE", or a setting of the environment; None: the library's default
    reason: str


def prepare_openmp(
    environment: MutableMapping[str, str] = os.environ, modules: Container[str] = sys.modules
) -> WaitPolicy:
    """Makes OpenMP's threads sleep while they wait. Keeps a setting that the environment has. If torch is loaded
    already, changes nothing and logs why. Call this function right before torch is imported.

    Args:
        environment: `os.environ`. Processes that are started later inherit its settings.
    """
    for name in _SETTINGS:
        if name in environment:
            return WaitPolicy(setting=f"{name}={environment[name]}", reason="from the environment")
    if "torch" in modules:
        reason = (
            "torch was imported before the engine was opened, and reads OMP_WAIT_POLICY only once; set "
            "OMP_WAIT_POLICY=PASSIVE in the environment of the process, or threads=1, where other processes are busy"
        )
        logging.getLogger("triolet").info("OpenMP's threads spin while they wait: %s", reason)
        return WaitPolicy(setting=None, reason=reason)
    environment[_POLICY[0]] = _POLICY[1]
    return WaitPolicy(setting="=".join(_POLICY), reason="set before torch was loaded")

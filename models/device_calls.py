"""Wrappers for calls of the executor: they run in inference mode, their errors keep no tensor alive, and torch's errors
become ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from ..core.errors import DeviceLost, DeviceOutOfMemory
from ..core.tracebacks import clear_frames
from .machine.defaults import defaults_of_a_step

_Executor = TypeVar("_Executor")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def device_call(
    method: Callable[Concatenate[_Executor, _Arguments], _Result],
) -> Callable[Concatenate[_Executor, _Arguments], _Result]:
    """Decorates a method that works with tensors, so that it runs in inference mode. Its errors keep no tensor alive,
    however long they are kept.
    """

    @wraps(method)
    def call(self: _Executor, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        outer = sys.exception()
        try:
            with torch.inference_mode(), defaults_of_a_step():
                return method(self, *args, **kwargs)
        except BaseException as error:
            clear_frames(error, outer=outer)
            del self, args, kwargs, outer  # this frame still runs, so only it can clear itself
            raise

    return call


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turns torch's device errors into ours; ``what`` names the failed work in the message."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(f"{what} does not fit into the device's memory: {error}") from error
    except torch.AcceleratorError as error:
        raise DeviceLost(
            f"the device failed in {what}: {error}. This process has lost the device; start a new process"
        ) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # torch has no class of its own for this error
            raise
        raise DeviceOutOfMemory(f"{what} does not fit into the host's memory: {error}") from error

"""The command ``triolet devices``: what a model can run on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from .terminal import PIPE_CLOSED, stdout, write

if TYPE_CHECKING:
    from ...models.linear.choice import ChoiceFile


@click.command()
def devices() -> int:
    """List what a model can run on. The default is marked with a star."""
    out = stdout()
    try:
        for line in _device_lines():
            write(line, out)
    except BrokenPipeError:
        return PIPE_CLOSED
    return 0


def _device_lines() -> list[str]:
    from ...models.machine.host import affinity, available_memory, choose_threads, cpu_name, read_file, usable_cores
    from ...models.machine.openmp import prepare_openmp

    policy = prepare_openmp()
    import torch

    from ...models.linear.choice import ChoiceFile

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lines = []
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        star = "*" if index == torch.cuda.current_device() else " "
        free, total = torch.cuda.mem_get_info(index)
        lines.append(f"{star} cuda:{index}  {device.name}, {_gibibytes(total)} ({_gibibytes(free)} free), float16")
    star = " " if count else "*"
    threads = choose_threads(torch.get_num_threads())
    cores = usable_cores(read_file, affinity(), os.cpu_count() or 1)
    left = available_memory(read_file)
    available = "" if left is None else f" ({_gibibytes(left)} available)"
    return [
        *lines,
        f"{star} cpu  {cpu_name(read_file)}, {_gibibytes(_memory())}{available}, float32, {threads} threads",
        f"       cores: {cores.count} usable of {cores.reason}",
        f"       waiting threads: {policy.setting or 'spin'}, {policy.reason}",
        *_kernel_lines(ChoiceFile.of_user(threads=threads)),
    ]


def _kernel_lines(file: ChoiceFile) -> list[str]:
    lines = file.lines()
    if not lines:
        return ["       kernels: none timed yet; they are when a model is opened"]
    return [
        f"       kernels, as timed with models opened before ({file.cache.path}):",
        *(f"         {line}" for line in lines),
    ]


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _memory() -> int:
    """Bytes of the machine's memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0

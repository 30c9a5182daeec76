"""The command ``triolet devices``: lists what a model can run on. ``triolet doctor`` looks at the same devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from attrs import frozen

from ...core.log_lines import one_line
from .pages import Page
from .terminal import gibibytes, stdout, write

if TYPE_CHECKING:
    from ...models.machine.host import Cores
    from ...models.machine.openmp import WaitPolicy


@click.command(
    cls=Page,
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

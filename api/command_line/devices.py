"""The command ``triolet devices``: lists what a model can run on. ``triolet doctor`` looks at the same devices."""

from __future__ import annotations

import os
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
    out, processor = stdout(), Processor.find()
    *cards, cpu = find_devices(processor)
    for card in cards:
        write(f"{'*' if card.is_default else ' '} {card.name}  {card.told}", out)
    write(f"{'*' if cpu.is_default else ' '} {cpu.name}  {cpu.told}, {processor.threads} threads", out)
    write(f"       cores: {processor.cores.count} usable of {processor.cores.reason}", out)
    write(f"       waiting threads: {processor.policy.setting or 'spin'}, {processor.policy.reason}", out)
    return 0


@frozen
class Device:
    """A device that a model can run on, and the dtype in which "auto" computes there. ``fault``: why the device does
    not answer."""

    name: str
    about: str
    dtype: str
    is_default: bool
    fault: str = ""

    @property
    def told(self) -> str:
        """One line for people."""
        return f"cannot be asked: {self.fault}" if self.fault else f"{self.about}, {self.dtype}"


@frozen(kw_only=True)
class Processor:
    """The CPU as this process may use it, with memory in bytes; ``None`` if the system does not report a number."""

    name: str
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
        from ...models.machine.host import affinity, available_memory, choose_threads, cpu_name, read_file, usable_cores
        from ...models.machine.openmp import prepare_openmp

        policy = prepare_openmp()
        import torch

        return cls(
            name=cpu_name(read_file),
            cores=usable_cores(read_file, affinity(), os.cpu_count() or 1),
            threads=choose_threads(torch.get_num_threads()),
            memory=_memory(),
            available=available_memory(read_file),
            policy=policy,
        )


def find_devices(processor: Processor) -> list[Device]:
    """The devices that torch sees, the CPU last."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    left = "" if processor.available is None else f" ({gibibytes(processor.available)} available)"
    about = f"{processor.name}, {gibibytes(processor.memory)}{left}"
    return [*map(_card, range(count)), Device("cpu", about, "float32", not count)]


def _card(index: int) -> Device:
    import torch

    about, fault, is_default = "", "", False
    try:
        is_default = index == torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(index)
        about = f"{torch.cuda.get_device_properties(index).name}, {gibibytes(total)} ({gibibytes(free)} free)"
    except RuntimeError as error:  # CUDA's errors, too: another program has the device for itself, or it is lost
        fault = one_line(str(error))
    return Device(f"cuda:{index}", about, "float16", is_default, fault)


def _memory() -> int:
    """The bytes of the machine's memory; 0 if the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0

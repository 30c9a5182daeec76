"""The limits of this machine: the speed of matrix products, and of reading memory. No computation can be faster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Self

from attrs import frozen

_SIZE = 1536  # rows and columns of the matrices: their product fills the caches and takes milliseconds
_READ = 64 << 20  # numbers: far more than any cache holds
_TURNS = 9
_SECONDS = 1.0  # of all turns: products in a type without instructions of its own take so long each


@frozen(kw_only=True)
class Machine:
    """A machine's limits, measured with the threads that were asked for."""

    cpu: str
    threads: int
    load: float  # the load average of the last minute before the measurement
    gigaflops: dict[str, float]  # by the type of the numbers; multiplications and additions are counted
    gigabytes: float  # GB that are read from memory in a second

    @classmethod
    def measure(cls, threads: int) -> Self:
        """Measures for about two seconds. The fastest of several runs counts, since the result is a limit and not a
        mean."""
        import torch

        from ..models.machine.host import cpu_name, read_file

        load = os.getloadavg()[0]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            wide = torch.randn(_SIZE, _SIZE)
            half, small = wide.bfloat16(), (wide * 30).to(torch.int8)
            products: dict[str, Callable[[], object]] = {
                "float32": lambda: wide @ wide,
                "bfloat16": lambda: half @ half,
                "int8": lambda: torch._int_mm(small, small.T),
            }
            flops = {name: 2 * _SIZE**3 / _fastest(product) / 1e9 for name, product in products.items()}
            numbers = torch.ones(_READ)
            read = numbers.nbytes / _fastest(numbers.sum) / 1e9
        finally:
            torch.set_num_threads(before)
        return cls(cpu=cpu_name(read_file), threads=threads, load=load, gigaflops=flops, gigabytes=read)


def _fastest(run: Callable[[], object]) -> float:
    found: list[float] = []
    while len(found) < _TURNS and sum(found) < _SECONDS:
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found)

"""`GraphManager`: steps that only decode, recorded once for each shape and replayed.

A small step on a GPU spends its time on launching some hundred kernels, not on computing. A graph launches them all at
once. It can only repeat what was recorded, with the same addresses. Steps are therefore padded to the shapes of
`Buckets`, and their numbers are written to static buffers before each replay.

`torch.cuda.make_graphed_callables` is not used: it records one shape, and does not release its memory in order.

`CudaRecorder` captures graphs. `EagerRecorder` runs the function each time, with the same buffers, shapes and spare
rows, on any device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

from ..memory.kv import PagedKV
from ..memory.rows import Rows
from .fixed import Bucket, Buckets, FixedInputs, describe

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITY = 32
"""The largest number of graphs that are kept. Their intermediate results share one pool of memory, which is as large as
the largest graph needs."""
_GATHERED = 256 << 20  # bytes of one layer's keys and values that a recorded step gathers
_WARM_UP = 2  # runs before a capture, in which libraries choose and load their kernels


Recorded = tuple[Callable[[], object], Callable[[], object]]
"""A recorded step: the call that runs the step on the present contents of its inputs, and the call that forgets it."""


class Decode(Protocol):
    """A function that computes a step. A second run must give the same results, since a step is also run before its
    capture."""

    def __call__(self, inputs: FixedInputs) -> None:
        """Writes the step's logits to ``inputs``."""

    def rehearse(self, inputs: FixedInputs) -> None:
        """Raises `RuntimeError` if the step does something that no graph can do, such as reading a number from the
        device."""


class CannotCaptureError(Exception):
    """The function does something that no graph can do, or there is no memory for a graph. The device still works."""


@frozen
class EagerRecorder:
    """A recorder that records nothing: the function runs each time."""

    def capture(self, function: Decode, inputs: FixedInputs) -> Recorded:
        """Returns ``function(inputs)`` as a recorded step. Raises `CannotCaptureError` if it cannot be recorded."""
        return partial(function, inputs), self.release

    def release(self) -> None:
        """Forgets the memory that the recorded steps share. The steps must have been released before."""


@define(eq=False)
class CudaRecorder:
    """A recorder that captures CUDA graphs on its own stream, from the calling thread."""

    device: torch.device
    _stream: Any = field(init=False, default=None)
    _pool: Any = field(init=False, default=None)

    def capture(self, function: Decode, inputs: FixedInputs) -> Recorded:
        stream = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device):
                self._warm_up(function, inputs)
                return self._capture(function, inputs)
        except RuntimeError as error:  # out of memory and errors of the device included
            torch.cuda.set_stream(stream)  # torch stays on the capture's stream if the capture cannot be ended
            torch.cuda.synchronize(self.device)  # raises if the device is lost
            raise CannotCaptureError(f"{type(error).__name__}: {error}") from error

    def _warm_up(self, function: Decode, inputs: FixedInputs) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP):
                function(inputs)
        current.wait_stream(self._stream)

    def _capture(self, function: Decode, inputs: FixedInputs) -> Recorded:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )  # other threads, and thus other engines, may use the device meanwhile
        with _workspaces_apart(), recording:
            function(inputs)
        return graph.replay, graph.reset

    def release(self) -> None:
        self._stream = self._pool = None


@contextmanager
def _workspaces_apart() -> Iterator[None]:
    """Clears cuBLAS's workspaces before and after a capture, as torch's own use of graphs does.

    cuBLAS never frees its workspaces itself. The workspace of a capture must come from the graphs' pool and go back to
    it. Otherwise the graph would use memory that belongs to others, or the workspace would outlive the pool.
    """
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    try:
        yield
    finally:
        if clear is not None:
            clear()


Recorder = EagerRecorder | CudaRecorder


@define(eq=False, kw_only=True)
class GraphManager:
    """A recorder and player of steps. It is made, used and released on one thread. The executor's stack owns it and
    releases it before the weights and pages, whose addresses are in the graphs.

    If a step cannot be recorded, the manager logs a warning, keeps the reason in `refused`, releases its graphs and
    refuses all further steps. This is harmless: graphs make steps faster, and each step can be computed without them.

    Args:
        max_running, positions: the most sequences of a step, and the most tokens of a sequence.
        capacity: the most shapes that are kept.
    """

    decode: Decode = field(repr=False)
    recorder: Recorder
    paged: PagedKV = field(repr=False)
    max_running: int
    positions: int
    vocabulary: int
    capacity: int = CAPACITY
    buckets: Buckets = field(init=False)
    _numbers: Tensor = field(init=False, repr=False)
    _logits: Tensor = field(init=False, repr=False)
    captures: int = field(init=False, default=0)  # shapes that were recorded, each counted at every recording
    replays: int = field(init=False, default=0)  # steps
    refused: str = field(init=False, default="")  # why no step is recorded any more; empty: steps are recorded
    _recorded: dict[Bucket, tuple[FixedInputs, Recorded]] = field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        paged, pages = self.paged, -(-self.positions // self.paged.page_size)
        self.buckets = Buckets(rows=self.max_running, pages=pages, cells=max(1, _GATHERED // paged.page_bytes))
        self._numbers = torch.zeros(self.buckets.numbers, dtype=torch.long, device=paged.device)
        self._logits = torch.zeros(self.max_running, self.vocabulary, dtype=paged.dtype, device=paged.device)

    def run(self, rows: Rows, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """Runs a step that feeds one token of each sequence. `PagedKV.enter` must have been called for the step.

        Args:
            positions: the positions of the tokens as the model counts positions.

        Returns:
            Logits [rows, vocabulary], in the model's dtype, valid until the next call. ``None``: nothing was computed,
            since the step is too large or steps cannot be recorded.
        """
        bucket = self.buckets.fit(rows, self.paged.page_size)
        if bucket is None or self.refused:
            return None
        inputs = FixedInputs.of(bucket, self._numbers, self._logits)
        numbers = describe(bucket, rows, token_ids, positions, self.paged.page_size, self.paged.pages)
        self._numbers[: len(numbers)].copy_(numbers)
        try:
            self._find(bucket, inputs)()
        except CannotCaptureError as error:
            self.refused = str(error)
            self._forget()
            logging.getLogger(__name__).warning(
                "steps are computed without graphs from now on, since one cannot be captured: %s", self.refused
            )
            return None
        self.replays += 1
        return inputs.logits[: len(token_ids)]

    def prove(self) -> None:
        """Records a step without sequences. So steps that cannot be recorded are found before a request waits."""
        self.run(Rows(positions=(), chunks=(), tables=(), wanted=()), (), ())

    def _find(self, bucket: Bucket, inputs: FixedInputs) -> Callable[[], object]:
        """Returns the call that runs the recorded step, and makes the step the most recently used one.

        A new step is recorded before an old one is released, since releasing the last graph would free the shared pool
        of memory.
        """
        found = self._recorded.pop(bucket, None)
        if found is None:
            if not self.captures:  # a first capture that fails may leave torch's allocator in capture mode
                try:
                    self.decode.rehearse(inputs)
                except RuntimeError as error:
                    raise CannotCaptureError(f"{type(error).__name__}: {error}") from error
            found = inputs, self.recorder.capture(self.decode, inputs)
            self.captures += 1
        self._recorded[bucket] = found
        while len(self._recorded) > self.capacity:
            oldest = next(iter(self._recorded))
            self._recorded.pop(oldest)[1][1]()
        return found[1][0]

    def _forget(self) -> None:
        while self._recorded:
            self._recorded.popitem()[1][1][1]()
        self.recorder.release()

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the static buffers. The pool that the graphs share belongs to torch's allocator and is no tensor."""
        return (self._numbers, self._logits)

    def release(self) -> None:
        """Forgets the graphs, then the buffers."""
        self._forget()
        self._numbers = self._logits = torch.empty(0)


def find_recorder(mode: str, device: torch.device) -> Recorder | None:
    """Returns the recorder for ``mode``; ``None``: no step is recorded."""
    if mode == "eager":
        return EagerRecorder()
    return CudaRecorder(device) if mode == "auto" and device.type == "cuda" else None

"""The owner of what transformers keeps or does for the whole process: its imports, what it changes while it makes a
module, and its log.

transformers imports its modules when they are first asked for, which several threads must not do at once. While
`from_pretrained` makes a module, it changes torch's default dtype, `PreTrainedModel.tie_weights`, `torch.linspace` and
the functions of `torch.nn.init` for all threads, and puts back what it found. Two threads that overlap put back the
wrong things, and then all later loads of the process go wrong. So our loads take turns where they import and make
modules, and `private` makes modules without these changes. A program's own loads, in other threads, are not disturbed,
and do not disturb ours.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from attrs import define, field
from torch import nn

from ...core.errors import EngineClosed
from ..machine.defaults import OwnDefaults
from ..machine.threads import hold_in_forks


@define(eq=False)
class Turns:
    """Lets one thread of the process at a time import and make modules, in the order in which they ask. A thread that
    waits can be told to give up. Nobody holds a turn while weights are read or files are downloaded.
    """

    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _queue: deque[int] = field(factory=deque, init=False)  # threads, by `get_ident`; the first one has the turn
    _given_up: dict[int, Callable[[], bool]] = field(factory=dict, init=False)  # for each thread within `loading`
    _quiet: int = field(default=0, init=False)  # blocks of `quiet` that have not ended
    _programs: tuple[int, bool] = field(default=(0, False), init=False)  # verbosity, and whether bars are shown

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn of this thread, and keeps it within the block. The block runs under `OwnDefaults`. A
        thread that has the turn may enter again.

        Raises:
            EngineClosed: the load of this thread was given up.
        """
        me = threading.get_ident()
        outlive_forks()
        with self._changed:
            entered = me not in self._queue
            if entered:
                self._wait(me)
        try:
            with OwnDefaults():
                yield
        finally:
            if entered:
                with self._changed:
                    self._queue.remove(me)
                    self._changed.notify_all()

    def _wait(self, me: int) -> None:
        is_given_up = self._given_up.get(me, bool)
        self._queue.append(me)
        try:
            self._changed.wait_for(lambda: self._queue[0] == me or is_given_up())
            if is_given_up():
                raise EngineClosed("the engine was closed while it waited for other loads of this process")
        except BaseException:
            self._queue.remove(me)
            self._changed.notify_all()
            raise

    @contextmanager
    def loading(self, is_given_up: Callable[[], bool]) -> Iterator[None]:
        """Makes `turn` raise within the block as soon as ``is_given_up`` returns True. If another thread changes that,
        it calls `look_again`."""
        me = threading.get_ident()
        self._given_up[me] = is_given_up
        try:
            yield
        finally:
            del self._given_up[me]

    def look_again(self) -> None:
        """Wakes all threads that wait, so that they see whether they are given up."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def making(self, dtype: torch.dtype) -> Iterator[None]:
        """Makes the modules that transformers makes within the block without memory and in ``dtype``, in a turn of this
        thread. Other threads notice nothing of it.
        """
        with self.turn():
            from transformers import modeling_utils as untyped

            library: Any = untyped
            me, theirs = threading.get_ident(), library.local_torch_dtype

            def local(asked: torch.dtype, *names: str) -> AbstractContextManager[Any]:
                return OwnDefaults(asked) if threading.get_ident() == me else theirs(asked, *names)

            library.local_torch_dtype = local  # for modules within the module; it sets the default dtype of the process
            try:
                with torch.device("meta"), OwnDefaults(dtype):
                    yield
            finally:
                library.local_torch_dtype = theirs

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Keeps transformers from showing progress bars and its report of a load, since we raise an error for anything
        wrong. The last block that ends restores what the first one found, unless the program has changed it."""
        with self.turn():
            from transformers.utils import logging as untyped

        library: Any = untyped
        with self._changed:
            self._quiet += 1
            if self._quiet == 1:
                self._programs = library.get_verbosity(), library._tqdm_active
                library.set_verbosity_error()
                library._tqdm_active = False  # `disable_progress_bar` would disable those of huggingface_hub, too
        try:
            yield
        finally:
            with self._changed:
                self._quiet -= 1
                if not self._quiet:
                    self._speak(library)

    def _speak(self, library: Any) -> None:
        verbosity, bars = self._programs
        if library.get_verbosity() == library.ERROR:
            library.set_verbosity(verbosity)
        library._tqdm_active = library._tqdm_active or bars

    def _end_in_child(self) -> None:
        """Forgets the other threads, which do not exist in a child, and the imports that they had not ended."""
        me = threading.get_ident()
        if any(thread != me for thread in self._queue):
            self._queue = deque(thread for thread in self._queue if thread == me)
            importlib._bootstrap._module_locks.clear()  # type: ignore[attr-defined]
            for name, module in list(sys.modules.items()):
                if name.startswith("transformers") and getattr(
                    getattr(module, "__spec__", None), "_initializing", False
                ):
                    del sys.modules[name]
        if self._quiet and not self._queue:
            self._quiet = 0
            self._speak(sys.modules["transformers.utils.logging"])
        self._changed.release()


TURNS = Turns()
"""The turns of this process. Nothing is changed before a model is loaded."""


@cache
def outlive_forks() -> None:
    """Lets processes that are forked while another thread has the turn load models."""
    hold_in_forks(TURNS._changed, TURNS._end_in_child)


@cache
def private(made: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of transformers' class ``made``. Under `OwnDefaults` its `from_pretrained` changes nothing for
    other threads, and goes right whatever theirs have changed. In the end the caller gives the module the class
    ``made``."""
    genuine: Any = made

    def begin(cls: Any, dtype: torch.dtype, *_: object) -> list[AbstractContextManager[None]]:
        cls.made_by.add(threading.get_ident())
        return [TURNS.making(dtype)]

    def tie(self: Any, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        if missing_keys is not None or recompute_mapping:  # not while the module is made, since all weights are read
            _tie_weights()(self, missing_keys, recompute_mapping)

    members = {
        "__module__": made.__module__,  # tells transformers that the class is its own
        "made_by": set[int](),  # the threads that have made such a module
        "get_init_context": classmethod(begin),
        "tie_weights": tie,
        "initialize_weights": torch.no_grad()(inspect.unwrap(genuine.initialize_weights)),
    }
    return type(made.__name__, (made,), members)


@cache
def _tie_weights() -> Callable[..., None]:
    """Returns `PreTrainedModel.tie_weights`. If a load of the program has put another function in its place, returns
    that of another copy of the library's module."""
    from transformers import modeling_utils as untyped

    library: Any = untyped
    if library.PreTrainedModel.tie_weights.__module__ != library.__name__:
        library = importlib.util.module_from_spec(library.__spec__)
        library.__spec__.loader.exec_module(library)
    found: Callable[..., None] = library.PreTrainedModel.tie_weights
    return found

"""`ResourceStack`: one owner for everything that an executor holds. It is closed in reverse order on every path out.

Bytes are counted by storages. A tensor counts with its whole storage, and a storage counts once, however many tensors
share it. A released storage counts until it is really dead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Protocol, TypeVar

from attrs import field, frozen, mutable
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from ...core.tracebacks import clear_frames


class Holder(Protocol):
    """An object that holds tensors: it lists them, and it can forget them."""

    def tensors(self) -> Iterable[Tensor]:
        """Returns all tensors held now, without those that belong to other objects; none after `release`."""

    def release(self) -> object:
        """Forgets all tensors."""


AnyHolder = TypeVar("AnyHolder", bound=Holder)


@frozen(kw_only=True)
class ReleaseReport:
    """Bytes by owner before a release and after it. ``after`` has the same owners, and is measured: an owner has zero
    only if every storage is dead.
    """

    before: Mapping[str, int] = field(factory=dict)
    after: Mapping[str, int] = field(factory=dict)

    def with_(self, other: ReleaseReport) -> ReleaseReport:
        """Returns both reports as one. They must have no owner in common."""
        return ReleaseReport(before={**self.before, **other.before}, after={**self.after, **other.after})

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that outlived their release, by owner. Another object or a reference cycle still holds them."""
        return {owner: count for owner, count in self.after.items() if count}


def storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Returns the storages of ``tensors`` by identity, each once."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return found


@frozen(kw_only=True)
class _Resource:
    owner: str
    release: Callable[[], object]
    list_tensors: Callable[[], Iterable[Tensor]] | None  # None: the resource holds no tensors

    def storages(self) -> dict[int, UntypedStorage]:
        return storages(self.list_tensors() if self.list_tensors is not None else ())


@frozen(kw_only=True)
class _Released:
    """A storage after the release of its owner. The weak reference reads torch's own reference count. This count covers
    references from C++, and cycles that wait for the garbage collector.
    """

    owner: str
    nbytes: int
    is_alive: Callable[[], bool]

    @classmethod
    def watch(cls, owner: str, storage: UntypedStorage) -> _Released:
        nbytes = storage.nbytes()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return cls(owner=owner, nbytes=nbytes, is_alive=partial(_is_alive, reference))


def _is_alive(reference: StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


@mutable(eq=False)
class ResourceStack:
    """The resources that are held, with their owners and the functions that release them.

    Nothing here refers back to the stack's user, so no reference cycle keeps tensors alive.
    """

    report: ReleaseReport = field(init=False, factory=ReleaseReport)
    """The report of the last `close`, even if it raised."""
    _resources: list[_Resource] = field(init=False, factory=list)
    _kept: list[_Released] = field(init=False, factory=list, repr=False)

    def own(self, owner: str, holder: AnyHolder) -> AnyHolder:
        """Takes over ``holder`` and returns it.

        Args:
            owner: the name under which the holder's bytes are reported. Several holders may share a name.
            holder: lists its tensors at every count. `close` calls its ``release`` once.
        """
        self._resources.append(_Resource(owner=owner, release=holder.release, list_tensors=holder.tensors))
        return holder

    def callback(self, owner: str, release: Callable[[], object]) -> None:
        """Registers a release for something that holds no tensors. `close` calls ``release`` once. ``release`` must not
        refer back to the stack's user."""
        self._resources.append(_Resource(owner=owner, release=release, list_tensors=None))

    def owners(self) -> dict[int, tuple[str, ...]]:
        """Returns for each storage, by identity, the owners that hold it now: one owner unless several share the
        storage."""
        found: dict[int, tuple[str, ...]] = {}
        for resource in self._resources:
            for identity in resource.storages():
                found[identity] = (*found.get(identity, ()), resource.owner)
        return found

    def bytes_by_owner(self) -> dict[str, int]:
        """Returns the bytes held now, by owner, in the order in which the owners came, including bytes that outlived
        their release. After `close` the result is therefore empty, or shows a fault. A storage that two owners share
        counts for the first."""
        held: dict[str, int] = {}
        counted: set[int] = set()
        for resource in self._resources:
            if resource.list_tensors is None:
                continue
            mine = resource.storages()
            fresh = sum(storage.nbytes() for identity, storage in mine.items() if identity not in counted)
            held[resource.owner] = held.get(resource.owner, 0) + fresh
            counted |= mine.keys()
        self._kept = [one for one in self._kept if one.is_alive()]
        for one in self._kept:
            held[one.owner] = held.get(one.owner, 0) + one.nbytes
        return held

    def unowned(self, root: object) -> list[Tensor]:
        """Returns the tensors that ``root`` leads to and that no owner counts. Each of them lacks a call of `own`."""
        owned = self.owners()
        return [tensor for tensor in reachable_tensors(root) if not storages([tensor]).keys() <= owned.keys()]

    def close(self, *, handed_on: Iterable[Tensor] = ()) -> ReleaseReport:
        """Runs every release, the last registered first, even if some of them raise. A second call does nothing.

        Args:
            handed_on: tensors that have another owner from now on. They may stay alive.

        Raises:
            ExceptionGroup: the errors of the releases, each with a note that names the owner. Everything else was
                released, as `report` shows. The group is a `BaseExceptionGroup` if an error is not an `Exception`.
        """
        errors: list[BaseException] = []
        before: dict[str, int] = {}
        expected = frozenset(storages(handed_on))  # not the storages: an error would hold them with this frame
        watched = self._watch(before, errors)
        while self._resources:
            _release(self._resources.pop(), errors)
        for error in errors:
            clear_frames(error)  # frames hold what was to be released
        kept = [one for identity, one in watched.items() if identity not in expected and one.is_alive()]
        self._kept += kept
        after = dict.fromkeys(before, 0)
        for one in kept:
            after[one.owner] += one.nbytes
        self.report = ReleaseReport(before=before, after=after)
        if errors:
            raise BaseExceptionGroup("some resources could not be released", errors)
        return self.report

    def _watch(self, before: dict[str, int], errors: list[BaseException]) -> dict[int, _Released]:
        """Returns weak references to all storages held, by identity, and writes their bytes by owner into
        ``before``."""
        watched: dict[int, _Released] = {}
        for resource in self._resources:
            if resource.list_tensors is None:
                continue
            before.setdefault(resource.owner, 0)
            with _gathered(errors, f"while counting {resource.owner!r}"):
                for identity, storage in resource.storages().items():
                    if identity not in watched:
                        watched[identity] = _Released.watch(resource.owner, storage)
                        before[resource.owner] += storage.nbytes()
        return watched


def _release(resource: _Resource, errors: list[BaseException]) -> None:
    with _gathered(errors, f"while releasing {resource.owner!r}"):
        resource.release()


@contextmanager
def _gathered(errors: list[BaseException], note: str) -> Iterator[None]:
    """Appends an error of the block to ``errors`` instead of raising it."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised by `close`, after all the other releases
        error.add_note(note)
        errors.append(error)


def reachable_tensors(root: object) -> list[Tensor]:
    """Returns every tensor that ``root`` leads to by references, ``root`` included, each once.

    References from modules, classes and the globals of functions are not followed, and references within C++ are
    invisible: a tensor that is reached only through these is left out."""
    found: list[Tensor] = []
    seen, pending = {id(root)}, [root]
    while pending:
        current = pending.pop()
        if isinstance(current, Tensor):
            found.append(current)
            continue
        for referent in _referents(current):
            if id(referent) not in seen:
                seen.add(id(referent))
                pending.append(referent)
    return found


def _referents(current: object) -> Sequence[object]:
    if isinstance(current, type | ModuleType):
        return ()
    if isinstance(current, FunctionType):
        return (current.__closure__, current.__defaults__, current.__kwdefaults__, current.__dict__)
    return gc.get_referents(current)

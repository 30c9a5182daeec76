"""`ResourceStack`: one owner for everything an executor holds, closed in reverse order on every path out.

What is held is counted in storages, not in promises: a tensor counts with the whole storage it pins, a storage once
however many tensors share it, and what was released counts until its storage is really dead.
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

from ...core.frames import clear_frames


class Holder(Protocol):
    """An object that holds tensors: it lists them, and it can forget them."""

    def tensors(self) -> Iterable[Tensor]:
        """All tensors held now, those of other objects excluded; none after `release`."""

    def release(self) -> object:
        """Forgets them all."""


AnyHolder = TypeVar("AnyHolder", bound=Holder)


@frozen(kw_only=True)
class ReleaseReport:
    """Bytes by owner before a release and after it. ``after`` names the same owners, and is measured: zero where every
    storage is dead, whatever its owner says."""

    before: Mapping[str, int] = field(factory=dict)
    after: Mapping[str, int] = field(factory=dict)

    def with_(self, other: ReleaseReport) -> ReleaseReport:
        """Both reports as one; they have no owner in common."""
        return ReleaseReport(before={**self.before, **other.before}, after={**self.after, **other.after})

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that outlived their release, by owner: somebody else holds them, or a reference cycle does."""
        return {owner: count for owner, count in self.after.items() if count}


def storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The storages of ``tensors``, each once, by identity."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return found


@frozen(kw_only=True)
class _Resource:
    owner: str
    release: Callable[[], object]
    list_tensors: Callable[[], Iterable[Tensor]] | None  # None: it holds none

    def storages(self) -> dict[int, UntypedStorage]:
        return storages(self.list_tensors() if self.list_tensors is not None else ())


@frozen(kw_only=True)
class _Released:
    """A storage whose owner was asked to forget it. The weak reference asks torch's own count, so neither a reference
    from C++ nor a cycle that waits for the collector deceives it."""

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
    """Knows what is held, by owner, and how to give it back.

    Nothing here refers back to the stack's user, so no reference cycle keeps tensors alive.
    """

    report: ReleaseReport = field(init=False, factory=ReleaseReport)
    """The report of the last `close`, also where it raised."""
    _resources: list[_Resource] = field(init=False, factory=list)
    _kept: list[_Released] = field(init=False, factory=list, repr=False)

    def own(self, owner: str, holder: AnyHolder) -> AnyHolder:
        """Takes over ``holder``, and returns it.

        Args:
            owner: the name under which its bytes are reported; several holders may share one.
            holder: asked for its tensors at every count, and asked to forget them once, by `close`.
        """
        self._resources.append(_Resource(owner=owner, release=holder.release, list_tensors=holder.tensors))
        return holder

    def callback(self, owner: str, release: Callable[[], object]) -> None:
        """Takes over what holds no tensors and must be put back all the same; ``release`` is called once, by `close`,
        and must not lead back to the stack's user."""
        self._resources.append(_Resource(owner=owner, release=release, list_tensors=None))

    def owners(self) -> dict[int, tuple[str, ...]]:
        """Returns for each storage, by identity, the owners that hold it now: one, unless two share it."""
        found: dict[int, tuple[str, ...]] = {}
        for resource in self._resources:
            for identity in resource.storages():
                found[identity] = (*found.get(identity, ()), resource.owner)
        return found

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes held now, by owner, in the order of taking, and those that outlived their release; so after `close` it
        is empty, or shows what is wrong. A storage that two owners share counts for the first."""
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
        """The tensors and the native memory that ``root`` leads to and no owner counts: a call of `own` is missing."""
        owned = self.owners()
        return [tensor for tensor in reachable_tensors(root) if not storages([tensor]).keys() <= owned.keys()]

    def close(self, *, handed_on: Iterable[Tensor] = ()) -> ReleaseReport:
        """Runs every release, the last registered first, although earlier ones raise. Idempotent.

        Args:
            handed_on: tensors that have another owner from now on: that they live is no fault.

        Raises:
            ExceptionGroup: what the releases raised, each with a note that names its owner. Everything else was
                released, as `report` shows. It is a `BaseExceptionGroup` where one of them is no `Exception`.
        """
        errors: list[BaseException] = []
        before: dict[str, int] = {}
        expected = frozenset(storages(handed_on))  # not the storages: an error would hold them with this frame
        watched = self._watch(before, errors)
        while self._resources:
            _release(self._resources.pop(), errors)
        for error in errors:
            clear_frames(error)  # they hold what was to be released
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
        """Weak references to all storages held, by identity; ``before`` gets their bytes, by owner."""
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
    """Collects errors of the block in ``errors``."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised by `close`, after all the other releases
        error.add_note(note)
        errors.append(error)


def reachable_tensors(root: object) -> list[Tensor]:
    """Every tensor that ``root`` leads to by references, itself included, each once. Modules,
    classes and the globals of functions are nobody's own: what only they lead to is left out, as is what only C++ knows
    of."""
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

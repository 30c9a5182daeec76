"""`ResourceStack`: one owner for everything an executor holds, closed in reverse order on every path out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import field, frozen, mutable
from torch import Tensor


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' own elements (two views of one storage count twice; the engine keeps no such pairs)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@frozen(kw_only=True)
class _Resource:
    owner: str
    count: Callable[[], int]
    release: Callable[[], object]


@mutable(eq=False)
class ResourceStack:
    """Knows what is held, by owner, and how to give it back.

    The stack keeps callables, not tensors: ``release`` must make its owner forget what it holds. Nothing here refers
    back to the stack's user, so no reference cycle keeps tensors alive.
    """

    _resources: list[_Resource] = field(init=False, factory=list)

    def register(self, owner: str, count: Callable[[], int], release: Callable[[], object]) -> None:
        """Takes over ``owner``.

        Args:
            owner: the name under which its bytes are reported; several resources may share one.
            count: tells the bytes held now; asked on every `bytes_by_owner`.
            release: gives everything back; called once, by `close`.
        """
        self._resources.append(_Resource(owner=owner, count=count, release=release))

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes held now, by owner, in the order of registration; empty after `close`."""
        held: dict[str, int] = {}
        for resource in self._resources:
            held[resource.owner] = held.get(resource.owner, 0) + resource.count()
        return held

    def close(self) -> None:
        """Runs every release, the last registered first, although earlier ones raise. Idempotent.

        Raises:
            ExceptionGroup: what the releases raised, each with a note that names its owner.
        """
        errors: list[Exception] = []
        while self._resources:
            resource = self._resources.pop()
            try:
                resource.release()
            except Exception as error:  # noqa: BLE001 - gathered and raised below: the other owners must be released first
                error.add_note(f"while releasing {resource.owner!r}")
                errors.append(error)
        if errors:
            raise ExceptionGroup("some resources could not be released", errors)

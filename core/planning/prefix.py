"""The keys of KV pages by content: two sequences can share pages with equal keys.

The key of a full page is computed from the key of the page before it, its tokens, and the images or audio placed in it
(their content keys, and which of their embeddings lie there). The root key names the weights and the adapter. So equal
keys mean equal prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from attrs import define, field

from ..request import Placeholder, Request
from .placeholders import PlaceholderCursor

_BYTES = 16  # per key: among 2**32 pages, two prefixes have the same key with a probability of about 2**-64


def root_key(identity: str, cross_key: str | None = None, adapter: str = "") -> bytes:
    """Returns the key before the first page. It names the model, the item that the decoder reads through
    cross-attention, and the adapter."""
    return _digest(b"", repr((identity, cross_key, adapter) if adapter else (identity, cross_key)).encode())


def page_key(parent: bytes, token_ids: Sequence[int], start: int, placeholders: Sequence[Placeholder]) -> bytes:
    """Returns the key of the page that follows the page ``parent`` and holds ``token_ids`` from position ``start``
    on."""
    marks = _marks(placeholders, start, start + len(token_ids))
    return _digest(parent, array("q", token_ids).tobytes() + (repr(marks).encode() if marks else b""))


def _marks(placeholders: Sequence[Placeholder], start: int, stop: int) -> list[tuple[str, int, int, int]]:
    """Returns a tuple for each span that touches ``[start, stop)``: the item's key, the bounds of the span relative to
    ``start``, and how many of the item's embeddings come before the span.
    """
    marks = []
    for placeholder in placeholders:
        if placeholder.stop <= start or stop <= placeholder.start:
            continue  # most pages of a long prompt touch no span, and an item may have hundreds
        before = 0
        for first, last in placeholder.spans:
            if first < stop and start < last:
                marks.append((placeholder.key, first - start, last - start, before))
            before += last - first
    return marks


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(parent + content, digest_size=_BYTES).digest()


def prompt_keys(request: Request, *, page_size: int, identity: str) -> tuple[bytes, ...]:
    """Returns the keys of all full pages of a request's prompt, for `Request.page_keys`. A long prompt takes
    milliseconds, so call this function in a worker thread."""
    keys = PageKeys.of(request, page_size=page_size, identity=identity)
    return tuple(keys.upto(request.prompt_token_ids, len(request.prompt_token_ids) // page_size))


@define(eq=False)
class PageKeys:
    """The keys of a sequence's full pages. Each key is computed once."""

    page_size: int
    placeholders: tuple[Placeholder, ...]
    _root: bytes
    _keys: list[bytes] = field(factory=list)
    _cursor: PlaceholderCursor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._cursor = PlaceholderCursor(self.placeholders)

    def __len__(self) -> int:
        """The number of keys that have been computed."""
        return len(self._keys)

    @classmethod
    def of(cls, request: Request, *, page_size: int, identity: str) -> PageKeys:
        """Returns the keys of ``request``. The request may contain the keys of its prompt already."""
        cross = next((item.key for item in request.items if not item.spans), None)
        placeholders = tuple(item.placeholder for item in request.items if item.placeholder is not None)
        return cls(page_size, placeholders, root_key(identity, cross, request.adapter), list(request.page_keys))

    def last_of(self, pages: int) -> bytes:
        """Returns the key of the last of the first ``pages`` pages, which `upto` has computed before."""
        return self._keys[pages - 1]

    def upto(self, token_ids: Sequence[int], pages: int, *, first: int = 0) -> Iterator[bytes]:
        """Yields the keys of the pages ``first .. pages-1`` of ``token_ids``, which may only grow. Each key is computed
        when the caller asks for it. Computing all keys of a long prompt at once would delay the other requests.
        """
        assert pages * self.page_size <= len(token_ids), "only full pages have keys"
        for page in range(first, pages):
            while len(self._keys) <= page:
                self._compute_next(token_ids)
            yield self._keys[page]

    def _compute_next(self, token_ids: Sequence[int]) -> None:
        start = len(self._keys) * self.page_size
        parent = self._keys[-1] if self._keys else self._root
        unread = self._cursor.unread(start) if self.placeholders else ()
        placeholders = [self.placeholders[index] for index in unread]
        self._keys.append(page_key(parent, token_ids[start : start + self.page_size], start, placeholders))

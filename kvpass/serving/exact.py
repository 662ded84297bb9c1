"""`ExactPages`: the tokens of blocks as they are, as long as a request attends to them so."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from kvpass.errors import CacheFullError


class ExactPages:
    """Pages of exact tokens of all layers, which belong to blocks of the pool.

    A block has one from its first token on until no request attends to a token of it exactly. It
    keeps it for requests with the same beginning as long as no other block needs the room.

    Attributes:
        tokens: keys and values, ``[layers, 2, pages, H, page_size, D]``.
        page_of: the page of a block; that whose use is longest ago is the first.
        needed: the blocks that have to keep theirs.
    """

    def __init__(
        self, tokens: Tensor, needed: Callable[[], Collection[int]] = frozenset[int]
    ) -> None:
        self.tokens = tokens
        self.needed = needed
        self.page_of: dict[int, int] = {}
        self.free = list(range(tokens.shape[2]))

    def take(self, block: int) -> int:
        """The page of ``block``, which gets one if it has none.

        Raises:
            CacheFullError: if all are needed; `kvpass.serving.allocator` admits no more requests
                than there are pages for.
        """
        if block not in self.page_of:
            if not self.free:
                self._give_back()
            self.page_of[block] = self.free.pop()
        return self.page_of[block]

    def touch(self, block: int) -> None:
        """Counts the page of ``block`` as the one used last."""
        self.page_of[block] = self.page_of.pop(block)

    def drop(self, block: int) -> None:
        """Gives back the page of ``block``, if it has one."""
        if block in self.page_of:
            self.free.append(self.page_of.pop(block))

    def copy(self, source: int, target: int) -> None:
        """Gives ``target`` a copy of the page of ``source``, if that has one."""
        if source in self.page_of:
            self.touch(source)
            page = self.take(target)
            self.tokens[:, :, page] = self.tokens[:, :, self.page_of[source]]

    def _give_back(self) -> None:
        """Takes the page that was used longest ago from a block that does not need it."""
        needed = self.needed()
        block = next((block for block in self.page_of if block not in needed), None)
        if block is None:
            raise CacheFullError(
                f"All {self.tokens.shape[2]} pages of exact tokens are needed at once."
            )
        self.drop(block)

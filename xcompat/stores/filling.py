"""What a new space is filled with, block by block: the part of a migration that a model does, here or on workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from xcompat.core.fingerprint import Fingerprint
from xcompat.core.parallel import Spread, here
from xcompat.stores.base import Rows, Store

Given = TypeVar("Given")
Made = TypeVar("Made")


class Filling(ABC, Generic[Given, Made]):
    """New vectors of rows.

    Args:
        model: makes them.
        content: the field of a row that it reads; None if it reads its vector.
        tried: rows that are enough to estimate the time for all.
        function: what :attr:`model` does with a block; of a module, so that workers find it.
    """

    model: Any
    content: str | None
    tried: ClassVar[int]
    function: ClassVar[Callable[..., Any]]

    @property
    @abstractmethod
    def made(self) -> tuple[Fingerprint, int]:
        """What the new vectors are, and their dimension."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identifies the migration's model."""

    @abstractmethod
    def require_fit(self, store: Store, dtype: str) -> None:
        """Refuse a store whose vectors the model does not take, or that cannot take new ones."""

    @property
    def old_dim(self) -> int | None:
        """The dimension of the old vectors that it reads, without padding; None if it reads none."""
        return None

    def dim_for(self, store: Store) -> int:
        """Return the dimension of a store's new space."""
        return self.made[1]

    def find_unusable(self, rows: Rows) -> dict[str, str]:
        """Return rows whose old vector has nothing to map, each with the reason. Their new vectors are zeros."""
        return {}

    @abstractmethod
    def given(self, store: Store, rows: Rows) -> tuple[Rows, Given]:
        """Return the rows that get a new vector, and what the model is given of them.

        Raises:
            XcompatError: a vector cannot be mapped.
        """

    @abstractmethod
    def taken(self, store: Store, rows: Rows, made: Made) -> Rows:
        """Return rows with what the model made as their vectors, without those of which it made none."""

    def each(self, store: Store, blocks: Iterable[Rows], spread: Spread = here) -> Iterator[tuple[Rows, Rows]]:
        """Make new vectors of blocks of rows, in their order.

        Args:
            store: where they are from.
            blocks: as :meth:`~xcompat.stores.Store.rows` reads them, with :attr:`content`.
            spread: where the model does it.

        Yields:
            Each block, and its rows with new vectors (n, D).
        """

        def sent() -> Iterator[tuple[tuple[Rows, Rows], Given]]:
            for rows in blocks:
                kept, given = self.given(store, rows)
                yield (rows, kept), given

        for (rows, kept), made in spread(self.function, self.model, sent()):
            yield rows, self.taken(store, kept, made)

    def of(self, store: Store, rows: Rows) -> Rows:
        """Make new vectors of some rows, here."""
        return next(self.each(store, [rows]))[1]

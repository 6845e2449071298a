"""Source for the new vectors in a migration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from xcompat.core.fingerprint import Fingerprint
from xcompat.core.parallel import Executor, run_locally
from xcompat.stores.base import Rows, Store

ModelInput = TypeVar("ModelInput")
ModelOutput = TypeVar("ModelOutput")


class VectorSource(ABC, Generic[ModelInput, ModelOutput]):
    """Source that computes new vectors in blocks.

    Args:
        model: embedding model or map.
        content: input field, None to map the vectors.
        tried: rows for a time estimate.
        function: applies :attr:`model` to a block. Module-level, for use on workers.
        max_batch: maximum rows per block, None for no limit.
        tolerance: expected difference between two computations of a number, beside rounding.
        is_service: whether a service makes the vectors, possibly for a price.
    """

    model: Any
    content: str | None
    sample_size: ClassVar[int]
    function: ClassVar[Callable[..., Any]]
    max_batch: ClassVar[int | None] = None
    tolerance: ClassVar[float] = 0.0
    is_service: ClassVar[bool] = False

    @property
    @abstractmethod
    def target(self) -> tuple[Fingerprint, int]:
        """Fingerprint and dimension of the new vectors."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """The model's digest."""

    @abstractmethod
    def require_fit(self, store: Store, dtype: str, old: Fingerprint | None = None) -> None:
        """Raise if the store does not fit the model or the new vectors.

        Args:
            store: the store.
            dtype: the new vectors' dtype.
            old: model of the stored vectors if the store records none.
        """

    @property
    def shares(self) -> tuple[str, ...]:
        """Digests of other models with queries for the new vectors."""
        return ()

    @property
    def old_dim(self) -> int | None:
        """Dimension of mapped vectors without padding, or None."""
        return None

    def dim_for(self, store: Store) -> int:
        """Return the new space's dimension."""
        return self.target[1]

    def describe_cost(self, rows: Rows, total: int) -> str:
        """Return the estimated price for all rows' new vectors, or an empty string.

        Args:
            rows: a row sample.
            total: number of rows.
        """
        return ""

    @property
    def sketch(self) -> list[list[float]] | None:
        """Sketch for a service's model, None for other models."""
        return None

    def require_same_service(self, sketch: list[list[float]]) -> None:
        """Raise if the service's model does not match a sketch."""

    def find_unusable(self, rows: Rows) -> dict[str, str]:
        """Return rows with unusable vectors and the reasons. They get zeros."""
        return {}

    @abstractmethod
    def prepare(self, store: Store, rows: Rows) -> tuple[Rows, ModelInput]:
        """Return the rows to give a new vector, and the model's input.

        Raises:
            XcompatError: a vector cannot be mapped.
        """

    @abstractmethod
    def attach(self, store: Store, rows: Rows, made: ModelOutput) -> Rows:
        """Return the rows with new vectors."""

    def map_blocks(self, store: Store, blocks: Iterable[Rows], spread: Executor = run_locally) -> Iterator[tuple[Rows, Rows]]:
        """Compute new vectors block by block, in order.

        Args:
            store: the rows' store.
            blocks: blocks from :meth:`~xcompat.stores.Store.rows`, with :attr:`content`.
            spread: executor for the model.

        Yields:
            Each block, and its rows with new vectors (n, D).
        """

        def model_inputs() -> Iterator[tuple[tuple[Rows, Rows], ModelInput]]:
            for rows in blocks:
                kept, given = self.prepare(store, rows)
                yield (rows, kept), given

        for (rows, kept), made in spread(self.function, self.model, model_inputs()):
            yield rows, self.attach(store, kept, made)

    def map_rows(self, store: Store, rows: Rows) -> Rows:
        """Compute the rows' new vectors in this process."""
        return next(self.map_blocks(store, [rows]))[1]

"""New vectors from a service that embeds the rows' texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.embeddings.embed import Contents, EmbeddedContents
from xcompat.embeddings.provider import ALIKE, PROBES, Provider, compare_sketches, sketch_rows
from xcompat.stores.base import Rows
from xcompat.stores.embedding import FieldSource

CONTINUE = "run the command again to continue"


def embed_by_service(provider: Provider, contents: Contents) -> EmbeddedContents:
    """Embed texts in a service's batches.

    Args:
        provider: the service.
        contents: the texts.

    Raises:
        XcompatError: the service fails, or returns no embeddings.
    """
    texts, blocks = contents.values, list[NDArray[np.float32]]()
    for start in range(0, len(texts), provider.batch):
        dim = blocks[0].shape[1] if blocks else None
        blocks.append(provider.ask(texts[start : start + provider.batch], dim, CONTINUE, start))
    return EmbeddedContents(np.concatenate(blocks) if blocks else np.empty((0, 1), np.float32), {})


@dataclass(frozen=True)
class ServiceEmbedding(FieldSource):
    """Service that re-embeds rows."""

    model: Provider
    images: None = field(default=None, init=False)
    function = staticmethod(embed_by_service)
    max_batch: ClassVar[int] = 1_024
    """A killed process loses at most two blocks of paid answers: one that is written, and one that is fetched."""
    tolerance: ClassVar[float] = 1e-2
    """Services do not return the same bits each time."""
    is_service: ClassVar[bool] = True

    @cached_property
    def _probe_rows(self) -> NDArray[np.float32]:
        return self.model.ask(list(PROBES), fix=CONTINUE)

    @property
    def target(self) -> tuple[Fingerprint, int]:
        """Fingerprint and dimension of the new vectors. The first use calls the service."""
        return self.model.fingerprint, self._probe_rows.shape[1]

    @property
    @override
    def sketch(self) -> list[list[float]]:
        return sketch_rows(self._probe_rows)

    @override
    def require_same_service(self, sketch: list[list[float]]) -> None:
        if (cosine := compare_sketches(sketch, self.sketch)) < ALIKE:
            raise XcompatError(
                f"{self.model.name} does not embed as it did when this migration was started (mean cosine {cosine:.2f} of "
                f"{len(PROBES)} test texts); use the same function and model, or run `xcompat migrate rollback` first"
            )

    @override
    def describe_cost(self, rows: Rows, total: int) -> str:
        sizes = [len(text.encode()) for text in rows.contents or [] if isinstance(text, str)]
        mean = sum(sizes) / max(len(rows.ids), 1)
        return f"{self.model.name} embeds the texts of {total:,} rows: {self.model.describe_cost(mean * total)}"

"""New vectors from the rows' texts or images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice
from xcompat.data.images import UnusableSampleError
from xcompat.embeddings.embed import Contents, EmbeddedContents, embed_contents, notice_truncated
from xcompat.models.embedder import Embedder
from xcompat.stores.base import Rows, Store
from xcompat.stores.vector_source import VectorSource


@dataclass(frozen=True)
class FieldSource(VectorSource[Contents, EmbeddedContents]):
    """Source that computes new vectors from a field in the rows.

    Args:
        model: the new model, or its service.
        content: field with a text, image bytes or an image path.
        images: base folder for image paths, or None for texts.
    """

    model: Any
    content: str
    images: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)
    sample_size: ClassVar[int] = 64

    @property
    def digest(self) -> str:
        """The model's digest."""
        digest: str = self.model.fingerprint.digest
        return digest

    def require_fit(self, store: Store, dtype: str, old: Fingerprint | None = None) -> None:
        """Raise if the store cannot hold the new vectors."""
        store.check_space(self.target[1], dtype)

    @override
    def prepare(self, store: Store, rows: Rows) -> tuple[Rows, Contents]:
        assert rows.contents is not None
        kept, values = list[int](), list[object]()
        for row, (item, value) in enumerate(zip(rows.ids, rows.contents, strict=True)):
            try:
                values.append(parse_content(value, self.images))
                kept.append(row)
            except UnusableSampleError as error:
                self._tell(store, item, str(error))
        found = rows.pick(kept)
        return found, Contents(values, found.ids if self.images is not None else None)

    @override
    def attach(self, store: Store, rows: Rows, made: EmbeddedContents) -> Rows:
        """Return rows with their new vectors, without unreadable rows. Each reason is printed once."""
        for item, reason in made.unread.items():
            self._tell(store, item, reason)
        notice_truncated(self.model, made.truncated, len(rows.ids))
        kept = np.flatnonzero(np.isfinite(made.embeds_ND).all(1)).tolist()
        return rows.pick(kept)._replace(vectors_ND=made.embeds_ND[kept])

    def _tell(self, store: Store, item: str, reason: str) -> None:
        if item not in self.unread:
            self.unread[item] = reason
            notice(f"{self.content} of {item!r} in {store.uri} cannot be embedded: {reason}")


@dataclass(frozen=True)
class Embedding(FieldSource):
    """Model that re-embeds rows."""

    model: Embedder
    function = staticmethod(embed_contents)

    def __post_init__(self) -> None:
        processor, name = self.model.processor, self.model.name
        if self.images is None and not processor.max_length:
            raise XcompatError(f"{name} only embeds images; set --image-folder to the base folder of the paths in {self.content}")
        if self.images is not None and not any(processor.image_size):
            raise XcompatError(f"{name} only embeds texts; remove --image-folder")

    @property
    def target(self) -> tuple[Fingerprint, int]:
        """Fingerprint and dimension of the new vectors."""
        return self.model.fingerprint, self.model.dim


def parse_content(value: object, images: Path | None) -> object:
    """Return a text, or an image as in ``datasets``.

    Args:
        value: a field's value.
        images: base folder for image paths, or None for texts.

    Raises:
        UnusableSampleError: the value is unusable.
    """
    if images is None:
        if not isinstance(value, str) or not value.strip():
            raise UnusableSampleError("it is empty" if value is None or value == "" else "it is not text")
        return value
    if isinstance(value, str):
        return {"bytes": None, "path": str((images / value).absolute())}
    if not isinstance(value, bytes):
        raise UnusableSampleError(f"expected image bytes or a path, not {type(value).__name__}")
    return {"bytes": value, "path": None}

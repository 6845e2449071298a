"""New vectors made of what rows hold, where it is there: texts, or the pictures that they name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xcompat.data.images import UnusableSampleError, open_image
from xcompat.embedding import embed_in_memory, images_per_batch
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.models.embedder import Embedder
from xcompat.progress import notice
from xcompat.stores.base import Rows, Store

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Embedding:
    """A model that embeds rows anew, whichever model made their old vectors.

    Args:
        embedder: the new model.
        content: the field of a row that holds its text, or its picture: bytes, or the path of a file.
        pictures: the folder that paths of pictures begin at; None where the field holds texts.
    """

    embedder: Embedder
    content: str
    pictures: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)
    tried: ClassVar[int] = 64

    def __post_init__(self) -> None:
        """Refuse a model that does not embed these."""
        processor, name = self.embedder.processor, self.embedder.name
        if self.pictures is None and not processor.max_length:
            raise XcompatError(f"{name} embeds pictures only; say where those that {self.content} names are, with --pictures")
        if self.pictures is not None and not any(processor.image_size):
            raise XcompatError(f"{name} embeds texts only; leave --pictures out")

    @property
    def made(self) -> tuple[Fingerprint, int]:
        """What the new vectors are, and their dimension."""
        return self.embedder.fingerprint, self.embedder.dim

    @property
    def digest(self) -> str:
        """Identifies the migration's model."""
        return self.embedder.fingerprint.digest

    def require_fit(self, store: Store, dtype: str) -> None:
        """Refuse a store that cannot take the new vectors; the old ones are not looked at."""
        store.check_space(self.embedder.dim, dtype)

    def of(self, store: Store, rows: Rows) -> Rows:
        """Embed rows anew.

        Args:
            store: where they are from.
            rows: with their contents.

        Returns:
            Those whose content can be read, with new vectors (n, D); of the others a reason is printed once each.
        """
        assert rows.contents is not None
        opened = [self._opened(store, *row) for row in zip(rows.ids, rows.contents, strict=True)]
        kept = [place for place, content in enumerate(opened) if content is not None]
        found = [content for content in opened if content is not None]
        vectors = embed_in_memory(self.embedder, found) if self.pictures is None else self._embedded(found)
        return rows.pick(kept)._replace(vectors_ND=vectors)

    def _opened(self, store: Store, item: str, value: Any) -> Any:  # noqa: ANN401
        """Return a text or a picture; None if it cannot be read."""
        try:
            if self.pictures is None:
                if not isinstance(value, str) or not value.strip():
                    raise UnusableSampleError("it holds no text" if value is None or value == "" else "it is no text")
                return value
            return open_image(self.pictures / value if isinstance(value, str) else value)
        except UnusableSampleError as error:
            if item not in self.unread:
                self.unread[item] = str(error)
                notice(f"{self.content} of {item!r} in {store.uri} cannot be embedded: {error}")
            return None

    def _embedded(self, pictures: list[Image]) -> NDArray[np.float32]:
        size = images_per_batch(self.embedder.processor, self.embedder.device)
        embeds_ND = np.empty((len(pictures), self.embedder.dim), np.float32)
        for start in range(0, len(pictures), size):
            batch = {"pixel_values": self.embedder.processor.images(pictures[start : start + size])}
            embeds_ND[start : start + size] = self.embedder.embed(batch).numpy(force=True)
        return embeds_ND

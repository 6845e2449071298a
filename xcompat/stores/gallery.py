"""Store for galleries. They can be searched, but have their own upgrade."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval import Gallery, Hit
from xcompat.retrieval.manifest import VersionRecord
from xcompat.retrieval.snapshot import Snapshot
from xcompat.stores.base import Rows, Space, Store
from xcompat.stores.uri import StoreUri

if TYPE_CHECKING:
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.reranking import Reranker
    from xcompat.retrieval.versions import Model


class GalleryStore(Store):
    """Gallery in its state at opening. Its spaces are its versions, a space per model. The newest is searched."""

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        if uri.parts.netloc:
            raise XcompatError(f"{uri} is not an absolute path; use file:///GALLERY with three slashes")
        self.gallery = Gallery.open(Path(unquote(uri.parts.path)))
        self.metric = self.gallery.metric
        manifest = self.gallery.manifest
        self.versions = {str(version.fingerprint): version for version in manifest.present() or manifest.versions[:1]}
        self.space = list(self.versions)[-1]

    @override
    def spaces(self) -> dict[str, Space]:
        return {name: Space(name, made.dim, "float32", made.fingerprint) for name, made in self.versions.items()}

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        if without is not None:
            raise self._refusal()
        return len(self.gallery) if space is None else len(self._snapshot_of(self.versions[space]))

    def _snapshot_of(self, version: VersionRecord) -> Snapshot:
        """Return one model's vectors."""
        manifest = self.gallery.manifest
        own = tuple(segment for segment in manifest.segments if segment.version == version.digest)
        return Snapshot(self.gallery.path, manifest.model_copy(update={"segments": own}))

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: Mapping[str, object] | str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        """Find the nearest vectors of one model. Use :meth:`find` to search all models.

        Args:
            vectors_QD: (Q, D) queries in the space.
            top_k: maximum hits per query.
            filter: a gallery's ``where``, or ``KEY=VALUE``.
            space: version, by default the newest.
        """
        version = self.versions[space or self.space]
        return self._snapshot_of(version).search(vectors_QD, version.fingerprint, top_k, _parse_condition(filter))

    @override
    def add_alias(self, alias: Fingerprint) -> Fingerprint:
        return self.gallery.add_alias(alias)

    @override
    def find(
        self,
        embeds_QD: ArrayLike,
        model: Model,
        top_k: int = 10,
        filter: Mapping[str, object] | str | None = None,
        old_queries: OldQueries | None = None,
        rerank: Reranker | None = None,
        rerank_queries: ArrayLike | None = None,
    ) -> list[list[Hit]]:
        return self.gallery.search(
            embeds_QD,
            model,
            top_k,
            _parse_condition(filter),
            old_queries=old_queries,
            rerank=rerank,
            rerank_queries=rerank_queries,
        )

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        if without is not None:
            raise self._refusal()
        for segment in self._snapshot_of(self.versions[space or self.space]).segments:
            for _, items in segment.blocks(batch):
                known = [json.loads(text or "{}") for text in items.metadata]
                contents = [metadata.get(content) for metadata in known] if content is not None else None
                yield Rows(items.ids, items.embeds[0], [""] * len(items), contents)

    @override
    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return nothing: hits of a gallery have their metadata."""
        return {}

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        raise self._refusal()

    def _refusal(self) -> XcompatError:
        return XcompatError(
            f"{self.uri} is a gallery and cannot be migrated; use `xcompat gallery upgrade {self.gallery.path} --model RUN`"
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise self._refusal()

    record = set_record = name_model = add_space = write = index_like = _refuse
    switch = switch_back = drop_space = exclusive = migration_lease = _refuse

    @override
    def close(self) -> None:
        return


def _parse_condition(condition: Mapping[str, object] | str | None) -> Mapping[str, object] | None:
    if not isinstance(condition, str):
        return condition
    from xcompat.retrieval.hit_output import wanted_metadata

    return wanted_metadata([condition])


def open_store(uri: str) -> GalleryStore:
    """Open a gallery by its folder's address."""
    return GalleryStore(StoreUri.parse(uri, ()))

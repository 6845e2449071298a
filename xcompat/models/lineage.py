"""Identity of a model, of its embeddings, and of the older embeddings it can search."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from torch import nn

from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders.processor import Processor
from xcompat.models.config import CompatConfig, Metric, Version
from xcompat.models.query_memory import QueryMemory


@dataclass(frozen=True)
class Lineage:
    """Fingerprints and dimensions of all embeddings that a model writes or searches.

    Args:
        model: fingerprint over encoder, adapters, heads, preprocessing and memory.
        embeds: the model's own embeddings, which do not depend on its memory.
        stores: the embeddings that it stores in galleries.
        searches: older versions whose galleries it can search or upgrade, nearest first.
    """

    model: Fingerprint
    embeds: Version
    stores: Version
    searches: tuple[Version, ...]

    @classmethod
    def build(cls, name: str, config: CompatConfig, digests: tuple[str, str], stores_view: bool) -> Self:
        """Build the lineage of a model with the digests from :func:`hash_model`."""
        plain, whole = (Fingerprint(digest, name) for digest in digests)
        embeds, searches = Version(plain, config.embedding_dim), config.versions
        stores = Version(plain.derive("view"), searches[0].dim) if stores_view else embeds
        return cls(whole, embeds, stores, searches)


def hash_model(model: nn.Module, memory: QueryMemory | None, settings: str) -> tuple[str, str]:
    """Return a model's digests: without its memory (the identity of its embeddings), and as a whole."""
    plain = Fingerprint.from_module(model, json.loads(settings), without="memory")
    if memory is None:
        return plain.digest, plain.digest
    return plain.digest, plain.derive(Fingerprint.from_module(memory, memory.settings).digest).digest


def identity_settings(config: CompatConfig, metric: Metric, processor: Processor | None) -> str:
    """Return the contents of a fingerprint other than weights, as JSON.

    A map has no preprocessing here, because its encoder's digest includes it.
    """
    own = {key: getattr(config, key, None) for key in ("model_type", "adapters", "embedding_dim")}
    own["encoder"] = (config.encoder or {}).get("fingerprint")
    own["old"] = [version.fingerprint.digest for version in config.versions]
    if metric == "l2":
        own["metric"] = "l2"
    seen = {"processor": processor.describe()} if processor is not None else {}
    return json.dumps(own | seen, default=str)

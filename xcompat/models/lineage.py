"""Identity of a model, of its embeddings, and of the older embeddings it can search."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from torch import nn

from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders.processor import Processor
from xcompat.models.config import CompatConfig, Version
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
        """Build a model's lineage.

        Args:
            name: the model's display name.
            config: its configuration.
            digests: result of :func:`hash_model`.
            stores_view: whether it stores embeddings in the old space.
        """
        plain, whole = (Fingerprint(digest, name) for digest in digests)
        embeds = Version(plain, config.embedding_dim)
        stores = Version(plain.derive("view"), config.versions[0].dim) if stores_view else embeds
        return cls(whole, embeds, stores, config.versions)


def hash_model(model: nn.Module, memory: QueryMemory | None, settings: str) -> tuple[str, str]:
    """Return a model's digests: without its memory (the identity of its embeddings), and as a whole.

    Args:
        model: the model, whose weights are hashed.
        memory: its memory.
        settings: result of :func:`identity_settings`.
    """
    plain = Fingerprint.from_module(model, json.loads(settings), without="memory")
    if memory is None:
        return plain.digest, plain.digest
    return plain.digest, plain.derive(Fingerprint.from_module(memory, memory.settings).digest).digest


def identity_settings(config: CompatConfig, processor: Processor | None) -> str:
    """Return the contents of a fingerprint other than weights, as JSON.

    Args:
        config: the model's configuration.
        processor: the preprocessing; None for a map, as its encoder's digest includes it.
    """
    own = {key: getattr(config, key, None) for key in ("model_type", "adapters", "embedding_dim")}
    own["encoder"] = (config.encoder or {}).get("fingerprint")
    own["old"] = [version.fingerprint.digest for version in config.versions]
    if getattr(config, "metric", "cosine") == "l2":
        own["metric"] = "l2"
    seen = {"processor": processor.describe()} if processor is not None else {}
    return json.dumps(own | seen, default=str)

"""Existing maps: a checkpoint or another tool's adapter, compared on the user's sample before use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders import EncoderSource
from xcompat.mapping.adapter_files import Adapter, read_adapters
from xcompat.mapping.candidates import Described, Paired
from xcompat.mapping.request import Activation, InitialMap, require_start
from xcompat.mapping.selection import Choice, select_best
from xcompat.models import CompatModel
from xcompat.models.embedder import load_checkpoint
from xcompat.report.wording import gain, interval

IMPORTED = "theirs"
"""Name of the imported linear map."""
_COMPARED = 4096  # rows that choose an interpretation of a file


@dataclass(frozen=True)
class ImportedMap:
    """Existing map, tried like a solved map.

    Args:
        model: the map, with its own memory if any.
        source: its ``name``, ``revision`` and ``fingerprint`` (SHA-256 for a file).
        notes: sentences about it for the user.
    """

    model: CompatModel
    source: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return its name, and its commit if any."""
        revision = self.source["revision"]
        return f"{self.source['name']} at {revision[:12]}" if revision else str(self.source["name"])

    def describe_result(self, choice: Choice) -> str:
        """Return a sentence that compares the map with those solved here."""
        if choice.chosen.candidate.line == IMPORTED:
            return f"The imported map {self} is chosen. If it was trained on items of this sample, its results are too good."
        least = select_best(trial for trial in choice.trials if trial.candidate.line == IMPORTED).least
        told = f"{gain(least.mean)} points ({interval((least.low, least.high))})"
        return f"The imported map {self} is not chosen: its lowest gain is {told}."

    def solve(self, _: Paired, old: Described) -> CompatModel:
        """Return the map for galleries of the old model: a :data:`Solver` that ignores the pairs."""
        self.model.config.old = old
        return self.model


def read_imported(start: InitialMap, pairs: Paired, old: Described, new: Mapping[str, object] | None) -> ImportedMap:
    """Read a map, and reject maps made for other models.

    Args:
        start: source of the map.
        pairs: the user's sample.
        old: the gallery's model, from ``describe_old``.
        new: the queries' model, from ``Embedder.describe_encoder``; None if unknown.

    Returns:
        The map.

    Raises:
        XcompatError: the map does not exist, or does not fit the sample or its models.
    """
    name, activation = start.name, start.activation
    path = Path(name)
    if require_start(start):
        return _adapter(path, pairs, old, activation)
    model = load_checkpoint(EncoderSource(name=name))
    _require_map_of_queries(name, model)
    _require_dims(name, model, pairs)
    source = {"name": name, "revision": model.revision, "fingerprint": model.fingerprint().digest}
    model.config.started_from = source
    return ImportedMap(model, source, (*_about_old(name, model, old), *_about_new(name, model, new)))


def _adapter(path: Path, pairs: Paired, old: Described, activation: Activation | None) -> ImportedMap:
    readings = read_adapters(path, old, pairs.dims[0], activation)
    chosen, note = _best_reading(path, readings, pairs)
    source = {"name": str(path), "revision": None, "fingerprint": hashlib.sha256(path.read_bytes()).hexdigest()}
    chosen.model.config.started_from = source
    return ImportedMap(chosen.model, source, (note,))


def _best_reading(path: Path, readings: list[Adapter], pairs: Paired) -> tuple[Adapter, str]:
    """Return the interpretation that maps new embeddings nearest to old embeddings, and a note about it."""
    if len(readings) == 1:
        return readings[0], f"{path.name} is read as {readings[0].how}, by its array shapes."
    new_BD, old_Bd = (each[:_COMPARED] for each in next(iter(pairs.batches())))
    cosines = [float((each.model.to_space(new_BD) * old_Bd).sum(1).mean()) for each in readings]
    best = int(np.argmax(cosines))
    told = ", ".join(f"{each.how} {cosine:.3f}" for each, cosine in zip(readings, cosines, strict=True))
    how = readings[best].how
    return readings[best], f"{path.name} is read as {how}, which fits the sample best (mean cosines: {told})."


def _require_map_of_queries(name: str, model: CompatModel) -> None:
    if model.maps_galleries:
        raise XcompatError(f"{name} maps galleries, not queries; run xcompat gallery upgrade with it")
    if not model.embeds_in_memory:
        raise XcompatError(f"{name} embeds images or texts and is not a map of embeddings; use it directly")
    if model.maps_features(model.config.to_dict()):
        raise XcompatError(f"{name} maps penultimate features, not embeddings; start from another map")


def _require_dims(name: str, model: CompatModel, pairs: Paired) -> None:
    dims = model.config.embedding_dim, model.config.old["dim"]
    if dims != pairs.dims:
        raise XcompatError(
            f"{name} maps {dims[0]} to {dims[1]} dimensions, but the given embeddings have {pairs.dims[0]} and {pairs.dims[1]}"
        )


def _about_old(name: str, model: CompatModel, old: Described) -> list[str]:
    """Reject a map for another model's galleries; return a note if the gallery's model is known only by name."""
    gallery, known = Fingerprint(str(old["fingerprint"]), str(old["name"])), model.compatible_with
    if gallery in known:
        return []
    versions = ", ".join(map(str, known))
    if not gallery.is_name_only:
        raise XcompatError(f"{name} searches galleries of {versions}, not of {gallery}; start from another map")
    return [
        f"{name} was made for galleries of {versions}; the old model is known only by the name {gallery.name!r}, so only the "
        "results on this sample show whether it is the same."
    ]


def _about_new(name: str, model: CompatModel, new: Mapping[str, Any] | None) -> list[str]:
    """Reject a map of another model's embeddings; return a note if either model is unknown."""
    described = model.config.encoder
    if described is None or new is None:
        made_for = "an unknown model" if described is None else described["name"]
        unknown = "" if new is not None else ", and --new-model is not set"
        return [f"{name} maps embeddings of {made_for}{unknown}: only the results on this sample show whether it fits."]
    mapped, given = (Fingerprint(each["fingerprint"], each["name"]) for each in (described, new))
    if mapped != given:
        raise XcompatError(f"{name} maps embeddings of {mapped}, not of {given}; start from another map")
    return []

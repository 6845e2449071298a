"""Export of a linear query map into a faiss index, so that the search service needs no new code."""

from __future__ import annotations

from pathlib import Path

import faiss
import torch
from torch import Tensor, nn

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.export.modules import sources_of
from xcompat.methods.query_map import QueryMapModel
from xcompat.models.base import CompatModel
from xcompat.retrieval.adopted_index import open_adopted
from xcompat.retrieval.adoption import require_index
from xcompat.retrieval.faiss_index import map_faiss, write_faiss
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.index_gallery import IDS_BESIDE
from xcompat.retrieval.integrity import require_whole
from xcompat.retrieval.manifest import SEGMENTS, read_manifest
from xcompat.retrieval.probing import require_readable
from xcompat.retrieval.segment import INDEX_FILE

MADE_BY = "export faiss"
ROWS = 1_000_000
"""Ids per block."""


def to_faiss(model: CompatModel, index: str | Path, out: str | Path, overwrite: bool = False) -> Fingerprint:
    """Write an old-model index that accepts the new model's queries: transforms in front of the unchanged index.

    The transforms compute ``model.to_space`` for queries of length 1 (any length for penultimate features): normalised W·x + b,
    and the same for a learned transform. They also restore adopted vectors' lengths if not normalised. With inner products the
    length changes only scores, with L2 also the ranking. Vectors are memory-mapped.

    Args:
        model: a model with a single linear layer: a closed form, a linear query map, or a model with more dimensions than its old
            model. It can have a learned transform, but no memory entries.
        index: a faiss index with the old model's embeddings; only its dimension can be checked. Or a single-segment gallery,
            which records its model: the old model, or this model after a complete backfill.
        out: output file, which plain faiss reads. A marker beside it names the query model, and
            :func:`ids_beside` has a gallery's ids.
        overwrite: whether to replace any other file.

    Returns:
        The model of the index's vectors.

    Raises:
        XcompatError: the map is not linear, the index has another dimension or model, or ``out`` is another file.
    """
    index_file, length, version = index_of(Path(index), model)
    steps = linear_steps(model, version)
    read = [index_file, Path(index), *sources_of(model)]
    require_replaceable(Path(out), MADE_BY, overwrite, read)
    stored = map_faiss(index_file)
    old_dim, new_dim = steps[0][0].shape
    if stored.d != old_dim:
        raise XcompatError(
            f"{index_file} contains vectors of {stored.d} dimensions, but the map returns the {old_dim} of "
            f"{version}; choose the old model's index"
        )
    transforms = _normalised_inputs(model, new_dim)
    for weight_dD, bias_d in steps:
        transforms += [_linear(weight_dD, bias_d), faiss.NormalizationTransform(old_dim)]
    if length != 1:
        transforms.append(_linear(length * torch.eye(old_dim), torch.zeros(old_dim)))
    inner = stored
    if isinstance(stored, faiss.IndexPreTransform):  # keep a single chain, so that a service's search parameters still fit
        transforms += [stored.chain.at(place) for place in range(stored.chain.size())]
        inner = faiss.downcast_index(stored.index)
    chained = faiss.IndexPreTransform(inner)
    for transform in reversed(transforms):
        chained.prepend_transform(transform)
    if Path(index).is_dir():
        with owned_path(ids_beside(Path(out)), MADE_BY, overwrite, read) as temporary:
            _write_ids(Path(index), temporary)
    about = {"queries": str(model.fingerprint()), "vectors": str(version)}
    with owned_path(out, MADE_BY, overwrite, read, about) as temporary:
        write_faiss(chained, temporary)
    return version


def require_place(index: Path, out: Path, overwrite: bool) -> None:
    """Raise if the index or gallery is missing or unreadable, or the output is another file, before a model is loaded."""
    if index.is_dir():
        read_manifest(index)
        require_replaceable(ids_beside(out), MADE_BY, overwrite, [index])
    else:
        require_index(index)
        require_readable(index, vectors=False)
    require_replaceable(out, MADE_BY, overwrite, [index])


def ids_beside(out: Path) -> Path:
    """Return the file with the ids of a gallery's exported index, an id per line in the order of the rows."""
    return out.with_name(IDS_BESIDE[0].format(out.stem))


def _write_ids(gallery: Path, file: Path) -> None:
    """Write a gallery's ids. A backfill has changed the order of its rows."""
    segment = Gallery.open(gallery).segments[0]
    rows_N = segment.present()
    with file.open("w", encoding="utf-8", newline="\n") as lines:
        for start in range(0, len(rows_N), ROWS):
            lines.writelines(f"{item}\n" for item in segment.ids(rows_N[start : start + ROWS]))


def _linear(weight_dD: Tensor, bias_d: Tensor) -> faiss.LinearTransform:
    """Return the transform x ↦ W·x + b."""
    linear = faiss.LinearTransform(weight_dD.shape[1], weight_dD.shape[0], True)
    faiss.copy_array_to_vector(weight_dD.numpy().ravel(), linear.A)
    faiss.copy_array_to_vector(bias_d.numpy(), linear.b)
    linear.is_trained = True
    return linear


def index_of(source: Path, model: CompatModel) -> tuple[Path, float, Fingerprint]:
    """Return a compatible gallery's index file. Any other path is returned unchanged.

    Returns:
        The file, the gallery's query length (default 1), and the model of its vectors (default: the old model).

    Raises:
        XcompatError: it has another model's embeddings, is not a single index, or its adopted index has changed.
    """
    if not source.is_dir():
        if source.is_file():  # opening a missing file raises later
            require_readable(source, vectors=False)
        model.require_version(None)
        return source, 1.0, model.compatible_with[0]
    manifest = read_manifest(source)
    present = manifest.present()
    others = [version for version in present if version.fingerprint not in model.compatible_with]
    if others and len(others) < len(present):
        count = sum(segment.rows for segment in manifest.segments if segment.version in {version.digest for version in others})
        raise XcompatError(
            f"{source} also holds {count:,} items of {others[0].fingerprint}, e.g. after a backfill. A faiss index holds "
            "vectors of a single model: run `xcompat gallery rollback`, or finish the backfill and run `xcompat gallery "
            "compact`, and export again. Or search the gallery itself"
        )
    for version in present:
        if not _is_own_view(model, version.fingerprint):
            model.require_version(version.fingerprint)
    if len(manifest.segments) != 1 or manifest.rows != manifest.segments[0].rows:
        raise XcompatError(
            f"{source} is not a single faiss index; merge it with `xcompat gallery compact {source}`, which deletes its earlier "
            "states, or merge a copy of the folder"
        )
    record = manifest.segments[0]
    stored = manifest.version(record.version)
    if record.adopted is not None:
        open_adopted(record, manifest.metric, source)  # raises if it has changed since its adoption
        return index_of(Path(record.adopted), model)[0], stored.length, stored.fingerprint
    file = require_whole(source, source / SEGMENTS / record.name / INDEX_FILE, record.files[INDEX_FILE])
    return file, stored.length, stored.fingerprint


def _is_own_view(model: CompatModel, version: Fingerprint | None) -> bool:
    """Return whether the vectors are the model's own, stored in its old space, e.g. after a complete backfill."""
    return version is not None and model.stores_view and version.digest == model.lineage.stores.fingerprint.digest


def linear_steps(model: CompatModel, version: Fingerprint | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return W and b for each step x ↦ normalise(W·x + b) in a model's view: the map, then the learned transform if it has one.

    Args:
        model: a model with a single linear layer.
        version: version to search. None for the old model. Only this version and the model's own items in the old space have a
            learned transform.

    Returns:
        W (d, D) and b (d,) for the map, then W (d, d) and b (d,) for the learned transform, float32.

    Raises:
        XcompatError: the view does not have that form.

    Example:
        >>> from xcompat import Fingerprint, ProcrustesConfig, ProcrustesModel
        >>> from xcompat.models import describe_old
        >>> old = describe_old(Fingerprint.from_string("old"), dim=4)
        >>> [weight.shape for weight, _ in linear_steps(ProcrustesModel(ProcrustesConfig(old=old, embedding_dim=8)))]
        [torch.Size([4, 8])]
    """
    if model.maps_galleries:
        raise XcompatError(f"{type(model).__name__} maps galleries, not queries; upgrade the gallery instead")
    if _is_own_view(model, version):  # these items are in the nearest old space
        version = None
    model.require_version(version)
    nearest, dim = model.config.versions[0]
    if version not in (None, nearest):
        dim = dict(model.config.versions)[version]
    layers, memory = list(model.own_view_layers or ()), model.memory if version in (None, nearest) else None
    if len(layers) != 1 or not isinstance(layers[0], nn.Linear):
        raise XcompatError(
            f"{type(model).__name__} does not map queries by one linear layer, and a faiss index supports no other map; "
            "use procrustes, ridge or another linear map, query_map with options.shape linear, or a model with more "
            "dimensions than its old one"
        )
    if memory is not None and memory.settings["entries"]:
        raise XcompatError(
            "a faiss index cannot store the entries of a query memory; remove the entries with --memory transform, or in "
            "Python with "
            "model.remember(model.memory.without_entries())"
        )
    weights = layers[0].state_dict()
    weight_dD = weights["weight"][:dim].float().cpu().contiguous()
    steps = [(weight_dD, weights.get("bias", torch.zeros(dim))[:dim].float().cpu())]
    if memory is not None:
        matrix_dd = memory.metric.matrix_dd.float().cpu()
        steps.append((matrix_dd.T.contiguous(), -memory.metric.mean_d.float().cpu() @ matrix_dd))
    return steps


def reads_features(model: CompatModel) -> bool:
    """Return whether queries are penultimate features with any length, and not unit embeddings."""
    return isinstance(model, QueryMapModel) and model.head is not None


def _normalised_inputs(model: CompatModel, new_dim: int) -> list[object]:
    """Return the transform that normalises penultimate features. Embeddings have length 1 already."""
    return [faiss.NormalizationTransform(new_dim)] if reads_features(model) else []

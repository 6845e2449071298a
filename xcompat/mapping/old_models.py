"""The old model of a map: given, recorded by a gallery or database, or known by name only."""

from __future__ import annotations

import shlex

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import console, literal, notice
from xcompat.encoders import is_downloaded, is_loadable
from xcompat.mapping.request import MapRequest
from xcompat.mapping.sides import holds_embeddings
from xcompat.models.config import describe_old
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.stores.places import Place, describe_stored_model, find_stored_model


def load_old_model(name: str | None, place: Place | None, dim: int, other_dim: int | None = None) -> Embedder | None:
    """Load the old model, to mix its queries with new ones.

    Args:
        name: the model, or its name in galleries; None to use the model that ``place`` records.
        place: gallery or database with the old embeddings; None to use no recorded model.
        dim: dimension of the old embeddings.
        other_dim: dimension of the new embeddings, for a message.

    Returns:
        The model; None if only its name is known, it is not on this machine, or it has changed since it was recorded.

    Raises:
        XcompatError: the named model has another dimension.
    """
    if name is not None:
        if not is_loadable(name):
            return None
        old = load_embedder(name)
        require_dim(old, dim, "the old model", other_dim)
        return old
    known = find_stored_model(place) if place is not None else None
    if known is None or known[0].is_name_only or not is_downloaded(known[0].name):
        return None
    try:
        old = load_embedder(known[0].name)
    except XcompatError:  # e.g. another folder has its name now
        return None
    if old.version != known[0]:
        notice(f"{old.name} has changed since it made {place}: its queries are not used; set --old-model to the unchanged model")
        return None
    console.print(f"old model: {literal(old.name)}, as {literal(place)} records", soft_wrap=True)
    return old


def require_dim(model: Embedder, dim: int, role: str, other_dim: int | None = None) -> None:
    """Raise if a model's dimension differs from the given embeddings' dimension; ``other_dim`` is that of the other side."""
    if model.dim != dim:
        swapped = "; --old and --new look swapped" if model.dim == other_dim else ""
        raise XcompatError(f"{role} {model.name} has {model.dim} dimensions, but the given embeddings have {dim}{swapped}")


def name_old_model(asked: MapRequest) -> str | None:
    """Return the name that identifies the old model, with a notice; None if the model or a gallery identifies it."""
    name, path = asked.old_model, asked.old
    if asked.texts is not None and not holds_embeddings(path):
        return None
    if is_loadable(name) if name is not None else find_stored_model(path) is not None:
        return None
    if name is None:
        notice(
            f"the old model is named {path.stem!r} after {path}, and other models could get the same name: set --old-model to "
            "the model, or to the model's name in galleries"
        )
        return path.stem
    notice(
        f"--old-model {name} is only a name: the map works with galleries that use this name for their model. For a gallery "
        f"built by the model itself, set the model (folder, or full name on the Hub), or run `xcompat gallery alias GALLERY "
        f"{shlex.quote(name)}` later"
    )
    return name


def describe_old_side(name: str | None, place: Place | None, dim: int) -> dict[str, object]:
    """Describe the old model by its name, by the record of a gallery or database, or by the name of the file."""
    known = describe_stored_model(place) if name is None and place is not None else None
    return known or describe_old(Fingerprint.from_string(name or (place.stem if place is not None else "old")), dim)

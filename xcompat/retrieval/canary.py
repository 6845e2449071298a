"""Canary of a gallery: embeddings of ten fixed inputs, which show in a second whether a model still makes the same vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xcompat.core.arrays import normalise_rows
from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json, write_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.models.embedder import Embedder
from xcompat.retrieval.doctor import SAME
from xcompat.retrieval.gallery import Gallery

FILE = "canary.json"
FIX = "go back to the earlier version of the model or its library, or re-embed the gallery"
"""The fix for a model that no longer makes its canary, for messages."""
TEXTS = (
    *(
        "a red shoe on a table",
        "Who sleeps in winter?",
        "the quick brown fox jumps over the lazy dog",
        "42",
        "Größe, façade, 東京",
    ),
    *(
        "def add(a, b): return a + b",
        "no",
        "The invoice was paid on 3 May 2021.",
        "a photo of two dogs in the snow",
        "ship ship ship",
    ),
)
IMAGES = len(TEXTS)


class Canary(NamedTuple):
    """Comparison of a model's canary with the stored one.

    Args:
        model: model of the stored canary.
        cosine: smallest cosine between stored and new embeddings; 0 if the dimensions differ.
        is_new: whether the canary was stored just now.
    """

    model: Fingerprint
    cosine: float = 1.0
    is_new: bool = False

    @property
    def passed(self) -> bool:
        """Whether the model still makes the same vectors, up to half precision."""
        return self.cosine >= SAME


def check_canary(gallery: Gallery, embedder: Embedder, store: bool = False) -> Canary | None:
    """Embed the ten inputs, and compare with those that the gallery stores for the same model, or for a model with its name.

    Args:
        gallery: the gallery.
        embedder: the model.
        store: whether to store the embeddings if there are none.

    Returns:
        The comparison; None if nothing is stored.

    Raises:
        XcompatError: nothing is stored, and the model made no embeddings of this gallery.
    """
    stored = _read_stored(gallery)
    model = embedder.version
    known = next((each for each in stored if each["fingerprint"] == model.digest), None)
    known = known or next((each for each in stored if each["name"] == model.name), None)
    if known is not None:
        was, now = np.array(known["vectors"], np.float32), _embed_inputs(embedder)
        cosine = float((was * now).sum(1).min()) if was.shape == now.shape else 0.0
        return Canary(Fingerprint(known["fingerprint"], known["name"]), cosine)
    if not store:
        return None
    if not any(model.digest in (version.digest, *version.shares) for version in gallery.manifest.versions):
        made = ", ".join(map(str, gallery.versions))
        raise XcompatError(f"{gallery.path} has no embeddings by {model}; choose a model of this gallery ({made})")
    vectors_ND = _embed_inputs(embedder)
    write_json(gallery.path / FILE, [*stored, {"name": model.name, "fingerprint": model.digest, "vectors": vectors_ND.tolist()}])
    return Canary(model, is_new=True)


def _read_stored(gallery: Gallery) -> list[dict[str, Any]]:
    file = gallery.path / FILE
    stored: list[dict[str, Any]] = read_json(file) if file.is_file() else []
    return stored


def _embed_inputs(embedder: Embedder) -> NDArray[np.float32]:
    """Embed generated images, or texts with a model that reads only texts; (10, d) float32, L2-normalised.

    Half precision is off: on a GPU it alone can move an embedding as far as :data:`SAME`.
    """
    embedder = replace(embedder, autocast=None)
    if any(embedder.processor.image_size):
        batch = {"pixel_values": embedder.processor.images([_draw_image(number) for number in range(IMAGES)])}
    else:
        batch = embedder.processor.texts(TEXTS)
    return normalise_rows(embedder.embed(batch).numpy(force=True))


def _draw_image(number: int) -> Image.Image:
    """Return an image of stripes and checks, of whole numbers alone, so that every platform draws the same."""
    rows, columns = np.mgrid[:224, :224]
    waves = [rows * (number + 1), columns * (2 * number + 1), (rows // 16 + columns // 16) * 37 * (number + 1)]
    return Image.fromarray(np.stack([wave % 256 for wave in waves], 2).astype(np.uint8))

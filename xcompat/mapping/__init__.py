"""Choice of a query map from two embedding folders, by retrieval on held-out items and classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.lazy import import_on_use

if TYPE_CHECKING:
    from xcompat.mapping.candidates import Candidate, fit
    from xcompat.mapping.fitting import FittedMap, fit_map
    from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings, load_paired
    from xcompat.mapping.selection import Choice, choose

_PLACES = {
    "candidates": ["Candidate", "fit"],
    "selection": ["Choice", "choose"],
    "fitting": ["FittedMap", "fit_map"],
    "paired": ["CaptionedEmbeddings", "PairedEmbeddings", "load_paired"],
}

__all__ = [
    "Candidate",
    "CaptionedEmbeddings",
    "Choice",
    "FittedMap",
    "PairedEmbeddings",
    "choose",
    "fit",
    "fit_map",
    "load_paired",
]

__getattr__ = import_on_use(__name__, _PLACES)

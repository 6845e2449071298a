"""Choice of a query map from two embedding folders, by retrieval on held-out items and classes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name; its module and torch are imported on first use
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

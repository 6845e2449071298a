"""From two folders of embeddings to a map of queries, chosen by retrieval on held-out items and classes."""

from __future__ import annotations

from xcompat.mapping.candidates import Candidate, fit
from xcompat.mapping.choosing import Choice, choose
from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings, load_paired

__all__ = ["Candidate", "CaptionedEmbeddings", "Choice", "PairedEmbeddings", "choose", "fit", "load_paired"]

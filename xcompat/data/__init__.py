"""Data loading, from the user's files to batches, with a single set of column names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.lazy import import_on_use

if TYPE_CHECKING:
    from xcompat.data.bad_samples import BadSamples
    from xcompat.data.balanced import ClassBalancedSampler
    from xcompat.data.classes import load_classes
    from xcompat.data.collate import EmbeddingPairDataset, PairCollator, collate_embeddings
    from xcompat.data.content_type import contains_images
    from xcompat.data.corpora import CorpusSource, load_texts
    from xcompat.data.images import UnusableSampleError, open_image, to_rgb
    from xcompat.data.judgements import read_qrels
    from xcompat.data.labelled import LabelledImages, LabelledSource, load_labelled
    from xcompat.data.loading import load_pairs
    from xcompat.data.pairs import PairDataset, flatten_captions, iterate_images, stream_pairs
    from xcompat.data.scenarios import Subset, old_and_new_rows, select_subset
    from xcompat.data.sources import PairSource, TextPairSource
    from xcompat.data.text_pairs import TextPairCollator, TextPairDataset, load_text_pairs
    from xcompat.data.texts import TextSource, load_text_items, split_passages
    from xcompat.data.transforms import Augmentation, View, build_transform

_PLACES = {
    "classes": ["load_classes"],
    "collate": ["EmbeddingPairDataset", "PairCollator", "collate_embeddings"],
    "content_type": ["contains_images"],
    "corpora": ["CorpusSource", "load_texts"],
    "images": ["UnusableSampleError", "open_image", "to_rgb"],
    "judgements": ["read_qrels"],
    "balanced": ["ClassBalancedSampler"],
    "labelled": ["LabelledImages", "LabelledSource", "load_labelled"],
    "loading": ["load_pairs"],
    "pairs": ["PairDataset", "flatten_captions", "iterate_images", "stream_pairs"],
    "bad_samples": ["BadSamples"],
    "scenarios": ["Subset", "old_and_new_rows", "select_subset"],
    "sources": ["PairSource", "TextPairSource"],
    "text_pairs": ["TextPairCollator", "TextPairDataset", "load_text_pairs"],
    "texts": ["TextSource", "load_text_items", "split_passages"],
    "transforms": ["Augmentation", "View", "build_transform"],
}

__all__ = [
    "Augmentation",
    "BadSamples",
    "ClassBalancedSampler",
    "CorpusSource",
    "EmbeddingPairDataset",
    "LabelledImages",
    "LabelledSource",
    "PairCollator",
    "PairDataset",
    "PairSource",
    "Subset",
    "TextPairCollator",
    "TextPairDataset",
    "TextPairSource",
    "TextSource",
    "UnusableSampleError",
    "View",
    "build_transform",
    "collate_embeddings",
    "contains_images",
    "flatten_captions",
    "iterate_images",
    "load_classes",
    "load_labelled",
    "load_pairs",
    "load_text_items",
    "load_text_pairs",
    "load_texts",
    "old_and_new_rows",
    "open_image",
    "read_qrels",
    "select_subset",
    "split_passages",
    "stream_pairs",
    "to_rgb",
]

__getattr__ = import_on_use(__name__, _PLACES)

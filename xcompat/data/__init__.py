"""Data: from the user's files to batches, with one set of column names."""

from xcompat.data.classes import load_classes
from xcompat.data.collate import EmbeddingPairDataset, PairCollator, collate_embeddings
from xcompat.data.corpora import CorpusSource, load_texts
from xcompat.data.images import UnusableSampleError, open_image, to_rgb
from xcompat.data.loading import load_pairs
from xcompat.data.pairs import BadSamples, PairDataset, flatten_captions, iterate_images, stream_pairs
from xcompat.data.sources import PairSource
from xcompat.data.transforms import Augmentation, build_transform

__all__ = [
    "Augmentation",
    "BadSamples",
    "CorpusSource",
    "EmbeddingPairDataset",
    "PairCollator",
    "PairDataset",
    "PairSource",
    "UnusableSampleError",
    "build_transform",
    "collate_embeddings",
    "flatten_captions",
    "iterate_images",
    "load_classes",
    "load_pairs",
    "load_texts",
    "open_image",
    "stream_pairs",
    "to_rgb",
]

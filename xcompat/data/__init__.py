"""Data: from the user's files to batches, with one set of column names."""

from xcompat.data.classes import load_classes
from xcompat.data.collate import EmbeddingPairDataset, PairCollator, collate_embeddings
from xcompat.data.contents import holds_pictures
from xcompat.data.corpora import CorpusSource, load_texts
from xcompat.data.images import UnusableSampleError, open_image, to_rgb
from xcompat.data.judgements import read_qrels
from xcompat.data.labelled import ClassBalancedSampler, LabelledImages, LabelledSource, load_labelled
from xcompat.data.loading import load_pairs
from xcompat.data.pairs import PairDataset, flatten_captions, iterate_images, stream_pairs
from xcompat.data.problems import BadSamples
from xcompat.data.scenarios import Subset, old_and_new_rows, select
from xcompat.data.sources import PairSource
from xcompat.data.text_pairs import TextPairCollator, TextPairDataset, TextPairSource, load_text_pairs
from xcompat.data.texts import TextSource, load_items_of_text, passages
from xcompat.data.transforms import Augmentation, build_transform

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
    "build_transform",
    "collate_embeddings",
    "flatten_captions",
    "holds_pictures",
    "iterate_images",
    "load_classes",
    "load_items_of_text",
    "load_labelled",
    "load_pairs",
    "load_text_pairs",
    "load_texts",
    "old_and_new_rows",
    "open_image",
    "passages",
    "read_qrels",
    "select",
    "stream_pairs",
    "to_rgb",
]

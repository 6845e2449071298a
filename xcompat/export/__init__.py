"""Exports of trained models to other software's formats."""

from xcompat.export.onnx_towers import to_onnx
from xcompat.export.query_transform import to_faiss
from xcompat.export.sentence_transformers import to_sentence_transformers

__all__ = ["to_faiss", "to_onnx", "to_sentence_transformers"]

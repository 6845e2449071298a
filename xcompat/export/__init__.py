"""A trained model in the forms that services already read."""

from xcompat.export.query_transform import to_faiss

__all__ = ["to_faiss"]

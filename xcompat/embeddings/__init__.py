"""Embeddings made by models and services, kept on disk."""

"""Embeddings of models and services, cached on disk."""

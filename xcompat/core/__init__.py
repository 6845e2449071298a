"""Foundations: errors, files, integrity, processes, progress and identities. Nothing here knows a model or a gallery."""

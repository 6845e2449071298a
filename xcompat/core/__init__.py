"""Foundations: errors, files, integrity, processes, progress and identities. They do not depend on models or galleries."""

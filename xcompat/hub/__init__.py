"""Checkpoints on the Hub: names, cards, lineage and pushing."""

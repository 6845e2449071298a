"""Who finds what: exact retrieval metrics, bootstrap intervals, and the criterion of backward compatibility."""

from __future__ import annotations

from xcompat.evaluation.intervals import PairedDifference, bootstrap_interval, paired_bootstrap
from xcompat.evaluation.metrics import (
    class_embeddings,
    first_hit_ranks,
    negative_flip_rate,
    recall_at_k,
    zero_shot_accuracy,
    zero_shot_ranks,
)
from xcompat.evaluation.protocol import Case, Criterion, Difference, EmbeddedPairs, Evaluation, ZeroShot, evaluate_cases

__all__ = [
    "Case",
    "Criterion",
    "Difference",
    "EmbeddedPairs",
    "Evaluation",
    "PairedDifference",
    "ZeroShot",
    "bootstrap_interval",
    "class_embeddings",
    "evaluate_cases",
    "first_hit_ranks",
    "negative_flip_rate",
    "paired_bootstrap",
    "recall_at_k",
    "zero_shot_accuracy",
    "zero_shot_ranks",
]

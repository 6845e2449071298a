"""Exact retrieval metrics, bootstrap intervals, and the criterion of backward compatibility."""

from __future__ import annotations

from xcompat.evaluation.cases import Case, Criterion, Difference, Evaluation
from xcompat.evaluation.contestants import Contestant, Contestants, EvaluationOptions
from xcompat.evaluation.embedded_images import EmbeddedImages
from xcompat.evaluation.embedded_pairs import EmbeddedPairs, ZeroShot
from xcompat.evaluation.embedded_texts import EmbeddedTexts
from xcompat.evaluation.graded import GradedQueries, graded_metrics, graded_per_query
from xcompat.evaluation.intervals import PairedDifference, bootstrap_interval, paired_bootstrap, queries_needed
from xcompat.evaluation.metrics import (
    class_embeddings,
    first_hit_ranks,
    negative_flip_rate,
    recall_at_k,
    zero_shot_accuracy,
    zero_shot_ranks,
)
from xcompat.evaluation.protocol import evaluate
from xcompat.evaluation.ranking import RankedQueries, cmc, mean_average_precision, ranking_per_query
from xcompat.evaluation.similarity import linear_cka
from xcompat.evaluation.verification import tar_at_far, tpir_at_far

__all__ = [
    "Case",
    "Contestant",
    "Contestants",
    "Criterion",
    "Difference",
    "EmbeddedImages",
    "EmbeddedPairs",
    "EmbeddedTexts",
    "Evaluation",
    "EvaluationOptions",
    "GradedQueries",
    "PairedDifference",
    "RankedQueries",
    "ZeroShot",
    "bootstrap_interval",
    "class_embeddings",
    "cmc",
    "evaluate",
    "first_hit_ranks",
    "graded_metrics",
    "graded_per_query",
    "linear_cka",
    "mean_average_precision",
    "negative_flip_rate",
    "paired_bootstrap",
    "queries_needed",
    "ranking_per_query",
    "recall_at_k",
    "tar_at_far",
    "tpir_at_far",
    "zero_shot_accuracy",
    "zero_shot_ranks",
]

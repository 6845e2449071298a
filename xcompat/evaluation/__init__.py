"""Exact retrieval metrics, bootstrap intervals and the backward compatibility criterion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.lazy import import_on_use

if TYPE_CHECKING:
    from xcompat.evaluation.cases import Case, Criterion, Difference, Evaluation
    from xcompat.evaluation.embedded_images import EmbeddedImages
    from xcompat.evaluation.embedded_pairs import EmbeddedPairs, ZeroShot
    from xcompat.evaluation.embedded_templates import EmbeddedTemplates, TemplateProtocol, pooled_templates
    from xcompat.evaluation.embedded_texts import EmbeddedTexts
    from xcompat.evaluation.evaluated_models import EvaluatedModel, EvaluatedModels, EvaluationOptions
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

_PLACES = {
    "cases": ["Case", "Criterion", "Difference", "Evaluation"],
    "evaluated_models": ["EvaluatedModel", "EvaluatedModels", "EvaluationOptions"],
    "embedded_images": ["EmbeddedImages"],
    "embedded_pairs": ["EmbeddedPairs", "ZeroShot"],
    "embedded_templates": ["EmbeddedTemplates", "TemplateProtocol", "pooled_templates"],
    "embedded_texts": ["EmbeddedTexts"],
    "graded": ["GradedQueries", "graded_metrics", "graded_per_query"],
    "intervals": ["PairedDifference", "bootstrap_interval", "paired_bootstrap", "queries_needed"],
    "metrics": [
        "class_embeddings",
        "first_hit_ranks",
        "negative_flip_rate",
        "recall_at_k",
        "zero_shot_accuracy",
        "zero_shot_ranks",
    ],
    "protocol": ["evaluate"],
    "ranking": ["RankedQueries", "cmc", "mean_average_precision", "ranking_per_query"],
    "similarity": ["linear_cka"],
    "verification": ["tar_at_far", "tpir_at_far"],
}

__all__ = [
    "Case",
    "Criterion",
    "Difference",
    "EmbeddedImages",
    "EmbeddedPairs",
    "EmbeddedTemplates",
    "EmbeddedTexts",
    "EvaluatedModel",
    "EvaluatedModels",
    "Evaluation",
    "EvaluationOptions",
    "GradedQueries",
    "PairedDifference",
    "RankedQueries",
    "TemplateProtocol",
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
    "pooled_templates",
    "queries_needed",
    "ranking_per_query",
    "recall_at_k",
    "tar_at_far",
    "tpir_at_far",
    "zero_shot_accuracy",
    "zero_shot_ranks",
]

__getattr__ = import_on_use(__name__, _PLACES)

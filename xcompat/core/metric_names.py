"""Display names of metrics."""

from __future__ import annotations


def metric_name(metric: str) -> str:
    """Return the display name for a metric in ``report.json``.

    Example:
        >>> metric_name("recall@10"), metric_name("map"), metric_name("negative_flip_rate@1"), metric_name("tar@far=1e-4")
        ('R@10', 'mAP', 'NFR@1', 'TAR@FAR=1e-4')
        >>> metric_name("zero_shot:sketch@1")
        'Zero-shot top-1 (sketch)'
    """
    name, at, k = metric.partition("@")
    if name.startswith("zero_shot"):
        which = name.partition(":")[2]
        return f"Zero-shot top-{k}" + (f" ({which})" if which else "")
    if name in ("tar", "tpir"):
        kind, equals, rate = metric.partition("=")
        return f"{kind.upper()}{equals}{rate}"
    known = {
        "recall": "R",
        "cmc": "CMC",
        "map": "mAP",
        "ndcg": "nDCG",
        "mrr": "MRR",
        "success": "Success",
        "negative_flip_rate": "NFR",
    }
    return f"{known[name]}{at}{k}" if name in known else metric

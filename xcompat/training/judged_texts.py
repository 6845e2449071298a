"""Test sets of texts: queries, passages, and relevance judgements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.progress import snippet
from xcompat.data import load_text_items, read_qrels
from xcompat.data.schema import ID, TEXT
from xcompat.evaluation import EmbeddedTexts
from xcompat.evaluation.cases import TEXT_TO_TEXT
from xcompat.evaluation.graded import Qrels
from xcompat.models.frozen import FrozenModel
from xcompat.report import Example, ExampleRow, Hit
from xcompat.training.caches import NO_TEXTS, cached_texts
from xcompat.training.evaluation_models import EvaluationSet, best_rows, display_name
from xcompat.training.sections import JudgedTexts
from xcompat.training.test_items import TEXTS, GalleryItems, QuerySet

if TYPE_CHECKING:
    import datasets

SHOWN = 160
"""Maximum length of a shown text."""


@dataclass
class JudgedTestSet(EvaluationSet):
    """Queries that search passages. Query prompts apply to queries only.

    Args:
        queries: from :func:`xcompat.data.load_text_items`.
        passages: from :func:`xcompat.data.load_text_items`.
        qrels: query id -> passage id -> gain.
        shard_rows: texts per cache shard.
    """

    queries: datasets.Dataset
    passages: datasets.Dataset
    qrels: Qrels
    shard_rows: int = 65536

    def texts(self) -> list[str]:
        """Return the queries, which training excludes."""
        return list(self.queries[TEXT])

    def require_judgements(self) -> None:
        """Raise if no query has a judgement."""
        if self.qrels.keys().isdisjoint(self.queries[ID]):
            judged, asked = next(iter(self.qrels)), self.queries[0][ID]
            raise XcompatError(
                f"no query has a judgement: judgements have query ids like {judged!r}, but queries have ids like "
                f"{asked!r}; use both from the same data set, or set id_column"
            )

    @override
    def embed(self, embedder: FrozenModel, cache_dir: Path) -> EmbeddedTexts:
        model = embedder.require_model(NO_TEXTS)
        queries = cached_texts(model.for_queries(), self.queries, cache_dir, self.shard_rows)
        passages = cached_texts(model, self.passages, cache_dir, self.shard_rows)
        ids = list(self.queries[ID]), list(self.passages[ID])
        return EmbeddedTexts(display_name(model.name), model.fingerprint, queries[:], passages[:], *ids, self.qrels)

    @override
    def examples(
        self, old: EmbeddedTexts, new_view: EmbeddedTexts, searched: EmbeddedTexts, count: int, seed: int
    ) -> list[Example]:
        """Search with queries that have relevant passages."""
        query_ids, passage_ids = list(self.queries[ID]), list(self.passages[ID])
        askable = [row for row, name in enumerate(query_ids) if any(gain > 0 for gain in self.qrels.get(name, {}).values())]
        chosen = np.random.default_rng(seed).choice(askable, size=min(count, len(askable)), replace=False)
        examples = []
        for query in chosen.tolist():
            gains, rows = self.qrels[query_ids[query]], []
            for label, queries, gallery in (("old query", old, old), ("new query", new_view, searched)):
                hits = []
                for passage in best_rows(gallery.passages(), np.asarray(queries.query_embeds_QD)[query]):
                    gain = gains.get(passage_ids[passage], 0)
                    hits.append(Hit(None, snippet(self.passages[passage][TEXT], SHOWN), gain > 0, gain if gain > 0 else None))
                rows.append(ExampleRow(label, hits))
            examples.append(Example(snippet(self.queries[query][TEXT], SHOWN), rows))
        return examples

    @override
    def galleries(self) -> list[GalleryItems]:
        about = [{TEXT: text} for text in self.passages[TEXT][:]]
        return [GalleryItems(TEXTS, "texts", list(self.passages[ID]), about)]

    @override
    def questions(self) -> dict[str, QuerySet]:
        texts, ids = self.texts(), list(self.queries[ID])

        def matches(row: int, item: str, _: dict[str, object]) -> bool:
            return self.qrels.get(ids[row], {}).get(item, 0) > 0

        return {TEXT_TO_TEXT: QuerySet(TEXTS, "queries", texts.__getitem__, texts.__getitem__, matches)}


def load_judged_texts(settings: JudgedTexts) -> JudgedTestSet:
    """Load texts and judgements.

    Args:
        settings: their paths.

    Raises:
        XcompatError: a file is missing, empty or damaged.
    """
    return JudgedTestSet(load_text_items(settings.queries), load_text_items(settings.passages), read_qrels(settings.qrels))

"""Evidence from texts: a sentence of a held-out text must find the text in the old gallery."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.embeddings.embed import embed_in_memory
from xcompat.evaluation import first_hit_ranks
from xcompat.mapping.candidates import Candidate
from xcompat.mapping.held_out import ValidationSplit
from xcompat.mapping.paired import PairedEmbeddings
from xcompat.models.embedder import Embedder

ASKED = 500
"""Most sentences per fold; the new model embeds each."""
FEWEST = 50
"""Fewest sentences per fold to count as evidence."""
WORDS = 4
"""Fewest words of a sentence."""
_BETWEEN = re.compile(r"(?<=[.!?;])\s+")


class Texts(NamedTuple):
    """Pairs' texts, and the query model.

    Args:
        texts: N strings.
        new: the new model.
    """

    texts: Sequence[str]
    new: Embedder


class Sentences:
    """Sentences of held-out texts that search the old embeddings of whole held-out texts, mapped if the map is of galleries.

    Stored passages as queries flatter every map, because user queries are shorter, like sentences. On SciFact, sentences rank
    linear maps exactly as nDCG does (docs/results/lines.md). They do not compare maps with old queries, because models that count
    words find the text of their sentence too easily.

    Args:
        held: validation split.
        folds: rows (G,) of the held-out items and their old embeddings (G, d), per fold.
        given: texts of all items, and the new model.
        pairs: embeddings of all items.
    """

    def __init__(
        self,
        held: ValidationSplit,
        folds: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]],
        given: Texts,
        pairs: PairedEmbeddings,
    ) -> None:
        self.held, self.folds, self.pairs, draw = held, folds, pairs, np.random.default_rng(held.seed)
        self.asking: list[tuple[NDArray[np.int64], PairedEmbeddings]] = []
        for rows_G, _ in folds:
            drawn = {row: said for row in rows_G.tolist() if (said := split_sentences(given.texts[row]))}
            rows_Q = np.array([*drawn][:ASKED], np.int64)
            said_Q = [drawn[row][draw.integers(len(drawn[row]))] for row in rows_Q.tolist()]
            if len(said_Q) >= FEWEST:
                new_QD = embed_in_memory(given.new.for_queries(), said_Q)
                self.asking.append((rows_Q, PairedEmbeddings(new_QD, new_QD)))

    def __len__(self) -> int:
        """Return the number of sentences; 0 if a fold has too few texts with several sentences."""
        return sum(len(rows_Q) for rows_Q, _ in self.asking) if len(self.asking) == len(self.folds) else 0

    def reciprocal_ranks(self, candidate: Candidate) -> NDArray[np.float64]:
        """Return the reciprocal rank of each sentence's text (Q,)."""
        queries, found = self.held.queries_of(candidate), []
        for number, ((rows_G, old_Gd), (rows_Q, side)) in enumerate(zip(self.folds, self.asking, strict=True)):
            if self.held.of_galleries:
                asked_Qd, old_Gd = np.asarray(side.new_ND), queries(number, "texts", rows_G, self.pairs)
            else:
                asked_Qd = queries(number, "sentences", np.arange(len(rows_Q)), side)
            found.append(1 / (1.0 + first_hit_ranks(asked_Qd, old_Gd, rows_Q, rows_G)))
        return np.concatenate(found)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text with several, without very short sentences.

    Example:
        >>> split_sentences("Mice sleep in winter. Do they? Nobody has seen them awake.")
        ['Mice sleep in winter.', 'Nobody has seen them awake.']
        >>> split_sentences("One sentence alone is the text itself.")
        []
    """
    parts = _BETWEEN.split(text.strip())
    return [part for part in parts if len(part.split()) >= WORDS] if len(parts) > 1 else []

"""Maps of queries for the study of texts: solved, trained, chosen, and with a memory of stored texts."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from texts_models import Rows

from xcompat import Fingerprint
from xcompat.mapping import CaptionedEmbeddings, PairedEmbeddings, choose, fit
from xcompat.mapping.candidates import CandidateParts
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.memory_contents import PairMemoryContents
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.models.query_memory import LearnedTransform

STEPS, BATCH, EVERY, HELD_OUT, LEARNING_RATE = 600, 256, 50, 0.1, 1e-3
"""Most steps of a trained map, pairs in each, steps between looks at held-out pairs, their share, and AdamW's rate."""
SHARPNESS, SHARE = 60.0, 0.8
"""Settings of a memory that nothing was held out to choose: the middle of what is tried elsewhere."""
LINES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Procrustes": ("procrustes", {"centre": True, "scale": True}),
    "ridge": ("ridge", {}),
}
"""What is solved: name -> method and options."""
TRAINED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Drift-Adapter, orthogonal": ("drift_adapter", {"variant": "orthogonal"}),
    "Drift-Adapter, low rank": ("drift_adapter", {"variant": "low_rank"}),
    "Drift-Adapter, network": ("drift_adapter", {"variant": "mlp"}),
    "residual MLP": ("residual_mlp", {}),
    "φ with noise": ("projection", {}),
    "query map": ("query_map", {}),
}
"""What is trained likewise."""


def usable(new_ND: Rows, old_Nd: Rows) -> PairedEmbeddings:
    """Return pairs without those of which either model knows no word."""
    kept_N = (new_ND != 0).any(1) & (old_Nd != 0).any(1)
    return PairedEmbeddings(new_ND[kept_N], old_Nd[kept_N])


def mapped(name: str, pairs: PairedEmbeddings) -> CompatModel:
    """Solve or train a map by its name in a table."""
    method, options = (LINES | TRAINED)[name]
    old = describe_old(Fingerprint.from_string("old"), pairs.dims[1])
    torch.manual_seed(0)
    model = METHODS[method](METHODS[method].config_class(old=old, embedding_dim=pairs.dims[0], **options))
    return (model.fit(pairs.batches()) if model.is_solved else _trained(model, pairs)).eval()


def _trained(model: CompatModel, pairs: PairedEmbeddings) -> CompatModel:
    """Train a map, and keep what is nearest to the old embeddings of a tenth that is held out."""
    order = np.random.default_rng(0).permutation(len(pairs))
    held, rest = (pairs.take(np.sort(rows)) for rows in np.split(order, [round(HELD_OUT * len(pairs))]))
    model.prepare(OldKnowledge(0, np.empty(0, np.int64), rest.old_Nd), rest.new_ND)
    ((held_new, held_old),) = held.batches()
    optimiser = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], LEARNING_RATE)
    draw, best, state = np.random.default_rng(0), -1.0, copy.deepcopy(model.state_dict())
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            with torch.inference_mode():
                near = float((model.eval().to_space(held_new) * held_old).sum(1).mean())
            if near > best:
                best, state = near, copy.deepcopy(model.state_dict())
        rows = torch.from_numpy(draw.permutation(len(rest))[:BATCH])
        batch = {"new_embeds": torch.from_numpy(rest.new_ND[rows]), "old_embeds": torch.from_numpy(rest.old_Nd[rows])}
        known = {"index": rows} if "index" in model.columns_if_known else {}
        model.train()(**batch, **known).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.load_state_dict(state)
    return model


def chosen(items: PairedEmbeddings, queries: PairedEmbeddings) -> tuple[str, CompatModel]:
    """Take what `xcompat map` takes.

    Args:
        items: embeddings of what is found, labelled by group.
        queries: embeddings of what asks, labelled by group.

    Returns:
        The candidate in words, and its map.
    """
    known = CaptionedEmbeddings.join_complete(items, queries)
    candidate = choose(known).chosen.candidate
    return str(candidate), fit(candidate, CandidateParts(known)).eval()


def remembering(line: CompatModel, pairs: PairedEmbeddings) -> CompatModel:
    """Let queries remember stored texts: each leans towards old embeddings of those that its new embedding resembles."""
    rows = np.arange(len(pairs))
    sides = (pairs.new_ND, pairs.new_ND), (pairs.old_Nd, pairs.old_Nd)
    remembered = PairMemoryContents.compute(*sides, (rows, rows))
    return line.remember(remembered.build_memory(LearnedTransform(pairs.dims[1]), SHARPNESS, SHARE))


def microseconds(model: CompatModel, queries_QD: Rows, rounds: int = 200) -> float:
    """Measure the median time to map one query, in µs."""
    took = []
    with torch.inference_mode():
        for row in range(rounds):
            query = torch.from_numpy(queries_QD[row % len(queries_QD)][None])
            start = time.perf_counter()
            model.to_space(query)
            took.append(time.perf_counter() - start)
    return float(np.median(took) * 1e6)

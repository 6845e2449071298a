"""What would make a memory of classes better: the stored gallery's own neighbourhoods, corrections of hubs, learned entries.

    python benchmarks/studies/memory_variants.py

Needs ../shared/data/tiny-imagenet and ../shared/models, and takes the embeddings of memory_data.py. One setting for all, so that
variants differ in nothing else: procrustes, α .5, ε .3, β 40, λ .5, from 50 images of each class. What the gallery knows is used
without classes, and without the query's own image. Prints Markdown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from confidence import TEST, TRAIN
from memory_data import ASKED, CLASSES, IMAGES, cell, console, first_of_each, photos
from torch import Tensor
from torch.nn import functional as F

from xcompat.evaluation import paired_bootstrap, ranking_per_query
from xcompat.mapping import PairedEmbeddings, fit
from xcompat.mapping.candidates import Candidate, CandidateParts
from xcompat.models.query_memory import QueryMemory

SETTING = Candidate("procrustes", power=0.5, damping=0.3, sharpness=40.0, share=0.5)
EXPANDED, HUBS = 10, 10
"""Number of neighbours for query expansion, and for the measure of hubs."""
STEPS, BATCH, RATE, TEMPERATURE = 200, 512, 1e-3, 0.05


def tensors(pairs: PairedEmbeddings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the embeddings of both models, and the classes."""
    assert pairs.labels_N is not None
    new, old = (torch.from_numpy(np.asarray(side, np.float32)) for side in (pairs.new_ND, pairs.old_Nd))
    return new, old, torch.from_numpy(pairs.labels_N)


def expanded(queries_Qd: Tensor, stored_Nd: Tensor, metric: QueryMemory, share: float) -> Tensor:
    """Move queries towards their first hits (average query expansion, Chum et al. 2007), except their own image."""
    scores_QN = queries_Qd @ stored_Nd.T
    if len(scores_QN) == scores_QN.shape[1]:
        scores_QN.fill_diagonal_(-torch.inf)
    nearest_QE = scores_QN.topk(EXPANDED, dim=1).indices
    return F.normalize(queries_Qd + share * F.normalize(metric.metric(stored_Nd)[nearest_QE].mean(1), dim=1), dim=1)


def less_of_hubs(queries_Qd: Tensor, stored_Nd: Tensor) -> Tensor:
    """Subtract each item's hubness, as far as a linear function of its embedding predicts it (CSLS, Conneau et al. 2018)."""
    cosines_NN = (stored_Nd @ stored_Nd.T).fill_diagonal_(-torch.inf)
    hubs_N = cosines_NN.topk(HUBS, dim=1).values.mean(1)
    centred_Nd = stored_Nd - stored_Nd.mean(0)
    line_d = torch.linalg.lstsq(centred_Nd, (hubs_N - hubs_N.mean())[:, None]).solution[:, 0]
    return queries_Qd - 0.5 * line_d


def learned(memory: QueryMemory, own_Nd: Tensor, train: PairedEmbeddings) -> QueryMemory:
    """Learn keys, values, β and gate by contrast, half of the classes left out of the memory at every step."""
    torch.manual_seed(0)
    new_ND, old_Nd, labels_N = tensors(train)
    sharpness, share = torch.tensor(memory.sharpness).log().requires_grad_(), torch.tensor(memory.share).requires_grad_()
    for name in ("keys_KD", "values_Kd", "gate"):
        getattr(memory, name).requires_grad_()
    metric_Nd, looked_ND = memory.metric(own_Nd), memory.key_metric(new_ND)
    adam = torch.optim.Adam([memory.keys_KD, memory.values_Kd, memory.gate, sharpness, share], RATE)
    for _ in range(STEPS):
        rows_B = torch.randperm(len(labels_N))[:BATCH]
        kept_K = torch.rand(memory.entries) < 0.5
        cosines_BK = looked_ND[rows_B] @ memory.keys_KD[kept_K].T
        weights_BK = (sharpness.exp() * cosines_BK).softmax(1)
        gate_B1 = torch.sigmoid(memory.gate[0] * cosines_BK.amax(1, keepdim=True) + memory.gate[1])
        queries_Bd = F.normalize(metric_Nd[rows_B] + share * gate_B1 * (weights_BK @ memory.values_Kd[kept_K]), dim=1)
        scores_BB = (queries_Bd @ old_Nd[rows_B].T / TEMPERATURE).fill_diagonal_(-torch.inf)
        same_BB = (labels_N[rows_B, None] == labels_N[rows_B]).fill_diagonal_(fill_value=False)
        asked_B = same_BB.any(1)
        log_BB = scores_BB.log_softmax(1).masked_fill(~same_BB, 0.0)
        loss = -(log_BB.sum(1)[asked_B] / same_BB.sum(1)[asked_B]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    memory.sharpness, memory.share = sharpness.exp().item(), share.item()
    return memory.requires_grad_(requires_grad=False)


def variants(train: PairedEmbeddings, test: PairedEmbeddings) -> Iterator[tuple[str, Tensor]]:
    """Yield queries in the old space."""
    new_QD, stored_Nd, _ = tensors(test)
    model = fit(SETTING, CandidateParts(train))
    memory = model.memory
    assert memory is not None
    with torch.inference_mode():
        plain_Qd = model.to_space(new_QD)
        yield "default memory", plain_Qd
        memory.share = 1.2
        yield "the memory with λ 1.2", model.to_space(new_QD)
        memory.share = SETTING.share
        yield "hub correction", less_of_hubs(plain_Qd, stored_Nd)
        for share in (0.3, 1.0):
            yield f"query expansion, {share:g}", expanded(plain_Qd, stored_Nd, memory, share)
            values_Kd = memory.values_Kd.clone()
            memory.values_Kd = expanded(values_Kd, stored_Nd, memory, share)
            yield f"entries smoothed by the gallery, {share:g}", model.to_space(new_QD)
            memory.values_Kd = values_Kd
        own_Nd = model.to_space_without_memory(tensors(train)[0])
    model.remember(learned(fit(SETTING, CandidateParts(train)).memory, own_Nd.clone(), train))  # type: ignore[arg-type]  # it has one
    with torch.inference_mode():
        yield "keys, values, β, λ and gate learned", model.to_space(new_QD)
        for share in (0.3, 1.0):
            yield (
                f"old queries, expansion {share:g}",
                expanded(stored_Nd, stored_Nd, QueryMemory(1, stored_Nd.shape[1], 0), share),
            )


def main() -> None:
    """Measure every variant and print a row of each."""
    started = time.monotonic()
    train, test = photos(TRAIN), photos(TEST)
    rows: dict[str, list[str]] = {}
    every, first, second = range(CLASSES), range(CLASSES // 2), range(CLASSES // 2, CLASSES)
    for shown, searched in ((every, every), (first, second)):
        some, asked = first_of_each(train, IMAGES, shown), first_of_each(test, ASKED, searched)
        labels_Q, rows_Q, old_Qd = asked.labels_N, np.arange(len(asked)), np.asarray(asked.old_Nd)
        assert labels_Q is not None
        old = ranking_per_query(old_Qd, old_Qd, labels_Q, labels_Q, rows_Q, rows_Q)
        for name, queries_Qd in variants(some, asked):
            new = ranking_per_query(queries_Qd.numpy(), old_Qd, labels_Q, labels_Q, rows_Q, rows_Q)
            first_hits = paired_bootstrap(new.first_hit_ranks_Q < 1, old.first_hit_ranks_Q < 1)
            gains = first_hits, paired_bootstrap(new.average_precision_Q, old.average_precision_Q)
            rows.setdefault(name, []).extend(cell(gain) for gain in gains)
    heads = ["all classes known: CMC@1", "mAP", "none known: CMC@1", "mAP"]
    console.print(f"| variant | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for name, cells in rows.items():
        console.print(f"| {name} | {' | '.join(cells)} |")
    console.print(f"\n{(time.monotonic() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    main()

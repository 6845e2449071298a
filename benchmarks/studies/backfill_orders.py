"""Orders in which to backfill a mapped gallery: by the map's uncertainty, and by measures that need no training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.heads import ForwardTransform
from xcompat.methods.fct import FREEZE_AT

Floats = NDArray[np.float32]
MapKind = Literal["fct", "fastfill"]
MAPS: tuple[MapKind, ...] = get_args(MapKind)
STEPS, BATCH, RATE = 300, 256, 1e-3
SCALE, SMOOTHING = 30.0, 0.1
NEIGHBOURS = 10


class Photos(NamedTuple):
    """Both models' embeddings of photos.

    Args:
        old_Nd: of the old model.
        new_ND: of the new one.
        labels_N: numbers of their classes.
    """

    old_Nd: Floats
    new_ND: Floats
    labels_N: NDArray[np.int64]

    def rows(self, rows: NDArray[np.int64]) -> Photos:
        """Return the embeddings of some photos."""
        return Photos(self.old_Nd[rows], self.new_ND[rows], self.labels_N[rows])


class UncertainMap(nn.Module):
    """FCT's h(o) with log σ²(o), one more output of its last layer (FastFill, arXiv 2303.04766)."""

    def __init__(self, old_dim: int, new_dim: int) -> None:
        super().__init__()
        self.transform = ForwardTransform(old_dim, None, new_dim)
        self.log_variance = nn.Linear(2048, 1)

    def forward(self, old_Bd: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit h (B, D) and log σ² (B,)."""
        inside = self.transform.mixer[0](self.transform.old_branch(old_Bd))
        return F.normalize(self.transform.mixer[1](inside), dim=-1), self.log_variance(inside)[:, 0]


class Mapped(NamedTuple):
    """A map's output for stored and for training photos: unit vectors, and log σ² of the stored ones."""

    stored_ND: Floats
    log_variance_N: Floats
    learned_ND: Floats


def mapped(kind: MapKind, learned: Photos, stored_Nd: Floats, seed: int, kept: Path) -> Mapped:
    """Train a map and apply it, or read its cached output.

    Args:
        kind: ``fct`` has L = e with e = ‖h − n‖²; ``fastfill`` L = ½·exp(−s)·e + ½·s with s = log σ², and e also holds what a
            classifier of new embeddings, here the means of the classes, makes of h (cross-entropy, labels smoothed).
        learned: the training photos.
        stored_Nd: old embeddings of all photos that may be stored.
        seed: of weights and batches.
        kept: a folder for results.
    """
    file = kept / f"{kind}_{seed}.npz"
    if not file.exists():
        model = _trained(kind, learned, seed)
        with torch.inference_mode():
            stored, log_variance = model(torch.from_numpy(stored_Nd))
            back, _ = model(torch.from_numpy(learned.old_Nd))
        kept.mkdir(parents=True, exist_ok=True)
        np.savez(file, stored=stored.numpy(), log_variance=log_variance.numpy(), learned=back.numpy())
    with np.load(file, allow_pickle=False) as arrays:
        return Mapped(arrays["stored"], arrays["log_variance"], arrays["learned"])


def _trained(kind: MapKind, photos: Photos, seed: int) -> UncertainMap:
    """Train as `xcompat train` trains FCT: AdamW, its rate down to 0, gradients clipped, statistics frozen halfway."""
    torch.manual_seed(seed)
    old_Nd, new_ND, labels_N = map(torch.from_numpy, photos)
    model = UncertainMap(old_Nd.shape[1], new_ND.shape[1]).train()
    means_CD = F.normalize(torch.stack([new_ND[labels_N == label].mean(0) for label in labels_N.unique()]), dim=-1)
    classes_N = torch.searchsorted(labels_N.unique(), labels_N)
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, STEPS)
    batches: list[Tensor] = []
    for step in range(STEPS):
        batches = batches or list(torch.randperm(len(old_Nd)).split(BATCH))
        rows_B = batches.pop()
        if step >= FREEZE_AT * STEPS:
            for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm1d)):
                norm.eval()
        h_BD, s_B = model(old_Nd[rows_B])
        error_B = (h_BD - new_ND[rows_B]).square().sum(-1)
        if kind == "fastfill":
            logits_BC = SCALE * h_BD @ means_CD.T
            error_B = error_B + F.cross_entropy(logits_BC, classes_N[rows_B], reduction="none", label_smoothing=SMOOTHING)
        loss = (error_B if kind == "fct" else (0.5 * torch.exp(-s_B) * error_B + 0.5 * s_B)).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


def simple_orders(stored: Photos, found: Mapped, learned: Photos) -> dict[str, Floats]:
    """Return measures, without training, of how badly stored photos may be mapped or how much they matter; largest first."""
    similar_NN = found.stored_ND @ found.stored_ND.T
    np.fill_diagonal(similar_NN, -np.inf)
    nearest_Nk = np.argpartition(-similar_NN, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
    hubs_N = np.bincount(nearest_Nk.ravel(), minlength=len(nearest_Nk))
    distance_N = -np.sort(-(stored.old_Nd @ learned.old_Nd.T), axis=1)[:, :NEIGHBOURS].mean(1)
    known_N = squared_distance(found.learned_ND, learned.new_ND)
    # in the mapped space, as an upgraded gallery holds nothing else
    nearest_Nk = np.argpartition(-(found.stored_ND @ found.learned_ND.T), NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
    ridge = Ridge(1.0).fit(found.learned_ND, np.log(known_N))
    return {
        "class by class": -stored.labels_N.astype(np.float32),  # as folders are read
        "found most often first": hubs_N.astype(np.float32),
        "far from what was learned": -distance_N,
        "error of the nearest learned": known_N[nearest_Nk].mean(1),
        "error predicted by a line": ridge.predict(found.stored_ND).astype(np.float32),
    }


def squared_distance(a_ND: Floats, b_ND: Floats) -> Floats:
    """Return ‖a − b‖² of each row."""
    return ((a_ND - b_ND) ** 2).sum(1)


def usefulness(mapped_QN: Floats, native_QN: Floats, right_QN: NDArray[np.bool_], places: int) -> Floats:
    """Return how much each item helps when it is embedded anew, which only the queries themselves can tell.

    It counts the queries among whose first places an item that belongs there comes, or one that does not goes, less the others.

    Args:
        mapped_QN: scores of the queries against mapped embeddings.
        native_QN: against new ones.
        right_QN: whether the item is of the query's class.
        places: how many count.
    """

    def first(scores_QN: Floats) -> NDArray[np.int64]:
        last_Q1 = -np.partition(-scores_QN, places - 1, axis=1)[:, places - 1 : places]
        return (scores_QN >= last_Q1).astype(np.int64)

    return (np.where(right_QN, 1, -1) * (first(native_QN) - first(mapped_QN))).sum(0).astype(np.float32)

"""Orders in which to backfill a mapped gallery: by the map's uncertainty, and by measures that need no training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from xcompat import Fingerprint
from xcompat.methods import FastfillConfig, FastfillModel
from xcompat.models import describe_old
from xcompat.models.forward_map import squared_distances
from xcompat.models.old_knowledge import OldKnowledge

Floats = NDArray[np.float32]
MapKind = Literal["fct", "fastfill"]
MAPS: tuple[MapKind, ...] = get_args(MapKind)
STEPS, BATCH, RATE = 300, 256, 1e-3
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


class Mapped(NamedTuple):
    """A map's output for stored and for training photos: unit vectors, and log σ² of the stored ones."""

    stored_ND: Floats
    log_variance_N: Floats
    learned_ND: Floats


def mapped(kind: MapKind, learned: Photos, stored_Nd: Floats, seed: int, kept: Path) -> Mapped:
    """Train a map and apply it, or read its cached output.

    Args:
        kind: the method.
        learned: the training photos.
        stored_Nd: old embeddings of all photos that may be stored.
        seed: of weights and batches.
        kept: a folder for results.
    """
    file = kept / f"{kind}_{seed}.npz"
    if not file.exists():
        model = _trained(kind, learned, seed)
        with torch.inference_mode():
            stored, back = (model.upgrade(torch.from_numpy(rows)) for rows in (stored_Nd, learned.old_Nd))
            log_variance = model.uncertainty(torch.from_numpy(stored_Nd))
        kept.mkdir(parents=True, exist_ok=True)
        np.savez(file, stored=stored.numpy(), log_variance=log_variance.numpy(), learned=back.numpy())
    with np.load(file, allow_pickle=False) as arrays:
        return Mapped(arrays["stored"], arrays["log_variance"], arrays["learned"])


def _trained(kind: MapKind, photos: Photos, seed: int) -> FastfillModel:
    """Train as `xcompat train` trains maps: AdamW, its rate down to 0, gradients clipped; FCT is FastFill with FCT's loss."""
    torch.manual_seed(seed)
    old_Nd, new_ND = map(torch.from_numpy, photos[:2])
    classes, classes_N = np.unique(photos.labels_N, return_inverse=True)
    old = describe_old(Fingerprint.from_string("old"), old_Nd.shape[1])
    model = FastfillModel(FastfillConfig(old=old, embedding_dim=new_ND.shape[1])).train()
    model.prepare(OldKnowledge(len(classes), classes_N, photos.old_Nd), photos.new_ND)
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, STEPS)
    batches: list[Tensor] = []
    for step in range(STEPS):
        model.progress = step / STEPS
        batches = batches or list(torch.randperm(len(old_Nd)).split(BATCH))
        rows_B = batches.pop()
        labels_B = torch.from_numpy(classes_N)[rows_B]
        batch = {"old_embeds": old_Nd[rows_B], "new_embeds": new_ND[rows_B], "labels": labels_B}
        made = model.embed_batch(batch)
        far_B = squared_distances(made["image_embeds"], batch["new_embeds"], unit=True)
        loss = model.loss(made, batch) if kind == "fastfill" else far_B.mean()
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
        "largest distance to a training item": -distance_N,
        "error of the nearest training items": known_N[nearest_Nk].mean(1),
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

"""Pairs from a few known ones: VecLinking's idea (arXiv 2605.31100), and refitting the whitened map to its own matches.

    python benchmarks/studies/linking.py --seeds 3

Both models embedded the same texts, but only 30 or 300 pairs are known: which rows of the others belong together? Prints
Markdown: the links found and the share of right ones, and nDCG@10 of the whitened map of these pairs. The hashing follows the
published description, because the code was not available: it describes vectors by their similarities to random known pairs,
links mutual nearest neighbours, and keeps links whose Beta posterior over these views is high.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from lines import OLD, Floats, Search, console, load_text_searches
from numpy.typing import NDArray

from xcompat.core.arrays import normalise_rows
from xcompat.core.fingerprint import Fingerprint
from xcompat.mapping import PairedEmbeddings
from xcompat.mapping.candidates import LINES, WHITENED
from xcompat.models import describe_old

KNOWN = (30, 300)
ROUNDS, VIEWS, SHARE, CERTAIN = 8, 8, 2 / 3, 0.6
Rows = NDArray[np.int64]
Links = tuple[Rows, Rows]
"""Rows of the new and the old embeddings that belong together."""


def match(new_ND: Floats, old_ND: Floats) -> Links:
    """Return mutual nearest neighbours by inner product."""
    scores_NN = new_ND @ old_ND.T
    nearest_N, back_N = scores_NN.argmax(1), scores_NN.argmax(0)
    rows = np.flatnonzero(back_N[nearest_N] == np.arange(len(new_ND)))
    return rows, nearest_N[rows]


def link_by_hashing(items: PairedEmbeddings, known: Rows, rng: np.random.Generator) -> Links:
    """Link mutual neighbours in views of random anchors, and make certain links anchors of the next round."""
    anchors: Links = (known, known)
    for _ in range(ROUNDS):
        hits = Counter[tuple[int, int]]()
        for _ in range(VIEWS):
            drawn = rng.choice(len(anchors[0]), round(SHARE * len(anchors[0])), replace=False)
            codes = [
                _centred(side_ND @ side_ND[rows[drawn]].T)
                for side_ND, rows in zip((items.new_ND, items.old_Nd), anchors, strict=True)
            ]
            hits.update(zip(*(rows.tolist() for rows in match(*codes)), strict=True))
        certain = [pair for pair, count in hits.most_common() if (1 + count) / (2 + VIEWS) >= CERTAIN]
        anchors = _with_links(known, certain)
    return anchors


def link_by_map(items: PairedEmbeddings, known: Rows, rng: np.random.Generator) -> Links:
    """Fit the whitened map, link mutual neighbours of mapped and old embeddings, and repeat with the links as pairs."""
    links: Links = (known, known)
    for _ in range(ROUNDS):
        links = _with_links(known, list(zip(*match(_map(items, links, items.new_ND), np.asarray(items.old_Nd)), strict=True)))
    return links


def _centred(similarities_NA: Floats) -> Floats:
    return normalise_rows(similarities_NA - similarities_NA.mean(1, keepdims=True))


def _with_links(known: Rows, found: list[tuple[int, int]]) -> Links:
    """Add links between unknown rows, each row once, to the known pairs."""
    taken = set(known.tolist()), set(known.tolist())
    rows = list[tuple[int, int]]()
    for new, old in found:
        if new not in taken[0] and old not in taken[1]:
            taken[0].add(new)
            taken[1].add(old)
            rows.append((new, old))
    links_L2 = np.array(rows, np.int64).reshape(-1, 2)
    return np.concatenate([known, links_L2[:, 0]]), np.concatenate([known, links_L2[:, 1]])


def _map(items: PairedEmbeddings, links: Links, queries_QD: Floats) -> Floats:
    pairs = PairedEmbeddings(items.new_ND[links[0]], items.old_Nd[links[1]])
    model = LINES[WHITENED](pairs, describe_old(Fingerprint.from_string("old"), pairs.dims[1]))
    with torch.inference_mode():
        found: Floats = model.to_space(torch.from_numpy(np.array(queries_QD, np.float32))).numpy()
    return found


Linker = Callable[[PairedEmbeddings, Rows, np.random.Generator], Links]
LINKERS: dict[str, Linker] = {
    "known pairs only": lambda _, known, __: (known, known),
    "hashing": link_by_hashing,
    "whitened map, refitted": link_by_map,
}


def measure(search: Search, seeds: int) -> dict[str, str]:
    """Return row -> results of one upgrade: links, share of right ones, and nDCG@10."""
    stored = search.stored
    embedded = np.flatnonzero((stored.new_ND != 0).any(1) & (stored.old_Nd != 0).any(1))
    items, gallery_Gd = stored.take(embedded), np.asarray(stored.old_Nd)

    def ndcg(queries_Qd: Floats) -> float:
        return 100 * float(search.score(queries_Qd, gallery_Gd)["nDCG@10"].mean())

    all_rows = np.arange(len(items))
    cells = {OLD: f"{ndcg(np.asarray(search.asked.old_Nd)):.1f}"}
    for count in KNOWN:
        for name, link in LINKERS.items():
            found = list[tuple[float, float, float]]()
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                links = link(items, rng.permutation(all_rows)[:count], rng)
                right = links[0][count:] == links[1][count:]
                share = 100 * right.mean() if len(right) else 0
                found.append((len(right), share, ndcg(_map(items, links, search.asked.new_ND))))
            links_found, right, value = np.mean(found, 0)
            linked = f"{links_found:,.0f} links, {right:.0f} % right: " if name != "known pairs only" else ""
            cells[f"{count} pairs: {name}"] = f"{linked}{value:.1f}"
    return cells | {"all pairs": f"{ndcg(_map(items, (all_rows, all_rows), search.asked.new_ND)):.1f}"}


def main() -> None:
    """Measure every upgrade on texts, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="Number of draws of the known pairs.")
    options, started = parser.parse_args(), time.monotonic()
    columns = {name: measure(search, options.seeds) for name, search in load_text_searches()}
    console.print(f"| nDCG@10 | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for row in next(iter(columns.values())):
        console.print(f"| {row} | {' | '.join(cells[row] for cells in columns.values())} |")
    console.print(f"\n{options.seeds} seeds, {(time.monotonic() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    main()

"""What memories of 10^3 to 10^7 entries take, and what is lost where a query looks at the nearest of them alone.

    python benchmarks/speed/memory_size.py [--entries 1000 --entries 100000 …] [--codec SQ8 …] [--real] [--queries 1000]

Drawn embeddings: 64 numbers describe an item, around one of 20,000 topics of unequal sizes in 200 themes, with a spectrum that
falls; 16 more are each model's own noise. Two layers of random weights, one tanh between them, make 512 dimensions of these for
each model, so that embeddings lie near a curved surface of few dimensions, off their origin, as trained ones do. The old model
sees the finer 24 of the 64 at a third. With --real they are those of the captions in ../shared/data/captions: two latent semantic
analyses (512 dimensions), the old model's of words, the new one's of parts of words; of 5,000 photos of Flickr30k, which are left
out, one caption asks for another. A query is rotated into the old space (Procrustes) and leans on the memory with λ 0.8.

Seconds and microseconds are the thread's own, as others may use the machine; queries come one by one. `full` is the float32
softmax over all entries, `nearest` the same over the 256 nearest, found exactly; agreement and loss against `full` are given for
β of 30, 60 and 100. Prints Markdown. With OMP_NUM_THREADS=1 all is one thread.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import faiss
import numpy as np
import torch
import typer
from measuring import in_fresh_process
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from xcompat.models.indexed_memory import NEAREST, IndexedMemory, build_memory
from xcompat.models.query_memory import LearnedTransform, QueryMemory

SIZES, CODECS = (1_000, 100_000, 1_000_000, 10_000_000), ("float32", "SQ8", "SQ4", "PQ64")
DIM, SHARED, OWN, HIDDEN, TOPICS, THEMES = 512, 64, 16, 256, 20_000, 200
SHARPNESSES, SHARE = (30.0, 60.0, 100.0), 0.8
GALLERY, FITTED, TIMED, ROWS = 10_000, 20_000, 300, 2**15
CAPTIONS, PHOTOS = Path("../shared/data/captions"), 5_000
HEADER = ("entries", "kept as", "MB on disk", "MB in memory", "s to build", "s to open", "µs a query", "agreement", "R@10 lost")

Rows = NDArray[np.int64]


class Source(Protocol):
    """Entries, and queries with the gallery that each looks for its own place in: query i for item i."""

    entries: int
    queries_QD: Tensor
    rotated_Qd: Tensor
    gallery_Gd: Tensor

    def keys(self, rows: Rows) -> Tensor:
        """Read keys."""

    def values(self, rows: Rows) -> Tensor:
        """Read values."""


def rotation(new_ND: Tensor, old_Nd: Tensor, queries_QD: Tensor) -> Tensor:
    """Bring queries into the old space: centred Procrustes with its scale."""
    means = new_ND.mean(0), old_Nd.mean(0)
    u, s, vt = torch.linalg.svd((new_ND - means[0]).T @ (old_Nd - means[1]))
    scale = s.sum() / (new_ND - means[0]).square().sum()
    return F.normalize(scale * (queries_QD - means[0]) @ u @ vt + means[1], dim=1)


class Drawn:
    """Random embeddings as the page describes them; only the items' latent factors are in memory, in half precision."""

    def __init__(self, entries: int, queries: int) -> None:
        self.entries, self.draw = entries, np.random.default_rng(0)
        self.spectrum = np.arange(1, SHARED + 1, dtype=np.float32) ** -0.35
        themes = self._normal(THEMES, SHARED)[self.draw.integers(THEMES, size=TOPICS)]
        self.topics = 0.7 * (themes + self._normal(TOPICS, SHARED)) * self.spectrum
        sizes = np.arange(1, TOPICS + 1) ** -0.7
        self.reached = np.cumsum(sizes / sizes.sum())
        self.weights = [
            (0.15 * self._normal(SHARED + OWN, HIDDEN), self._normal(HIDDEN, DIM) / 16, 0.3 * self._normal(DIM)) for _ in range(2)
        ]
        self.weights[1][0][40:SHARED] *= 0.3
        asked, others = self._items(queries), self._items(GALLERY - queries)
        self.queries_QD = self._embedded(0, *asked)
        gallery = np.concatenate([asked[0], others[0]])
        self.gallery_Gd = self._embedded(1, gallery, np.concatenate([asked[1], others[1]]))
        self.known = [self._items(min(ROWS, entries - start)) for start in range(0, entries, ROWS)]
        rows = np.arange(min(FITTED, entries))
        self.mean_d = self._of(rows, 1).mean(0)
        self.rotated_Qd = rotation(self.keys(rows), self._of(rows, 1), self.queries_QD)

    def _normal(self, *shape: int) -> NDArray[np.float32]:
        return self.draw.standard_normal(shape, dtype=np.float32)

    def _items(self, n: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Draw the latent factors of items that both models see, and the noise of each model."""
        topics_N = np.minimum(np.searchsorted(self.reached, self.draw.random(n)), TOPICS - 1)
        shared = self.topics[topics_N] + 0.5 * self._normal(n, SHARED) * self.spectrum
        return shared.astype(np.float16), (0.8 * self._normal(n, 2 * OWN)).astype(np.float16)

    def _embedded(self, model: int, shared: NDArray[Any], noise: NDArray[Any]) -> Tensor:
        inner, outer, mean = self.weights[model]
        described = np.concatenate([shared, noise[:, model * OWN : (model + 1) * OWN]], axis=1, dtype=np.float32)
        return F.normalize(torch.from_numpy(np.tanh(described @ inner) @ outer + mean), dim=1)

    def _of(self, rows: Rows, model: int) -> Tensor:
        blocks, places = np.divmod(rows, ROWS)
        parts = [(self.known[block], places[blocks == block]) for block in np.unique(blocks)]
        return torch.cat([self._embedded(model, shared[at], noise[at]) for (shared, noise), at in parts])

    def keys(self, rows: Rows) -> Tensor:
        """Read keys."""
        return self._of(rows, 0)

    def values(self, rows: Rows) -> Tensor:
        """Read values."""
        return F.normalize(self._of(rows, 1) - self.mean_d, dim=1)


class Captions:
    """Captions of photos and dictionary glosses in two latent semantic analyses."""

    def __init__(self, queries: int) -> None:
        texts = {path.stem: gzip.decompress(path.read_bytes()).decode().splitlines() for path in CAPTIONS.glob("*.gz")}
        photos = texts.pop("flickr30k.txt")
        draw = np.random.default_rng(0)
        held = np.sort(draw.permutation(len(photos) // 5)[:PHOTOS])
        asking, asked = [photos[5 * photo] for photo in held], [photos[5 * photo + 1] for photo in held]
        known = [text for photo in np.setdiff1d(np.arange(len(photos) // 5), held) for text in photos[5 * photo : 5 * photo + 5]]
        known += [text for name in sorted(texts) for text in texts[name]]
        self.entries = len(known)
        sample = [known[row] for row in draw.permutation(self.entries)[:60_000]]
        old = self._model(sample, {"sublinear_tf": True, "min_df": 3})
        new = self._model(sample, {"sublinear_tf": True, "min_df": 5, "analyzer": "char_wb", "ngram_range": (3, 5)})
        self.new_ND, self.old_Nd = new(known), old(known)
        self.mean_d = self.old_Nd.mean(0)
        self.queries_QD, self.gallery_Gd = new(asking)[:queries], old(asked)
        self.rotated_Qd = rotation(self.new_ND[:FITTED], self.old_Nd[:FITTED], self.queries_QD)

    @staticmethod
    def _model(sample: list[str], words: dict[str, Any]) -> Any:  # noqa: ANN401
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_pipeline

        model = make_pipeline(TfidfVectorizer(**words, dtype=np.float32), TruncatedSVD(DIM, random_state=0)).fit(sample)

        def embed(texts: list[str]) -> Tensor:
            blocks = [model.transform(texts[start : start + ROWS]) for start in range(0, len(texts), ROWS)]
            return F.normalize(torch.from_numpy(np.concatenate(blocks, dtype=np.float32)) + 1e-6, dim=1)  # some know no word

        return embed

    def keys(self, rows: Rows) -> Tensor:
        """Read keys."""
        return self.new_ND[rows]

    def values(self, rows: Rows) -> Tensor:
        """Read values."""
        return F.normalize(self.old_Nd[rows] - self.mean_d, dim=1)


def blocks_of(entries: int) -> Iterator[Rows]:
    """Yield the numbers of entries in blocks."""
    return (np.arange(start, min(start + ROWS, entries)) for start in range(0, entries, ROWS))


def softmaxed(source: Source) -> dict[str, list[Tensor]]:
    """Return the memory's answer to queries for each sharpness: over all entries, and over the nearest alone."""
    queries, best = source.queries_QD, torch.full((len(source.queries_QD), 1), -torch.inf)
    rows, total = torch.zeros(len(queries), 1, dtype=torch.int64), torch.zeros(len(SHARPNESSES), len(queries), 1).double()
    sums = torch.zeros(len(SHARPNESSES), len(queries), DIM).double()
    for rows_B in blocks_of(source.entries):
        cosines_QB, values_Bd = queries @ source.keys(rows_B).T, source.values(rows_B)
        for place, beta in enumerate(SHARPNESSES):
            weights_QB = (beta * (cosines_QB - 1)).exp()
            weights_QB[weights_QB < 1e-30] = 0  # the slowness of denormal numbers
            total[place] += weights_QB.sum(1, keepdim=True)
            sums[place] += weights_QB @ values_Bd
        joined = torch.cat([best, cosines_QB], 1)
        best, at = joined.topk(min(NEAREST, joined.shape[1]))
        rows = torch.cat([rows, torch.from_numpy(rows_B).expand(len(queries), -1)], 1).gather(1, at)
    values = [source.values(np.sort(near)) for near in rows.numpy()]  # a query's own order of rows is that of their numbers
    cosines = [best[q][rows[q].argsort()] for q in range(len(queries))]
    nearest = [torch.stack([(beta * c).softmax(0) @ v for c, v in zip(cosines, values, strict=True)]) for beta in SHARPNESSES]
    return {"full": list((sums / total).float()), "nearest": nearest}


def recall(source: Source, recalled_Qd: Tensor | float) -> float:
    """Return the percentage of queries that find their own item among the first ten."""
    scores_QG = F.normalize(source.rotated_Qd + SHARE * recalled_Qd, dim=1) @ source.gallery_Gd.T
    own_Q1 = scores_QG.diagonal()[:, None]
    return 100 * float(((scores_QG >= own_Q1).sum(1) <= 10).float().mean())


def build(source: Source, codec: str) -> QueryMemory:
    """Return a memory of all entries, uncompressed for float32 and float16."""
    if codec in ("float32", "float16"):
        memory, rows = QueryMemory(DIM, DIM, source.entries), np.arange(source.entries)
        memory.keys_KD, memory.values_Kd = source.keys(rows), source.values(rows)
        return memory.half() if codec == "float16" else memory
    return IndexedMemory.from_entries(source.entries, source.keys, source.values, LearnedTransform(DIM), codec)


def asked(file: Path, settings: dict[str, Any], queries_QD: Tensor) -> tuple[float, int, float, list[Tensor]]:
    """Open a memory in this fresh process, and search it query by query and then with all at once."""

    def resident() -> int:
        return 1024 * int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line).split()[1])

    QueryMemory(DIM, DIM, 1)(queries_QD[:1], queries_QD[:1])
    faiss.IndexFlatIP(DIM).search(queries_QD[:1].numpy(), 1)  # what libraries set up at first
    before, started = resident(), time.thread_time()
    memory = build_memory(settings, DIM, DIM)
    memory.load_state_dict(load_file(file), assign=True)
    memory.gate = torch.tensor([0.0, 30.0])
    memory.recall(queries_QD[:1])
    opened, taken = time.thread_time() - started, resident() - before
    micros = []
    for query_1D in queries_QD[:TIMED].split(1):
        started = time.thread_time()
        memory(query_1D, query_1D)
        micros.append(1e6 * (time.thread_time() - started))
    recalled = []
    for memory.sharpness in SHARPNESSES:
        recalled.append(memory.recall(queries_QD))
    return opened, taken, float(np.median(micros)), recalled


def measured(source: Source, codecs: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each way of keeping the entries."""
    expected = softmaxed(source)
    found = [recall(source, recalled) for recalled in expected["full"]]

    def compared(recalled: list[Tensor]) -> tuple[str, str]:
        cosines = [float(F.cosine_similarity(*both).mean()) for both in zip(recalled, expected["full"], strict=True)]
        lost = [full - recall(source, one) for full, one in zip(found, recalled, strict=True)]
        return " · ".join(f"{cosine:.3f}" for cosine in cosines), " · ".join(f"{points:+.1f}" for points in lost)

    without, count = recall(source, 0.0), f"{source.entries:,}"
    yield count, "full", "", "", "", "", "", "", f"R@10 {without:.1f} → " + " · ".join(f"{points:.1f}" for points in found)
    yield count, f"nearest {NEAREST}", "", "", "", "", "", *compared(expected["nearest"])
    for codec in codecs:
        with tempfile.TemporaryDirectory() as folder:
            started = time.thread_time()
            memory = build(source, codec)
            seconds, file = time.thread_time() - started, Path(folder) / "memory.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in memory.state_dict().items()}, file)
            settings = memory.settings
            del memory
            opened, taken, micros, recalled = in_fresh_process(asked, file, settings, source.queries_QD)
            sizes = f"{file.stat().st_size / 1e6:,.1f}", f"{taken / 1e6:,.1f}"
        yield count, codec, *sizes, f"{seconds:.1f}", f"{opened:.2f}", f"{micros:,.0f}", *compared(recalled)


def main(
    entries: Annotated[list[int], typer.Option()] = list(SIZES),  # noqa: B006 - typer reads it
    codec: Annotated[list[str], typer.Option()] = list(CODECS),  # noqa: B006
    queries: int = 1000,
    real: bool = False,
) -> None:
    """Print a table of sizes, times and losses."""
    print_ = Console(width=250, highlight=False, markup=False).print
    print_(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for source in [Captions(queries)] if real else (Drawn(count, queries) for count in entries):
        for row in measured(source, codec):
            print_(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    typer.run(main)

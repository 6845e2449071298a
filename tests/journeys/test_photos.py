"""A photo index on real photos: map, evaluate, adopt, search, add, backfill in steps, roll back, compact, export.

Each command is a process of its own, and search quality is checked after each step.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import faiss
import numpy as np
import pytest
import warm
from killing import KILL_AFTER
from PIL import Image

from xcompat.models.embedder import Embedder, load_embedder

SHARED = Path(__file__).resolve().parents[3] / "shared"
PHOTOS, MODELS = SHARED / "data/tiny-imagenet", SHARED / "models"
OLD, NEW = (MODELS / name for name in ("mobilenet_v1_0.25_128", "mobilenet_v1_0.5_160"))
CLASSES, LEARNED, STORED, ASKED = 25, 20, 20, 8
"""Classes, and photos of each to learn from, to store and to search with; eight more photos arrive later."""
RECIPE = """
old: {old}
new: {new}
data:
  images: {{path: learn}}
  queries: {{path: judge}}
evaluation: {{resamples: 200, examples: 0, tsne_pairs: 0}}
allow_worse: true   # 500 photos of 25 classes are too few to be sure
"""

pytestmark = pytest.mark.skipif(not PHOTOS.exists(), reason=f"{PHOTOS} holds the photos, and is not there")


def shards(pattern: str) -> Iterator[tuple[int, bytes]]:
    for path in sorted(PHOTOS.glob(pattern)):
        with tarfile.open(path) as shard:
            found: dict[str, dict[str, bytes]] = {}
            for member in shard:
                name, _, kind = member.name.rpartition(".")
                if kind in ("jpg", "cls"):
                    pieces = found.setdefault(name, {})
                    file = shard.extractfile(member)
                    assert file is not None
                    pieces[kind] = file.read()
                    if len(pieces) == 2:
                        yield int(found.pop(name)["cls"]), pieces["jpg"]


class Desk:
    """A folder with photos, an old faiss index of some, and what is typed there."""

    def __init__(self, folder: Path, classes: int = CLASSES, shares: tuple[int, ...] = (LEARNED, STORED, ASKED)) -> None:
        self.folder = folder
        wanted = set(np.random.default_rng(0).permutation(200)[:classes].tolist())
        counts: dict[int, int] = dict.fromkeys(wanted, 0)
        arrived = 0
        for label, data in shards("train-0000.tar.gz"):
            if label not in wanted:
                continue
            number, start = counts[label], 0
            for kind, share in zip(("learn", "stored", "asked"), shares, strict=True):
                if start <= number < start + share:
                    self._keep(f"{kind}/{label:03d}/{number}.jpg", data)
                start += share
            if number >= start and arrived < 8:
                self._keep(f"arrivals/new-{arrived}-{label:03d}.jpg", data)
                arrived += 1
            counts[label] += 1
        shutil.copytree(folder / "asked", folder / "judge")
        (folder / "recipe.yaml").write_text(RECIPE.format(old=OLD, new=NEW))

    def _keep(self, name: str, data: bytes) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def index(self) -> None:
        """Embed the stored photos with the old model into a faiss index, as a program did before xcompat was there."""
        files = sorted((self.folder / "stored").rglob("*.jpg"))
        embedder = load_embedder(str(OLD))
        images = [Image.open(io.BytesIO(file.read_bytes())).convert("RGB") for file in files]
        rows = [embed(embedder, images[start : start + 64]) for start in range(0, len(images), 64)]
        index = faiss.IndexFlatIP(embedder.dim)
        index.add(np.concatenate(rows))
        faiss.write_index(index, str(self.folder / "photos.faiss"))
        names = [str(file.relative_to(self.folder / "stored")) for file in files]
        (self.folder / "ids.txt").write_text("".join(f"{name}\n" for name in names))

    def type(self, *arguments: object, code: int = 0) -> CompletedProcess[str]:
        done = warm.run("-m", "xcompat", *arguments, folder=self.folder)
        assert done.returncode == code, done.stderr[-2000:]
        return done

    def search(self, gallery: str, model: object, *options: object) -> list[tuple[int, str]]:
        """Search with all photos of ``asked``; return the class of each, and its first hit's id."""
        done = self.type("gallery", "search", gallery, "--queries", "asked", "--model", model, "--json", "--top-k", 5, *options)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(lines) == CLASSES * ASKED
        return [(int(Path(line["query"]).parts[0]), line["hits"][0]["id"]) for line in lines]


def embed(embedder: Embedder, images: list[Image.Image]) -> np.ndarray:
    return embedder.embed({"pixel_values": embedder.processor.images(images)}).numpy()


def label_of(name: str) -> int:
    return int(Path(name).parts[0]) if "/" in name else int(Path(name).stem.split("-")[-1])


def quality(found: list[tuple[int, str]]) -> float:
    return float(np.mean([label == label_of(name) for label, name in found]))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("desk"))
    desk.index()
    desk.type("train", "recipe.yaml", "output_dir=runs/mine")
    return desk


def test_an_index_of_photos_from_map_to_export(desk: Desk) -> None:
    stored = CLASSES * STORED
    desk.type("gallery", "build", "--from-faiss", "photos.faiss", "--ids", "ids.txt", "--model", OLD, "--out", "gallery")
    old, untouched = quality(desk.search("gallery", OLD)), quality(desk.search("gallery", "runs/mine"))
    luck = 2 * np.sqrt(2 * untouched * (1 - untouched) / (CLASSES * ASKED))  # two standard errors of a difference
    assert untouched >= old - luck

    desk.type("gallery", "add", "gallery", "arrivals", "--model", "runs/mine")
    found = desk.search("gallery", "runs/mine")
    assert quality(found) >= untouched - luck, "eight new items take no query from the old ones"
    assert sum("new-" in name for _, name in found) <= 0.1 * len(found)

    done = 0
    for budget in (125, stored):
        desk.type("gallery", "upgrade", "gallery", "--model", "runs/mine", "--backfill", "stored", "--budget", budget)
        done = min(stored, done + budget)
        found = desk.search("gallery", "runs/mine")
        assert quality(found) >= untouched - luck, f"after {done} of {stored}"
    complete = found
    info = desk.type("gallery", "info", "gallery", "--model", "runs/mine").stdout
    assert str(stored + 8) in info.replace(",", "")

    desk.type("gallery", "rollback", "gallery")
    half = desk.search("gallery", "runs/mine")
    assert quality(half) >= untouched - luck and half != complete
    desk.type("gallery", "upgrade", "gallery", "--model", "runs/mine", "--backfill", "stored")
    assert desk.search("gallery", "runs/mine") == complete, "the same photos in the same space find the same"
    desk.type("gallery", "compact", "gallery")
    assert desk.search("gallery", "runs/mine") == complete
    desk.type("gallery", "verify", "gallery")


@pytest.mark.nightly
def test_a_map_is_fitted_from_an_index_and_its_photos(desk: Desk) -> None:
    """No folder of embeddings, no recipe: an index, its photos and the name of a new model."""
    (desk.folder / "short.txt").write_text("000/0.jpg\n")
    command = ("map", "--new", NEW, "--images", "stored", "--old-model", OLD, "--allow-worse")
    arguments = (*command[:3], "--images", "asked", *command[5:])
    said = desk.type(*arguments, "--old", "photos.faiss", "--out", "runs/none", code=2).stderr
    assert "--ids" in said and not (desk.folder / "runs/none").exists()
    said = desk.type(*command, "--old", "photos.faiss", "--ids", "short.txt", "--out", "runs/none", code=2).stderr
    assert "holds 500 vectors, but there are 1 ids" in said and not (desk.folder / "runs/none").exists()

    desk.type(*command, "--old", "photos.faiss", "--ids", "ids.txt", "--out", "runs/from_index")
    desk.type("gallery", "build", "--from-faiss", "photos.faiss", "--ids", "ids.txt", "--model", OLD, "--out", "indexed")
    said = desk.type(*command, "--old", "photos.faiss", "--out", "runs/in_order").stdout
    first = min(path.relative_to(desk.folder / "stored").as_posix() for path in (desk.folder / "stored").rglob("*.jpg"))
    assert f"has no ids: its rows are matched with stored in order, from {first!r}" in " ".join(said.split())
    found = desk.search("indexed", "runs/from_index")
    old = quality(desk.search("indexed", OLD))
    luck = 2 * np.sqrt(2 * old * (1 - old) / (CLASSES * ASKED))
    assert quality(found) >= old - luck

    desk.type(*command, "--old", "indexed", "--out", "runs/from_gallery")
    assert desk.search("indexed", "runs/from_gallery") == found, "the gallery holds the same vectors and ids"


def test_a_backfill_that_loses_quality_is_announced_before_it_embeds(desk: Desk) -> None:
    report = desk.folder / "runs/losing/report.json"
    report.parent.mkdir(parents=True)
    shutil.copytree(desk.folder / "runs/mine/model", desk.folder / "runs/losing/model")
    losses = [{"direction": "image-to-image", "metric": "cmc@1", "before": 0.417, "after": 0.36}]
    report.write_text(json.dumps({"backfill_losses": losses}))
    desk.type("gallery", "build", "--from-faiss", "photos.faiss", "--ids", "ids.txt", "--model", OLD, "--out", "warned")
    for verb in (["upgrade", "warned", "--backfill", "stored", "--dry-run"], ["add", "warned", "arrivals"]):
        done = desk.type("gallery", *verb, "--model", "runs/losing")
        said = " ".join((done.stdout + done.stderr).split())
        assert "loses quality: image to image CMC@1 falls from 41.7 % to 36.0 %" in said


@pytest.mark.nightly
def test_reranked_searches_become_the_backfill(desk: Desk) -> None:
    """Search with the old model and re-rank with the new one, by several processes, one of which is killed; then backfill."""
    desk.type("gallery", "build", "--from-faiss", "photos.faiss", "--ids", "ids.txt", "--model", OLD, "--out", "reranked")
    shutil.copytree(desk.folder / "reranked", desk.folder / "in_one_go")
    old = quality(desk.search("reranked", OLD))

    rerank = ("--rerank", 20, "--images", "stored", "--record-demand")
    search = ("gallery", "search", "reranked", "--queries", "asked", "--model", "runs/mine", "--json", *rerank)
    killed = warm.run("-c", KILL_AFTER, "retrieval.new_embeddings", "NewEmbeddings", "put", 1, *search, folder=desk.folder)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    both = [warm.start("-m", "xcompat", *search, folder=desk.folder) for _ in range(2)]
    done = [each.wait() for each in both]
    assert [each.returncode for each in done] == [0, 0] and done[0].stdout == done[1].stdout
    assert "from the cache" in done[0].stderr + done[1].stderr, "the killed process kept its first block"

    reranked = quality(desk.search("reranked", "runs/mine", *rerank))
    without_map = quality(desk.search("reranked", OLD, *rerank, "--rerank-with", NEW))
    assert min(reranked, without_map) > old

    plan = desk.type("gallery", "upgrade", "reranked", "--model", "runs/mine", "--backfill", "stored", "--dry-run").stdout
    assert "more were embedded by re-ranked searches" in plan
    for gallery in ("reranked", "in_one_go"):
        desk.type("gallery", "upgrade", gallery, "--model", "runs/mine", "--backfill", "stored")
    assert desk.search("reranked", "runs/mine") == desk.search("in_one_go", "runs/mine")

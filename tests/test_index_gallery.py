"""faiss indexes as they are: mapped, searched and shown without a gallery, and adopted, whatever their kind and their own ids."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest
from conftest import Run, refuses, write_photos
from faiss.contrib.ondisk import merge_ondisk
from PIL import Image
from schedule import mostly_nightly
from store_places import unit_vectors

from xcompat import Fingerprint, XcompatError
from xcompat.export import to_faiss
from xcompat.methods import ProcrustesConfig, ProcrustesModel
from xcompat.models import describe_old
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery, faiss_probe, probing
from xcompat.retrieval.index_gallery import find_ids, open_index
from xcompat.retrieval.originals import load_originals
from xcompat.serve.site_loading import load_site

OLD = Fingerprint.from_string("old")
IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_index(path: Path, vectors: np.ndarray, factory: str = "Flat", metric: int = IP, ids: Any = None) -> Path:
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(vectors)
    index.add(vectors) if ids is None else index.add_with_ids(vectors, np.array(ids))
    faiss.write_index(index, str(path))
    return path


def ids_in(gallery: Gallery) -> list[str]:
    (segment,) = gallery.segments
    return segment.ids(np.arange(len(gallery)))


def test_an_index_is_adopted_once_until_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_index(tmp_path / "own.faiss", np.eye(4, dtype=np.float32))
    before = path.read_bytes()
    gallery = open_index(path, OLD)
    assert ids_in(gallery) == ["0", "1", "2", "3"] and path.read_bytes() == before
    assert "does not record its model; its vectors are read as those of old@" in caplog.text
    assert f"hits are named by the ids or row numbers in {path}; set" in caplog.text
    caplog.clear()
    assert tmp_path / "cache" in gallery.path.parents and {file.name for file in tmp_path.iterdir()} == {"cache", "own.faiss"}
    made = (gallery.path / "gallery.json").stat().st_mtime_ns
    again = open_index(path, OLD)
    assert again.path == gallery.path and (again.path / "gallery.json").stat().st_mtime_ns == made
    assert caplog.text == ""
    write_index(path, np.eye(4, dtype=np.float32)[:3])
    changed = open_index(path, OLD)
    assert changed.path == gallery.path and ids_in(changed) == ["0", "1", "2"]
    assert open_index(path, Fingerprint.from_string("other")).path != gallery.path


def test_ids_come_from_a_file_beside_the_index_or_from_the_index(tmp_path: Path) -> None:
    path = write_index(tmp_path / "own.faiss", np.eye(2, dtype=np.float32), "IDMap2,Flat", ids=[70, 10])
    assert ids_in(open_index(path, OLD)) == ["70", "10"]
    (tmp_path / "ids.txt").write_text("a\nb\n")
    assert find_ids(path) == tmp_path / "ids.txt" and ids_in(open_index(path, OLD)) == ["a", "b"]
    (tmp_path / "own.ids.txt").write_text("c\nd\n")
    assert ids_in(open_index(path, OLD)) == ["c", "d"]
    (tmp_path / "elsewhere.txt").write_text("e\nf\n")
    assert ids_in(open_index(path, OLD, tmp_path / "elsewhere.txt")) == ["e", "f"]


def test_ids_become_the_paths_of_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    write_photos(photos / "shoes", 3)
    originals = load_originals(photos)
    paths = sorted(originals.ids)
    eye = np.eye(3, dtype=np.float32)
    rows = write_index(tmp_path / "rows.faiss", eye)
    assert ids_in(open_index(rows, OLD, originals=originals)) == originals.ids, "rows are in the order of the images"
    (tmp_path / "rows.ids.txt").write_text("".join(f"{Path(path).stem}\n" for path in reversed(paths)))
    assert ids_in(open_index(rows, OLD, originals=originals)) == paths[::-1]
    assert "no id of" not in caplog.text
    (tmp_path / "rows.ids.txt").write_text("x\ny\nz\n")
    assert ids_in(open_index(rows, OLD, originals=originals)) == ["x", "y", "z"]
    assert "no id of" in caplog.text
    four = write_index(tmp_path / "four.faiss", np.eye(4, dtype=np.float32))
    refuses("holds 4 vectors without ids, but there are 3 images or texts; use --ids", open_index, four, OLD, originals=originals)


@pytest.fixture
def shop(tmp_path: Path, folder_of: dict[str, str], old_folder: str, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos", 12)
    old = load_embedder(old_folder)
    names = sorted(file.name for file in (tmp_path / "photos").iterdir())
    images = [Image.open(tmp_path / "photos" / name).convert("RGB") for name in names]
    write_index(tmp_path / "own.faiss", old.embed({"pixel_values": old.processor.images(images)}).numpy())
    (tmp_path / "ids.txt").write_text("".join(f"{name}\n" for name in names))
    mapping = ("map", "--old", "own.faiss", "--ids", "ids.txt", "--new", folder_of["clip"], "--images", "photos", "--allow-worse")
    assert "All pairs are images: text queries are not tested" in " ".join(run_xcompat.output(*mapping).split())
    return tmp_path


def test_search_page_and_re_ranking_show_the_hits_of_an_index(shop: Path, old_folder: str, run_xcompat: Run) -> None:
    out = run_xcompat.output("gallery", "search", "own.faiss", "a red shoe", "--model", "runs/map", "--json", "--top-k", 3)
    hits = [hit["id"] for hit in json.loads(out)["hits"]]
    site = load_site("own.faiss", "runs/map", old_folder, [shop / "photos"], allow_changes=False)
    old, new = site.sides
    shelf = site.shelf("own.faiss")
    assert [hit.id for hit in shelf.search(new, "a red shoe", 3, None)] == hits
    assert shelf.image(hits[0], None) is not None and shelf.image("../../etc/passwd", None) is None
    asked = sorted((shop / "photos").iterdir())[4]
    assert shelf.search(old, Image.open(asked), 1, None)[0].id == asked.name, "--old is the model that the map knows by name"
    own = run_xcompat.output(
        "gallery", "search", "own.faiss", f"photos/{asked.name}", "--model", old_folder, "--json", "--top-k", 1
    )
    assert json.loads(own.splitlines()[-1])["hits"][0]["id"] == asked.name, "no map is needed"
    (shop / "more").mkdir()
    for name in sorted(file.name for file in (shop / "photos").iterdir())[:4]:
        (shop / "photos" / name).rename(shop / "more" / name)
    search = ("gallery", "search", "own.faiss", "a red shoe", "--model", "runs/map", "--rerank", 12, "--images", "photos")
    for more, counts in (((), "8 embedded, 4 missing"), (("--images", "more"), "12 embedded")):
        assert f"candidates: {counts}\n" in run_xcompat.output(*search, *more)


MISTAKES = {
    ("serve", "own.faiss", "--images", "photos"): "set the query model with --model",
    ("serve", "own.faiss", "--model", "runs/map", "--ids", "nowhere"): "--ids nowhere does not exist",
    ("serve", "own.faiss", "--model", "runs/map", "--allow-changes"): "--allow-changes needs a gallery; adopt own.faiss first",
    ("serve", "runs/map", "--ids", "ids.txt"): "but runs/map is not a faiss index; remove --ids",
    ("gallery", "search", "photos", "a shoe", "--ids", "ids.txt"): "but photos is not a faiss index; remove --ids",
    ("gallery", "search", "wide.faiss", "a shoe", "--model", "runs/map"): "wide.faiss has 9 dimensions, but",
    ("gallery", "search", "damaged.faiss", "a shoe", "--model", "runs/map"): "damaged.faiss",
}


def test_mistakes_are_one_line(shop: Path, folder_of: dict[str, str], run_xcompat: Run) -> None:
    write_index(shop / "wide.faiss", np.random.default_rng(0).standard_normal((12, 9)).astype(np.float32))
    (shop / "damaged.faiss").write_bytes((shop / "own.faiss").read_bytes()[:-9])
    unmapped = ("gallery", "search", "wide.faiss", "a shoe", "--model", folder_of["clip"])
    for words, said in (MISTAKES | {unmapped: "to search it with a new model, fit a map with `xcompat map`"}).items():
        code, _, err = run_xcompat(*words)
        assert (code, len(err.splitlines()[-1:])) == (2, 1) and said in err.splitlines()[-1], (words, err)


def test_vectors_of_an_index_are_migrated(shop: Path, folder_of: dict[str, str], old_folder: str, run_xcompat: Run) -> None:
    lancedb = pytest.importorskip("lancedb")
    index = faiss.read_index("own.faiss")
    stored = index.reconstruct_n(0, index.ntotal)
    columns = {"id": range(len(stored)), "vector": pa.FixedSizeListArray.from_arrays(stored.ravel(), stored.shape[1])}
    lancedb.connect(shop / "database").create_table("items", pa.table(columns))
    uri = f"lancedb://{shop}/database?table=items"
    plan = ("migrate", "plan", uri, "--from", "own", "--model")
    assert "fit a map of stored vectors with `xcompat map --direction old_to_new`" in run_xcompat.refusal(*plan, "runs/map")
    mapping = ("map", "--old", "own.faiss", "--ids", "ids.txt", "--new", folder_of["clip"], "--images", "photos", "--allow-worse")
    assert "different --direction" in run_xcompat.refusal(*mapping, "--direction", "old_to_new")
    out = run_xcompat.output(*mapping, "--direction", "old_to_new", "--out", "runs/forward")
    assert "xcompat migrate plan URI --from OLD_MODEL --model runs/forward" in out
    assert "not validated" in run_xcompat.output(*plan, "runs/forward")
    searching = ("gallery", "search", uri, "photos/10.png", "--json", "--model")
    for verb, *more in (("start", "--from", "own"), ("switch",)):
        run_xcompat.output("migrate", verb, uri, "--model", "runs/forward", *more)
    hits = [json.loads(run_xcompat.output(*searching, model))["hits"] for model in (folder_of["clip"], "runs/forward")]
    assert [hit["id"] for hit in hits[0]] == [hit["id"] for hit in hits[1]], "queries of the new model stay as they are"
    run_xcompat.output("migrate", "finish", uri, "--yes")
    run_xcompat.output(*searching, folder_of["clip"])
    run_xcompat.output("gallery", "adopt", "own.faiss", "--ids", "ids.txt", "--model", old_folder, "--out", "adopted")
    run_xcompat.output("gallery", "alias", "adopted", "own")
    run_xcompat.output("gallery", "upgrade", "adopted", "--model", "runs/forward")
    out = run_xcompat.output("gallery", "search", "adopted", "photos/10.png", "--model", folder_of["clip"], "--json")
    assert json.loads(out)["hits"]
    remembering = (*mapping, "--direction", "old_to_new", "--out", "runs/x", "--remember-items")
    assert "--remember-items works with maps of queries" in run_xcompat.refusal(*remembering)


def test_images_are_embedded_into_a_folder(shop: Path, folder_of: dict[str, str], run_xcompat: Run) -> None:
    (shop / "photos" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    embedding = ("embed", "photos", "--model", folder_of["clip"], "--out", "embeddings/new")
    assert "12 embeddings of 16 dimensions, 1 cannot be read" in run_xcompat.output(*embedding)
    made = shop / "embeddings" / "new"
    names, embeds_ND = (made / "image_ids.txt").read_text().split(), np.load(made / "image_embeds.npy")
    assert embeds_ND.dtype == np.float16
    assert names == sorted(file.name for file in (shop / "photos").iterdir() if file.stem != "bad")
    new = load_embedder(folder_of["clip"])
    images = [Image.open(shop / "photos" / name).convert("RGB") for name in names]
    np.testing.assert_allclose(embeds_ND, new.embed({"pixel_values": new.processor.images(images)}), atol=1e-3)
    assert [path.name for path in (shop / "embeddings").iterdir()] == ["new"], "no cache is left"
    assert run_xcompat(*embedding)[0] == 0, "its own output is replaced"
    mapping = ("map", "--old", "own.faiss", "--ids", "ids.txt", "--new", made, "--out", "runs/two", "--allow-worse")
    run_xcompat.output(*mapping)
    assert "--column works with tables, but photos is a folder of images" in run_xcompat.refusal(*embedding, "--column", "x")
    assert "photos" in run_xcompat.refusal(*embedding[:-1], "photos") and (shop / "photos" / names[0]).exists()


def test_the_demo_ends_with_a_search_that_works(run_xcompat: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = run_xcompat.output("demo")
    shares = {row: float(re.search(rf"{row} +([\d.]+) \(", out)[1]) for row in ("old/old", "new/old", "new/new")}
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \**(\w+/\w+)\** \| ([\d.]+) \(.* index \|$", readme, re.MULTILINE)
    stated = {row: float(value) for row, value in table}
    assert shares == pytest.approx(stated, abs=0.3), "the README's table"
    search = next(line for line in out.splitlines() if line.startswith("xcompat gallery search"))
    out = run_xcompat.output(*search.split()[1:])
    found = [json.loads(line) for line in out.splitlines()]
    share = np.mean([each["query"] == each["hits"][0]["id"] for each in found])
    assert share == pytest.approx(shares["new/old"] / 100, abs=0.005)
    assert "demo exists; choose another folder with --out, or delete it" in run_xcompat.refusal("demo")


DIM, ROWS = 16, 600


def unit(count: int, seed: int) -> np.ndarray:
    return unit_vectors(count, DIM, seed)


def own_ids(kind: str) -> np.ndarray:
    random = np.random.default_rng(7)
    return {
        "ascending": np.arange(ROWS) * 7 + 10**12,
        "shuffled": random.permutation(10**6)[:ROWS] * 10**7,
        "permuted": random.permutation(ROWS),
        "negative": -2 - np.arange(ROWS) * 10**11,
        "mixed": (np.arange(ROWS) - ROWS // 2) * 3 + 1,
    }[kind].astype(np.int64)


def train_index(factory: str, metric: int = IP) -> Any:
    index = faiss.index_factory(DIM, factory, metric)
    if "OPQ" in factory:  # its rotation is learned in 50 rounds, which take seconds
        rotation = index.index if "IDMap" in factory else index
        faiss.downcast_VectorTransform(faiss.downcast_index(rotation).chain.at(0)).niter = 3
    index.train(unit(2000, 99))
    return index


def make_index(factory: str, metric: int = IP, ids: np.ndarray | None = None) -> Any:
    index = train_index(factory, metric)
    index.add(unit(ROWS, 0)) if ids is None else index.add_with_ids(unit(ROWS, 0), ids)
    return index


def adopt(index: Any, folder: Path, ids: list[str] | None = None) -> Gallery:
    faiss.write_index(index, str(folder / "i.faiss"))
    return Gallery.from_faiss(folder / "g", folder / "i.faiss", ids, OLD)


def search_all(index: Any, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.nprobe = ivf.nlist
    return index.search(queries, k)


def full_effort(factory: str) -> str | None:
    lists = re.search(r"IVF(\d+)", factory)
    return f"nprobe={lists[1]}" if lists else "efSearch=600" if "HNSW" in factory else None


@pytest.mark.parametrize("kind", mostly_nightly(["ascending", "shuffled", "permuted", "negative", "mixed"], "shuffled".__eq__))
@pytest.mark.parametrize(
    "factory", ["IVF8,Flat", "IDMap,Flat", "IDMap2,IVF8,Flat", "IDMap,HNSW16", "RR16,IDMap,Flat", "OPQ8,IVF8,SQ8"]
)
def test_own_ids_are_the_items_ids(factory: str, kind: str, tmp_path: Path) -> None:
    ids = own_ids(kind)
    index = make_index(factory, ids=ids)
    # an inverted file does not show whether ids 0 to N - 1 are its own
    gallery = adopt(index, tmp_path, [str(number) for number in range(ROWS)] if kind == "permuted" else None)
    segment = gallery.segments[0]
    assert sorted(segment.ids(np.arange(ROWS))) == sorted(map(str, ids.tolist()))
    row_of = {name: row for row, name in enumerate(map(str, ids.tolist()))}
    rows = np.array([row_of[name] for name in segment.ids(np.arange(ROWS))])
    np.testing.assert_allclose(segment.vectors(np.arange(ROWS)), unit(ROWS, 0)[rows], atol=0.1)
    queries, scores = unit(20, 5), unit(20, 5) @ unit(ROWS, 0).T
    hits = gallery.search(queries, OLD, 10, parameters=full_effort(factory))
    naive = [[str(ids[row]) for row in each] for each in np.argsort(-scores, axis=1)[:, :10].tolist()]
    if "SQ8" in factory:
        _, labels = search_all(index, queries, 10)
        naive = [[str(label) for label in each] for each in labels.tolist()]
    assert [[hit.id for hit in each] for each in hits] == naive
    gone = [naive[0][0], naive[3][2], naive[4][0]]
    gallery.remove(gone)
    gallery.commit("remove")
    left = [[name for name in each if name not in gone] for each in naive]
    hits = Gallery.open(gallery.path).search(queries, OLD, 10, parameters=full_effort(factory))
    assert [[hit.id for hit in each][: len(short)] for each, short in zip(hits, left, strict=True)] == left
    gallery.compact()
    hits = gallery.search(queries, OLD, 1)
    assert gallery.damage() == [] and len(gallery) == ROWS - 3
    assert "SQ8" in factory or [each[0].id for each in hits] == [each[0] for each in left]


@pytest.mark.parametrize("gone", [np.arange(30), np.arange(5, ROWS, 11), np.arange(ROWS - 20, ROWS)])
@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "IDMap,IVF8,Flat", "IDMap2,Flat"])
def test_an_index_after_remove_ids_is_adopted(factory: str, gone: np.ndarray, tmp_path: Path) -> None:
    ids = np.arange(ROWS) if factory.startswith("IDMap") else None
    index = make_index(factory, ids=ids)
    index.remove_ids(gone)
    kept = np.setdiff1d(np.arange(ROWS), gone)
    gallery = adopt(index, tmp_path, [f"item {row}" for row in kept.tolist()])
    scores = unit(20, 5) @ unit(ROWS, 0)[kept].T
    hits = gallery.search(unit(20, 5), OLD, 5, parameters=full_effort(factory))
    naive = [[f"item {kept[row]}" for row in each] for each in np.argsort(-scores, axis=1)[:, :5].tolist()]
    assert [[hit.id for hit in each] for each in hits] == naive


def test_ids_can_be_given_for_own_ids_in_any_clear_way(tmp_path: Path) -> None:
    def ids_of(number: int, index: Any, ids: list[str]) -> dict[str, int]:
        (tmp_path / str(number)).mkdir()
        segment = adopt(index, tmp_path / str(number), ids).segments[0]
        nearest = np.argmax(segment.vectors(np.arange(len(segment))) @ unit(ROWS, 0).T, axis=1)
        return dict(zip(segment.ids(np.arange(len(segment))), nearest.tolist(), strict=True))

    shuffled = own_ids("shuffled")
    wanted = {str(label): row for row, label in enumerate(shuffled.tolist())}
    assert ids_of(0, make_index("IVF8,Flat", ids=shuffled), sorted(wanted)) == wanted
    names = [f"item {row}" for row in range(ROWS)]
    ascending = {name: row for row, name in enumerate(names)}
    assert ids_of(1, make_index("IVF8,Flat", ids=own_ids("ascending")), names) == ascending
    permuted = own_ids("permuted")
    by_line = {names[label]: row for row, label in enumerate(permuted.tolist())}
    assert ids_of(2, make_index("IVF8,Flat", ids=permuted), names) == by_line
    removed = make_index("IVF8,Flat")
    removed.remove_ids(np.arange(0, ROWS, 4))
    assert ids_of(3, removed, names) == {name: row for name, row in ascending.items() if row % 4}
    assert ids_of(4, make_index("IDMap,Flat", ids=shuffled), names) == ascending
    refuses("the lines of --ids cannot be matched to them; remove --ids", ids_of, 5, make_index("IVF8,Flat", ids=shuffled), names)
    refuses("'item 0' is given twice", ids_of, 6, make_index("Flat"), [names[0], *names[:-1]])


DEDUP = r"\(IndexIVFFlatDedup\).* returns no vectors .* build .* 'IVF8,Flat'"
REFUSED: list[tuple[Callable[[], Any], bool, str]] = [  # an index, whether ids are given, and what is said
    (lambda: make_index("IVF8,Flat", ids=np.arange(ROWS) // 2), False, "gives 300 ids to more than one vector, e.g. 0"),
    (lambda: make_index("IDMap,Flat", ids=np.arange(ROWS) // 2), False, "gives several vectors the same id; use --ids"),
    (lambda: make_index("IVF8,Flat", ids=np.arange(ROWS) - 1), False, "gives a vector the id -1"),
    (lambda: make_index("IVF8,Flat"), False, "holds no ids; use --ids with a text file with an id per line"),
    (lambda: make_index("Flat"), False, "holds no ids; use --ids"),
    (lambda: make_index("IVF8,FlatDedup"), True, DEDUP),
    (lambda: make_index("RR16,IVF8,FlatDedup", L2), True, DEDUP),
    (lambda: make_index("IDMap,IVF8,FlatDedup", ids=own_ids("ascending")), True, DEDUP),
    (lambda: make_index("ITQ16,LSH", L2), True, "this index type does not store them"),
    (lambda: train_index("MinMax,SQ8", L2), True, "holds no vectors"),
]


@pytest.mark.parametrize(("make", "named", "message"), REFUSED)
def test_an_index_of_unclear_ids_is_refused(make: Callable[[], Any], named: bool, message: str, tmp_path: Path) -> None:
    refuses(message, adopt, make(), tmp_path, [str(row) for row in range(ROWS)] if named else None)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("metric", [IP, L2])
@pytest.mark.parametrize("factory", ["IVF8,PQ8x4fs", "IDMap,OPQ8,IVF8,PQ8x4fs", "IVF8,PQ8x4fs,RFlat", "IVF300,PQ4x4fs"])
def test_fast_scan_codes_are_searched_and_read(factory: str, metric: int, tmp_path: Path) -> None:
    ids = own_ids("ascending")
    index = make_index(factory, metric, ids if "IDMap" in factory else None)
    gallery = adopt(index, tmp_path, [str(name) for name in ids.tolist()])
    segment, queries = gallery.segments[0], unit(20, 5)
    vectors = segment.vectors(np.arange(ROWS))
    cosines = (vectors * unit(ROWS, 0)).sum(axis=1) / np.linalg.norm(vectors, axis=1)
    assert np.median(cosines) > (0.999 if "RFlat" in factory else 0.8)
    rounding = 1e-6 if "OPQ" in factory else 0  # BLAS turns few rows and many with another order of sums on some processors
    np.testing.assert_allclose(segment.vectors(np.array([7, 3, 7, 590])), vectors[[7, 3, 7, 590]], rtol=0, atol=rounding)
    hits = gallery.search(queries, OLD, 10, parameters=full_effort(factory))
    scores, _ = search_all(index, queries, 10)
    found = np.array([[hit.score for hit in each] for each in hits])
    np.testing.assert_allclose(found, -scores if metric == L2 else scores, rtol=1e-4, atol=1e-5)
    decoded = queries @ vectors.T if metric == IP else -((queries[:, None] - vectors[None]) ** 2).sum(-1)
    best = np.sort(decoded, axis=1)[:, -1]
    np.testing.assert_allclose(found[:, 0], best, atol=0.1)
    gallery.remove([hits[0][0].id])
    gallery.commit("remove")
    assert hits[0][0].id not in [hit.id for hit in gallery.search(queries[:1], OLD, 10)[0]]


@pytest.mark.parametrize("moved", [False, True])
def test_lists_on_disk_are_found_beside_their_index(moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, names = tmp_path / "made", [f"item {row}" for row in range(ROWS)]
    folder.mkdir()
    faiss.write_index(train_index("IVF8,Flat"), str(folder / "trained"))
    part, index = (faiss.read_index(str(folder / "trained")) for _ in range(2))
    part.add(unit(ROWS, 0))
    faiss.write_index(part, str(folder / "part"))
    merge_ondisk(index, [str(folder / "part")], str(folder / "lists.ivfdata"))
    faiss.write_index(index, str(folder / "i.faiss"))
    if moved:
        folder = folder.rename(tmp_path / "moved")
    monkeypatch.chdir(folder)
    gallery = Gallery.from_faiss(tmp_path / "g", "i.faiss", names, OLD)
    monkeypatch.chdir(tmp_path)
    hits = Gallery.open(gallery.path).search(unit(ROWS, 0)[:20], OLD, 1, parameters="nprobe=8")
    assert [each[0].id for each in hits] == names[:20]
    (folder / "lists.ivfdata").unlink()
    refuses(r"lists\.ivfdata", Gallery.from_faiss, tmp_path / "other", folder / "i.faiss", names, OLD)


@pytest.mark.parametrize("kind", ["IndexBinaryFlat", "IndexBinaryHNSW"])
def test_a_binary_index_is_named(kind: str, tmp_path: Path) -> None:
    index = faiss.IndexBinaryHNSW(DIM, 8) if "HNSW" in kind else faiss.IndexBinaryFlat(DIM)
    index.add(np.packbits(unit(ROWS, 0) > 0, axis=1))
    faiss.write_index_binary(index, str(tmp_path / "i.faiss"))
    with pytest.raises(XcompatError, match=rf"is a binary index \({kind}\), which compares bits"):
        Gallery.from_faiss(tmp_path / "g", tmp_path / "i.faiss", None, OLD)


@pytest.mark.parametrize("factory", ["LSH", "LSHrt", "IVF8,SQ8,RFlat", "IDMap,IVF8,SQ8,RFlat", "NSG16,Flat"])
def test_rare_kinds_of_index_are_adopted(factory: str, tmp_path: Path) -> None:
    ids = own_ids("shuffled")
    names = [str(name) for name in ids.tolist()]
    gallery = adopt(make_index(factory, L2, ids if "IDMap" in factory else None), tmp_path, names)
    hits = gallery.search(unit(20, 0), OLD, 1, parameters=full_effort(factory))
    assert np.mean([each[0].id == name for each, name in zip(hits, names, strict=False)]) > 0.6
    gallery.remove(names[:1])
    gallery.commit()
    assert names[0] not in [hit.id for hit in gallery.search(unit(1, 0), OLD, ROWS)[0]]


@pytest.mark.parametrize("direct_map", [faiss.DirectMap.Array, faiss.DirectMap.Hashtable])
@pytest.mark.parametrize("own", [False, True])
def test_an_index_with_a_direct_map_is_adopted(own: bool, direct_map: int, tmp_path: Path) -> None:
    index = train_index("IVF8,Flat")
    index.set_direct_map_type(direct_map)
    ids = own_ids("ascending") if own and direct_map == faiss.DirectMap.Hashtable else None  # an array takes no ids
    index.add(unit(ROWS, 0)) if ids is None else index.add_with_ids(unit(ROWS, 0), ids)
    if direct_map == faiss.DirectMap.Hashtable:
        index.remove_ids(index.ntotal - 1 + np.arange(1) if ids is None else ids[-1:])
    rows = np.arange(index.ntotal)
    segment = adopt(index, tmp_path, [str(row) for row in rows]).segments[0]
    np.testing.assert_array_equal(segment.vectors(rows), unit(ROWS, 0)[rows])


@pytest.mark.parametrize("factory", ["IVF8,Flat", "IDMap,Flat", "IDMap,IVF8,Flat"])
def test_vectors_added_under_own_ids_are_taken_over(factory: str, tmp_path: Path) -> None:
    ids = own_ids("shuffled")
    index = make_index(factory, ids=ids)
    gallery = adopt(index, tmp_path)
    gallery.remove([str(ids[3])])
    gallery.commit("remove")
    index.add_with_ids(unit(5, 11), np.arange(5) + 17)
    faiss.write_index(index, str(tmp_path / "i.faiss"))
    refuses("holds 605 vectors, but the gallery knows 600: ", Gallery.open(gallery.path).search, unit(1, 0), OLD)
    gallery.resync()
    assert len(gallery) == ROWS + 4
    effort = full_effort(factory)
    assert [hits[0].id for hits in gallery.search(unit(5, 11), OLD, 1, parameters=effort)] == ["17", "18", "19", "20", "21"]
    assert str(ids[3]) not in [hit.id for hit in gallery.search(unit(4, 0)[3:], OLD, 10, parameters=effort)[0]]
    gallery.rollback(0)
    assert len(gallery) == ROWS
    assert [hits[0].id for hits in gallery.search(unit(4, 0), OLD, 1, parameters=effort)] == [str(name) for name in ids[:4]]
    assert gallery.search(unit(5, 11), OLD, 1, parameters=effort)[0][0].id != "17"


FACTORIES = ["Flat", "HNSW8", "IVF4,Flat", "IVF4,PQ4x4", "SQ8", "IDMap,Flat", "IDMap2,HNSW8", "OPQ4_8,IVF4,PQ4x4", "NSG8"]
CRASHING = ["IVF4,PQ4x4fs", "OPQ4,IVF4,PQ4x4fs"]  # where faiss reconstructs them


def write_made(path: Path, factory: str = "HNSW8") -> Path:
    index = make_index(factory, ids=np.arange(ROWS) * 3 if factory.startswith("IDMap") else None)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("factory", [*FACTORIES, *CRASHING])
def test_a_whole_index_is_left_alone(factory: str, tmp_path: Path) -> None:
    path = str(write_made(tmp_path / "index", factory))
    assert faiss_probe.check_index(path, vectors=False) == faiss_probe.check_index(path, vectors=True) == ""


@pytest.mark.parametrize("factory", ["HNSW8", "IVF4,PQ4x4"])
def test_a_link_or_a_length_that_leads_nowhere_is_found(factory: str, tmp_path: Path) -> None:
    whole = write_made(tmp_path / "index", factory).read_bytes()
    places = range(40, len(whole) - 8, len(whole) // 60)
    assert any(_is_refused(tmp_path / "index", whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :]) for at in places)


def _is_refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(1 if faiss_probe.check_index(str(path), vectors=True) else 0)
    return os.waitpid(pid, 0)[1] != 0


@pytest.mark.usefixtures("another_process")
def test_another_process_reads_it_and_what_it_finds_is_one_line(tmp_path: Path) -> None:
    path = write_made(tmp_path / "index")
    probing.require_readable(path)
    path.write_bytes(path.read_bytes()[:-100])
    refuses(f"{path} is not a readable faiss index: .*; write it again", probing.require_readable, path)


@pytest.mark.usefixtures("another_process")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"import os, signal; os.kill(os.getpid(), {signal.SIGSEGV.value})", r"faiss crashed on it \(-11\)"),
        ("import sys; sys.stderr.write('no\\nreason\\n'); sys.exit(3)", "reason"),
        ("while True: pass", "faiss did not finish within 1 s"),
    ],
)
def test_broken_processes_are_refusals(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(probing, "_SCRIPT", tmp_path / "script.py")
    monkeypatch.setattr(probing, "SECONDS", 1.0)
    path = write_made(tmp_path / "index")
    refuses(message, probing.require_readable, path)
    refuses(message, Gallery.from_faiss, tmp_path / "gallery", path, [f"item {row}" for row in range(ROWS)], OLD)
    assert not (tmp_path / "gallery").exists()
    model = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, DIM), embedding_dim=DIM))
    refuses(message, to_faiss, model, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""A faiss index without a gallery: map it, search it, open it on the page, and adopt it again after it has changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pytest
from conftest import Run, write_photos
from PIL import Image

from xcompat import Fingerprint, XcompatError
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.index_gallery import find_ids, open_index
from xcompat.retrieval.originals import load_originals

pytest.importorskip("starlette")

from xcompat.serve.site_loading import load_site

OLD = Fingerprint.from_string("old")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_index(path: Path, vectors: np.ndarray, ids: list[int] | None = None) -> Path:
    index = faiss.IndexFlatIP(vectors.shape[1])
    if ids is not None:
        index = faiss.IndexIDMap2(index)
        index.add_with_ids(vectors, np.array(ids))
    else:
        index.add(vectors)
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
    path = write_index(tmp_path / "own.faiss", np.eye(2, dtype=np.float32), ids=[70, 10])
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
    with pytest.raises(XcompatError, match="holds 4 vectors without ids, but there are 3 images or texts; use --ids"):
        open_index(four, OLD, originals=originals)


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
    (shop / "more").mkdir()
    for name in sorted(file.name for file in (shop / "photos").iterdir())[:4]:
        (shop / "photos" / name).rename(shop / "more" / name)
    search = ("gallery", "search", "own.faiss", "a red shoe", "--model", "runs/map", "--rerank", 12, "--originals", "photos")
    for more, counts in (((), "8 embedded, 4 missing"), (("--originals", "more"), "12 embedded")):
        code, out, err = run_xcompat(*search, *more)
        assert code == 0 and f"candidates: {counts}\n" in out, (out, err)


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


def test_the_vectors_of_an_index_migrate_with_a_map_of_galleries(
    shop: Path, folder_of: dict[str, str], old_folder: str, run_xcompat: Run
) -> None:
    lancedb = pytest.importorskip("lancedb")
    index = faiss.read_index("own.faiss")
    stored = index.reconstruct_n(0, index.ntotal)
    columns = {"id": range(len(stored)), "vector": pa.FixedSizeListArray.from_arrays(stored.ravel(), stored.shape[1])}
    lancedb.connect(shop / "database").create_table("items", pa.table(columns))
    uri = f"lancedb://{shop}/database?table=items"
    code, _, err = run_xcompat("migrate", "plan", uri, "--from", "own", "--model", "runs/map")
    assert code == 2 and "fit a map of the stored vectors with `xcompat map --direction old_to_new`" in err
    mapping = ("map", "--old", "own.faiss", "--ids", "ids.txt", "--new", folder_of["clip"], "--images", "photos", "--allow-worse")
    assert "different --direction" in run_xcompat.refusal(*mapping, "--direction", "old_to_new")
    code, out, err = run_xcompat(*mapping, "--direction", "old_to_new", "--out", "runs/forward")
    assert code == 0 and "xcompat migrate plan URI --from OLD_MODEL --model runs/forward" in out, err
    code, out, err = run_xcompat("migrate", "plan", uri, "--from", "own", "--model", "runs/forward")
    assert code == 0 and "not validated" in out, err
    searching = ("gallery", "search", uri, "photos/10.png", "--json", "--model")
    for step in (("start", "--from", "own"), ("switch",)):
        run_xcompat.output("migrate", step[0], uri, "--model", "runs/forward", *step[1:])
    answers = [run_xcompat(*searching, model) for model in (folder_of["clip"], "runs/forward")]
    hits = [json.loads(out)["hits"] for _, out, _ in answers]
    assert [hit["id"] for hit in hits[0]] == [hit["id"] for hit in hits[1]], "queries of the new model stay as they are"
    run_xcompat.output("migrate", "finish", uri, "--yes")
    run_xcompat.output(*searching, folder_of["clip"])
    run_xcompat.output("gallery", "adopt", "own.faiss", "--ids", "ids.txt", "--model", old_folder, "--out", "adopted")
    run_xcompat.output("gallery", "alias", "adopted", "own")
    run_xcompat.output("gallery", "upgrade", "adopted", "--model", "runs/forward")
    code, out, err = run_xcompat("gallery", "search", "adopted", "photos/10.png", "--model", folder_of["clip"], "--json")
    assert code == 0 and json.loads(out)["hits"], err
    code, _, err = run_xcompat(*mapping, "--direction", "old_to_new", "--out", "runs/x", "--remember-items")
    assert code == 2 and "--remember-items works with maps of queries" in err


def test_images_are_embedded_into_a_folder(shop: Path, folder_of: dict[str, str], run_xcompat: Run) -> None:
    (shop / "photos" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    embedding = ("embed", "photos", "--model", folder_of["clip"], "--out", "embeddings/new")
    code, out, err = run_xcompat(*embedding)
    assert code == 0 and "12 embeddings of 16 dimensions, 1 cannot be read" in out, err
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
    code, _, err = run_xcompat(*embedding[:-1], "photos")
    assert code == 2 and "photos" in err and (shop / "photos" / names[0]).exists()


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

"""``xcompat gallery search``: one query or many, for people and for programs; and two processes fill a gallery as one does."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import warm
from conftest import Run, refuses, store, write_photos
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from schedule import mostly_nightly
from store_places import OLD, solve_map, unit_vectors
from test_index_gallery import write_index

import xcompat.stores
from xcompat import Fingerprint
from xcompat.core.progress import console
from xcompat.methods import RidgeModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, embedded_queries, hit_output, searching
from xcompat.retrieval.ingestion import ingest
from xcompat.retrieval.items import check_items
from xcompat.retrieval.manifest import VersionRecord
from xcompat.retrieval.originals import load_originals

LONG = "a_folder_with_a_long_name_as_cameras_and_data_sets_have_them"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return twelve images below a folder with a long name, and what file managers leave among them."""
    folder = tmp_path_factory.mktemp("search") / "photos"
    folder.mkdir()
    write_photos(folder / LONG, 12)
    for hidden in (f"{LONG}/._0.png", "._x.jpg", ".DS_Store", "Thumbs.db", "__MACOSX/0.png", ".thumbnails/0.png"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_bytes(b"Mac OS X")
    return folder


@pytest.fixture(scope="module")
def gallery(photos: Path, old: Embedder) -> Path:
    folder = photos.with_name("gallery")
    assert ingest(Gallery.create(folder, old), load_originals(photos), old)[:3] == (12, 0, 0)
    return folder


@pytest.fixture
def mixed(photos: Path, tmp_path: Path, old: Embedder, new: Embedder) -> Path:
    made = Gallery.create(tmp_path / "mixed", old)
    ingest(made, load_originals(photos), old)
    ingest(made, load_originals(photos), new, replace=True, rows=np.arange(6))
    return made.path


def test_json_is_all_that_stdout_holds(run: Run, gallery: Path, photos: Path, old_folder: str) -> None:
    code, out, err = run("search", gallery, photos / LONG / "07.png", "--model", old_folder, "--top-k", 3, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert out.count("\n") == 1 and found["query"] == str(photos / LONG / "07.png") and found["text"] is None
    assert len(found["hits"]) == 3 and found["hits"][0]["id"] == f"{LONG}/07.png"
    assert found["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    [version] = json.loads(run.output("info", gallery, "--json"))["versions"]
    model = load_embedder(old_folder).fingerprint
    assert version["name"] == model.name == old_folder and version["fingerprint"] == model.digest
    assert found["hits"][0]["version"] == version["version"] == f"{Path(old_folder).name}@{model.digest[:12]}"
    assert found["confidence"] is None and {hit["standing"] for hit in found["hits"]} == {None}
    code, out, err = run("search", gallery, "dog " * 100, "--model", old_folder, "--json")
    assert code == 0 and json.loads(out)["hits"] and "query truncated to 16 tokens" in err
    assert console.stderr is False, "what comes next is for people again"


def test_many_texts_find_what_each_finds_alone(run: Run, gallery: Path, tmp_path: Path, old_folder: str) -> None:
    asked = ["a red shoe", 'two dogs, "quoted"', "schöne Schuhe"]
    (tmp_path / "asked.txt").write_text("\n".join(asked) + "\n", encoding="utf-8")
    rows = [json.dumps({"id": f"q{number}", "text": text}) for number, text in enumerate(asked)]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    alone = [json.loads(run("search", gallery, text, "--model", old_folder, "--json")[1])["hits"] for text in asked]
    for source, names in (("asked.txt", ["0", "1", "2"]), ("asked.jsonl", ["q0", "q1", "q2"])):
        code, out, _ = run("search", gallery, "--queries", tmp_path / source, "--model", old_folder, "--json")
        found = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [each["query"] for each in found] == names and [each["text"] for each in found] == asked
        for each, hits in zip(found, alone, strict=True):
            assert [hit["id"] for hit in each["hits"]] == [hit["id"] for hit in hits]
            np.testing.assert_allclose([hit["score"] for hit in each["hits"]], [hit["score"] for hit in hits], atol=1e-5)
    code, out, _ = run("search", gallery, "--queries", tmp_path / "asked.txt", "--model", old_folder, "--csv", "--top-k", 4)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and tuple(rows[0]) == hit_output.COLUMNS and len(rows) == 12
    assert [row["text"] for row in rows[::4]] == asked and [row["rank"] for row in rows[:4]] == ["1", "2", "3", "4"]
    assert [row["id"] for row in rows[4:8]] == [hit["id"] for hit in alone[1][:4]]
    code, out, _ = run("search", gallery, "--queries", tmp_path / "asked.txt", "--model", old_folder)
    assert code == 0 and all(f"▸ {text}" in out for text in asked) and out.count("━━") >= 3


@pytest.mark.parametrize("form", ["folder", "list", "npy"])
def test_many_images_and_embeddings_find_themselves(
    form: str, run: Run, gallery: Path, photos: Path, tmp_path: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_queries, "ROWS_AT_ONCE", 5)
    names = [f"{LONG}/{number:02}.png" for number in range(12)]
    source, expected = photos, names
    if form == "list":
        source = tmp_path / "list.txt"
        expected = [str(photos / name) for name in names]
        source.write_text("\n".join(expected))
    elif form == "npy":
        source, expected = tmp_path / "asked.npy", [str(row) for row in range(12)]
        originals, embedder = load_originals(photos), load_embedder(old_folder)
        assert list(originals.ids) == names
        np.save(source, np.concatenate([embeds for _, embeds in originals.embed(embedder, np.arange(12))]).astype(np.float16))
    code, out, err = run("search", gallery, "--queries", source, "--model", old_folder, "--top-k", 1, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "") and [each["query"] for each in found] == expected
    assert [each["hits"][0]["id"] for each in found] == names


def test_ids_are_whole_and_no_column_is_empty(run: Run, gallery: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("search", gallery, "a dog", "--model", old_folder)[1]
    assert out.count(LONG) == 10 and "metadata" not in out and "standing" not in out and "version" in out
    monkeypatch.setattr(console, "_width", 60)  # a narrow terminal folds, and leaves nothing out
    out = run("search", gallery, "a dog", "--model", old_folder)[1]
    assert "…" not in out and max(map(len, out.splitlines())) <= 60
    cells = [[cell.strip() for cell in line.split("│")[3:4]] for line in out.splitlines() if "│" in line]
    assert "".join(cell for (cell,) in cells).count(LONG) == 10


def test_hits_of_models_show_a_standing(run: Run, mixed: Path, compatible_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "FEWEST_SAMPLED", 6)  # each model's six items speak for themselves, as 64 do
    code, out, _ = run("search", mixed, "a dog", "--model", compatible_folder, "--top-k", 12, "--json")
    hits = json.loads(out)["hits"]
    assert code == 0 and len({hit["version"] for hit in hits}) == 2 and len(hits) == 12
    standing = [hit["standing"] for hit in hits]
    assert standing == sorted(standing, reverse=True)
    scores = [hit["score"] for hit in hits]
    assert scores != sorted(scores, reverse=True), "this is what needs an explanation"
    for version in {hit["version"] for hit in hits}:  # a mean and a deviation for each
        own = np.array([(hit["score"], hit["standing"]) for hit in hits if hit["version"] == version])
        slope, offset = np.polyfit(own[:, 0], own[:, 1], 1)
        np.testing.assert_allclose(own[:, 0] * slope + offset, own[:, 1], atol=1e-3)
        assert slope > 1
    out = run("search", mixed, "a dog", "--model", compatible_folder)[1]
    assert "standing" in out and "come from several models with different score scales" in out


def test_two_unreadable_images_of_many_do_not_stop_a_build(run: Run, photos: Path, tmp_path: Path, old_folder: str) -> None:
    bad = write_photos(tmp_path / "bad", 30)
    for number in range(2):
        (bad / f"bad{number}.jpg").write_bytes(b"no image")
    code, out, err = run("build", bad, "--model", old_folder, "--out", tmp_path / "g")
    assert (code, err) == (0, "") and "30 images added" in out and "2 cannot be read" in out and "skipped bad0.jpg" in out
    for number in range(2, 8):
        (bad / f"bad{number}.jpg").write_bytes(b"no image")
    more = ("--model", old_folder, "--out", tmp_path / "h")
    err = run.refusal("build", bad, *more)
    assert "of 38 images cannot be used, more than the share 0.1" in err and "raise --max-bad-share" in err
    out = run.output("build", bad, *more, "--max-bad-share", 0.3)
    assert "30 images added" in out and "8 cannot be read" in out
    (tmp_path / "docs.txt").write_text("bears sleep\n")
    assert "works with images only" in run.refusal("build", tmp_path / "docs.txt", *more, "--max-bad-share", 0.3)


def test_impossible_searches(
    run: Run, gallery: Path, tmp_path: Path, encoder_of: dict[str, str], old_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_photos(tmp_path / "here", 1))
    Path("asked.txt").write_text("a dog\n")
    Path("my_queries").mkdir()
    Path("bad.txt").write_text("00.png\ngone.png\n")
    np.save("flat.npy", np.ones(4, np.float32))
    for arguments, message in (
        (("a dog", "--queries", "asked.txt"), "not both"),
        (("photos/nope.jpg",), "there is no image photos/nope.jpg; there is no photos in"),
        (("--queries", "nope.txt"), "nope.txt does not exist"),
        (("--queries", "bad.txt"), "1 of 2 queries cannot be used, more than the share 0.1: gone.png: unreadable image"),
        (("--queries", "asked.tx"), "asked.tx does not exist; did you mean 'asked.txt'?"),
        (("--queries", "my_qeries"), "my_qeries does not exist; did you mean 'my_queries'?"),
        (("--queries", "flat.npy"), "flat.npy has the shape (4,)"),
    ):
        err = run.refusal("search", gallery, *arguments, "--model", old_folder)
        assert message in err
        assert "share" not in message or err.endswith("; fix or remove them"), "this verb has no option for it"
    Gallery.create("of images", load_embedder(encoder_of["resnet"]))
    assert "embeds images only" in run.refusal("search", "of images", "a dog", "--model", encoder_of["resnet"])


def test_control_characters_of_an_id_stay_escaped_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    hit = hit_output.Hit("a\x1b[2J\x9b", 1.0, Fingerprint.from_string("m"), None)
    hit_output.make_printer("json")(hit_output.QueryResult("q", None, [hit]))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and json.loads(out)["hits"][0]["id"] == hit.id


IMAGES, BUDGET = 203, 70  # four batches of 64, the last of them short
TEXTS = 1300  # of which two passages each make six parts of 512, the last of them short
BAD = 16  # in the second process's first batch, by the order of the names

# What the command line runs, all in one process, whose start takes longer than what it does.
COMMANDS = f"""
import sys
from pathlib import Path
from xcompat.cli import gallery

photos, more, texts, old, new, mapping, out = sys.argv[1:]
out, of_texts, passages = Path(out), Path(out + "-texts"), {{"words": 5, "overlap": 1}}
gallery.build(photos, old, out)
gallery.build(photos, old, out)
gallery.add(out, more, new)
gallery.upgrade(out, new, backfill=photos, budget={BUDGET})
gallery.search(str(out), "a dog", new)
gallery.upgrade(out, mapping)
gallery.build(texts, old, of_texts, **passages)
gallery.upgrade(of_texts, new, backfill=texts, budget={BUDGET}, **passages)
"""


def contents(gallery: Gallery) -> list[tuple[str, list[str], NDArray[np.float32]]]:
    found = []
    for segment in gallery.segments:
        parts = [items for _, items in segment.blocks(1000)]
        ids = [name for items in parts for name in items.ids]
        found.append((segment.record.version, ids, np.concatenate([items.embeds[0] for items in parts])))
    return found


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, old_folder: str, compatible_folder: str, upgrading_folder: str
) -> dict[int, tuple[Gallery, str]]:
    """Run the commands on one process and on two: galleries, and what was printed."""
    models = (old_folder, compatible_folder, upgrading_folder)
    folder = tmp_path_factory.mktemp("processes")
    photos, more = write_photos(folder / "photos", IMAGES), write_photos(folder / "more", 5)
    (photos / f"{BAD}.png").write_bytes(b"no image")
    for file in more.iterdir():
        file.rename(file.with_name(f"another {file.name}"))
    lines = (f"{'so very ' * (row % 3)}bear number {row} sleeps in winter\n" for row in range(TEXTS))
    (folder / "texts.txt").write_text("".join(lines))
    (folder / "commands.py").write_text(COMMANDS)
    made = {}
    for processes in (1, 2):
        out = folder / f"gallery-{processes}"
        arguments = (folder / "commands.py", photos, more, folder / "texts.txt", *models, out)
        ran = warm.run(*arguments, folder=folder, ranks=processes, COLUMNS="400")
        assert ran.returncode == 0, ran.stderr
        made[processes] = Gallery.open(out), ran.stdout.replace(out.name, "gallery")
    return made


@pytest.mark.parametrize("beside", ["", "-texts"])
def test_two_processes_fill_a_gallery_as_one_does(beside: str, outcome: dict[int, tuple[Gallery, str]]) -> None:
    one, two = (contents(Gallery.open(f"{outcome[processes][0].path}{beside}")) for processes in (1, 2))
    assert [(version, ids) for version, ids, _ in two] == [(version, ids) for version, ids, _ in one]
    for (_, _, mine), (_, _, theirs) in zip(two, one, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    said = [[line for line in text.splitlines() if "✓" in line or ".png" in line] for _, text in outcome.values()]
    assert said[0] == said[1]


def test_no_item_is_lost_or_doubled_by_a_map(outcome: dict[int, tuple[Gallery, str]]) -> None:
    names = [f"{number:02}.png" for number in range(IMAGES) if number != BAD] + [f"another 0{number}.png" for number in range(5)]
    for mapped, said in outcome.values():
        assert f"{IMAGES - 1} images added" in said and "1 cannot be read" in said and f"{BUDGET} re-embedded" in said
        embedded = Gallery.open(mapped.path, mapped.generation - 1)
        assert sorted(embedded.counts().values()) == sorted([BUDGET + 5, IMAGES - 1 - BUDGET])
        assert len(mapped.versions) == 1 and mapped.damage() == []
        for gallery in (embedded, mapped):
            assert sorted(name for _, ids, _ in contents(gallery) for name in ids) == sorted(names)


N, DIM = 40, 8


@pytest.fixture
def model() -> RidgeModel:
    return solve_map(unit_vectors(50, DIM), unit_vectors(50, DIM, 1), OLD, "new_to_old")


@pytest.fixture
def halves(tmp_path: Path, model: RidgeModel) -> Gallery:
    """Half of the items are OLD's, half the model's."""
    vectors = np.random.default_rng(0).standard_normal((N, DIM)).astype(np.float32)
    made = Gallery.create(tmp_path / "a gallery", OLD, dim=DIM)
    made.add(vectors[: N // 2], [f"old {row}" for row in range(N // 2)], [{"price": row % 10} for row in range(N // 2)])
    return store(made, vectors[N // 2 :], [f"new {row}" for row in range(N // 2)], version=model)


def test_each_version_is_a_space_and_the_newest_is_searched(halves: Gallery, model: RidgeModel) -> None:
    store = xcompat.stores.open(f"file://{str(halves.path).replace(' ', '%20')}")
    old, new = halves.versions
    dims = {str(old): DIM, str(new): store.spaces()[str(new)].dim}
    assert store.describe() == {"rows": N, "dim": dims[str(new)], "metric": "cosine", "spaces": dims, "fingerprint": new.digest}
    assert [store.count(name) for name in dims] == [N // 2, N // 2]
    query = np.random.default_rng(1).standard_normal((3, DIM)).astype(np.float32)
    assert {hit.id for hit in store.search(query, top_k=N, space=str(old))[0]} == {f"old {row}" for row in range(N // 2)}
    assert store.find(query, model, top_k=N) == halves.search(query, model, top_k=N)
    rows = list(store.rows(15, space=str(old), content="price"))
    assert [row for block in rows for row in block.contents or ()] == [row % 10 for row in range(N // 2)]
    typed = store.find(query[:1], model, N, "price=3")
    assert typed == store.find(query[:1], model, N, {"price": 3}) and {hit.id for hit in typed[0]} == {"old 3", "old 13"}


@pytest.mark.parametrize("verb", ["plan", "start", "status", "verify", "switch", "rollback", "finish"])
def test_migrate_refuses_galleries(halves: Gallery, model: RidgeModel, run_xcompat: Run, tmp_path: Path, verb: str) -> None:
    model.config.direction, model.maps_galleries = "old_to_new", True
    model.save_pretrained(tmp_path / "map")
    given = ["--model", str(tmp_path / "map")] if verb in ("plan", "start", "verify", "switch") else []
    said = run_xcompat.refusal("migrate", verb, f"file://{halves.path}", *given)
    assert f"xcompat gallery upgrade {halves.path} --model RUN" in said
    assert Gallery.open(halves.path).generation == halves.generation
    for place, said in ((str(tmp_path), "is not a gallery"), ("here/gallery", "is not an absolute path")):
        refuses(said, xcompat.stores.open, f"file://{place}")


FIRST, SECOND = Fingerprint.from_string("old"), Fingerprint.from_string("new")
VERSIONS = [VersionRecord(digest=FIRST.digest, name="old", dim=DIM)]
VERSIONS += [VersionRecord(digest=SECOND.digest, name="new", dim=DIM, shares=(FIRST.digest,))]
POOL = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(25, DIM)).astype(np.float32)  # faiss takes another way from 20 queries on


class Item(NamedTuple):
    """An item of the naive gallery: number of its version, number of its vector, and metadata."""

    version: int
    vector: int
    about: dict[str, Any] | None


Row = st.tuples(st.integers(0, 30), st.integers(0, 2), st.sampled_from([None, {"shop": 0}, {"shop": 1}]))
Added = st.lists(Row, min_size=1, max_size=12, unique_by=lambda item: item[0])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), Added),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("compact")),
    ),
    max_size=12,
)


class Twins:
    """A gallery, and a dictionary of the same items in the order in which they were added."""

    def __init__(self, folder: Path, metric: Any) -> None:
        self.gallery, self.metric = Gallery.create(folder / "g", FIRST, dim=DIM, metric=metric), metric
        self.items: dict[str, Item] = {}

    def add(self, version: int, added: list[tuple[int, int, dict[str, Any] | None]]) -> None:
        names = [f"item {number}" for number, _, _ in added]
        about = [each for _, _, each in added]
        items = check_items(POOL[[vector for _, vector, _ in added]], names, about, None, self.metric)
        self.gallery.staging().add(VERSIONS[version], items, replace=True)
        for name, (_, vector, each) in zip(names, added, strict=True):
            self.items.pop(name, None)
            self.items[name] = Item(version, vector, each)

    def remove(self, numbers: list[int]) -> None:
        names = sorted({f"item {number}" for number in numbers} & self.items.keys())
        if names:
            self.gallery.remove(names)
            self.items = {name: item for name, item in self.items.items() if name not in names}

    def naive(self, query: int, k: int, where: dict[str, Any] | None, group_by: str | None) -> list[str]:
        stored, asked = POOL.astype(np.float64), QUERIES[query].astype(np.float64)
        if self.metric == "cosine":
            stored, asked = stored / np.linalg.norm(stored, axis=1, keepdims=True), asked / np.linalg.norm(asked)
        scores = -((stored - asked) ** 2).sum(1) if self.metric == "l2" else stored @ asked
        order = [record.digest for record in self.gallery.manifest.versions]
        ranked = sorted(
            self.items,
            key=lambda name: (-scores[self.items[name].vector], order.index(VERSIONS[self.items[name].version].digest)),
        )
        ranked = [name for name in ranked if where is None or (self.items[name].about or {}).get("shop") in where["shop"]]
        if group_by is not None:
            first: dict[Any, str] = {}
            for name in ranked:
                first.setdefault((self.items[name].about or {"shop": name})[group_by], name)
            ranked = list(first.values())
        return ranked[:k]

    def check(self) -> None:
        gallery = Gallery.open(self.gallery.path)
        for k in (1, 3, 40):
            for options in ({}, {"where": {"shop": [0]}}, {"where": {"shop": [0, 1]}}, {"group_by": "shop"}):
                options = {"where": None, "group_by": None, **options}
                naive = [self.naive(query, k, **options) for query in range(len(QUERIES))]
                hits = gallery.search(QUERIES, FIRST, top_k=k, **options)
                assert [[hit.id for hit in each] for each in hits] == naive, (k, options)
                alone = gallery.search(QUERIES[:1], FIRST, top_k=k, **options)
                assert [hit.id for hit in alone[0]] == naive[0], (k, options)


@pytest.mark.parametrize("metric", mostly_nightly(["cosine", "ip", "l2"], "cosine".__eq__))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_ties_are_found_in_gallery_order(metric: str, steps: list[Any]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ties-"))
    twins = Twins(folder, metric)
    for name, *arguments in [*steps, ("commit",)]:
        if name in ("commit", "compact"):
            twins.gallery.commit()
            getattr(twins.gallery, name)()
        else:
            getattr(twins, name)(*arguments)
    twins.check()
    twins.gallery.compact()
    twins.check()
    shutil.rmtree(folder)


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "IVF4,SQ8", "SQ8", "IDMap,Flat"])
def test_ties_of_an_adopted_index_are_found_in_its_order(factory: str, tmp_path: Path) -> None:
    vectors = unit_vectors(400, DIM, 2)
    same = np.sort(np.random.default_rng(3).choice(400, 60, replace=False))
    vectors[same] = vectors[same[0]]
    write_index(tmp_path / "i.faiss", vectors, factory, ids=range(400) if "IDMap" in factory else None)
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "i.faiss", [str(row) for row in range(400)], FIRST)
    query, effort = vectors[same[:1]], "nprobe=4" if "IVF" in factory else None
    for k in (1, 7, 59, 60):
        for batch in (1, 25):
            hits = gallery.search(np.repeat(query, batch, 0), FIRST, top_k=k, parameters=effort)
            assert [[hit.id for hit in each] for each in hits] == [[str(row) for row in same[:k]]] * batch, (k, batch)
    gallery.remove([str(same[0])])
    gallery.commit()
    assert [hit.id for hit in gallery.search(query, FIRST, top_k=5, parameters=effort)[0]] == [str(row) for row in same[1:6]]
    gallery.compact()
    assert [hit.id for hit in gallery.search(query, FIRST, top_k=5)[0]] == [str(row) for row in same[1:6]]

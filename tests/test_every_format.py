"""Every format that holds vectors, read by every command that takes vectors, also as queries."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import faiss
import numpy as np
import pytest
import test_map_vectors as formats
import torch
from conftest import Run, invoke, refuses, save_stand_in, store, write_embeds
from safetensors.numpy import save_file
from store_places import solve_map, unit_vectors
from transformers import AutoModel, pipeline

import xcompat.stores
from xcompat import Fingerprint, fit_map
from xcompat.core.arrays import normalise_rows
from xcompat.encoders import EncoderSource
from xcompat.integrations.haystack import CompatVectorMapper
from xcompat.integrations.langchain import CompatEmbeddings
from xcompat.integrations.llamaindex import CompatEmbedding
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.stores.mapping import Mapping
from xcompat.training.stored_models import is_stored, load_frozen, load_stored, require_stored

COUNT, DIM = 60, 8
IDS = [f"{row:03}" for row in range(COUNT)]
CLIP = Fingerprint.from_string("clip-b32")


def _things(noise: float) -> np.ndarray:
    draw = np.random.default_rng(0)
    things = draw.standard_normal((6, DIM))[np.arange(COUNT) % 6] + 0.2 * draw.standard_normal((COUNT, DIM))
    return normalise_rows(things + noise * draw.standard_normal(things.shape)).astype(np.float32)


OLD, NEW = _things(0.5), _things(0.05)


def _write_ids(file: Path) -> None:
    file.write_text("".join(f"{name}\n" for name in IDS))


def _index(here: Path) -> Path:
    index = faiss.IndexFlatIP(DIM)
    index.add(OLD)
    faiss.write_index(index, str(here / "a.faiss"))
    _write_ids(here / "a.ids.txt")
    return here / "a.faiss"


def _gallery(here: Path) -> Path:
    store(Gallery.create(here / "gallery", CLIP, dim=DIM), OLD, IDS).close()
    return here / "gallery"


def _folder_of_tables(here: Path) -> Path:
    formats.FILES["data set on disk"](here).rename(here / "image_embeds")
    return here


def _array(here: Path) -> Path:
    np.save(here / "a.npy", OLD)
    _write_ids(here / "a.ids.txt")
    return here / "a.npy"


def _tensors(here: Path) -> Path:
    save_file({"embedding": OLD}, here / "a.safetensors")
    _write_ids(here / "a.ids.txt")
    return here / "a.safetensors"


def _database(here: Path) -> str:
    apsw, vec = pytest.importorskip("apsw"), pytest.importorskip("sqlite_vec")
    with closing(apsw.Connection(str(here / "shop.db"))) as shop:
        shop.enable_load_extension(True)
        shop.load_extension(vec.loadable_path())
        shop.execute(f"CREATE VIRTUAL TABLE items USING vec0(id text primary key, e float[{DIM}] distance_metric=cosine)")
        shop.executemany("INSERT INTO items VALUES (?, ?)", [(name, row.tobytes()) for name, row in zip(IDS, OLD, strict=True)])
    return f"sqlite://{here / 'shop.db'}?table=items"


PLACES: dict[str, Callable[[Path], Path | str]] = {
    "faiss index": _index,
    "gallery": _gallery,
    "database": _database,
    "npy": _array,
    "safetensors without ids": _tensors,
    "folder": lambda here: write_embeds(here, IDS, image=OLD),
    "folder of tables": _folder_of_tables,
    **{name: lambda here, name=name: formats.write_format(name, here) for name in formats.FORMATS},
}
IDS_BESIDE = ("faiss index", "npy", "safetensors without ids")
"""Places whose ids are in a file beside them."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = {"ROWS": OLD, "NAMES": IDS, "NAMED_ROWS": list(zip(IDS, OLD.tolist(), strict=True))}
    for name, value in rows.items():
        monkeypatch.setattr(formats, name, value)
    (tmp_path / "stored").mkdir()
    return request.param, str(PLACES[request.param](tmp_path / "stored"))


def test_every_command_reads_it(place: tuple[str, str], tmp_path: Path, run_xcompat: Run) -> None:
    form, old = place
    write_embeds(tmp_path / "new", IDS, image=NEW)
    (tmp_path / "labels.txt").write_text("".join(f"class {row % 6}\n" for row in range(COUNT)))
    ids = ("--ids", "stored/a.ids.txt") if form in IDS_BESIDE else ()
    run_xcompat.output("evaluate", "--old", old, "--new", "new", "--labels", "labels.txt", *ids, "--out", "report")
    cases = {case.label: case for case in load_report(tmp_path / "report").cases}
    assert cases["new/old"].metrics["cmc@1"] > cases["old/old"].metrics["cmc@1"] > 0.3
    assert is_stored(old) and require_stored(old)
    model = load_stored(EncoderSource(name=old).name)
    np.testing.assert_allclose(model.lookup(IDS[::-1])[:], OLD[::-1], atol=1e-3)
    refuses(f"has no embedding of 1 of 1 images, e.g. 'a/000'; its ids, e.g. '{IDS[0]}', must be", model.lookup, ["a/000"])
    ids = ids if form in IDS_BESIDE[1:] else ()
    chosen = {"CSV of a cookbook": ("--vector-name", "embedding"), "compressed TSV": ("--vector-name", "vector")}.get(form, ())
    out = run_xcompat.output("gallery", "build", old, "--model", "clip-b32", "--out", "built", *ids, *chosen)
    assert "60 vectors of clip-b32" in out
    with Gallery.open("built") as gallery:
        hits = gallery.search(OLD[[7, 31]], CLIP, top_k=1)
        assert len(gallery) == COUNT and [each[0].id for each in hits] == [IDS[7], IDS[31]]


def test_the_other_columns_of_vectors_become_metadata(tmp_path: Path, run_xcompat: Run) -> None:
    days = [datetime.date(2020, 1, 1 + row % 28) for row in range(COUNT)]
    table = {"id": IDS, "text": [f"item {name}" for name in IDS], "day": days, "embedding": list(OLD), "other": list(NEW)}
    formats.pq.write_table(formats.pa.table(table), tmp_path / "a.parquet")
    points = [{"id": name, "vector": row.tolist(), "payload": {"title": f"t{name}"}} for name, row in zip(IDS, OLD, strict=True)]
    points[3]["vector"] = [0.0] * DIM  # not usable: skipped, with its metadata
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))

    def metadata_of(*typed: object) -> object:
        shutil.rmtree(tmp_path / "gallery", ignore_errors=True)
        code, out, err = run_xcompat("gallery", "build", *typed, "--model", "clip-b32", "--out", tmp_path / "gallery")
        assert code == 0, out + err
        with Gallery.open(tmp_path / "gallery") as gallery:
            (hits,) = gallery.search(OLD[[31]], Fingerprint.from_string("clip-b32"), top_k=1)
        return hits[0].metadata

    columns = (tmp_path / "a.parquet", "--vector-name", "embedding")
    assert metadata_of(*columns) == {"text": "item 031", "day": "2020-01-04"}
    assert metadata_of(*columns, "--metadata", "day") == {"day": "2020-01-04"}
    assert metadata_of(*columns, "--no-metadata") is None
    assert metadata_of(tmp_path / "q.jsonl", "--max-bad-share", 0.5) == {"title": "t031"}
    pages = [{"result": {"points": points[start : start + 20]}} for start in range(0, COUNT, 20)]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    assert metadata_of(tmp_path / "pages.jsonl", "--max-bad-share", 0.5) is None, "a line is not an item"
    command = ("--model", "clip-b32", "--out", tmp_path / "new")
    assert "did you mean 'day'?" in run_xcompat("gallery", "build", *columns, "--metadata", "days", *command)[2]
    np.savez(source := tmp_path / "a.npz", ids=IDS, vectors=OLD)
    assert (
        "--metadata needs a table with a vector per row"
        in run_xcompat("gallery", "build", source, "--metadata", "day", *command)[2]
    )


def test_a_gallery_of_vectors_continues_and_refuses_what_does_not_fit(tmp_path: Path, run_xcompat: Run) -> None:
    table = {"id": IDS, "text": [f"item {name}" for name in IDS], "embedding": list(OLD), "other": list(NEW)}
    source, part = tmp_path / "a.parquet", tmp_path / "part.parquet"
    formats.pq.write_table(formats.pa.table(table), source)
    formats.pq.write_table(formats.pa.table({name: values[:20] for name, values in table.items() if name != "text"}), part)
    command = ("--model", "clip-b32", "--out", tmp_path / "gallery")

    def said(*typed: object) -> str:
        _, out, err = run_xcompat("gallery", "build", *typed)
        return (out + err).splitlines()[-1]

    assert "20 vectors of clip-b32" in said(part, "--vector-name", "other", *command)
    assert "40 vectors of clip-b32" in (line := said(source, "--vector-name", "other", *command))
    assert "20 were there already" in line
    with Gallery.open(tmp_path / "gallery") as gallery:
        assert gallery.search(NEW[[50]], CLIP, top_k=1)[0][0].id == IDS[50]
    assert "no single model could search embeddings of other-model" in said(part, *command, "--model", "other-model")
    assert "no such name in" in (line := said(part, "--vector-name", "othr", *command)) and "did you mean 'other'?" in line
    assert "holds vectors: remove --dtype, --side-info and image and text options" in said(part, "--words", 5, *command)
    assert "has ids of its own; remove --ids" in said(part, "--ids", part, *command)
    assert "--ids works only with vectors" in said(source, "--ids", part, "--model", "clip-b32", "--out", tmp_path / "new")
    np.save(tmp_path / "a.npy", OLD)
    assert "a.npy has no ids; write the id of each vector to a.ids.txt beside it" in said(tmp_path / "a.npy", *command)
    assert "nosuch.npy does not exist; there is no nosuch.npy in" in said(tmp_path / "nosuch.npy", *command)


@pytest.fixture(scope="module")
def upward(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("map") / "map"
    solve_map(unit_vectors(300, DIM), unit_vectors(300, 12), CLIP).save_pretrained(folder)
    return str(folder)


def test_embed_maps_it(place: tuple[str, str], upward: str, run_xcompat: Run) -> None:
    form, source = place
    chosen = {"CSV of a cookbook": ("--column", "embedding"), "compressed TSV": ("--column", "vector")}.get(form, ())
    command = ("embed", source, "--model", upward, "--out", "mapped", *chosen)
    assert "holds 60 embeddings" in run_xcompat.output(*command)
    made = formats.pq.read_table("mapped")
    assert made["id"].to_pylist() == IDS
    mapped = Mapping(load_checkpoint(upward))(OLD)
    np.testing.assert_allclose(np.stack(made["embedding"].to_numpy()), mapped, atol=2e-3)
    assert "nothing to do" in run_xcompat.output(*command)


def test_embed_refuses_ambiguous_sources(tmp_path: Path, upward: str, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"ROWS": OLD, "NAMES": IDS}.items():
        monkeypatch.setattr(formats, name, value)
    source = formats.write_format("CSV of a cookbook", tmp_path)
    command = ("embed", source, "--model", upward, "--out", "mapped")
    assert "has vectors, and texts or images; choose one with --column" in run_xcompat.refusal(*command)
    run_xcompat.output(*command, "--column", "embedding")
    os.utime(source, (1, 1))
    assert "has changed since mapped was started" in run_xcompat.refusal(*command, "--column", "embedding")
    points = [{"id": name, "vector": {"image": row, "text": row[:4]}} for name, row in zip(IDS, OLD.tolist(), strict=True)]
    (tmp_path / "q.json").write_text(json.dumps({"result": {"points": points}}))
    command = ("embed", "q.json", "--model", upward, "--out", "named")
    assert "several vectors (image, text); choose one with --column" in run_xcompat.refusal(*command)
    misspelt = run_xcompat.refusal(*command, "--column", "imag")
    assert "--column imag: no such name" in misspelt and "did you mean 'image'?" in misspelt
    hits = [{"_id": point["id"], "_source": point["vector"]} for point in points]
    (tmp_path / "e.json").write_text(json.dumps({"hits": {"hits": hits}}))
    assert "choose image or text with --column" in run_xcompat.refusal("embed", "e.json", *command[2:])
    np.savez(tmp_path / "two.npz", ids=IDS, first=OLD, second=OLD)
    assert "matrices first, second; choose one with --column" in run_xcompat.refusal("embed", "two.npz", *command[2:])
    run_xcompat.output(*command, "--column", "image")
    np.save(tmp_path / "a.npy", OLD)
    assert "a.npy has no ids; write the id of" in run_xcompat.refusal("embed", "a.npy", "--model", upward, "--out", "new")


def test_embed_reads_texts_of_every_format(tmp_path: Path, old_folder: str, run_xcompat: Run) -> None:
    texts, made = [f"a text of {name}" for name in IDS[:5]], []
    lines = "".join(f'{{"_id": "{name}", "text": "{text}"}}\n' for name, text in zip(IDS, texts, strict=False))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.csv").write_text("\n".join(["doc_id,passage", *map(",".join, zip(IDS, texts, strict=False))]))
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    formats.datasets.Dataset.from_dict({"id": IDS[:5], "text": texts}).save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.csv", "a.txt", "saved"):
        out = tmp_path / f"out-{name}"
        assert "5 embeddings of" in run_xcompat.output("embed", tmp_path / name, "--model", old_folder, "--out", out)
        made.append(np.load(out / "text_embeds.npy"))
        assert (out / "text_ids.txt").read_text().split() == (IDS[:5] if name != "a.txt" else list("01234"))
    assert all(np.array_equal(each, made[0]) for each in made)
    typed = ("embed", tmp_path / "a.csv", "--model", old_folder, "--out", tmp_path / "x", "--dtype", "float16")
    assert re.search("--dtype works with tables, but .* is a file of images or texts", run_xcompat.refusal(*typed))


def test_rows_of_an_old_model_need_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", OLD)
    formats.pq.write_table(formats.pa.table({"embedding": list(OLD)}), tmp_path / "b.parquet")
    refuses("a.npy has no ids; write the id of each", require_stored, str(tmp_path / "a.npy"))
    refuses("b.parquet has no ids; write the id of each vector to b.ids.txt beside it", load_stored, str(tmp_path / "b.parquet"))
    _write_ids(tmp_path / "b.ids.txt")
    assert load_stored(str(tmp_path / "b.parquet")).ids == IDS
    formats.pq.write_table(formats.pa.table({"key_2": IDS, "first": list(NEW), "second": list(OLD)}), tmp_path / "c.parquet")
    chosen = EncoderSource(name=str(tmp_path / "c.parquet"), vector_name="second", id_column="key_2")
    stored = load_stored(chosen)
    assert stored.ids == IDS and np.array_equal(stored.embeds_Nd, OLD) and load_frozen(chosen).digest == stored.digest
    refuses("c.parquet has no column 'id' .*; choose one with --id-column .id_column in a recipe", load_stored, chosen.name)
    refuses("vector_name needs stored embeddings, but r is a model", load_frozen, EncoderSource(name="r", vector_name="x"))
    refuses("sqlit is not a kind of store; did you mean 'sqlite'", require_stored, "sqlit:///shop.db?table=items")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "examples.jsonl"):
        (tmp_path / "model" / name).write_text("{}")
    assert not is_stored(str(tmp_path / "model")), "a model with a table beside it is a model"


def test_sides_of_an_evaluation_both_have_ids_or_are_in_the_same_order(tmp_path: Path, run_xcompat: Run) -> None:
    for name, rows in (("old", OLD), ("new", NEW), ("short", NEW[:-1])):
        np.save(tmp_path / f"{name}.npy", rows)
        np.savez(tmp_path / f"{name}.npz", embedding=rows, ids=np.array(IDS[: len(rows)]))
    _write_ids(tmp_path / "ids.txt")

    def evaluated(old: str, new: str, *more: object) -> str:
        sides = ("--old", tmp_path / old, "--new", tmp_path / new, "--new-own", tmp_path / new)
        code, _, err = run_xcompat("evaluate", *sides, *more, "--out", tmp_path / "report")
        return err.splitlines()[-1] if code else ""

    assert evaluated("old.npy", "new.npy") == ""
    agreement = load_report(tmp_path / "report").cases[0].metrics
    assert evaluated("old.npy", "new.npz", "--ids", tmp_path / "ids.txt") == ""
    assert load_report(tmp_path / "report").cases[0].metrics == agreement
    assert "new.npz has ids, but the old side has none; give both ids (--ids for the old" in evaluated("old.npy", "new.npz")
    assert "new.npy has no ids, but the old side has ids" in evaluated("old.npz", "new.npy")
    assert "short.npy has 59 rows, but the old side 60; rows without ids must be the" in evaluated("old.npy", "short.npy")
    assert "old.npz has ids of its own; remove --ids" in evaluated("old.npz", "new.npz", "--ids", tmp_path / "ids.txt")
    (tmp_path / "qrels.tsv").write_text("000\t001\t1\n")
    judged = evaluated("old.npz", "new.npz", "--qrels", tmp_path / "qrels.tsv")
    assert "--qrels needs folders with query_embeds and text_embeds, but" in judged
    misspelt = evaluated("old.npz", "new.npz", "--vector-name", "embeding")
    assert "--vector-name embeding: no such name" in misspelt and "did you mean 'embedding'?" in misspelt


def test_items_without_a_class_are_left_out_of_an_evaluation(tmp_path: Path, run_xcompat: Run) -> None:
    for name, rows in (("old", OLD), ("new", NEW)):
        np.savez(tmp_path / f"{name}.npz", embedding=rows, ids=np.array(IDS))
    lines = [f"{name},class {row % 6}" for row, name in enumerate(IDS[:-6])]
    (tmp_path / "labels.csv").write_text("\n".join(["id,label", *lines]))
    sides = ("--old", tmp_path / "old.npz", "--new", tmp_path / "new.npz", "--labels", tmp_path / "labels.csv")
    run_xcompat.output("evaluate", *sides, "--out", tmp_path / "report")
    report = load_report(tmp_path / "report")
    assert {case.n_queries for case in report.cases} == {COUNT - 6} and report.notes[0].startswith("Evidence: classes in")


def test_info_shows_the_vectors_of_a_database(tmp_path: Path, run_xcompat: Run) -> None:
    address = _database(tmp_path)
    found = json.loads(run_xcompat.output("gallery", "info", address, "--json"))
    assert (found["items"], found["metric"]) == (COUNT, "cosine")
    assert [(each["dim"], each["model"], each["searched"]) for each in found["vectors"]] == [(DIM, None, True)]
    out = run_xcompat.output("gallery", "info", address)
    assert "60 items" in out and "unknown" in out
    model = save_stand_in(tmp_path / "clip", "clip", DIM)
    assert "do not fit" not in run_xcompat.output("gallery", "info", address, "--model", model), "the model is unknown"
    fitting = {load_embedder(model).fingerprint: True, Fingerprint.from_string("another"): False}
    for made, fits in fitting.items():
        with closing(xcompat.stores.open(address)) as store:
            store.name_model(store.space, made)
        (vectors,) = json.loads(run_xcompat.output("gallery", "info", address, "--model", model, "--json"))["vectors"]
        assert vectors["fits"] is fits


def test_an_index_that_keeps_no_vectors_is_one_line(tmp_path: Path, run_xcompat: Run) -> None:
    index = faiss.index_factory(DIM, "ITQ8,LSH")
    index.train(OLD)
    index.add(OLD)
    faiss.write_index(index, file := str(tmp_path / "a.faiss"))
    write_embeds(tmp_path / "new", IDS, image=NEW)
    _write_ids(tmp_path / "ids.txt")
    said = "faiss cannot reconstruct the vectors of "
    sides = ("--old", file, "--new", tmp_path / "new", "--ids", tmp_path / "ids.txt")
    assert said + file in run_xcompat.refusal("map", *sides, "--out", tmp_path / "map")
    refuses(said + "Index", fit_map, old=index, new=NEW)


def test_a_refused_start_records_no_model(tmp_path: Path, upward: str, run_xcompat: Run) -> None:
    start = ("migrate", "start", address := _database(tmp_path), "--model", upward, "--from")
    code, _, error = run_xcompat(*start, "clip-b23")
    assert code == 2 and "has vectors of clip-b23@" in error and "but the map is for clip-b32@" in error
    (vectors,) = json.loads(run_xcompat.output("gallery", "info", address, "--json"))["vectors"]
    assert vectors["model"] is None
    assert "60 rows written" in run_xcompat.output(*start, "clip-b32")


NEW_DIM, OLD_DIM, ITEMS, QUERIES = 12, 8, 80, 5
ASKED = [f"q{row}" for row in range(QUERIES)]
NEW_ROWS = unit_vectors(ITEMS, NEW_DIM, 0)
OLD_ROWS = normalise_rows(NEW_ROWS @ unit_vectors(NEW_DIM, OLD_DIM, 1))


@pytest.fixture(scope="module")
def map_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    solve_map(OLD_ROWS, NEW_ROWS, CLIP, "new_to_old").save_pretrained(folder := tmp_path_factory.mktemp("run") / "model")
    return str(folder)


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    store(Gallery.create(tmp_path / "gallery", CLIP, dim=OLD_DIM), OLD_ROWS, [str(row) for row in range(ITEMS)]).close()
    return tmp_path / "gallery"


def write_table(here: Path, name: str, **more: list[str]) -> Path:
    here.mkdir(exist_ok=True)
    table = {"id": ASKED, "embedding": NEW_ROWS[:QUERIES].tolist()} | more
    if name.endswith(".parquet"):
        formats.pq.write_table(formats.pa.table(table), here / name)
    else:
        rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
        (here / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return here / name


def write_array(here: Path) -> Path:
    np.save(here / "q.npy", NEW_ROWS[:QUERIES])
    (here / "q_ids.txt").write_text("\n".join(ASKED))
    return here / "q.npy"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "array": write_array,
    "parquet": lambda here: write_table(here, "q.parquet"),
    "json lines": lambda here: write_table(here, "q.jsonl"),
    "folder of tables": lambda here: write_table(here / "shards", "0.parquet").parent,
    "query folder": lambda here: write_embeds(here / "asked", ASKED, query=NEW_ROWS[:QUERIES]),
    "text folder": lambda here: write_embeds(here / "asked", ASKED, text=NEW_ROWS[:QUERIES]),
    "beside texts": lambda here: write_table(here, "q.parquet", text=["a"] * QUERIES),
}


def search(place: str | Path, queries: Path, model: str, *more: str) -> list[dict]:
    found = invoke("gallery", "search", place, "--queries", queries, "--model", model, "--top-k", 2, "--json", *more)
    return [json.loads(line) for line in found.splitlines()]


@pytest.mark.parametrize("form", SOURCES)
def test_a_map_of_embeddings_takes_embeddings(form: str, gallery: Path, map_folder: str, tmp_path: Path) -> None:
    found = search(gallery, SOURCES[form](tmp_path), map_folder)
    assert [each["query"] for each in found] == ASKED
    assert [each["hits"][0]["id"] for each in found] == [str(row) for row in range(QUERIES)]


def test_a_run_folder_and_a_store_take_them_too(gallery: Path, map_folder: str, tmp_path: Path) -> None:
    queries = write_array(tmp_path)
    expected = search(gallery, queries, map_folder)
    assert search(gallery, queries, str(Path(map_folder).parent)) == expected
    assert search(f"file://{gallery}", queries, map_folder) == expected
    np.save(tmp_path / "old.npy", OLD_ROWS[:3])
    named = search(gallery, tmp_path / "old.npy", CLIP.name)  # the gallery knows the name
    assert [each["hits"][0]["id"] for each in named] == ["0", "1", "2"]


def test_bad_queries_are_left_out(gallery: Path, map_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = NEW_ROWS[:20].copy()
    rows[3], rows[4] = np.nan, 0
    rows[5] *= np.float32(1e-22)
    np.save(tmp_path / "q.npy", rows)
    found = search(gallery, tmp_path / "q.npy", map_folder)
    assert [each["query"] for each in found] == [str(row) for row in range(20) if row not in (3, 4)]
    assert [each["hits"][0]["id"] for each in found] == [each["query"] for each in found]
    assert "2 of 20 rows" in caplog.text and "row 3 has no embedding; row 4 holds only zeros" in caplog.text
    refuses("2 of 20 rows .* more than the share 0", search, gallery, tmp_path / "q.npy", map_folder, "--max-bad-share", "0")
    np.save(tmp_path / "q.npy", OLD_ROWS[:3])
    said = r"q.npy has 8 dimensions, and the model takes 12: .* the new model that .* fitted on "
    said += r"\(clip-b32 has 8: .* --model clip-b32\)"
    refuses(said, search, gallery, tmp_path / "q.npy", map_folder)
    queries = write_array(tmp_path)
    refuses("--embed-with .*q.npy holds embeddings", search, gallery, queries, map_folder, "--embed-with", "os:getcwd")
    (tmp_path / "q_ids.txt").write_text("a\n")
    refuses("q_ids.txt has 1 lines, but q.npy has 5 rows", search, gallery, queries, map_folder)


def test_pipelines_and_frameworks_take_vectors(gallery: Path, map_folder: str) -> None:
    find = pipeline("compatible-retrieval", model=map_folder, gallery=str(gallery))
    for one in (NEW_ROWS[2], torch.from_numpy(NEW_ROWS[2]), NEW_ROWS[2].tolist(), NEW_ROWS[2] * 1e-22):
        assert find(one, top_k=1)[0].id == "2"
    for many in (NEW_ROWS[:3], torch.from_numpy(NEW_ROWS[:3]), list(NEW_ROWS[:3])):
        assert [hits[0].id for hits in find(many, top_k=1, batch_size=2)] == ["0", "1", "2"]
    refuses("a query has 8 dimensions, and the model takes 12", find, OLD_ROWS[0])
    refuses("fitted on embeddings only", find, "a red shoe")
    expected = AutoModel.from_pretrained(map_folder).to_space(torch.from_numpy(NEW_ROWS[:1]))[0].tolist()
    asked = (NEW_ROWS[0] * 3).tolist()
    found = {
        "langchain": CompatEmbeddings(map_folder).map_vector(asked),
        "llamaindex": CompatEmbedding(map_folder).map_vector(asked),
        "haystack": CompatVectorMapper(map_folder).run(embedding=asked)["embedding"],
    }
    for vector in found.values():
        np.testing.assert_allclose(vector, expected, atol=1e-6)
    refuses("has 8 dimensions, and the model takes 12", CompatEmbeddings(map_folder).map_vector, OLD_ROWS[0].tolist())
    refuses("map_vector", CompatEmbeddings(map_folder).embed_query, "a red shoe")

"""Every format that holds vectors, read by every command that takes vectors."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import faiss
import numpy as np
import pytest
import test_vector_formats as formats
import torch
from safetensors.numpy import save_file

from xcompat import Fingerprint, XcompatError
from xcompat.encoders import EncoderSource
from xcompat.methods import RidgeModel
from xcompat.models.config import describe_old
from xcompat.models.embedder import load_checkpoint
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.stores.mapping import Mapping
from xcompat.training.stored_models import is_stored, load_stored, require_stored

COUNT, DIM = 60, 8
IDS = [f"{row:03}" for row in range(COUNT)]
Run = Callable[..., tuple[int, str, str]]


def _things(noise: float) -> np.ndarray:
    draw = np.random.default_rng(0)
    things = draw.standard_normal((6, DIM))[np.arange(COUNT) % 6] + 0.2 * draw.standard_normal((COUNT, DIM))
    rows_ND = things + noise * draw.standard_normal(things.shape)
    return (rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)).astype(np.float32)


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
    with Gallery.create(here / "gallery", Fingerprint.from_string("clip-b32"), dim=DIM) as gallery:
        gallery.add(OLD, IDS)
        gallery.commit()
    return here / "gallery"


def _folder(here: Path) -> Path:
    np.save(here / "image_embeds.npy", OLD)
    _write_ids(here / "image_ids.txt")
    return here


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
    "folder": _folder,
    "folder of tables": _folder_of_tables,
    **{name: lambda here, name=name: formats.write_format(name, here) for name in formats.FORMATS},
}
IDS_BESIDE = ("faiss index", "npy", "safetensors without ids")
"""Places whose ids are in a file beside them."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return a format, and a place in this format with the old embeddings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = {"ROWS": OLD, "IDS": IDS, "ITEMS": list(zip(IDS, OLD.tolist(), strict=True))}
    for name, value in rows.items():
        monkeypatch.setattr(formats, name, value)
    (tmp_path / "stored").mkdir()
    return request.param, str(PLACES[request.param](tmp_path / "stored"))


def test_evaluate_reads_it(place: tuple[str, str], tmp_path: Path, run_xcompat: Run) -> None:
    form, old = place
    (tmp_path / "new").mkdir()
    np.save(tmp_path / "new" / "image_embeds.npy", NEW)
    _write_ids(tmp_path / "new" / "image_ids.txt")
    (tmp_path / "labels.txt").write_text("".join(f"class {row % 6}\n" for row in range(COUNT)))
    ids = ("--ids", "stored/a.ids.txt") if form in IDS_BESIDE else ()
    code, _, err = run_xcompat("evaluate", "--old", old, "--new", "new", "--labels", "labels.txt", *ids, "--out", "report")
    assert code == 0, err
    cases = {case.label: case for case in load_report(tmp_path / "report").cases}
    assert cases["new/old"].metrics["cmc@1"] > cases["old/old"].metrics["cmc@1"] > 0.3


def test_a_recipe_reads_it_as_the_old_model(place: tuple[str, str]) -> None:
    _, old = place
    assert is_stored(old) and require_stored(old)
    model = load_stored(EncoderSource(name=old).name)
    np.testing.assert_allclose(model.lookup(IDS[::-1])[:], OLD[::-1], atol=1e-3)


def test_a_gallery_is_built_from_it(place: tuple[str, str], tmp_path: Path, run_xcompat: Run) -> None:
    form, source = place
    ids = ("--ids", "stored/a.ids.txt") if form in IDS_BESIDE[1:] else ()
    chosen = {"CSV of a cookbook": ("--vector-name", "embedding"), "compressed TSV": ("--vector-name", "vector")}.get(form, ())
    command = ("gallery", "build", source, "--model", "clip-b32", "--out", "built", *ids, *chosen)
    code, out, err = run_xcompat(*command)
    assert code == 0 and "60 vectors of clip-b32" in out, out + err
    with Gallery.open("built") as gallery:
        hits = gallery.search(OLD[[7, 31]], Fingerprint.from_string("clip-b32"), top_k=1)
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
    command = ("--model", "clip-b32", "--out", tmp_path / "new")
    assert "did you mean 'day'?" in run_xcompat("gallery", "build", *columns, "--metadata", "days", *command)[2]
    np.savez(source := tmp_path / "a.npz", ids=IDS, vectors=OLD)
    assert "--metadata needs a table of vectors" in run_xcompat("gallery", "build", source, "--metadata", "day", *command)[2]


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
        assert gallery.search(NEW[[50]], Fingerprint.from_string("clip-b32"), top_k=1)[0][0].id == IDS[50]
    assert "no single model could search embeddings of other-model" in said(part, *command, "--model", "other-model")
    assert "no such name in" in (line := said(part, "--vector-name", "othr", *command)) and "did you mean 'other'?" in line
    assert "holds vectors: remove --dtype, --side-info and the options of images and texts" in said(part, "--words", 5, *command)
    assert "has ids of its own; remove --ids" in said(part, "--ids", part, *command)
    assert "--ids works only with vectors" in said(source, "--ids", part, "--model", "clip-b32", "--out", tmp_path / "new")
    np.save(tmp_path / "a.npy", OLD)
    assert "a.npy has no ids; write the id of each vector to a.ids.txt beside it" in said(tmp_path / "a.npy", *command)
    assert "nosuch.npy does not exist; there is no nosuch.npy in" in said(tmp_path / "nosuch.npy", *command)


@pytest.fixture(scope="module")
def upward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a map of stored vectors into another space."""
    draw = torch.Generator().manual_seed(0)
    old, new = (torch.nn.functional.normalize(torch.randn(300, dim, generator=draw), dim=1) for dim in (DIM, 12))
    described = describe_old(Fingerprint.from_string("clip-b32"), DIM)
    config = RidgeModel.config_class(old=described, embedding_dim=12, direction="old_to_new")
    folder = tmp_path_factory.mktemp("map") / "map"
    RidgeModel(config).fit([(new, old)]).eval().save_pretrained(folder)
    return str(folder)


def test_embed_maps_it(place: tuple[str, str], upward: str, run_xcompat: Run) -> None:
    form, source = place
    chosen = {"CSV of a cookbook": ("--column", "embedding"), "compressed TSV": ("--column", "vector")}.get(form, ())
    command = ("embed", source, "--model", upward, "--out", "mapped", *chosen)
    code, out, err = run_xcompat(*command)
    assert code == 0 and "holds 60 embeddings" in out, out + err
    made = formats.pq.read_table("mapped")
    assert made["id"].to_pylist() == IDS
    mapped = Mapping(load_checkpoint(upward))(OLD)
    np.testing.assert_allclose(np.stack(made["embedding"].to_numpy()), mapped, atol=2e-3)
    code, out, err = run_xcompat(*command)
    assert code == 0 and "nothing to do" in out, out + err


def test_embed_refuses_what_has_two_readings_or_has_changed(
    tmp_path: Path, upward: str, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"ROWS": OLD, "IDS": IDS}
    for name, value in rows.items():
        monkeypatch.setattr(formats, name, value)
    source = formats.write_format("CSV of a cookbook", tmp_path)
    command = ("embed", source, "--model", upward, "--out", "mapped")
    assert "has vectors, and texts or images; choose one with --column" in run_xcompat(*command)[2]
    assert run_xcompat(*command, "--column", "embedding")[0] == 0
    os.utime(source, (1, 1))
    assert "has changed since mapped was started" in run_xcompat(*command, "--column", "embedding")[2]
    np.save(tmp_path / "a.npy", OLD)
    assert "a.npy has no ids; write the id of each vector" in run_xcompat("embed", "a.npy", *command[2:4], "--out", "new")[2]


def test_embed_reads_texts_of_every_format(tmp_path: Path, old_folder: str, run_xcompat: Run) -> None:
    texts, made = [f"a text of {name}" for name in IDS[:5]], []
    lines = "".join(f'{{"_id": "{name}", "text": "{text}"}}\n' for name, text in zip(IDS, texts, strict=False))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.csv").write_text(
        "doc_id,passage\n" + "".join(f"{name},{text}\n" for name, text in zip(IDS, texts, strict=False))
    )
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    formats.datasets.Dataset.from_dict({"id": IDS[:5], "text": texts}).save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.csv", "a.txt", "saved"):
        out = tmp_path / f"out-{name}"
        code, told, err = run_xcompat("embed", tmp_path / name, "--model", old_folder, "--out", out)
        assert code == 0 and "5 embeddings of" in told, told + err
        made.append(np.load(out / "text_embeds.npy"))
        assert (out / "text_ids.txt").read_text().split() == (IDS[:5] if name != "a.txt" else list("01234"))
    assert all(np.array_equal(each, made[0]) for each in made)
    code, _, err = run_xcompat("embed", tmp_path / "a.csv", "--model", old_folder, "--out", tmp_path / "x", "--dtype", "float16")
    assert code == 2 and "--dtype works with tables, but" in err and "is a file of images or texts" in err


def test_rows_of_an_old_model_need_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", OLD)
    formats.pq.write_table(formats.pa.table({"embedding": list(OLD)}), tmp_path / "b.parquet")
    with pytest.raises(XcompatError, match="a.npy has no ids; write the id of each vector to a.ids.txt beside it"):
        require_stored(str(tmp_path / "a.npy"))
    with pytest.raises(XcompatError, match="b.parquet has no ids; write the id of each vector to b.ids.txt beside it"):
        load_stored(str(tmp_path / "b.parquet"))
    _write_ids(tmp_path / "b.ids.txt")
    assert load_stored(str(tmp_path / "b.parquet")).ids == IDS
    with pytest.raises(XcompatError, match="sqlit is not a kind of store; did you mean 'sqlite'"):
        require_stored("sqlit:///shop.db?table=items")
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
    assert "new.npz has ids, but the old side has none; give both ids (--ids for the old side), or neither" in evaluated(
        "old.npy", "new.npz"
    )
    assert "new.npy has no ids, but the old side has ids" in evaluated("old.npz", "new.npy")
    assert "short.npy has 59 rows, but the old side 60; rows without ids must be the same items" in evaluated(
        "old.npy", "short.npy"
    )
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
    code, _, err = run_xcompat("evaluate", *sides, "--out", tmp_path / "report")
    assert code == 0, err
    report = load_report(tmp_path / "report")
    assert {case.n_queries for case in report.cases} == {COUNT - 6} and report.notes[0].startswith("Evidence: classes in")


def test_info_shows_the_vectors_of_a_database(tmp_path: Path, run_xcompat: Run) -> None:
    address = _database(tmp_path)
    code, out, err = run_xcompat("gallery", "info", address, "--json")
    found = json.loads(out)
    assert code == 0 and (found["items"], found["metric"]) == (COUNT, "cosine"), err
    assert [(each["dim"], each["model"], each["searched"]) for each in found["vectors"]] == [(DIM, None, True)]
    code, out, _ = run_xcompat("gallery", "info", address)
    assert code == 0 and "60 items" in out and "unknown" in out
    code, _, err = run_xcompat("gallery", "info", address, "--model", "clip-b32")
    assert code == 2 and "--model does not work with vector stores; use `xcompat gallery doctor`" in err

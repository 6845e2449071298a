"""Texts as items of every kind of table, with metadata; galleries of texts, and searches by document."""

from __future__ import annotations

import datetime
import gzip
import json
import math
import random
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Run, refuses, store
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from schedule import mostly_nightly
from transformers import pipeline

from xcompat import Fingerprint
from xcompat.core import progress
from xcompat.core.json_values import JsonColumns
from xcompat.data import PairSource, TextSource, contains_images, load_pairs, load_text_items, split_passages
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, Hit, searching
from xcompat.retrieval.backfilling import Backfill
from xcompat.retrieval.ingestion import ingest
from xcompat.retrieval.originals import Images, Texts, load_originals

WORDS = ("bear", "winter", "sleep", "ant", "work", "queen", "river", "salmon", "snow", "forest", "honey", "bee", "summer")
DOCUMENTS = 60
CUT = ("--words", 5, "--overlap", 1)


def document(number: int) -> str:
    chosen = random.Random(number)
    return " ".join(chosen.choices(WORDS, k=chosen.randint(1, 14)))


def write_documents(file: Path, numbers: range) -> Path:
    rows = [{"id": f"doc-{number}", "year": 2000 + number % 3, "text": document(number)} for number in numbers]
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return file


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents") / "documents.jsonl.gz", range(DOCUMENTS))


def rows_of(gallery: Gallery) -> dict[str, tuple[NDArray[np.float32], Any]]:
    found = {}
    for segment in gallery.segments:
        for rows, items in segment.blocks(1000):
            found |= dict(zip(items.ids, zip(items.embeds[0], segment.metadata(rows), strict=True), strict=True))
    return found


def test_texts_are_stored_as_embedded_alone(run: Run, documents: Path, tmp_path: Path, old_folder: str, old: Embedder) -> None:
    gallery = tmp_path / "gallery"
    code, out, err = run("build", documents, "--model", old_folder, "--out", gallery)
    assert (code, err) == (0, "") and f"{DOCUMENTS} texts added" in out
    stored = rows_of(Gallery.open(gallery))
    assert list(stored) == [f"doc-{number}" for number in range(DOCUMENTS)]
    for number, (embeds, about) in enumerate(stored.values()):
        alone = old.embed(old.processor.texts(document(number)))[0]
        np.testing.assert_allclose(embeds, alone, atol=1e-5)
        assert about == {"year": 2000 + number % 3, "text": document(number)}
    out = run.output("build", documents, "--model", old_folder, "--out", gallery)
    assert f"0 texts added to {gallery}, {DOCUMENTS} were there already" in " ".join(out.split())
    code, out, _ = run("search", gallery, document(7), "--model", old_folder, "--where", "year=2001", "--top-k", 3)
    rows = [line for line in out.splitlines() if "doc-" in line]
    assert code == 0 and len(rows) == 3 and "1.000" in rows[0] and document(7) in rows[0]


@pytest.mark.parametrize("kept", ["--keep-text", "--no-keep-text"])
def test_other_texts_under_the_same_ids_are_refused_or_replaced(run: Run, tmp_path: Path, old_folder: str, kept: str) -> None:
    numbered = {name: tmp_path / f"{name}.txt" for name in ("one", "other", "same")}
    for name, first in (("one", 0), ("other", 3), ("same", 0)):
        numbered[name].write_text("".join(f"{document(number)}\n" for number in range(first, first + 3)))
    gallery = tmp_path / "gallery"
    run.output("build", numbered["one"], "--model", old_folder, "--out", gallery, kept)
    before = rows_of(Gallery.open(gallery))
    for verb in (("add", gallery, numbered["other"]), ("build", numbered["other"], "--out", gallery)):
        err = run.refusal(*verb, "--model", old_folder, kept)
        assert "has other texts under the same ids: '0' and 2 more" in err
        assert "--id-column" in err and "--replace" in err and Gallery.open(gallery).generation == 1
    code, out, _ = run("add", gallery, numbered["same"], "--model", old_folder, "--replace", kept)
    assert code == 0 and "0 texts added" in out and "3 were there already" in " ".join(out.split())
    code, out, _ = run("add", gallery, numbered["other"], "--model", old_folder, "--replace", kept)
    after = rows_of(Gallery.open(gallery))
    assert code == 0 and "3 texts added" in out and list(after) == list(before) == ["0", "1", "2"]
    assert not any(np.allclose(after[name][0], before[name][0]) for name in after)


def test_passages_are_backfilled(run: Run, documents: Path, tmp_path: Path, old_folder: str, compatible_folder: str) -> None:
    gallery = tmp_path / "gallery"
    run.output("build", documents, "--model", old_folder, "--out", gallery, *CUT)
    count = len(Gallery.open(gallery))
    assert count > DOCUMENTS
    upgrade = ("upgrade", gallery, "--model", compatible_folder, "--backfill", documents, *CUT, "--budget", 20)
    assert f"20 of {count} texts to embed" in run.output(*upgrade, "--dry-run")
    for done in (20, 40):
        said = f"20 re-embedded, {count - done} to go; run the same `xcompat gallery upgrade` again to continue"
        assert said in run.output(*upgrade)
    mixed = Gallery.open(gallery)
    assert mixed.counts() == {load_embedder(compatible_folder).fingerprint: 40, load_embedder(old_folder).fingerprint: count - 40}
    assert {about["document"] for _, about in rows_of(mixed).values()} == {f"doc-{number}" for number in range(DOCUMENTS)}
    out = run.output("doctor", gallery, "--model", compatible_folder, "--texts", documents, *CUT)
    assert "not made by" in out
    (finding,) = [line for line in out.splitlines() if "made by this model" in line]
    assert "40" in finding and "none" in finding


def test_other_cuts_are_refused(run: Run, documents: Path, tmp_path: Path, old_folder: str, compatible_folder: str) -> None:
    gallery = tmp_path / "gallery"
    run.output("build", documents, "--model", old_folder, "--out", gallery, *CUT)
    before = Gallery.open(gallery).generation
    for cut in ((), ("--words", 3), ("--words", 8), ("--words", 5, "--overlap", 2)):
        for verb in (
            ("build", documents, "--model", old_folder, "--out", gallery),
            ("upgrade", gallery, "--model", compatible_folder, "--backfill", documents),
            ("doctor", gallery, "--model", old_folder, "--texts", documents),
        ):
            err = run.refusal(*verb, *cut)
            assert "holds these texts cut differently" in err and "'doc-" in err
    run.output("build", documents, "--model", old_folder, "--out", tmp_path / "whole")
    err = run.refusal("build", documents, "--model", old_folder, "--out", tmp_path / "whole", *CUT)
    assert "cut differently (only the gallery has 'doc-0'" in err
    assert Gallery.open(gallery).generation == before
    others = write_documents(tmp_path / "others.jsonl.gz", range(100, 103))
    err = run.refusal("upgrade", gallery, "--model", compatible_folder, "--backfill", others, *CUT)
    assert "texts is in" in err and "ids are set by --id-column, --words and --overlap" in err
    assert "texts added" in run.output("add", gallery, others, "--model", old_folder, *CUT)


def test_zero_embeddings_are_named(documents: Path, tmp_path: Path, old: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = load_originals(documents)
    embed = texts.embed

    def spoilt(*arguments: Any) -> Any:
        for rows, embeds in embed(*arguments):
            embeds[7] = 0
            yield rows, embeds

    monkeypatch.setattr(texts, "embed", spoilt)
    gallery = Gallery.create(tmp_path / "gallery", old)
    refuses("the embedding of 'doc-7' is zero and has no direction", ingest, gallery, texts, old)
    gallery.close()
    assert len(Gallery.open(gallery.path)) == 0


def write_sources(folder: Path) -> None:
    image = Image.new("RGB", (8, 8), "red")
    for name in ("images", "images with captions", "images beside a text", "texts", "texts called metadata"):
        (folder / name).mkdir()
        if name.startswith("images"):
            image.save(folder / name / "a.png")
    (folder / "images with captions" / "captions.csv").write_text("image,caption\na.png,a red square\n")
    (folder / "images beside a text" / "README.txt").write_text("about these\n")
    (folder / "texts" / "a.txt").write_text("one\ntwo\n")
    (folder / "texts called metadata" / "metadata.jsonl").write_text('{"path": "a.md", "text": "one"}\n')
    (folder / "texts.csv").write_text("path,caption\ndocs/a.md,one\n")
    (folder / "images.csv").write_text("file_name,text\nimages/a.png,one\n")
    pq.write_table(pa.table({"text": ["one"]}), folder / "texts.parquet")
    bytes_ = (folder / "images" / "a.png").read_bytes()
    pq.write_table(pa.table({"image": [{"bytes": bytes_, "path": "a.png"}], "text": ["one"]}), folder / "images.parquet")
    hf.Dataset.from_dict({"text": ["one"]}).save_to_disk(folder / "texts saved")
    hf.Dataset.from_dict({"photo": [image], "text": ["one"]}).save_to_disk(folder / "images saved")


def test_what_a_source_holds_is_found_out(tmp_path: Path) -> None:
    write_sources(tmp_path)
    found = {path.name: contains_images(str(path)) for path in tmp_path.iterdir()}
    assert len(found) == 11 and all(images == name.startswith("images") for name, images in found.items()), found
    assert isinstance(load_originals(tmp_path / "images.csv"), Images)
    assert isinstance(load_originals(tmp_path / "images.csv", text_column="text"), Texts)
    (tmp_path / "nothing").mkdir()
    refuses("nothing: no shards", contains_images, str(tmp_path / "nothing"))


def test_missing_towers(run: Run, documents: Path, tmp_path: Path, image_folder_of: dict[str, str], old_folder: str) -> None:
    err = run.refusal("build", documents, "--model", image_folder_of["vit"], "--out", tmp_path / "g")
    assert "embeds images only, but these are texts" in err
    texts_only = SimpleNamespace(name="m", processor=SimpleNamespace(image_size=(0, 0), max_length=16))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    refuses("m embeds texts only, but these are images", load_originals(tmp_path / "a.png").require, texts_only)
    for options, message in (
        (("--words", 3, "--overlap", 3), "overlap is 3 and words is 3"),
        (("--text-column", "txt"), "did you mean 'text'?"),
    ):
        assert message in run.refusal("build", documents, "--model", old_folder, "--out", tmp_path / "g", *options)
    assert not (tmp_path / "g").exists()
    assert "--words applies to re-embedded texts: add" in run.refusal("upgrade", tmp_path, "--model", "m", "--words", 3)


OLD = Fingerprint.from_string("old")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """Return a gallery of three segments, of documents with many passages and with few, and of items without a document."""
    made = Gallery.create(tmp_path_factory.mktemp("grouped") / "g", OLD, dim=6)
    rng = np.random.default_rng(0)
    for segment in range(3):
        ids = [f"{segment}-{number}" for number in range(80)]
        named = [{"document": f"d{min(int(rng.exponential(8)), 30)}", "even": number % 2 == 0} for number in range(80)]
        about = [None if number % 20 == 19 else each for number, each in enumerate(named)]
        store(made, rng.normal(size=(80, 6)) + np.array([3, 0, 0, 0, 0, 0]) * (segment == 0), ids, about)
    made.remove(["0-3", "2-70"])
    made.commit()
    return made


def naive_groups(hits: list[Hit], top_k: int) -> list[tuple[str, Any]]:
    best: list[tuple[str, Any]] = []
    for hit in hits:
        group = hit.metadata["document"] if hit.metadata else None
        if group is None or group not in [known for _, known in best]:
            best.append((hit.id, group))
    return best[:top_k]


@pytest.mark.parametrize("where", [None, {"even": True}, {"document": ["d0", "d1"]}, {"document": "none"}])
@pytest.mark.parametrize("top_k", [1, 5, 25, 100])
def test_groups_of_all_hits(top_k: int, where: dict[str, Any] | None, grouped: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "HITS_AT_ONCE", 30)  # queries in several turns
    queries = np.random.default_rng(1).normal(size=(7, 6))
    everything = grouped.search(queries, OLD, 1000, where)
    found = grouped.search(queries, OLD, top_k, where, group_by="document")
    assert [[(hit.id, hit.group) for hit in hits] for hits in found] == [naive_groups(hits, top_k) for hits in everything]
    scores = {hit.id: hit.score for hit in everything[0]}
    assert all(hit.score == pytest.approx(scores[hit.id], abs=1e-6) for hit in found[0])
    assert grouped.search(np.empty((0, 6)), OLD, top_k, where, group_by="document") == []


@pytest.mark.parametrize("merge", mostly_nightly(["raw", "standardised", "calibrated"], "calibrated".__eq__))
def test_groups_of_versions_make_one_ranking(merge: Any, documents: Path, tmp_path: Path, old: Embedder, new: Embedder) -> None:
    texts, gallery = load_originals(documents, words=4), Gallery.create(tmp_path / "g", old)
    ingest(gallery, texts, old)
    Backfill(gallery, texts, new, 60).run()
    queries = new.embed(new.processor.texts(["a bear in winter", "ants at work"]), "own")
    everything = gallery.search(queries, new.model, 1000, merge=merge)
    found = gallery.search(queries, new.model, 9, merge=merge, group_by="document")
    assert [[(hit.id, hit.group) for hit in hits] for hits in found] == [naive_groups(hits, 9) for hits in everything]
    assert len({hit.version for hit in everything[0]}) == 2


def test_few_groups_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(searching, "GROUPED_AT_MOST", 50)
    monkeypatch.setattr(progress.logger, "propagate", True)
    progress.notice_once.cache_clear()
    angles = np.linspace(0, 1, 100)
    about = [{"document": number // 60, "tags": [number // 60]} for number in range(100)]
    rows, names = np.stack([np.cos(angles), np.sin(angles)], 1), [str(number) for number in range(100)]
    gallery = store(Gallery.create(tmp_path / "g", OLD, dim=2), rows, names, about)
    (hits,) = gallery.search([[1.0, 0.0]], OLD, 2, group_by="document")
    assert [hit.group for hit in hits] == [0] and "the 50 nearest items of a query have fewer than 2 values" in caplog.text
    (hits,) = gallery.search([[1.0, 0.0]], OLD, 60, group_by="tags")  # as many as are asked for are always looked through
    assert [hit.group for hit in hits] == [[0]]
    (hits,) = gallery.search([[0.0, 1.0]], OLD, 2, group_by="tags")
    assert [hit.group for hit in hits] == [[1], [0]]


def test_the_command_and_the_pipeline_group(
    run: Run,
    documents: Path,
    tmp_path: Path,
    old_folder: str,
    compatible_folder: str,
    monkeypatch: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gallery = tmp_path / "gallery"
    run.output("build", documents, "--model", old_folder, "--out", gallery, *CUT)
    code, out, _ = run("search", gallery, "a bear", "--model", compatible_folder, "--group-by", "document", "--top-k", 20)
    rows = [line.split("│") for line in out.splitlines() if "#" in line]
    assert code == 0 and len(rows) == 20 and len({cells[4].strip() for cells in rows}) == 20
    assert all(cells[3].strip().startswith(cells[4].strip() + "#") for cells in rows) and "document: " not in out
    code, out, _ = run("search", gallery, "a bear", "--model", compatible_folder, "--group-by", "documnt")
    assert code == 0 and "no hit has 'documnt' in its metadata" in out
    find = pipeline("compatible-retrieval", model=compatible_folder, gallery=str(gallery), group_by="document")
    assert [hit.group for hit in find("a bear", top_k=20)] == [cells[4].strip() for cells in rows]
    refuses("the query is empty", find, "  ")
    monkeypatch.setattr(progress.logger, "propagate", True)
    progress.notice_once.cache_clear()
    assert find("bears sleep " * 100) and "queries truncated to 16 tokens" in caplog.text


def test_impossible_and_odd_queries(run: Run, tmp_path: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.txt").write_text("[red]bears[/red] " + "sleep " * 30 + "\nants work\n")
    run.output("build", "docs.txt", "--model", old_folder, "--out", "g")
    for query, message in (
        ("", "the query is empty"),
        (" \n", "the query is empty"),
        ("docs.txt", "file docs.txt is not a readable image"),
        ("photos/bear.png", "there is no image photos/bear.png"),
    ):
        assert message in run.refusal("search", "g", query, "--model", old_folder)
    assert run.output("search", "g", "a \udcff bear", "--model", old_folder, "--csv").count("\n") == 3, "half a character"
    out = run.output("search", "g", "bears sleep " * 100, "--model", old_folder)  # no file has so long a name
    assert "query truncated to 16 tokens" in out
    (row,) = [line for line in out.splitlines() if "bears" in line]
    assert "[red]bears[/red] sleep sleep" in row and " … " in row and row.count("sleep") < 15


DAY = datetime.datetime(2020, 1, 2, 3, 4, 5)


def write_table(folder: Path) -> Path:
    columns = {
        "id": ["007", "010"],
        "text": ["a bear", "a bee"],
        "at": [DAY, None],
        "day": [DAY.date(), DAY.date()],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "thumb": [b"\0\1", b"\2"],
        "score": [math.inf, math.nan],
        "year": [2020, 2021],
        "nested": [{"at": DAY, "tags": ["x", "y"]}, {"at": DAY, "tags": []}],
    }
    pq.write_table(pa.table(columns), folder / "t.parquet")
    return folder / "t.parquet"


def test_metadata_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Run, folder_of: dict[str, str]) -> None:
    loaded = load_text_items(str(write_table(tmp_path)))
    first, second = map(json.loads, loaded["metadata"][:])
    stamp = "2020-01-02T03:04:05"
    nested = {"at": stamp, "tags": ["x", "y"]}
    assert first == {"at": stamp, "day": "2020-01-02", "price": "1.50", "score": "inf", "year": 2020, "nested": nested}
    assert second["year"] == 2021 and "score" not in second and "at" not in second
    said = capsys.readouterr().out.replace("\n", " ")
    assert "metadata: price is kept as text, e.g. '1.50'; choose columns with --metadata COLUMN" in said
    assert "metadata: thumb drops values of type bytes" in said
    build = ("build", write_table(tmp_path), "--model", folder_of["clip"], "--out")
    for options, said in (("yaer",), "has no column 'yaer'; did you mean 'year'"), (("year", "--no-metadata"), "be combined"):
        assert said in run.refusal(*build, tmp_path / "some", "--metadata", *options) and not (tmp_path / "some").exists()
    run.output(*build, tmp_path / "some", "--metadata", "year", "--metadata", "price")
    assert Gallery.open(tmp_path / "some").metadata(["007"])[0].keys() == {"year", "price", "text"}
    run.output(*build, tmp_path / "none", "--no-metadata", "--no-keep-text")
    assert not Gallery.open(tmp_path / "none").metadata(["007"])[0]


def test_metadata_of_captions_and_of_python_become_json(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": "half \\ud83d", "score": Infinity, "colour": "red", "year": 2020}\n'
    )
    source = PairSource(path=str(tmp_path))
    about = json.loads(load_pairs(source, metadata=True)[0]["metadata"])
    assert about == {"score": "inf", "colour": "red", "year": 2020}
    assert json.loads(load_pairs(source, metadata=["year"])[0]["metadata"]) == {"year": 2020}
    assert load_pairs(source)[0]["caption"] == ["half \ufffd"]
    empty = Gallery.create(tmp_path / "gallery", OLD, dim=4)
    about = [{"at": pd.Timestamp(DAY), "nan": math.nan, "empty": "", "half": "\ud83d", "raw": b"x", "n": np.int64(3)}]
    assert store(empty, np.eye(4)[:1], ["x"], about).metadata(["x"]) == [
        {"at": DAY.isoformat(), "nan": None, "empty": "", "half": "\ufffd", "n": 3}
    ]


@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=9)
    )
)
def test_converted_rows_are_always_json(row: dict[str, object]) -> None:
    text = json.dumps(JsonColumns().convert(row), allow_nan=False, ensure_ascii=False)
    assert text.encode()


SURROGATE = b"\xed\xa0\xbd"  # U+D83D as bytes, as some databases write it


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("t.jsonl", b'{"id": "a", "text": "fine"}\n{"id": "b\\ud83d", "text": "x \\ud83d", "k": "\\udc00"}\n', "line 2"),
        ("t.jsonl", b'{"id": "a", "text": "fine"}\n{"id": "b' + SURROGATE + b'", "text": "x ' + SURROGATE + b'"}\n', "line 2"),
        ("t.csv", b"id,text\na,fine \xc3\xa9\nb" + SURROGATE + b",x " + SURROGATE + b"\n", "line 3"),
        ("t.txt", b"fine\nx " + SURROGATE + b"\n", "line 2"),
    ],
)
def test_surrogates_are_named(name: str, content: bytes, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    loaded = load_text_items(TextSource(path=str(tmp_path / name), keep_text=True))
    assert loaded[1]["text"].startswith("x \ufffd")
    said = capsys.readouterr().out.replace("\n", "")
    assert "1 row contains half a character" in said and f"{name} {where}" in said


def test_parquet_texts_that_are_not_utf8_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = pa.array([b"fine", b"x " + SURROGATE, None], pa.binary())
    broken = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    pq.write_table(pa.table({"id": ["a", "b", "c"], "text": broken, "year": [1, 2, 3]}), tmp_path / "t.parquet")
    loaded = load_text_items(str(tmp_path / "t.parquet"))
    assert loaded["text"][:] == ["fine", "x \ufffd"] and json.loads(loaded[1]["metadata"]) == {"year": 2}
    assert "t.parquet row 2" in capsys.readouterr().out.replace("\n", "")


def test_files_beside_texts_and_rows_without_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a bear")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "inner").mkdir()
    assert len(load_text_items(str(tmp_path))) == 1
    assert "3 files (b.pdf, inner, .DS_Store) are not read" in capsys.readouterr().out.replace("\n", " ")
    (tmp_path / "docs.jsonl").write_text('{"id": "x", "text": " "}\n{"id": "y", "text": "here"}\n{"id": "z", "text": null}\n')
    assert load_text_items(tmp_path / "docs.jsonl")["id"][:] == ["y"]
    assert "2 of 3 documents have no text" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    lines = load_text_items(tmp_path / "lines.txt")
    assert lines["id"][:] == ["0", "1"] and lines["text"][:] == ["one", "two"] and lines["metadata"][0] is None


def test_named_columns_and_passages_of_documents(tmp_path: Path) -> None:
    documents = tmp_path / "docs.tsv"
    documents.write_text("id\ttitle\ttext\nb\tBears\tbears sleep in winter\na\tAnts\tants work all day\n")
    assert [json.loads(about) for about in load_text_items(str(documents))["metadata"]] == [{"title": "Bears"}, {"title": "Ants"}]
    source = TextSource(path=str(documents), text_column=["title", "text"], id_column="title", metadata=["id"])
    items = load_text_items(source)
    assert items["id"][:] == ["Bears", "Ants"] and items["text"][0] == "Bears bears sleep in winter"
    assert json.loads(items["metadata"][0]) == {"id": "b"}
    source = TextSource(path=str(documents), words=3, overlap=1, keep_text=True, metadata=False, limit=1)
    items = load_text_items(source)
    assert items["id"][:] == ["b#0", "b#1"] and items["text"][:] == ["bears sleep in", "in winter"]
    assert json.loads(items["metadata"][1]) == {"document": "b", "text": "in winter"}


@given(words=st.lists(st.text("ab", min_size=1, max_size=3), max_size=30), size=st.integers(1, 7), data=st.data())
def test_passages_hold_every_word_once_but_for_the_overlap(words, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    cut = [part.split() for part in split_passages(" ".join(words), size, overlap)]
    assert [word for place, part in enumerate(cut) for word in part[overlap if place else 0 :]] == words
    assert all(len(part) <= size for part in cut) and all(len(part) > overlap for part in cut[1:])


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (['{"id": 1, "text": "a"}', '{"id": 1, "text": "b"}'], {}, "the id '1' appears twice"),
        (['{"id": 1.5, "text": "a"}'], {}, "ids must be strings or whole numbers"),
        (['{"id": 1, "text": 5}'], {}, "not text; set text_column"),
        (['{"id": 1, "words": "a"}'], {}, "no column named text"),
        (['{"id": 1, "text": "a"}'], {"text_column": "txet"}, "has no column 'txet'"),
        (['{"id": 1, "text": "a"}'], {"metadata": ["year"]}, "has no column 'year'"),
        (['{"id": 1, "text": " "}'], {}, "contains no text"),
        (['{"id": 1, "text": "a"}', "{"], {}, "line 2 is not valid JSON"),
        (["id,text", "1,a,b", "2,c,d"], {}, "more fields than its header"),
    ],
)
def test_bad_rows_are_refused_by_place(tmp_path, lines, options, said):
    file = tmp_path / ("docs.csv" if "id,text" in lines else "docs.jsonl")
    file.write_text("\n".join(lines))
    refuses(said, load_text_items, TextSource(path=str(file), **options))

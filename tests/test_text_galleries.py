"""Galleries of texts: built, continued, upgraded and examined as those of images are, and searched by document."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Run, store
from numpy.typing import NDArray
from PIL import Image
from schedule import mostly_nightly
from transformers import pipeline

from xcompat import Fingerprint, XcompatError
from xcompat.core import progress
from xcompat.data import contains_images
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


@pytest.fixture(scope="module")
def newer(compatible_folder: str) -> str:
    return compatible_folder


def rows_of(gallery: Gallery) -> dict[str, tuple[NDArray[np.float32], Any]]:
    found = {}
    for segment in gallery.segments:
        for rows, items in segment.blocks(1000):
            found |= dict(zip(items.ids, zip(items.embeds[0], segment.metadata(rows), strict=True), strict=True))
    return found


def test_a_gallery_holds_each_text_as_embedded_alone(
    run: Run, documents: Path, tmp_path: Path, old_folder: str, old: Embedder
) -> None:
    gallery = tmp_path / "gallery"
    code, out, err = run("build", documents, "--model", old_folder, "--out", gallery)
    assert (code, err) == (0, "") and f"{DOCUMENTS} texts added" in out
    stored = rows_of(Gallery.open(gallery))
    assert list(stored) == [f"doc-{number}" for number in range(DOCUMENTS)]
    for number, (embeds, about) in enumerate(stored.values()):
        alone = old.embed(old.processor.texts(document(number)))[0]
        np.testing.assert_allclose(embeds, alone, atol=1e-5)
        assert about == {"year": 2000 + number % 3, "text": document(number)}
    code, out, _ = run("build", documents, "--model", old_folder, "--out", gallery)
    assert code == 0 and f"0 texts added to {gallery}, {DOCUMENTS} were there already" in " ".join(out.split())
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
        code, _, err = run(*verb, "--model", old_folder, kept)
        assert code == 2 and "has other texts under the same ids: '0' and 2 more" in err and len(err.splitlines()) == 1
        assert "--id-column" in err and "--replace" in err and Gallery.open(gallery).generation == 1
    code, out, _ = run("add", gallery, numbered["same"], "--model", old_folder, "--replace", kept)
    assert code == 0 and "0 texts added" in out and "3 were there already" in " ".join(out.split())
    code, out, _ = run("add", gallery, numbered["other"], "--model", old_folder, "--replace", kept)
    after = rows_of(Gallery.open(gallery))
    assert code == 0 and "3 texts added" in out and list(after) == list(before) == ["0", "1", "2"]
    assert not any(np.allclose(after[name][0], before[name][0]) for name in after)


def test_passages_are_backfilled_within_budgets(run: Run, documents: Path, tmp_path: Path, old_folder: str, newer: str) -> None:
    gallery = tmp_path / "gallery"
    run.output("build", documents, "--model", old_folder, "--out", gallery, *CUT)
    count = len(Gallery.open(gallery))
    assert count > DOCUMENTS
    code, out, _ = run("upgrade", gallery, "--model", newer, "--backfill", documents, *CUT, "--budget", 20, "--dry-run")
    assert code == 0 and f"20 of {count} texts to embed" in out
    for _ in range(2):
        run.output("upgrade", gallery, "--model", newer, "--backfill", documents, *CUT, "--budget", 20)
    mixed = Gallery.open(gallery)
    assert mixed.counts() == {load_embedder(newer).fingerprint: 40, load_embedder(old_folder).fingerprint: count - 40}
    assert {about["document"] for _, about in rows_of(mixed).values()} == {f"doc-{number}" for number in range(DOCUMENTS)}
    out = run.output("doctor", gallery, "--model", newer, "--texts", documents, *CUT)
    assert "not made by" in out
    (finding,) = [line for line in out.splitlines() if "made by this model" in line]
    assert "40" in finding and "none" in finding


def test_texts_cut_otherwise_are_refused(run: Run, documents: Path, tmp_path: Path, old_folder: str, newer: str) -> None:
    gallery = tmp_path / "gallery"
    run.output("build", documents, "--model", old_folder, "--out", gallery, *CUT)
    before = Gallery.open(gallery).generation
    for cut in ((), ("--words", 3), ("--words", 8), ("--words", 5, "--overlap", 2)):
        for verb in (
            ("build", documents, "--model", old_folder, "--out", gallery),
            ("upgrade", gallery, "--model", newer, "--backfill", documents),
            ("doctor", gallery, "--model", old_folder, "--texts", documents),
        ):
            code, _, err = run(*verb, *cut)
            assert code == 2 and err.count("\n") == 1 and "holds these texts cut differently" in err and "'doc-" in err
    run.output("build", documents, "--model", old_folder, "--out", tmp_path / "whole")
    code, _, err = run("build", documents, "--model", old_folder, "--out", tmp_path / "whole", *CUT)
    assert code == 2 and "cut differently (only the gallery has 'doc-0'" in err
    assert Gallery.open(gallery).generation == before
    others = write_documents(tmp_path / "others.jsonl.gz", range(100, 103))
    code, _, err = run("upgrade", gallery, "--model", newer, "--backfill", others, *CUT)
    assert code == 2 and "texts is in" in err and "ids are set by --id-column, --words and --overlap" in err
    assert "texts added" in run.output("add", gallery, others, "--model", old_folder, *CUT)


def test_an_embedding_without_direction_is_named(
    documents: Path, tmp_path: Path, old: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = load_originals(documents)
    embed = texts.embed

    def spoilt(*arguments: Any) -> Any:
        for rows, embeds in embed(*arguments):
            embeds[7] = 0
            yield rows, embeds

    monkeypatch.setattr(texts, "embed", spoilt)
    gallery = Gallery.create(tmp_path / "gallery", old)
    with pytest.raises(XcompatError, match="the embedding of 'doc-7' is zero and has no direction"):
        ingest(gallery, texts, old)
    gallery.close()
    assert len(Gallery.open(gallery.path)) == 0


def write_sources(folder: Path) -> None:
    """Write every kind of source, each under a name that says what it holds."""
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
    with pytest.raises(XcompatError, match="nothing: no shards"):
        contains_images(str(tmp_path / "nothing"))


def test_missing_towers(run: Run, documents: Path, tmp_path: Path, image_folder_of: dict[str, str], old_folder: str) -> None:
    code, _, err = run("build", documents, "--model", image_folder_of["vit"], "--out", tmp_path / "g")
    assert code == 2 and err.count("\n") == 1 and "embeds images only, but these are texts" in err
    texts_only = SimpleNamespace(name="m", processor=SimpleNamespace(image_size=(0, 0), max_length=16))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(XcompatError, match="m embeds texts only, but these are images"):
        load_originals(tmp_path / "a.png").require(cast("Embedder", texts_only))
    for options, message in (
        (("--words", 3, "--overlap", 3), "overlap is 3 and words is 3"),
        (("--text-column", "txt"), "did you mean 'text'?"),
    ):
        assert message in run.refusal("build", documents, "--model", old_folder, "--out", tmp_path / "g", *options)
    assert not (tmp_path / "g").exists()
    code, _, err = run("upgrade", tmp_path, "--model", "m", "--words", 3)
    assert code == 2 and "--words applies to re-embedded texts: add --backfill" in err


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
    run: Run, documents: Path, tmp_path: Path, old_folder: str, newer: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gallery = tmp_path / "gallery"
    run.output("build", documents, "--model", old_folder, "--out", gallery, *CUT)
    code, out, _ = run("search", gallery, "a bear", "--model", newer, "--group-by", "document", "--top-k", 20)
    rows = [line.split("│") for line in out.splitlines() if "#" in line]
    assert code == 0 and len(rows) == 20 and len({cells[4].strip() for cells in rows}) == 20
    assert all(cells[3].strip().startswith(cells[4].strip() + "#") for cells in rows) and "document: " not in out
    code, out, _ = run("search", gallery, "a bear", "--model", newer, "--group-by", "documnt")
    assert code == 0 and "no hit has 'documnt' in its metadata" in out
    find = pipeline("compatible-retrieval", model=newer, gallery=str(gallery), group_by="document")
    assert [hit.group for hit in find("a bear", top_k=20)] == [cells[4].strip() for cells in rows]
    with pytest.raises(XcompatError, match="the query is empty"):
        find("  ")
    monkeypatch.setattr(progress.logger, "propagate", True)
    progress.notice_once.cache_clear()
    assert find("bears sleep " * 100) and "queries truncated to 16 tokens" in caplog.text


def test_impossible_queries_are_one_line(run: Run, tmp_path: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    code, out, _ = run("search", "g", "bears sleep " * 100, "--model", old_folder)  # no file has so long a name
    assert code == 0 and "query truncated to 16 tokens" in out
    (row,) = [line for line in out.splitlines() if "bears" in line]
    assert "[red]bears[/red] sleep sleep" in row and " … " in row and row.count("sleep") < 15

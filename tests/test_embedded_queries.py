"""Embeddings as queries: wherever a map works, in every format, for galleries and stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from store_places import unit_vectors as draw
from transformers import AutoModel, pipeline
from typer.testing import CliRunner

from xcompat import Fingerprint, RidgeConfig, RidgeModel, XcompatError
from xcompat.cli import app
from xcompat.integrations.haystack import CompatVectorMapper
from xcompat.integrations.langchain import CompatEmbeddings
from xcompat.integrations.llamaindex import CompatEmbedding
from xcompat.models.config import describe_old
from xcompat.retrieval import Gallery

OLD = Fingerprint.from_string("clip-b32")
NEW_DIM, OLD_DIM, ITEMS, QUERIES = 12, 8, 80, 5
IDS = [f"q{row}" for row in range(QUERIES)]


NEW = draw(ITEMS, NEW_DIM, 0)
OLD_ROWS = NEW @ draw(NEW_DIM, OLD_DIM, 1)
OLD_ROWS /= np.linalg.norm(OLD_ROWS, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def map_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = RidgeConfig(old=describe_old(OLD, OLD_DIM), embedding_dim=NEW_DIM)
    model = RidgeModel(config).fit([(torch.from_numpy(NEW), torch.from_numpy(OLD_ROWS))])
    model.save_pretrained(folder := tmp_path_factory.mktemp("run") / "model")
    return str(folder)


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    with Gallery.create(tmp_path / "gallery", OLD, dim=OLD_DIM) as made:
        made.add(OLD_ROWS, [str(row) for row in range(ITEMS)])
        made.commit()
    return tmp_path / "gallery"


def write_folder(here: Path, kind: str) -> Path:
    (here / "asked").mkdir()
    np.save(here / "asked" / f"{kind}_embeds.npy", NEW[:QUERIES])
    (here / "asked" / f"{kind}_ids.txt").write_text("\n".join(IDS))
    return here / "asked"


def write_table(here: Path, name: str, more: dict | None = None) -> Path:
    here.mkdir(exist_ok=True)
    table = {"id": IDS, "embedding": NEW[:QUERIES].tolist()} | (more or {})
    if name.endswith(".parquet"):
        pq.write_table(pa.table(table), here / name)
    else:
        rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
        (here / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return here / name


def write_array(here: Path, ids: bool) -> Path:
    np.save(here / "q.npy", NEW[:QUERIES])
    if ids:
        (here / "q_ids.txt").write_text("\n".join(IDS))
    return here / "q.npy"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "array": lambda here: write_array(here, ids=True),
    "parquet": lambda here: write_table(here, "q.parquet"),
    "json lines": lambda here: write_table(here, "q.jsonl"),
    "folder of tables": lambda here: write_table(here / "shards", "0.parquet").parent,
    "query folder": lambda here: write_folder(here, "query"),
    "text folder": lambda here: write_folder(here, "text"),
    "beside texts": lambda here: write_table(here, "q.parquet", {"text": ["a"] * QUERIES}),
}


def search(place: str | Path, queries: Path, model: str, *more: str) -> list[dict]:
    asked = ["gallery", "search", str(place), "--queries", str(queries), "--model", model, "--top-k", "2", "--json", *more]
    done = CliRunner().invoke(app, asked)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("form", SOURCES)
def test_a_map_of_embeddings_takes_embeddings(form: str, gallery: Path, map_folder: str, tmp_path: Path) -> None:
    found = search(gallery, SOURCES[form](tmp_path), map_folder)
    assert [each["query"] for each in found] == IDS
    assert [each["hits"][0]["id"] for each in found] == [str(row) for row in range(QUERIES)]


def test_a_run_folder_and_a_store_take_them_too(gallery: Path, map_folder: str, tmp_path: Path) -> None:
    queries = write_array(tmp_path, ids=True)
    expected = search(gallery, queries, map_folder)
    assert search(gallery, queries, str(Path(map_folder).parent)) == expected
    assert search(f"file://{gallery}", queries, map_folder) == expected
    np.save(tmp_path / "old.npy", OLD_ROWS[:3])
    named = search(gallery, tmp_path / "old.npy", OLD.name)  # the gallery knows the name
    assert [each["hits"][0]["id"] for each in named] == ["0", "1", "2"]


def test_bad_queries_are_named_and_left_out(
    gallery: Path, map_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = NEW[:20].copy()
    rows[3], rows[4] = np.nan, 0
    rows[5] *= np.float32(1e-22)
    np.save(tmp_path / "q.npy", rows)
    found = search(gallery, tmp_path / "q.npy", map_folder)
    assert [each["query"] for each in found] == [str(row) for row in range(20) if row not in (3, 4)]
    assert [each["hits"][0]["id"] for each in found] == [each["query"] for each in found]
    assert "2 of 20 rows" in caplog.text and "row 3 has no embedding; row 4 holds only zeros" in caplog.text
    with pytest.raises(XcompatError, match="2 of 20 rows .* more than the share 0: .* --max-bad-share"):
        search(gallery, tmp_path / "q.npy", map_folder, "--max-bad-share", "0")


def test_another_dimension_names_both_and_the_right_model(gallery: Path, map_folder: str, tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", OLD_ROWS[:3])
    said = r"q.npy has 8 dimensions, and the model takes 12: .* the new model that .* fitted on "
    said += r"\(clip-b32 has 8: .* --model clip-b32\)"
    with pytest.raises(XcompatError, match=said):
        search(gallery, tmp_path / "q.npy", map_folder)


def test_options_that_embed_texts_are_refused(gallery: Path, map_folder: str, tmp_path: Path) -> None:
    queries = write_array(tmp_path, ids=True)
    with pytest.raises(XcompatError, match="--embed-with embeds queries, but .*q.npy holds embeddings"):
        search(gallery, queries, map_folder, "--embed-with", "os:getcwd")
    (tmp_path / "q_ids.txt").write_text("a\n")
    with pytest.raises(XcompatError, match="q_ids.txt has 1 lines, but q.npy has 5 rows"):
        search(gallery, queries, map_folder)


def test_the_pipeline_takes_vectors_in_every_form(gallery: Path, map_folder: str) -> None:
    find = pipeline("compatible-retrieval", model=map_folder, gallery=str(gallery))
    for one in (NEW[2], torch.from_numpy(NEW[2]), NEW[2].tolist(), NEW[2] * 1e-22):
        assert find(one, top_k=1)[0].id == "2"
    for many in (NEW[:3], torch.from_numpy(NEW[:3]), list(NEW[:3])):
        assert [hits[0].id for hits in find(many, top_k=1, batch_size=2)] == ["0", "1", "2"]
    with pytest.raises(XcompatError, match="a query has 8 dimensions, and the model takes 12"):
        find(OLD_ROWS[0])
    with pytest.raises(XcompatError, match="fitted on embeddings only"):
        find("a red shoe")


def test_frameworks_take_vectors(map_folder: str) -> None:
    expected = AutoModel.from_pretrained(map_folder).to_space(torch.from_numpy(NEW[:1]))[0].tolist()
    asked = (NEW[0] * 3).tolist()
    found = {
        "langchain": CompatEmbeddings(map_folder).map_vector(asked),
        "llamaindex": CompatEmbedding(map_folder).map_vector(asked),
        "haystack": CompatVectorMapper(map_folder).run(embedding=asked)["embedding"],
    }
    for vector in found.values():
        np.testing.assert_allclose(vector, expected, atol=1e-6)
    with pytest.raises(XcompatError, match="the embedding has 8 dimensions, and the model takes 12"):
        CompatEmbeddings(map_folder).map_vector(OLD_ROWS[0].tolist())
    with pytest.raises(XcompatError, match="map_vector"):
        CompatEmbeddings(map_folder).embed_query("a red shoe")

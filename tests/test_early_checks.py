"""Mistakes in places, ids and classes are found before a model is loaded: the models here have no weights to load."""

from __future__ import annotations

import json
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from conftest import Run, store, write_embeds, write_photos
from test_index_gallery import write_index

from xcompat import Fingerprint
from xcompat.retrieval import Gallery

INDEX = "--old index.faiss --new enc --images photos"
DUMP = "--old dump.json --new enc --images photos"
NO_ITEMS = "empty: no shards"
MISTAKES = {
    f"map {INDEX} --ids short.txt": "index.faiss holds 4 vectors, but there are 2 ids; list an id per vector, in order",
    f"map {INDEX} --ids other.txt": "index.faiss and photos share no id ('x0', '00.png'); use the same ids in both",
    "evaluate runs/nosuch": "runs/nosuch does not exist; use a recipe, a run's folder or a checkpoint",
    "gallery build ./gone/photos --model enc": "gone/photos does not exist; there is no gone in",
    "gallery build gone --model enc": "gone does not exist; there is no gone in",
    "gallery build photos/2024 --model enc": "photos/2024 does not exist; there is no 2024 in",
    "gallery add gallery ./gone/photos --model enc": "gone/photos does not exist; there is no gone in",
    "gallery upgrade gallery --model enc --backfill ./gone/photos": "gone/photos does not exist; there is no gone in",
    "gallery doctor gallery --model enc --images ./gone/photos": "gone/photos does not exist; there is no gone in",
    "gallery build photos --model runs/nosuch": "the model folder runs/nosuch does not exist",
    "map --old index.faiss --new enc --images ./gone/photos": "gone/photos does not exist; there is no gone in",
    "map --old index.faiss --new enc --texts ./gone/texts": "gone/texts does not exist; there is no gone in",
    "evaluate ./gone/run --data photos": "gone/run does not exist; use a recipe, a run's folder or a checkpoint",
    "serve gallery --model enc --images ./gone/photos": "gone/photos does not exist; there is no gone in",
    "gallery search gallery me --model enc --rerank --originals ./gone/photos": "gone/photos does not exist; there is no gone in",
    "embed ./gone/photos --model enc --out new": "./gone/photos does not exist; there is no gone in",
    f"map {DUMP} --vector-name title_vector --ids ids.txt": "dump.json has ids of its own; remove --ids",
    f"map {DUMP} --ids nowhere.txt": "--ids nowhere.txt does not exist",
    f"map {DUMP} --id-column skuu": "--id-column skuu: no such name in dump.json; did you mean 'sku'?",
    f"map {DUMP} --vector-name title_vectr": "--vector-name title_vectr: no such name in dump.json; did you mean 'title_vector'?",
    f"map {DUMP}": "dump.json holds no embeddings; choose title_vector with --vector-name",
    "map --old bare --new bare --ids ids.txt": "bare has ids of its own; remove --ids",
    "map --old gallery --new bare --ids ids.txt": "gallery has ids of its own; remove --ids",
    f"map {INDEX} --ids ids.txt --labels few.txt": "few.txt has 2 classes, but index.faiss has 4 items",
    f"map {INDEX} --ids ids.txt --labels short.txt": "short.txt lists images without classes; write the class after each path",
    f"map {INDEX} --ids ids.txt --searched-classes open": "--searched-classes open needs classes; add them with --labels",
    f"map {INDEX} --ids ids.txt --memory-codec SQ8": "--memory-codec needs a memory; add classes or captions",
    f"map {INDEX} --ids ids.txt --new-model enc": "--new-model enc: --new is already a model; remove --new-model",
    f"map {INDEX} --ids ids.txt --out taken": "taken/note.txt was not made by `xcompat map`",
    "map --old index.faiss --new enc --images empty": NO_ITEMS,
    "embed photos --model enc --out taken": "taken/note.txt was not made by `xcompat embed`",
    "embed empty --model enc --out new": "empty",
    "gallery build photos --model enc --out taken": "taken is not empty (it holds note.txt); choose another folder",
    "gallery build photos --model enc --out gallery --index HNSW8": "was made with index Flat, not HNSW8; remove --index",
    "gallery build photos --model enc --index HNSW8,foo": "--index HNSW8,foo is not a faiss factory string",
    "gallery build empty --model enc": NO_ITEMS,
    "gallery add gallery empty --model enc": NO_ITEMS,
    "gallery upgrade gallery --model enc --backfill empty": NO_ITEMS,
    "gallery doctor gallery --model enc --images empty": NO_ITEMS,
    "gallery search index.faiss shoe --model own --ids short.txt": "index.faiss holds 4 vectors, but there are 2 ids",
    "gallery search gallery shoe --model own --rerank 5 --originals empty": NO_ITEMS,
    "evaluate --old bare --new short.txt --map own": "short.txt is not a file of embeddings; use a faiss index, a gallery",
    "serve index.faiss --model own --ids short.txt": "index.faiss holds 4 vectors, but there are 2 ids",
    "serve index.faiss --model own --images photos --ids short.txt": "index.faiss holds 4 vectors, but there are 2 ids",
    "serve gallery --model own --port PORT": "cannot listen at 127.0.0.1:",
    "shadow gallery --queries nothing.txt --old enc --model own": "nothing.txt contains no text",
    "shadow gallery --queries ids.txt --old enc --model own --rerank 3 --originals empty": NO_ITEMS,
    "plan empty --items 9 --queries-per-day 9": "empty",
    "export faiss nowhere.faiss --model own --out new.faiss": "the faiss index nowhere.faiss does not exist",
    "export faiss index.faiss --model own --out taken": "taken/note.txt was not made by `xcompat export faiss`",
    "export onnx own --out taken": "taken/note.txt was not made by `xcompat export onnx`",
    "export sentence-transformers own --out taken": "taken/note.txt was not made by `xcompat export sentence-transformers`",
    "migrate plan sqlite:///PLACE/shop.db?table=itmes --model own": "itmes",
    "migrate start sqlite:///PLACE/shop.db?table=itmes --model own": "itmes",
    "migrate verify sqlite:///PLACE/shop.db?table=itmes --model own": "itmes",
}
"""What is typed -> what is said."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_photos(tmp_path / "photos", 4)
    write_index(tmp_path / "index.faiss", np.eye(4, dtype=np.float32))
    ids = [f"{number:02}.png" for number in range(4)]
    for name, lines in {
        "ids.txt": ids,
        "other.txt": [f"x{number}" for number in range(4)],
        "short.txt": ["00.png", "01.png"],
        "few.txt": ["hat", "cup"],
        "nothing.txt": [],
    }.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    for name, kind in (("enc", "clip"), ("own", "xcompat-ridge")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    for name in ("empty", "taken"):
        (tmp_path / name).mkdir()
    (tmp_path / "taken" / "note.txt").write_text("mine")
    hits = [{"_id": f"{number:02}.png", "_source": {"sku": "s", "title_vector": [number, 1.0]}} for number in range(4)]
    (tmp_path / "dump.json").write_text(json.dumps({"hits": {"hits": hits}}))
    write_embeds(tmp_path / "bare", ids, image=np.eye(4, dtype=np.float32))
    store(Gallery.create(tmp_path / "gallery", Fingerprint.from_string("old"), dim=4), np.eye(4, dtype=np.float32), ids).close()
    sqlite3.connect(tmp_path / "shop.db").close()
    return tmp_path


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_found_first(line: str, place: Path, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the Hub is asked"))
    monkeypatch.setattr("xcompat.encoders.load_encoder", lambda *_, **__: pytest.fail("a model is loaded"))
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        typed = line.replace("PLACE", str(place)).replace("PORT", str(other.getsockname()[1]))
        code, _, err = run_xcompat(*typed.split())
    said = err.splitlines()[-1]
    assert code == 2 and said.startswith("xcompat: ") and MISTAKES[line] in said, err
    assert not any((place / name).exists() for name in ("new", "new.faiss", "runs", "gallery_new")), "nothing is written"

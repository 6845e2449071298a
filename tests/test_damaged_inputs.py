"""Smallest damage that once was a traceback or a wrong answer: it is one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import datasets
import faiss
import numpy as np
import pyarrow as pa
import pytest
import torch

from xcompat import Fingerprint, XcompatError
from xcompat.core.arrays import map_array, read_lines
from xcompat.core.files import read_json, write_json
from xcompat.data import load_pairs
from xcompat.data.classes import load_classes
from xcompat.data.schema import captions_of
from xcompat.encoders import load_encoder
from xcompat.encoders.standins import save_stand_in
from xcompat.hub.lineage import trace_lineage
from xcompat.methods import FctConfig, FctModel
from xcompat.models.config import describe_old
from xcompat.retrieval import Gallery, faiss_probe, upgrading
from xcompat.retrieval.commands import read_ids
from xcompat.retrieval.faiss_index import FaissIndex

OLD = Fingerprint.from_string("old")


def one_line(error: pytest.ExceptionInfo[XcompatError], named: object) -> None:
    assert str(named) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "header", [b"{'descr': '<f4', 'shape': (2,", b"[" * 60, b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (2,)}", b""]
)
def test_arrays_with_damaged_headers(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16))
    with pytest.raises(XcompatError) as refused:
        map_array(path)
    one_line(refused, path)


def test_lines_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(b"first\n\xff\xfe\n")
    with pytest.raises(XcompatError, match="not UTF-8 text; .* at byte 6") as refused:
        read_lines(path)
    one_line(refused, path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_line_breaks_alone(end: str, tmp_path: Path) -> None:
    path, ids = tmp_path / "ids.txt", ["a\x85b", "c\u2028d\u2029e", "f\x0cg\x0bh", "i\x1cj\x1dk\x1el"]
    for last in ("", end):
        path.write_bytes(b"\xef\xbb\xbf" + end.join(ids).encode() + last.encode())
        assert read_lines(path) == read_ids(path) == load_classes(path) == ids
    path.write_bytes(f"a{end}{end}b{end}{end}".encode())
    assert read_lines(path) == ["a", "", "b", ""] and read_ids(path) == ["a", "", "b"]
    path.write_bytes(b"")
    assert read_lines(path) == read_ids(path) == []


def test_class_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("cat\ndog\n", encoding="utf-16")
    with pytest.raises(XcompatError, match="not UTF-8 text; .* at byte 0") as refused:
        load_classes(path)
    one_line(refused, path)


def test_a_table_of_classes_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "classes.csv"
    path.write_text("index,alphabet,charac")
    with pytest.raises(XcompatError, match="contains no class names") as refused:
        load_classes(path)
    one_line(refused, path)


def test_a_tower_of_more_layers_than_any_has(tmp_path: Path) -> None:
    folder = Path(save_stand_in(tmp_path / "model", "open_clip", 8))
    config = read_json(folder / "open_clip_config.json")
    config["model_cfg"]["text_cfg"]["layers"] = 2**63
    write_json(folder / "open_clip_config.json", config)
    with pytest.raises(XcompatError, match="text_cfg.layers is 9,223,372,036,854,775,808") as refused:
        load_encoder(str(folder))
    one_line(refused, "open_clip_config.json")


def test_a_saved_data_set_whose_texts_are_none(tmp_path: Path) -> None:
    texts = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xbe\xbe"))
    datasets.Dataset(pa.table({"image": pa.array([b"none"]), "caption": texts})).save_to_disk(tmp_path / "saved")
    with pytest.raises(XcompatError, match="cannot be read .*recreate it with the command that wrote it") as refused:
        load_pairs(str(tmp_path / "saved"))
    one_line(refused, tmp_path / "saved")


def test_damage_that_shows_in_a_search_alone() -> None:
    queries = np.eye(4, dtype=np.float32)
    index = faiss.index_factory(4, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(np.eye(4, dtype=np.float32).repeat(20, 0))
    index.add(queries)
    index.nprobe = 0
    with pytest.raises(XcompatError, match="faiss cannot search the index: .*it is damaged"):
        FaissIndex(index, "ip").search(queries, 1)

    class Strange(faiss.IndexFlatIP):  # type: ignore[misc]  # faiss has no types
        def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            return np.ones((len(queries), k), np.float32), np.full((len(queries), k), 140668605676512)

    strange = Strange(4)
    strange.add(queries)
    found = FaissIndex(strange, "ip")
    found.index = strange  # without the cast to faiss's own class
    with pytest.raises(XcompatError, match="rows outside of the index; it is damaged"):
        found.search(queries, 1)


@pytest.mark.parametrize("value", [float("nan"), 5, True, [float("nan"), 4]])
def test_what_is_no_text_is_no_caption(value: object) -> None:
    assert captions_of(value) == []  # type: ignore[arg-type]


def test_an_index_of_ids_around_one_of_other_dimensions(tmp_path: Path) -> None:
    index = faiss.index_factory(8, "IDMap,Flat")
    index.add_with_ids(np.eye(8, dtype=np.float32), np.arange(8))
    index.d = 12
    faiss.write_index(index, str(tmp_path / "index"))
    assert faiss_probe.check_index(str(tmp_path / "index"), vectors=False) == "it claims 12 dimensions, but its inner index has 8"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"model_type": "clip", "text_config": {"hidden_size": "four"}}'),
        ("config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"tokenizer_class": 4}'),
        ("tokenizer_config.json", '{"pad_token": null}'),
        ("preprocessor_config.json", "\ud800"),
    ],
)
def test_files_of_a_model(file: str, text: str, tmp_path: Path) -> None:
    folder = save_stand_in(tmp_path / "model", "clip", 8)
    (tmp_path / "model" / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(XcompatError) as refused:
        load_encoder(folder)
    one_line(refused, folder)


@pytest.mark.parametrize(
    "old", [4, {"name": "x", "fingerprint": "y"}, {"name": "x", "fingerprint": "y", "dim": 8, "compatible_with": [1]}]
)
def test_a_lineage_that_names_nothing(old: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xcompat-bct", "old": old}))
    with pytest.raises(XcompatError, match="has no valid compatible versions") as refused:
        trace_lineage(str(tmp_path))
    one_line(refused, tmp_path)


@pytest.mark.parametrize("damage", [("4", "5"), ("{", ""), ('"done"', '"gone"'), ('"generation"', '"regeneration"')])
def test_an_upgrade_whose_journal_is_damaged_begins_anew(damage: tuple[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FctModel(FctConfig(old=describe_old(OLD, 4), embedding_dim=6)).eval()
    gallery = Gallery.create(tmp_path / "gallery", OLD, dim=4)
    embeds = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for start in (0, 4):
        gallery.add(embeds[start : start + 4], [f"item {row}" for row in range(start, start + 4)])
        gallery.commit()
    plain = upgrading._record

    def once(*arguments: object) -> None:
        plain(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with mock.patch.object(upgrading, "_record", once), pytest.raises(KeyboardInterrupt):
        gallery.upgrade(model)
    (journal,) = gallery.path.glob("upgrade-*.json")
    whole = journal.read_text()
    assert whole.replace(*damage, 1) != whole
    journal.write_text(whole.replace(*damage, 1))
    again = Gallery.open(gallery.path)
    assert again.upgrade(model) == 8 and len(again) == 8 and again.damage() == []
    hits = again.search(np.ones((1, 6)), model, top_k=9)[0]
    assert sorted(hit.id for hit in hits) == [f"item {row}" for row in range(8)]

"""Damaged and oversized inputs, and a Hub that fails: one line that names the file, in little memory; the same again works."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import re
import shutil
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import datasets
import faiss
import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import refuses
from hub_server import Hub
from schedule import mostly_nightly_rows
from test_loading import write_shard
from test_models import build, shake

from xcompat import Fingerprint, XcompatError
from xcompat.core import failures
from xcompat.core.arrays import map_array, read_lines
from xcompat.data import PairSource, cache, load_classes, load_pairs, load_texts, shards, text_files
from xcompat.data.schema import captions_of
from xcompat.encoders import load_encoder
from xcompat.encoders.standins import save_stand_in
from xcompat.hub.lineage import trace_lineage
from xcompat.methods import FctConfig, FctModel
from xcompat.models.config import describe_old
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery, faiss_probe, upgrading
from xcompat.retrieval.commands import read_ids
from xcompat.retrieval.faiss_index import FaissIndex

OLD = Fingerprint.from_string("old")


@pytest.mark.parametrize(
    "header", [b"{'descr': '<f4', 'shape': (2,", b"[" * 60, b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (2,)}", b""]
)
def test_arrays_with_damaged_headers(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16))
    refuses(str(path), map_array, path)


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        (read_lines, "lines.txt", b"first\n\xff\xfe\n", "not UTF-8 text; .* at byte 6"),
        (load_classes, "lines.txt", "cat\ndog\n".encode("utf-16"), "not UTF-8 text; .* at byte 0"),
        (load_classes, "classes.csv", b"index,alphabet,charac", "contains no class names"),
    ],
)
def test_lines_that_are_no_names(read: Callable[[Path], object], name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refuses(f"{path}.*{message}", read, path)


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


def test_captions_that_are_no_texts(tmp_path: Path) -> None:
    texts = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xbe\xbe"))
    datasets.Dataset(pa.table({"image": pa.array([b"none"]), "caption": texts})).save_to_disk(tmp_path / "saved")
    refuses(f"{tmp_path}/saved.* cannot be read .*recreate it with the command", load_pairs, str(tmp_path / "saved"))
    for value in (float("nan"), 5, True, [float("nan"), 4]):
        assert captions_of(value) == []  # type: ignore[arg-type]


def test_damaged_faiss_indexes(tmp_path: Path) -> None:
    queries = np.eye(4, dtype=np.float32)
    index = faiss.index_factory(4, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(np.eye(4, dtype=np.float32).repeat(20, 0))
    index.add(queries)
    index.nprobe = 0
    refuses("faiss cannot search the index: .*it is damaged", FaissIndex(index, "ip").search, queries, 1)

    class Strange(faiss.IndexFlatIP):  # type: ignore[misc]  # faiss has no types
        def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            return np.ones((len(queries), k), np.float32), np.full((len(queries), k), 140668605676512)

    strange = Strange(4)
    strange.add(queries)
    found = FaissIndex(strange, "ip")
    found.index = strange  # without the cast to faiss's own class
    refuses("rows outside of the index; it is damaged", found.search, queries, 1)
    nested = faiss.index_factory(8, "IDMap,Flat")
    nested.add_with_ids(np.eye(8, dtype=np.float32), np.arange(8))
    nested.d = 12
    faiss.write_index(nested, str(tmp_path / "index"))
    assert faiss_probe.check_index(str(tmp_path / "index"), vectors=False) == "it claims 12 dimensions, but its inner index has 8"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"model_type": "clip", "text_config": {"hidden_size": "four"}}'),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"tokenizer_class": 4}'),
        ("tokenizer_config.json", '{"pad_token": null}'),
        ("preprocessor_config.json", "\ud800"),
        ("model.safetensors", ""),
        ("model.safetensors", "not safetensors at all"),
        ("model.safetensors", None),
    ],
)
def test_files_of_a_model(file: str, text: str | None, tmp_path: Path) -> None:
    folder = save_stand_in(tmp_path / "model", "clip", 8)
    path = tmp_path / "model" / file
    path.write_bytes(path.read_bytes()[:-100] if text is None else text.encode("utf-8", "surrogatepass"))
    refuses(folder, load_encoder, folder)


@pytest.mark.parametrize(
    "old", [4, {"name": "x", "fingerprint": "y"}, {"name": "x", "fingerprint": "y", "dim": 8, "compatible_with": [1]}]
)
def test_a_lineage_that_names_nothing(old: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xcompat-bct", "old": old}))
    refuses(f"{tmp_path}.*has no valid compatible versions", trace_lineage, str(tmp_path))


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


DEEP, LONG = "[" * 100_000 + "]" * 100_000, "1" * 5000  # deeper than any limit that a library may set
MEMORY = 100_000_000
"""Bytes that may be held while something is refused."""


def refused(load: Callable[[], object], message: str) -> None:
    """Ask for one line that says what is wrong, in little memory."""
    tracemalloc.start()
    try:
        refuses(message, load)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (bytes(2**20), "has a line of more than 16,777,216 characters"),
        (b"photos/0001.png,a\n" * 2**16, "bytes or more, too many for a table; split it into several"),
    ],
    ids=["one line", "many lines"],
)
@pytest.mark.parametrize("name", ["captions.csv.gz", "captions.tsv.gz", "captions.jsonl.gz"])
def test_a_table_that_unpacks_to_gigabytes(name: str, row: bytes, message: str, tmp_path: Path) -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    whole = b"".join(packer.compress(row) for _ in range(80)) + packer.flush()
    (tmp_path / name).write_bytes(whole)
    assert len(whole) < 300_000
    refused(lambda: load_pairs(str(tmp_path)), message)


def test_large_and_damaged_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several gigabytes, of which 65 MiB are looked at, or 72 where Python reads farther ahead in the file (3.12 and newer)."""
    one = gzip.compress(b"photos/0001.png,a\n" * 2**19, mtime=0)
    (tmp_path / "captions.csv.gz").write_bytes(one * 600)
    refused(lambda: load_pairs(str(tmp_path)), "has (68,157,440|75,497,472) bytes or more, too many for a table")
    data = bytearray(gzip.compress(b"".join(b"line %d\n" % n for n in range(1000)), mtime=0))
    data[30:60] = bytes(30)
    for name in ("texts.txt.gz", "captions.csv.gz"):
        (tmp_path / name).write_bytes(bytes(data))
    refused(lambda: load_texts(str(tmp_path / "texts.txt.gz")), "texts.txt.gz cannot be read after line")
    refused(lambda: load_pairs(str(tmp_path / "captions.csv.gz")), "captions.csv.gz cannot be read")
    monkeypatch.setattr(text_files, "LARGEST_TABLE", 1000)
    (tmp_path / "captions.csv").write_text("image,caption\n" + "a.png,a\n" * 200)
    (tmp_path / "classes.txt").write_text("name\n" * 300)
    refused(lambda: load_pairs(str(tmp_path / "captions.csv")), "captions.csv has 1,614 bytes or more, too many for a table")
    refused(lambda: load_classes(tmp_path / "classes.txt"), "classes.txt has 1,500 bytes or more, too many for a table")


@pytest.mark.parametrize("name", ["x" * 5000 + ".png", "nul\0.png", ["a.png"]], ids=["long", "null", "list"])
def test_names_that_no_file_has(name: object, tmp_path: Path) -> None:
    (tmp_path / "captions.jsonl").write_text(json.dumps({"image": name, "caption": "a"}))
    refused(lambda: load_pairs(str(tmp_path)), "lists 1 images, and 1 of them do not exist|is not an image path")


@pytest.mark.parametrize("value", [DEEP, LONG], ids=["deep", "long"])
def test_json_beyond_limits(value: str, tmp_path: Path) -> None:
    (tmp_path / "captions.jsonl").write_text(f'{{"image": "a.png", "caption": {value}}}\n')
    refused(lambda: load_pairs(str(tmp_path)), "captions.jsonl line 1 is not valid JSON")
    (tmp_path / "texts.jsonl").write_text(f'{{"text": "a"}}\n{{"text": {value}}}\n')
    refused(lambda: load_texts(str(tmp_path / "texts.jsonl")), "texts.jsonl line 2 is not valid JSON")
    write_shard(tmp_path / "a.tar", {"0": {"png": b"x", "json": f'{{"title": {value}}}'.encode()}})
    source = PairSource(path=str(tmp_path / "a.tar"), caption_column="json.title")
    refused(lambda: load_pairs(source), "1 of 1 samples cannot be used.*json is not valid JSON")


@pytest.mark.parametrize("name", ["texts.txt", "texts.txt.gz", "texts.jsonl.gz"])
def test_a_text_without_end(name: str, tmp_path: Path) -> None:
    opener = gzip.open if name.endswith("gz") else open
    with opener(tmp_path / name, "wb") as file:
        file.write(b"good\n" if "txt" in name else b'{"text": "good"}\n')
        for _ in range(40):
            file.write(b"x" * 2**20)
    refused(lambda: load_texts(str(tmp_path / name)), f"{name} line 2 has a line of more than 16,777,216 characters")


def claiming(kind: bytes, claimed: int, **pax: str) -> bytes:
    info = tarfile.TarInfo("0.png")
    info.type, info.size, info.pax_headers = kind, claimed, pax
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) + bytes(10_240)


TOO_LARGE = "0.png declares 4,398,046,511,104 bytes, above the limit of 536,870,912 per sample"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (claiming(tarfile.REGTYPE, 2**42), TOO_LARGE),
        (claiming(tarfile.REGTYPE, 1, size=str(2**42)), TOO_LARGE),
        (claiming(tarfile.GNUTYPE_LONGNAME, 2**42), "a header declares 4,398,046,511,104 bytes"),
        (claiming(tarfile.XHDTYPE, 2**42), "a header declares 4,398,046,511,104 bytes"),
    ],
    ids=["file", "extended", "long name", "header"],
)
def test_a_member_that_claims_terabytes(data: bytes, message: str, tmp_path: Path) -> None:
    for name, content in {"a.tar": data, "b.tar.gz": gzip.compress(data)}.items():
        (tmp_path / name).write_bytes(content)
        refused(lambda file=tmp_path / name: load_pairs(str(file)), message)


def test_samples_and_padding_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LARGEST_SAMPLE", 1000)
    write_shard(tmp_path / "whole.tar", {str(n): {"png": bytes(500), "a": bytes(500)} for n in range(5)})
    assert len(list(shards.read_shard(tmp_path / "whole.tar"))) == 5
    write_shard(tmp_path / "a.tar", {"0": {str(n): bytes(400) for n in range(5)}})
    refused(lambda: load_pairs(str(tmp_path / "a.tar")), "0.2 declares 400 bytes, above the limit of 1,000 per sample")
    monkeypatch.setattr(shards, "MOST_PADDING", 2)
    write_shard(tmp_path / "a.tar", {"0": {"png": b"x", "txt": b"a"}})
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(data + bytes(3 * 2**20)))
    refused(lambda: load_pairs(str(tmp_path / "b.tar.gz")), "members follow a broken header")
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(data + bytes(2**20)))
    assert len(load_pairs(str(tmp_path / "c.tar.gz"))) == 1


LINES = [f"line {n}" for n in range(300)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "texts.txt"
    source.write_text("\n".join(LINES))
    load_texts(str(source))
    (file,) = (tmp_path / "cache").rglob("*.arrow")
    return file, str(source)


def change(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))  # another time, however coarse the clock


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "other"])
def test_a_damaged_file_is_written_again(damage: str, made: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    file, source = made
    whole = file.read_bytes()
    place = whole.index(b"line 7") + 5
    flipped = whole[:place] + b"8" + whole[place + 1 :]
    change(file, {"flipped": flipped, "cut": whole[:-100], "emptied": b"", "other": bytes(len(whole))}[damage])
    capsys.readouterr()
    assert load_texts(source)["text"][:] == LINES
    assert "; rebuilding it" in capsys.readouterr().out
    assert file.read_bytes() == whole and load_texts(source)["text"][:] == LINES


@pytest.mark.parametrize("content", [None, "{", "[]", {"arrow_file": 3}, {"arrow_file": {"size": 3}}, "changed"])
def test_a_damaged_record_is_written_again(content: object, made: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    record = made[0].with_suffix(".json")
    whole = json.loads(record.read_text())
    if content is None:
        record.unlink()
    elif content == "changed":
        record.write_text(json.dumps(whole | {"kept": 299}))
    else:
        record.write_text(content if isinstance(content, str) else json.dumps(content))
    assert load_texts(made[1])["text"][:] == LINES
    assert "rebuilding both" in capsys.readouterr().out
    assert json.loads(record.read_text())["kept"] == whole["kept"] == 300


def test_checksums_are_compared_once_and_may_be_missing(made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    file, source = made
    shutil.copy(file, file.with_name("copy"))
    os.utime(file.with_name("copy"), ns=(5, 5))
    compared, difference = [], cache.difference
    monkeypatch.setattr(cache, "difference", lambda path, was: compared.append(path.name) or difference(path, was))
    load_texts(source)
    assert not compared
    file.with_name("copy").replace(file)
    load_texts(source)
    load_texts(source)
    assert compared == [file.name], "a copy is compared once"
    record = file.with_suffix(".json")
    record.write_text(json.dumps({key: value for key, value in json.loads(record.read_text()).items() if key != "arrow_file"}))
    assert load_texts(source)["text"][:] == LINES
    change(file, b"no arrow")
    refuses("cannot be read .*; delete the file to rebuild it", load_texts, source)


DAILY = {"short": 3, "moved": 1, "503": 1, "cut": 3, "dangling": 1}
"""To how many of the files a fault happens on every change."""
FILES = (r"\.safetensors$", r"^config\.json$", r"^tokenizer\.json$", r"^tokenizer_config\.json$", "^preprocessor")


@pytest.fixture
def pulled(hub: Hub, folder_of: dict[str, str]) -> tuple[str, Fingerprint]:
    hub.add("base/clip", folder_of["clip"])
    return "base/clip", load_embedder(folder_of["clip"]).fingerprint


def found(name: str) -> Fingerprint | str:
    """Return which model a pull gives, or the line in which it is refused."""
    try:
        return load_embedder(name).fingerprint
    except (XcompatError, OSError) as error:
        line = failures.explain(error)
        assert line is not None and len(line.splitlines()) == 1
        return line


@pytest.mark.parametrize(
    ("kind", "file"),
    mostly_nightly_rows(itertools.product(["short", "moved", "503"], FILES), lambda kind, file: file in FILES[: DAILY[kind]]),
)
def test_a_hub_that_fails_on_a_file(kind: str, file: str, pulled: tuple[str, Fingerprint], hub: Hub) -> None:
    name, wanted = pulled
    if kind == "503":
        hub.faults = {file.replace("^", "/"): 503}
    else:
        hub.spoilt = {file: kind}
    assert isinstance(line := found(name), str) and name in line
    hub.spoilt, hub.faults = {}, {}
    assert found(name) == wanted


@pytest.mark.parametrize(
    ("kind", "file"),
    mostly_nightly_rows(itertools.product(["cut", "dangling"], FILES), lambda kind, file: file in FILES[: DAILY[kind]]),
)
def test_a_damaged_copy_in_the_cache(kind: str, file: str, pulled: tuple[str, Fingerprint], tmp_path: Path) -> None:
    name, wanted = pulled
    assert found(name) == wanted
    copies = [link for link in (tmp_path / "cache").glob("models--*/snapshots/*/*") if re.search(file, link.name)]
    for blob in {copy.resolve() for copy in copies}:
        held = blob.read_bytes()
        blob.unlink()
        if kind == "cut":
            blob.write_bytes(held[: len(held) // 2])
    line = found(name)
    if kind == "dangling":
        assert line == wanted, "fetched anew"
    else:
        assert f"damaged downloads ({copies[0].name}) have been deleted" in str(line)
    assert found(name) == wanted


def test_a_checkpoint_that_was_cut_short(hub: Hub, folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("xbt", folder_of)
    shake(model)
    model.export(tmp_path / "model")
    hub.add("me/model", tmp_path / "model")
    hub.spoilt = {"safetensors": "moved"}
    assert "have been deleted; run the command again to download them" in str(found("me/model"))
    hub.spoilt = {}
    assert found("me/model") == load_embedder(str(tmp_path / "model")).fingerprint


@pytest.mark.parametrize("missing", ["tokenizer", r"\.safetensors", "preprocessor", "^config"])
def test_a_repository_in_which_a_file_is_missing(missing: str, pulled: tuple[str, Fingerprint], hub: Hub) -> None:
    name, wanted = pulled
    whole = hub.files(name)
    hub.repos[name].commit({file: held for file, held in whole.items() if not re.search(missing, file)})
    assert isinstance(line := found(name), str) and name in line
    hub.repos[name].commit(whole | {"README.md": b"mended"})
    assert found(name) == wanted


def test_full_disk_and_empty_reference(pulled: tuple[str, Fingerprint], tmp_path: Path) -> None:
    name, wanted = pulled
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("huggingface_hub.file_download.http_get", side_effect=full):
        assert "space left" in str(found(name))
    assert found(name) == wanted
    for reference in (tmp_path / "cache").glob("models--*/refs/*"):
        reference.write_text("")
    assert found(name) == wanted

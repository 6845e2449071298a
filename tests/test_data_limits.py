"""Small files that hold gigabytes, brackets without end, numbers of thousands of digits: one line, and little memory."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from xcompat.core.errors import XcompatError
from xcompat.data import PairSource, load_classes, load_pairs, load_texts, shards, text_files

DEEP, LONG = "[" * 100_000 + "]" * 100_000, "1" * 5000  # deeper than any limit that a library may set
MEMORY = 100_000_000
"""Bytes that may be held while something is refused."""


def refused(load: Callable[[], object], message: str) -> None:
    """Ask for one line that says what is wrong, in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(XcompatError, match=message) as caught:
            load()
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


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


def test_no_more_of_a_table_is_unpacked_than_shows_what_it_is(tmp_path: Path) -> None:
    """Several gigabytes, of which 65 MiB are looked at, or 72 where Python reads farther ahead in the file (3.12 and newer)."""
    one = gzip.compress(b"photos/0001.png,a\n" * 2**19, mtime=0)
    (tmp_path / "captions.csv.gz").write_bytes(one * 600)
    refused(lambda: load_pairs(str(tmp_path)), "has (68,157,440|75,497,472) bytes or more, too many for a table")


def test_a_table_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LARGEST_TABLE", 1000)
    (tmp_path / "captions.csv").write_text("image,caption\n" + "a.png,a\n" * 200)
    (tmp_path / "classes.txt").write_text("name\n" * 300)
    refused(lambda: load_pairs(str(tmp_path)), "captions.csv has 1,614 bytes or more, too many for a table")
    refused(lambda: load_classes(tmp_path / "classes.txt"), "classes.txt has 1,500 bytes or more, too many for a table")


def test_one_field_of_many_megabytes(tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text('image,caption\na.png,"' + "x" * 20_000_000 + '"\n')
    refused(lambda: load_pairs(str(tmp_path)), "captions.csv has a line of more than")


@pytest.mark.parametrize("name", ["x" * 5000 + ".png", "nul\0.png"])
def test_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    (tmp_path / "captions.jsonl").write_text(json.dumps({"image": name, "caption": "a"}))
    refused(lambda: load_pairs(str(tmp_path)), "lists 1 images, and 1 of them do not exist")


@pytest.mark.parametrize("value", [DEEP, LONG], ids=["deep", "long"])
def test_json_beyond_limits(value: str, tmp_path: Path) -> None:
    (tmp_path / "captions.jsonl").write_text(f'{{"image": "a.png", "caption": {value}}}\n')
    refused(lambda: load_pairs(str(tmp_path)), "captions.jsonl line 1 is not valid JSON")
    (tmp_path / "texts.jsonl").write_text(f'{{"text": "a"}}\n{{"text": {value}}}\n')
    refused(lambda: load_texts(str(tmp_path / "texts.jsonl")), "texts.jsonl line 2 is not valid JSON")
    write_shard(tmp_path / "a.tar", {"0.png": b"x", "0.json": f'{{"title": {value}}}'.encode()})
    source = PairSource(path=str(tmp_path / "a.tar"), caption_column="json.title")
    refused(lambda: load_pairs(source), "1 of 1 samples cannot be used.*json is not valid JSON")


def test_lists_where_images_are_named(tmp_path: Path) -> None:
    (tmp_path / "captions.jsonl").write_text('{"image": ["a.png"], "caption": "a"}\n')
    refused(lambda: load_pairs(str(tmp_path)), "is not an image path")


@pytest.mark.parametrize("name", ["texts.txt", "texts.txt.gz", "texts.jsonl.gz"])
def test_a_text_without_end(name: str, tmp_path: Path) -> None:
    opener = gzip.open if name.endswith("gz") else open
    with opener(tmp_path / name, "wb") as file:
        file.write(b"good\n" if "txt" in name else b'{"text": "good"}\n')
        for _ in range(40):
            file.write(b"x" * 2**20)
    refused(lambda: load_texts(str(tmp_path / name)), f"{name} line 2 has a line of more than 16,777,216 characters")


def test_damage_inside_gzip(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b"".join(b"line %d\n" % n for n in range(1000)), mtime=0))
    data[30:60] = bytes(30)
    for name in ("texts.txt.gz", "captions.csv.gz"):
        (tmp_path / name).write_bytes(bytes(data))
    refused(lambda: load_texts(str(tmp_path / "texts.txt.gz")), "texts.txt.gz cannot be read after line")
    refused(lambda: load_pairs(str(tmp_path / "captions.csv.gz")), "captions.csv.gz cannot be read")


def write_shard(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def claiming(kind: bytes, claimed: int, **pax: str) -> bytes:
    """Return a shard of one header that claims a size."""
    info = tarfile.TarInfo("0.png")
    info.type, info.size, info.pax_headers = kind, claimed, pax
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) + bytes(10_240)


TOO_LARGE = "0.png declares 4,398,046,511,104 bytes, above the limit of 536,870,912 per sample"


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


def test_a_sample_of_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LARGEST_SAMPLE", 1000)
    write_shard(tmp_path / "whole.tar", {f"{n}.{kind}": bytes(500) for n in range(5) for kind in ("png", "a")})
    assert len(list(shards.read_shard(tmp_path / "whole.tar"))) == 5
    write_shard(tmp_path / "a.tar", {f"0.{n}": bytes(400) for n in range(5)})
    refused(lambda: load_pairs(str(tmp_path / "a.tar")), "0.2 declares 400 bytes, above the limit of 1,000 per sample")


def test_zeros_without_end_behind_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_PADDING", 2)
    write_shard(tmp_path / "a.tar", {"0.png": b"x", "0.txt": b"a"})
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(data + bytes(3 * 2**20)))
    refused(lambda: load_pairs(str(tmp_path / "b.tar.gz")), "members follow a broken header")
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(data + bytes(2**20)))
    assert len(load_pairs(str(tmp_path / "c.tar.gz"))) == 1

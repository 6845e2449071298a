"""What was damaged in a gallery is refused before a parser sees it, and what is whole is read for that once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xcompat import Fingerprint, XcompatError
from xcompat.core import checksums
from xcompat.core.checksums import FileRecord
from xcompat.retrieval import Gallery, faiss_building, integrity
from xcompat.retrieval.integrity import CHECKED
from xcompat.retrieval.manifest import read_manifest

CLIP = Fingerprint.from_string("clip")


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a gallery of ten items, one of them removed."""
    monkeypatch.setattr(faiss_building, "PER_CENTROID", 0)
    made = Gallery.create(tmp_path / "gallery", CLIP, dim=4, index="SQ8")
    embeds = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    made.add(embeds, [f"item {row}" for row in range(10)], side_info_NS=embeds)
    made.commit()
    made.remove(["item 3"])
    made.commit()
    return made.path


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def use(folder: Path) -> None:
    """Read every file of a gallery."""
    gallery = Gallery.open(folder)
    gallery.search(np.ones((1, 4)), CLIP, top_k=10)
    gallery.find(["item 5"])
    gallery.segments[0].vectors(np.arange(2))
    gallery.segments[0].side_info(np.arange(2))


@pytest.mark.parametrize(
    "file", ["index.faiss", "rows.arrow", "vectors.npy", "side_info.npy", "id_hashes.npy", "id_order.npy", "removed"]
)
def test_a_flipped_bit_is_refused_by_whoever_reads_the_file(file: str, gallery: Path) -> None:
    use(gallery)
    (path,) = gallery.glob("removed/*.npy" if file == "removed" else f"segments/*/{file}")
    flip(path)
    with pytest.raises(XcompatError, match=f"{path.name} has changed since it was written; .*xcompat gallery verify") as refused:
        use(gallery)
    assert "\n" not in str(refused.value)
    flip(path)
    use(gallery)


@pytest.mark.parametrize("old", ['"metric":"cosine"', '"rows":10', '"by":"add"'])
def test_a_manifest_that_still_parses_is_refused(old: str, gallery: Path) -> None:
    new = {'"metric":"cosine"': '"metric":"ip"', '"rows":10': '"rows":11', '"by":"add"': '"by":"odd"'}[old]
    for path in (gallery / "gallery.json", gallery / "generations" / "00000002.json"):
        whole = path.read_text()
        key, value = old.split(":")
        damaged = whole.replace(f"{key}: {value}", new)
        assert damaged != whole
        path.write_text(damaged)
        with pytest.raises(XcompatError, match=rf"{path.name} is damaged \(it has changed since it was committed\)"):
            read_manifest(gallery, None if path.name == "gallery.json" else 2)
        path.write_text(json.dumps(json.loads(whole), indent=4))
        assert read_manifest(gallery, None if path.name == "gallery.json" else 2).generation == 2


def test_a_generation_in_the_place_of_another_is_refused(gallery: Path) -> None:
    shutil.copy(gallery / "generations" / "00000001.json", gallery / "generations" / "00000002.json")
    with pytest.raises(XcompatError, match="it is generation 1"):
        Gallery.open(gallery, generation=2)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema_version": ' + "9" * 5000 + "}", "[]", "\ud800"])
def test_a_manifest_that_is_none_is_one_line(text: str, gallery: Path) -> None:
    (gallery / "gallery.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(XcompatError, match=r"gallery.json is damaged") as refused:
        Gallery.open(gallery)
    assert "\n" not in str(refused.value)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of files as they are read in full, where every file is a large one."""
    names: list[str] = []
    plain: Callable[[Path, FileRecord], list[str]] = checksums.difference

    def difference(path: Path, record: FileRecord) -> list[str]:
        names.append(path.name)
        return plain(path, record)

    monkeypatch.setattr(checksums, "difference", difference)
    monkeypatch.setattr(integrity, "LARGE", 0)
    return names


def test_a_large_file_is_read_in_full_once_by_all_processes(gallery: Path, compared: list[str]) -> None:
    checksums._intact.clear()
    use(gallery)
    assert sorted(compared) == sorted({*compared}) and "index.faiss" in compared
    compared.clear()
    checksums._intact.clear()  # as another process finds it
    use(gallery)
    assert not compared
    (index,) = gallery.glob("segments/*/index.faiss")
    flip(index)
    checksums._intact.clear()
    with pytest.raises(XcompatError, match="index.faiss has changed"):
        use(gallery)
    flip(index)
    checksums._intact.clear()
    use(gallery)
    assert compared == ["index.faiss", "index.faiss"]


@pytest.mark.parametrize("found", [b"", b"[]", b'{"a": 1}', b'{"a": [[]]}', b"\xff", b"[" * 100_000])
def test_what_is_remembered_may_be_lost_or_damaged(found: bytes, gallery: Path, compared: list[str]) -> None:
    use(gallery)
    (gallery / CHECKED).write_bytes(found)
    checksums._intact.clear()
    compared.clear()
    use(gallery)
    assert "index.faiss" in compared


def test_a_copy_is_compared_anew(gallery: Path, tmp_path: Path, compared: list[str]) -> None:
    use(gallery)
    copy = shutil.copytree(gallery, tmp_path / "copy")
    compared.clear()
    use(copy)
    assert "index.faiss" in compared

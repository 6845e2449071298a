"""Pairs come out the same from every format, and damage is found, counted and named."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import tarfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from conftest import refuses
from PIL import Image

from xcompat.core.errors import XcompatError
from xcompat.data import CorpusSource, PairSource, load_pairs, load_texts, open_image, to_rgb
from xcompat.data.content_type import contains_images
from xcompat.data.images import UnusableSampleError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def png(value: int = 0, mode: str = "RGB", size: tuple[int, int] = (4, 5)) -> bytes:
    buffer = io.BytesIO()
    array = np.random.default_rng(value).integers(0, 255, (*size, 4), dtype=np.uint8)
    Image.fromarray(array, "RGBA").convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def write_shard(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for key, members in samples.items():
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def sample(number: int) -> dict[str, bytes]:
    meta = {"title": f"title {number}", "words": ["a", f"b{number}"], "sku": number}
    return {
        "png": png(number),
        "txt": f"thing {number}\n".encode(),
        "json": json.dumps(meta).encode(),
        "cls": str(number % 3).encode(),
    }


@pytest.fixture(params=["shard.tar", "shard.tar.gz"])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_shard(tmp_path / request.param, {f"k{n:03d}": sample(n) for n in range(7)})


def test_shard_rows(shard: Path) -> None:
    dataset = load_pairs(str(shard))
    assert isinstance(dataset, datasets.Dataset)
    assert dataset["id"][:] == [f"k{n:03d}" for n in range(7)]
    assert dataset["caption"][:] == [[f"thing {n}"] for n in range(7)]
    assert [row["image"]["bytes"] for row in dataset] == [png(n) for n in range(7)]
    named: dict[str, Any] = {"caption_column": "json.words", "id_column": "json.sku", "label_column": "cls", "limit": 4}
    chosen = load_pairs(PairSource(path=str(shard), **named))
    assert chosen["caption"][:] == [["a", f"b{n}"] for n in range(4)] and chosen["id"][:] == ["0", "1", "2", "3"]
    assert chosen["label"][:] == [0, 1, 2, 0]
    stream = load_pairs(PairSource(path=str(shard), streaming=True, **named))
    assert isinstance(stream, datasets.IterableDataset) and list(stream) == list(chosen)
    with pytest.raises(XcompatError, match=r"7 of 7 .*json\.titel.*did you mean 'json\.title'"):
        load_pairs(PairSource(path=str(shard), caption_column="json.titel"))


def test_globs_braces_lists_and_folders_name_the_same_shards(tmp_path: Path) -> None:
    refuses("no shards", load_pairs, str(tmp_path))
    for part in range(3):
        write_shard(tmp_path / f"part-{part}.tar", {f"k{part}{n}": sample(n) for n in range(2)})
    listed = [f"{tmp_path}/part-{n}.tar" for n in range(3)]
    paths: list[str | list[str]] = [f"{tmp_path}/part-*.tar", f"{tmp_path}/part-{{0..2}}.tar", listed, str(tmp_path)]
    ids = [load_pairs(PairSource(path=path))["id"][:] for path in paths]
    assert ids == [["k00", "k01", "k10", "k11", "k20", "k21"]] * 4
    (tmp_path / "part-3.tar").write_bytes(b"never opened")
    assert len(load_pairs(PairSource(path=str(tmp_path), limit=6))) == 6, "a limit reads no further"


def test_the_cache_is_shared_until_the_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: Path) -> None:
    path = write_shard(tmp_path / "a.tar", {"a": sample(1)})
    first = load_pairs(str(path))
    with monkeypatch.context() as patch:
        patch.setattr("xcompat.data.shards.read_shard", lambda *_: pytest.fail("read again"))
        second = load_pairs(str(path))
    assert second._fingerprint == first._fingerprint
    for file in (tmp_path / "hf_cache").rglob("*.arrow"):
        file.unlink()
    assert load_pairs(str(path))._fingerprint == first._fingerprint  # it is that of the source, not of the cache
    write_shard(path, {"a": sample(1), "b": sample(2)})
    assert load_pairs(str(path))["id"][:] == ["a", "b"]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(_rows_in_a_process, str(shard), tmp_path / "shared_cache") for _ in range(4)]
        assert [job.result() for job in jobs] == [7] * 4
    assert len(list((tmp_path / "shared_cache").rglob("*.arrow"))) == 1


@pytest.mark.parametrize("keep", [0.3, 0.55, 0.9])
@pytest.mark.parametrize("name", ["bad.tar", "bad.tar.gz"])
def test_a_truncated_shard_stops_the_run_by_name(tmp_path: Path, name: str, keep: float) -> None:
    path = write_shard(tmp_path / name, {f"k{n}": sample(n) for n in range(30)})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    refuses(f"1 of 1 shards cannot be read.*{name}", load_pairs, str(path))


@pytest.mark.parametrize("compress", [False, True])
def test_a_shard_cut_between_members_or_a_damaged_header_is_noticed(tmp_path: Path, compress: bool) -> None:
    path = write_shard(tmp_path / "bad.tar", {f"k{n}": sample(n) for n in range(60)})
    with tarfile.open(path) as tar:
        offset, cut = (tar.getmembers()[number].offset for number in (20, 41))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    refuses("cut short", load_pairs, str(path))
    damaged = whole[:offset] + b"x" * 200 + whole[offset + 200 :]
    path = path.with_suffix(".tar.gz") if compress else path
    path.write_bytes(gzip.compress(damaged) if compress else damaged)
    refuses("damaged", load_pairs, str(path))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_shard_within_the_share_is_named(tmp_path: Path, streaming: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for part in range(3):
        write_shard(tmp_path / f"part-{part}.tar", {f"k{part}": sample(part)})
    (tmp_path / "part-1.tar").write_bytes(b"this is no tar file")
    source = PairSource(path=f"{tmp_path}/*.tar", max_bad_share=0.4, streaming=streaming)
    assert [row["id"] for row in load_pairs(source)] == ["k0", "k2"]
    assert "skipped 1 of 3 shards" in " ".join(capsys.readouterr().out.split())
    if not streaming:  # a cached load says so again
        load_pairs(source)
        assert "part-1.tar" in "".join(capsys.readouterr().out.split())


def test_samples_without_caption_or_id_stop_beyond_the_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = {f"k{n}": sample(n) for n in range(10)}
    del samples["k3"]["txt"]
    path = str(write_shard(tmp_path / "a.tar", samples))
    refuses("1 of 10 samples cannot be used.*k3", load_pairs, PairSource(path=path, caption_column="txt"))
    assert len(load_pairs(PairSource(path=path, caption_column="txt", max_bad_share=0.2))) == 9
    assert "k3: no txt" in " ".join(capsys.readouterr().out.split())
    assert len(load_pairs(PairSource(path=path, captions=False))) == 10
    samples = {f"k{n}": {**sample(n), "json": f'{{"sku": {n if n else "null"}}}'.encode()} for n in range(3)}
    path = str(write_shard(tmp_path / "b.tar", samples))
    refuses(r"k0.*empty json\.sku", load_pairs, PairSource(path=path, id_column="json.sku"))
    assert load_pairs(PairSource(path=path, id_column="json.sku", max_bad_share=0.5))["id"][:] == ["1", "2"]


def make_folder(folder: Path, n: int = 3) -> Path:
    (folder / "pics").mkdir(parents=True)
    for number in range(n):
        (folder / "pics" / f"0{number}.png").write_bytes(png(number))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "set")


@pytest.mark.parametrize("name", ["captions.csv", "captions.tsv", "captions.jsonl", "captions.csv.gz"])
def test_captions_file_merges_rows_of_one_image(folder: Path, name: str) -> None:
    rows = [("pics/00.png", 'a "quoted", dog', "007"), ("pics/01.png", "NA", "008"), ("pics/00.png", "ein Hündchen ", "007")]
    table = pd.DataFrame(rows, columns=["file_name", "caption", "code"])
    if "jsonl" in name:
        table.to_json(folder / name, orient="records", lines=True, force_ascii=False)
    else:
        table.to_csv(folder / name, sep="\t" if "tsv" in name else ",", index=False)
    dataset = load_pairs(PairSource(path=str(folder), id_column="code"))
    assert dataset["caption"][:] == [['a "quoted", dog', "ein Hündchen"], ["NA"]]
    assert dataset["id"][:] == ["007", "008"]
    assert load_pairs(str(folder))["id"][:] == ["pics/00.png", "pics/01.png"]
    assert np.array_equal(np.asarray(open_image(dataset[1]["image"])), np.asarray(Image.open(io.BytesIO(png(1)))))


@pytest.mark.parametrize(
    ("name", "text", "encoding"),
    [
        ("captions.csv", "image;caption\npics/00.png;a café, at night\npics/00.png;Zürich\n", "utf-8"),
        ("captions.csv", "image;caption\npics/00.png;a café, at night\npics/00.png;Zürich\n", "latin-1"),
        ("captions.csv", 'image,caption\npics/00.png,"a café, at night"\npics/00.png,Zürich\n', "cp1252"),
        ("captions.csv", 'image,caption\npics/00.png,"a café, at night"\npics/00.png,Zürich\n', "utf-8-sig"),
        ("captions.tsv", "image\tcaption\npics/00.png\ta café, at night\npics/00.png\tZürich\n", "utf-16"),
        ("captions.tsv", 'image,caption\npics/00.png,"a café, at night"\npics/00.png,Zürich\n', "utf-8"),
        ("captions.txt", 'image,caption\npics/00.png,"a café, at night"\npics/00.png,Zürich\n', "utf-8"),
        ("captions.txt", "00.png#0\ta café, at night\n00.png#1\tZürich\n", "utf-8"),
        ("captions.token", "00.png#0\ta café, at night\r\n00.png#1\tZürich\r\n", "latin-1"),
        ("captions.csv", "image_name| comment_number| comment\n00.png| 0| a café, at night\n00.png| 1| Zürich\n", "utf-8"),
    ],
)
def test_captions_files_as_people_have_them(folder: Path, name: str, text: str, encoding: str) -> None:
    (folder / name).write_bytes(text.encode(encoding))
    for path in (folder, folder / name):
        (row,) = load_pairs(str(path))
        assert row["caption"] == ["a café, at night", "Zürich"] and row["image"]["path"] == str(folder / "pics" / "00.png")
    assert contains_images(str(folder / name))


def test_quotes_are_kept_and_swallow_no_rows(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "captions.txt").write_text('00.png#0\t"Stop" signs\n00.png#1\t2" of snow\n')
    assert load_pairs(str(folder))[0]["caption"] == ['"Stop" signs', '2" of snow']
    (folder / "captions.txt").write_bytes("image,caption\npics/00.png,naïve\n".encode("latin-1"))
    assert load_pairs(str(folder))[0]["caption"] == ["naïve"]
    assert "is not UTF-8 and is read as Windows-1252; if letters are wrong" in caplog.text
    (folder / "captions.txt").write_bytes("image,caption\npics/00.png,naïve ".encode() + b"\xff\n")
    refuses("captions.txt mixes encodings: parts are not UTF-8", load_pairs, str(folder))
    (folder / "captions.txt").write_text("a text about an image, with a caption\n")
    assert not contains_images(str(folder / "captions.txt"))
    file = folder / "captions.tsv"
    begun = 'image\tcaption\npics/00.png\t"a dog\npics/01.png\ta "big" cat\npics/02.png\t'
    for end in ('a hen"\n', "a hen\n", '"a hen"\n'):
        file.write_text(begun + end)
        assert load_pairs(str(folder))["caption"][:] == [['"a dog'], ['a "big" cat'], [end.strip()]]
        assert "is not closed on its line ('pics/00.png\\t\"a dog'); quotes are kept as text" in caplog.text
    caplog.clear()
    file.write_text('image\tcaption\npics/00.png\t"a ""big"" dog\non two lines"\npics/01.png\t"a\ttab"\n')
    assert load_pairs(str(folder))["caption"][:] == [['a "big" dog\non two lines'], ["a\ttab"]] and not caplog.text
    file.write_text('image\tcaption\npics/00.png\t"a dog\npics/01.png\ta cat"\npics/02.png\t"a hen\nat home"\n')
    assert load_pairs(str(folder))["caption"][:] == [["a dog\npics/01.png\ta cat"], ["a hen\nat home"]]
    assert "text between quotes is read as one multi-line field" in caplog.text


def test_jsonl_keeps_lists_and_numbers_as_they_are(tmp_path: Path) -> None:
    """One line without the column would make floats of a column of integers, which hold large ids no more."""
    folder = make_folder(tmp_path / "set", 2)
    (folder / "123").write_bytes(png(3))
    large = 2**53
    rows = [
        {"image": "pics/00.png", "caption": ["a", " b "], "label": 7, "number": large},
        {"image": "pics/00.png", "caption": "c"},
        {"image": 123, "caption": "d", "label": 8, "number": large + 1},
    ]
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = load_pairs(PairSource(path=str(folder), labels=True, id_column="number"))
    assert dataset["id"][:] == [str(large), str(large + 1)] and dataset["label"][:] == ["7", "8"]
    assert dataset["caption"][:] == [["a", "b", "c"], ["d"]] and dataset[1]["image"]["path"] == str(folder / "123")


def test_bad_captions_files(folder: Path) -> None:
    refuses("set captions: false", load_pairs, str(folder))
    dataset = load_pairs(PairSource(path=str(folder), captions=False, label_column="folder"))
    assert dataset["id"][:] == ["pics/00.png", "pics/01.png", "pics/02.png"] and dataset["label"][:] == ["pics"] * 3
    for content, options, message in (
        ("image,caption\n", {}, "contains no rows"),
        ("", {}, "cannot be read"),
        ("image,caption\npics/00.png,a\npics/xx.png,b\npics/y.png,c\n", {}, "lists 3 images, and 2 .*, first 'pics/xx.png'"),
        ("photo,caption\npics/00.png,a\n", {}, "no column named image"),
        ("image,caption\npics/00.png,a\n", {"caption_column": "captoin"}, "did you mean 'caption'"),
        ("image,caption\npics/00.png,\n", {}, "pics/00.png has no caption"),
        ("image,caption\npics/00.png,a dog, running\n", {}, "more fields than its header"),
        ('image,caption\npics/00.png,"a dog\n', {}, "cannot be read"),
    ):
        (folder / "captions.csv").write_text(content)
        refuses(message, load_pairs, PairSource(path=str(folder), **options))
    (folder / "captions.tsv").write_text("image\tcaption\npics/00.png\tb\n")
    refuses("contains captions.csv and captions.tsv; give the path of a single file", load_pairs, str(folder))
    assert load_pairs(str(folder / "captions.tsv"))[0]["caption"] == ["b"]


@pytest.mark.parametrize("kind", ["bytes", "path", "struct"])
@pytest.mark.parametrize("streaming", [False, True])
def test_parquet(folder: Path, kind: str, streaming: bool) -> None:
    images = [folder / "pics" / f"0{n}.png" for n in range(3)]
    values = {
        "bytes": [image.read_bytes() for image in images],
        "path": [str(image.relative_to(folder)) for image in images],
        "struct": [{"bytes": image.read_bytes(), "path": None} for image in images],
    }[kind]
    (folder / "table.parquet").write_bytes(b"no parquet")
    refuses(r"table\.parquet .*cannot be read", load_pairs, PairSource(path=str(folder / "table.parquet")))
    pd.DataFrame({"picture": values, "text": ["a", "b", "c"], "sku": [7, 8, 9]}).to_parquet(folder / "table.parquet")
    source = PairSource(path=str(folder / "table.parquet"), image_column="picture", id_column="sku", streaming=streaming)
    rows = list(load_pairs(source))
    assert [row["caption"] for row in rows] == ["a", "b", "c"]
    assert [row["id"] for row in rows] == ["7", "8", "9"]
    assert open_image(rows[2]["image"]).tobytes() == open_image(images[2]).tobytes()


@pytest.mark.parametrize("streaming", [False, True])
def test_paths_in_tables_of_several_folders_are_relative_to_their_own(tmp_path: Path, streaming: bool) -> None:
    for number, name in enumerate("ab"):
        folder = make_folder(tmp_path / name, 0)
        (folder / "pics" / "x.png").write_bytes(png(number))
        pd.DataFrame({"image": ["pics/x.png"], "caption": [name], "id": [name]}).to_parquet(folder / "table.parquet")
    paths = [str(tmp_path / name / "table.parquet") for name in "ab"]
    rows = list(load_pairs(PairSource(path=paths, streaming=streaming)))
    assert [row["id"] for row in rows] == ["a", "b"]
    assert [row["image"]["path"] for row in rows] == [str(tmp_path / name / "pics" / "x.png") for name in "ab"]


def test_saved_datasets(tmp_path: Path) -> None:
    columns = {"image": [{"bytes": png(n), "path": None} for n in range(3)], "info": [{"title": f"t{n}"} for n in range(3)]}
    features = datasets.Features({"image": datasets.Image(), "info": {"title": datasets.Value("string")}})
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset.save_to_disk(tmp_path / "one")
    loaded = load_pairs(PairSource(path=str(tmp_path / "one"), caption_column="info.title"))
    assert (loaded["caption"][:], loaded["id"][:]) == (["t0", "t1", "t2"], ["0", "1", "2"])
    assert loaded[1]["image"]["bytes"] == png(1)
    with pytest.raises(XcompatError, match=r"columns \(info\.title\) do not work with streaming; set streaming to false"):
        load_pairs(PairSource(path=str(tmp_path / "one"), caption_column="info.title", streaming=True))
    datasets.DatasetDict(train=dataset, test=dataset.select([2])).save_to_disk(tmp_path / "two")
    two = PairSource(path=str(tmp_path / "two"), caption_column="info.title")
    refuses("set split to one of train, test", load_pairs, two)
    refuses("no split 'tset'; did you mean 'test'", load_pairs, two.model_copy(update={"split": "tset"}))
    assert load_pairs(two.model_copy(update={"split": "test"}))["caption"][:] == ["t2"]


@pytest.mark.parametrize("field", ["split", "name", "revision"])
def test_what_local_data_has_not_is_refused_not_ignored(field: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "part.tar", {"k0": sample(0)})
    datasets.Dataset.from_dict({"image": [png()], "caption": ["t"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "lines.txt").write_text("a text\n")
    for path in ("part.tar", "saved"):
        refuses(f"has no {field}; remove {field}", load_pairs, PairSource(path=str(tmp_path / path), **{field: "train[:50%]"}))
    refuses(f"has no {field}; remove {field}", load_texts, [CorpusSource(path=str(tmp_path / "lines.txt"), **{field: "train"})])


def test_hub_names_are_told_from_missing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def refuse(*args: object, **kwargs: object) -> None:
        asked.append((*args, kwargs["revision"]))
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(XcompatError, match="neither a local path nor a data set that loads from the Hub: offline"):
        load_pairs(PairSource(path="owner/name", revision="v1"))
    assert asked == [("owner/name", None, "v1")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    names = ("gone", "./photos/gone", "photos/gone", "./gone/gone", "gone/gone/gone", "runs/gone", "./gone", "gone.tar")
    for path in (str(tmp_path / "gone"), *names, f"{tmp_path}/*.tar"):
        refuses("does not exist", load_pairs, path)
    assert len(asked) == 1


def _rows_in_a_process(path: str, cache: Path) -> int:
    datasets.config.HF_DATASETS_CACHE = cache
    return len(load_pairs(path))


def test_images_become_rgb_on_white_or_are_refused() -> None:
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert to_rgb(clear).getpixel((0, 0)) == (255, 255, 255)
    half = to_rgb(Image.new("LA", (2, 2), (0, 128))).getpixel((1, 1))
    assert half == (127, 127, 127)
    assert to_rgb(Image.new("1", (2, 2), 1)).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 9, 9])
    palette.info["transparency"] = 0
    assert to_rgb(palette).getpixel((0, 0)) == (255, 255, 255)
    for mode in ("L", "I;16", "CMYK", "RGB"):
        assert to_rgb(Image.new(mode, (1, 1))).mode == "RGB"
    for value in (b"", b"no image", png()[:60], {"bytes": None, "path": "/nowhere.png"}, None, {"bytes": None, "path": None}):
        with pytest.raises(UnusableSampleError):
            open_image(value)


def test_two_images_of_one_name_are_not_taken_for_one(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"{shop}.tar", {"0001": sample(1)}) for shop in ("a", "b")]
    with pytest.raises(XcompatError, match="two samples have the id '0001'; set id_column to a column with unique ids"):
        load_pairs(PairSource(path=[str(file) for file in shards]))
    for shop in ("a", "b"):
        folder = tmp_path / f"shop-{shop}"
        folder.mkdir()
        (folder / "0001.png").write_bytes(png(1))
        (folder / "captions.csv").write_text("image,caption\n0001.png,a shoe\n")
    with pytest.raises(XcompatError, match="two samples have the id '0001.png'"):
        load_pairs(PairSource(path=[str(tmp_path / "shop-a"), str(tmp_path / "shop-b")]))


@pytest.mark.parametrize("ids", [["7", None, "8", None], [7, None, 8, None], ["7", " ", "8", ""]])
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_rows_without_an_id_are_refused(tmp_path: Path, ids: list[Any], kind: str) -> None:
    columns = {"image": [png(n) for n in range(4)], "caption": list("abcd"), "id": ids, "sku": range(4)}
    if kind == "parquet":
        pd.DataFrame(columns).to_parquet(tmp_path / "set.parquet")  # which makes numbers with gaps floats
    else:
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "set")
    path = str(tmp_path / ("set.parquet" if kind == "parquet" else "set"))
    refuses(r"row 1 has no id \(2 of 4 rows have none\); fill the column", load_pairs, path)
    assert load_pairs(PairSource(path=path, id_column="sku"))["id"][:] == ["0", "1", "2", "3"]


def test_images_of_a_table_without_an_id_are_refused(folder: Path) -> None:
    rows = [("pics/00.png", "a", "7"), ("pics/01.png", "b", None), ("pics/02.png", "c", " "), ("pics/01.png", "d", None)]
    pd.DataFrame(rows, columns=["image", "caption", "sku"]).to_csv(folder / "captions.csv", index=False)
    refuses(r"pics/01.png has no sku \(2 of 3 images have none\)", load_pairs, PairSource(path=str(folder), id_column="sku"))


def test_one_id_of_two_images_is_said_unless_the_column_was_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def load(images: list[int], captions: str = "abc", **options: str) -> str:
        columns = {"image": [png(n) for n in images], "caption": list(captions), "id": ["x", "y", "x"]}
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "set")
        caplog.clear()
        load_pairs(PairSource(path=str(tmp_path / "set"), **options))
        return caplog.text

    assert not load([0, 1, 0]), "captions of one image"
    assert "rows 0 and 2 have the id 'x' but different images, and count as one item" in load([0, 1, 2])
    assert not load([0, 1, 2], captions="aba"), "images of one thing"
    assert not load([0, 1, 2], id_column="id")

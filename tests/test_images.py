"""Images as files have them: more than 8 bits, more pixels than fit, many frames: as in 8 bits, or refused."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from xcompat.core.errors import XcompatError
from xcompat.data import PairSource, image_files, images, iterate_images, load_pairs, open_image, to_rgb
from xcompat.data.images import MAX_ASPECT, MAX_PIXELS, UnusableSampleError
from xcompat.models.embedder import load_embedder

GREY_HW = (np.add.outer(np.arange(48), np.arange(40)) * 3 % 256).astype(np.uint8)
WIDE_HW = GREY_HW.astype(np.uint16) * 257


def encoded(pixels: np.ndarray, form: str, mode: str | None = None) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    if mode is not None:
        image = Image.frombytes(mode, image.size, pixels.astype(">u2").tobytes())
    image.save(buffer, form)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def colour_16() -> bytes:
    rows = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in WIDE_HW)
    return png(40, 48, 16, 2, rows)


@pytest.mark.parametrize(
    "data",
    [
        encoded(WIDE_HW, "PNG"),
        colour_16(),
        encoded(WIDE_HW, "TIFF"),
        encoded(WIDE_HW, "TIFF", "I;16B"),
        encoded(WIDE_HW.astype(np.int32), "TIFF"),
        encoded(WIDE_HW.astype(np.int32), "PPM"),
        encoded(WIDE_HW, "JPEG2000"),
        encoded(GREY_HW.astype(np.int32), "TIFF"),
        encoded(GREY_HW.astype(np.float32) / 255, "TIFF"),
        encoded(GREY_HW.astype(np.float32), "TIFF"),
    ],
    ids=["png", "rgb-png", "tiff", "big-endian", "int32", "pgm", "jpeg2000", "int32-of-8", "unit-floats", "floats"],
)
def test_more_than_8_bits_are_the_same_image(data: bytes, folder_of: dict[str, str]) -> None:
    found, plain = open_image(data), to_rgb(Image.fromarray(GREY_HW))
    assert np.abs(np.asarray(found, np.int16) - np.asarray(plain)).max() <= 1
    embedder = load_embedder(folder_of["clip"])
    embeds = embedder.embed({"pixel_values": embedder.processor.images([found, plain])}).numpy()
    assert embeds[0] @ embeds[1] / np.prod(np.linalg.norm(embeds, axis=1)) > 0.9999


@given(st.integers(4096, 65535), st.data())
def test_16_bits_keep_their_order_and_their_ends(high: int, data: st.DataObject) -> None:
    values = [0, high, *data.draw(st.lists(st.integers(0, high), max_size=20))]
    grey = np.asarray(to_rgb(Image.fromarray(np.array([values], dtype=np.uint16))))[0, :, 0]
    np.testing.assert_array_equal(grey, np.rint(np.array(values) / 257))


def test_what_is_transparent_in_16_bits_is_white() -> None:
    values = np.array([[30000, 20000]], dtype=">u2")
    data = png(2, 1, 16, 0, b"\0" + values.tobytes(), chunk(b"tRNS", struct.pack(">H", 20000)))
    assert [open_image(data).getpixel((x, 0))[0] for x in (0, 1)] == [117, 255]


def test_a_tiff_whose_zero_is_white_is_no_negative() -> None:
    data = io.BytesIO()
    Image.fromarray(WIDE_HW).save(data, "TIFF", tiffinfo={262: 0})
    assert np.array_equal(np.asarray(open_image(data.getvalue()))[..., 0], 255 - GREY_HW)


def test_signed_16_bits_end_at_half() -> None:
    data = io.BytesIO()
    Image.fromarray(WIDE_HW // 2).save(data, "TIFF", tiffinfo={339: 2})
    assert np.abs(np.asarray(open_image(data.getvalue()), np.int16)[..., 0] - GREY_HW).max() <= 1


@pytest.mark.parametrize(
    "pixels",
    [
        *(np.array([row], np.int32) for row in ([0, 4095], [-1, 65535], [0, 65536])),
        *(np.array([row], np.float32) for row in ([0, 1.5], [0, 256], [-0.1, 1], [np.nan, 1], [0, np.inf])),
        np.array([[0, 4095]], np.uint16),
    ],
    ids=lambda pixels: f"{pixels.dtype} {pixels.tolist()}",
)
def test_an_unknown_range_is_refused(pixels: np.ndarray) -> None:
    with pytest.raises(UnusableSampleError, match=r"its (integers|floats) go from .*, so the white value is unknown"):
        open_image(encoded(pixels, "TIFF"))


def bomb(side: int) -> bytes:
    """Return a PNG of some kB that unpacks to side x side pixels."""
    return png(side, side, 1, 0, bytes(side * (1 + -(-side // 8))))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("side", "reason"), [(12_000, "12000 x 12000 is more than"), (14_000, "more than the limit of 134,217,728 pixels")]
)
def test_a_bomb_is_refused_before_it_is_decoded(side: int, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = bomb(side)
    assert len(data) < 30_000 and side**2 > MAX_PIXELS
    (tmp_path / "bomb.png").write_bytes(data)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("it was decoded"))
    for value in (data, tmp_path / "bomb.png", *([Image.open(io.BytesIO(data))] if side < 13_000 else [])):
        with pytest.raises(UnusableSampleError, match=reason):
            open_image(value)


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1), (2, 2 * MAX_ASPECT + 1), (0, 5), (0, 0)])
def test_no_model_resizes_a_line_to_gigabytes(size: tuple[int, int]) -> None:
    with pytest.raises(UnusableSampleError, match=f"{size[0]} x {size[1]}: one side is more than 256 times the other"):
        open_image(Image.new("L", size))
    assert open_image(Image.new("L", (2, 2 * MAX_ASPECT))).size == (2, 512)


def frames(form: str, count: int) -> bytes:
    buffer = io.BytesIO()
    images = [Image.new("RGB", (8, 8), (250 - n % 2, 0, 0)) for n in range(count)]
    images[0].save(buffer, form, save_all=True, append_images=images[1:])
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["GIF", "WEBP", "TIFF", "PNG"])
def test_of_many_frames_one_is_read(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, seeks = frames(form, 200), []
    for name in ("GifImagePlugin.GifImageFile", "WebPImagePlugin.WebPImageFile", "TiffImagePlugin.TiffImageFile"):
        monkeypatch.setattr(f"PIL.{name}.seek", lambda _, frame: seeks.append(frame))
    assert open_image(data).getpixel((4, 4))[0] >= 248 and not seeks


def test_text_that_unpacks_to_megabytes_and_programs_are_refused() -> None:
    text = chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(10_000_000)))
    with pytest.raises(UnusableSampleError, match="unreadable image .*too large"):
        open_image(png(1, 1, 8, 0, b"\0\0", text))
    with pytest.raises(UnusableSampleError, match="PostScript files are programs"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n{} loop\n")


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB"])
def test_other_colour_spaces_show_the_same_colour(mode: str) -> None:
    colour = {"CMYK": (55, 205, 225, 0), "YCbCr": (92, 92, 204), "HSV": (5, 217, 200), "LAB": (117, 187, 176)}[mode]
    np.testing.assert_allclose(open_image(Image.new(mode, (1, 1), colour)).getpixel((0, 0)), (200, 50, 30), atol=3)


def photo(orientation: int | None, form: str = "JPEG") -> bytes:
    """An image whose top left is red and whose bottom right is blue once it is turned as `orientation` says."""

    upright = Image.new("RGB", (64, 48), "white")
    upright.paste("red", (0, 0, 24, 24))
    upright.paste("blue", (40, 24, 64, 48))
    exif, buffer = Image.Exif(), io.BytesIO()
    if orientation is not None:
        turns = {6: 8, 8: 6}.get(orientation, orientation)
        stored = upright.copy()
        stored.getexif()[Base.Orientation] = turns
        upright = ImageOps.exif_transpose(stored)
        exif[Base.Orientation] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "AVIF": {"quality": 100}}.get(form, {})
    upright.save(buffer, form, exif=exif, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    expected, found = (np.asarray(open_image(photo(each, form)), np.int16) for each in (None, orientation))
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() < 4


def test_damaged_exif_leaves_the_image_readable() -> None:
    data = photo(6)
    assert open_image(data.replace(b"Exif\0\0", b"Exif\0\0" + b"\xff" * 4)).width in (48, 64)


@pytest.mark.parametrize("table", ["folder", "captions", "parquet", "datasets", "webdataset"])
def test_every_source_gives_upright_images(table: str, tmp_path: Path) -> None:

    data, path = photo(6), tmp_path / "photos"
    path.mkdir()
    if table in ("folder", "captions"):
        (path / "a.jpg").write_bytes(data)
    if table == "captions":
        (path / "captions.csv").write_text("image,caption\na.jpg,two squares\n")
    rows = datasets.Dataset.from_dict({"image": [{"bytes": data, "path": None}], "id": ["a"]})
    if table == "parquet":
        rows.to_parquet(path / "a.parquet")
    elif table == "datasets":
        rows.cast_column("image", datasets.Image()).save_to_disk(str(path))
    elif table == "webdataset":
        with tarfile.open(path / "a.tar", "w") as tar:
            member = tarfile.TarInfo("a.jfif")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    loaded = load_pairs(PairSource(path=str(path), captions=False))
    [(_, [image])] = list(iterate_images(loaded))
    assert image.size == (64, 48)
    assert image.getpixel((5, 5))[0] > 200 > image.getpixel((5, 5))[1]


def test_every_file_of_a_folder_is_read_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(photo(None))  # without a suffix
    (tmp_path / "b.jfif").write_bytes(photo(None))
    (tmp_path / "c.avif").write_bytes(photo(None, "AVIF"))
    (tmp_path / "d.large").write_bytes(photo(None, "PNG"))
    for name in (".DS_Store", "Thumbs.db", "notes.txt", "BMW", "e.json", "f.mov"):
        (tmp_path / name).write_text("BM is a text")

    loaded = load_pairs(PairSource(path=str(tmp_path), captions=False))
    assert loaded["id"][:] == ["a", "b.jfif", "c.avif", "d.large"]
    said = capsys.readouterr().out.replace("\n", " ")
    assert "6 files (BMW, e.json, f.mov, notes.txt, .DS_Store and 1 more) are left out" in said


def test_heic_without_its_reader_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    for module in (images, image_files):
        monkeypatch.setattr(module, "can_read_heic", lambda: False)
    images._register_heic.cache_clear()
    header = b"\0\0\0\x18ftypheic" + bytes(200)
    (tmp_path / "a.heic").write_bytes(header)
    (tmp_path / "b").write_bytes(header)
    with pytest.raises(XcompatError, match=r"2 images cannot be read; HEIC images need pillow-heif: run `pip install"):
        load_pairs(PairSource(path=str(tmp_path), captions=False))
    (tmp_path / "c.jpg").write_bytes(photo(None))
    assert load_pairs(PairSource(path=str(tmp_path), captions=False))["id"][:] == ["c.jpg"]
    assert "2 images (a.heic, b) are left out; HEIC images need pillow-heif" in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(UnusableSampleError, match="HEIC images need pillow-heif"):
        open_image(header)
    images._register_heic.cache_clear()


def test_heic_is_read() -> None:
    heif = pytest.importorskip("pillow_heif", reason="needs pillow-heif")
    buffer = io.BytesIO()
    heif.from_pillow(open_image(photo(None))).save(buffer, quality=100)
    assert np.abs(np.asarray(open_image(buffer.getvalue()), np.int16) - np.asarray(open_image(photo(None)), np.int16)).mean() < 4


def test_names_that_are_not_utf8_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    (tmp_path / "a.jpg").write_bytes(photo(None))
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jpg")).write_bytes(photo(None))
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    assert load_pairs(PairSource(path=str(tmp_path), captions=False))["id"][:] == ["a.jpg"]
    assert "1 image (caf\\udce9.jpg) is left out, as names must be UTF-8" in capsys.readouterr().out.replace("\n", " ")

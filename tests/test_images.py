"""Pictures as files have them: more than 8 bits, more pixels than fit, many frames: as in 8 bits, or refused."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from xcompat.data import load_pairs, open_image, to_rgb
from xcompat.data.images import MAX_ASPECT, MAX_PIXELS, UnusableSampleError
from xcompat.models.embedder import load_embedder
from xcompat.progress import notice_once

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
def test_more_than_8_bits_are_the_same_picture(data: bytes, folder_of: dict[str, str]) -> None:
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
        np.array([[0, 4095]], np.uint16),
        np.array([[0, 4095]], np.int32),
        np.array([[-1, 65535]], np.int32),
        np.array([[0, 65536]], np.int32),
        np.array([[0, 1.5]], np.float32),
        np.array([[0, 256]], np.float32),
        np.array([[-0.1, 1]], np.float32),
        np.array([[np.nan, 1]], np.float32),
        np.array([[0, np.inf]], np.float32),
    ],
    ids=lambda pixels: str(pixels.tolist()),
)
def test_an_unknown_range_is_refused(pixels: np.ndarray) -> None:
    with pytest.raises(UnusableSampleError, match=r"its (integers|floats) go from .* which does not tell what is white"):
        open_image(encoded(pixels, "TIFF"))


def test_black_is_black() -> None:
    for kind in (np.uint16, np.int32, np.float32):
        assert to_rgb(Image.fromarray(np.zeros((1, 1), kind))).getpixel((0, 0)) == (0, 0, 0)


def test_that_bits_are_left_out_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    notice_once.cache_clear()
    for _ in range(3):
        open_image(encoded(WIDE_HW, "PNG"))
    assert capsys.readouterr().out == "! grey pictures of more than 8 bits are brought to 8: 65535 becomes 255\n"


def bomb(side: int) -> bytes:
    """Return a PNG of some kB that unpacks to side x side pixels."""
    return png(side, side, 1, 0, bytes(side * (1 + -(-side // 8))))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("side", "reason"), [(12_000, "12000 x 12000 is more than"), (14_000, "more than the 134,217,728 pixels")]
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
    pictures = [Image.new("RGB", (8, 8), (250 - n % 2, 0, 0)) for n in range(count)]
    pictures[0].save(buffer, form, save_all=True, append_images=pictures[1:])
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
    with pytest.raises(UnusableSampleError, match="PostScript is a program"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n{} loop\n")


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB"])
def test_other_colour_spaces_show_the_same_colour(mode: str) -> None:
    colour = {"CMYK": (55, 205, 225, 0), "YCbCr": (92, 92, 204), "HSV": (5, 217, 200), "LAB": (117, 187, 176)}[mode]
    np.testing.assert_allclose(open_image(Image.new(mode, (1, 1), colour)).getpixel((0, 0)), (200, 50, 30), atol=3)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_data_set_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xcompat.data import BadSamples, iterate_images

    for name, data in {"a": encoded(GREY_HW, "PNG"), "b": bomb(12_000), "c": encoded(WIDE_HW // 16, "PNG")}.items():
        (tmp_path / f"{name}.png").write_bytes(data)
    (tmp_path / "captions.csv").write_text("image,caption\n" + "".join(f"{name}.png,a\n" for name in "abc"))
    kept = [rows.tolist() for rows, _ in iterate_images(load_pairs(str(tmp_path)), bad=BadSamples(1.0, 3))]
    said = capsys.readouterr().out.splitlines()
    assert kept == [[0]]
    assert [line.split(": ")[0] for line in said] == ["! skipped b.png", "! skipped c.png"]

"""Images: read from files as 8-bit RGB or refused, augmented as the seed says; and the glyphs, which are drawn and split."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tarfile
import unicodedata
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conftest import refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.ExifTags import Base
from pydantic import ValidationError
from torch.nn import functional as F
from torchvision.transforms import v2
from transformers import PreTrainedTokenizerFast

from xcompat.core.errors import XcompatError
from xcompat.data import Augmentation, PairSource, View, build_transform, images, iterate_images, load_labelled, load_pairs
from xcompat.data import glyphs as glyphs_module
from xcompat.data.glyphs import Glyphs, choose_characters, split_characters, to_dataset, unicode_corpus, write_glyph_classes
from xcompat.data.images import MAX_ASPECT, MAX_PIXELS, UnusableSampleError, open_image, to_rgb
from xcompat.encoders.scratch import train_tokenizer
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


@pytest.mark.parametrize(
    ("tag", "stored", "expected"),
    [({262: 0}, WIDE_HW, 255 - GREY_HW), ({339: 2}, WIDE_HW // 2, GREY_HW)],
    ids=["zero is white", "signed"],
)
def test_tags_of_a_tiff_say_which_values_are_white(tag: dict[int, int], stored: np.ndarray, expected: np.ndarray) -> None:
    data = io.BytesIO()
    Image.fromarray(stored).save(data, "TIFF", tiffinfo=tag)
    assert np.abs(np.asarray(open_image(data.getvalue()), np.int16)[..., 0] - expected).max() <= 1


def test_an_unknown_range_is_refused() -> None:
    for pixels in (
        *(np.array([row], np.int32) for row in ([0, 4095], [-1, 65535], [0, 65536])),
        *(np.array([row], np.float32) for row in ([0, 1.5], [0, 256], [-0.1, 1], [np.nan, 1], [0, np.inf])),
        np.array([[0, 4095]], np.uint16),
    ):
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


@pytest.mark.parametrize("source", ["folder", "datasets", "webdataset"])
def test_every_source_gives_upright_images(source: str, tmp_path: Path) -> None:
    data, path = photo(6), tmp_path / "photos"
    path.mkdir()
    if source == "folder":
        (path / "a.jpg").write_bytes(data)
    elif source == "datasets":
        rows = datasets.Dataset.from_dict({"image": [{"bytes": data, "path": None}], "id": ["a"]})
        rows.cast_column("image", datasets.Image()).save_to_disk(str(path))
    else:
        with tarfile.open(path / "a.tar", "w") as tar:
            member = tarfile.TarInfo("a.jfif")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    loaded = load_pairs(PairSource(path=str(path), captions=False))
    [(_, [image])] = list(iterate_images(loaded))
    assert image.size == (64, 48) and image.getpixel((5, 5))[0] > 200 > image.getpixel((5, 5))[1]


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


def test_heic_needs_pillow_heif(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("images", "image_files"):
        monkeypatch.setattr(f"xcompat.data.{module}.can_read_heic", lambda: False)
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


def image(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def stub_processor(side: int, interpolation: str) -> Any:
    return SimpleNamespace(image_size=(side, side), interpolation=interpolation)


def with_one(**strength: float) -> Augmentation:
    return Augmentation(**{**Augmentation.none().model_dump(), **strength})


STRENGTHS = ["brightness", "contrast", "saturation", "hue", "grayscale", "blur", "solarize"]
STRENGTHS += ["sharpness", "translation", "min_scale", "horizontal_flip"]


@pytest.mark.parametrize("name", STRENGTHS)
def test_each_strength_changes_the_image_alone(name: str) -> None:
    torch.manual_seed(0)
    one = with_one(**{name: 0.5})
    assert not one.is_none
    transform, plain = build_transform(one, (30, 40)), build_transform(Augmentation.none(), (30, 40))(image())
    assert any(not torch.equal(transform(image()), plain) for _ in range(8))


@pytest.mark.parametrize("size", [(32, 32), (16, 24)])
def test_what_is_off_takes_no_draw(size: tuple[int, int]) -> None:
    steps = [
        v2.RandomResizedCrop(list(size), scale=(0.5, 1), ratio=(0.75, 1 / 0.75), interpolation=v2.InterpolationMode.BICUBIC),
        v2.RandomAffine(10, translate=(0.05, 0.05), interpolation=v2.InterpolationMode.BILINEAR, fill=255.0),
        v2.ColorJitter(brightness=0.2, contrast=0.2),
        v2.RandomChoice([v2.RandomAdjustSharpness(1.5, p=0.5), v2.RandomAdjustSharpness(0.5, p=0.5)]),
        v2.PILToTensor(),
    ]
    drawn = []
    for transform in (build_transform(Augmentation(), size), v2.Compose(steps)):
        torch.manual_seed(3)
        drawn.append((transform(image()), torch.get_rng_state()))
    (ours, after), (plain, expected) = drawn
    assert torch.equal(ours, plain) and torch.equal(after, expected)


def test_what_is_switched_off_only_resizes() -> None:
    never = Augmentation(**{**with_one(hue=0.5).model_dump(), "colour_probability": 0.0})
    expected = torch.from_numpy(np.array(image())).permute(2, 0, 1)
    for augmentation in (Augmentation.none(), never):
        assert torch.equal(build_transform(augmentation, (30, 40))(image()), expected)


def test_a_view_is_the_same_for_every_model_in_any_thread() -> None:
    wide, small = stub_processor(64, "nearest"), stub_processor(16, "bilinear")
    view = View(Augmentation(horizontal_flip=0.5), 3, 1)
    rows = np.repeat(np.linspace(0, 255, 512).astype(np.uint8)[None, :], 512, axis=0)  # a ramp shows which part was cropped
    images = {f"images/{number}.png": Image.fromarray(np.stack([rows, rows.T, rows], axis=-1)) for number in range(12)}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(view.build_draw(wide), images.values(), images))
    assert torch.equal(torch.get_rng_state(), before)
    alone = [view.build_draw(wide)(image, name) for name, image in reversed(images.items())]
    assert all(map(torch.equal, threaded, reversed(alone)))
    assert len({one.numpy().tobytes() for one in threaded}) == 12, "each image has its own draws"
    still = View(Augmentation(horizontal_flip=0.5, rotation=0, translation=0), 3, 1)  # which move whole pixels of each size
    for name, image in images.items():
        seen = F.interpolate(still.build_draw(wide)(image, name)[None].float(), size=16, mode="bilinear", antialias=True)[0]
        assert (seen - still.build_draw(small)(image, name)).abs().mean() < 4
    name, image = next(iter(images.items()))
    others = [view, view._replace(seed=4), view._replace(number=2), view._replace(augmentation=Augmentation())]
    assert len({other.build_draw(wide)(image, name).numpy().tobytes() for other in others}) == 4
    assert len({other.digest("images") for other in others} | {view.digest("others")}) == 5


def test_wrong_values_are_refused() -> None:
    for wrong in ({"brightnes": 0.1}, {"hue": 0.6}, {"brightness": 0, "contrast": 0, "colour_probability": 0.8}):
        with pytest.raises(ValidationError):
            Augmentation(**wrong)


@pytest.fixture(scope="module")
def glyphs() -> Glyphs:
    return glyphs_module.render_glyphs()  # which is kept for the tests after this one


@pytest.fixture(scope="module")
def tokenizer(glyphs: Glyphs) -> PreTrainedTokenizerFast:
    return train_tokenizer(glyphs.names.values(), vocab_size=1024, max_length=24)


def _ink_rows(glyphs: Glyphs, character: str, face: str) -> np.ndarray:
    selected = glyphs.select([ord(character)], [face])
    assert selected.images_NHW.shape == (1, 32, 32)
    return np.flatnonzero(selected.images_NHW[0].any(axis=1))


def test_every_named_character_is_there_and_told_apart(glyphs: Glyphs) -> None:
    assert glyphs.images_NHW.shape == (len(glyphs.character_N), 32, 32) and glyphs.images_NHW.dtype == np.uint8
    assert set(glyphs_module.REGULAR_FACES) < set(glyphs.faces) and np.unique(glyphs.face_N).tolist() == list(range(16))
    assert 52_000 < len(glyphs.images_NHW) < 56_000 and 7_000 < len(glyphs.names) < 7_500
    assert set(glyphs.names) == set(glyphs.character_N.tolist())
    for code in list(glyphs.names)[::97]:
        assert glyphs.names[code] == unicodedata.name(chr(code)).lower()
    comma, apostrophe = (_ink_rows(glyphs, character, "DejaVuSans") for character in ",'")
    assert comma.min() > apostrophe.max()
    small, capital = (_ink_rows(glyphs, character, "DejaVuSerif") for character in "oO")
    assert len(small) < len(capital)
    arrow_HW = glyphs.select([0x27F7], ["DejaVuSans"]).images_NHW[0]  # long left right arrow, wider than the em
    assert np.array_equal(arrow_HW.any(axis=0), arrow_HW.any(axis=0)[::-1])


@given(seed=st.integers(0, 2**32), n_test=st.integers(1, 3000))
@settings(max_examples=20, deadline=None)
def test_split_is_by_character(glyphs: Glyphs, seed: int, n_test: int) -> None:
    train, test = (side.tolist() for side in split_characters(glyphs, n_test, seed))
    assert len(test) == len(set(test)) == n_test
    assert sorted(train + test) == sorted(glyphs.names)
    assert set(glyphs.select(test, glyphs_module.REGULAR_FACES).character_N.tolist()) == set(test)
    assert test == split_characters(glyphs, n_test, seed)[1].tolist()


def test_chosen_glyphs_are_those_of_a_loop_also_as_a_dataset(glyphs: Glyphs) -> None:
    codes, faces = [ord(character) for character in "aΩя→"], ["DejaVuSans-Bold", "STIXGeneral"]
    selected = glyphs.select(codes, faces)
    expected = [
        (code, face)
        for code, face in zip(glyphs.character_N.tolist(), glyphs.face_N.tolist(), strict=True)
        if code in codes and glyphs.faces[face] in faces
    ]
    assert list(zip(selected.character_N.tolist(), selected.face_N.tolist(), strict=True)) == expected
    assert set(selected.names) == set(codes)
    dataset = to_dataset(selected)
    assert np.array_equal(np.stack([np.asarray(row["image"]) for row in dataset]), selected.images_NHW)
    for row, (code, face) in zip(dataset, expected, strict=True):
        assert (row["id"], row["caption"], row["face"]) == (f"U+{code:04X}", glyphs.names[code], glyphs.faces[face])


def test_impossible_faces_sizes_and_vocabularies_are_refused(glyphs: Glyphs) -> None:
    refuses("Comic", glyphs.select, [ord("a")], ["Comic"])
    for n_test in (0, -1, 10**6):
        refuses(f"n_test={n_test} ", split_characters, glyphs, n_test)
    for n_classes in (1, 10_000):
        refuses(f"n_classes={n_classes} must be 2 to", choose_characters, glyphs, n_classes)
    refuses("no text", train_tokenizer, [])
    refuses("vocab_size=100 ", train_tokenizer, ["a"], vocab_size=100)


def test_corpus_is_large_distinct_and_excludes(glyphs: Glyphs) -> None:
    _, test = split_characters(glyphs)
    held_out = {glyphs.names[code] for code in test.tolist()}
    corpus = unicode_corpus(exclude=(name.upper() for name in held_out))
    assert len(corpus) == len(set(corpus)) and not held_out & set(corpus)
    assert set(glyphs.names.values()) - held_out <= set(corpus)
    assert len(set(corpus) - set(glyphs.names.values())) > 20_000
    numbered = (0x4E00, 0xF900, 0xAC00, 0x18800, 0x1B170, 0x18B00, 0x13000, 0x14400, 0x10600, 0xE0100)
    assert not {unicodedata.name(chr(code)).lower() for code in numbered} & set(corpus)


def test_chosen_characters_can_be_told_apart(glyphs: Glyphs) -> None:
    chosen = choose_characters(glyphs, 1000)
    assert chosen == sorted(set(chosen)) and len(chosen) == 1000
    selected = glyphs.select(chosen)
    images = {image_HW.tobytes() for image_HW in selected.images_NHW}
    assert len(images) == len(selected.images_NHW)  # so no test image is a training image, and none is of two classes
    faces = np.bincount(selected.character_N, minlength=max(chosen) + 1)[chosen]
    assert faces.min() >= 12 and (faces == 16).sum() > 500
    assert {ord("A"), 0x391, 0x410} & set(chosen) == {ord("A")}
    assert set(choose_characters(glyphs, 100)) < set(chosen)


def test_glyph_classes_are_labelled_images(glyphs: Glyphs, tmp_path: Path) -> None:
    write_glyph_classes(tmp_path / "classes", n_classes=120)
    sides = ("train", "fit", "validation", "query", "gallery")
    parts = {name: load_labelled(str(tmp_path / "classes" / name)) for name in sides}
    codes = choose_characters(glyphs, 120)
    assert all(part.classes == [glyphs.names[code] for code in codes] == part.present_classes() for part in parts.values())
    ids = {name: set(part.dataset["id"]) for name, part in parts.items()}
    assert ids["fit"] | ids["validation"] == ids["train"] and not ids["fit"] & ids["validation"]
    assert not (ids["train"] | ids["query"]) & ids["gallery"] and not ids["train"] & ids["query"]
    whole = glyphs.select(codes)
    assert sum(len(parts[name]) for name in ("train", "query", "gallery")) == len(whole.images_NHW)
    image_of = {
        f"U+{code:04X} {glyphs.faces[face]}": (image_HW.tobytes(), glyphs.names[code])
        for image_HW, code, face in zip(whole.images_NHW, whole.character_N.tolist(), whole.face_N.tolist(), strict=True)
    }
    for name, part in parts.items():
        rows = list(part.dataset.cast_column("image", datasets.Image()))
        faces = [row["id"].split(" ")[1] for row in rows]
        known = glyphs_module.CLASS_FACES
        assert list(dict.fromkeys(faces)) == [face for face in known.get(name, known["train"]) if face in faces]
        for row, label in zip(rows, part.class_names(), strict=True):
            assert image_of[row["id"]] == (np.asarray(row["image"]).tobytes(), label)


@given(text=st.text(max_size=60))
@settings(deadline=None)
def test_tokenizer_frames_and_truncates_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, truncation=True)["input_ids"]
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id) and len(ids) <= 24
    assert ids == tokenizer(text.upper().lower(), truncation=True)["input_ids"] or text.upper().lower() != text.lower()


def test_tokenizer_is_the_same_in_every_process_and_order() -> None:
    script = (
        "from xcompat.data.glyphs import unicode_corpus\n"
        "from xcompat.encoders.scratch import train_tokenizer\n"
        "print(train_tokenizer(reversed(unicode_corpus()), 700).backend_tokenizer.to_str())"
    )
    other = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert other.strip() == train_tokenizer(unicode_corpus(), 700).backend_tokenizer.to_str().strip()

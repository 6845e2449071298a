"""The embedded glyph data: what is rendered, how it is split, what the texts hold, how the tokenizer behaves."""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from xcompat.core.errors import XcompatError
from xcompat.data import glyphs as glyphs_module
from xcompat.data import load_labelled
from xcompat.data.glyphs import (
    CLASS_FACES,
    REGULAR_FACES,
    Glyphs,
    choose_characters,
    split_characters,
    to_dataset,
    unicode_corpus,
    write_glyph_classes,
)
from xcompat.encoders.scratch import train_tokenizer


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


def test_every_face_and_named_character_is_there(glyphs: Glyphs) -> None:
    assert glyphs.images_NHW.shape == (len(glyphs.character_N), 32, 32)
    assert glyphs.images_NHW.dtype == np.uint8
    assert len(glyphs.faces) == 16
    assert set(REGULAR_FACES) < set(glyphs.faces)
    assert np.unique(glyphs.face_N).tolist() == list(range(16))
    assert 52_000 < len(glyphs.images_NHW) < 56_000
    assert 7_000 < len(glyphs.names) < 7_500
    assert set(glyphs.names) == set(glyphs.character_N.tolist())
    for code in list(glyphs.names)[::97]:
        assert glyphs.names[code] == unicodedata.name(chr(code)).lower()


def test_position_and_size_tell_characters_apart(glyphs: Glyphs) -> None:
    comma, apostrophe = (_ink_rows(glyphs, character, "DejaVuSans") for character in ",'")
    assert comma.min() > apostrophe.max()
    small, capital = (_ink_rows(glyphs, character, "DejaVuSerif") for character in "oO")
    assert len(small) < len(capital)
    braille = [glyphs.select([code], ["DejaVuSans"]).images_NHW[0] for code in (0x2801, 0x2808)]  # dot 1 left, dot 4 right
    first, fourth = (np.flatnonzero(image_HW.any(axis=0)) for image_HW in braille)
    assert first.max() < fourth.min()
    assert not np.array_equal(*(glyphs.select([ord("g")], [face]).images_NHW for face in REGULAR_FACES[::2]))
    ellipsis_HW = glyphs.select([0x22EF], ["DejaVuSans"]).images_NHW[0]  # midline horizontal ellipsis
    columns = np.flatnonzero(ellipsis_HW.any(axis=0))
    assert np.count_nonzero(np.diff(columns) > 1) == 2  # three dots
    arrow_HW = glyphs.select([0x27F7], ["DejaVuSans"]).images_NHW[0]  # long left right arrow, wider than the em
    assert np.array_equal(arrow_HW.any(axis=0), arrow_HW.any(axis=0)[::-1])


@given(seed=st.integers(0, 2**32), n_test=st.integers(1, 3000))
@settings(max_examples=20, deadline=None)
def test_split_is_by_character(glyphs: Glyphs, seed: int, n_test: int) -> None:
    train, test = split_characters(glyphs, n_test, seed)
    assert len(test) == len(set(test.tolist())) == n_test
    assert not set(train.tolist()) & set(test.tolist())
    assert set(train.tolist()) | set(test.tolist()) == set(glyphs.names)
    gallery = glyphs.select(test, REGULAR_FACES)
    assert set(gallery.character_N.tolist()) == set(test.tolist())
    assert np.array_equal(test, split_characters(glyphs, n_test, seed)[1])


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
    selected = glyphs.select([0x3B1, 0x1D6C2, ord("A")])
    dataset = to_dataset(selected)
    assert dataset.column_names == ["image", "caption", "id", "face"]
    assert len(dataset) == len(selected.images_NHW)
    assert set(dataset["id"]) == {f"U+{code:04X}" for code in selected.names}
    assert dataset[0]["image"].mode == "L"
    assert np.array_equal(np.stack([np.asarray(row["image"]) for row in dataset]), selected.images_NHW)
    for row, code, face in zip(dataset, selected.character_N.tolist(), selected.face_N.tolist(), strict=True):
        assert (row["id"], row["caption"], row["face"]) == (f"U+{code:04X}", selected.names[code], selected.faces[face])


def test_impossible_faces_sizes_and_vocabularies_are_refused(glyphs: Glyphs) -> None:
    with pytest.raises(XcompatError, match="Comic"):
        glyphs.select([ord("a")], ["Comic"])
    for n_test in (0, -1, 10**6):
        with pytest.raises(XcompatError, match=f"n_test={n_test} "):
            split_characters(glyphs, n_test)
    for n_classes in (1, 10_000):
        with pytest.raises(XcompatError, match=f"n_classes={n_classes} must be 2 to"):
            choose_characters(glyphs, n_classes)
    with pytest.raises(XcompatError, match="no text"):
        train_tokenizer([])
    with pytest.raises(XcompatError, match="vocab_size=100 "):
        train_tokenizer(["a"], vocab_size=100)


def test_corpus_is_large_distinct_and_excludes(glyphs: Glyphs) -> None:
    _, test = split_characters(glyphs)
    held_out = {glyphs.names[code] for code in test.tolist()}
    corpus = unicode_corpus(exclude=(name.upper() for name in held_out))
    assert len(corpus) == len(set(corpus))
    assert not held_out & set(corpus)
    assert set(glyphs.names.values()) - held_out <= set(corpus)
    assert len(set(corpus) - set(glyphs.names.values())) > 20_000
    numbered = (0x4E00, 0xF900, 0xAC00, 0x18800, 0x1B170, 0x18B00, 0x13000, 0x14400, 0x10600, 0xE0100)
    assert not {unicodedata.name(chr(code)).lower() for code in numbered} & set(corpus)


def test_chosen_characters_can_be_told_apart(glyphs: Glyphs) -> None:
    chosen = choose_characters(glyphs, 1000)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 1000
    selected = glyphs.select(chosen)
    images = {image_HW.tobytes() for image_HW in selected.images_NHW}
    assert len(images) == len(selected.images_NHW)  # so no test image is a training image, and none is of two classes
    faces = np.bincount(selected.character_N, minlength=max(chosen) + 1)[chosen]
    assert faces.min() >= 12
    assert (faces == 16).sum() > 500
    assert {ord("A"), 0x391, 0x410} & set(chosen) == {ord("A")}
    assert set(choose_characters(glyphs, 100)) < set(chosen)


def test_glyph_classes_are_labelled_images(glyphs: Glyphs, tmp_path: Path) -> None:
    write_glyph_classes(tmp_path / "classes", n_classes=120)
    sides = ("train", "fit", "validation", "query", "gallery")
    parts = {name: load_labelled(str(tmp_path / "classes" / name)) for name in sides}
    codes = choose_characters(glyphs, 120)
    assert all(part.classes == [glyphs.names[code] for code in codes] == part.present_classes() for part in parts.values())
    ids = {name: set(part.dataset["id"]) for name, part in parts.items()}
    assert ids["fit"] | ids["validation"] == ids["train"]
    assert not ids["fit"] & ids["validation"]
    assert not (ids["train"] | ids["query"]) & ids["gallery"]
    assert not ids["train"] & ids["query"]
    whole = glyphs.select(codes)
    assert sum(len(parts[name]) for name in ("train", "query", "gallery")) == len(whole.images_NHW)
    image_of = {
        f"U+{code:04X} {glyphs.faces[face]}": (image_HW.tobytes(), glyphs.names[code])
        for image_HW, code, face in zip(whole.images_NHW, whole.character_N.tolist(), whole.face_N.tolist(), strict=True)
    }
    for name, part in parts.items():
        rows = list(part.dataset.cast_column("image", datasets.Image()))
        faces = [row["id"].split(" ")[1] for row in rows]
        assert list(dict.fromkeys(faces)) == [face for face in CLASS_FACES.get(name, CLASS_FACES["train"]) if face in faces]
        for row, label in zip(rows, part.class_names(), strict=True):
            assert image_of[row["id"]] == (np.asarray(row["image"]).tobytes(), label)


@given(text=st.text(max_size=60))
@settings(deadline=None)
def test_tokenizer_frames_and_truncates_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, truncation=True)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) <= 24
    assert ids == tokenizer(text.upper().lower(), truncation=True)["input_ids"] or text.upper().lower() != text.lower()


def test_tokenizer_is_the_same_in_every_process_and_order() -> None:
    script = (
        "from xcompat.data.glyphs import unicode_corpus\n"
        "from xcompat.encoders.scratch import train_tokenizer\n"
        "print(train_tokenizer(reversed(unicode_corpus()), 700).backend_tokenizer.to_str())"
    )
    other = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert other.strip() == train_tokenizer(unicode_corpus(), 700).backend_tokenizer.to_str().strip()

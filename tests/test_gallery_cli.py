"""``xcompat gallery`` as a user types it, on images and stand-in models."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run, store, write_photos
from PIL import Image
from test_index_gallery import write_index

from xcompat import FctModel, Fingerprint
from xcompat.core import failures
from xcompat.core.errors import XcompatError
from xcompat.core.precision import Autocast
from xcompat.core.progress import console
from xcompat.mapping import fit_map
from xcompat.models import embedder
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder
from xcompat.retrieval import Gallery, commands
from xcompat.retrieval.originals import load_originals


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "inner").mkdir(parents=True)
    for number in range(120):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("inner" if number % 2 else ".") / f"{number}.png")
    (folder / "inner" / "bad.png").write_bytes(b"no image")
    return folder


def test_build_search_add_and_the_rest(run: Run, photos: Path, tmp_path: Path, folder_of: dict[str, str]) -> None:
    gallery, model = tmp_path / "gallery", folder_of["clip"]
    code, out, err = run("build", photos, "--model", model, "--out", gallery)
    assert (code, err) == (0, "") and "120 images added" in out and "1 cannot be read" in out
    refused = run.refusal("build", photos, "--model", model, "--out", gallery, "--index", "HNSW8")
    assert "remove --index" in refused, "what it was made with stays"
    out = run.output("search", gallery, photos / "inner" / "7.png", "--model", model, "--top-k", 3)
    rows = [line for line in out.splitlines() if ".png" in line]
    assert len(rows) == 3 and "inner/7.png" in rows[0] and "1.000" in rows[0]
    assert run.output("search", gallery, "a red running shoe", "--model", model).count(".png") == 10
    assert "is whole: 120 items" in run.output("verify", gallery)
    out = run.output("info", gallery, "--model", model)
    assert "120 items" in out and "yes" in out and "create" in out
    assert "1 segment;" in run.output("compact", gallery)
    assert "has no generation 0" in run.refusal("rollback", gallery, 0)


def test_rollback_lists_states_and_returns_to_one(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "g"
    gallery = Gallery.create(folder, Fingerprint.from_string("m"), dim=3)
    for name in "abc":
        store(gallery, np.eye(3)[:1], [name])
    code, out, _ = run("rollback", folder)
    assert code == 0 and "restored generation 2 as generation 4: 2 items" in out and "--to 3" in out
    assert "restored generation 1 as generation 5: 1 items" in run.output("rollback", folder)
    rows = [line for line in run.output("rollback", folder, "--list").splitlines() if line.startswith("│")]
    assert len(rows) == 6 and "rollback to 1" in rows[0] and "current" in rows[0]
    assert "create" in rows[5] and "next rollback" in rows[5]
    assert run("rollback", folder, "--to", 3)[0] == 0 and len(Gallery.open(folder)) == 3
    assert run("rollback", folder, 2)[0] == 0 and len(Gallery.open(folder)) == 2
    assert "cannot be combined" in run.refusal("rollback", folder, 2, "--to", 3)
    assert "--list only shows the generations" in run.refusal("rollback", folder, "--to", 3, "--list")


def test_a_narrow_terminal_shows_all_of_a_gallery(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tmp_path / "a-long-name" / ("of-a-gallery-" * 6), f"models/{'encoder-' * 9}large"
    gallery = Gallery.create(folder, Fingerprint.from_string(model), dim=3)
    store(gallery, np.eye(3), list("abc"))
    listed = json.loads(run.output("info", folder, "--json"))
    monkeypatch.setattr(console, "_width", 80)
    said = run.output("info", folder)
    lines = said.splitlines()
    assert f"{folder}: 3 items" in lines and f"states of {folder}" in lines, "a path can be copied"
    assert f"✓ {folder} is whole: 3 items in 1 segment" in run.output("verify", folder).splitlines()
    assert "…" not in said and max(len(line) for line in lines if str(folder) not in line) <= 80
    versions = "".join(line.split("│")[1].strip() for line in lines[: lines.index(f"states of {folder}")] if "│" in line)
    assert versions == listed["versions"][0]["version"]
    assert all(f" {state[name]} " in said for state in listed["states"] for name in ("generation", "made", "items"))


def test_a_build_from_another_folder_adds_nothing_twice(run: Run, photos: Path, tmp_path: Path, old_folder: str) -> None:
    gallery, more = tmp_path / "gallery", ("--model", old_folder)
    Gallery.create(gallery, load_embedder(old_folder))  # as a build leaves it that was stopped before its first commit
    run.output("build", photos / "inner", *more, "--out", gallery)
    err = run.refusal("build", photos, *more, "--out", gallery)
    assert "none of the 121 images is in" in err and "or add these (xcompat gallery add)" in err
    for verb in (("add", gallery, photos), ("build", photos, "--out", gallery)):  # whose ids are there now
        run.output(*verb, *more)
        assert len(Gallery.open(gallery)) == 180


@pytest.mark.parametrize("verb", [("build", "photos"), ("add", "g", "photos"), ("search", "g", "a dog"), ("upgrade", "g")])
def test_models_use_the_own_accelerator(verb: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str, device: torch.device, autocast: Autocast = "auto") -> None:
        raise XcompatError(f"{name} on {device} in {autocast}")

    monkeypatch.chdir(tmp_path)
    Gallery.create("g", Fingerprint.from_string("m"), dim=2)
    write_photos(tmp_path / "photos", 1)
    monkeypatch.setattr(embedder, "load_embedder", load)
    monkeypatch.setattr("xcompat.retrieval.query_sources.load_embedder", load)
    for module in ("cli.opening", "retrieval.query_sources"):
        monkeypatch.setattr(f"xcompat.{module}.device", lambda: torch.device("cuda", 1))
    assert run(*verb, "--model", "m")[2] == "xcompat: m on cuda:1 in auto\n"


def test_side_information_is_stored_and_an_upgrade_needs_no_images(
    run: Run, photos: Path, tmp_path: Path, folder_of: dict[str, str], image_folder_of: dict[str, str], old_folder: str
) -> None:
    gallery, side, other = tmp_path / "gallery", image_folder_of["resnet"], image_folder_of["vit"]
    more = write_photos(tmp_path / "more", 1)
    assert "120 images added" in run.output("build", photos, "--model", old_folder, "--side-info", side, "--out", gallery)
    for given, message in (
        ((), "have side-information, unlike these"),
        (("--side-info", other), "have side-information by another model than these items"),
    ):
        assert message in run.refusal("add", gallery, more, "--model", old_folder, *given)
    run.output("add", gallery, more, "--model", old_folder, "--side-info", side)
    opened = Gallery.open(gallery)
    frozen = load_embedder(side)
    for segment in opened.segments:
        ids = segment.ids(np.arange(len(segment)))
        files = [(more if name == "00.png" else photos) / name for name in ids]
        psi = frozen.embed({"pixel_values": frozen.processor.images([Image.open(file).convert("RGB") for file in files])})
        np.testing.assert_allclose(segment.side_info(np.arange(len(segment))), psi.numpy(), atol=1e-5)
    old, wrong = load_embedder(old_folder).describe_old(), load_embedder(other).describe_old()
    for name, described in (("h", frozen.describe_old()), ("wrong", wrong)):
        FctModel.from_encoder(folder_of["clip"], old, side_info=described).save_pretrained(tmp_path / name)
    assert "have side-information of another model" in run.refusal("upgrade", gallery, "--model", tmp_path / "wrong")
    assert "121 embeddings to map" in run.output("upgrade", gallery, "--model", tmp_path / "h", "--dry-run")
    assert len(Gallery.open(gallery).generations()) == 3
    out = run.output("upgrade", gallery, "--model", tmp_path / "h")
    assert "121 embeddings mapped" in out and "undo with `xcompat gallery rollback" in out


def test_late_side_information_is_refused(
    run: Run, photos: Path, tmp_path: Path, image_folder_of: dict[str, str], old_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images are there, so nothing would be embedded; and where one is missing, none is before the refusal."""
    build = ("build", photos, "--model", old_folder, "--out", tmp_path / "gallery")
    run.output(*build)
    before = (tmp_path / "gallery" / "gallery.json").read_bytes()
    monkeypatch.setattr("xcompat.retrieval.ingestion.embed_on_processes", None)
    for _ in range(2):
        assert "have no side-information, unlike these items" in run.refusal(*build, "--side-info", image_folder_of["resnet"])
        Image.new("RGB", (9, 9), "red").save(photos / "zzz.png")
    assert (tmp_path / "gallery" / "gallery.json").read_bytes() == before


def test_a_model_that_would_split_the_gallery_is_refused(
    run: Run, photos: Path, tmp_path: Path, folder_of: dict[str, str], compatible_folder: str, old_folder: str
) -> None:
    gallery = tmp_path / "gallery"
    run("build", photos, "--model", old_folder, "--out", gallery)
    foreign = ("--model", folder_of["clip"])
    for verb in (("search", gallery, "a dog"), ("add", gallery, photos), ("upgrade", gallery, "--backfill", photos)):
        said = "cannot be compared with" if verb[0] == "search" else "of this gallery: use a run or map of the new model"
        assert said in run.refusal(*verb, *foreign)
    assert Gallery.open(gallery).damage() == [] and len(Gallery.open(gallery).versions) == 1
    assert "is a plain encoder and maps nothing" in run.refusal("upgrade", gallery, *foreign)
    assert "embedded by another model" in run.refusal("add", gallery, photos, "--model", compatible_folder)
    assert "120 images added" in run.output("add", gallery, photos, "--model", compatible_folder, "--replace")
    assert Gallery.open(gallery).versions == [load_embedder(compatible_folder).fingerprint]


def test_images_are_embedded_in_the_precision_asked_for(run: Run, photos: Path, tmp_path: Path, old_folder: str) -> None:
    stored = {}
    for dtype in ("float32", "bfloat16"):
        run.output("build", photos, "--model", old_folder, "--out", tmp_path / dtype, "--dtype", dtype)
        gallery = Gallery.open(tmp_path / dtype)
        assert gallery.versions == [load_embedder(old_folder).fingerprint]
        stored[dtype] = np.concatenate([items.embeds[0] for segment in gallery.segments for _, items in segment.blocks(999)])
    cosines = (stored["float32"] * stored["bfloat16"]).sum(axis=1)
    assert len(cosines) == 120 and cosines.min() > 0.999 and not np.allclose(stored["float32"], stored["bfloat16"], atol=1e-5)


@pytest.fixture
def index(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "ids.txt").write_text("a\nb\nc\nd\n")
    return write_index(tmp_path / "own.faiss", np.eye(4, dtype=np.float32)), tmp_path / "ids.txt"


def test_a_faiss_index_is_adopted_by_name_or_map(run: Run, index: tuple[Path, Path], tmp_path: Path) -> None:
    own, ids = index
    adopt = ("build", "--from-faiss", own, "--model", "/our/clip", "--out", tmp_path / "g")
    assert "holds no ids; use --ids" in run.refusal(*adopt)
    for wrong, message in ((tmp_path / "no.txt", "cannot be read"), (own, "own.faiss is not UTF-8 text")):
        assert message in run.refusal(*adopt, "--ids", wrong) and not (tmp_path / "g").exists()
    for more in ((tmp_path,), ("--dtype", "bfloat16")):
        assert "adopts an index as it is" in run.refusal("build", *more, *adopt[1:], "--ids", ids)
    out = run.output(*adopt, "--ids", ids)
    assert "4 vectors of /our/clip@" in out and "/our/clip cannot embed here" in out
    gone = ("build", "--from-faiss", tmp_path / "gone", *adopt[3:-1], tmp_path / "h", "--ids", ids)
    assert "gone does not exist; check the path" in run.refusal(*gone)
    new, old = np.random.default_rng(0).standard_normal((2, 30, 4))
    fit_map(old, new).save(tmp_path / "map" / "model")
    expected = load_checkpoint(str(tmp_path / "map" / "model")).lineage.stores.fingerprint
    own, ids = index
    for name in ("map", "map/model"):
        asked = ("adopt", own, "--ids", ids, "--model", tmp_path / name, "--out", tmp_path / f"gallery of {Path(name).name}")
        assert f"4 vectors of {expected}, left in place" in run.output(*asked)


def test_metadata_are_asked_for_as_text_or_as_json(run: Run, tmp_path: Path, old_folder: str, old: Embedder) -> None:
    names = ["item-a", "item-b", "item-c"]
    about = [{"year": 2020, "new": True}, {"year": "2020"}, {"year": 1999}]
    gallery = store(Gallery.create(tmp_path / "gallery", old), old.embed(old.processor.texts(names)), names, about)
    asked = ("search", gallery.path, "a dog", "--model", old_folder, "--where")
    for where, expected in (
        (("year=2020",), "ab"),
        (("new=true",), "a"),
        (("year=1999",), "c"),
        (("year=",), ""),
        (("year=1999", "--where", "new=true", "--where", "year=2020"), "a"),  # any of these years, and new
        (("year=1999", "--where", "year=2020"), "abc"),
    ):
        out = run.output(*asked, *where)
        assert [name for name in names if name in out] == [f"item-{letter}" for letter in expected], where
    assert "filter 'year' is not KEY=VALUE" in run.refusal(*asked, "year")


def test_a_table_shows_the_start_of_long_metadata_and_json_all(run: Run, tmp_path: Path, old_folder: str, old: Embedder) -> None:
    story = "once upon a time " * 100
    gallery = store(Gallery.create(tmp_path / "gallery", old), old.embed(old.processor.texts(["a"])), ["a"], [{"story": story}])
    asked = ("search", gallery.path, "a dog", "--model", old_folder, "--show", "story")
    shown = run.output(*asked)
    assert "story" in shown and "once" in shown and "…" in shown and len(shown) < 2 * len(story)
    assert json.loads(run.output(*asked, "--json"))["hits"][0]["metadata"] == {"story": story}


@pytest.mark.parametrize("captions", [True, False])
def test_columns_beside_images_are_metadata(captions: bool, run: Run, photos: Path, tmp_path: Path, old_folder: str) -> None:
    rows = [("0.png", "a dog", "red"), ("0.png", "an animal", "blue"), ("2.png", "a cat", ""), ("4.png", "a bird", "green")]
    table = [("file_name", "caption", "colour"), *rows]
    (photos / "metadata.csv").write_text("\n".join(";".join(row if captions else row[::2]) for row in table))
    more, gallery = ("--model", old_folder), tmp_path / "g"
    run.output("build", photos, *more, "--out", gallery)
    about = [{"caption": "a dog", "colour": "red"}, {"caption": "a cat"}, {"caption": "a bird", "colour": "green"}]
    expected = [{key: value for key, value in each.items() if captions or key != "caption"} or None for each in about]
    assert Gallery.open(gallery).metadata(["0.png", "2.png", "4.png"]) == expected
    out = run.output("search", gallery, "a dog", *more, "--where", "colour=green")
    assert "4.png" in out and "0.png" not in out
    (photos / "metadata.csv").unlink()
    (photos / "labels.jsonl").write_text('{"image": "0.png", "year": 2020, "tags": ["a"]}\n{"image": "2.png", "year": null}\n')
    assert load_originals(photos).metadata(np.arange(2)) == [{"year": 2020, "tags": ["a"]}, None]


def test_a_filter_by_a_key_that_no_item_has(run: Run, tmp_path: Path, old_folder: str, old: Embedder) -> None:
    embeds = old.embed(old.processor.texts(["a", "b"]))
    for name, about in (("with", [{"label": "dog"}, {"year": 1}]), ("without", None)):
        store(Gallery.create(tmp_path / name, old), embeds, ["a", "b"], about)
    Gallery.create(tmp_path / "empty", old)
    asked = ("a dog", "--model", old_folder, "--json", "--where")
    for gallery, where, message in (
        ("with", "labl=dog", "has the key 'labl'; did you mean 'label'?"),
        ("with", "labl=null", "has the key 'labl'; did you mean 'label'?"),
        ("with", "colour=dog", "has the key 'colour'; known: label, year"),
        ("without", "label=dog", "has the key 'label'; they have no metadata"),
    ):
        assert message in run.refusal("search", tmp_path / gallery, *asked, where)
    for gallery in ("with", "empty"):
        assert '"hits": []' in run.output("search", tmp_path / gallery, *asked, "label=cat")


@pytest.mark.parametrize(("verb", "code"), [("info", failures.PIPE_CLOSED), ("compact", 2)])
def test_closed_pipe_names_stopped_work(verb: str, code: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def print_to_nobody(*_: object) -> None:
        try:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        except BrokenPipeError:
            raise SystemExit(1) from None  # as rich does

    monkeypatch.setattr(commands, verb, print_to_nobody)
    Gallery.create(tmp_path / "g", Fingerprint.from_string("m"), dim=2)
    expected = f"xcompat: {failures.BROKEN_PIPE}\n" if code == 2 else ""
    assert run(verb, tmp_path / "g") == (code, "", expected)


@pytest.mark.parametrize("count", [1, 5])
def test_other_images_of_the_same_names_are_refused(run: Run, tmp_path: Path, folder_of: dict[str, str], count: int) -> None:
    model, gallery = folder_of["clip"], tmp_path / "gallery"
    for name, colour in {"one": 40, "copy": 40, "other": 200}.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (20, 20), (colour + number, 99, 0)).save(tmp_path / name / f"{number}.png")
    run.output("build", tmp_path / "one", "--model", model, "--out", gallery)
    out = run.output("add", gallery, tmp_path / "copy", "--model", model)
    assert f"0 images added to {gallery}, {count} were there already" in " ".join(out.split())
    said = f"has other images under the same ids: '0.png'{' and 4 more' * (count > 1)} of {count} checked; move these"
    assert said in run.refusal("add", gallery, tmp_path / "other", "--model", model)
    assert f"{count} images added" in run.output("add", gallery, tmp_path / "other", "--model", model, "--replace")
    assert len(Gallery.open(gallery)) == count
    run.output("add", gallery, tmp_path / "other", "--model", model)


def test_photos_on_their_side_are_replaced(run: Run, tmp_path: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, gallery = tmp_path / "photos", tmp_path / "gallery"
    photos.mkdir()
    for number in range(20):
        pixels = np.random.default_rng(number).integers(0, 255, (4, 3, 3), dtype=np.uint8)
        upright = Image.fromarray(pixels).resize((48, 64), Image.Resampling.BILINEAR)
        exif = Image.Exif()
        exif[0x0112] = 6
        stored = upright.rotate(90, expand=True) if number < 6 else upright
        stored.save(photos / f"{number:02d}.png", exif=exif if number < 6 else Image.Exif())
    with monkeypatch.context() as before:  # as earlier versions did
        before.setattr("xcompat.data.images.turn_upright", lambda image: image)
        before.setattr("xcompat.encoders.processor.turn_upright", lambda image: image)
        run("build", photos, "--model", old_folder, "--out", gallery)
    adding = ("add", gallery, photos, "--model", old_folder)
    assert "holds '00.png' and 5 more on their side" in run.output(*adding).replace("\n", " ")
    assert "6 images added" in run.output(*adding, "--replace")
    out = run.output(*adding)
    assert "on their side" not in out and "20 were there already" in out


def test_builds_are_continued(run: Run, photos: Path, tmp_path: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery, add, added = tmp_path / "gallery", Gallery.add, []

    def add_and_interrupt(self: Gallery, embeds: np.ndarray, *arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGINT if not added else signal.SIGTERM)  # in the middle of a block, which is finished
        add(self, embeds, *arguments, **options)
        added.append(len(embeds))

    command = ("build", photos, "--model", old_folder, "--out", gallery)
    with monkeypatch.context() as patched:
        patched.setattr(Gallery, "add", add_and_interrupt)
        for parts in (1, 2):
            code, _, err = run(*command)
            assert code == 130 and err == "xcompat: interrupted; start again to continue\n" and len(added) == parts
            assert len(Gallery.open(gallery)) == sum(added) and Gallery.open(gallery).damage() == []
    out = run.output(*command)
    assert f"{120 - sum(added)} images added" in out and f"{sum(added)} were there already" in out
    assert len(Gallery.open(gallery)) == 120

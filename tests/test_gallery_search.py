"""``xcompat gallery search``: one query or many, for people and for programs, of galleries and of stores."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xcompat import Fingerprint, XbtModel
from xcompat.core.progress import console
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery, embedded_queries, hit_output, searching
from xcompat.retrieval.ingestion import ingest
from xcompat.retrieval.originals import load_originals

Run = Callable[..., tuple[int, str, str]]
LONG = "a_folder_with_a_long_name_as_cameras_and_data_sets_have_them"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twelve images below a folder with a long name, and what file managers leave among them."""
    folder = tmp_path_factory.mktemp("search") / "photos"
    (folder / LONG).mkdir(parents=True)
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / LONG / f"{number}.png")
    for hidden in (f"{LONG}/._0.png", "._x.jpg", ".DS_Store", "Thumbs.db", "__MACOSX/0.png", ".thumbnails/0.png"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_bytes(b"Mac OS X")
    return folder


@pytest.fixture(scope="module")
def gallery(photos: Path, old_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embed them."""
    folder = tmp_path_factory.mktemp("search") / "gallery"
    embedder = load_embedder(old_folder)
    assert ingest(Gallery.create(folder, embedder), load_originals(photos), embedder)[:3] == (12, 0, 0)
    return folder


@pytest.fixture
def mixed(gallery: Path, photos: Path, tmp_path: Path, old_folder: str, folder_of: dict[str, str]) -> tuple[Path, str]:
    """Return a gallery of two models, and the one that searches both."""
    made = Gallery.create(tmp_path / "mixed", load_embedder(old_folder))
    ingest(made, load_originals(photos), load_embedder(old_folder))
    XbtModel.from_encoder(folder_of["clip"], old=load_embedder(old_folder).describe_old()).export(tmp_path / "xbt")
    newer = load_embedder(str(tmp_path / "xbt"))
    ingest(made, load_originals(photos), newer, replace=True, rows=np.arange(6))
    return made.path, str(tmp_path / "xbt")


def test_json_is_all_that_stdout_holds(run: Run, gallery: Path, photos: Path, old_folder: str) -> None:
    code, out, err = run("search", gallery, photos / LONG / "7.png", "--model", old_folder, "--top-k", 3, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert out.count("\n") == 1 and found["query"] == str(photos / LONG / "7.png") and found["text"] is None
    assert len(found["hits"]) == 3 and found["hits"][0]["id"] == f"{LONG}/7.png"
    assert found["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert found["hits"][0]["version"] == str(load_embedder(old_folder).fingerprint)
    assert found["confidence"] is None and {hit["standing"] for hit in found["hits"]} == {None}
    code, out, err = run("search", gallery, "dog " * 100, "--model", old_folder, "--json")
    assert code == 0 and json.loads(out)["hits"] and "query truncated to 16 tokens" in err
    assert console.stderr is False, "what comes next is for people again"


def test_many_texts_find_what_each_finds_alone(run: Run, gallery: Path, tmp_path: Path, old_folder: str) -> None:
    asked = ["a red shoe", 'two dogs, "quoted"', "schöne Schuhe"]
    (tmp_path / "asked.txt").write_text("\n".join(asked) + "\n", encoding="utf-8")
    rows = [json.dumps({"id": f"q{number}", "text": text}) for number, text in enumerate(asked)]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    alone = [json.loads(run("search", gallery, text, "--model", old_folder, "--json")[1])["hits"] for text in asked]
    for source, names in (("asked.txt", ["0", "1", "2"]), ("asked.jsonl", ["q0", "q1", "q2"])):
        code, out, _ = run("search", gallery, "--queries", tmp_path / source, "--model", old_folder, "--json")
        found = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [each["query"] for each in found] == names and [each["text"] for each in found] == asked
        for each, hits in zip(found, alone, strict=True):
            assert [hit["id"] for hit in each["hits"]] == [hit["id"] for hit in hits]
            np.testing.assert_allclose([hit["score"] for hit in each["hits"]], [hit["score"] for hit in hits], atol=1e-5)
    code, out, _ = run("search", gallery, "--queries", tmp_path / "asked.txt", "--model", old_folder, "--csv", "--top-k", 4)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and tuple(rows[0]) == hit_output.COLUMNS and len(rows) == 12
    assert [row["text"] for row in rows[::4]] == asked and [row["rank"] for row in rows[:4]] == ["1", "2", "3", "4"]
    assert [row["id"] for row in rows[4:8]] == [hit["id"] for hit in alone[1][:4]]
    code, out, _ = run("search", gallery, "--queries", tmp_path / "asked.txt", "--model", old_folder)
    assert code == 0 and all(f"▸ {text}" in out for text in asked) and out.count("━━") >= 3


@pytest.mark.parametrize("form", ["folder", "list", "npy"])
def test_many_images_and_embeddings_find_themselves(
    form: str, run: Run, gallery: Path, photos: Path, tmp_path: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_queries, "ROWS_AT_ONCE", 5)
    source, names = photos, sorted(f"{LONG}/{number}.png" for number in range(12))
    expected = names
    if form == "list":
        source = tmp_path / "list.txt"
        expected = [str(photos / name) for name in names]
        source.write_text("\n".join(expected))
    elif form == "npy":
        source, expected = tmp_path / "asked.npy", [str(row) for row in range(12)]
        originals, embedder = load_originals(photos), load_embedder(old_folder)
        assert list(originals.ids) == names
        np.save(source, np.concatenate([embeds for _, embeds in originals.embed(embedder, np.arange(12))]).astype(np.float16))
    code, out, err = run("search", gallery, "--queries", source, "--model", old_folder, "--top-k", 1, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "") and [each["query"] for each in found] == expected
    assert [each["hits"][0]["id"] for each in found] == names


def test_a_store_is_searched_likewise(run: Run, gallery: Path, tmp_path: Path, old_folder: str) -> None:
    (tmp_path / "asked.txt").write_text("a red shoe\ntwo dogs\n")
    asked = ("--queries", tmp_path / "asked.txt", "--model", old_folder, "--json")
    same = [run("search", where, *asked) for where in (gallery, f"file://{gallery}")]
    assert [code for code, _, _ in same] == [0, 0]
    mine, stores = ([json.loads(line) for line in out.splitlines()] for _, out, _ in same)
    assert [[hit["id"] for hit in each["hits"]] for each in mine] == [[hit["id"] for hit in each["hits"]] for each in stores]


def test_ids_are_whole_and_columns_without_content_are_left_out(
    run: Run, gallery: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run("search", gallery, "a dog", "--model", old_folder)[1]
    assert out.count(LONG) == 10 and "metadata" not in out and "standing" not in out and "version" in out
    monkeypatch.setattr(console, "_width", 60)  # a narrow terminal folds, and leaves nothing out
    out = run("search", gallery, "a dog", "--model", old_folder)[1]
    assert "…" not in out and max(map(len, out.splitlines())) <= 60
    cells = [[cell.strip() for cell in line.split("│")[3:4]] for line in out.splitlines() if "│" in line]
    assert "".join(cell for (cell,) in cells).count(LONG) == 10


def test_what_ranks_hits_of_several_models_is_shown_and_said(
    run: Run, mixed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = mixed
    monkeypatch.setattr(searching, "FEWEST_SAMPLED", 6)  # each model's six items speak for themselves, as 64 do
    code, out, _ = run("search", folder, "a dog", "--model", model, "--top-k", 12, "--json")
    hits = json.loads(out)["hits"]
    assert code == 0 and len({hit["version"] for hit in hits}) == 2 and len(hits) == 12
    standing = [hit["standing"] for hit in hits]
    assert standing == sorted(standing, reverse=True)
    scores = [hit["score"] for hit in hits]
    assert scores != sorted(scores, reverse=True), "this is what needs an explanation"
    for version in {hit["version"] for hit in hits}:  # a mean and a deviation for each
        own = np.array([(hit["score"], hit["standing"]) for hit in hits if hit["version"] == version])
        slope, offset = np.polyfit(own[:, 0], own[:, 1], 1)
        np.testing.assert_allclose(own[:, 0] * slope + offset, own[:, 1], atol=1e-3)
        assert slope > 1
    out = run("search", folder, "a dog", "--model", model)[1]
    assert "standing" in out and "come from several models with different score scales" in out


def test_two_unreadable_images_of_many_do_not_stop_a_build(run: Run, photos: Path, tmp_path: Path, old_folder: str) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for number in range(30):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(bad / f"{number}.png")
    for number in range(2):
        (bad / f"bad{number}.jpg").write_bytes(b"no image")
    code, out, err = run("build", bad, "--model", old_folder, "--out", tmp_path / "g")
    assert (code, err) == (0, "") and "30 images added" in out and "2 cannot be read" in out and "skipped bad0.jpg" in out
    for number in range(2, 8):
        (bad / f"bad{number}.jpg").write_bytes(b"no image")
    code, _, err = run("build", bad, "--model", old_folder, "--out", tmp_path / "h")
    assert code == 2 and "of 38 images cannot be used, more than the share 0.1" in err and "raise --max-bad-share" in err
    code, out, _ = run("build", bad, "--model", old_folder, "--out", tmp_path / "h", "--max-bad-share", 0.3)
    assert code == 0 and "30 images added" in out and "8 cannot be read" in out
    (tmp_path / "docs.txt").write_text("bears sleep\n")
    code, _, err = run("build", tmp_path / "docs.txt", "--model", old_folder, "--out", tmp_path / "t", "--max-bad-share", 0.3)
    assert code == 2 and "--max-bad-share works with images only" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one query, or many with --queries"),
        (("a dog", "--queries", "asked.txt"), "not both"),
        (("a dog", "--json", "--csv"), "--json and --csv are two forms of the same result"),
        (("photos/nope.jpg",), "there is no image photos/nope.jpg; there is no photos in"),
        (("--queries", "nope.txt"), "nope.txt does not exist"),
        (("--queries", "bad.txt"), "1 of 2 queries cannot be used, more than the share 0.1: gone.png: unreadable image"),
        (("--queries", "asked.tx"), "asked.tx does not exist; did you mean 'asked.txt'?"),
        (("--queries", "my_qeries"), "my_qeries does not exist; did you mean 'my_queries'?"),
        (("--queries", "flat.npy"), "flat.npy has the shape (4,)"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    arguments: tuple, message: str, run: Run, gallery: Path, tmp_path: Path, old_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asked.txt").write_text("a dog\n")
    (tmp_path / "my_queries").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "there.png")
    (tmp_path / "bad.txt").write_text("there.png\ngone.png\n")
    np.save(tmp_path / "flat.npy", np.ones(4, np.float32))
    code, out, err = run("search", gallery, *arguments, "--model", old_folder)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err
    assert "share" not in message or err.endswith("; fix or remove them\n"), "this verb has no option for it"


def test_a_text_asked_of_a_model_of_images(run: Run, tmp_path: Path, image_folder_of: dict[str, str]) -> None:
    made = Gallery.create(tmp_path / "g", load_embedder(image_folder_of["resnet"]))
    made.add(np.eye(made.manifest.versions[0].dim)[:2], ["a", "b"], version=made.versions[0])
    made.commit()
    code, _, err = run("search", made.path, "a dog", "--model", image_folder_of["resnet"])
    assert code == 2 and "embeds images only" in err and "give the path of an image" in err


def test_control_characters_of_an_id_stay_escaped_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    hit = hit_output.Hit("a\x1b[2J\x9b", 1.0, Fingerprint.from_string("m"), None)
    hit_output.make_printer("json")(hit_output.QueryResult("q", None, [hit]))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and json.loads(out)["hits"][0]["id"] == hit.id

"""Rows without a usable embedding: counted, named and left out, in the same words for every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from typer.testing import CliRunner

from xcompat.cli import app
from xcompat.core.errors import XcompatError
from xcompat.mapping.paired import PairedEmbeddings, load_paired
from xcompat.mapping.sides import read_sides
from xcompat.training.evaluate_command import evaluate_embeddings

pytestmark = pytest.mark.usefixtures("undrawn")
ITEMS, BAD = 60, 7
IDS = [f"item {row}" for row in range(ITEMS)]


def draw(seed: int = 0, dim: int = 8) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((ITEMS, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def write_npy(here: Path, rows: list) -> Path:
    folder = here / "npy"
    folder.mkdir()
    np.save(folder / "image_embeds.npy", [np.full(8, np.nan, np.float32) if row is None else row for row in rows])
    (folder / "image_ids.txt").write_text("\n".join(IDS))
    return folder


def write_parquet(here: Path, rows: list) -> Path:
    column = pa.array([None if row is None else row.tolist() for row in rows], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": IDS, "embedding": column}), here / "a.parquet")
    return here / "a.parquet"


def write_json(here: Path, rows: list) -> Path:
    lines = ({"id": name} | ({} if row is None else {"embedding": row.tolist()}) for name, row in zip(IDS, rows, strict=True))
    (here / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return here / "a.jsonl"


WRITERS: dict[str, Callable[[Path, list], Path]] = {"npy": write_npy, "parquet": write_parquet, "jsonl": write_json}
KINDS = {"missing": None, "zeros": np.zeros(8, np.float32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, BAD, ITEMS - 1])
@pytest.mark.parametrize("form", WRITERS)
def test_a_bad_row_is_named_alike_in_every_format(form: str, place: int, kind: str, tmp_path: Path) -> None:
    rows = list(draw())
    rows[place] = KINDS[kind]
    (side,) = read_sides(WRITERS[form](tmp_path, rows)).values()
    said = "has no embedding" if kind == "missing" else "holds only zeros"
    assert len(side.notes) == 1 and f"row {place} ('item {place}') {said}" in side.notes[0]
    assert np.flatnonzero(~side.usable_N).tolist() == [place]
    np.testing.assert_array_equal(side.embeds_ND[side.usable_N], np.delete(draw(), place, 0))


@pytest.mark.parametrize("form", WRITERS)
def test_pairs_leave_out_what_either_side_lacks(form: str, tmp_path: Path) -> None:
    sides = []
    for name, lacks in (("old", [3, 5]), ("new", [5, 9])):
        (tmp_path / name).mkdir()
        rows = [None if row in lacks else each for row, each in enumerate(draw())]
        sides.append(WRITERS[form](tmp_path / name, rows))
    pairs = load_paired(*sides)
    assert isinstance(pairs, PairedEmbeddings)
    np.testing.assert_array_equal(pairs.new_ND[:], np.delete(draw(), [3, 5, 9], 0))
    np.testing.assert_array_equal(pairs.old_Nd[:], np.delete(draw(), [3, 5, 9], 0))
    assert [note.split(" rows")[0] for note in pairs.notes] == ["2 of 60", "2 of 60"]


def test_rows_without_ids_stay_in_step(tmp_path: Path) -> None:
    old, new = draw(0), draw(1)
    old[4], new[8] = np.nan, 0
    np.save(tmp_path / "old.npy", old)
    np.save(tmp_path / "new.npy", new)
    pairs = load_paired(tmp_path / "old.npy", tmp_path / "new.npy")
    assert isinstance(pairs, PairedEmbeddings)
    np.testing.assert_array_equal(pairs.old_Nd[:], np.delete(old, [4, 8], 0))
    np.testing.assert_array_equal(pairs.new_ND[:], np.delete(new, [4, 8], 0))


def test_rows_of_any_length_are_used_and_said(tmp_path: Path) -> None:
    rows = draw()
    rows[BAD] *= np.float32(1e-22)
    rows[BAD + 1] *= np.float32(1e30)
    (side,) = read_sides(write_npy(tmp_path, list(rows))).values()
    np.testing.assert_allclose(side.embeds_ND, draw(), atol=1e-6)
    assert side.usable_N.all() and "2 of 60 rows" in side.notes[0] and "row 7 ('item 7'): 1e-22" in side.notes[0]


def test_too_many_bad_rows_are_refused_with_the_option(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [None if row < 30 else each for row, each in enumerate(draw())])
    with pytest.raises(
        XcompatError, match=r"30 of 60 rows .* share 0.1: row 0 \('item 0'\) has no embedding; .* --max-bad-share"
    ):
        read_sides(path)
    (side,) = read_sides(path, 0.5).values()
    assert side.usable_N.sum() == 30


def run_map(here: Path, *options: str) -> Result:
    files = ["--old", str(here / "old.npy"), "--new", str(here / "new.npy"), "--old-model", "b32", "--out", str(here / "map")]
    return CliRunner().invoke(app, ["map", *files, "--allow-worse", *options])


def test_map_says_what_it_left_out_and_keeps_it_in_the_report(tmp_path: Path) -> None:
    old = draw()
    old[:12] = 0
    np.save(tmp_path / "old.npy", old)
    np.save(tmp_path / "new.npy", draw(1))
    refused = run_map(tmp_path)
    assert isinstance(refused.exception, XcompatError) and "--max-bad-share" in str(refused.exception)
    taken = run_map(tmp_path, "--max-bad-share", "0.2")
    assert taken.exit_code == 0, taken.output
    report = json.loads((tmp_path / "map" / "report.json").read_text())
    assert report["items"] == 48 and any("12 of 60 rows" in line for line in report["said"])


def write_labelled(folder: Path, rows: np.ndarray, ids: list[str], labels: list[str] | None = None) -> Path:
    folder.mkdir()
    np.save(folder / "image_embeds.npy", rows)
    (folder / "image_ids.txt").write_text("\n".join(ids))
    if labels is not None:
        (folder / "labels.txt").write_text("\n".join(labels))
    return folder


def test_no_model_is_judged_on_what_one_of_them_lacks(tmp_path: Path) -> None:
    labels = [f"class {row % 6}" for row in range(ITEMS)]
    old, new = draw(0), draw(1)
    new[BAD] = np.nan
    whole = np.delete(np.arange(ITEMS), [BAD, 11])
    left = [row for row in range(ITEMS) if row != 11]
    place = write_labelled(tmp_path / "old", old, IDS, labels)
    other = write_labelled(tmp_path / "new", new[left][::-1], [IDS[row] for row in left][::-1])  # another order, one row less
    found = evaluate_embeddings(place, other, None, None, tmp_path / "report")
    kept = [[each[row] for row in whole] for each in (IDS, labels)]
    plain = evaluate_embeddings(
        write_labelled(tmp_path / "old-kept", old[whole], *kept),
        write_labelled(tmp_path / "new-kept", new[whole], kept[0]),
        None,
        None,
        tmp_path / "report-kept",
    )
    assert found.cases == plain.cases

"""Evidence of ``xcompat evaluate`` for folders of embeddings: the same as that of ``xcompat map``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Run

from xcompat import XcompatError
from xcompat.report import load_report
from xcompat.report.wording import verdicts
from xcompat.training.embedding_folders import choose_evidence
from xcompat.training.evaluate_command import evaluate_embeddings

COUNT, DIM = 120, 8
IDS = [f"item {row}" for row in range(COUNT)]
Sides = Callable[..., tuple[Path, Path]]


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    """Return a function that writes folders of an old and a new model, the old one with more noise, into the same space."""

    def write(queries: list[str] | None = None, kind: str = "text", labels: str = "") -> tuple[Path, Path]:
        draw = np.random.default_rng(0)
        things = draw.standard_normal((12, DIM))[np.arange(COUNT) % 12] + 0.3 * draw.standard_normal((COUNT, DIM))
        for name, noise in (("old", 0.8), ("new", 0.05)):
            folder = tmp_path / name
            folder.mkdir()
            for each, ids in ((kind, IDS), ("query", queries)):
                if ids is not None:
                    np.save(folder / f"{each}_embeds.npy", (things + noise * draw.standard_normal(things.shape))[: len(ids)])
                    (folder / f"{each}_ids.txt").write_text("".join(f"{line}\n" for line in ids))
        if labels:
            (tmp_path / labels / "labels.txt").write_text("".join(f"class {row % 12}\n" for row in range(COUNT)))
        return tmp_path / "old", tmp_path / "new"

    return write


def test_ids_of_queries_name_their_answers(sides: Sides, tmp_path: Path) -> None:
    old, new = sides(queries=IDS[:50] + IDS[:10])
    report = evaluate_embeddings(old, new, None, None, tmp_path / "out")
    cases = {case.label: case for case in report.cases}
    assert cases["new/old"].n_queries == 60 and cases["new/old"].direction == "text-to-text"
    queries, texts = (np.load(old / f"{kind}_embeds.npy") for kind in ("query", "text"))
    queries, texts = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (queries, texts))
    scores_QG, answers_Q = queries @ texts.T, [*range(50), *range(10)]
    ranks_Q = (scores_QG >= scores_QG[range(60), answers_Q][:, None]).sum(1)
    assert cases["old/old"].metrics["mrr@10"] == pytest.approx(np.where(ranks_Q <= 10, 1 / ranks_Q, 0).mean())
    assert report.notes[0] == "Evidence: ids of queries, each the id of the text that answers it."


@pytest.mark.parametrize(("kind", "labels"), [("text", "old"), ("text", "new"), ("image", "new")])
def test_classes_may_be_in_either_folder(sides: Sides, tmp_path: Path, kind: str, labels: str) -> None:
    old, new = sides(kind=kind, labels=labels)
    report = evaluate_embeddings(old, new, None, None, tmp_path / "out")
    assert report.notes[0] == f"Evidence: classes in {tmp_path / labels / 'labels.txt'}."
    (metric, direction) = ("mrr@10", "text-to-text") if kind == "text" else ("cmc@1", "image-to-image")
    cases = {case.label: case for case in report.cases}
    assert cases["new/old"].direction == direction and cases["new/old"].metrics[metric] > cases["old/old"].metrics[metric]


@pytest.mark.parametrize("kind", ["text", "image"])
def test_without_evidence_the_agreement_with_the_new_model_is_measured(sides: Sides, tmp_path: Path, kind: str) -> None:
    old, new = sides(kind=kind, queries=[f"query {row}" for row in range(50)] if kind == "text" else None)
    report = evaluate_embeddings(old, new, new, None, tmp_path / "out")
    cases = {case.label: case for case in report.cases}
    assert cases["new/new"].metrics["recall@10"] == 1.0 and cases["old/old"].metrics["recall@10"] < 0.9
    assert (cases["old/old"].n_queries, cases["old/old"].n_gallery) == (36, 84)
    assert {case.direction for case in report.cases} == {f"{kind}-to-{kind}"}
    assert "Relevant are the 10 items that it finds nearest" in report.notes[0]
    assert ("The queries are not used, because none has the id of a text" in report.notes[0]) == (kind == "text")
    assert [verdict.answer for verdict in verdicts(load_report(tmp_path / "out"))] == ["not measured"]


def test_what_cannot_be_judged_is_refused_before_anything_is_read(
    sides: Sides, tmp_path: Path, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcompat.training.evaluate_command.load_checkpoint", lambda *_: pytest.fail("a model is loaded"))
    old, new = sides(kind="image")
    with pytest.raises(XcompatError, match="without classes or texts, so relevant hits are unknown.*own embeddings .--new-own"):
        choose_evidence({"old": old, "new_view": new})
    asked = ("evaluate", "--old", old, "--new", new, "--out", tmp_path / "out")
    code, _, err = run_xcompat(*asked, "--new-own", new, "--require-compatible")
    assert code == 2 and "--require-compatible needs classes, captions or judgements" in err
    code, _, err = run_xcompat("evaluate", "--old", tmp_path / "odl", "--new", new, "--out", tmp_path / "out")
    assert code == 2 and "odl does not exist; choose embeddings, e.g. a file or a folder" in err
    (old / "labels.txt").write_text("a\n")
    assert "labels.txt has 1 lines for 120 images; the counts must be equal" in run_xcompat.refusal(*asked)
    assert not (tmp_path / "out").exists()

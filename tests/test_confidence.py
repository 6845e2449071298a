"""How sure a query is: measures against loops, what is calibrated on what was held out, and that it stays with the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import unit
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from test_map import made, write
from transformers import AutoModel
from typer.testing import CliRunner

import xcompat
from xcompat import XcompatError, cli
from xcompat.evaluation import ranking_per_query
from xcompat.evaluation.selective import area_under_roc, calibration_error, risk_coverage
from xcompat.mapping import choose
from xcompat.mapping.candidates import CandidateParts
from xcompat.mapping.choice_report import as_json, describe_choice
from xcompat.mapping.confidence import FEWEST, Evidence, calibrate
from xcompat.mapping.folds import folds
from xcompat.models.indexed_memory import build_memory
from xcompat.models.query_memory import QueryMemory


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40))
def test_an_area_is_what_a_loop_over_pairs_gives(drawn: list[tuple[int, bool]]) -> None:
    scores, better = np.array([score for score, _ in drawn]), np.array([flag for _, flag in drawn])
    if better.all() or not better.any():
        with pytest.raises(XcompatError, match="all queries are of one kind"):
            area_under_roc(scores, better)
        return
    wins = [(high > low) + 0.5 * (high == low) for high in scores[better] for low in scores[~better]]
    area = area_under_roc(scores, better)
    assert area.value == pytest.approx(np.mean(wins)) == pytest.approx(roc_auc_score(better, scores))
    assert 0 <= area.low <= area.value <= area.high <= 1
    twice = area_under_roc(np.repeat(scores, 2), np.repeat(better, 2), np.repeat(np.arange(len(scores)), 2))
    assert twice == pytest.approx(area), "what is said twice of one thing makes nobody surer"


def test_an_interval_of_an_area_holds_it() -> None:
    """Of 300 draws of a score whose area is known, about 95 % hold it."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(300):
        better = draw.random(200) < 0.3
        area = area_under_roc(draw.standard_normal(200) + better, better)  # P(N(1, 2) > 0) = 0.760
        held += area.low < 0.7602 < area.high
    assert 0.91 < held / 300 < 0.99


def test_errors_and_risks_are_what_loops_give() -> None:
    draw = np.random.default_rng(1)
    sure, hurt = draw.random(57), draw.random(57) < 0.4
    order = sorted(range(57), key=lambda row: sure[row])
    groups = np.array_split(order, 10)
    error = sum(len(group) / 57 * abs(np.mean(sure[group]) - np.mean(~hurt[group])) for group in groups)
    assert calibration_error(sure, ~hurt) == pytest.approx(error)
    risks = [np.mean([hurt[row] for row in order[::-1][:count]]) for count in range(1, 58)]
    np.testing.assert_allclose(risk_coverage(sure, hurt), risks)


def drawn_evidence(rows: int, slope: float, offset: float) -> Evidence:
    draw = np.random.default_rng(0)
    leaning = draw.random(rows)
    hurt = draw.random(rows) > 1 / (1 + np.exp(-(slope * leaning + offset)))
    return Evidence(leaning, hurt, np.arange(rows) % 2, np.arange(rows))


def test_what_was_planted_is_found() -> None:
    found, why = calibrate(drawn_evidence(20_000, 3.0, -1.0))
    assert found is not None and not why
    assert (found.slope, found.offset) == (pytest.approx(3.0, abs=0.2), pytest.approx(-1.0, abs=0.1))
    assert found.error < 0.02 and found.area.low > 0.65 and list(found.risk) == [1.0, 0.9, 0.75, 0.5, 0.25]
    assert found.risk[1.0] == pytest.approx(found.hurt) and found.risk[0.25] < found.risk[0.75] < found.hurt


def test_a_fold_judges_what_the_other_one_taught() -> None:
    """Folds that say the opposite: what is fitted on one is wrong on the other."""
    evidence = drawn_evidence(4000, 6.0, -3.0)
    turned = replace(evidence, hurt_Q=evidence.hurt_Q ^ (evidence.folds_Q == 1))
    found, why = calibrate(turned)
    assert found is None and "no better than chance" in why


def test_without_enough_queries_of_both_kinds_there_is_no_confidence() -> None:
    evidence = drawn_evidence(400, 3.0, -1.0)
    few = np.zeros(400, bool)
    few[: 2 * FEWEST] = True
    assert calibrate(replace(evidence, hurt_Q=few, recalled_norm_Q=1.0 - few))[0] is not None
    few[0] = False
    found, why = calibrate(replace(evidence, hurt_Q=few))
    assert found is None and f"only {FEWEST - 1} queries that were hurt" in why


def test_who_was_hurt_is_what_the_folds_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice calibrates on the queries of all folds and protocols: beside loops over them, with a memory of each fold."""
    pairs, seen = made(new_noise=0.8, old_noise=1.4), []
    monkeypatch.setattr("xcompat.mapping.selection.calibrate", lambda evidence: seen.append(evidence) or calibrate(evidence))
    choice = choose(pairs, "open")
    (evidence,) = seen
    assert pairs.labels_N is not None
    leaning, hurt = list[float](), list[bool]()
    for fold in folds(pairs.labels_N, "open"):
        memory = CandidateParts(pairs.take(fold.fit_F)).memory(choice.chosen.candidate)
        assert memory is not None
        line = CandidateParts(pairs.take(fold.fit_F)).line(choice.chosen.candidate.line)
        for protocol, rows in fold.queries.items():
            searched = fold.galleries[protocol]
            new, labels = torch.from_numpy(pairs.new_ND[rows]), pairs.labels_N[rows]
            with torch.inference_mode():
                asked = memory(new, line.to_space_without_memory(new)).numpy()
                leaning += memory.recall(new).norm(dim=1).tolist()
            mine, theirs = (
                ranking_per_query(q, pairs.old_Nd[searched], labels, pairs.labels_N[searched], rows, searched)
                for q in (asked, pairs.old_Nd[rows])
            )
            hurt += (mine.average_precision_Q < theirs.average_precision_Q).tolist()
    np.testing.assert_allclose(evidence.recalled_norm_Q, leaning, atol=1e-5)
    assert evidence.hurt_Q.tolist() == hurt and set(evidence.folds_Q) == {0, 1}
    assert len(set(evidence.about_Q)) < len(hurt), "an item is asked in several protocols"
    assert choice.confidence is not None and as_json(choice)["confidence"]["hurt"] == pytest.approx(np.mean(hurt))


def test_a_map_says_how_sure_its_queries_are(tmp_path: Path) -> None:
    pairs = made(new_noise=0.8, old_noise=1.4)
    assert pairs.labels_N is not None
    old = write(tmp_path / "old", pairs.old_Nd, labels=[f"class {label:02}" for label in pairs.labels_N])
    command = ["map", "--old", str(old), "--new", str(write(tmp_path / "new", pairs.new_ND)), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli.app, [*command, "--searched-classes", "open", "--allow-worse"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    model, said = AutoModel.from_pretrained(tmp_path / "out" / "model"), report["confidence"]
    assert model.config.memory["confident"] and "probability that" in " ".join(done.output.split())
    embeds = torch.from_numpy(np.array(pairs.new_ND))
    expected = torch.sigmoid(said["slope"] * model.memory.recall(embeds).norm(dim=1) + said["offset"])
    torch.testing.assert_close(model.confidence(embeds), expected)
    assert 0.5 < said["auroc"]["ci95"][0] < said["auroc"]["value"]


def test_a_map_without_a_memory_says_nothing_of_what_queries_say() -> None:
    choice = choose(made().of_old())  # which no memory makes better
    assert choice.confidence is None and not choice.remembers and "confidence" not in " ".join(describe_choice(choice))
    assert as_json(choice)["confidence"] == {"none": "the map has no memory"}


def remembering(new_dim: int, old_dim: int) -> QueryMemory:
    memory = QueryMemory(new_dim, old_dim, entries=4, sharpness=9.0)
    memory.keys_KD, memory.values_Kd = unit(4, new_dim, 3), unit(4, old_dim, 4)
    memory.gate = torch.tensor([8.0, -1.0])
    return memory.calibrate(10.0, -4.0)


def test_it_stays_with_a_model_and_goes_with_its_entries(tmp_path: Path) -> None:
    old = xcompat.Fingerprint.from_string("old")
    config = xcompat.RidgeModel.config_class(old=xcompat.models.describe_old(old, 8), embedding_dim=12)
    model, embeds = xcompat.RidgeModel(config).eval(), unit(5, 12, 6)
    assert model.confidence(embeds) is None and not model.is_confident
    plain = remembering(12, 8)
    plain.calibration = None
    before = model.remember(plain).fingerprint()
    assert model.confidence(embeds) is None and "confident" not in model.config.memory
    assert "memory.calibration" not in model.state_dict(), "what was written before has the same names"
    view = model.to_space(embeds).detach()
    model.remember(remembering(12, 8))
    assert model.fingerprint() != before and model.is_confident
    torch.testing.assert_close(model.to_space(embeds).detach(), view, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again.confidence(embeds), model.confidence(embeds), rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint() and again.config.memory["confident"] is True
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.testing.assert_close(half.confidence(embeds), model.confidence(embeds), rtol=0, atol=0.2)
    alone = model.remember(model.memory.without_entries())
    assert alone.confidence(embeds) is None and "confident" not in alone.config.memory


@pytest.mark.parametrize("said", [1, "yes", None])
def test_a_setting_that_is_none_is_refused(said: Any) -> None:
    with pytest.raises(XcompatError, match="memory.confident is .*; set true or false"):
        build_memory({"entries": 2, "sharpness": 3.0, "share": 0.5, "confident": said}, 4, 3)

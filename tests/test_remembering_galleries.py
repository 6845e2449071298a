"""Gallery upgrades that remember: against loops, through files, on a gallery, chosen by what is held out, judged in a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import ranking_per_query
from xcompat.export import to_onnx
from xcompat.export.query_transform import linear_steps
from xcompat.hub.card import model_card
from xcompat.mapping import choose
from xcompat.mapping.candidates import Candidate, CandidateParts
from xcompat.mapping.choice_report import as_json, choice_table, describe_choice
from xcompat.mapping.folds import folds
from xcompat.mapping.paired import PairedEmbeddings, SwappedEmbeddings
from xcompat.methods import METHODS, FctConfig, FctModel
from xcompat.models import CompatModel, describe_old
from xcompat.models.push import model_facts
from xcompat.models.query_memory import QueryMemory
from xcompat.retrieval import Gallery
from xcompat.retrieval.upgrading import plan_upgrade
from xcompat.retrieval.versions import stored_version, takes_old_queries, upgraded_version

NEW, OLD, CLASSES, EACH = 12, 8, 10, 14
OLD_MODEL = Fingerprint.from_string("old")
SIDE = describe_old(Fingerprint.from_string("side"), 3)
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "procrustes": ("procrustes", {"direction": "old_to_new"}),
    "lce": ("lce", {"direction": "old_to_new"}),
    "fct": ("fct", {}),
    "fct with side-information": ("fct", {"side_info": SIDE}),
}


def normalised(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def unit(rows: int, dim: int, seed: int) -> np.ndarray:
    return normalised(np.random.default_rng(seed).standard_normal((rows, dim)))


def pairs(noise: float = 0.4) -> PairedEmbeddings:
    """Two models that see the same classes, the new one more clearly."""
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), EACH)
    meant, shared = draw.standard_normal((CLASSES, NEW))[labels], 0.3 * draw.standard_normal((CLASSES * EACH, NEW))
    new = meant + shared + noise * draw.standard_normal(meant.shape)
    old = (meant + shared)[:, :OLD] + 3 * noise * draw.standard_normal((len(meant), OLD))
    return PairedEmbeddings(normalised(new), normalised(old), labels)


def turned() -> SwappedEmbeddings:
    plain = pairs()
    return SwappedEmbeddings(plain.old_Nd, plain.new_ND, plain.labels_N)


def memory(codec: str | None = None, **settings: Any) -> QueryMemory:
    worn = CandidateParts(turned(), codec=codec).memory(Candidate("rotation", **{"sharpness": 20.0, "share": 0.7, **settings}))
    assert worn is not None
    return worn


def mapping(made: str) -> CompatModel:
    method, options = MADE[made]
    torch.manual_seed(0)
    model = METHODS[method](METHODS[method].config_class(old=describe_old(OLD_MODEL, OLD), embedding_dim=NEW, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs(model: CompatModel, rows: int, seed: int = 1) -> list[torch.Tensor]:
    dims = [OLD, *([3] if getattr(model.config, "side_info", None) else [])]
    return [torch.from_numpy(unit(rows, dim, seed + dim)) for dim in dims]


def test_what_is_mapped_leans_as_a_loop_over_classes_says() -> None:
    given, worn = pairs(), memory()
    assert given.labels_N is not None
    old, own = unit(4, OLD, 1), unit(4, NEW, 2)
    state = {name: tensor.double().numpy() for name, tensor in worn.state_dict().items()}

    def place(row: np.ndarray) -> np.ndarray:
        moved = (row - state["key_metric.mean_d"]) @ state["key_metric.matrix_dd"]
        return moved / np.linalg.norm(moved)

    np.testing.assert_allclose(state["key_metric.mean_d"], given.old_Nd.mean(0), atol=1e-6)
    classes = [given.labels_N == label for label in range(CLASSES)]
    keys = [place(given.old_Nd[rows].astype(np.float64).mean(0)) for rows in classes]
    values = [normalised(given.new_ND[rows].astype(np.float64).mean(0)) for rows in classes]
    for stored, mapped, found in zip(old, own, worn(torch.from_numpy(old), torch.from_numpy(own)), strict=True):
        cosines = np.array([place(stored) @ key for key in keys])
        weights = np.exp(20.0 * cosines)
        gate = 1 / (1 + np.exp(-(state["gate"][0] * cosines.max() + state["gate"][1])))
        recalled = sum(weight * value for weight, value in zip(weights / weights.sum(), values, strict=True))
        np.testing.assert_allclose(found.numpy(), normalised(mapped + 0.7 * gate * recalled), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("codec", [None, "SQ8"])
@pytest.mark.parametrize("made", MADE)
def test_an_upgrade_remembers_and_nothing_else_does(made: str, codec: str | None, tmp_path: Path) -> None:
    model, worn, queries = mapping(made), memory(codec), torch.from_numpy(unit(5, NEW, 3))
    given = inputs(model, 5)
    own, before, stored_as, to = model.upgrade(*given), model.fingerprint(), model.stored_fingerprint(), upgraded_version(model)
    assert model.remember(worn) is model and torch.equal(model.own_upgrade(*given), own)
    leant = model.upgrade(*given)
    torch.testing.assert_close(leant, worn(given[0], own), rtol=0, atol=0)
    assert not torch.allclose(leant, own, atol=1e-2)
    torch.testing.assert_close(leant.norm(dim=1), torch.ones(5))
    assert torch.equal(model.to_gallery_space(queries), queries) and torch.equal(model.self_view(queries), queries)
    assert model.stored_fingerprint() == stored_as == stored_version(model, None).fingerprint
    assert model.fingerprint() != before and upgraded_version(model).digest != to.digest
    assert model.confidence(queries) is None and not model.is_confident
    with pytest.raises(XcompatError, match="maps galleries: upgrade the stored embeddings instead"):
        model.to_space(queries)
    model.save_pretrained(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again.upgrade(*given), leant, rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint() and again.config.memory == worn.settings
    half = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    torch.testing.assert_close(half.upgrade(*(each.bfloat16() for each in given)).float(), leant, rtol=0, atol=0.1)
    assert half.fingerprint() == model.fingerprint()
    assert torch.equal(model.remember(None).upgrade(*given), own) and model.fingerprint() == before


def test_the_card_says_what_is_mapped_remembers() -> None:
    unnamed = model_facts(mapping("fct").remember(memory()))
    assert "to the space of a newer model (name unknown)." in str(model_card("me/map", unnamed, None))
    facts = replace(unnamed, base={"name": "new", "revision": None, "library": "timm"})
    card = str(model_card("me/map", facts, None))
    assert "Training data in this repository: 10 class means by the old model, and as many by the new model" in card
    assert "Queries wear" not in card


def test_no_graph_of_queries_is_made_of_what_maps_galleries(tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="does not map queries into an old space; export the model with space='own'"):
        to_onnx(mapping("procrustes").remember(memory("SQ8")), tmp_path / "out")
    with pytest.raises(XcompatError, match="maps galleries, not queries; upgrade the gallery instead"):
        linear_steps(mapping("procrustes").remember(memory()))


def old_gallery(folder: Path) -> Gallery:
    gallery = Gallery.create(folder, OLD_MODEL, dim=OLD)
    given = pairs()
    gallery.add(given.old_Nd, [f"stored {row}" for row in range(len(given))])
    gallery.commit()
    return gallery


def test_a_gallery_is_upgraded_with_what_is_remembered(tmp_path: Path) -> None:
    gallery, model, given = old_gallery(tmp_path / "g"), mapping("procrustes").remember(memory()), pairs()
    assert not takes_old_queries(model, gallery.manifest.present()[0]), "no query of it leans on anything"
    assert plan_upgrade(gallery, model).items == len(given)
    assert gallery.upgrade(model, batch_size=50) == len(given)
    assert gallery.versions == [model.fingerprint().derive("upgrade")]
    with torch.no_grad():
        expected = model.upgrade(torch.from_numpy(given.old_Nd)).numpy()
    np.testing.assert_allclose(gallery.segments[0].vectors(np.arange(len(given))), expected, atol=1e-6)
    gallery.add(given.new_ND[:3], [f"new {row}" for row in range(3)], version=model)  # as it is, whatever is remembered
    gallery.commit()
    queries = unit(6, NEW, 4)
    both = np.concatenate([expected, given.new_ND[:3]])
    names = [f"stored {row}" for row in range(len(given))] + [f"new {row}" for row in range(3)]
    hits = gallery.search(queries, model, top_k=1, merge="raw")
    assert [found[0].id for found in hits] == [names[row] for row in np.argmax(queries @ both.T, axis=1)]
    assert gallery.search(given.new_ND[:3], model, top_k=1, merge="raw")[0][0].id == "new 0"


def test_upgrades_do_not_gain_a_memory(tmp_path: Path, interrupt_upgrade: Callable[[Gallery, CompatModel, int], None]) -> None:
    gallery, model, given = old_gallery(tmp_path / "g"), mapping("fct"), pairs()
    interrupt_upgrade(gallery, model, 1)
    assert list(gallery.path.glob("upgrade-*.json"))
    again, model = Gallery.open(gallery.path), model.remember(memory())
    again.upgrade(model, batch_size=50)
    with torch.no_grad():
        expected = model.upgrade(torch.from_numpy(given.old_Nd)).numpy()
    stored = np.concatenate([segment.vectors(np.arange(len(segment))) for segment in again.segments])
    np.testing.assert_allclose(stored, expected, atol=1e-6)


def side_map() -> tuple[FctModel, SwappedEmbeddings]:
    config = FctConfig(old=describe_old(OLD_MODEL, OLD), embedding_dim=NEW, side_info=SIDE)
    torch.manual_seed(1)
    given = turned()
    return FctModel(config).eval(), SwappedEmbeddings(given.new_ND, given.old_Nd, given.labels_N, side_NS=unit(len(given), 3, 5))


@torch.no_grad()
@pytest.mark.parametrize("of", ["embeddings", "side-information too"])
def test_gains_are_of_new_queries_on_what_a_candidate_makes_of_the_old_gallery(of: str) -> None:
    given = turned()
    model: CompatModel = mapping("procrustes")
    if of != "embeddings":
        model, given = side_map()
    assert given.labels_N is not None
    choice = choose(given, "open", lines={"map": lambda *_: model}, beside_line=True)
    assert choice.than is choice.trials[0] and choice.than.candidate == Candidate("map")
    assert all(trial.candidate.power is None for trial in choice.trials), "no transform is tried"
    assert {(trial.candidate.sharpness, trial.candidate.share) for trial in choice.trials if trial.candidate.share} == {
        (beta, share) for beta in (20.0, 30.0, 40.0) for share in (0.3, 0.5, 0.8, 1.2)
    }
    trial = choice.trials[-1]
    assert trial.candidate.share
    found, floor = list[float](), list[float]()
    for fold in folds(given.labels_N, "open"):
        rows = fold.queries["half of them new"]
        labels, old, new = given.labels_N[rows], torch.from_numpy(given.new_ND[rows]), given.old_Nd[rows]
        worn = CandidateParts(given.take(fold.fit_F)).memory(trial.candidate)
        assert worn is not None
        side = [torch.from_numpy(given.side_NS[rows])] if given.side_NS is not None else []
        gallery = worn(old, model.own_upgrade(old, *side)).numpy()
        for values, asked, searched in ((found, new, gallery), (floor, old.numpy(), old.numpy())):
            values += ranking_per_query(asked, searched, labels, labels, rows, rows).average_precision_Q.tolist()
    gain = trial.gains["half of them new"]["map"].mean
    assert gain == pytest.approx(np.mean(found) - np.mean(floor), abs=1e-6)
    assert choice.floor["half of them new"]["map"] == pytest.approx(np.mean(floor))
    assert choice.confidence is None and as_json(choice)["confidence"] == {"none": "the gallery has the memory, not the queries"}


def test_the_memory_alone_is_what_needs_no_new_model() -> None:
    choice = choose(turned(), "known")  # Procrustes and ridge from the old space to the new one
    assert choice.of_galleries and choice.chosen.candidate.share and choice.chosen.worst > 0
    alone = choice.without_new_model
    assert alone is not None and alone.candidate.share == choice.chosen.candidate.share and alone.mean < choice.chosen.mean
    assert choice_table(choice).row_count == 2 + len(choice.shown())
    assert "xcompat.slerp" not in " ".join(describe_choice(choice))

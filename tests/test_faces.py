"""Faces and re-identification: cameras, Market-1501's names, IJB-C's templates and pairs, rates in reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import UNTRAINED, refuses
from data_layouts.faces import make_ijbc, make_market1501, make_ms1m
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import LabelledSource, load_labelled
from xcompat.evaluation import EmbeddedImages, EvaluatedModels, EvaluationOptions, bootstrap_interval, cmc, evaluate
from xcompat.evaluation.embedded_templates import EmbeddedTemplates, TemplateProtocol, pooled_templates
from xcompat.evaluation.verification import share_per_query, tar_at_far, tpir_at_far
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.report import load_report
from xcompat.report.comparison.files import comparison_file
from xcompat.training.atlas import to_atlas
from xcompat.training.compare import compare_recipe
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.input_checks import check_paths
from xcompat.training.judged_templates import load_judged_templates
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe
from xcompat.training.sections import JudgedTemplates


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_market1501(tmp_path_factory.mktemp("market"))


def test_names_of_market1501_give_people_and_cameras(market: Path) -> None:
    gallery = load_labelled(LabelledSource(path=str(market / "bounding_box_test"), format="market1501"))
    ids, cameras = gallery.dataset["id"][:], gallery.cameras()
    assert cameras == [name[6] for name in ids] and not any(name.startswith("-1") for name in ids)
    people = gallery.class_names()
    assert people[0] != people[1] and people[:2] == ids[:2] and ids[0].startswith("0000")  # nobody is nobody's positive
    assert people[2:] == [name[:4] for name in ids[2:]]
    trained = load_labelled(LabelledSource(path=str(market / "bounding_box_train"), format="market1501"))
    assert trained.classes == ["0001", "0002", "0003", "0004"] and len(trained) == 16


def test_cameras_come_from_columns_or_are_refused(market: Path, tmp_path: Path) -> None:
    names = sorted(file.name for file in (market / "query").iterdir())
    rows = [{"image": str(market / "query" / name), "label": name[:4], "device": name[5:7]} for name in names]
    pd.DataFrame(rows).to_csv(tmp_path / "labels.csv", index=False)
    pd.DataFrame(rows).to_parquet(tmp_path / "people.parquet")
    for file in ("labels.csv", "people.parquet"):
        found = load_labelled(LabelledSource(path=str(tmp_path / file), camera_column="device"))
        assert found.cameras() == [name[5:7] for name in names]
        assert load_labelled(LabelledSource(path=str(tmp_path / file))).cameras() is None
    folders = [str(market / "query"), str(market / "bounding_box_train")]
    with pytest.raises(XcompatError, match="reads file names, not the column 'c'"):
        load_labelled(LabelledSource(path=folders, format="market1501", camera_column="c"))
    refuses("images in folders have no column 'c'", load_labelled, LabelledSource(path=folders, camera_column="c"))
    person = market / "query" / "0031.jpg"
    person.write_bytes(next((market / "query").iterdir()).read_bytes())
    searched = {"path": str(market / "bounding_box_test"), "format": "market1501"}
    data = {"images": {"path": str(market)}, "queries": searched | {"path": str(market / "query")}, "gallery": searched}
    raw = {"method": "bct", "old": "old", "new": "google/vit", "data": data}
    recipe = parse_recipe(raw | {"old": {"name": "google/vit"}}, "demo", "demo.yaml")
    try:
        refuses("data.queries.path: .*0031.jpg is not named as in Market-1501", check_paths, recipe.stages[0])
    finally:
        person.unlink()
    check_paths(recipe.stages[0])
    data["gallery"] = {"path": str(market / "bounding_box_test")}
    refuses("gallery has no cameras, but the other side has", parse_recipe, raw, "demo", "demo.yaml")


def test_cameras_reach_every_case_and_interval() -> None:
    generator, labels, cameras = np.random.default_rng(0), np.arange(48) % 6, np.arange(48) // 6 % 2
    kinds = {"query_ids": range(48), "gallery_ids": range(48), "query_labels": labels, "gallery_labels": labels}

    def embedded(name: str, **taken_by: Any) -> EmbeddedImages:
        embeds = generator.normal(size=(48, 4)) + np.eye(6)[labels][:, :4]
        return EmbeddedImages(name, Fingerprint.from_string(name), embeds, embeds, **kinds, **taken_by)

    both = {"query_cameras": cameras, "gallery_cameras": cameras}
    old, new = embedded("old", **both), embedded("new", **both)
    options = EvaluationOptions(ks=(1,), n_resamples=100)
    cases = {case.label: case for case in evaluate(EvaluatedModels(old, new), options).cases}
    for label, asking in (("old/old", old), ("new/old", new)):
        problem = (asking.query_embeds_QD, old.gallery_embeds_GD, labels, labels, range(48), range(48))
        expected = cmc(*problem, ks=(1,), **both)[1]
        assert cases[label].metrics["cmc@1"] == expected != cmc(*problem, ks=(1,))[1]
    kept = old.keep((np.arange(48) > 1, np.arange(48) > 2))
    assert list(kept.query_cameras or ()) == cameras[2:].tolist() and list(kept.gallery_cameras or ()) == cameras[3:].tolist()
    refuses("query_cameras differ between new_view and old", evaluate, EvaluatedModels(old, embedded("new")), options)


def random_images(name: str, seed: int, n_queries: int = 60, n_gallery: int = 40) -> EmbeddedImages:
    """Embed eight classes, of which the gallery lacks two."""
    labels = np.arange(n_queries) % 8, np.arange(n_gallery) % 6
    generator = np.random.default_rng(seed)
    queries, gallery = (3 * np.eye(8)[side] + generator.normal(size=(len(side), 8)) for side in labels)
    ids = [f"q{row}" for row in range(n_queries)], [f"g{row}" for row in range(n_gallery)]
    return EmbeddedImages(name, Fingerprint.from_string(name), queries, gallery, *ids, *labels)


def test_rates_of_a_report_are_those_of_the_functions() -> None:
    old, new = random_images("old", 0), random_images("new", 1)
    options = EvaluationOptions(ks=(1,), n_resamples=300, fars=(0.01, 0.1), fpirs=(0.2,))
    found = evaluate(EvaluatedModels(old, new), options)
    for case in found.cases:
        asking = old if case.query == "old" else new
        problem = (asking.query_embeds_QD, old.gallery_embeds_GD, old.query_labels, old.gallery_labels)
        expected = {f"tar@far={name}": tar_at_far(*problem, fars=(far,))[far] for name, far in (("1e-2", 0.01), ("1e-1", 0.1))}
        expected["tpir@fpir=2e-1"] = tpir_at_far(*problem, fars=(0.2,))[0.2]
        assert expected.items() <= case.metrics.items() and case.n_queries == 46
        assert all(low <= expected[name] <= high for name, (low, high) in case.ci95.items() if name in expected)
    assert {each.metric for each in found.criterion.differences} >= {"tar@far=1e-2", "tar@far=1e-1", "tpir@fpir=2e-1"}
    (note,) = found.notes
    assert note.startswith("14 queries have no image of their class in the gallery and are excluded, but serve as impostors")


def test_the_interval_of_a_share_of_pairs_is_that_of_drawing_queries_with_their_pairs() -> None:
    generator = np.random.default_rng(3)
    pairs_Q = generator.integers(0, 9, 400)
    accepted_Q = generator.binomial(pairs_Q, generator.beta(2, 1, 400))
    values_Q, share = share_per_query(accepted_Q, pairs_Q)
    known_Q = pairs_Q > 0
    assert share == accepted_Q.sum() / pairs_Q.sum() == pytest.approx(np.nanmean(values_Q))
    rows = np.flatnonzero(known_Q)
    drawn_RQ = generator.choice(rows, size=(4000, len(rows)))
    naive = np.quantile(accepted_Q[drawn_RQ].sum(axis=1) / pairs_Q[drawn_RQ].sum(axis=1), [0.025, 0.975])
    assert bootstrap_interval(values_Q[known_Q], 4000) == pytest.approx(naive, abs=0.004)


def raw_recipe(folder: Path, data: dict[str, Any], **training: int) -> dict[str, Any]:
    places = {"output_dir": str(folder / "run"), "cache_dir": str(folder / "cache")}
    raw: dict[str, Any] = places | {"old": "stage:old", "data": data}
    return raw | {"new": UNTRAINED, "training": training | {"save_strategy": "no"}}


def test_identification_without_impostor_is_refused_before_training(market: Path, tmp_path: Path) -> None:
    people = {"path": str(market / "query"), "format": "market1501"}
    raw = raw_recipe(tmp_path, {"images": people, "queries": people}, max_steps=1, per_device_train_batch_size=4)
    raw["evaluation"] = {"fpirs": [0.1], "resamples": 100}
    raw["stages"] = [{"name": "old", "method": "independent", "old": None, "evaluation": None}, {"method": "l2"}]
    refuses("l2: evaluation.fpirs: every query's class is in the gallery", run_recipe, parse_recipe(raw, "people", "people.yaml"))
    assert not (tmp_path / "run").exists(), "no stage began"


def test_a_study_of_people_compares_rates(market: Path, tmp_path: Path, undrawn: None) -> None:
    people = {"format": "market1501"}
    parts = {"images": "bounding_box_train", "queries": "query", "gallery": "bounding_box_test"}
    data: dict[str, Any] = {part: people | {"path": str(market / folder)} for part, folder in parts.items()}
    raw = raw_recipe(tmp_path, data | {"samples_per_class": 2}, max_steps=2, per_device_train_batch_size=4)
    raw["options"] = {"triplet_weight": 1.0}
    raw["evaluation"] = {"resamples": 100, "ks": [1], "examples": 1, "tsne_pairs": 0, "fars": [0.1]}
    old = {"name": "old", "method": "independent", "old": None, "options": {"dim": 8, "triplet_weight": 0}}
    compare_recipe(parse_recipe(raw | {"stages": [old, {"method": "mixbct"}]}, "people", "people.yaml"))
    report = load_report(tmp_path / "run" / "seed-0")
    case = next(case for case in report.cases if case.label == "new/old")
    assert case.n_queries == 6 and case.n_gallery == 14 and {"cmc@1", "map", "tar@far=1e-1"} <= case.metrics.keys()
    found = read_json(comparison_file(tmp_path / "run"))["rows"][1]
    assert found["old_gallery"]["image-to-image"]["tar@far=1e-1"]["mean"] == case.metrics["tar@far=1e-1"]
    gain = next(each for each in report.criterion.differences if each.metric == "tar@far=1e-1")
    assert found["gain"]["image-to-image"]["tar@far=1e-1"]["mean"] == pytest.approx(gain.mean, abs=1e-6)
    for file in ("compare.html", "compare.md"):
        assert "TAR@FAR=1e-1" in (tmp_path / "run" / "comparison" / file).read_text()
    page = (tmp_path / "run" / "seed-0" / "report" / "report.html").read_text()
    assert "TAR@FAR=1e-1" in page and "true acceptance rate of verification" in page
    hits = report.examples[0].rows[0].hits
    assert sum(hit.is_hit for hit in hits) <= 2, "two of the four images of the person are by the query's own camera"


def naive_triplets(features: np.ndarray, labels: list[int], margin: float) -> float:
    """Loop over anchors, and over everything for the farthest of the own class and the nearest of another."""
    units = [row / np.linalg.norm(row) for row in features]
    losses = []
    for anchor, own in enumerate(labels):
        away = [float(np.linalg.norm(units[anchor] - other)) for other in units]
        same = [away[row] for row, label in enumerate(labels) if label == own and row != anchor]
        others = [away[row] for row, label in enumerate(labels) if label != own]
        if same and others:
            losses.append(max(0.0, max(same) - min(others) + margin))
    return float(np.mean(losses))


@pytest.mark.parametrize(("method", "margin"), [("independent", None), ("bct", 1.0), ("mixbct", None)])
def test_triplets_are_added_to_classification_losses(method: str, margin: float | None, image_folder_of: dict[str, str]) -> None:
    labels, given = [0, 0, 1, 1, 2], {"triplet_weight": 0.5, "triplet_margin": margin}
    features = torch.from_numpy(np.random.default_rng(5).normal(size=(5, 6)))
    options = {"classes": list("abc"), "old": describe_old(Fingerprint.from_string("old"), 6)}
    options |= {"old": None, "dim": 6} if method == "independent" else {}
    plain, summed = (METHODS[method].from_encoder(image_folder_of["resnet"], **options, **more) for more in ({}, given))
    summed.load_state_dict(plain.state_dict())
    losses = [model.double().classification_loss(features, torch.tensor(labels)).item() for model in (plain, summed)]
    expected = naive_triplets(features.numpy(), labels, 0.3 if margin is None else margin)
    assert losses[1] - losses[0] == pytest.approx(0.5 * expected, rel=1e-9) and expected > 0


def test_triplets_need_balanced_batches_and_something_to_be_added_to(image_folder_of: dict[str, str]) -> None:
    raw = {"method": "independent", "new": "google/vit", "options": {"triplet_weight": 1.0}, "evaluation": None}
    with pytest.raises(XcompatError, match=r"a batch of triplets needs 4 images .* is 6; set it to a multiple of 4"):
        parse_recipe(raw | {"training": {"per_device_train_batch_size": 6}}, "demo", "demo.yaml")
    stage = parse_recipe(raw | {"training": {"per_device_train_batch_size": 8}}, "demo", "demo.yaml").stages[0]
    assert stage.is_balanced and not stage.model_copy(update={"options": {"triplet_weight": 0.0}}).is_balanced
    for options, message in (
        ({"head": "triplet", "triplet_weight": 1.0}, "head: triplet has no classification loss to add triplets to"),
        ({"triplet_margin": 0.3}, "has no effect without triplet_weight"),
        ({"triplet_weight": -1.0}, "set 0 or more"),
        ({"triplet_weight": 1.0, "mixup": 0.2}, "set options.mixup to 0, or no triplets"),
    ):
        refuses(message, METHODS["independent"].from_encoder, image_folder_of["resnet"], classes=["a", "b"], **options)


@pytest.fixture(scope="module")
def ijbc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ijbc(tmp_path_factory.mktemp("ijbc"))


def of_ijbc(folder: Path, **changes: Any) -> dict[str, Any]:
    meta = folder / "meta"
    return {
        "images": {"path": str(folder / "aligned")},
        "members": str(meta / "ijbc_face_tid_mid.txt"),
        "pairs": str(meta / "ijbc_template_pair_label.txt"),
        "gallery": [str(meta / f"ijbc_1N_gallery_{name}.csv") for name in ("G1", "G2")],
        "probes": str(meta / "ijbc_1N_probe_mixed.csv"),
    } | changes


def naive_templates(embeds: np.ndarray, templates: list[int], media: list[int]) -> dict[int, np.ndarray]:
    found = {}
    for template in set(templates):
        rows = [row for row, of in enumerate(templates) if of == template]
        pooled = np.zeros(embeds.shape[1])
        for medium in {media[row] for row in rows}:
            frames = [embeds[row] / np.linalg.norm(embeds[row]) for row in rows if media[row] == medium]
            pooled += sum(frames) / len(frames)
        found[template] = pooled / np.linalg.norm(pooled)
    return found


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=30), st.integers(1, 9))
@settings(max_examples=40)
def test_templates_are_sums_of_media_which_are_means_of_frames(members: list[tuple[int, int]], at_once: int) -> None:
    given_T, media = [template for template, _ in members], [medium for _, medium in members]
    templates = np.unique(given_T, return_inverse=True)[1]
    embeds = np.random.default_rng(len(members)).normal(size=(len(members), 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xcompat.evaluation.embedded_templates._IMAGES", at_once)
        pooled = pooled_templates(embeds, templates, np.array(media))
    expected = naive_templates(embeds, templates.tolist(), media)
    assert np.allclose(pooled, [expected[row] for row in range(len(pooled))])
    assert pooled.tobytes() == pooled_templates(embeds, templates, np.array(media)).tobytes()


def embedded_templates(ijbc: Path, name: str, seed: int, **changes: Any) -> EmbeddedTemplates:
    lists = of_ijbc(ijbc, **changes)
    test = load_judged_templates(JudgedTemplates.model_validate(lists))
    embeds = np.random.default_rng(seed).normal(size=(len(test.names), 6)) + np.eye(6)[np.arange(len(test.names)) // 12]
    return EmbeddedTemplates(name, Fingerprint.from_string(name), embeds, test.names, test.protocol)


def test_pairs_are_verified_and_subjects_identified_as_loops_do(ijbc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = embedded_templates(ijbc, "old", 0), embedded_templates(ijbc, "new", 1)
    options = EvaluationOptions(n_resamples=100, fars=(0.1,), fpirs=(0.2,), ks=(1,))
    found = evaluate(EvaluatedModels(old, new), options)
    cases = {(case.label, case.direction): case for case in found.cases}
    lines = [line.split() for line in Path(of_ijbc(ijbc)["members"]).read_text().splitlines()]
    templates, media = [int(line[1]) for line in lines], [int(line[2]) for line in lines]
    pairs = [tuple(map(int, line.split())) for line in Path(of_ijbc(ijbc)["pairs"]).read_text().splitlines()]
    stored = naive_templates(np.asarray(old.image_embeds_ND), templates, media)
    for label, asking in (("old/old", old), ("new/old", new)):
        asked = naive_templates(np.asarray(asking.image_embeds_ND), templates, media)
        scores = [(float(asked[second] @ stored[first]), same) for first, second, same in pairs]
        negatives = sorted((score for score, same in scores if not same), reverse=True)
        positives = [score for score, same in scores if same]
        bar = negatives[int(0.1 * len(negatives))]
        case = cases[label, "verification"]
        assert case.metrics == {"tar@far=1e-1": np.mean([score > bar for score in positives])}
        assert case.n_queries == len(positives) == 12 and case.n_gallery == len(pairs) == 72
        # every probe's subject is in the two galleries: the threshold is that of all 60 wrong items, for 12 probes
        highest = negatives[int(0.2 * 12)]
        assert cases[label, "identification"].metrics["tpir@far=2e-1"] == np.mean([score > highest for score in positives])
        assert cases[label, "identification"].metrics["cmc@1"] <= 1 and cases[label, "identification"].n_gallery == 6
    assert found.clusters["verification"].tolist() == np.repeat(np.arange(6), 2).tolist()
    assert ("old", "old", "verification") not in found.ranks and ("old", "old", "identification") in found.ranks
    monkeypatch.setattr("xcompat.evaluation.embedded_templates._ROWS", 1)
    assert evaluate(EvaluatedModels(old, new), options).cases == found.cases


def test_one_gallery_alone_is_an_open_set(ijbc: Path) -> None:
    one = {"gallery": of_ijbc(ijbc)["gallery"][:1], "pairs": None}
    old, new = (embedded_templates(ijbc, name, seed, **one) for seed, name in enumerate(("old", "new")))
    case = evaluate(EvaluatedModels(old, new), EvaluationOptions(n_resamples=100, fpirs=(0.4,))).cases[1]
    pooled = [pooled_templates(each.image_embeds_ND, each.protocol.templates_N, each.protocol.media_N) for each in (new, old)]
    probes, gallery = [row for row in range(18) if row % 3], [0, 3, 6]
    subjects = [row // 3 for row in probes], [0, 1, 2]
    assert case.metrics["tpir@fpir=4e-1"] == tpir_at_far(pooled[0][probes], pooled[1][gallery], *subjects, fars=(0.4,))[0.4]
    assert case.n_queries == 6 and case.direction == "identification"


def test_templates_without_readable_images(ijbc: Path) -> None:
    old, new = embedded_templates(ijbc, "old", 0), embedded_templates(ijbc, "new", 1)
    embeds = np.array(new.image_embeds_ND)
    embeds[:5] = np.nan  # all of template 0, which is in the gallery, and one image of template 1
    kept = EvaluatedModels(old, new.with_matrices({"images": embeds})).without_unreadable()
    found = evaluate(kept, EvaluationOptions(n_resamples=100))
    sizes = {case.direction: (case.n_queries, case.n_gallery) for case in found.cases}
    assert sizes == {"verification": (10, 60), "identification": (10, 5)}
    assert "Templates without a readable image, excluded: 1." in found.notes
    assert all("tpir@far=1e-2" in case.metrics for case in found.cases if case.direction == "identification")
    for lists, gone in (
        (_PAIRS | {"same_P": np.array([True, True, False])}, "no pair of two subjects is left"),
        (_PAIRS | {"same_P": np.array([False, False, True])}, "no pair of one subject is left"),
        (_GALLERY | probes([2, 3, 5], [0, 1, 9]), "no probe whose subject is not in the gallery is left"),
        (_GALLERY | probes([2, 5], [8, 0]), "no probe whose subject is in the gallery is left"),
    ):
        embeds, rows = np.random.default_rng(0).normal(size=(6, 4)), np.arange(6)
        whole = TemplateProtocol(rows, rows, **lists, names_T=rows + 100)
        cut = embeds.copy()
        cut[5] = np.nan
        sides = {"old": embeds, "new": cut}.items()
        old, new = (EmbeddedTemplates(name, Fingerprint.from_string(name), each, rows, whole) for name, each in sides)
        evaluate(EvaluatedModels(old, old), EvaluationOptions(n_resamples=2, ks=(1,)))
        with pytest.raises(XcompatError, match=f"the templates 105 have no readable image, and without them {gone}"):
            EvaluatedModels(old, new).without_unreadable()


_PAIRS = {"pairs_P2": np.array([[0, 1], [2, 3], [4, 5]])}
_GALLERY = {"gallery_G": np.array([0, 1]), "gallery_subjects_G": np.array([0, 1])}


def probes(rows: list[int], subjects: list[int]) -> dict[str, np.ndarray]:
    return {"probes_Q": np.array(rows), "probe_subjects_Q": np.array(subjects)}


def test_lists_that_do_not_fit_are_refused_before_training(ijbc: Path, tmp_path: Path) -> None:
    def check(**changes: Any) -> None:
        data = {"images": {"path": str(ijbc)}, "templates": of_ijbc(ijbc, **changes)}
        raw = {"method": "bct", "old": "google/vit", "new": "google/vit", "data": data}
        check_paths(parse_recipe(raw, "demo", "demo.yaml").stages[0])

    def refused(message: str, **changes: Any) -> None:
        refuses(message, check, **changes)

    def written(text: str) -> str:
        (tmp_path / "list.txt").write_text(text)
        return str(tmp_path / "list.txt")

    check()
    refused(r"data.templates: .*list.txt names template 98 and 1 more \(of 3\) without image", pairs=written("0 99 1\n0 98 0\n"))
    refused(r"missing.txt does not exist", pairs=str(tmp_path / "missing.txt"))
    refused(r"invalid id 'one'; ids of templates", pairs=written("0 one 1\n0 1 0\n"))
    refused(r"has 2 columns but needs lines of template, template, 1 or 0", pairs=written("0 1\n0 2\n"))
    refused(r"has only pairs of one subject", pairs=written("0 1 1\n"))
    refused(r"gallery and probes belong together", probes=None)
    names = Path(of_ijbc(ijbc)["members"]).read_text() + "999.jpg 0 0\n"
    refused(r"names image '999.jpg', which .*aligned lacks \(it has 72 images", members=written(names))


def test_a_recipe_is_judged_on_templates(ijbc: Path, tmp_path: Path, undrawn: None) -> None:
    data = {"images": {"path": str(make_ms1m(tmp_path / "ms1m"))}, "templates": of_ijbc(ijbc)}
    raw = raw_recipe(tmp_path, data, max_steps=2, per_device_train_batch_size=8)
    raw["evaluation"] = {"resamples": 100, "tsne_pairs": 0}
    old = {"name": "old", "method": "independent", "old": None, "options": {"dim": 8}}
    recipe = parse_recipe(raw | {"stages": [old, {"method": "mixbct"}]}, "faces", "faces.yaml")
    run_recipe(recipe)
    report = load_report(tmp_path / "run")
    assert report.directions == ["verification", "identification"] and report.is_labelled
    assert {"tar@far=1e-4", "cmc@1", "tpir@far=1e-2"} <= {name for case in report.cases for name in case.metrics}
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "TAR@FAR=1e-4" in page and "TPIR@FAR=1e-2" in page and "over all queries together" in page
    dry_run_recipe(recipe)
    with pytest.raises(XcompatError, match="templates of several images, which cannot be exported"):
        to_atlas(tmp_path / "run", tmp_path / "atlas.parquet", 10, 0, overwrite=False)

"""``fit_map``: embeddings in memory, what it chooses, and queries of the old gallery."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from conftest import store
from test_map import made, write
from transformers import AutoModel

import xcompat
from xcompat import Fingerprint, XcompatError
from xcompat.heads import slerp
from xcompat.mapping import PairedEmbeddings, choose, fit_map
from xcompat.mapping.candidates import CandidateParts, fit
from xcompat.mapping.fitting import FittedMap
from xcompat.mapping.reranking import COUNTS, OLD_WEIGHTS, TOLERATED
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery

TEXTS = [f"{colour} {thing}" for colour in ("red", "green", "blue", "old") for thing in ("shoe", "dog", "tree", "cup", "car")]


@pytest.fixture(scope="module")
def pairs() -> PairedEmbeddings:
    return made()


@pytest.fixture(scope="module")
def labelled(pairs: PairedEmbeddings) -> FittedMap:
    return fit_map(pairs.old_Nd, pairs.new_ND, pairs.labels_N)


@pytest.fixture(scope="module")
def plain(pairs: PairedEmbeddings) -> FittedMap:
    return fit_map(pairs.old_Nd, pairs.new_ND)


def test_it_chooses_what_the_command_chooses(pairs: PairedEmbeddings, labelled: FittedMap, tmp_path: Path) -> None:
    found, choice = labelled, choose(pairs)
    assert found.choice is not None and found.choice.chosen == choice.chosen and found.is_safe == choice.is_safe
    expected = fit(choice.chosen.candidate, CandidateParts(pairs)).to_space(torch.from_numpy(pairs.new_ND[:5]))
    np.testing.assert_allclose(found.to_space(3 * pairs.new_ND[:5]), expected, atol=1e-6)
    assert found.report["verdict"] == found.is_safe and str(choice.chosen.candidate) in repr(found)
    found.save(tmp_path / "model")
    saved = AutoModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(saved.to_space(torch.from_numpy(pairs.new_ND[:5])), expected)


def test_weight_and_number_of_hits_for_re_ranking_are_chosen_and_kept(
    labelled: FittedMap, plain: FittedMap, tmp_path: Path
) -> None:
    choice = labelled.choice
    assert choice is not None and choice.reranked is not None and choice.reranked.old_weight in OLD_WEIGHTS
    reranked = choice.reranked
    assert reranked.trial.mean > choice.chosen.mean, "the new model knows more than its map"
    enough = [k for k in COUNTS if reranked.losses[k].high >= -TOLERATED]
    assert reranked.candidates == enough[0] and max(loss.mean for loss in reranked.losses.values()) == 0
    labelled.save(tmp_path / "model")
    saved = AutoModel.from_pretrained(tmp_path / "model").config
    assert (saved.rerank_old_weight, saved.rerank_candidates) == (reranked.old_weight, reranked.candidates)
    written = labelled.report["reranked"]
    assert (written["old_weight"], written["candidates"]) == (reranked.old_weight, reranked.candidates)
    assert written["losses"].keys() == {str(k) for k in COUNTS}
    assert plain.model.config.rerank_old_weight is None, "without labels nothing says which weight is better"
    assert plain.model.config.rerank_candidates is None


def test_classes_may_be_anything_that_tells_them_apart(pairs: PairedEmbeddings, labelled: FittedMap) -> None:
    assert pairs.labels_N is not None
    labels = [f"class {label:02}" for label in pairs.labels_N]
    assert repr(fit_map(torch.from_numpy(pairs.old_Nd), torch.from_numpy(pairs.new_ND), labels)) == repr(labelled)


def test_rows_without_a_direction_are_left_out(pairs: PairedEmbeddings, plain: FittedMap) -> None:
    new_ND, old_Nd = (np.insert(side, [0, 5], rows, axis=0) for side, rows in ((pairs.new_ND, np.nan), (pairs.old_Nd, 0)))
    assert repr(fit_map(old_Nd, new_ND)) == repr(plain)


def test_an_index_a_gallery_files_and_lists_are_taken(pairs: PairedEmbeddings, plain: FittedMap, tmp_path: Path) -> None:
    expected = plain.to_space(pairs.new_ND[:3])
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(pairs.old_Nd.shape[1]))
    index.add_with_ids(np.asarray(pairs.old_Nd, np.float32), np.arange(len(pairs)) + 7)
    np.save(tmp_path / "old.npy", pairs.old_Nd)
    empty = Gallery.create(tmp_path / "gallery", Fingerprint.from_string("clip"), dim=pairs.dims[1])
    gallery = store(empty, pairs.old_Nd, [str(row) for row in range(len(pairs))])
    whole, folder = pairs.new_ND, str(write(tmp_path / "new", pairs.new_ND))
    for old, new in ((index, folder), (tmp_path / "old.npy", whole.tolist()), (gallery, whole), (str(gallery.path), whole)):
        found = xcompat.fit_map(old=old, new=new)
        np.testing.assert_allclose(found.to_space(pairs.new_ND[:3]), expected, atol=1e-4)
    assert found.model.compatible_with == [Fingerprint.from_string("clip")], "the gallery names its model"
    assert "fit_map" in dir(xcompat)


def test_a_notebook_shows_all_trials(pairs: PairedEmbeddings, labelled: FittedMap) -> None:
    shown = labelled._repr_html_()
    assert labelled.choice is not None
    assert shown.count("<tr>") == shown.count("</tr>") > len(labelled.choice.shown())
    assert f"{labelled.choice.chosen.candidate} (chosen)" in unescape(shown) and unescape(shown).endswith(f"{labelled!r}</p>")
    assert "<table>" not in fit_map(pairs.old_Nd[:30], pairs.new_ND[:30])._repr_html_()


def test_texts_become_queries_of_the_old_gallery(folder_of: dict[str, str], old_folder: str) -> None:
    new, old = load_embedder(folder_of["clip"]), load_embedder(old_folder)
    sides = [model.embed(model.processor.texts(TEXTS * 3)) for model in (old, new)]
    found = fit_map(*sides, old_model=old_folder, new_model=folder_of["clip"])
    share = found.model.config.old_share
    assert share == 0.5, "without labels, and with the old model at hand"
    mapped = torch.from_numpy(found.to_space(sides[1][:2]))
    expected = slerp(mapped, sides[0][:2], share)
    np.testing.assert_allclose(found.encode_query(TEXTS[:2]), expected, atol=1e-5)
    np.testing.assert_allclose(found.encode_query(TEXTS[0]), expected[0], atol=1e-5)


BAD: dict[str, tuple[Any, str]] = {
    "other counts": (lambda pairs: fit_map(pairs.old_Nd[1:], pairs.new_ND), "found 719 old, 720 new"),
    "other labels": (lambda pairs: fit_map(pairs.old_Nd, pairs.new_ND, [1]), "found 720 old, 720 new, 1 labels"),
    "nothing usable": (
        lambda pairs: fit_map(0 * pairs.old_Nd, pairs.new_ND),
        "in every row, the old or the new embedding is zero or not finite",
    ),
    "a path that is not there": (lambda pairs: fit_map("old.npy", pairs.new_ND), "old.npy does not exist"),
    "no new model": (lambda pairs: fit_map(pairs.old_Nd, pairs.new_ND).encode_query("a dog"), "fitted on embeddings only"),
    "an empty index": (lambda pairs: fit_map(faiss.IndexFlatIP(4), pairs.new_ND), "IndexFlatIP holds no vectors"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs_are_one_line(what: str, pairs: PairedEmbeddings) -> None:
    call, said = BAD[what]
    with pytest.raises(XcompatError, match=said):
        call(pairs)


def test_few_items_are_a_guess(pairs: PairedEmbeddings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = pairs.take(np.arange(30))
    found = fit_map(few.old_Nd, few.new_ND)
    assert not found.is_safe and found.report == {} and "a guess" in repr(found)
    found.save(tmp_path / "model")
    assert "the saved map is not surely at or above old queries" in caplog.text

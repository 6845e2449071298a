"""``xcompat map --texts``: an old model that is gone, a new one or a service that embeds, and what held-out texts agree on."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from conftest import invoke, refusing, store, write_embeds
from safetensors.torch import load_file, save_file
from test_index_gallery import write_index
from test_map import normalised
from test_map_vectors import json_lines, made, parquet
from transformers import AutoModel
from typer.testing import CliRunner

from xcompat import XcompatError
from xcompat.cli import app
from xcompat.embeddings.provider import ATTEMPTS, Provider, load_function
from xcompat.evaluation import PairedDifference
from xcompat.heads import slerp
from xcompat.mapping import PairedEmbeddings, agreement, fit_map, request
from xcompat.mapping.agreement import PROTOCOL, HeldOutItems, choose_by_agreement
from xcompat.mapping.candidates import LINES, Candidate, CandidateParts
from xcompat.mapping.choice_report import as_json, describe_choice, describe_missing
from xcompat.mapping.folds import NEIGHBOURS
from xcompat.mapping.from_texts import pairs_of_texts
from xcompat.mapping.request import TextInput
from xcompat.mapping.sentences import Sentences
from xcompat.mapping.sentences import Texts as SentenceTexts
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.stores.places import Reading

THINGS = ("shoe", "dog", "tree", "cup", "car", "hat", "lamp", "bird", "ring", "boat")
COLOURS = ("red", "green", "blue", "old", "new", "tiny")
TEXTS = [f"a {colour} {thing}" for colour in COLOURS for thing in THINGS]
IDS = [f"text {row}" for row in range(len(TEXTS))]


def rotated(embeds: np.ndarray, dim: int = 8) -> np.ndarray:
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((embeds.shape[1], dim)))[0]
    return normalised(embeds @ turn)


def written(folder: Path, texts: list[str] = TEXTS, ids: list[str] = IDS) -> Path:
    file = folder / "passages.jsonl"
    file.write_text("\n".join(json.dumps({"id": name, "text": text}) for name, text in zip(ids, texts, strict=True)))
    return file


def mapped(*arguments: Any) -> dict[str, Any]:
    said = invoke("map", "--allow-worse", *arguments)
    out = Path(arguments[arguments.index("--out") + 1])
    return json.loads((out / "report.json").read_text()) | {"output": " ".join(said.split())}


@pytest.fixture
def clip(folder_of: dict[str, str]) -> str:
    return folder_of["clip"]


@torch.no_grad()
def embedded(name: str, texts: list[str] = TEXTS) -> np.ndarray:
    model = load_embedder(name)
    return model.embed(model.processor.texts(texts)).numpy()


def test_a_lost_old_model_is_known_by_vectors_in_the_order_of_the_texts(clip: str, tmp_path: Path) -> None:
    new = embedded(clip)
    np.save(tmp_path / "old.npy", rotated(new))
    command = ("--old", tmp_path / "old.npy", "--new", clip, "--texts", written(tmp_path), "--out", tmp_path / "map")
    report = mapped(*command)
    assert report["items"] == len(TEXTS) and report["of_agreement"] and report["sentences"] == {}
    assert f"The embeddings stay in {tmp_path / 'map.cache'} for further maps with this --out" in report["output"]
    assert report["old_query_ms"] is None and "to each query" not in report["output"]
    model = AutoModel.from_pretrained(tmp_path / "map" / "model")
    with torch.no_grad():
        own = model.embed_texts(**model.processor.texts(TEXTS[:4]))
    np.testing.assert_allclose(own.numpy(), new[:4], atol=1e-6)
    line = CandidateParts(PairedEmbeddings(new, rotated(new))).line(report["model"]["line"])
    torch.testing.assert_close(model.to_space(own), line.to_space(torch.from_numpy(new[:4])), atol=1e-4, rtol=0)
    shards = {file: file.stat().st_mtime_ns for file in (tmp_path / "map.cache").rglob("*.npy")}
    mapped(*command)
    assert shards == {file: file.stat().st_mtime_ns for file in (tmp_path / "map.cache").rglob("*.npy")}, "embedded once"


def test_a_refused_map_says_which_folder_it_leaves(clip: str, tmp_path: Path) -> None:
    np.save(tmp_path / "old.npy", normalised(np.random.default_rng(1).standard_normal((len(TEXTS), 8))))
    out = tmp_path / "map"
    asked = ("map", "--old", tmp_path / "old.npy", "--new", clip, "--texts", written(tmp_path), "--out", out)
    done = CliRunner().invoke(app, [*map(str, asked)])
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "No map was written: " in said and not out.exists()
    evidence = "classes (--labels), captions of images or questions about texts (docs/embeddings.md)"
    assert f"without {evidence} or --old-model, a map needs strong evidence" in said
    assert (
        f"is too weak. Add {evidence}, or the old model with --old-model" in said
        and "whitened (best)" in said
        and "chosen" not in said
    )
    said = " ".join(CliRunner().invoke(app, [*map(str, asked), "--direction", "old_to_new"]).output.split())
    assert f"without {evidence}, a map needs strong evidence" in said and "--old-model to mix" not in said
    assert said.endswith(f"The embeddings stay in {out}.cache for the next run.") and Path(f"{out}.cache").is_dir()


def test_ids_join_texts_and_vectors(clip: str, tmp_path: Path) -> None:
    new = embedded(clip)
    kept = np.random.default_rng(0).permutation(len(TEXTS))[:50]
    old = parquet(tmp_path / "old.parquet", rotated(new)[kept], [IDS[row] for row in kept])
    report = mapped("--old", old, "--new", clip, "--texts", written(tmp_path), "--out", tmp_path / "map")
    assert report["items"] == 50 and f"50 of 60 texts in {tmp_path}" in report["said"][0]
    gone = json_lines(tmp_path / "gone.jsonl", rotated(new)[:2], ["a", "b"])
    with pytest.raises(XcompatError, match="share no id"):
        mapped("--old", gone, "--new", clip, "--texts", written(tmp_path), "--out", tmp_path / "of_gone")
    np.save(tmp_path / "old.npy", rotated(new)[:9])
    with pytest.raises(XcompatError, match="has 9 rows without ids, but .* has 60 items"):
        mapped("--old", tmp_path / "old.npy", "--new", clip, "--texts", written(tmp_path), "--out", tmp_path / "of_few")


def test_both_sides_may_be_models(folder_of: dict[str, str], tmp_path: Path) -> None:
    old, new = folder_of["siglip"], folder_of["clip"]
    command = ("--old", old, "--new", new, "--texts", written(tmp_path), "--out", tmp_path / "map")
    report = mapped(*command)
    assert f"adds {report['old_query_ms']:.1f} ms to each query here (cpu, one query at a time)" in report["output"]
    model = AutoModel.from_pretrained(tmp_path / "map" / "model")
    assert model.compatible_with == [load_embedder(old).fingerprint] and model.config.old_share == 0.5
    gallery = store(Gallery.create(tmp_path / "gallery", load_embedder(old)), embedded(old), IDS)
    own_1D, old_1d = (torch.from_numpy(embedded(name, TEXTS[:1])) for name in (new, old))
    mixed = slerp(model.to_space(own_1D), torch.nn.functional.normalize(old_1d, dim=-1), 0.5)
    out = invoke("gallery", "search", gallery.path, TEXTS[0], "--model", tmp_path / "map", "--json", "--top-k", 3)
    hits, best = json.loads(out.splitlines()[-1])["hits"], (mixed @ torch.from_numpy(embedded(old)).T)[0].topk(3)
    assert [hit["id"] for hit in hits] == [IDS[row] for row in best.indices.tolist()]
    assert [hit["score"] for hit in hits] == pytest.approx(best.values.tolist(), abs=1e-5)
    for option in ("--old-model", "--new-model"):
        with pytest.raises(XcompatError, match="is already a model; remove --"):
            mapped(*command, "--overwrite", option, new)


def test_a_gallery_names_its_model_for_half_way_queries(folder_of: dict[str, str], tmp_path: Path) -> None:
    old, new, texts = str(tmp_path / "old"), folder_of["clip"], written(tmp_path)
    shutil.copytree(folder_of["siglip"], old)
    gallery = store(Gallery.create(tmp_path / "gallery", load_embedder(old)), embedded(old), IDS).path
    report = mapped("--old", gallery, "--new", new, "--texts", texts, "--out", tmp_path / "map")
    assert f"old model: {old}, as {gallery} records" in report["output"]
    named = mapped("--old", gallery, "--new", new, "--texts", texts, "--out", tmp_path / "named", "--old-model", old)
    assert report["model"]["old_share"] == 0.5 and (report["model"], report["old"]) == (named["model"], named["old"])
    found = fit_map(gallery, embedded(new), new_model=new)
    assert found.model.config.old["fingerprint"] == report["old"]["fingerprint"]
    write_changed_weights(old)
    changed = mapped("--old", gallery, "--new", new, "--texts", texts, "--out", tmp_path / "changed")
    assert f"{old} has changed since it made {gallery}" in changed["output"] and changed["model"]["old_share"] == 0
    shutil.rmtree(old)
    Path(old).mkdir()
    gone = mapped("--old", gallery, "--new", new, "--texts", texts, "--out", tmp_path / "gone")
    assert "old model:" not in gone["output"] and gone["old"]["fingerprint"] == report["old"]["fingerprint"]


def write_changed_weights(folder: str) -> None:
    (file,) = Path(folder).glob("*.safetensors")
    weights = load_file(file)
    save_file({name: tensor + 0.01 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}, file)


def test_texts_are_not_joined_by_an_id_that_several_vectors_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_letters(tmp_path, monkeypatch)
    old = write_embeds(tmp_path / "old", IDS[: len(made())], image=made()[: len(IDS)])
    write_embeds(old, [IDS[0], IDS[0], *IDS[2:]], text=rotated(np.array(Service()(TEXTS)), 4))
    texts = TextInput(written(tmp_path), "letters_service:embed")
    pairs = pairs_of_texts(old, Path("letters"), texts, tmp_path / "cache").pairs
    np.testing.assert_array_equal(pairs.old_Nd, np.load(old / "text_embeds.npy")[2:])
    np.testing.assert_allclose(pairs.new_ND[:], Service()(TEXTS[2:]), atol=1e-3)
    assert pairs.notes[0].startswith("58 of 60 texts")
    assert "Texts not used because several embeddings have their id: 1, e.g. 'text 0'" in pairs.notes[1]
    (old / "text_ids.txt").write_text("\n".join(name for name in IDS[:30] for _ in range(2)))
    with pytest.raises(XcompatError, match="contains the id 'text 0' 2 times; give each text a unique id"):
        pairs_of_texts(old, Path("letters"), texts, tmp_path / "cache")


def test_classes_beside_vectors_of_texts_are_what_a_query_should_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_letters(tmp_path, monkeypatch)
    vectors, labels = rotated(np.array(Service()(TEXTS)), 4), [text.split()[-1] for text in TEXTS]
    old = write_embeds(tmp_path / "old", IDS[::-1], labels[::-1], text=vectors[::-1])
    asked = ("--texts", written(tmp_path), "--embed-with", "letters_service:embed")
    report = mapped("--old", old, "--new", "letters", *asked, "--out", tmp_path / "map")
    assert report["classes"] == len(THINGS) and "cmc@1" in next(iter(report["floor"].values())) and not report["of_agreement"]
    pairs = pairs_of_texts(old, Path("letters"), TextInput(tmp_path / "passages.jsonl", asked[-1]), tmp_path / "cache").pairs
    assert isinstance(pairs, PairedEmbeddings) and pairs.labels_N is not None
    assert pairs.labels_N.tolist() == [sorted(THINGS).index(label) for label in labels]


def test_texts_for_two_sides_of_vectors_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", made())
    with pytest.raises(XcompatError, match="both sides are embeddings"):
        mapped("--old", tmp_path / "a.npy", "--new", tmp_path / "a.npy", "--texts", written(tmp_path), "--out", tmp_path / "map")
    asked = ("--texts", written(tmp_path), "--embed-with", "letters_service:embed")
    with pytest.raises(XcompatError, match=r"--embed-with embeds the texts as --new, but .*a.npy already contains embeddings"):
        mapped("--old", tmp_path / "a.npy", "--new", tmp_path / "a.npy", *asked, "--out", tmp_path / "map")
    with pytest.raises(XcompatError, match="--requests-per-minute is 0"):
        mapped("--old", "a", "--new", "x", *asked[:2], "--requests-per-minute", 0, "--out", tmp_path / "map")


def seen(items: int = 400, noise: float = 0.3) -> PairedEmbeddings:
    draw = np.random.default_rng(0)
    meant = draw.standard_normal((items, 12)) + 1
    new = (meant + noise * draw.standard_normal(meant.shape)) @ np.linalg.qr(draw.standard_normal((16, 16)))[0][:12]
    return PairedEmbeddings(normalised(new), normalised(meant))


def test_agreement_is_that_of_a_double_loop() -> None:
    pairs, trial = seen(), choose_by_agreement(seen()).trials[1]
    order, shared, by_old, changes = np.random.default_rng(0).permutation(len(pairs)), [], [], []
    for number in range(2):
        fold = np.roll(order, -number * 120)
        rows, learned = fold[:120], np.sort(fold[120:])
        known, asked_rows = CandidateParts(pairs.take(learned)), pairs.new_ND[rows]
        asked = known.queries(trial.candidate, lambda own=asked_rows: [own], "rows").numpy()
        for place, query in enumerate(asked):
            others = [other for other in range(120) if other != place]
            near = [
                sorted(others, key=lambda other: float(own @ side[rows[other]]))[-NEIGHBOURS:]
                for own, side in (
                    (pairs.new_ND[rows[place]], pairs.new_ND),
                    (query, pairs.old_Nd),
                    (pairs.old_Nd[rows[place]], pairs.old_Nd),
                )
            ]
            shared.append(len({*near[0]} & {*near[1]}) / NEIGHBOURS)
            by_old.append(len({*near[0]} & {*near[2]}) / NEIGHBOURS)
            ranks = []
            for asking in (query, pairs.old_Nd[rows[place]]):
                scores = {other: float(asking @ pairs.old_Nd[rows[other]]) for other in others}
                ranks.append(sum(score >= scores[near[0][-1]] for score in scores.values()))
            changes.append(1 / ranks[0] - 1 / ranks[1])
    choice = choose_by_agreement(pairs)
    assert choice.floor[PROTOCOL]["neighbours@10"] == pytest.approx(np.mean(by_old))
    assert trial.gains[PROTOCOL]["neighbours@10"].mean == pytest.approx(np.mean(shared) - np.mean(by_old))
    change = HeldOutItems(pairs, LINES, 0).compare_first_neighbours(trial.candidate)
    assert change.mean == pytest.approx(np.mean(changes)) and change.low < change.mean < change.high


def test_the_whitened_line_is_taken_if_it_agrees_more_than_old_queries() -> None:
    clear = seen()
    noisy = normalised(clear.old_Nd + 0.15 * np.random.default_rng(1).standard_normal(clear.old_Nd.shape))
    pairs = PairedEmbeddings(clear.new_ND, noisy)
    choice = choose_by_agreement(pairs)
    assert choice.of_agreement and choice.chosen.candidate == Candidate("whitened") and as_json(choice)["of_agreement"]
    (said,) = describe_choice(choice)
    assert "that the new model finds nearest" in said and "does not show that new queries find as much as old ones" in said
    assert not choice.is_safe and choose_by_agreement(pairs) == choice
    assert choice.pair_counts == (len(pairs), 2 * max(pairs.dims))
    said = describe_missing(replace(choice, of_few_pairs=True, pair_counts=(1000, 1024)))
    assert "or more pairs (1,000 are given, at least 1,024 are needed) and the old model with --old-model" in said
    half_way = choose_by_agreement(pairs, with_old_model=True)
    assert half_way.is_safe and not replace(half_way, is_other_kind=True).is_safe
    assert half_way.first_neighbours == choice.first_neighbours, "of the map alone"
    later = replace(half_way, first_neighbours=PairedDifference(0.01, -0.01, 0.03))
    assert not later.is_safe and "+1.0 (-1.0 to 3.0) points" in describe_choice(later)[0]
    lines = describe_choice(replace(half_way, is_other_kind=True))
    assert lines[0].startswith("! The test set searches images with texts") and "of the measured upgrades" not in lines[1]
    assert not choose_by_agreement(PairedEmbeddings(pairs.new_ND[::-1], pairs.old_Nd), with_old_model=True).is_safe, "other items"
    assert choice.chosen.is_surely_better and not choice.of_few_pairs
    ((protocol, metrics),) = choice.floor.items()
    for floor, is_safe in ((1.99, True), (2.01, False)):  # least and floor together are 1.5 times the floor where it is 2 least
        shifted = replace(choice, floor={protocol: dict.fromkeys(metrics, floor * choice.chosen.least.low)})
        assert shifted.is_safe == is_safe and not replace(shifted, of_few_pairs=True).is_safe
    same = choose_by_agreement(PairedEmbeddings(clear.new_ND, clear.new_ND[:, ::-1].copy()))
    assert same.is_safe and not same.chosen.is_surely_better, "old queries find the new model's neighbours as well"


@torch.no_grad()
def test_sentences_of_texts_choose_the_line(clip: str) -> None:
    """A naive loop over the held-out texts of both folds finds the same reciprocal ranks."""
    texts = [f"{first} near the {second}. {second} is under {first} again." for first in TEXTS for second in THINGS]
    new = load_embedder(clip)
    new_ND = new.embed(new.processor.texts(texts)).numpy()
    pairs = PairedEmbeddings(new_ND, rotated(new_ND))
    choice = choose_by_agreement(pairs, texts=SentenceTexts(texts, new))
    assert choice.chosen.candidate.line == max(choice.sentences, key=choice.sentences.__getitem__)
    held = HeldOutItems(pairs, LINES, 0)
    asking, found = Sentences(held, held.searched_folds(), SentenceTexts(texts, new), pairs), []
    for number, (rows_G, (rows_Q, side)) in enumerate(zip(held.searched_rows, asking.asking, strict=True)):
        queries = held.known[number].queries(Candidate("rotation"), lambda side=side: [side.new_ND], "again").numpy()
        for row, query in zip(rows_Q.tolist(), queries, strict=True):
            scores = {other: float(query @ pairs.old_Nd[other]) for other in rows_G.tolist()}
            found.append(1 / sum(score >= scores[row] - 1e-6 for score in scores.values()))
    np.testing.assert_allclose(asking.reciprocal_ranks(Candidate("rotation")), found, rtol=0.1)
    assert choice.sentences["rotation"] == pytest.approx(np.mean(found), rel=0.02)


def test_a_part_is_learned_from_and_chance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LEARNED", 200)
    assert choose_by_agreement(seen()).learned_at_most == 200
    pairs = seen()
    shuffled = PairedEmbeddings(pairs.new_ND[np.random.default_rng(1).permutation(len(pairs))], pairs.old_Nd)
    choice = choose_by_agreement(shuffled)
    chance, part, _ = describe_choice(choice)
    assert as_json(choice)["by_chance"] and not choose_by_agreement(pairs).by_chance
    assert "classes" not in chance and chance.startswith("! No better than chance")
    assert part.startswith("Candidates learned from at most 200 items")
    with pytest.raises(XcompatError, match="at least 40 are needed, found 39"):
        choose_by_agreement(seen(39))


class Service:
    """A service that embeds texts by their letters, notes each call, and fails where it is told to."""

    def __init__(self, dim: int = 6, seed: int = 0) -> None:
        self.calls: list[list[str]] = []
        self.fails: Callable[[int], bool] = lambda call: False
        self.turn = np.random.default_rng(seed).standard_normal((256, dim))

    def __call__(self, texts: list[str]) -> list[list[float]]:
        self.calls.append(texts)
        if self.fails(len(self.calls)):
            raise ConnectionError("no answer")
        counts = np.array([np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256) for text in texts])
        return normalised(np.log1p(counts) @ self.turn).tolist()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def test_what_was_answered_is_never_asked_again(slept: list[float], tmp_path: Path) -> None:
    service = Service()
    provider = Provider(service, "letters-3", batch=8)
    service.fails = lambda call: call > 3
    with pytest.raises(XcompatError, match=rf"letters-3 failed {ATTEMPTS} times .* no answer.; its answers are saved"):
        provider.embed_texts(TEXTS, tmp_path / "cache", "texts")
    assert len(service.calls) == 3 + ATTEMPTS and len(slept) >= ATTEMPTS - 1, "it waits between attempts"
    service.fails = lambda call: False
    service.calls.clear()
    cache = provider.embed_texts(TEXTS, tmp_path / "cache", "texts")
    assert [text for call in service.calls for text in call] == TEXTS[24:]
    np.testing.assert_allclose(cache[:], Service()(TEXTS), atol=1e-3)
    service.calls.clear()
    provider.embed_texts(TEXTS, tmp_path / "cache", "texts")
    assert not service.calls


def test_calls_keep_to_their_rate(slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    Provider(Service(), "letters", requests_per_minute=30, batch=20).embed_texts(TEXTS, tmp_path / "cache", "texts")
    assert [wait for wait in slept if wait] == [2.0, 2.0]


def test_answers_that_are_no_embeddings_are_one_line(tmp_path: Path) -> None:
    answers: list[tuple[Any, str]] = [
        ([[1.0, 0.0]], r"returned shape \(1, 2\) for 2 texts"),
        ([[1.0, 0.0], [1.0]], "returned no matrix .ValueError: "),
        (None, "returned"),
        ([[1.0, 0.0], [np.nan, 1.0]], r"the embedding of text 1 \('b'\) by letters holds values that are not finite"),
        ([[1.0, 0.0], [2.0, 0.0]], r"the embedding of text 1 \('b'\) by letters is of length 2, not 1"),
        (torch.ones(2, 1, requires_grad=True), "returned no matrix .RuntimeError: .*detach"),
        ([[1.0], [1.0]], "returned 1 dimensions, and 2 before"),
    ]
    for answer, said in answers:
        with refusing(said):
            Provider(lambda texts, answer=answer: answer, "letters").ask(["a", "b"], 2)

    def embed(texts: list[str]) -> list[list[float]]:
        return [[0.0, 0.0] if text == TEXTS[50] else [1.0, 0.0] for text in texts]

    with pytest.raises(XcompatError, match=f"the embedding of text 50 \\('{TEXTS[50]}'\\) by zeros holds only zeros"):
        Provider(embed, "zeros", batch=8).embed_texts(TEXTS, tmp_path / "cache", "texts")


ONE_OF_MANY = """
import json, sys
import numpy as np
from xcompat.core.distributed import end_processes, rank
from xcompat.embeddings.provider import Provider

asked = []
def embed(texts):
    asked.extend(texts)
    return np.eye(30)[[int(text) for text in texts]]

cache = Provider(embed, "numbers", batch=8).embed_texts([str(row) for row in range(30)], sys.argv[1], "texts")
assert cache[:].argmax(1).tolist() == list(range(30)), cache[:].argmax(1)
open(f"{sys.argv[1]}-{rank()}.json", "w").write(json.dumps(asked))
end_processes()
"""


def test_processes_ask_for_the_first_texts_once(tmp_path: Path) -> None:
    for lost in (None, "plan.json"):
        if lost:  # only cache.json says what was begun, and a shard that is not the first is missing
            for name in (lost, "shard-00001.npy"):
                (tmp_path / "cache" / name).unlink()
        done = warm.run("-c", ONE_OF_MANY, tmp_path / "cache", folder=tmp_path, ranks=2)
        assert done.returncode == 0, done.stderr
        asked = [json.loads((tmp_path / f"cache-{rank}.json").read_text()) for rank in range(2)]
        assert sorted(int(text) for each in asked for text in each) == list(range(8, 16) if lost else range(30))


def test_functions_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_service_of_mine.py").write_text("def embed(texts): return [[1.0] for _ in texts]\n")
    (tmp_path / "a_broken_service.py").write_text("1 / 0\n")
    assert load_function("a_service_of_mine:embed")(["a"]) == [[1.0]]
    for name, said in {
        "embed": "write module:function",
        "a_service_of_mine:embd": "did you mean 'embed'",
        "a_broken_service:embed": "cannot import a_broken_service .*ZeroDivisionError",
        "no_service_at_all:embed": "cannot import no_service_at_all .*ModuleNotFoundError",
    }.items():
        with pytest.raises(XcompatError, match=said):
            load_function(name)


def serve_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int = 6) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "letters_service", raising=False)  # of another test, with other dimensions
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    (tmp_path / "letters_service.py").write_text(f"{here}\nfrom test_map_texts import Service\nembed = Service({dim})\n")


def test_a_service_is_the_new_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_letters(tmp_path, monkeypatch)
    old = parquet(tmp_path / "old.parquet", rotated(np.array(Service()(TEXTS)), 4), IDS)
    report = mapped(
        *("--old", old, "--new", "letters-3-large", "--texts", written(tmp_path), "--out", tmp_path / "map"),
        *("--embed-with", "letters_service:embed", "--price-per-million-tokens", 0.13),
    )
    counted = f"letters-3-large embeds 60 texts of {sum(map(len, TEXTS))} characters: about"
    assert counted in report["output"] and "at 0.13 per million" in report["output"]
    assert report["new"] == {"name": "letters-3-large", "service": "letters_service:embed"}
    model = AutoModel.from_pretrained(tmp_path / "map" / "model")
    assert model.config.encoder is None and model.to_space(torch.tensor(Service()(["a red fox"]))).shape == (1, 4)
    with pytest.raises(XcompatError, match="use embeddings as queries"):
        model.embed_texts(torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64))


def test_a_random_sample_of_an_index_is_embedded(clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, file = rotated(embedded(clip)), written(tmp_path)
    write_index(tmp_path / "old.faiss", old)
    (tmp_path / "ids.txt").write_text("".join(f"{name}\n" for name in IDS))
    reading = Reading(tmp_path / "ids.txt")
    given = (tmp_path / "old.faiss", Path(clip), TextInput(file), tmp_path / "cache", 0.1, reading, "new_to_old", 45)
    sampled = [pairs_of_texts(*given, seed) for seed in (0, 0, 1)]
    first, again, other = (found.pairs for found in sampled)
    assert len(first) == 45 and first.n_stored == len(TEXTS) and first.coverage == 0.75
    np.testing.assert_array_equal(first.old_Nd, again.old_Nd)
    assert not np.array_equal(first.old_Nd, other.old_Nd), "the seed draws the sample"
    rows = [TEXTS.index(text) for text in sampled[0].texts]
    np.testing.assert_allclose(first.old_Nd, old[rows], atol=1e-6)
    monkeypatch.setattr(request, "ENOUGH", 45)
    command = ("--old", tmp_path / "old.faiss", "--ids", tmp_path / "ids.txt", "--new", clip, "--texts", file)
    for items, *more in ((45,), (60, "--sample", 0), (50, "--sample", 50), (60, "--remember-items")):
        report = mapped(*command, *more, "--out", tmp_path / "-".join(["map", *map(str, more)]))
        assert report["items"] == items, more
    for typo in (("--old", "old.fais"), ("--texts", "passages.json")):  # before the Hub is asked
        with pytest.raises(XcompatError, match=f"{typo[1]} does not exist"):
            mapped(*command, *typo, "--out", tmp_path / "map")
    with pytest.raises(XcompatError, match="--remember-items needs all items; remove --sample"):
        mapped(*command, "--sample", 50, "--remember-items", "--out", tmp_path / "map")
    with pytest.raises(XcompatError, match="--sample draws items to embed; add --texts or --images"):
        mapped(*command[:-2], "--sample", 50, "--out", tmp_path / "map")

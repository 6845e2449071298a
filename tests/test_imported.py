"""``xcompat map --start-from``: maps of others and adapters of other tools, judged beside what is solved here."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import invoke, refuses
from hub_server import Hub
from safetensors.torch import save_file
from scipy.special import erf
from test_map import EACH, NEW, OLD, made, normalised, write
from test_models import build
from torch import nn
from transformers import AutoModel

from xcompat import Fingerprint, ProcrustesConfig, ProcrustesModel, XcompatError
from xcompat.export.query_transform import linear_steps
from xcompat.heads import Projection
from xcompat.mapping import Candidate, PairedEmbeddings, choose, fit, load_paired
from xcompat.mapping.adapter_files import read_adapters
from xcompat.mapping.candidates import LINES, CandidateParts
from xcompat.mapping.imported_maps import IMPORTED, read_imported
from xcompat.mapping.request import InitialMap
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.training.push import push

GALLERY = describe_old(Fingerprint.from_string("old"), OLD)
Sides = tuple[Path, Path]


def mapped(sides: Sides, out: Path, *more: str) -> tuple[str, dict[str, Any]]:
    """Run the command; return what it says in one line, and its report."""
    said = invoke("map", "--old", sides[0], "--new", sides[1], "--out", out, "--allow-worse", *more)
    return " ".join(said.split()), json.loads((out / "report.json").read_text())


def sample(folder: Path, each: int = EACH, labelled: bool = True) -> Sides:
    pairs = made()
    assert pairs.labels_N is not None
    rows = [row for row in range(len(pairs)) if row % EACH < each]
    labels = [str(label) for label in pairs.labels_N[rows]] if labelled else None
    return write(folder / "old", pairs.old_Nd[rows], labels=labels), write(folder / "new", pairs.new_ND[rows])


def solved(old: dict[str, Any] = GALLERY, pairs: PairedEmbeddings | None = None) -> CompatModel:
    return LINES["ridge"](pairs or made(), old)


@torch.no_grad()
def test_a_map_of_many_items_is_taken_where_few_are_at_hand(hub: Hub, tmp_path: Path) -> None:
    theirs = fit(choose(made(), "known").chosen.candidate, CandidateParts(made(), GALLERY))
    assert theirs.memory is not None
    theirs.push_to_hub("me/map")
    commit = hub.repos["me/map"].branches["main"]
    out = tmp_path / "out"
    said, report = mapped(sample(tmp_path, 4), out, "--start-from", "me/map", "--old-model", "old", "--searched-classes", "known")
    assert f"The imported map me/map at {commit[:12]} is chosen." in said
    source = {"name": "me/map", "revision": commit, "fingerprint": theirs.fingerprint().digest}
    assert report["start_from"] == source | {"taken": True} and report["model"]["name"] == IMPORTED
    model, new = AutoModel.from_pretrained(out / "model"), torch.from_numpy(made().new_ND)
    torch.testing.assert_close(model.to_space(new), theirs.to_space(new))
    assert model.config.started_from["revision"] == commit and model.compatible_with == theirs.compatible_with
    push(out, "me/mine")
    assert f"Initial weights: `me/map` at `{commit}`" in hub.files("me/mine")["README.md"].decode()
    assert AutoModel.from_pretrained("me/mine").fingerprint() == model.fingerprint()


def test_a_map_is_judged_with_the_memory_that_it_has() -> None:
    pairs = made()
    theirs = fit(Candidate("rotation", 0.25, share=0.5), CandidateParts(pairs))
    known = CandidateParts(pairs, lines=LINES | {IMPORTED: lambda *_: theirs})
    with torch.no_grad():
        expected = theirs.to_space(torch.from_numpy(pairs.new_ND))
        bare = theirs.to_space_without_memory(torch.from_numpy(pairs.new_ND))
    torch.testing.assert_close(known.queries(Candidate(IMPORTED), lambda: [pairs.new_ND], "all"), expected)
    memory = known.memory(Candidate(IMPORTED, 0.25))
    assert memory is not None
    found = known.queries(Candidate(IMPORTED, 0.25), lambda: [pairs.new_ND], "all")
    torch.testing.assert_close(found, nn.functional.normalize(memory.metric(bare), dim=1))
    assert fit(Candidate(IMPORTED), known).memory is theirs.memory is not None
    choice = choose(pairs, "known", lines={IMPORTED: known.lines[IMPORTED]})
    assert choice.chosen.candidate == Candidate(IMPORTED) and "came with the map" in choice.no_confidence


def test_fitting_score_scales_leaves_a_map_its_memory() -> None:
    """Scales of few pairs are fitted on parts, each with a memory of its own; there is one imported map for all."""
    draw, labels = np.random.default_rng(0), np.repeat(np.arange(25), 6)
    new_ND, old_Nd = (normalised(draw.standard_normal((len(labels), dim))) for dim in (40, OLD))
    few = PairedEmbeddings(new_ND, old_Nd, labels)
    theirs = LINES["ridge"](few, GALLERY)
    candidate, known = Candidate(IMPORTED, share=0.5), CandidateParts(few, lines={IMPORTED: lambda *_: theirs})
    fitted = fit(candidate, known)
    expected = CandidateParts(few, lines=known.lines).memory(candidate)
    assert expected is not None and fitted.memory is not None and fitted.score_scales is not None
    assert all(map(torch.equal, fitted.memory.buffers(), expected.buffers()))


@pytest.mark.parametrize("good", [True, False])
def test_without_classes_it_is_compared_by_what_the_new_model_finds(good: bool, tmp_path: Path) -> None:
    pairs = made()
    others = PairedEmbeddings(pairs.new_ND[::-1], pairs.old_Nd, pairs.labels_N)
    LINES["whitened"](pairs if good else others, GALLERY).export(tmp_path / "theirs")
    said, report = mapped(sample(tmp_path, 4, labelled=False), tmp_path / "out", "--start-from", str(tmp_path / "theirs"))
    assert report["start_from"]["taken"] is good and (report["model"]["line"] == IMPORTED) is good
    assert ("is chosen" if good else "is not chosen") in said
    assert {trial["name"] for trial in report["trials"]} == {*LINES, IMPORTED}
    assert (AutoModel.from_pretrained(tmp_path / "out" / "model").config.started_from is not None) is good


def unsolved(dim: int = OLD, **options: Any) -> CompatModel:
    old = describe_old(Fingerprint.from_string("old"), dim)
    return ProcrustesModel(ProcrustesConfig(old=old, embedding_dim=NEW, **options))


def test_maps_that_do_not_fit_are_refused_or_said(folder_of: dict[str, str], tmp_path: Path, old_folder: str) -> None:
    of_features = METHODS["query_map"].from_encoder(folder_of["clip"], old=GALLERY, input="penultimate")
    given: list[tuple[CompatModel, str]] = [
        (unsolved(OLD + 1), f"maps {NEW} to {OLD + 1} dimensions, but the given embeddings have {NEW} and"),
        (unsolved(direction="old_to_new"), "maps galleries, not queries"),
        (build("xbt", folder_of), "embeds images or texts and is not a map"),
        (of_features, "maps penultimate features, not embeddings"),
    ]
    for number, (model, said) in enumerate(given):
        model.export(tmp_path / str(number))
        refuses(said, mapped, sample(tmp_path), tmp_path / "out", "--start-from", str(tmp_path / str(number)))
    assert not (tmp_path / "out").exists()
    theirs = build("ridge", folder_of)
    theirs.export(tmp_path / "theirs")
    draw = np.random.default_rng(0)
    sides = tuple(write(tmp_path / name, normalised(draw.standard_normal((40, dim)))) for name, dim in (("few", 8), ("more", 16)))
    start = ("--start-from", str(tmp_path / "theirs"))
    with pytest.raises(XcompatError, match="searches galleries of old@.*, older@.*, not of .*; start from another map"):
        mapped(sides, tmp_path / "out", *start, "--old-model", old_folder)
    with pytest.raises(XcompatError, match="maps embeddings of .*clip@.*, not of .*siglip@"):
        mapped(sides, tmp_path / "out", *start, "--new-model", folder_of["siglip"])
    said, _ = mapped(sides, tmp_path / "out", *start, "--old-model", "photos", "--new-model", folder_of["clip"])
    assert "the old model is known only by the name 'photos'" in said and "show whether it fits" not in said
    said, _ = mapped(sides, tmp_path / "others", *start, "--old-model", "older")
    assert "known only by the name" not in said and "and --new-model is not set" in said


def test_what_is_no_map_is_one_line(tmp_path: Path) -> None:
    sides = sample(tmp_path)
    (tmp_path / "notes.txt").write_text("W = 1")
    for name, said in (("nowhere", "does not exist"), ("notes.txt", "is not a .npz or .safetensors file")):
        refuses(said, mapped, sides, tmp_path / "out", "--start-from", str(tmp_path / name))
    solved().export(tmp_path / "theirs" / "model")
    with pytest.raises(XcompatError, match="remove --activation"):
        mapped(sides, tmp_path / "out", "--start-from", str(tmp_path / "theirs"), "--activation", "relu")
    with pytest.raises(XcompatError, match="is an input of .*; write to another place"):
        mapped(sides, tmp_path / "theirs", "--start-from", str(tmp_path / "theirs" / "model"), "--overwrite")


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


W, BIAS, SCALE = numbers(NEW, OLD), numbers(OLD), np.abs(numbers(OLD)) + 0.5
U, V = numbers(NEW, 5), numbers(OLD, 5)
FIRST, LAST = numbers(9, NEW), numbers(OLD, 9)
LINEAR: dict[str, tuple[dict[str, np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "W": ({"W": W}, lambda x: x @ W),
    "W, b": ({"W": W, "b": BIAS}, lambda x: x @ W + BIAS),
    "of nn.Linear": ({"linear.weight": W.T, "linear.bias": BIAS}, lambda x: x @ W + BIAS),
    "of nn.Sequential": ({"0.weight": W.T, "0.bias": BIAS}, lambda x: x @ W + BIAS),
    "scale": ({"W": W, "scale": SCALE, "bias": BIAS[None]}, lambda x: x @ W * SCALE + BIAS),
    "one factor": ({"W": W, "scaling": np.float32(3.0), "bias": BIAS}, lambda x: 3 * (x @ W) + BIAS),
    "low rank": ({"U": U, "V": V, "b": BIAS}, lambda x: x @ U @ V.T + BIAS),
    "low rank, turned": ({"U": V.T, "V": U.T}, lambda x: x @ U @ V.T),
    "float16": ({"W": W.astype(np.float16)}, lambda x: x @ W.astype(np.float16).astype(np.float32)),
}


def saved(path: Path, arrays: dict[str, np.ndarray], **metadata: str) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays, **metadata)
    else:
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        save_file(tensors, path, metadata or None)
    return path


@torch.no_grad()
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("what", LINEAR)
def test_a_linear_adapter_maps_as_it_did(what: str, suffix: str, tmp_path: Path) -> None:
    arrays, reference = LINEAR[what]
    (read,) = read_adapters(saved(tmp_path / f"adapter{suffix}", arrays), GALLERY, NEW, None)
    new = made().new_ND
    np.testing.assert_allclose(read.model.to_space(torch.from_numpy(new)).numpy(), normalised(reference(new)), atol=1e-5)
    assert linear_steps(read.model), "faiss takes it"


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


@torch.no_grad()
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("activation", "function"), [("relu", lambda x: np.maximum(x, 0)), ("gelu", gelu)])
def test_a_network_maps_as_it_did(activation: Any, function: Any, turned: bool, suffix: str, tmp_path: Path) -> None:
    hidden = numbers(9)
    layers = [FIRST.T, LAST.T] if turned else [FIRST, LAST]
    arrays = {"net.0.weight": layers[0], "net.0.bias": hidden, "net.3.weight": layers[1]}  # a dropout was between
    path = saved(tmp_path / f"adapter{suffix}", arrays, activation=activation.upper())
    (read,) = read_adapters(path, GALLERY, NEW, None)
    new = made().new_ND
    expected = normalised(function(new @ FIRST.T + hidden) @ LAST.T)
    found = read.model.to_space(torch.from_numpy(new)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert (found * expected).sum(1).min() > 1 - 1e-6
    read.model.export(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again.to_space(torch.from_numpy(new)), torch.from_numpy(found))


@torch.no_grad()
def test_projections_and_square_matrices_know_their_sides(tmp_path: Path) -> None:
    phi = Projection(NEW, OLD).eval()
    save_file(phi.state_dict(), tmp_path / "phi.safetensors")
    (read,) = read_adapters(tmp_path / "phi.safetensors", GALLERY, NEW, None)
    new = torch.from_numpy(made().new_ND)
    torch.testing.assert_close(read.model.to_space(new), phi(new))
    turn = np.linalg.qr(numbers(OLD, OLD))[0]
    new = normalised(numbers(50, OLD))
    pairs = PairedEmbeddings(new, normalised(new @ turn))
    for weight, how in ((turn, "x·W"), (turn.T, "W·x")):
        path = saved(tmp_path / "square.npz", {"W": weight})
        read = read_imported(InitialMap(str(path)), pairs, GALLERY, None)
        assert f"square.npz is read as {how}, which fits the sample best (mean cosines" in read.notes[0]
        np.testing.assert_allclose(read.model.to_space(torch.from_numpy(new)).numpy(), pairs.old_Nd, atol=1e-5)
    layers = {"0.weight": turn, "0.bias": 0 * turn[0], "2.weight": turn, "2.bias": 0 * turn[0]}
    path = saved(tmp_path / "network.npz", layers)
    assert "two layers" in read_imported(InitialMap(str(path), "gelu"), pairs, GALLERY, None).notes[0]


def test_an_adapter_is_judged_written_and_said(tmp_path: Path, hub: Hub) -> None:
    theirs = solved()
    arrays = {"W": theirs.weight.numpy(), "b": theirs.bias.numpy()}
    path, out = saved(tmp_path / "adapter.npz", arrays), tmp_path / "out"
    sides = sample(tmp_path, 4)
    said, report = mapped(sides, out, "--start-from", str(path), "--searched-classes", "known")
    assert "adapter.npz is read as x·W, by its array shapes." in said
    trial = next(trial for trial in report["trials"] if trial["name"] == IMPORTED)
    direct = choose(load_paired(*sides), "known", lines=LINES | {IMPORTED: lambda *_: theirs})
    expected = next(each for each in direct.trials if each.candidate == Candidate(IMPORTED))
    assert trial["worst"] == pytest.approx(expected.worst, abs=1e-6)
    assert AutoModel.from_pretrained(out / "model").config.started_from["name"] == str(path) and report["start_from"]["taken"]
    push(out, "me/map")
    assert "Initial weights: `adapter.npz`" in hub.files("me/map")["README.md"].decode()
    assert not [name for name, content in hub.files("me/map").items() if str(tmp_path).encode() in content]


def _bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("W.npy", "w", force_zip64=True) as entry:
        for _ in range(33):
            entry.write(bytes(2**16))


MLP = {"0.weight": FIRST, "0.bias": numbers(9), "2.weight": LAST, "2.bias": BIAS}
BAD: dict[str, tuple[Any, str]] = {
    "no archive": (lambda path: path.write_bytes(b"not a zip"), "cannot read arrays of numbers from"),
    "no safetensors": (lambda path: path.write_bytes(b"\xff" * 64), "is not a safetensors file"),
    "objects": (lambda path: np.savez(path, W=np.array([{"a": 1}], dtype=object)), "cannot read arrays .*allow_pickle"),
    "a bomb": (_bomb, "contains more than 0 GiB"),
    "NaN": ({"W": W * np.nan}, "W in .* contains NaN or infinite values"),
    "integers": ({"W": W.astype(np.int64)}, "W in .* is int64; weights must be floats"),
    "nothing": ({}, "contains no array; an adapter has W"),
    "another name": ({"W": W, "offset": BIAS}, "contains the unknown array 'offset'"),
    "one factor": ({"U": U}, "contains U; an adapter has"),
    "dimensions": ({"W": W[1:]}, rf"contains W of \(23, 16\), which cannot map {NEW} to {OLD} dimensions"),
    "factors": ({"U": U[1:], "V": V}, r"contains U of \(23, 5\) and V of \(16, 5\), which cannot map"),
    "bias": ({"W": W, "b": BIAS[1:]}, r"b in .* has the shape \(15,\); it needs 16 numbers"),
    "no activation": (MLP, "does not record its activation; set --activation relu or gelu"),
    "tanh": (MLP | {"activation": np.array("tanh")}, "has the unsupported activation 'tanh'; only relu and gelu"),
    "another activation": (MLP | {"activation": np.array("gelu")}, "records the activation 'gelu', but --activation is 'relu'"),
    "of a line": ({"W": W, "activation": np.array("relu")}, "linear map, which has no activation; remove --activation"),
    "a norm": (MLP | {"1.weight": numbers(9), "1.bias": numbers(9)}, "layer 1 in .* is not a linear layer"),
    "three layers": (MLP | {"4.weight": numbers(OLD, OLD)}, "contains the layers 0, 2, 4; supported networks have"),
    "nothing between": ({"0.weight": FIRST, "1.weight": LAST}, "contains the layers 0, 1; supported networks have"),
    "layers beside": (MLP | {"W": W}, "contains 'W' beside layers of nn.Sequential"),
    "a bias of columns": (MLP | {"0.bias": numbers(9, 1)}, r"0.bias in .* has the shape \(9, 1\); a bias is a row of numbers"),
    "layers that do not fit": (MLP | {"2.weight": LAST[1:]}, r"contains layers of \(9, 24\) and \(15, 9\), which cannot map"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_adapters_are_one_line(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, said = BAD[what]
    path = tmp_path / ("adapter.safetensors" if what == "no safetensors" else "adapter.npz")
    if what == "a bomb":
        monkeypatch.setattr("xcompat.mapping.adapter_files.LARGEST", 2**20)
    arrays(path) if callable(arrays) else saved(path, arrays)
    given = "relu" if what in ("another activation", "a norm", "layers that do not fit", "a bias of columns") else None
    refuses(said, read_adapters, path, GALLERY, NEW, given)

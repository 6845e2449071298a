"""The Hub and strangers: maps found by their models, cards that are theirs, a push stopped anywhere, a token that is nowhere."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import invoke, refuses, store
from hub_server import Hub, Repository
from huggingface_hub import HfApi
from huggingface_hub.repocard_data import eval_results_to_model_index
from test_map import made, normalised, write
from test_models import OLD, OLDER, build, shake
from transformers import AutoModel
from typer.testing import CliRunner

from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.core.files import atomic_path
from xcompat.embeddings.embed import embed_texts
from xcompat.hub.lineage import trace_lineage
from xcompat.hub.metadata import EMBEDS, SEARCHES, Gain, results_of, tag
from xcompat.hub.search import HubCheckpoint, search
from xcompat.mapping.map_search import find_maps
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.training.push import push

GAINS = [
    Gain("known classes", "cmc@1", 0.5, 0.6, 0.1, (0.05, 0.15)),
    Gain("new classes", "map", 0.4, 0.37, -0.03, (-0.05, -0.01)),
]


def found(*command: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["find", *command])
    if isinstance(done.exception, XcompatError):
        raise done.exception
    return done.exit_code, done.output


def card(hub: Hub, repo: str, **data: Any) -> None:
    """Put a repository with nothing but a card there."""
    hub.repos.setdefault(repo, Repository()).commit({"README.md": f"---\n{yaml.safe_dump(data)}---\n# {repo}\n".encode()})


def stated(**more: Any) -> dict[str, Any]:
    """Return a card's metadata as push writes it for a map from `new` to `old`."""
    new, old = Fingerprint.from_string("new"), Fingerprint.from_string("old")
    tags = ["xcompat", "ridge", tag(SEARCHES, old.digest), tag(EMBEDS, new.digest)]
    versions = [{"name": "old", "fingerprint": old.digest, "dim": 8}]
    return {"tags": tags, "method": "ridge", "embeds": [new.digest], "compatible_with": versions} | more


def index(*gains: Gain) -> list[dict[str, Any]]:
    return eval_results_to_model_index("me/map", results_of(gains, "feature-extraction", "unknown", "photos"))


def push_map(folder: Path, repo: str, old: Path, new: Path, *options: str) -> None:
    invoke("map", "--old", old, "--new", new, "--out", folder / "out", "--old-model", "clip-b32", "--allow-worse", *options)
    push(folder / "out", repo)


def test_the_map_of_one_user_is_found_by_another(hub: Hub, folder_of: dict[str, str], tmp_path: Path) -> None:
    pairs, encoder = made(), "base/clip"
    hub.add(encoder, folder_of["clip"])
    old = write(tmp_path / "old", pairs.old_Nd, labels=[str(label) for label in pairs.labels_N])
    push_map(tmp_path, "me/map", old, write(tmp_path / "new", normalised(pairs.new_ND[:, :16])), "--new-model", encoder)
    old = Fingerprint.from_string("clip-b32")
    code, said = found("--old", old.digest, "--new", encoder, "--json")
    (listed,), report = json.loads(said), json.loads((tmp_path / "out" / "report.json").read_text())
    assert code == 0 and listed["name"] == "me/map" and listed["revision"] == hub.repos["me/map"].branches["main"]
    assert listed["finds_more"] == report["verdict"] and listed["searches"] == ["clip-b32"] and listed["new"] == encoder
    chosen = next(trial for trial in report["trials"] if trial["name"] == report["model"]["name"])
    for gain in listed["gains"]:
        expected = chosen["gains"][gain["where"]][gain["metric"]]
        assert gain["mean"] == pytest.approx(expected["mean"], abs=1e-6)
        assert gain["ci95"] == pytest.approx(expected["ci95"], abs=1e-6)
        assert gain["old"] == pytest.approx(report["floor"][gain["where"]][gain["metric"]], abs=1e-6)
        assert gain["new"] - gain["old"] == pytest.approx(gain["mean"], abs=2e-6)
    assert len(listed["gains"]) == 12
    card = hub.files("me/map")["README.md"].decode()
    assert "| known classes | CMC@1 |" in card and ("Validation did not show" in card) == (not report["verdict"])
    for half in (("--old", old.digest[:9]), ("--new", encoder)):
        assert json.loads(found(*half, "--json")[1]) == [listed]
    code, said = found("--old", old.digest)
    assert code == 0 and "me/map" in said and "2026-01-31" in said and ("yes" if report["verdict"] else "no") in said


def test_a_map_that_was_chosen_without_labels_claims_no_results(hub: Hub, tmp_path: Path) -> None:
    sides = write(tmp_path / "old", made().old_Nd), write(tmp_path / "new", made().new_ND)
    push_map(tmp_path, "me/unlabelled", *sides)
    card = hub.files("me/unlabelled")["README.md"].decode()
    assert "Validation did not show that queries of this map find as much as old queries" in card
    assert "No report was pushed" not in card
    code, said = found("--old", Fingerprint.from_string("clip-b32").digest, "--json")
    assert code == 0 and [each["finds_more"] for each in json.loads(said)] == [None]


def test_both_models_must_fit_and_all_pages_are_read(hub: Hub) -> None:
    old, new = stated()["tags"][2:]
    card(hub, "me/both", **stated())
    card(hub, "me/one", **stated(tags=["xcompat", old]))
    card(hub, "me/tool", **stated(tags=[old, new]))
    card(hub, "me/again", **stated(**{"model-index": index(*GAINS)}))
    hub.page = 1
    wanted = {SEARCHES: Fingerprint.from_string("old").digest, EMBEDS: Fingerprint.from_string("new").digest}
    both, again = search(wanted).found
    assert (both.name, both.method, both.gains, both.finds_more) == ("me/both", "ridge", [], None)
    assert again.gains == GAINS and again.finds_more is False and again.least == GAINS[1]
    assert search({**wanted, EMBEDS: OLDER.digest}).found == []


def test_no_more_cards_are_read_than_are_promised(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xcompat.hub.search.MOST", 2)
    old, new = (Fingerprint.from_string(name).digest for name in ("old", "new"))
    for number in range(3):
        card(hub, f"me/{number}", **stated())
        code, said = found("--old", old)
        assert code == 0 and ("name both models to see fewer" in said) == (number == 2), "only where more are there"
    hub.asked.clear()
    code, said = found("--old", old, "--new", new)
    assert "most downloaded were looked at." in said and "name both" not in said
    assert len([asked for asked in hub.asked if asked.startswith("GET /api/models/me/")]) == 2
    assert len(json.loads(found("--old", old, "--json")[1])) == 2


HALF: dict[str, Any] = {"task": {"type": "t", "name": "a"}, "dataset": {"type": "unknown", "name": "d"}}
HALF["metrics"] = [{"type": "b", "value": "0.1", "args": {"case": "gain"}}]
BAD: dict[str, dict[str, Any]] = {
    "no metadata of ours": {"method": None, "embeds": None, "compatible_with": None},
    "versions": {"compatible_with": "all"},
    "fingerprints": {"embeds": [3, {}]},
    "an attribute of the library": {"to_dict": 3, "get": 4},
    "no index": {"model-index": 7},
    "a result": {"model-index": [{"name": "x", "results": [{"metrics": 3}]}]},
    "infinite": {"model-index": index(Gain("a", "b", 0.1, 0.2, float("inf"), (0.0, 0.1)))},
    "no dictionary": {"model-index": [[]]},
    "no interval": {"model-index": [{"name": "x", "results": [HALF]}]},
}


@pytest.mark.parametrize("what", BAD)
def test_a_malformed_card_has_no_results(what: str, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    card(hub, "me/bad", **stated(**BAD[what]))
    code, said = found("--old", Fingerprint.from_string("old").digest, "--json")
    (listed,) = json.loads(said)
    assert code == 0 and listed["name"] == "me/bad" and listed["gains"] == [] and listed["finds_more"] is None
    code, said = found("--old", Fingerprint.from_string("old").digest)
    assert code == 0 and "no results in its card" in said
    assert capfd.readouterr().err == "", "the library says nothing of its own about a stranger's card"


def test_a_card_that_was_made_to_look_alike_is_left_out(hub: Hub) -> None:
    old = Fingerprint.from_string("old").digest
    alike = old[:32] + OLDER.digest[32:]
    card(hub, "me/alike", **stated(compatible_with=[{"name": "old", "fingerprint": alike, "dim": 8}]))
    assert find_maps(old, None).found == [] and search({SEARCHES: old}).found[0].is_other


def test_an_index_page_lists_all_maps_with_their_lowest_gain(hub: Hub) -> None:
    card(hub, "me/map", **stated(**{"model-index": index(*GAINS)}))
    card(hub, "me/another", **stated(base_model="user/new"))
    card(hub, "me/encoder", **stated(compatible_with=[], tags=["xcompat"]))
    code, said = found("--markdown")
    first, second = said.splitlines()[-2:]
    assert code == 0 and said.startswith("# Maps between embedding models") and "me/encoder" not in said
    assert first == f"| old | ? | -3.0 (-5.0 to -1.0), mAP, new classes | no | [me/map]({hub.url}/me/map) |"
    assert second == f"| old | user/new | no results in its card |  | [me/another]({hub.url}/me/another) |"
    assert found("--markdown", "--old", OLDER.digest)[0] == 1
    refuses("--json and --markdown cannot be combined; remove", found, "--markdown", "--json")


def test_what_a_stranger_writes_is_shown_and_not_obeyed(hub: Hub) -> None:
    evil = "\x1b[2J[red]own\nxcompat: done\u202e"
    gain = Gain(evil, evil, 0.1, 0.2, 0.1, (0.0, 0.2))
    versions = [{"name": evil, "fingerprint": Fingerprint.from_string("old").digest, "dim": 8}]
    card(hub, "me/evil", **stated(method=evil, base_model=evil, compatible_with=versions, **{"model-index": index(gain)}))
    for more in ([], ["--json"], ["--markdown"]):
        code, said = found("--old", versions[0]["fingerprint"], *more)
        assert code == 0 and "\x1b" not in said and "\u202e" not in said
        assert not [line for line in said.splitlines() if line.startswith("xcompat: done")]
    assert "[red]" in "".join(found("--old", versions[0]["fingerprint"])[1].split())


def test_nothing_found_and_bad_questions_are_one_line(hub: Hub, tmp_path: Path) -> None:
    code, said = found("--old", OLD.digest)
    assert code == 1 and "xcompat map" in said and hub.url in said and len(said.splitlines()) == 1
    assert found("--old", OLD.digest, "--json") == (1, "[]\n")
    np.save(tmp_path / "image_embeds.npy", np.eye(3, dtype=np.float32))
    refuses("contains stored embeddings, not a model", found, "--old", str(tmp_path / "image_embeds.npy"))
    refuses("me/nowhere", found, "--new", "me/nowhere")
    for letter in "ab":
        digest = "0" * 10 + letter * 54
        card(hub, f"me/{letter}", **stated(tags=["xcompat", tag(SEARCHES, digest)], embeds=[digest]))
    refuses("2 models have fingerprints beginning with 00000000, e.g. 0000000000aaaaaa, ", found, "--old", "00000000")


@pytest.mark.parametrize(("path", "status"), [(r"GET /api/models$", 500), (r"GET /api/models$", 0), ("GET /api/models/me", 500)])
def test_a_hub_that_fails_is_one_line(path: str, status: int, hub: Hub) -> None:
    card(hub, "me/map", **stated())
    hub.faults[path] = status
    refuses(hub.url, found, "--old", Fingerprint.from_string("old").digest)


def test_a_model_that_is_gone_meanwhile_has_no_results(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    card(hub, "me/map", **stated(**{"model-index": index(*GAINS)}))
    look = HfApi.model_info

    def too_late(self: HfApi, name: str) -> Any:
        del hub.repos[name]
        return look(self, name)

    monkeypatch.setattr(HfApi, "model_info", too_late)
    assert find_maps(Fingerprint.from_string("old").digest, None).found == [HubCheckpoint("me/map", "", downloads=0, likes=0)]


REPO = "me/model"


@pytest.fixture(scope="module")
def versions(folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two states of one model: of one lineage, with other weights."""
    folders = [tmp_path_factory.mktemp("versions") / name / "model" for name in ("first", "second")]
    model = build("bct", folder_of)
    for folder in folders:
        shake(model)
        model.export(folder)
    return folders


@pytest.mark.parametrize("status", [0, 500, 403])
def test_a_push_that_the_hub_stops_is_done_or_not(status: int, hub: Hub, versions: list[Path]) -> None:
    push(versions[0], REPO)
    held, steps = dict(hub.files(REPO)), 7
    for at in range(steps):
        count = 0

        def stop(asked: str, at: int = at) -> int | None:
            nonlocal count
            count += 1
            return status if count > at else None

        hub.fault = stop  # type: ignore[method-assign]
        refuses("", push, versions[1], REPO)
        assert hub.files(REPO) == held
        del hub.fault
    push(versions[1], REPO)
    assert AutoModel.from_pretrained(REPO).fingerprint() == AutoModel.from_pretrained(versions[1]).fingerprint()


@pytest.mark.parametrize("answer", [b"<html>busy</html>", b"[1, 2]", b"5", b"", b"\xff\xfe"])
def test_an_answer_that_is_no_configuration(answer: bytes, hub: Hub, versions: list[Path], tmp_path: Path) -> None:
    hub.add(REPO, versions[0])
    hub.repos[REPO].commit(hub.files(REPO) | {"config.json": answer})
    for command in (trace_lineage, partial(push, versions[0])):
        refuses("", command, REPO)
    assert hub.files(REPO)["config.json"] == answer


def test_the_token_is_nowhere(
    hub: Hub, versions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a Hub that asks for it, so that it is surely used."""
    caplog.set_level(logging.DEBUG, logger="xcompat")
    hub.token = "hf_secret"
    assert os.environ["HF_TOKEN"] == hub.token
    said = [push(versions[0], REPO)]
    load_embedder(REPO)
    trace_lineage(REPO)
    for hub.token, status in (("hf_of_somebody_else", None), ("hf_secret", 500), ("hf_secret", 0)):
        hub.faults = {"": status} if status is not None else {}
        for command in (partial(push, versions[1]), trace_lineage, load_embedder):
            said.append(refuses("", command, "me/other"))
    printed = capsys.readouterr()
    said += [caplog.text, printed.out, printed.err, *(str(content) for content in hub.files(REPO).values())]
    assert not [text for text in said if "hf_secret" in text]
    files = [file for folder in (tmp_path, versions[0].parent) for file in folder.rglob("*") if file.is_file()]
    assert files and not [file for file in files if b"hf_secret" in file.read_bytes()]


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=["022", "027", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_what_is_written_is_as_open_as_the_umask_says(umask: int, folder_of: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "made"
    with atomic_path(root / "folder") as temporary:
        temporary.mkdir()
        (temporary / "file").write_text("")
    build("bct", folder_of).export(root / "model")
    model = load_embedder(folder_of["clip"])
    embed_texts(model, ["a dog", "two cats"], root / "cache", "digest")
    store(Gallery.create(root / "gallery", model), model.embed(model.processor.texts(["a dog"])), ["a dog"], [{"kind": "dog"}])
    made = [path for path in root.rglob("*") if not path.is_symlink()]
    wrong = {
        str(path.relative_to(root)): oct(mode)
        for path in made
        if (mode := stat.S_IMODE(path.stat().st_mode)) != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert not wrong and len(made) > 10

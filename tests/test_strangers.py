"""The Hub and strangers: maps found by their models, pushes stopped anywhere, no token anywhere, and names that nothing obeys."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import invoke, refuses, store
from hub_server import Hub, Repository
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from PIL import Image
from rich.console import Console
from test_compare import make_contenders
from test_map import made, normalised, write
from test_models import OLD, OLDER, build, shake
from test_report import make_content
from transformers import AutoModel
from typer.testing import CliRunner

from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.core import failures
from xcompat.core.errors import visible
from xcompat.core.files import atomic_path
from xcompat.core.markdown import as_block, as_code, as_text
from xcompat.embeddings.embed import embed_texts
from xcompat.evaluation import Criterion, Difference, EmbeddedImages
from xcompat.evaluation.cases import TEXT_TO_TEXT
from xcompat.hub.card import ModelFacts, RunFacts, model_card
from xcompat.hub.lineage import Ancestor, draw, trace_lineage
from xcompat.hub.metadata import EMBEDS, SEARCHES, Gain, results_of, tag
from xcompat.hub.search import HubCheckpoint, search
from xcompat.mapping.map_search import find_maps
from xcompat.models.embedder import load_embedder
from xcompat.report import Example, ExampleRow, Hit, ModelInfo, Report, print_report, render_html, render_markdown
from xcompat.report.comparison import Comparison, compare, print_comparison, write_comparison
from xcompat.report.report import build_report
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


def test_cards_of_strangers_are_neither_obeyed_nor_mistaken(hub: Hub) -> None:
    old = Fingerprint.from_string("old").digest
    alike = old[:32] + OLDER.digest[32:]
    card(hub, "me/alike", **stated(compatible_with=[{"name": "old", "fingerprint": alike, "dim": 8}]))
    assert find_maps(old, None).found == [] and search({SEARCHES: old}).found[0].is_other
    evil = "\x1b[2J[red]own\nxcompat: done\u202e"
    gain = Gain(evil, evil, 0.1, 0.2, 0.1, (0.0, 0.2))
    versions = [{"name": evil, "fingerprint": Fingerprint.from_string("old").digest, "dim": 8}]
    card(hub, "me/evil", **stated(method=evil, base_model=evil, compatible_with=versions, **{"model-index": index(gain)}))
    for more in ([], ["--json"], ["--markdown"]):
        code, said = found("--old", versions[0]["fingerprint"], *more)
        assert code == 0 and "\x1b" not in said and "\u202e" not in said
        assert not [line for line in said.splitlines() if line.startswith("xcompat: done")]
    assert "[red]" in "".join(found("--old", versions[0]["fingerprint"])[1].split())


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


IN_HTML = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '" onmouseover="alert(1)', "' autofocus onfocus=alert(1) '",
    "</pre>", "</details>", "</style>", "<!--", "-->", "]]>", "&lt;script&gt;", "{{ 7 * 7 }}", "{% raw %}",
)  # fmt: skip
IN_MARKDOWN = (
    "![](http://tracker/x.png)", "[click](javascript:alert(1))", "<http://tracker>", "http://tracker", "www.tracker.com",
    "[a]: http://tracker", "`", "```", "~~~", "**", "_", "\n", "\n\n", "\t", "---", "\n---\n", "===", "# ", "\n# ", "- ", "1. ",
    "> ", "|", "\\", "$", ": ", "'", '"', "!!python",
)  # fmt: skip
IN_TERMINALS = (
    "\x1b[2J", "\x1b]0;title\x07", "\x07", "\x08", "\r", "\x9b31m", "\u202e", "\u2028", "[red]", "[/]", "[link=http://tracker]",
)  # fmt: skip
PIECES = (*IN_HTML, *IN_MARKDOWN, *IN_TERMINALS)
hostile = (
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3) | st.just("name "), min_size=1, max_size=6)
    .map("".join)
    .filter(str.strip)
)
PLAIN = "plain"


@pytest.fixture(scope="module")
def report() -> Report:
    return build_report(replace(make_content(), tsne_pairs=0))


def called(report: Report, name: str) -> Report:
    """Return a report in which everything that somebody else can name has this name."""
    case = replace(report.cases[0], gallery=name, direction=name)
    lost = [replace(case, query=query, gallery="old", metrics={name: 0.5}, ci95={name: (0, 1)}) for query in ("old", "new")]
    hits = [Hit(Image.new("RGB", (2, 2)), name, True), Hit(None, name, False), Hit(None, name, True, 2.0)]
    changes: dict[str, Any] = {"old": ModelInfo(name, name, 8), "new": ModelInfo(name, name, 8), "method": name}
    changes["criterion"] = Criterion(False, None, [name], [Difference(name, name, 0.1, (-0.1, 0.3), 100)])
    changes |= {"cases": [case, replace(case, query=name), *lost], "examples": [Example(name, [ExampleRow(name, hits)])]}
    return replace(report, **changes, seconds={name: 1.0}, run={"notes": [name], name: name})


def judged(report: Report) -> Report:
    """Return a report on texts, whose example searches are laid out as lines."""
    return replace(report, cases=[replace(case, direction=TEXT_TO_TEXT) for case in report.cases])


def elements(page: str) -> list[Any]:
    """Return every tag with its attributes' names, comment and declaration of a page, in order."""
    found: list[Any] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, [name for name, _ in attrs]))

        def handle_endtag(self, tag: str) -> None:
            found.append(tag)

        def other(self, said: str) -> None:
            found.append(said)

        handle_comment = handle_decl = handle_pi = unknown_decl = other

    parser = Parser()
    parser.feed(page)
    parser.close()
    return found


def structure(text: str) -> list[Any]:
    """Return everything that Markdown makes of a text but text itself."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    inner = [each for token in tokens for each in (token, *(token.children or []))]
    texts = ("text", "inline", "text_special")
    return [(token.type, token.tag, sorted(token.attrs)) for token in inner if token.type not in texts]


@settings(max_examples=30)
@given(name=hostile)
def test_pages_hold_the_elements_of_their_template_alone(name: str, report: Report) -> None:
    plots = {"cases-0.png": b"", "recall-0.png": b""}
    assert elements(render_html(called(report, name), plots)) == elements(render_html(called(report, PLAIN), plots))
    texts = [judged(called(report, each)) for each in (name, PLAIN)]
    assert elements(render_html(texts[0], plots)) == elements(render_html(texts[1], plots))
    assert structure(render_markdown(called(report, name))) == structure(render_markdown(called(report, PLAIN)))


@given(name=hostile)
def test_a_text_is_text(name: str) -> None:
    assert structure(f"before {as_text(name)} after") == structure("before plain after")
    assert {kind for kind, *_ in structure(as_text(name))} <= {"paragraph_open", "paragraph_close"}
    table = "| a | b |\n|---|---|\n| {} | {} |"
    assert structure(table.format(as_text(name), as_code(name))) == structure(table.format("a", "`b`"))
    assert [token.type for token in MarkdownIt().parse(as_block(f"x\n{name}", "yaml"))] == ["fence"]


FACTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapters": {"holds": "adapters"},
    "map": {"holds": "map"},
    "of galleries": {"maps_galleries": True},
    "with side-information": {"maps_galleries": True, "side_info": {"name": PLAIN, "dim": 4}},
}


@cache
def card_of(name: str, kind: str) -> str:
    """Write a card in which everything that somebody else can name has this name."""
    facts = {key: value | {"name": name} if key == "side_info" else value for key, value in FACTS[kind].items()}
    old = {"name": name, "fingerprint": name, "dim": 8, "revision": name}
    base = f"/models/{name}" if kind == "map" else name  # which is on no Hub
    described = {"name": base, "revision": name, "fingerprint": "0" * 64, "library": "transformers"}
    model = ModelFacts("xbt", name, Fingerprint.from_string("a"), 16, [old], described, embeds_texts=True, **facts)
    data, recipe = {name: [name], "texts": [name]}, f"name: plain\n{name}"
    gains = [Gain(name, name, 0.5, 0.6, 0.1, (0.05, 0.15))]
    facts = {"measured_on": name, "machine": name, "datasets": [name], "versions": {name: name}}
    run = RunFacts(gains=gains, data=data, recipe=recipe, seconds=90.0, **facts)
    return str(model_card("me/model", model, None, run, name, [name]))


@pytest.mark.parametrize("kind", FACTS)
@settings(max_examples=15)
@given(name=hostile)
def test_a_card_holds_the_structure_of_its_template_alone(name: str, kind: str) -> None:
    text, plain = card_of(name, kind), card_of(PLAIN, kind)
    card, expected = ModelCard(text), ModelCard(plain)
    assert structure(card.text) == structure(expected.text)
    keys, wanted_keys = (each.data.to_dict().keys() - {"base_model", "base_model_relation"} for each in (card, expected))
    assert keys == wanted_keys
    assert card.data.library_name == "xcompat" and card.data.compatible_with[0]["dim"] == 8
    (code,), (wanted,) = (re.findall(r"^(`{3,})python\n(.*?)\n\1$", each, re.DOTALL | re.MULTILINE) for each in (text, plain))
    lines = [[line.partition("#")[0] for line in each[1].splitlines()] for each in (code, wanted)]
    assert lines[0] == lines[1], "no name leaves its comment"
    compile(code[1], "README.md", "exec")


def printed(show: Callable[[Console], None]) -> str:
    buffer = io.StringIO()
    show(Console(file=buffer, width=300, force_terminal=True, color_system=None, highlight=False))
    return buffer.getvalue()


@settings(max_examples=20)
@given(name=hostile)
def test_the_terminal_obeys_no_name(name: str, report: Report) -> None:
    """Without colours nothing that is printed is a control sequence: links and titles are ones too."""
    first = Ancestor(name, name, name, 8, older=[Ancestor(name, "", broken=name)])
    for show in (lambda console: print_report(called(report, name), console), lambda console: console.print(draw(first))):
        shown = printed(show)
        assert visible(shown) == shown


@given(name=hostile)
def test_what_stops_a_command_is_one_line_whatever_it_names(name: str) -> None:
    damaged = XcompatError(f"the model at {name} is damaged; fetch it again")
    nested = XcompatError(f"data.test: {damaged}")
    errors = (damaged, nested, OSError(errno.EACCES, "Permission denied", name), RuntimeError(f"{name}: No space left on device"))
    for line in (str(damaged), str(nested), *map(failures.explain, errors)):
        assert line is not None and len(f"({line})".splitlines()) == 1 and visible(line) == line
    assert failures.explain(nested) == str(nested) == f"data.test: {damaged}", "spelled out once"
    assert name.isprintable() <= (name in str(damaged))


def comparison_of(folder: Path, name: str) -> Comparison:
    contenders = make_contenders(folder, EmbeddedImages, seeds=[0])
    return compare(name, [replace(each, name=f"{name}{number}") for number, each in enumerate(contenders)], 20)


def test_comparisons_hold_the_structure_of_their_templates_alone(tmp_path: Path) -> None:
    found, expected = comparison_of(tmp_path / "a", "".join(PIECES)), comparison_of(tmp_path / "b", PLAIN)
    pages = [write_comparison(tmp_path / name, each) for name, each in (("a", found), ("b", expected))]
    for suffix, read in ((".html", elements), (".md", structure)):
        first, second = (read(page.with_suffix(suffix).read_text(encoding="utf-8")) for page in pages)
        assert first == second
    shown = printed(lambda console: print_comparison(found, console))
    assert visible(shown) == shown

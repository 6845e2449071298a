"""Migrations whose new vectors come from a service: batches, price, continued runs, and a service that changes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_places import LancePlace, unit_vectors
from typer.testing import CliRunner

from xcompat import XcompatError
from xcompat.cli import app
from xcompat.embeddings.provider import Provider
from xcompat.stores import migration
from xcompat.stores.service import ServiceEmbedding

lancedb = pytest.importorskip("lancedb")
pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 40, 8, 12
MODULE = """
import numpy as np

noise = np.random.default_rng()

def embed(texts):
    rows = np.stack([np.random.default_rng(len(text) + sum(map(ord, text))).standard_normal(12) for text in texts])
    rows += noise.normal(0, 1e-4, rows.shape)  # as services round
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
"""


class Service:
    """Service that counts its texts, and can stop after some calls."""

    def __init__(self, seed: int = 0, calls: int = 10_000) -> None:
        self.seed, self.calls, self.texts = seed, calls, list[str]()

    def __call__(self, texts: list[str]) -> np.ndarray:
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.texts += texts
        rows = [np.random.default_rng([self.seed, *text.encode()]).standard_normal(NEW_DIM) for text in texts]
        return np.stack(rows) / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def place(tmp_path: Path) -> LancePlace:
    found = LancePlace(tmp_path / "database")
    found.fill(unit_vectors(N, OLD_DIM))
    for row in range(N):
        found.note(str(row), f"a thing called {row}")
    return found


def test_a_killed_start_continues_and_pays_for_few_texts_again(place: LancePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServiceEmbedding, "max_batch", 10)
    first, then = Service(calls=4), Service()
    with pytest.raises(KeyboardInterrupt):
        migration.start(place.open(), ServiceEmbedding(Provider(first, "big-3", batch=5), "about"))
    written = len(place.vectors("embedding_new"))
    assert written == 10
    provider = Provider(then, "big-3", batch=5)
    migration.start(place.open(), ServiceEmbedding(provider, "about"))
    assert len([text for text in then.texts if text.startswith("a thing")]) == N - written
    assert migration.verify(place.open(), ServiceEmbedding(provider, "about")).passed


def test_another_model_under_the_same_name_is_refused(place: LancePlace) -> None:
    migration.start(place.open(), ServiceEmbedding(Provider(Service(), "big-3"), "about"))
    other = ServiceEmbedding(Provider(Service(seed=1), "big-3"), "about")
    for verb in (migration.start, migration.verify, migration.switch):
        with pytest.raises(XcompatError, match="big-3 does not embed as it did when this migration was started .* use the same"):
            verb(place.open(), other)


def test_the_command_line_re_embeds_by_a_service(place: LancePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify accepts answers that are not the same bits. With --json, stdout contains nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "migration_service.py").write_text(MODULE)
    named = ["--model", "big-3", "--embed", "about", "--embed-with", "migration_service:embed"]

    def run(verb: str, *options: str) -> Any:
        result = CliRunner().invoke(app, ["migrate", verb, place.uri(), *options])
        assert result.exit_code == 0, (verb, result.output, result.exception)
        return result

    assert "40 rows: about 168 tokens, about 0.17" in run("plan", *named, "--price-per-million-tokens", "1000").stdout
    planned = run("plan", *named, "--json")
    assert "less than a second to read and compute the vectors, plus time to load the model" in planned.stderr
    found = json.loads(planned.stdout)
    assert (found["rows"], found["dim"], found["where"]) == (N, NEW_DIM, None) and "168 tokens" in found["cost"]
    assert "run `xcompat migrate verify`" in run("start", *named, "--batch", "16", "--requests-per-minute", "1e6").stdout
    found = json.loads(run("status", "--json").stdout)
    assert (found["state"], found["written"], found["missing"]) == ("filling", N, 0)
    found = json.loads(run("verify", *named, "--json").stdout)
    assert found["passed"] and found["compared"] == N and found["wrong"] == 0
    run("switch", *named)
    assert "_before from" in run("finish", "--yes").stdout
    assert place.dim() == NEW_DIM and place.open().spaces()["embedding"].fingerprint.name == "big-3"  # type: ignore[union-attr]


@pytest.mark.parametrize(("answer", "options"), [("n", []), ("y", []), (None, []), (None, ["--yes"])])
def test_finish_asks_before_it_deletes(
    place: LancePlace, monkeypatch: pytest.MonkeyPatch, answer: str | None, options: list[str]
) -> None:
    """Outside a terminal (no answer) it needs --yes."""
    service = ServiceEmbedding(Provider(Service(), "big-3"), "about")
    migration.start(place.open(), service)
    migration.switch(place.open(), service)
    monkeypatch.setattr("xcompat.cli.migrate.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: answer is not None)))
    result = CliRunner().invoke(app, ["migrate", "finish", place.uri(), *options], input=answer)
    is_deleted = answer == "y" or bool(options)
    assert (result.exit_code == 0) == is_deleted and ("This cannot be undone." in result.output) == (answer is not None)
    assert ("embedding_before" in place.names()) != is_deleted
    assert ("confirm with --yes" in str(result.exception)) == (answer is None and not is_deleted)


@pytest.mark.parametrize(
    ("answer", "options", "is_deleted"), [("n", [], False), ("y", [], True), (None, [], False), (None, ["--yes"], True)]
)
def test_a_second_rollback_asks_before_it_deletes(
    place: LancePlace, monkeypatch: pytest.MonkeyPatch, answer: str | None, options: list[str], is_deleted: bool
) -> None:
    """The first rollback only undoes the switch. Outside a terminal (no answer) a deletion needs --yes."""
    service = ServiceEmbedding(Provider(Service(), "big-3"), "about")
    migration.start(place.open(), service)
    migration.switch(place.open(), service)
    monkeypatch.setattr("xcompat.cli.migrate.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: answer is not None)))
    undone = CliRunner().invoke(app, ["migrate", "rollback", place.uri()])
    assert undone.exit_code == 0 and "has the old vectors again" in undone.output and "embedding_new" in place.names()
    again = CliRunner().invoke(app, ["migrate", "rollback", place.uri(), *options], input=answer)
    assert ("embedding_new" in place.names()) != is_deleted and (again.exit_code == 0) == is_deleted
    said = again.output if answer is not None or is_deleted else str(again.exception)
    assert ("There is no switch to undo. Delete the new vectors, embedding_new" in said) == (answer is not None)
    assert ("has no switch to undo, so this deletes embedding_new; confirm with --yes" in said) == (
        answer is None and not is_deleted
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--embed-with", "math:sqrt"], "--embed-with embeds texts of the rows; choose their field with --embed"),
        (["--requests-per-minute", "9"], "--requests-per-minute and --price-per-million-tokens need --embed-with"),
        (
            ["--embed", "a", "--image-folder", ".", "--embed-with", "math:sqrt"],
            "--embed-with embeds texts; remove --image-folder",
        ),
        (
            ["--embed", "a", "--embed-with", "math:sqrt", "--engine", "ray"],
            "calls the service from a single process; remove --engine",
        ),
        (["--embed", "a", "--embed-with", "math:squirt"], "math has no function 'squirt'"),
    ],
)
def test_options_that_do_not_fit_are_refused(place: LancePlace, options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["migrate", "start", place.uri(), "--model", "big-3", *options])
    assert isinstance(result.exception, XcompatError) and said in str(result.exception)

"""The captions story: train, resume after a kill, push, pull elsewhere, search, add, backfill, roll back, export.

Real product photos and their names. Each command runs in a process of its own, and what it finds is measured after every step:
the share of names that find a photo of that name among the first ten.
"""

from __future__ import annotations

import gzip
import json
import signal
import tarfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any, cast

import faiss
import numpy as np
import pytest
import warm
from hub_server import Hub, served

from xcompat.models.embedder import load_embedder
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.training.checkpoints import last_complete_checkpoint

TESTS = Path(__file__).resolve().parents[1]
FASHION = TESTS.parents[1] / "shared" / "data" / "fashion"
STORED, ADDED = 240, 60
"""Photos that the old model embeds, and photos that arrive later."""
WITHIN = 0.08
"""Share of queries by which two searches may differ by chance: more than twice the standard error of 240 queries at 50 %."""

pytestmark = pytest.mark.skipif(not FASHION.exists(), reason="../shared/data/fashion is not here")

MAIN = "from xcompat import cli; cli.main()"
KILLED = """
import os, signal
import xcompat.training.trainer as trainer

class KillAtStep(trainer.DivergenceCallback):
    def on_step_end(self, args, state, control, **named):
        super().on_step_end(args, state, control, **named)
        if "xbt" in args.output_dir and state.global_step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

trainer.DivergenceCallback = KillAtStep
"""
AT_THE_HUB = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from hub_server import redirected
from pathlib import Path
redirect = redirected({{url!r}}, Path({{cache!r}}))
redirect.__enter__()
"""

PIPELINE = """
import json, sys
from transformers import pipeline
import xcompat
search = pipeline("compatible-retrieval", model={name!r}, gallery="gallery")
print(json.dumps([[hit["id"] for hit in search(text)] for text in sys.argv[1:]]))
"""
NAME = "me/captions"


def clip(width: int, dim: int) -> str:
    tower = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    text, vision = tower | {"max_position_embeddings": 24}, tower | {"image_size": 32, "patch_size": 8}
    return json.dumps({"model": {"model_type": "clip", "projection_dim": dim, "text_config": text, "vision_config": vision}})


COLUMNS = "caption_column: txt, id_column: txt"
SHARD = f"path: {FASHION}/train-0000.tar.gz, {COLUMNS}"
RECIPE = f"""
name: captions
output_dir: run
cache_dir: cache
data:
  test: {{path: {FASHION}/test-0000.tar.gz, {COLUMNS}, limit: 300}}
  one_per_id: true
training: {{learning_rate: 1.0e-3, adam_beta2: 0.98, per_device_train_batch_size: 64, warmup_steps: 5}}
evaluation: null
stages:
- {{name: old, method: independent, new: {clip(64, 32)}, data: {{pairs: {{{SHARD}, limit: 800}}}}, training: {{max_steps: 50}}}}
- {{name: new, method: independent, new: {clip(96, 64)}, data: {{pairs: {{{SHARD}, limit: 1200}}}}, training: {{max_steps: 60}}}}
- name: phi
  method: projection
  old: stage:old
  new: stage:new
  data: {{texts: [{{path: {FASHION}/names_textonly.txt.gz}}], texts_limit: 2000, one_per_id: false}}
  training: {{max_steps: 60, per_device_train_batch_size: 128}}
- name: xbt
  method: xbt
  old: stage:old
  new: stage:new
  projection: stage:phi
  options: {{adapters: {{lora: {{rank: 4}}, prompts: 2}}}}
  data: {{pairs: {{{SHARD}, limit: 800}}}}
  training: {{max_steps: 12, learning_rate: 3.0e-4, save_steps: 5}}
  evaluation: {{ks: [1, 10], resamples: 200, examples: 0, tsne_pairs: 0}}
"""
"""Both models, a map learned from names, and XBT on photos with names."""


class Shop:
    """A folder with photos, their names, and the commands that are typed there, beside a Hub where models are shared."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub = folder, hub
        self.name_of: dict[str, str] = {}
        with tarfile.open(FASHION / "test-0000.tar.gz") as shard:
            files = {member.name: cast(IO[bytes], shard.extractfile(member)).read() for member in shard if member.isfile()}
        names = {Path(file).stem: text.decode().strip() for file, text in files.items() if file.endswith(".txt")}
        first = {name: key for key, name in reversed(names.items())}  # products of one name are one thing
        for number, (name, key) in enumerate(list(first.items())[: STORED + ADDED]):
            place = folder / ("photos" if number < STORED else "arrivals") / f"{key}.jpg"
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(files[f"{key}.jpg"])
            self.name_of[place.name] = name
        (folder / "queries.txt").write_text("\n".join(self.name_of.values()) + "\n", encoding="utf-8")
        (folder / "captions.yaml").write_text(RECIPE, encoding="utf-8")

    def type(self, *arguments: object, before: str = "", cache: str | None = None) -> CompletedProcess[str]:
        """Run ``xcompat`` in a new process, at the Hub if a cache for what it fetches is named."""
        redirect = AT_THE_HUB.format(url=self.hub.url, cache=str(self.folder / cache)) if cache is not None else ""
        return warm.run("-c", f"{redirect}{before}\n{MAIN}", *arguments, folder=self.folder, COLUMNS="200")

    def run(self, *arguments: object, cache: str | None = None) -> str:
        """Run ``xcompat``, and return its output if it succeeds."""
        done = self.type(*arguments, cache=cache)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def search(self, model: str, cache: str | None = None) -> list[list[str]]:
        """Search the gallery with all names, and return the ids of the first ten hits of each."""
        lines = self.run("gallery", "search", "gallery", "--queries", "queries.txt", "--model", model, "--json", cache=cache)
        found = [json.loads(line) for line in lines.splitlines()]
        assert [each["text"] for each in found] == list(self.name_of.values())
        return [[hit["id"] for hit in each["hits"]] for each in found]

    def recall(self, hits: list[list[str]], arrivals: bool = False) -> float:
        """Return the share of names that find their photo, of the stored photos or of those that arrived later."""
        rows = slice(STORED, None) if arrivals else slice(STORED)
        own = list(self.name_of)[rows]
        return sum(name in ids for name, ids in zip(own, hits[rows], strict=True)) / len(own)


@pytest.fixture
def shop(tmp_path: Path) -> Any:
    with served(tmp_path / "hub-cache") as hub:
        yield Shop(tmp_path, hub)


def train_with_a_kill(shop: Shop) -> float:
    """Kill the training in its last stage, resume it, and return what the new model's queries find on the old test gallery."""
    killed = shop.type("train", "captions.yaml", before=KILLED)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = shop.folder / "run"
    assert (run / "phi" / "done.json").exists() and not (run / "xbt" / "done.json").exists()
    last = last_complete_checkpoint(run / "xbt" / "checkpoints")
    assert last is not None and last.name == "checkpoint-5"
    resumed = shop.run("train", "captions.yaml")
    assert "checkpoint-5" in resumed and "phi is done, reused" in resumed
    cases = (case for case in load_report(run).cases if case.direction == "text-to-image")
    recalls = {(case.query, case.gallery): case.metrics["recall@10"] for case in cases}
    assert recalls["new", "old"] > recalls["old", "old"] - WITHIN
    return recalls["new", "old"]


def build_and_search(shop: Shop) -> list[list[str]]:
    """Build the gallery with the old model, and return what it finds."""
    shop.run("gallery", "build", "photos", "--model", "run/old/model", "--out", "gallery")
    hits = shop.search("run/old/model")
    assert shop.recall(hits) > 2 * 10 / STORED, "the old model finds more than chance does"
    return hits


def push_and_pull(shop: Shop, old: float) -> list[list[str]]:
    """Push the new model, and return what it finds in the old gallery on a machine that has never seen it."""
    shop.run("push", "run/xbt", NAME, "--license", "mit", cache="own cache")
    assert not (shop.folder / "fresh").exists()
    hits = shop.search(NAME, cache="fresh")
    assert shop.recall(hits) > old - WITHIN
    code = AT_THE_HUB.format(url=shop.hub.url, cache=str(shop.folder / "fresh")) + PIPELINE.format(name=NAME)
    done = warm.run("-c", code, *list(shop.name_of.values())[:9], folder=shop.folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == hits[:9]
    return hits


def add_and_backfill(shop: Shop, hits: list[list[str]]) -> None:
    """Add photos with the new model, re-embed the others in steps, and take the last step back."""
    before = shop.recall(hits)
    shop.run("gallery", "add", "gallery", "arrivals", "--model", NAME, cache="fresh")
    states = [shop.search(NAME, cache="fresh")]
    for budget in (63, STORED):
        backfill = ("--backfill", "photos", "--budget", budget)
        shop.run("gallery", "upgrade", "gallery", "--model", NAME, *backfill, cache="fresh")
        states.append(shop.search(NAME, cache="fresh"))
    for hits in states:
        assert shop.recall(hits) > before - WITHIN
        assert shop.recall(hits, arrivals=True) > before - 2 * WITHIN, "a quarter of the queries, so twice the error"
    shop.run("gallery", "rollback", "gallery")
    assert shop.search(NAME, cache="fresh") == states[-2]


def export_a_line(shop: Shop, old: list[list[str]]) -> None:
    """Return to the old gallery, and let a faiss index of it answer queries of the new model through a linear map."""
    shop.run("gallery", "rollback", "gallery", "--to", 1)
    assert shop.search("run/old/model") == old
    (shop.folder / "names.txt").write_bytes(gzip.decompress((FASHION / "names_textonly.txt.gz").read_bytes())[:40_000])
    models = ("--old", "run/old/model", "--new", "run/new/model")
    shop.run("map", *models, "--texts", "names.txt", "--out", "line", "--allow-worse")
    shop.run("export", "faiss", "gallery", "--model", "line", "--out", "line.faiss")
    new = load_embedder(str(shop.folder / "run/new/model"))
    queries = new.embed(new.processor.texts(list(shop.name_of.values()))).numpy()
    _, rows = faiss.read_index(str(shop.folder / "line.faiss")).search(queries, 10)
    stored = Gallery.open(shop.folder / "gallery").segments[0].ids(np.arange(STORED))
    assert shop.recall([[stored[row] for row in each] for each in rows.tolist()]) > shop.recall(old) - WITHIN


def test_captions_from_a_recipe_to_an_index(shop: Shop) -> None:
    train_with_a_kill(shop)
    old = build_and_search(shop)
    hits = push_and_pull(shop, shop.recall(old))
    add_and_backfill(shop, hits)
    export_a_line(shop, old)

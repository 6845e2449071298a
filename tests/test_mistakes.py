"""Mistakes are told at once, in one line: before torch, faiss or a store's client is imported, or before a model is loaded."""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import yaml
from conftest import Run, refuses, store, write_embeds, write_photos
from pydantic import ValidationError
from test_index_gallery import write_index

from xcompat import Fingerprint, cli
from xcompat.core.errors import require_no_problems
from xcompat.encoders.scratch import QUICK
from xcompat.methods import METHODS
from xcompat.retrieval import Gallery
from xcompat.retrieval.manifest import CURRENT
from xcompat.training.preflight import check_trackers
from xcompat.training.stage_recipe import StageRecipe, declared_options, usual_options
from xcompat.training.static_options import is_solved, method_names, trackers, trainer_fields

HEAVY = (
    *("torch", "transformers", "faiss", "datasets", "starlette", "ray", "daft"),
    *("chromadb", "lancedb", "pymilvus", "qdrant_client", "psycopg", "apsw", "sqlite_vec"),
)
NO_GALLERY = "the gallery nowhere does not exist; there is no nowhere in"
NO_MODEL = "the model folder ./nowhere does not exist; there is no nowhere in"
NO_STORE = "foo is not a kind of store; known: chroma, file"
NAME_IT = "name the model with --model: a run's folder"
NOT_OURS = "enc is not an xcompat model; choose a run folder or a checkpoint"
WORKERS = "--workers and --gpus-per-worker need an engine; choose one with --engine"

MISTAKES = {
    # recipes
    "train nowhere.yaml": "the recipe nowhere.yaml does not exist; list xcompat's recipes with `xcompat recipes`",
    "train damaged.yaml": "damaged.yaml is not valid YAML",
    "train bytes.yaml": "bytes.yaml is not valid YAML",
    "train lost.yaml": f"procrustes: old: {NO_MODEL}",
    "train good.yaml metod=x": "good.yaml: unknown key 'metod'; did you mean 'method'?",
    "train good.yaml data.tset=x": "good.yaml: unknown key 'data.tset'; did you mean 'test'?",
    "train good.yaml x": "invalid override 'x'; write key=value",
    "train good.yaml method=xbt options.train_encodr=none": "unknown key 'options.train_encodr' for method xbt; did you mean",
    "train good.yaml method=xbt options.adapters.lora.rnak=8": "'options.adapters.lora.rnak'; did you mean 'rank'?",
    "train good.yaml method=mixbct options.mixed_share=30": "options.mixed_share: Input should be less than or equal to 1",
    "train good.yaml memory_codec=SQ9": "unknown memory codec 'SQ9'; use float32, SQ8",
    "train good.yaml data.test.path=nowhere.csv": "data.test.path: nowhere.csv does not exist",
    "train good.yaml method=xbt training.report_to=[tensorbord]": "training.report_to: unknown tracker 'tensorbord'; did you",
    "compare good.yaml seeds=[0,1] seed=7": "compare runs all seeds [0, 1] and ignores seed=7; use seeds=[7]",
    "compare lost.yaml seed=7": f"procrustes: old: {NO_MODEL}",
    "embed good.yaml --model x": "--model applies to tables, not to recipes; remove --model",
    "embed good.yaml --workers 7": "--workers applies to tables",
    "evaluate nowhere.yaml": "the recipe nowhere.yaml does not exist",
    "quickstart --output q training.learing_rate=1": "unknown key 'training.learing_rate'; did you mean 'learning_rate'?",
    "quickstart --output q stages.9.method=x": "stages.9.method: unknown stage 9",
    "recipes nowhere": "xcompat has no recipe 'nowhere'; list them with `xcompat recipes`",
    # embeddings
    "embed nowhere.parquet": "set the model with --model, and the output folder with --out",
    "embed nowhere.parquet --model enc --out x": "nowhere.parquet does not exist; did you mean 'vectors.parquet'?",
    "embed vectors.parquet --model ./nowhere --out x": NO_MODEL,
    "embed vectors.parquet --model enc --out x --workers 2": WORKERS,
    "embed vectors.parquet x=1 --model enc --out x": "'x=1' overrides a recipe value, but vectors.parquet is not a recipe",
    "evaluate": "nothing to evaluate: use a recipe, a run or a checkpoint, or embeddings with --old and --new",
    "evaluate empty": "empty is not an xcompat checkpoint; choose the folder with its config.json, usually RUN/model",
    "evaluate empty/nowhere": "empty/nowhere does not exist; use a recipe, a run's folder or a checkpoint",
    "evaluate own": "set --data to test images with captions or classes for own",
    "evaluate own --data nowhere/x.csv": "nowhere/x.csv does not exist",
    "evaluate own --data images --output ended": "ended already contains the report of a recipe; choose another --out",
    "evaluate --new empty": "--new needs --old, the old model's embeddings",
    "evaluate --old empty --new empty": "empty lacks image_embeds.npy; it must contain image_embeds.npy, image_ids.txt",
    "evaluate --old images --new images": "images contains images without classes or texts, so relevant hits are unknown",
    "evaluate --old empty --new empty --qrels nowhere": "judgements file nowhere does not exist",
    "evaluate good.yaml --data images": "--data does not apply to a recipe, which sets its own test data",
    "evaluate good.yaml --old images": "--old does not apply to a recipe",
    "evaluate ran evaluation.ks=[2]": "evaluation.ks=[2] does not apply to a run's folder, whose report is only shown",
    "evaluate ran --old images": "--old does not apply to a run's folder",
    "evaluate own --data images --independent images": "--independent does not apply to a checkpoint, only to embeddings",
    "evaluate good.yaml --old images --new images": "good.yaml does not apply to embeddings (--old and --new); remove it",
    "evaluate --old images --new images --data images": "--data does not apply to embeddings (--old and --new)",
    "evaluate --qrels texts.txt": "--qrels and --map need embeddings: set --old and --new to their folders",
    "map --old nowhere.npy --new images": "nowhere.npy does not exist; use a faiss index, a gallery, a database's address",
    "map --old images --new empty": "empty lacks image_embeds.npy; it needs image_embeds.npy and image_ids.txt",
    "map --old texts.txt --new images": "texts.txt is not a file of embeddings",
    "map --old images --new images --memory-codec SQ9": "unknown memory codec 'SQ9'",
    "map --old images --new images --activation relu": "--activation needs an adapter file; set --start-from to the file",
    "map --old images --new images --embed-with a:b": "--embed-with and its options need texts; add --texts",
    "map --old images --new images --start-from nowhere.npz": "nowhere.npz is not a .npz or .safetensors file",
    "map --old images --new images --start-from enc": NOT_OURS,
    "map --old images --new images --new-model ./nowhere": NO_MODEL,
    "map --old images --new empty/model --texts texts.txt": "the model folder empty/model does not exist",
    "map --old images --new images --out enc": "enc/config.json was not made by `xcompat map`",
    "map --old images --new images --texts texts.txt --price-per-million-tokens 0": "--price-per-million-tokens is 0",
    # runs, models and the Hub
    "report nowhere": "nowhere does not exist",
    "report empty": "report.json does not exist",
    "push empty me/x": "empty contains no model; choose the folder of a finished run or of a checkpoint",
    "push own me/x --merged --adapters-only": "--merged and --adapters-only cannot be combined",
    "find": "choose the old model with --old, the new model with --new, or both",
    "find --old ./nowhere": NO_MODEL,
    "find --old images": "images contains stored embeddings, not a model",
    "lineage ./nowhere": "'./nowhere' is not a valid name on the Hub; write it as user/name",
    "serve nowhere": "nowhere does not exist; there is no nowhere in",
    "serve empty": "empty is neither a gallery nor a run with a report",
    "serve served --model me/new --images empty/x": "empty/x does not exist",
    "serve ran --images empty": "--images and --texts apply to galleries and indexes; remove them, as a run",
    "export faiss x.faiss --model ./nowhere --out o": NO_MODEL,
    "export onnx enc --out o": NOT_OURS,
    "export sentence-transformers empty --out o": "empty contains no model (config.json is missing)",
    "export atlas empty --out o": "empty contains no model; choose the folder of a finished run or of a checkpoint",
    # galleries
    "gallery build texts.txt": NAME_IT,
    "gallery build --model enc": "name the images or texts to embed, stored vectors, or an index to adopt with --from-faiss",
    "gallery build texts.txt --model enc --ids x": "--ids works only with vectors; remove it",
    "gallery build texts.txt --model ./nowhere": NO_MODEL,
    "gallery build texts.txt --model empty": "empty contains no model (config.json is missing)",
    "gallery build --from-faiss x.faiss --model enc": "the faiss index x.faiss does not exist; check the path",
    "gallery build --from-faiss x.faiss --ids nowhere --model enc": "--ids nowhere cannot be read",
    "gallery search nowhere hello --model enc": NO_GALLERY,
    "gallery search nowhere": "give one query, or many with --queries",
    "shadow nowhere --queries texts.txt --old enc --model enc": NO_GALLERY,
    "shadow nowhere --queries texts.txt --old enc --model enc --images images": "--images or --texts needs --rerank",
    "gallery search nowhere nowhere.png --model enc": "there is no image nowhere.png",
    "gallery search foo://x hello --model enc": NO_STORE,
    "gallery search nowhere hello --model enc --images images": "--images or --texts needs --rerank; add --rerank 20",
    "gallery search index.faiss hello --model enc --images images": "add --rerank 20, or replace it with --ids to name",
    "gallery search nowhere hello --model enc --cache-mb 5": "--cache-mb needs --rerank; add --rerank 20",
    "gallery search sqlite:///x.db?table=y hello --model enc --rerank 5 --cache-days 5": "--cache-days works with galleries only",
    "gallery search nowhere hello --json --csv": "--json and --csv are two forms of the same result; remove --json or --csv",
    "gallery add nowhere texts.txt --model enc": NO_GALLERY,
    "gallery upgrade nowhere --model enc": NO_GALLERY,
    "gallery upgrade nowhere --budget 3": "--budget applies to re-embedded images: add --backfill",
    "gallery upgrade nowhere --dtype bfloat16": "--dtype applies to re-embedded images",
    "gallery upgrade nowhere --workers 3": WORKERS,
    "gallery info nowhere": NO_GALLERY,
    "gallery info empty": "empty is not a gallery: it has no gallery.json; make one with `xcompat gallery build`",
    "gallery info texts.txt": "texts.txt is a file, not a gallery; make a gallery of a faiss index with `xcompat gallery adopt`",
    "gallery verify nowhere": NO_GALLERY,
    "gallery doctor nowhere": "name the images or texts of the gallery with --images or --texts",
    "gallery doctor nowhere --images empty": NO_GALLERY,
    "gallery doctor foo://x --texts body --model enc": NO_STORE,
    "gallery rollback nowhere": NO_GALLERY,
    # stores
    "migrate plan foo://x": NAME_IT,
    "migrate plan foo://x --model a/b": NO_STORE,
    "migrate plan foo://x --model a/b --texts body": "--texts and --images check a sample of the stored vectors",
    "migrate plan postgresql://h/d?table=x --model ./nowhere": NO_MODEL,
    "migrate plan postgresql://h/d?table=x --model enc": NOT_OURS,
    "migrate verify sqlite:///x.db?table=x --model enc": f"{NOT_OURS}, or name the field to re-embed with --embed, as in",
    "migrate start foo://x --model a/b": NO_STORE,
    "migrate start foo://x --model a/b --workers 2": WORKERS,
    "migrate verify foo://x": NAME_IT,
    "migrate status foo://x": NO_STORE,
    "migrate rollback nowhere": "nowhere is not a kind of store",
}
"""What is typed -> what is said."""
INDEX = "--old index.faiss --new enc --images photos"
DUMP = "--old dump.json --new enc --images photos"
NO_ITEMS = "empty: no shards"
BEFORE_LOADING = {
    f"map {INDEX} --ids other.txt": "index.faiss and photos share no id ('x0', '00.png'); use the same ids in both",
    "gallery build ./gone/photos --model enc": "gone/photos does not exist; there is no gone in",
    "gallery add gallery ./gone/photos --model enc": "gone/photos does not exist; there is no gone in",
    "gallery upgrade gallery --model enc --backfill ./gone/photos": "gone/photos does not exist; there is no gone in",
    "gallery doctor gallery --model enc --images ./gone/photos": "gone/photos does not exist; there is no gone in",
    "map --old index.faiss --new enc --images ./gone/photos": "gone/photos does not exist; there is no gone in",
    "map --old index.faiss --new enc --texts ./gone/texts": "gone/texts does not exist; there is no gone in",
    "serve gallery --model enc --images ./gone/photos": "gone/photos does not exist; there is no gone in",
    "gallery search gallery me --model enc --rerank --images ./gone/photos": "gone/photos does not exist; there is no gone in",
    "embed ./gone/photos --model enc --out new": "./gone/photos does not exist; there is no gone in",
    f"map {DUMP} --vector-name title_vector --ids ids.txt": "dump.json has ids of its own; remove --ids",
    f"map {DUMP} --ids nowhere.txt": "--ids nowhere.txt does not exist",
    f"map {DUMP} --id-column skuu": "--id-column skuu: no such name in dump.json; did you mean 'sku'?",
    f"map {DUMP} --vector-name title_vectr": "--vector-name title_vectr: no such name in dump.json; did you mean 'title_vector'?",
    f"map {DUMP}": "dump.json holds no embeddings; choose title_vector with --vector-name",
    "map --old bare --new bare --ids ids.txt": "bare has ids of its own; remove --ids",
    "map --old gallery --new bare --ids ids.txt": "gallery has ids of its own; remove --ids",
    f"map {INDEX} --ids ids.txt --labels few.txt": "few.txt has 2 classes, but index.faiss has 4 items",
    f"map {INDEX} --ids ids.txt --labels short.txt": "short.txt lists images without classes; write the class after each path",
    f"map {INDEX} --ids ids.txt --searched-classes open": "--searched-classes open needs classes; add them with --labels",
    f"map {INDEX} --ids ids.txt --memory-codec SQ8": "--memory-codec needs a memory; add classes or captions",
    f"map {INDEX} --ids ids.txt --new-model enc": "--new-model enc: --new is already a model; remove --new-model",
    f"map {INDEX} --ids ids.txt --out taken": "taken/note.txt was not made by `xcompat map`",
    "map --old index.faiss --new enc --images empty": NO_ITEMS,
    "embed photos --model enc --out taken": "taken/note.txt was not made by `xcompat embed`",
    "embed empty --model enc --out new": "empty",
    "gallery build photos --model enc --out taken": "taken is not empty (it holds note.txt); choose another folder",
    "gallery build photos --model enc --out gallery --index HNSW8": "was made with index Flat, not HNSW8; remove --index",
    "gallery build photos --model enc --index HNSW8,foo": "--index HNSW8,foo is not a faiss factory string",
    "gallery build empty --model enc": NO_ITEMS,
    "gallery add gallery empty --model enc": NO_ITEMS,
    "gallery upgrade gallery --model enc --backfill empty": NO_ITEMS,
    "gallery doctor gallery --model enc --images empty": NO_ITEMS,
    "gallery search index.faiss shoe --model own --ids short.txt": "index.faiss holds 4 vectors, but there are 2 ids",
    "gallery search gallery shoe --model own --rerank 5 --images empty": NO_ITEMS,
    "evaluate --old bare --new short.txt --map own": "short.txt is not a file of embeddings; use a faiss index, a gallery",
    "serve index.faiss --model own --ids short.txt": "index.faiss holds 4 vectors, but there are 2 ids",
    "serve index.faiss --model own --images photos --ids short.txt": "index.faiss holds 4 vectors, but there are 2 ids",
    "serve gallery --model own --port PORT": "cannot listen at 127.0.0.1:",
    "shadow gallery --queries nothing.txt --old enc --model own": "nothing.txt contains no text",
    "shadow gallery --queries ids.txt --old enc --model own --rerank 3 --images empty": NO_ITEMS,
    "plan empty --items 9 --queries-per-day 9": "empty",
    "export faiss nowhere.faiss --model own --out new.faiss": "the faiss index nowhere.faiss does not exist",
    "export faiss index.faiss --model own --out taken": "taken/note.txt was not made by `xcompat export faiss`",
    "export onnx own --out taken": "taken/note.txt was not made by `xcompat export onnx`",
    "export sentence-transformers own --out taken": "taken/note.txt was not made by `xcompat export sentence-transformers`",
    "migrate plan sqlite:///PLACE/shop.db?table=itmes --model own": "itmes",
    "migrate start sqlite:///PLACE/shop.db?table=itmes --model own": "itmes",
    "migrate verify sqlite:///PLACE/shop.db?table=itmes --model own": "itmes",
}
"""What is typed -> what is said before a model is loaded: those here have no weights."""
REFUSED_BY_TYPER = (
    "train",
    "map --old images",
    "map --old images --new images --seed -1",
    "embed vectors.parquet --dtype float64",
    "serve nowhere --port 99999",
    "export onnx enc --out o --space x",
    "export atlas enc --out o --items 1",
    "gallery search nowhere hello --top-k 0",
    "gallery upgrade nowhere --budgett 1",
    "migrate start foo://x --model a/b --batch 0",
)

TYPED = """
import contextlib, functools, io, json, sys
import typer.main
from xcompat import Fingerprint, cli

typer.main.get_command = functools.cache(typer.main.get_command)  # it builds every command in a tenth of a second
told = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["xcompat", *line.split()]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    told.append([code, said.getvalue(), [name for name in HEAVY if name in sys.modules]])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the mistakes name."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty").mkdir()
    for name, kind in (("enc", "clip"), ("own", "xcompat-ridge")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": kind}))
    eye, ids = np.eye(4, dtype=np.float32), [f"{number:02}.png" for number in range(4)]
    write_embeds(folder / "images", "ab", image=eye[:2])
    write_embeds(folder / "bare", ids, image=eye)
    write_photos(folder / "photos", 4)
    write_index(folder / "index.faiss", eye)
    store(Gallery.create(folder / "gallery", Fingerprint.from_string("old"), dim=4), eye, ids).close()
    sqlite3.connect(folder / "shop.db").close()
    hits = [{"_id": name, "_source": {"sku": "s", "title_vector": [number, 1.0]}} for number, name in enumerate(ids)]
    (folder / "dump.json").write_text(json.dumps({"hits": {"hits": hits}}))
    (folder / "taken").mkdir()
    (folder / "taken" / "note.txt").write_text("mine")
    others = {"ids": ids, "other": ["x0", "x1", "x2", "x3"], "short": ids[:2], "few": ["hat", "cup"], "nothing": []}
    for name, lines in others.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "texts.txt").write_text("a\nb\n")
    (folder / "ran" / "report").mkdir(parents=True)
    (folder / "ended").mkdir()
    (folder / "ended" / "evaluated.json").touch()
    (folder / "served").mkdir()
    (folder / "served" / CURRENT).touch()
    (folder / "vectors.parquet").touch()
    (folder / "damaged.yaml").write_text("a: [")
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00bad")
    for name, old in (("good", "me/old"), ("lost", "./nowhere")):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"method": "procrustes", "old": old, "new": "me/new"}))
    return folder


def test_what_is_declared_is_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of transformers and of the methods says what a recipe may hold: no key is refused that the libraries take."""
    from transformers import TrainingArguments
    from transformers.integrations import integration_utils

    assert set(trainer_fields()) == {field.name for field in fields(TrainingArguments)}
    hints = get_type_hints(TrainingArguments)
    assert all(hint in (Any, hints[name]) for name, hint in trainer_fields().items())
    assert set(trackers()) == set(integration_utils.INTEGRATION_TO_CALLBACK)
    assert method_names() == sorted(METHODS)
    for name, model in METHODS.items():
        assert declared_options(name) == set(usual_options(name)) and is_solved(name) == model.is_solved

    class OwnConfig(METHODS["ridge"].config_class):  # type: ignore[misc,name-defined]
        model_type = "xcompat-own"
        depth: int = 3

    own = type("OwnModel", (METHODS["ridge"],), {"config_class": OwnConfig})
    monkeypatch.setitem(METHODS, "own", own)
    assert "own" in method_names() and is_solved("own")
    assert declared_options("own") == set(usual_options("own")) == {*usual_options("ridge"), "depth"}
    settings = StageRecipe.model_validate({"method": "own", "options": {"depth": 2}}, context=QUICK)
    assert settings.options == {"depth": 2}
    with pytest.raises(ValidationError, match=r"options.depth: Input should be a valid integer"):
        StageRecipe.model_validate({"method": "own", "options": {"depth": "deep"}}, context=QUICK)


def test_several_mistakes_are_a_line_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        require_no_problems(["a\nb: wrong", "c: wrong", "a\nb: wrong"])

    monkeypatch.setattr(sys.modules["xcompat.cli.app"], "app", refuse)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2 and capsys.readouterr().err == "xcompat: a\\nb: wrong\nxcompat: c: wrong\n"


def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StageRecipe(name="pair", method="xbt", training={"report_to": ["trackio", "wandb"]})
    monkeypatch.setattr("xcompat.training.preflight.find_spec", lambda name: None if name == "wandb" else name)
    refuses("pair: training.report_to: wandb is not installed; run `pip install wandb`", check_trackers, settings)
    check_trackers(settings.model_copy(update={"method": "ridge"}))  # is solved, and tracks nothing


def test_a_mistake_is_one_line_before_anything_large_is_imported(place: Path) -> None:
    there = sorted(path.name for path in place.rglob("*"))
    lines = [*MISTAKES, *REFUSED_BY_TYPER]  # which one fresh process is given one after the other
    command = [sys.executable, "-c", f"HEAVY = {HEAVY}\n{TYPED}", json.dumps(lines)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True, timeout=300)
    for line, (code, said, imported) in zip(lines, json.loads(done.stdout), strict=True):
        assert code == 2 and not imported, f"{line} imports {imported}"
        if line in MISTAKES:
            assert said.startswith("xcompat: ") and said.count("\n") == 1 and MISTAKES[line] in said, (line, said)
        else:
            assert "Error" in said, (line, said)
    assert sorted(path.name for path in place.rglob("*")) == there, "nothing is written"


def test_ids_are_counted_before_models_are_announced(place: Path, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert "4 vectors, but there are 2 ids" in run_xcompat.refusal(*f"map {INDEX} --ids short.txt".split())


@pytest.mark.parametrize("line", BEFORE_LOADING)
def test_early_mistakes(line: str, place: Path, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the Hub is asked"))
    monkeypatch.setattr("xcompat.encoders.load_encoder", lambda *_, **__: pytest.fail("a model is loaded"))
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        typed = line.replace("PLACE", str(place)).replace("PORT", str(other.getsockname()[1]))
        code, _, err = run_xcompat(*typed.split())
    said = err.splitlines()[-1]
    assert code == 2 and said.startswith("xcompat: ") and BEFORE_LOADING[line] in said, err
    assert not any((place / name).exists() for name in ("new", "new.faiss", "runs", "gallery_new")), "nothing is written"

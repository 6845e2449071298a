"""Dry runs check real columns and dimensions, list what is missing, and check the rest of a recipe all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset as wds
import yaml

from xcompat.core.errors import XcompatError
from xcompat.data.cache import cache_folder
from xcompat.encoders import EncoderSource
from xcompat.encoders.dimensions import read_embedding_dim, scratch_dim
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.encoders.standins import save_stand_in, small_scratch
from xcompat.methods import METHODS
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.training import stage
from xcompat.training.compare import dry_run_comparison
from xcompat.training.data_checks import check_data
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.input_checks import find_missing_paths
from xcompat.training.recipe import Recipe, parse_recipe
from xcompat.training.stage_recipe import StageRecipe

pytestmark = pytest.mark.usefixtures("undrawn")
DATA = {"texts": [{"path": "some/texts"}], "test": {"path": "some/pairs"}}
RAW: dict[str, Any] = {"method": "ridge", "old": "some/old", "new": "some/new", "data": DATA}


def recipe_of(tmp_path: Path, **changes: Any) -> Recipe:
    places = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache")}
    return parse_recipe({**RAW, **places, **changes}, "demo", "demo.yaml")


def test_every_missing_path_is_listed_and_the_rest_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shot = {"images": {"path": "x.tar", "label_column": "cls", "captions": False}, "classes": "c.txt"}
    data = {"texts": [{"path": "texts.txt"}, {"path": "more.txt"}], "test": {"path": "some/pairs"}, "zero_shot": shot}
    missing = dry_run_recipe(recipe_of(tmp_path, old="./no/such/model", data=data))
    wanted = ["old", "data.texts.0.path", "data.texts.1.path", "data.zero_shot.images.path", "data.zero_shot.classes"]
    assert [line.split(": ")[1] for line in missing] == wanted
    printed = capsys.readouterr().out
    assert all(line in printed for line in missing)
    assert "demo runs from end to end on stand-ins; before training, provide the 5 paths listed above" in printed
    options, data = {"adapters": {"lora": {"targets": ["c_fc"]}}}, {"pairs": {"path": "some/pairs"}}
    recipe = recipe_of(tmp_path, method="direct", old="./no/such/model", options=options, data=data)
    with pytest.raises(XcompatError, match="match no linear layer"):
        dry_run_recipe(recipe)


def test_missing_texts_and_templates_are_listed(tmp_path: Path) -> None:
    texts = {"queries": {"path": "queries.jsonl"}, "passages": {"path": "passages.jsonl"}, "qrels": "qrels.tsv"}
    assert len(dry_run_recipe(recipe_of(tmp_path, data={"texts": [{"path": "some/texts"}], "judged_texts": texts}))) == 3
    templates = {"images": {"path": "faces.tar"}, "members": "members.txt", "pairs": "pairs.txt"}
    settings = StageRecipe.model_validate({"data": {"templates": templates}}, context={"quick": True})
    check_data(settings)
    assert len(find_missing_paths(settings)[1]) == 3


def test_stages_share_missing_paths_and_frozen_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = []

    def load(source: EncoderSource, *arguments: Any) -> Embedder:
        loaded.append(Path(source.name).name)
        return load_embedder(source, *arguments)

    monkeypatch.setattr(stage, "load_embedder", load)
    data = {"texts": [{"path": "texts.txt"}], "test": {"path": "some/pairs"}}
    stages = [{"name": name, "method": name} for name in ("ridge", "procrustes")]
    missing = dry_run_recipe(recipe_of(tmp_path, data=data, stages=stages))
    assert len(missing) == 1 and missing[0].startswith("ridge: data.texts.0.path: texts.txt does not exist")
    assert "(also in 1 more stages)" in capsys.readouterr().out
    assert sorted(loaded) == ["some--new", "some--old"], "each once"


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_the_exit_code_tells_a_wrong_recipe_from_missing_data(
    verb: str, tmp_path: Path, run_xcompat: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing data leave 0: the recipe is right. Whatever is wrong in it, or in data that are there, gives 2."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "demo.yaml"
    recipe.write_text(yaml.safe_dump(RAW | {"data": {"texts": [{"path": "texts.txt"}], "test": {"path": "some/pairs"}}}))
    code, out, error = run_xcompat(verb, recipe, "--dry-run")
    assert code == 0 and "ridge: data.texts.0.path: texts.txt does not exist" in out, error
    assert "before training, provide the path listed above" in out
    (tmp_path / "texts.txt").write_text("a dog\n")
    code, _, error = run_xcompat(verb, recipe, "data.texts.0.text_column=body", "--dry-run")
    assert code == 2 and error.startswith("xcompat: ridge: data.texts.0: texts.txt is plain text"), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.yaml", "texts.txt"], "nothing is written"


def test_a_comparison_needs_a_judged_stage(tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="has no stage to compare"):
        dry_run_comparison(recipe_of(tmp_path, evaluation=None))


@pytest.fixture
def forms(tmp_path: Path, pairs_folder: str) -> dict[str, str]:
    """Return the same images with names and classes as a folder, a Parquet file and shards, and texts in several files."""
    table = {"picture": [], "title": [], "kind": []}
    folder = Path(shutil.copytree(pairs_folder, tmp_path / "folder"))
    with wds.TarWriter(str(tmp_path / "shard.tar")) as shard:
        for row in range(8):
            image = (folder / f"{row}.png").read_bytes()
            shard.write({"__key__": str(row), "png": image, "json": {"title": f"thing {row}"}, "cls": row % 2})
            for key, value in zip(table, (image, f"thing {row}", f"kind {row % 2}"), strict=True):
                table[key].append(value)
    (folder / "captions.csv").unlink()
    lines = ["image,title,kind", *(f"{row}.png,thing {row},kind {row % 2}" for row in range(8))]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.table(table), tmp_path / "table.parquet")
    texts = [{"id": str(row), "body": f"text {row}", "ask": f"ask {row}"} for row in range(8)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    (tmp_path / "qrels.txt").write_text("".join(f"{row} 0 {row} 1\n" for row in range(8)))
    names = {"folder": "folder", "parquet": "table.parquet", "shards": "shard.tar", "texts": "texts.jsonl", "qrels": "qrels.txt"}
    return {name: str(tmp_path / file) for name, file in names.items()}


RIGHT = {
    "folder": {"caption_column": "title", "label_column": "kind"},
    "parquet": {"caption_column": "title", "label_column": "kind", "image_column": "picture"},
    "shards": {"caption_column": "json.title", "label_column": "cls"},
}


@pytest.mark.parametrize("form", RIGHT)
@pytest.mark.parametrize("key", ["pairs", "test", "remembered", "images", "queries", "gallery", "zero_shot"])
def test_a_column_that_does_not_exist_is_refused(form: str, key: str, forms: dict[str, str], tmp_path: Path) -> None:
    of_classes = key in ("images", "queries", "gallery", "zero_shot")
    column = "label_column" if of_classes else "caption_column"
    right = {"path": forms[form], **RIGHT[form]} | ({"captions": False} if key == "zero_shot" else {})
    if not of_classes:
        right.pop("label_column")
    (tmp_path / "classes.txt").write_text("kind 0\nkind 1\n")
    for source in (right, right | {column: "nowhere"}):
        named = {"images": source, "classes": str(tmp_path / "classes.txt")} if key == "zero_shot" else source
        data: dict[str, Any] = {"texts": [], key: named}
        if key == "gallery":
            data["queries"] = right
        checked = StageRecipe.model_validate({"data": data}, context={"quick": True}).data
        settings = StageRecipe.model_construct(name="it", data=checked)
        if source is right:
            check_data(settings)
        else:
            with pytest.raises(XcompatError, match=rf"it: data\.{key}: .*(nowhere|no sample)"):
                check_data(settings)


def texts(column: str) -> dict[str, str]:
    return {"path": "texts", "text_column": column}


ASK, BODY = {"path": "texts", "query_column": "ask"}, {"passages": texts("body")}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"texts": [texts("body")]}, {"texts": [texts("nowhere")]}),
        ({"texts": [{"path": "parquet", "text_column": "title"}]}, {"texts": [{"path": "parquet", "text_column": "nowhere"}]}),
        ({"text_pairs": {**ASK, "passage_column": "body"}}, {"text_pairs": {**ASK, "passage_column": "nowhere"}}),
        ({"judged_texts": {"queries": texts("ask"), **BODY}}, {"judged_texts": {"queries": texts("asked"), **BODY}}),
    ],
)
def test_a_column_of_texts_that_does_not_exist_is_refused(
    right: dict[str, Any], wrong: dict[str, Any], forms: dict[str, str]
) -> None:
    def check(data: dict[str, Any]) -> None:
        filled = json.loads(json.dumps(data).replace('"path": "texts"', f'"path": "{forms["texts"]}"'))
        filled = json.loads(json.dumps(filled).replace('"path": "parquet"', f'"path": "{forms["parquet"]}"'))
        if "judged_texts" in filled:
            filled["judged_texts"]["qrels"] = forms["qrels"]
        described = StageRecipe.model_validate({"data": filled}, context={"quick": True}).data
        check_data(StageRecipe.model_construct(name="it", data=described))

    check(right)
    with pytest.raises(XcompatError, match=r"it: data\.\w+(\.0)?: .*column"):
        check(wrong)


def test_a_dry_run_checks_columns_and_leaves_no_cache(forms: dict[str, str], tmp_path: Path) -> None:
    before = sorted(cache_folder().iterdir())
    data: dict[str, Any] = {"texts": [{"path": forms["texts"], "text_column": "body"}]}
    data["test"] = {"path": forms["folder"], "caption_column": "title"}
    assert dry_run_recipe(recipe_of(tmp_path, data=data)) == []
    data["test"]["caption_column"] = "caption"  # type: ignore[index]
    with pytest.raises(XcompatError, match=r"ridge: data\.test: .* has no column 'caption'"):
        dry_run_recipe(recipe_of(tmp_path, data=data))
    assert sorted(cache_folder().iterdir()) == before


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("openai/clip-vit-base-patch32", 512),
        ("openai/clip-vit-large-patch14", 768),
        ("hf-hub:laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 1024),
        ("timm/resnet50.a1_in1k", 2048),
        ("nobody/knows-this", None),
        ("./nowhere", None),
    ],
)
def test_dimensions_of_known_names_need_no_download(name: str, dim: int | None) -> None:
    assert read_embedding_dim(EncoderSource(name=name)) == dim


def test_dimensions_are_read_without_weights(folder_of: dict[str, str], image_folder_of: dict[str, str], tmp_path: Path) -> None:
    text = save_stand_in(tmp_path / "text", "sentence-transformers", 24)
    for folder, dim in [*((each, 16) for each in (folder_of | image_folder_of).values()), (text, 24)]:
        copy = Path(shutil.copytree(folder, tmp_path / f"copy-{Path(folder).name}"))
        for weights in copy.rglob("*.safetensors"):
            weights.unlink()
        assert read_embedding_dim(EncoderSource(name=str(copy))) == dim, folder
    assert scratch_dim(ScratchSource(model={"model_type": "resnet", "depths": [3, 4, 6, 3]}, image_size=64)) == 2048


def classes_of(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    images = {"path": "some/images"}
    data = {"images": images, "queries": {"path": "some/queries"}}
    return {"data": data, "new": {"name": "some/new", "model_type": "resnet"}, **changes}


def test_real_dimensions_decide_not_those_of_stand_ins(tmp_path: Path) -> None:
    """Old embeddings of 256 dimensions and a new backbone of 512: both are known from configurations alone."""
    old = save_stand_in(tmp_path / "old", "resnet", 256)
    new = save_stand_in(tmp_path / "new", "resnet", 512)
    for weights in (*Path(old).glob("*.safetensors"), *Path(new).glob("*.safetensors")):
        weights.unlink()
    fits = classes_of(tmp_path, method="mixbct", old=old, new=new, options={"dim": 256})
    assert dry_run_recipe(recipe_of(tmp_path, **fits)) == []
    with pytest.raises(XcompatError, match="256"):
        dry_run_recipe(recipe_of(tmp_path, **{**fits, "options": {"dim": 128}}))


def test_options_fit_models_of_unknown_dimensions(tmp_path: Path) -> None:
    changes = classes_of(tmp_path, method="mixbct", old={"name": "some/old", "model_type": "resnet"}, options={"dim": 256})
    assert dry_run_recipe(recipe_of(tmp_path, **changes)) == []
    changes = classes_of(tmp_path, memory="classes", memory_codec="PQ64", method="ridge", old="some/old", new="some/new")
    assert dry_run_recipe(recipe_of(tmp_path, **changes)) == []


def test_stored_embeddings_have_their_own_dimension(tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    np.save(folder / "image_embeds.npy", np.eye(48, dtype=np.float32)[:20])
    (folder / "image_ids.txt").write_text("".join(f"{row}\n" for row in range(20)))
    changes = classes_of(tmp_path, method="bct", old=str(folder), options={"dim": 40}, evaluation=None)
    with pytest.raises(XcompatError, match="48"):
        dry_run_recipe(recipe_of(tmp_path, **changes))
    assert dry_run_recipe(recipe_of(tmp_path, **{**changes, "options": {"dim": 48}})) == []


@pytest.mark.parametrize(
    ("method", "solve", "options", "solved", "wrong", "message"),
    [
        ("lambda_orthogonality", "solve", {"strength": 2.0}, {"strength": 0.0}, {"strength": -1.0}, r"options\.strength is -1"),
        ("mini_vec2vec", "fit", {"rounds": 1}, {"runs": 2, "rounds": 1, "clusters": 20}, {"runs": 0}, "runs"),
    ],
)
def test_searches_are_short_but_still_checked(
    method: str,
    solve: str,
    options: dict[str, float],
    solved: dict[str, float],
    wrong: dict[str, float],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(model: CompatModel, _: object) -> None:
        raise RuntimeError(str({name: getattr(model.config, name) for name in solved}))

    monkeypatch.setattr(METHODS[method], solve, stop)
    with pytest.raises(RuntimeError, match=f"^{solved}$"):
        dry_run_recipe(recipe_of(tmp_path, method=method, options=options))
    with pytest.raises(XcompatError, match=message):
        dry_run_recipe(recipe_of(tmp_path, method=method, options=wrong))


def test_large_architectures_have_small_stand_ins() -> None:
    for model in (
        {"model_type": "alexnet"},
        {"model_type": "resnet"},
        {"model_type": "timm_wrapper", "architecture": "vgg13_bn"},
    ):
        encoder, _ = encoder_from_scratch(small_scratch(ScratchSource(model=model, image_size=224), 16))
        assert sum(weights.numel() for weights in encoder.parameters()) < 50_000, model

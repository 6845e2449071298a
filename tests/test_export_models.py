"""Exports to sentence-transformers, ONNX, Embedding Atlas and faiss embed and find what the model embeds and finds."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
import onnxruntime
import pyarrow.parquet as pq
import pytest
import torch
import warm
from conftest import TEXTS, Run, refuses, store, unit
from numpy.typing import NDArray
from PIL import Image
from schedule import mostly_nightly
from sentence_transformers import SentenceTransformer

from xcompat import Fingerprint, XcompatError
from xcompat.core.files import read_json, write_json
from xcompat.data.images import open_image
from xcompat.encoders import load_processor
from xcompat.encoders.standins import save_stand_in
from xcompat.export import commands, onnx_towers, sentence_builtin, to_faiss, to_onnx, to_sentence_transformers
from xcompat.export.sentence_module import CompatModule
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.models.query_memory import LearnedTransform, QueryMemory
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.retrieval.index_gallery import open_index
from xcompat.training.atlas import to_atlas
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

IMAGE_TEXT = {"clip", "siglip", "blip", "open_clip", "vision-text-dual-encoder"}
OLD = describe_old(Fingerprint.from_string("old"), dim=8)
ADAPTERS = {"lora": {"rank": 2}, "prompts": 2}
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "xbt": ("xbt", "clip", "old", {"adapters": ADAPTERS}),
    "xbt in its own space": ("xbt", "clip", "own", {"adapters": ADAPTERS}),
    "direct on SigLIP": ("direct", "siglip", "old", {}),
    "BLIP, which masks padding": ("query_map", "blip", "old", {"shape": "residual"}),
    "query map": ("query_map", "clip", "old", {}),
    "remembering": ("query_map", "open_clip", "old", {"memory": {"entries": 5, "sharpness": 20.0, "share": 0.5}}),
    "closed form": ("procrustes", "vision-text-dual-encoder", "old", {}),
    "a map of galleries": ("fct", "clip", "own", {}),
    "penultimate, images alone": ("query_map", "clip", "old", {"input": "penultimate"}),
    "trained on classes": ("bct", "resnet", "old", {"classes": ["cat", "dog"]}),
    "map of images alone": ("ridge", "mobilenet_v2", "old", {}),
    "no old model": ("independent", "clip", "own", {}),
    "LoRA, merged": ("xbt", "clip", "old", {"adapters": {"lora": {"rank": 2}}}),
    "φ alone": ("projection", "siglip", "old", {}),
    "a projection of its own": ("bct", "vit", "old", {"classes": ["cat", "dog"], "dim": 12}),
    "images alone of a CLIP": ("independent", "clip", "own", {"classes": ["cat", "dog"], "dim": 12}),
    "pooled by itself": ("independent", "mobilenet_v1", "own", {"classes": ["cat", "dog"]}),
    "parts turned": ("bt2", "resnet", "old", {"classes": ["cat", "dog"], "extra_dim": 4, "dim": 12}),
    "timm": ("ridge", "timm_wrapper", "old", {}),
}
IMAGES_ALONE = {
    case for case, (method, encoder, _, options) in CASES.items() if "classes" in options or encoder not in IMAGE_TEXT
} | {"penultimate, images alone"}
OWN_MODULE = {"xbt", "xbt in its own space", "BLIP, which masks padding", "remembering"}
OWN_MODULE |= {"penultimate, images alone", "parts turned", "timm"}
"""Those that sentence-transformers' own modules cannot express."""
IN_ONNX = ["xbt", "xbt in its own space", "BLIP, which masks padding", "direct on SigLIP", "trained on classes"]
IN_ONNX += ["penultimate, images alone", "remembering", "timm"]
DAILY = {"xbt", "remembering", "closed form", "penultimate, images alone", "LoRA, merged", "parts turned", "timm", "query map"}
LONG = ["A Red SHOE", "many words, more than the tower reads, " * 9, ""]
FRESH = """
import json, sys
from pathlib import Path
import numpy as np
from PIL import Image
folder, names, texts, flag = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
if not flag:
    sys.modules["xcompat"] = None
from sentence_transformers import SentenceTransformer
images = sorted(folder.glob("*.png"))
for name in names:
    model = SentenceTransformer(str(folder / name), **({"trust_remote_code": True} if flag else {}), device="cpu")
    opened = [Image.open(path) for path in images]
    paths = [str(path) for path, image in zip(images, opened) if image.mode != "RGBA"]
    found = {"images": model.encode(opened, batch_size=3), "paths": model.encode(paths), "dim": model.get_embedding_dimension()}
    if model.supports("text"):
        found["texts"] = model.encode(texts, batch_size=3)
    np.savez(folder / f"{name}.npz", **found)
"""


def build(case: str, folder: str) -> CompatModel:
    method, _, _, options = CASES[case]
    old = OLD if METHODS[method].compares_with_old else None
    model = METHODS[method].from_encoder(folder, old=old, **options)
    for name, parameter in model.named_parameters():
        if "lora_" in name or not name.startswith("encoder."):
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    if model.memory is not None:
        for buffer in model.memory.buffers():
            buffer.add_(0.3 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2)))
    return model


@torch.no_grad()
def expected(case: str, model: CompatModel, images: list[Image.Image]) -> dict[str, NDArray[np.float32]]:
    own = {"images": model.embed_images(model.processor.images([open_image(image) for image in images]))}
    if case not in IMAGES_ALONE:
        own["texts"] = model.embed_texts(**model.processor.texts(TEXTS + LONG))
    return {kind: (model.to_space(embeds) if CASES[case][2] == "old" else embeds).numpy() for kind, embeds in own.items()}


Embedded = dict[str, NDArray[np.float32]]


class Exported(dict[str, tuple[Embedded, Embedded]]):
    """What each model embeds here, and what sentence-transformers embeds elsewhere, when all encoders are gone."""

    def __init__(self, folder: Path, encoders: dict[str, str], images: list[Image.Image]) -> None:
        self.folder, self.encoders, self.pictures = folder, encoders, images
        for number, image in enumerate(images):
            image.save(folder / f"{number}.png")

    def __missing__(self, case: str) -> tuple[Embedded, Embedded]:
        """Export the model and all that run as often as it does, and embed with them in a new process."""
        group = [other for other in CASES if (other in DAILY) == (case in DAILY)]
        names, ours = {other: f"case-{number}" for number, other in enumerate(CASES)}, {}
        for other in group:
            _, architecture, space, _ = CASES[other]
            shutil.copytree(self.encoders[architecture], self.folder / "encoder")
            model = build(other, str(self.folder / "encoder"))
            ours[other] = expected(other, model, self.pictures)
            assert to_sentence_transformers(model, self.folder / names[other], space) is (other not in OWN_MODULE)
            shutil.rmtree(self.folder / "encoder")
        for flag in (False, True):
            chosen = [names[other] for other in group if (other in OWN_MODULE) is flag]
            arguments = [str(self.folder), *map(json.dumps, (chosen, TEXTS + LONG, flag))]
            done = warm.run("-c", FRESH, *arguments, folder=self.folder)
            assert done.returncode == 0, done.stderr
        self |= {other: (ours[other], dict(np.load(self.folder / f"{names[other]}.npz"))) for other in group}
        return self[case]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, encoder_of: dict[str, str], images: list[Image.Image]) -> Exported:
    odd = [images[0].resize((31, 200)), images[1].convert("L"), images[2].convert("P"), images[3].convert("1").resize((7, 3))]
    transparent = images[0].convert("RGBA")
    transparent.putalpha(images[1].convert("L"))
    return Exported(tmp_path_factory.mktemp("exported"), encoder_of, [*images, *odd, transparent])


@pytest.mark.parametrize("case", mostly_nightly(CASES, DAILY.__contains__))
def test_a_fresh_process_embeds_the_same(case: str, both: Exported) -> None:
    ours, theirs = both[case]
    assert ("texts" in theirs) is (case not in IMAGES_ALONE)
    for kind in ours:
        np.testing.assert_allclose(theirs[kind], ours[kind], atol=1e-5)
    np.testing.assert_allclose(theirs["paths"], ours["images"][:-1], atol=1e-5)  # but for the transparent one
    assert theirs["dim"] == ours["images"].shape[1]


def test_the_module_loads_without_the_flag(folder_of: dict[str, str], tmp_path: Path, images: list[Image.Image]) -> None:
    model = build("xbt", folder_of["clip"])
    to_sentence_transformers(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.py")), "no code is copied"
    sentences = SentenceTransformer(modules=[CompatModule.load(str(tmp_path / "out"))], device="cpu")
    ours = expected("xbt", model, images)
    np.testing.assert_allclose(sentences.encode(TEXTS + LONG), ours["texts"], atol=1e-5)
    np.testing.assert_allclose(sentences.encode([np.asarray(image) for image in images]), ours["images"], atol=1e-5)
    np.testing.assert_allclose(sentences.encode("shoe", prompt="a red "), sentences.encode("a red shoe"), atol=1e-6)
    assert load_checkpoint(str(tmp_path / "out")).fingerprint() == model.fingerprint()
    sentences.save(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS + LONG), ours["texts"], atol=1e-5)


@pytest.mark.parametrize("adapters", [ADAPTERS, None])
def test_command_line(adapters: dict[str, Any] | None, folder_of: dict[str, str], tmp_path: Path, run_xcompat: Run) -> None:
    METHODS["xbt"].from_encoder(folder_of["clip"], old=OLD, adapters=adapters).export(tmp_path / "run" / "model")
    said = run_xcompat.output("export", "sentence-transformers", tmp_path / "run", "--out", tmp_path / "out", "--space", "own")
    assert ("trust_remote_code=True) embeds in the own space, where xcompat" if adapters else "out') embeds in the own") in said
    sentences = SentenceTransformer(str(tmp_path / "out"), trust_remote_code=adapters is not None, device="cpu")
    assert sentences.get_embedding_dimension() == 16


def test_a_map_over_a_model_of_ours_is_one_row(folder_of: dict[str, str], tmp_path: Path, images: list[Image.Image]) -> None:
    direct = METHODS["direct"].from_encoder(folder_of["clip"], old=OLD)
    direct.export(tmp_path / "inner")
    embedder = load_embedder(str(tmp_path / "inner"))
    described = {"library": "xcompat", "name": str(tmp_path / "inner"), "fingerprint": embedder.fingerprint.digest, "dim": 8}
    config = METHODS["ridge"].config_class(old=OLD, embedding_dim=8, encoder=described)
    ridge = METHODS["ridge"](config)
    ridge.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    assert to_sentence_transformers(ridge, tmp_path / "out")
    ours = expected("query map", ridge, images)
    np.testing.assert_allclose(SentenceTransformer(str(tmp_path / "out")).encode(TEXTS + LONG), ours["texts"], atol=1e-5)


def test_half_precision_is_written_in_float32(folder_of: dict[str, str], tmp_path: Path, images: list[Image.Image]) -> None:
    model = build("LoRA, merged", folder_of["clip"])
    model.save_pretrained(tmp_path / "model")
    half = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert to_sentence_transformers(half, tmp_path / "out")
    sentences, ours = SentenceTransformer(str(tmp_path / "out"), device="cpu"), expected("LoRA, merged", model, images)
    assert {parameter.dtype for parameter in sentences.parameters()} == {torch.float32}
    np.testing.assert_allclose(sentences.encode(TEXTS + LONG), ours["texts"], atol=2e-2)
    np.testing.assert_allclose(sentences.encode(images), ours["images"], atol=2e-2)


def test_unequal_embeds_keep_the_own_module(folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentence_builtin, "_row", lambda layers: [])
    model = METHODS["bct"].from_encoder(folder_of["clip"], old=OLD, classes=["cat", "dog"], dim=16)
    assert not to_sentence_transformers(model, tmp_path / "out", "own")
    assert load_checkpoint(str(tmp_path / "out")).fingerprint() == model.fingerprint()


def test_what_cannot_be_exported_is_refused(folder_of: dict[str, str], tmp_path: Path) -> None:
    for case in ("a map of galleries", "no old model"):
        with pytest.raises(XcompatError, match="does not map queries into an old space; export the model with space='own'"):
            to_sentence_transformers(build(case, folder_of["clip"]), tmp_path / "out")
    config = METHODS["ridge"].config_class(old=OLD, embedding_dim=16)
    refuses("fitted on embeddings only", to_sentence_transformers, METHODS["ridge"](config), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())
    with pytest.raises(XcompatError, match="cannot export the image tower with batches of any size: .*static shape"):
        to_onnx(build("timm", folder_of["siglip2"]), tmp_path / "out")
    refuses("does not map queries into an old space", to_onnx, build("a map of galleries", folder_of["clip"]), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def run_onnx(path: Path, batch: dict[str, torch.Tensor]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (embeds,) = session.run(["embeds"], {name: tensor.numpy() for name, tensor in batch.items()})
    return embeds


@pytest.mark.parametrize("case", mostly_nightly(IN_ONNX, ("xbt", "trained on classes").__contains__))
@torch.no_grad()
def test_onnxruntime_embeds_what_the_model_embeds(
    case: str, encoder_of: dict[str, str], images: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, architecture, space, _ = CASES[case]
    model = build(case, encoder_of[architecture])
    fingerprint = model.fingerprint()
    to_onnx(model, tmp_path / "out", space)  # type: ignore[arg-type]
    about = json.loads((tmp_path / "out" / "xcompat_onnx.json").read_text())
    assert model.fingerprint() == fingerprint, "merged was a copy"
    assert about["fingerprint"] == fingerprint.digest and about["dim"] == (8 if space == "old" else 16)
    assert [found["fingerprint"] for found in about["searches"]] == [OLD["fingerprint"] if space == "old" else fingerprint.digest]
    pixels = model.processor.images(images)
    own = model.embed_images(pixels)
    expected = model.to_space(own) if space == "old" else own
    np.testing.assert_allclose(run_onnx(tmp_path / "out" / "image.onnx", {"pixel_values": pixels}), expected, atol=1e-4)
    assert about["image"]["inputs"]["pixel_values"]["shape"] == ["batch", 3, *about["image"]["size"]]
    photo = Image.effect_noise((300, 200), 80).convert("RGB")
    photo.putalpha(Image.linear_gradient("L").resize((300, 200)))  # what is transparent counts as white
    photo.save(tmp_path / "out" / "photo.jpg", format="PNG")
    own = model.embed_images(model.processor.images([open_image(str(tmp_path / "out" / "photo.jpg"))]))
    monkeypatch.chdir(tmp_path / "out")
    readme = (tmp_path / "out" / "README.md").read_text()
    if lines := re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        names: dict[str, Any] = {}
        exec(lines[0], names)  # noqa: S102 - what the folder tells its user to run
        np.testing.assert_allclose(names["embeds"], model.to_space(own) if space == "old" else own, atol=1e-4)
    assert bool(lines) is (architecture not in ("timm_wrapper", "open_clip")) and "resize" in readme
    assert (tmp_path / "out" / "text.onnx").exists() is ("text" in about) is (case not in IMAGES_ALONE)
    if "text" not in about:
        return
    for texts in (TEXTS, TEXTS[:1], [" ".join(TEXTS * 5)]):
        batch = model.processor.texts(texts)
        assert set(about["text"]["inputs"]) == set(batch)
        own = model.embed_texts(**batch)
        expected = model.to_space(own) if space == "old" else own
        np.testing.assert_allclose(run_onnx(tmp_path / "out" / "text.onnx", batch), expected, atol=1e-4)
    length = about["text"]["inputs"]["input_ids"]["shape"][1]
    assert length == (model.processor.max_length if about["text"]["pad_to_max_length"] else "length")


def test_onnx_on_the_command_line_with_its_preprocessing(
    folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_xcompat: Run
) -> None:
    """Towers are not exported here, which takes seconds."""
    written = {"inputs": {}, "outputs": {}}
    monkeypatch.setattr(onnx_towers, "_write", lambda *given: given[-1].touch() or written | {"file": given[-1].name})
    model = build("closed form", folder_of["open_clip"])
    model.export(tmp_path / "run" / "model")
    out = run_xcompat.output("export", "onnx", tmp_path / "run", "--out", tmp_path / "out")
    assert "image.onnx and text.onnx embed in the old space" in out
    processor = load_processor(model.config.encoder, str(tmp_path / "out"))
    assert processor.tokenize(TEXTS) == model.processor.tokenize(TEXTS)
    assert torch.equal(processor.images(images), model.processor.images(images))


def test_a_file_that_differs_is_removed(image_folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_towers, "TOLERANCE", 1e-12)
    model = build("map of images alone", image_folder_of["mobilenet_v1"])
    with pytest.raises(XcompatError, match="embeddings of the image tower in ONNX differ by .* from PyTorch's, more than 1e-12"):
        to_onnx(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_half_precision_is_made_whole_and_prompts_are_said(tmp_path: Path) -> None:
    new = load_embedder(save_stand_in(tmp_path / "new", "sentence-transformers", 16, 1))
    config = METHODS["ridge"].config_class(encoder=new.describe_encoder(), old=OLD, embedding_dim=new.dim)
    rows = torch.nn.functional.normalize(torch.randn(40, 24, generator=torch.Generator().manual_seed(0)), dim=-1)
    model = METHODS["ridge"](config).fit([(rows[:, :16], rows[:, 16:])])
    to_onnx(model.half(), tmp_path / "out")
    batch = model.processor.texts(TEXTS)
    expected = model.to_space(model.embed_texts(**batch))
    np.testing.assert_allclose(run_onnx(tmp_path / "out" / "text.onnx", batch), expected, atol=2e-3)
    assert model.dtype == torch.float16, "the model itself stays as it is"
    readme = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert 'Put `"query: "` before a query, as in training.' in readme, "the stand-in has no other prompt"


@pytest.fixture(scope="module")
def finished(
    folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run = tmp_path_factory.mktemp("atlas") / "run"
    raw: dict[str, Any] = {"output_dir": str(run), "cache_dir": str(run / "cache"), "method": "ridge"}
    raw |= {"old": old_folder, "new": folder_of["clip"], "evaluation": {"resamples": 100, "examples": 0}}
    raw["data"] = {"texts": [{"path": texts_file}], "test": {"path": pairs_folder}}
    run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    return run


def test_items_stand_where_both_models_place_them(finished: Path, pairs_folder: str, tmp_path: Path, run_xcompat: Run) -> None:
    out = tmp_path / "atlas.parquet"
    run_xcompat.output("export", "atlas", finished, "--out", out, "--items", 500)
    rows = pq.read_table(out).to_pylist()
    report = load_report(finished)
    panel = next(panel for panel in report.panels if panel.title == "Old space")
    placed = np.array([[row["projection_x"], row["projection_y"]] for row in rows])
    np.testing.assert_allclose(placed, np.concatenate([points for _, points in panel.series]), atol=1e-3)
    assert {(row["side"], row["kind"]) for row in rows} == {(s, k) for s in ("old", "new") for k in ("image", "text")}
    captions = {line for row in rows if row["kind"] == "image" for line in row["text"].split("; ")}
    assert {row["text"] for row in rows if row["kind"] == "text"} <= captions
    for kind, direction in (("image", "image-to-text"), ("text", "text-to-image")):
        ranks = {who: report.ranks[who, "old", direction] for who in ("old", "new")}
        pairs = set(zip(*(ranks[who].tolist() for who in ("old", "new")), strict=True))
        for row in rows:
            if row["kind"] == kind:
                assert (row["rank_old"] - 1, row["rank_new"] - 1) in pairs
                assert row["gain"] == pytest.approx(1 / row["rank_new"] - 1 / row["rank_old"])
    first = next(row for row in rows if row["kind"] == "image")
    with Image.open(io.BytesIO(first["image"]["bytes"])) as thumbnail, Image.open(Path(pairs_folder) / first["id"]) as stored:
        assert np.array_equal(np.asarray(thumbnail), np.asarray(stored.convert("RGB")))
    assert all(row["image"] is None for row in rows if row["kind"] == "text")
    refuses("contains no model", to_atlas, finished / "report", tmp_path / "out.parquet", 10, 0, overwrite=False)
    out.write_text("mine")
    refuses("atlas.parquet", to_atlas, finished, out, 10, 0, overwrite=False)
    assert out.read_text() == "mine"


NEW_DIM, OLD_DIM, ROWS = 16, 8, 1000
LINEAR = ("procrustes", "ridge", "query_map")
PLAIN_FAISS = """
import sys, faiss, numpy as np
assert "xcompat" not in sys.modules
scores, rows = faiss.read_index(sys.argv[1]).search(np.load(sys.argv[2]), 10)
np.savez(sys.argv[3], scores=scores, rows=rows)
"""


def build_map(method: str, **options: Any) -> CompatModel:
    """Return a map whose scale and bias are far from those of a rotation."""
    old = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    model_class = METHODS[method]
    model = model_class(model_class.config_class(old=old, embedding_dim=NEW_DIM, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.eval()


def write_old_index(path: Path, factory: str, metric: int = faiss.METRIC_INNER_PRODUCT) -> faiss.Index:
    vectors = unit(ROWS, OLD_DIM, seed=1).numpy()
    index = faiss.index_factory(OLD_DIM, factory, metric)
    index.train(vectors)
    if factory.startswith("IDMap"):
        index.add_with_ids(vectors, np.arange(ROWS) * 3 + 7)
    else:
        index.add(vectors)
    faiss.write_index(index, str(path))
    return index


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF8,Flat", "IDMap,Flat", "OPQ4_8,IVF4,Flat"])
@pytest.mark.parametrize("method", mostly_nightly(LINEAR, "query_map".__eq__))
def test_ranks_and_scores_are_those_of_the_view(method: str, factory: str, metric: int, tmp_path: Path) -> None:
    model = build_map(method)
    plain = write_old_index(tmp_path / "old.faiss", factory, metric)
    to_faiss(model, tmp_path / "old.faiss", tmp_path / "new.faiss")
    queries = unit(20, NEW_DIM, seed=2)
    with torch.no_grad():
        expected_scores, expected_rows = plain.search(model.to_space(queries).numpy(), 10)
    upgraded = faiss.read_index(str(tmp_path / "new.faiss"))
    scores, rows = upgraded.search(queries.numpy(), 10)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-5)
    assert (upgraded.d, upgraded.ntotal, upgraded.metric_type) == (NEW_DIM, ROWS, metric)


def with_memory(model: CompatModel, entries: int) -> CompatModel:
    """Return the model with queries that wear a metric which moves and bends them, and remember noise."""
    memory = QueryMemory(NEW_DIM, OLD_DIM, entries)
    covariance = torch.diag(torch.arange(1.0, OLD_DIM + 1))
    memory.metric = LearnedTransform.solve(0.2 * unit(1, OLD_DIM, seed=5)[0], covariance, power=0.5, damping=0.1)
    memory.keys_KD, memory.values_Kd = unit(entries, NEW_DIM, seed=6), unit(entries, OLD_DIM, seed=7)
    return model.remember(memory)


@pytest.mark.parametrize("dim", [OLD_DIM, OLD_DIM // 2])
def test_a_gallery_of_an_older_version_is_asked_without_the_metric(dim: int, tmp_path: Path) -> None:
    """The metric was learned for the old model's gallery; an earlier one of fewer dimensions has the first of its own."""
    older = Fingerprint.from_string("older")
    model = with_memory(build_map("ridge"), 0)
    assert model.config.old is not None
    model.config.old["compatible_with"] = [{"name": older.name, "fingerprint": older.digest, "dim": dim}]
    index = faiss.IndexFlatIP(dim)
    index.add(unit(ROWS, dim, seed=1).numpy())
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    gallery = Gallery.from_faiss(tmp_path / "gallery", tmp_path / "old.faiss", [str(row) for row in range(ROWS)], older)
    to_faiss(model, gallery.path, tmp_path / "new.faiss")
    queries = unit(20, NEW_DIM, seed=2).numpy()
    _, rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries, 10)
    assert rows.tolist() == [[int(hit.id) for hit in hits] for hits in gallery.search(queries, model, 10)]
    assert "older" in read_json(tmp_path / "new.faiss.xcompat.json")["about"]["vectors"]


def test_nothing_that_is_read_is_replaced(tmp_path: Path) -> None:
    build_map("ridge").save_pretrained(tmp_path / "model")
    model = METHODS["ridge"].from_pretrained(tmp_path / "model")
    write_old_index(tmp_path / "old.faiss", "Flat")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    own = tmp_path / "model" / "model.safetensors"
    refuses("model.safetensors was not made by `xcompat export", to_faiss, model, tmp_path / "old.faiss", own, overwrite=True)
    assert own.read_bytes() == before
    for _ in range(2):  # its own file is replaced there too
        to_faiss(model, tmp_path / "old.faiss", tmp_path / "model" / "new.faiss")


@pytest.mark.parametrize("kept", ["transform", "none"])
def test_the_command_exports_a_map_without_what_it_remembers(kept: Literal["transform", "none"], tmp_path: Path) -> None:
    plain, queries = write_old_index(tmp_path / "old.faiss", "Flat"), unit(20, NEW_DIM, seed=2)
    model = with_memory(build_map("ridge"), entries=3)
    model.save_pretrained(tmp_path / "model")
    commands.to_faiss(tmp_path / "old.faiss", str(tmp_path / "model"), tmp_path / "new.faiss", False, kept)
    expected = model.remember(model.memory.without_entries() if kept == "transform" else None)
    rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries.numpy(), 10)[1]
    np.testing.assert_array_equal(rows, plain.search(expected.to_space(queries).detach().numpy(), 10)[1])


@pytest.mark.parametrize("compacted", [False, True])
def test_queries_are_brought_to_the_length_of_vectors_that_were_never_normalised(compacted: bool, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    adopted = faiss.IndexFlatL2(OLD_DIM)
    adopted.add(unit(ROWS, OLD_DIM, seed=1).numpy() * generator.uniform(6, 14, (ROWS, 1)).astype(np.float32))
    faiss.write_index(adopted, str(tmp_path / "old.faiss"))
    names = [str(row) for row in range(ROWS)]
    gallery = Gallery.from_faiss(tmp_path / "gallery", tmp_path / "old.faiss", names, Fingerprint.from_string("old"))
    if compacted:
        gallery.remove(["7"])
        gallery.commit()
        gallery.compact()
    model, queries = with_memory(build_map("ridge"), entries=0), unit(20, NEW_DIM, seed=2).numpy()
    to_faiss(model, gallery.path, tmp_path / "new.faiss")
    rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries, 10)[1]
    kept = np.delete(np.arange(ROWS), 7) if compacted else np.arange(ROWS)
    assert kept[rows].tolist() == [[int(hit.id) for hit in hits] for hits in gallery.search(queries, model, 10)]


def test_indexes_that_do_not_fit_are_refused(tmp_path: Path, folder_of: dict[str, str]) -> None:
    gallery, model = Gallery.create(tmp_path / "gallery", Fingerprint.from_string("old"), OLD_DIM), build_map("ridge")
    store(gallery, unit(ROWS, OLD_DIM, seed=1), list(map(str, range(ROWS))))
    gallery.add(unit(3, NEW_DIM, seed=2), ["x", "y", "z"], version=model)
    gallery.commit("backfill")
    refuses(
        "also holds 3 items of .*, e.g. after a backfill.*rollback.*finish the backfill.*compact",
        to_faiss,
        model,
        gallery.path,
        tmp_path / "new.faiss",
    )
    write_old_index(tmp_path / "old.faiss", "Flat")
    names = [str(row) for row in range(ROWS)]
    Gallery.from_faiss(tmp_path / "adopted", tmp_path / "old.faiss", names, Fingerprint.from_string("old"))
    other = faiss.IndexFlatIP(OLD_DIM)
    other.add(unit(ROWS, OLD_DIM, seed=5).numpy())
    faiss.write_index(other, str(tmp_path / "old.faiss"))
    refuses("its bytes have changed since adoption", to_faiss, build_map("ridge"), tmp_path / "adopted", tmp_path / "new.faiss")
    assert not (tmp_path / "new.faiss").exists()
    faiss.write_index(faiss.IndexFlatIP(OLD_DIM + 1), str(tmp_path / "other.faiss"))
    with pytest.raises(XcompatError, match="vectors of 9 dimensions, but the map returns the 8"):
        to_faiss(build_map("ridge"), tmp_path / "other.faiss", tmp_path / "new.faiss")
    refuses("nowhere.* does not exist", to_faiss, build_map("ridge"), tmp_path / "nowhere.faiss", tmp_path / "new.faiss")
    (tmp_path / "damaged.faiss").write_bytes(b"no index")
    refuses("is not a readable faiss index", to_faiss, build_map("ridge"), tmp_path / "damaged.faiss", tmp_path / "new.faiss")
    write_old_index(tmp_path / "old.faiss", "Flat")
    with pytest.raises(XcompatError, match="trained without an old model"):
        to_faiss(METHODS["independent"].from_encoder(folder_of["clip"]), tmp_path / "old.faiss", tmp_path / "new.faiss")


def test_a_gallery_of_the_model_itself_is_searched_like_the_old_one(tmp_path: Path) -> None:
    model = with_memory(build_map("ridge"), entries=0)
    gallery = Gallery.create(tmp_path / "gallery", model)
    store(gallery, unit(ROWS, NEW_DIM, seed=2), list(map(str, range(ROWS))), version=model)
    assert to_faiss(model, gallery.path, tmp_path / "new.faiss") == model.lineage.stores.fingerprint
    queries = unit(5, NEW_DIM, seed=3)
    rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries.numpy(), 5)[1]
    assert [[hit.id for hit in hits] for hits in gallery.search(queries, model, 5)] == [list(map(str, row)) for row in rows]


def test_the_ids_of_a_gallery_go_beside_its_index(
    tmp_path: Path, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A backfill changes the order of the rows: the ids of the old index are not those of the new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = with_memory(build_map("ridge"), entries=0)
    model.export(tmp_path / "run" / "model")
    gallery = Gallery.create(tmp_path / "gallery", model)
    ids, new = [f"é {row}" for row in reversed(range(ROWS))], unit(ROWS, NEW_DIM, seed=2)
    store(gallery, new, ids, version=model)
    (tmp_path / "ids.txt").write_text("".join(f"{row}\n" for row in range(ROWS)), encoding="utf-8")
    command = ("export", "faiss", gallery.path, "--model", tmp_path / "run", "--out", tmp_path / "new.faiss")
    assert f"; their ids are in {tmp_path}/new.ids.txt" in run_xcompat.output(*command)
    searching = load_checkpoint(str(tmp_path / "run"))
    found = open_index(tmp_path / "new.faiss", searching.lineage.stores.fingerprint)
    assert f"come from {tmp_path}/new.ids.txt" in caplog.text and "does not record its model" not in caplog.text
    assert found.segments[0].ids(np.arange(ROWS)) == ids
    (tmp_path / "new.ids.txt").write_text("mine\n", encoding="utf-8")
    assert "new.ids.txt has changed since it was made by" in run_xcompat.refusal(*command)


def test_command_line_and_a_service_that_knows_faiss_alone(tmp_path: Path, run_xcompat: Run) -> None:
    model = build_map("procrustes")
    model.export(tmp_path / "run" / "model")
    plain = write_old_index(tmp_path / "old.faiss", "HNSW16")
    before = (tmp_path / "old.faiss").read_bytes()
    command = ("export", "faiss", tmp_path / "old.faiss", "--model", tmp_path / "run", "--out", tmp_path / "new.faiss")
    assert "takes 16-dimensional queries; its vectors are those of old@" in run_xcompat.output(*command)
    assert (tmp_path / "old.faiss").read_bytes() == before
    queries = unit(20, NEW_DIM, seed=2)
    np.save(tmp_path / "queries.npy", queries.numpy())
    files = [str(tmp_path / name) for name in ("new.faiss", "queries.npy", "found.npz")]
    subprocess.run([sys.executable, "-c", PLAIN_FAISS, *files], check=True)
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_array_equal(found["rows"], plain.search(model.to_space(queries).numpy(), 10)[1])


def test_a_refused_export_prints_no_warning(tmp_path: Path, run_xcompat: Run) -> None:
    write_old_index(tmp_path / "old.faiss", "Flat")
    model = with_memory(build_map("ridge"), entries=3)
    model.config.old_share = 0.5
    model.export(tmp_path / "run" / "model")
    command = ("export", "faiss", tmp_path / "old.faiss", "--model", tmp_path / "run", "--out", tmp_path / "new.faiss")
    code, out, error = run_xcompat(*command, "--memory", "full")
    assert code == 2 and not out and "cannot store the entries" in error and len(error.splitlines()) == 1
    said = run_xcompat.output(*command)
    assert "to search together with queries of the old model" in said
    assert "cannot contain the map's memory (3 entries)" in said
    assert "fit the map with `xcompat map --memory transform --allow-worse`" in said
    write_json(tmp_path / "run/report.json", {"alone": {"full": "full map", "transform": "-3.7 points at CMC@1"}})
    said = run_xcompat.output(*command, "--overwrite")
    assert said.count("(lowest gain: -3.7 points at CMC@1)") == 2 and "fit the map with" not in said


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("query_map", {"shape": "residual"}, "does not map queries by one linear layer, and a faiss index supports no other"),
        ("query_map", {"shape": "projection"}, "does not map queries by one linear layer"),
        ("residual_mlp", {}, "does not map queries by one linear layer"),
        ("drift_adapter", {}, "does not map queries by one linear layer"),
        ("rbt", {}, "does not map queries by one linear layer"),
        ("ridge", {"direction": "old_to_new"}, "Model maps galleries, not queries"),
        ("fct", {}, "Model maps galleries, not queries"),
        ("ridge", {}, r"remove the entries with --memory transform, or in Python with model\.remember"),
    ],
)
def test_models_that_no_index_holds_are_refused(method: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_old_index(tmp_path / "old.faiss", "Flat")
    model = build_map(method, **options) if "remember" not in said else with_memory(build_map(method), entries=3)
    refuses(said, to_faiss, model, tmp_path / "old.faiss", tmp_path / "new.faiss")
    assert not (tmp_path / "new.faiss").exists()

"""What sentence-transformers embeds with an exported folder, in a process of its own, is what the model embeds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from conftest import TEXTS
from numpy.typing import NDArray
from PIL import Image
from schedule import mostly_nightly
from sentence_transformers import SentenceTransformer

from xcompat import Fingerprint, XcompatError
from xcompat.data.images import open_image
from xcompat.export import sentence_builtin, to_sentence_transformers
from xcompat.export.sentence_module import CompatModule
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.embedder import load_checkpoint, load_embedder

IMAGE_TEXT = {"clip", "siglip", "blip", "open_clip", "vision-text-dual-encoder"}
OLD = describe_old(Fingerprint.from_string("old"), dim=8)
ADAPTERS = {"lora": {"rank": 2}, "prompts": 2}
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "xbt": ("xbt", "clip", "old", {"adapters": ADAPTERS}),
    "xbt in its own space": ("xbt", "clip", "own", {"adapters": ADAPTERS}),
    "direct on SigLIP": ("direct", "siglip", "old", {}),
    "BLIP, which masks padding": ("xbt", "blip", "old", {}),
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
        if not name.startswith("encoder."):
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
def both(
    tmp_path_factory: pytest.TempPathFactory,
    folder_of: dict[str, str],
    image_folder_of: dict[str, str],
    images: list[Image.Image],
) -> Exported:
    odd = [images[0].resize((31, 200)), images[1].convert("L"), images[2].convert("P"), images[3].convert("1").resize((7, 3))]
    transparent = images[0].convert("RGBA")
    transparent.putalpha(images[1].convert("L"))
    return Exported(tmp_path_factory.mktemp("exported"), folder_of | image_folder_of, [*images, *odd, transparent])


@pytest.mark.parametrize("case", mostly_nightly(CASES, DAILY.__contains__))
def test_a_fresh_process_embeds_the_same(case: str, both: Exported) -> None:
    ours, theirs = both[case]
    assert ("texts" in theirs) is (case not in IMAGES_ALONE)
    for kind in ours:
        np.testing.assert_allclose(theirs[kind], ours[kind], atol=1e-5)
    np.testing.assert_allclose(theirs["paths"], ours["images"][:-1], atol=1e-5)  # but for the transparent one
    assert theirs["dim"] == ours["images"].shape[1]


def test_the_module_loads_without_the_flag_and_the_folder_is_still_ours(
    folder_of: dict[str, str], tmp_path: Path, images: list[Image.Image]
) -> None:
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


@pytest.mark.parametrize(
    ("adapters", "says"),
    [
        (ADAPTERS, ", trust_remote_code=True) embeds in the own space, where xcompat"),
        (None, "out') embeds in the own space, without"),
    ],
)
def test_command_line(
    adapters: dict[str, Any] | None,
    says: str,
    folder_of: dict[str, str],
    tmp_path: Path,
    run_xcompat: Callable[..., tuple[int, str, str]],
) -> None:
    METHODS["xbt"].from_encoder(folder_of["clip"], old=OLD, adapters=adapters).export(tmp_path / "run" / "model")
    command = ("export", "sentence-transformers", tmp_path / "run", "--out", tmp_path / "out", "--space", "own")
    code, out, _ = run_xcompat(*command)
    assert code == 0 and says in out
    sentences = SentenceTransformer(str(tmp_path / "out"), trust_remote_code=adapters is not None, device="cpu")
    assert sentences.get_embedding_dimension() == 16


def test_a_map_over_another_model_of_ours_is_one_row(
    folder_of: dict[str, str], tmp_path: Path, images: list[Image.Image]
) -> None:
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


def test_what_was_read_in_half_precision_is_written_in_float32(
    folder_of: dict[str, str], tmp_path: Path, images: list[Image.Image]
) -> None:
    model = build("LoRA, merged", folder_of["clip"])
    model.save_pretrained(tmp_path / "model")
    half = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert to_sentence_transformers(half, tmp_path / "out")
    sentences, ours = SentenceTransformer(str(tmp_path / "out"), device="cpu"), expected("LoRA, merged", model, images)
    assert {parameter.dtype for parameter in sentences.parameters()} == {torch.float32}
    np.testing.assert_allclose(sentences.encode(TEXTS + LONG), ours["texts"], atol=2e-2)
    np.testing.assert_allclose(sentences.encode(images), ours["images"], atol=2e-2)


def test_what_embeds_otherwise_once_loaded_keeps_the_own_module(
    folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentence_builtin, "_row", lambda layers: [])
    model = METHODS["bct"].from_encoder(folder_of["clip"], old=OLD, classes=["cat", "dog"], dim=16)
    assert not to_sentence_transformers(model, tmp_path / "out", "own")
    assert load_checkpoint(str(tmp_path / "out")).fingerprint() == model.fingerprint()


def test_what_cannot_be_exported_is_refused(folder_of: dict[str, str], tmp_path: Path) -> None:
    for case in ("a map of galleries", "no old model"):
        with pytest.raises(XcompatError, match="does not map queries into an old space; export the model with space='own'"):
            to_sentence_transformers(build(case, folder_of["clip"]), tmp_path / "out")
    config = METHODS["ridge"].config_class(old=OLD, embedding_dim=16)
    with pytest.raises(XcompatError, match="fitted on embeddings only"):
        to_sentence_transformers(METHODS["ridge"](config), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())

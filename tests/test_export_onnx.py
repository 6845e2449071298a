"""ONNX files give the model's embeddings for batches and lengths they were not exported with, or are not left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import TEXTS
from PIL import Image
from schedule import mostly_nightly

from xcompat import Fingerprint, XcompatError
from xcompat.data import open_image
from xcompat.encoders import load_processor
from xcompat.encoders.standins import save_stand_in
from xcompat.export import onnx_towers, to_onnx
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.embedder import load_embedder

OLD = Fingerprint.from_string("old")
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "xbt": ("xbt", "clip", "old", {"adapters": {"lora": {"rank": 2}, "prompts": 2}}),
    "query map, BLIP masks padding": ("query_map", "blip", "old", {"shape": "residual"}),
    "closed form, SigLIP reads padding": ("ridge", "siglip", "own", {}),
    "trained on classes": ("bct", "resnet", "old", {"classes": ["cat", "dog"]}),
    "penultimate, images alone": ("query_map", "clip", "old", {"input": "penultimate"}),
    "open_clip": ("procrustes", "open_clip", "old", {}),
    "timm, remembering": ("ridge", "timm_wrapper", "old", {"memory": {"entries": 5, "sharpness": 20.0, "share": 0.5}}),
}
IMAGES_ALONE = {"trained on classes", "penultimate, images alone", "timm, remembering"}


def build(method: str, folder: str, options: dict[str, Any]) -> CompatModel:
    model = METHODS[method].from_encoder(folder, old=describe_old(OLD, dim=8), **options)
    for name, parameter in model.named_parameters():
        if "lora_" in name or not name.startswith("encoder."):
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    if model.memory is not None:
        for buffer in model.memory.buffers():
            buffer.add_(0.3 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2)))
    return model


def run_onnx(path: Path, batch: dict[str, torch.Tensor]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (embeds,) = session.run(["embeds"], {name: tensor.numpy() for name, tensor in batch.items()})
    return embeds


@pytest.mark.parametrize("case", mostly_nightly(CASES, ("xbt", "trained on classes").__contains__))
@torch.no_grad()
def test_onnxruntime_embeds_what_the_model_embeds(
    case: str,
    folder_of: dict[str, str],
    image_folder_of: dict[str, str],
    images: list[Image.Image],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, architecture, space, options = CASES[case]
    model = build(method, (folder_of | image_folder_of)[architecture], options)
    fingerprint = model.fingerprint()
    to_onnx(model, tmp_path / "out", space)  # type: ignore[arg-type]
    about = json.loads((tmp_path / "out" / "xcompat_onnx.json").read_text())
    assert model.fingerprint() == fingerprint, "merged was a copy"
    assert about["fingerprint"] == fingerprint.digest and about["dim"] == (8 if space == "old" else 16)
    assert [found["fingerprint"] for found in about["searches"]] == [(OLD if space == "old" else fingerprint).digest]
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


def test_command_line_and_preprocessing_from_the_folder(
    folder_of: dict[str, str],
    images: list[Image.Image],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run_xcompat: Callable[..., tuple[int, str, str]],
) -> None:
    """Towers are not exported here, which takes seconds."""
    monkeypatch.setattr(
        onnx_towers, "_write", lambda *given: given[-1].touch() or {"file": given[-1].name, "inputs": {}, "outputs": {}}
    )
    model = build("procrustes", folder_of["open_clip"], {})
    model.export(tmp_path / "run" / "model")
    capsys.readouterr()
    code, out, err = run_xcompat("export", "onnx", tmp_path / "run", "--out", tmp_path / "out")
    assert (code, err) == (0, "") and "image.onnx and text.onnx embed in the old space" in out
    processor = load_processor(model.config.encoder, str(tmp_path / "out"))
    assert processor.tokenize(TEXTS) == model.processor.tokenize(TEXTS)
    assert torch.equal(processor.images(images), model.processor.images(images))


def test_a_file_that_does_not_agree_is_not_left(
    image_folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_towers, "TOLERANCE", 1e-12)
    model = build("ridge", image_folder_of["mobilenet_v1"], {})
    with pytest.raises(XcompatError, match="embeddings of the image tower in ONNX differ by .* from PyTorch's, more than 1e-12"):
        to_onnx(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_half_precision_is_made_whole_and_prompts_are_said(tmp_path: Path) -> None:
    new = load_embedder(save_stand_in(tmp_path / "new", "sentence-transformers", 16, 1))
    config = METHODS["ridge"].config_class(encoder=new.describe_encoder(), old=describe_old(OLD, dim=8), embedding_dim=new.dim)
    rows = torch.nn.functional.normalize(torch.randn(40, 24, generator=torch.Generator().manual_seed(0)), dim=-1)
    model = METHODS["ridge"](config).fit([(rows[:, :16], rows[:, 16:])])
    to_onnx(model.half(), tmp_path / "out")
    batch = model.processor.texts(TEXTS)
    expected = model.to_space(model.embed_texts(**batch))
    np.testing.assert_allclose(run_onnx(tmp_path / "out" / "text.onnx", batch), expected, atol=2e-3)
    assert model.dtype == torch.float16, "the model itself stays as it is"
    readme = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert 'Put `"query: "` before a query, as in training.' in readme, "the stand-in has no other prompt"


def test_what_cannot_be_exported_is_refused(folder_of: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="cannot export the image tower with batches of any size: .*static shape"):
        to_onnx(build("ridge", folder_of["siglip2"], {}), tmp_path / "out")
    with pytest.raises(XcompatError, match="does not map queries into an old space"):
        to_onnx(build("fct", folder_of["clip"], {}), tmp_path / "out")
    assert not list(tmp_path.iterdir())

"""The behaviour matrix: every method, found by its registration, does what the contract promises."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, TEXTS, refuses
from PIL import Image
from safetensors.torch import load_file, save_file
from schedule import METHOD_OF_EACH_KIND, mostly_nightly, mostly_nightly_rows
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

import xcompat
from xcompat import Fingerprint, FingerprintMismatchError, XcompatError
from xcompat.encoders import load_encoder
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.classified import ClassifiedModel
from xcompat.models.closed_form import ClosedFormModel
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.models.unlabelled import UnlabelledModel

OLD = Fingerprint.from_string("old")
OLDER = Fingerprint.from_string("older")
ADAPTERS = {"lora": {"rank": 2, "alpha": 2, "dropout": 0.0}, "prompts": 2}
CLASSES = ["cat", "dog", "shoe"]
LABELS = torch.tensor([0, 2, 2, 0])  # no image of the second class
CLASSIFIED = [name for name, model in METHODS.items() if issubclass(model, ClassifiedModel) and name != "independent"]
CLASSIFIED_OPTIONS: dict[str, dict[str, Any]] = {"bt2": {"extra_dim": 4, "dim": 16}, "oca": {"extra_dim": 4}}
LEARNING_OPTIONS: dict[str, dict[str, Any]] = {
    "fastfill": {"mixer_width": 32},  # else the exponent of its variance overshoots at this rate
    "geometry_residual": {"margin": 2.0},  # else no triplet of four pairs has a gradient
    "projection": {"noise_std": 0.0},
    "residual_mlp": {"regularisation": 10.0},  # else four pairs are fitted before training begins
}
NOT_IN_A_ROW = {"bt2", "drift_adapter", "geometry_residual", "rbt", "residual_mlp", "simclr"}
MORE = ["adapters", "open_clip", "resnet"]
TRIPLETS: list[dict[str, Any]] = [{"head": "triplet"}, {"triplet_weight": 1.0}]
TRAINED = [name for name, model in METHODS.items() if not issubclass(model, ClosedFormModel)]


def build(method: str, folder_of: dict[str, str], **options: Any) -> CompatModel:
    model_class = METHODS[method]
    old = describe_old(OLD, dim=8, compatible_with=[OLDER]) if model_class.compares_with_old else None
    if method in ("xbt", "direct"):
        options.setdefault("adapters", ADAPTERS)
    if method in CLASSIFIED:
        options = CLASSIFIED_OPTIONS.get(method, {}) | {"classes": CLASSES} | options
    torch.manual_seed(0)
    model = model_class.from_encoder(folder_of["clip"], old=old, **options)
    model.prepare(OldKnowledge(len(CLASSES), LABELS.numpy(), unit(4, 8).numpy()), unit(4, 16).numpy())
    return model


def unit(rows: int, dim: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(5)), dim=-1)


def batch_for(model: CompatModel, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    made = {
        "old_embeds": unit(4, 8),
        "old_text_embeds": unit(4, 8).flip(0),
        "new_embeds": unit(4, 16),
        "labels": LABELS,
        "credible": torch.tensor([True, False, True, True]),
        "pixel_values": model.processor.images(images),
        "second_pixel_values": model.processor.images([image.rotate(5) for image in images]),
        **model.processor.texts(TEXTS),
    }
    wanted = {*model.columns, *(["attention_mask"] if "input_ids" in model.columns else [])}
    return {name: made[name] for name in wanted if name in made}


def embeddings(model: CompatModel, images: list[Image.Image]) -> list[torch.Tensor]:
    with torch.no_grad():
        own = [model.embed_images(model.processor.images(images))]
        images_only = isinstance(model, UnlabelledModel) or (isinstance(model, ClassifiedModel) and model.config.classes)
        if not images_only:
            own.append(model.embed_texts(**model.processor.texts(TEXTS)))
        if model.maps_galleries:
            mapped = [model.upgrade(unit(4, 8))]
        else:
            mapped = [model.to_space(embeds) for embeds in own if model.compatible_with]
        return own + mapped + [model.self_view(embeds) for embeds in own]


def shake(model: CompatModel) -> None:
    """Move every weight that is not the frozen encoder's, so that nothing is the identity any more."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not name.startswith("encoder."):
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("method", mostly_nightly(METHODS, (*METHOD_OF_EACH_KIND, "bt2").__contains__))
def test_layers_in_a_row_give_what_the_model_gives(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, folder_of).for_inference()
    shake(model)
    pixels = model.processor.images(images)
    with torch.no_grad():
        own = model.embed_images(pixels)
        features = model.encoder.image_features(pixels) if model.encoder is not None else own
        rows = [(model.embed_layers, features, own)]
        if model.compatible_with and not model.maps_galleries:
            rows.append((model.view_layers, own, model.to_space(own)))
        for layers, given, expected in rows:
            if layers is not None:
                torch.testing.assert_close(F.normalize(torch.nn.Sequential(*layers)(given), dim=-1), expected)
    assert any(layers is None for layers, *_ in rows) is (method in NOT_IN_A_ROW)


@pytest.mark.parametrize("form", mostly_nightly([*METHODS, *MORE], (*METHOD_OF_EACH_KIND, "independent", *MORE).__contains__))
def test_a_saved_model_is_whole(form: str, encoder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    method = {"adapters": "xbt", "open_clip": "independent", "resnet": "bct"}.get(form, form)
    model = build(method, {"clip": encoder_of.get(form, encoder_of["clip"])})
    shake(model)
    if form == "adapters":
        model.leave_out_base()
    model.save_pretrained(tmp_path / "first")
    AutoModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    written = [{path.name for path in (tmp_path / name).iterdir()} for name in ("first", "second")]
    assert written[0] == written[1] and "pytorch_model.bin" not in written[0], "safetensors only"
    shutil.rmtree(tmp_path / "first")
    again = AutoModel.from_pretrained(tmp_path / "second")
    assert type(again) is type(model) and not again.training and again.fingerprint() == model.fingerprint()
    assert torch.equal(again.processor.images(images), model.processor.images(images))
    for first, second in zip(embeddings(model, images), embeddings(again, images), strict=True):
        assert torch.equal(first, second)
    trains = [{name for name, parameter in each.named_parameters() if parameter.requires_grad} for each in (model, again)]
    assert trains[0] == trains[1]


@pytest.mark.parametrize("architecture", ["clip", "resnet"])
def test_lost_processor(architecture: str, encoder_of: dict[str, str], tmp_path: Path) -> None:
    build("bct", {"clip": encoder_of[architecture]}).export(tmp_path / "first")
    for file in (tmp_path / "first").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    model = AutoModel.from_pretrained(tmp_path / "first")
    for wanted in (lambda: model.processor, lambda: model.save_pretrained(tmp_path / "second")):
        refuses("cannot read the preprocessing of .*first .*; restore its files", wanted)
    assert (tmp_path / "second" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("method", "dtype"),
    mostly_nightly_rows(
        itertools.product(METHODS, [torch.bfloat16, torch.float16]),
        lambda method, dtype: method in METHOD_OF_EACH_KIND and dtype == torch.bfloat16,
    ),
)
def test_in_half_precision_all_of_it_computes_and_embeddings_are_float32(
    method: str, dtype: torch.dtype, folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
    model = build(method, folder_of).for_inference()
    shake(model)
    model.save_pretrained(tmp_path / "model")
    half = AutoModel.from_pretrained(tmp_path / "model", dtype=dtype).for_inference()
    expected, found = embeddings(model, images), embeddings(half, images)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)
        torch.testing.assert_close(ours.norm(dim=-1), theirs.norm(dim=-1), atol=1e-5, rtol=0)
    assert not torch.equal(found[0], expected[0])
    computing = {parameter.dtype for name, parameter in half.named_parameters() if "basis" not in name}
    assert computing | {half._get_encoder().dtype} == {dtype}, "but for bt2's bases: half precision has no matrix exponential"
    assert half.fingerprint() == model.fingerprint()
    half.save_pretrained(tmp_path / "half")
    again = AutoModel.from_pretrained(tmp_path / "half").for_inference()
    for ours, theirs in zip(embeddings(again, images), found, strict=True):
        assert torch.equal(ours, theirs)
    assert again.fingerprint() == half.written_lineage.model != half.fingerprint()
    next(half.parameters()).data.add_(1)
    assert half.fingerprint() != model.fingerprint(), "what has been trained is another model"


def test_identity_in_half_precision(folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    model = build("oca", folder_of)
    model.save_pretrained(tmp_path)
    halves = [AutoModel.from_pretrained(tmp_path, **{name: torch.bfloat16}) for name in ("dtype", "torch_dtype")]
    for half in halves:
        assert half.fingerprint() == model.fingerprint()
    model.for_inference()
    for half in halves:
        assert half.for_inference().fingerprint() == model.fingerprint(), "without what only training needs"
    moved = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    _ = moved.processor
    (tmp_path / "model.safetensors").unlink()
    refuses(f"half-precision model, because its source {tmp_path} is unavailable", moved.fingerprint)
    encoder, processor = load_encoder(folder_of["clip"])
    model = METHODS["ridge"].from_encoder((encoder, processor), old=describe_old(OLD, dim=8)).to(torch.bfloat16)
    before = encoder.fingerprint(processor)
    model.embed_images(processor.images(images))
    assert model._get_encoder().dtype == torch.bfloat16
    assert encoder.fingerprint(processor) == before


@pytest.mark.parametrize("method", mostly_nightly(METHODS, (*METHOD_OF_EACH_KIND, "independent").__contains__))
def test_views_are_unit_vectors_of_the_old_dimension(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, folder_of)
    shake(model)
    if not model.compatible_with:
        refuses("cannot search an old gallery", model.to_space, torch.randn(2, 16))
        return
    own = embeddings(model, images)[0]
    assert own.shape == (4, model.config.embedding_dim)
    if model.maps_galleries:
        refuses("maps galleries: upgrade the stored embeddings instead", model.to_space, own)
        upgraded = model.upgrade(unit(4, 8))
        assert upgraded.shape == own.shape and upgraded.dtype == torch.float32
        torch.testing.assert_close(upgraded.norm(dim=-1), torch.ones(4))
        return
    assert torch.equal(model.upgrade(unit(4, 8)), unit(4, 8)), "galleries stay"
    for version in (None, OLD, OLDER):
        view = model.to_space(own, version)
        assert view.shape == (4, 8) and view.dtype == torch.float32
        torch.testing.assert_close(view.norm(dim=-1), torch.ones(4))
    with pytest.raises(FingerprintMismatchError, match="compatible with old.*not with stranger"):
        model.to_space(own, Fingerprint.from_string("stranger"))


def test_a_lineage_names_all_embeddings_and_queries_hash_nothing(
    folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("projection", folder_of)
    lineage = model.lineage
    assert lineage.model == lineage.embeds.fingerprint == model.fingerprint() and lineage.embeds.dim == 16
    assert lineage.stores == (lineage.embeds.fingerprint.derive("view"), 8)
    assert lineage.searches == ((OLD, 8), (OLDER, 8)) and model.compatible_with == [OLD, OLDER]
    monkeypatch.setattr(Fingerprint, "from_module", None)
    monkeypatch.setattr(Fingerprint, "state", None)
    assert model.to_space(unit(4, 16), OLDER).shape == (4, 8) and model.to_gallery_space(unit(4, 16)).shape == (4, 8)
    with pytest.raises(TypeError):
        _ = model.lineage


@pytest.mark.parametrize("method", TRAINED)
def test_steps_lower_the_loss_and_move_trained_parts(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, folder_of, **LEARNING_OPTIONS.get(method, {}))
    batch = batch_for(model, images)
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not unused, "a parameter without gradient hangs data-parallel training"
        optimiser.step()
        optimiser.zero_grad()
    assert losses[-1] < losses[0]
    for name, value in model.state_dict().items():
        if name not in trainable:
            assert torch.equal(value, frozen[name]), f"{name} is frozen"


@pytest.mark.parametrize("method", mostly_nightly(TRAINED, METHOD_OF_EACH_KIND.__contains__))
def test_a_loss_needs_its_columns(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, folder_of)
    batch = batch_for(model, images)
    for column in model.columns:
        with pytest.raises(XcompatError, match=f"needs the column {column} "):
            model(**{name: value for name, value in batch.items() if name != column}, return_loss=True)
    whole = model.eval()(**batch)
    assert whole.loss is not None
    compared = [name for name in model.columns if name not in model.embedded]
    alone = {name: column for name, column in batch.items() if name not in compared}
    without = model(**alone) if compared else model(**batch, return_loss=False)
    assert without.loss is None
    for name in without:
        torch.testing.assert_close(without[name], whole[name])
    if len(compared) > 1:
        with pytest.raises(XcompatError, match=f"needs the column {compared[0]} "):
            model(**alone, **{compared[1]: batch[compared[1]]}, **{name: batch[name] for name in compared[2:]})


@pytest.mark.parametrize("method", ["xbt", "direct"])
def test_switched_off_it_is_the_original_new_model(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    encoder, processor = load_encoder(folder_of["clip"])
    encoder.requires_grad_(False)
    original = encoder.embed_images(processor.images(images)), encoder.embed_texts(**processor.texts(TEXTS))
    model = build(method, folder_of)
    shake(model)
    with model.adapters_disabled():
        off = embeddings(model, images)[:2]
    on = embeddings(model, images)[:2]
    for first, second, third in zip(original, off, on, strict=True):
        assert torch.equal(first, second) and not torch.equal(first, third)


def test_what_trains_follows_the_paper_and_its_contradictions(folder_of: dict[str, str]) -> None:
    def kinds(**options: Any) -> set[str]:
        names = [name for name, parameter in build("xbt", folder_of, **options).named_parameters() if parameter.requires_grad]

        def kind(name: str) -> str:
            if "lora_" in name or "prompts" in name:
                return "adapters"
            part = "projection" if name.startswith("projection.") else "encoder"
            norm = "norm" in name or name.startswith(("projection.1.", "projection.4."))
            return f"{part} norms" if norm else f"{part} rest"

        return {kind(name) for name in names}

    assert kinds() == {"adapters", "projection norms"}
    assert kinds(train_encoder="layer_norm", adapters=None) == {"encoder norms", "projection norms"}
    assert kinds(train_projection="all") == {"adapters", "projection norms", "projection rest"}
    assert kinds(train_projection="none") == {"adapters"}


@pytest.mark.parametrize(
    ("method", "architecture"),
    mostly_nightly_rows(
        itertools.product(["independent", "direct", "xbt"], ARCHITECTURES),
        lambda method, architecture: method == "direct" or architecture == "clip",
    ),
)
def test_trained_parts_get_gradient(method: str, architecture: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    """A parameter that trains but is not used stops data-parallel training at its second step."""
    old = None if method == "independent" else describe_old(OLD, dim=8)
    options: dict[str, Any] = {} if method == "independent" else {"train_encoder": "all"}
    if method == "xbt":
        options = {"adapters": ADAPTERS}
    model = METHODS[method].from_encoder(folder_of[architecture], old=old, **options).train()
    model(**batch_for(model, images)).loss.backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused


def test_gradient_checkpointing_changes_nothing(folder_of: dict[str, str], images: list[Image.Image]) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = build("xbt", folder_of).train()
        shake(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert any(getattr(layer, "gradient_checkpointing", False) for layer in model.modules())
        model(**batch_for(model, images)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-5)


def test_projection_noise_only_in_training_and_normalised(folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = build("projection", folder_of, noise_std=0.5)
    batch = batch_for(model, images)
    assert torch.equal(model(**batch).loss, model(**batch).loss)
    seen = []
    model.projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.train()(**batch)
    torch.testing.assert_close(seen[0].norm(dim=-1), torch.ones(4))
    assert (seen[0] - batch["new_embeds"]).norm(dim=-1).min() > 0.1


def naive_ridge(new: torch.Tensor, old: torch.Tensor, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum of the ridge objective by least squares on data augmented with the penalty."""
    centred, target = new - new.mean(0), old - old.mean(0)
    penalty = (strength * len(new)) ** 0.5 * torch.eye(new.shape[1], dtype=torch.float64)
    nothing = torch.zeros(new.shape[1], old.shape[1], dtype=torch.float64)
    weight = torch.linalg.lstsq(torch.cat([centred, penalty]), torch.cat([target, nothing])).solution
    return weight, old.mean(0) - new.mean(0) @ weight


def test_ridge_is_least_squares_and_needs_pairs_that_differ(folder_of: dict[str, str]) -> None:
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(50, 16, generator=generator, dtype=torch.float64)
    old = new[:, :8] * 2 + torch.randn(50, 8, generator=generator, dtype=torch.float64)
    model = build("ridge", folder_of, regularisation=0.1)
    model.fit(zip(new.split(7), old.split(7), strict=True))
    variance = ((new - new.mean(0)) ** 2).mean(0).mean()
    weight, bias = naive_ridge(new, old, float(0.1 * variance))
    torch.testing.assert_close(model.weight.double(), weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.bias.double(), bias, atol=1e-5, rtol=1e-5)
    for method in ("ridge", "procrustes"):
        refuses("there are none", build(method, folder_of).fit, [])
    refuses("all equal", build("ridge", folder_of).fit, [(torch.ones(9, 16), torch.randn(9, 8))])


def test_bad_options_columns_and_checkpoints_are_refused(folder_of: dict[str, str], tmp_path: Path) -> None:
    refuses("no option 'noise_sd'; did you mean 'noise_std'", xcompat.ProjectionConfig, noise_sd=0.1)
    refuses("QueryMapConfig has no shape 'resdual'; did you mean 'residual'", xcompat.QueryMapConfig, shape="resdual")
    with pytest.raises(TypeError, match="XbtModel has no column lables"):
        build("xbt", folder_of)(lables=LABELS)
    for model in (model for model in METHODS.values() if model.compares_with_old):
        refuses(r"Model needs an old model; pass old=load_embedder\(NAME\)", model.from_encoder, folder_of["clip"])
    build("projection", folder_of).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("projection.0.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "xcompat_checksums.json").unlink()
    refuses("1 missing keys, e.g. projection.0.weight", xcompat.ProjectionModel.from_pretrained, tmp_path)


def test_fingerprint_knows_what_is_computed_and_not_where_it_lies(folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("xbt", folder_of)
    for folder in ("here", "there"):
        model.export(tmp_path / folder)
    here, there = (AutoModel.from_pretrained(tmp_path / folder) for folder in ("here", "there"))
    assert here.fingerprint() == there.fingerprint() != build("direct", folder_of).fingerprint()
    there.config.encoder["name"] = "elsewhere"
    assert here.fingerprint() == there.fingerprint()
    there.projection[0].bias.data[0] += 1
    assert here.fingerprint() != there.fingerprint()


IN_PLACE, REPLACED = (lambda weight: weight.data.add_(1)), (lambda weight: setattr(weight, "data", weight.data.roll(1)))


@pytest.mark.parametrize("change", [torch.nn.init.ones_, IN_PLACE, REPLACED])
def test_fingerprints_are_cached_until_changes(change: Any, folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("projection", folder_of)
    before = model.fingerprint()
    hashed: list[torch.nn.Module] = []

    def counted(module: torch.nn.Module, *about: Any, whole: Any = Fingerprint.from_module, **further: Any) -> Fingerprint:
        hashed.append(module)
        return whole(module, *about, **further)

    monkeypatch.setattr(Fingerprint, "from_module", counted)
    assert model.fingerprint() == before and not hashed
    change(model.projection[0].weight)
    assert model.fingerprint() != before and len(hashed) == 1
    assert model.fingerprint() == model.to(memory_format=torch.channels_last).fingerprint() and len(hashed) == 1


def test_methods_are_registered_with_transformers() -> None:
    for name, model in METHODS.items():
        assert AutoConfig.for_model(f"xcompat-{name}", embedding_dim=4).__class__ is model.config_class
        assert {model.__name__, model.config_class.__name__} <= set(dir(xcompat))
        assert getattr(xcompat, model.__name__) is model and len(model.citation) > 20 and model.__doc__
    assert not hasattr(xcompat, "NoSuchModel")

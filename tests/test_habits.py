"""Every method works as whoever knows transformers expects, and each of its options changes something or is refused."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch
import transformers
from conftest import TEXTS, refuses
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from schedule import METHOD_OF_EACH_KIND, mostly_nightly, mostly_nightly_rows
from test_models import CLASSES, OLD, OLDER, build, shake, unit
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoProcessor, AutoTokenizer, pipeline

import xcompat
from xcompat import XcompatError
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.classified import ClassifiedModel
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.training.stage_recipe import usual_options


class Run(NamedTuple):
    """The folder of a run that has ended, with the checkpoint in ``model``, and what was saved there."""

    folder: Path
    model: CompatModel


@pytest.fixture(scope="module")
def run_of(folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    @cache
    def make(method: str) -> Run:
        model = build(method, folder_of)
        shake(model)
        folder = tmp_path_factory.mktemp("runs") / method
        model.save_pretrained(folder / "model")
        (folder / "recipe.yaml").write_text("name: run\n")
        return Run(folder, model.eval())

    return make


@pytest.fixture(params=mostly_nightly(METHODS, (*METHOD_OF_EACH_KIND, "independent").__contains__))
def run(request: pytest.FixtureRequest, run_of: Callable[[str], Run]) -> Run:
    return run_of(request.param)


def test_a_runs_folder_is_its_model(run: Run) -> None:
    config = AutoConfig.from_pretrained(run.folder)
    assert type(config) is type(run.model.config)
    assert type(config).from_pretrained(str(run.folder)).to_json_string() == config.to_json_string()
    for loader in (AutoModel, type(run.model)):
        loaded = loader.from_pretrained(run.folder)
        assert loaded.fingerprint() == run.model.fingerprint() and loaded.name_or_path == str(run.folder / "model")
    beside = AutoModel.from_pretrained(run.folder, subfolder="model")
    assert beside.fingerprint() == run.model.fingerprint()


def test_a_run_may_end_with_a_plain_encoder(run_of: Callable[[str], Run], images: list[Image.Image], tmp_path: Path) -> None:
    model = run_of("independent").model
    model.export(tmp_path / "model")
    plain = AutoModel.from_pretrained(tmp_path)
    assert type(plain) is transformers.CLIPModel and type(AutoProcessor.from_pretrained(tmp_path)) is transformers.CLIPProcessor
    pixels = model.processor.images(images)
    with torch.no_grad():
        embeds = torch.nn.functional.normalize(plain.get_image_features(pixels).pooler_output, dim=-1)
        torch.testing.assert_close(embeds, model.embed_images(pixels))


@pytest.mark.parametrize("folder", ["", "model"])
def test_preprocessing_is_found(folder: str, run: Run, images: list[Image.Image]) -> None:
    """A map's checkpoint holds none: it is found where its encoder is."""
    place, own = run.folder / folder, run.model.processor
    pixels = own.images(images)
    assert torch.equal(AutoImageProcessor.from_pretrained(place)(images, return_tensors="pt")["pixel_values"], pixels)
    tokens = AutoTokenizer.from_pretrained(place)(TEXTS)["input_ids"]
    assert tokens == own.tokenize(TEXTS)
    processor = AutoProcessor.from_pretrained(place)
    assert processor.describe() == own.describe()
    assert torch.equal(processor(images=images, text=TEXTS, return_tensors="pt")["pixel_values"], pixels)


@pytest.mark.parametrize(
    ("architecture", "method"),
    mostly_nightly_rows(
        itertools.product(["resnet", "timm_wrapper", "open_clip"], ["bct", "ridge"]),
        lambda architecture, method: (architecture == "open_clip") is (method == "ridge"),
    ),
)
def test_what_an_encoder_has_no_files_for_is_made_or_missed(
    method: str, architecture: str, encoder_of: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
    model = build(method, {"clip": encoder_of[architecture]})
    model.export(tmp_path)
    pixels = model.processor.images(images)
    for auto_class in (AutoImageProcessor, AutoProcessor):
        made = auto_class.from_pretrained(tmp_path)(images, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(made, pixels)
    with pytest.raises(ValueError, match="tokenizer"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_a_map_of_a_compatible_model_takes_its_preprocessing(run_of: Callable[[str], Run], tmp_path: Path) -> None:
    inner = run_of("xbt")
    described = {"library": "xcompat", "name": str(inner.folder / "model"), "config": {}}
    described |= {"fingerprint": inner.model.lineage.stores.fingerprint.digest, "dim": 8}
    old = run_of("ridge").model.config.old
    model = xcompat.RidgeModel(xcompat.RidgeConfig(encoder=described, old=old, embedding_dim=8))
    model.export(tmp_path / "map")
    assert AutoProcessor.from_pretrained(tmp_path / "map").describe() == inner.model.processor.describe()
    xcompat.RidgeModel(xcompat.RidgeConfig(old=old, embedding_dim=8)).save_pretrained(tmp_path / "alone")
    with pytest.raises(XcompatError, match="alone was fitted on embeddings without an encoder: their preprocessing is unknown"):
        AutoProcessor.from_pretrained(tmp_path / "alone")


def test_other_models_are_left_alone(encoder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    clip = encoder_of["clip"]
    assert type(AutoProcessor.from_pretrained(clip)) is transformers.CLIPProcessor
    assert type(AutoImageProcessor.from_pretrained(clip)) is transformers.CLIPImageProcessor
    shutil.copytree(clip, tmp_path / "clip" / "model")
    shutil.copy(Path(clip) / "config.json", tmp_path / "clip")
    with pytest.raises(OSError, match="preprocessor_config.json"):
        AutoImageProcessor.from_pretrained(tmp_path / "clip")
    extract = pipeline("image-feature-extraction", model=encoder_of["vit"])
    with torch.no_grad():
        expected = extract.model(**extract.image_processor(images[0], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(torch.tensor(extract(images[0])), expected)


def test_a_processor_is_called_as_those_of_transformers(run: Run, images: list[Image.Image]) -> None:
    model, processor = run.model, run.model.processor
    both = processor(images=images, text=TEXTS, return_tensors="pt")
    assert torch.equal(both["pixel_values"], processor.images(images))
    for name, column in processor.texts(TEXTS).items():
        assert torch.equal(both[name], column)
    one = processor(images=images[0], text=TEXTS[0])
    assert torch.equal(one["pixel_values"], both["pixel_values"][:1]) and len(one["input_ids"]) == 1
    assert torch.equal(processor.images(images[0]), one["pixel_values"])
    assert torch.equal(processor.texts(TEXTS[0])["input_ids"], one["input_ids"])
    for given, message in (({}, "nothing to preprocess"), ({"text": "a", "return_tensors": "np"}, "return_tensors is 'np'")):
        refuses(message, processor, **given)
    with torch.no_grad():
        output = model(**processor(images=images)) if not model.embeds_texts else model(**both)
    assert len(output.image_embeds) == len(images)
    if model.embeds_in_memory:
        with torch.no_grad():
            assert torch.equal(output.image_embeds, model.embed_images(both["pixel_values"])), "there is nothing else to map"


@torch.no_grad()
def test_features_are_the_models_own_embeddings(run: Run, images: list[Image.Image]) -> None:
    model, processor = run.model, run.model.processor
    of_clip = transformers.CLIPModel.from_pretrained(model.config.encoder["name"]).get_image_features(**processor(images=images))
    features = model.get_image_features(**processor(images=images, return_tensors="pt"))
    assert type(features) is type(of_clip)
    assert torch.equal(features.pooler_output, model.embed_images(processor.images(images)))
    one = model.get_image_features(**processor(images=images[0], return_tensors="pt"))
    torch.testing.assert_close(one.pooler_output, features.pooler_output[:1])
    texts = processor(text=TEXTS)
    if model.embeds_texts:
        assert torch.equal(model.get_text_features(**texts).pooler_output, model.embed_texts(**processor.texts(TEXTS)))
    else:
        refuses("trained on images only and cannot embed texts", model.get_text_features, **texts)


def test_the_pipeline_of_features_gives_the_models_own_embedding(run: Run, images: list[Image.Image], tmp_path: Path) -> None:
    images[0].save(tmp_path / "picture.png")
    extract = pipeline("image-feature-extraction", model=str(run.folder))
    with torch.no_grad():
        own = run.model.embed_images(run.model.processor.images(images))
    torch.testing.assert_close(torch.tensor(extract(str(tmp_path / "picture.png"))), own[:1])
    made = extract(images, batch_size=2, return_tensors=True, pool=True)
    torch.testing.assert_close(torch.cat(list(made)), own)


def test_what_is_no_embedding_is_refused_in_one_line(run: Run) -> None:
    model = run.model
    for embeds, message in (
        (unit(2, 16).numpy(), r"takes embeddings as a torch tensor \(B, {dim}\), not ndarray; use torch.from_numpy"),
        (unit(2, 16).tolist(), r"not list; use torch.tensor"),
        (unit(2, 15), r"takes its own embeddings \(B, {dim}\), not \(2, 15\)"),
        (unit(2, 16)[0], r"takes its own embeddings \(B, {dim}\), not \(16,\)"),
    ):
        if not model.compatible_with:
            message = "cannot search an old gallery"
        elif model.maps_galleries:
            message = "maps galleries: upgrade the stored embeddings instead"
        refuses(message.format(dim=model.config.embedding_dim), model.to_space, embeds)
        if model.compatible_with and model.maps_galleries:
            with pytest.raises(XcompatError, match=r"takes embeddings (as a torch tensor|of the old model) \(B, \d+\), not"):
                model.upgrade(embeds if not isinstance(embeds, torch.Tensor) or embeds.ndim == 1 else embeds[:, :3])


ROWS = 64
LABELS_N = torch.arange(ROWS) % len(CLASSES)
OLD_Nd, NEW_ND, OLD_ROWS_Cd = unit(ROWS, 8), unit(ROWS, 16), 3 * unit(len(CLASSES), 8)
ALWAYS: dict[str, dict[str, Any]] = {
    "bt2": {"dim": 16, "extra_dim": 4},
    "geometry_residual": {"margin": 2.0},
    "nccl": {"max_entropy": 1.0},
    "mini_vec2vec": {"clusters": 4, "runs": 2, "rounds": 2, "neighbours": 3, "least_agreement": -1.0},
}
"""What a method is given beside the option, so that a few random rows are enough for it."""
VALUES: dict[str, Any] = {
    **dict.fromkeys(("extra_dim", "rounds", "runs"), 3),
    **dict.fromkeys(("clusters", "mixer_width"), 6),
    **dict.fromkeys(("crop_scale", "threshold"), 0.1),
    **dict.fromkeys(("crop_size", "sample"), 16),
    "adapters": {"prompts": 1},
    "dim": 9,
    "head": "cosface",
    "least_agreement": 1.0,
    "mixed_share": 0.6,
    "old_weights": "both",
    "propagation": 0.5,
    "refresh_at": [0.5],
    "train_encoder": "all",
    "transform": "none",
    "variant": "low_rank",
}
"""Values under which something must change, where the first valid one that is not the default is none."""
BESIDE: dict[str, dict[str, Any]] = {
    "crop_scale": {"crops": 1},
    "crop_size": {"crops": 1},
    "head_margin": {"head": "cosface"},
    "head_scale": {"head": "normalized_softmax"},
    "steepness": {"threshold": 0.1},
    "train_projection": {"adapters": {"prompts": 1}},
    "triplet_margin": {"triplet_weight": 1.0},
}
"""What is set beside an option, so that it matters."""
OF_METHOD: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("bt2", "dim"): (18, {}),
    ("bt2", "extra_dim"): (5, {}),
    ("drift_adapter", "rank"): (2, {"variant": "low_rank"}),
    ("fct", "logit_scale"): (5.0, {"loss": "kl"}),
    ("geometry_residual", "margin"): (1.5, {}),
    ("mixbct", "head_scale"): (3.0, {}),
    ("procrustes", "scale"): (True, {"centre": True}),
    ("xbt", "train_projection"): ("all", {}),
}
SWITCHED_OFF: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("drift_adapter", "rank"): [{}, {"variant": "orthogonal"}],
    ("drift_adapter", "hidden"): [{"variant": "orthogonal"}, {"variant": "low_rank"}],
    ("query_map", "scale"): [{"loss": "cosine"}],
    ("query_map", "bank_size"): [{"loss": "cosine"}, {"loss": "prototypes"}],
    ("oca", "random_start"): [{"transform": "none"}],
    ("simclr", "crop_size"): [{}],
    ("simclr", "crop_scale"): [{}],
    ("fct", "logit_scale"): [{}],
    ("procrustes", "scale"): [{}],
    ("lambda_orthogonality", "steepness"): [{}],
    ("unibct", "temperature"): [{"propagation": 0.0}, {"refresh_at": []}],
    ("unibct", "refresh_at"): [{"propagation": 0.0}],
    ("unibct", "propagation"): [{"refresh_at": []}],
}
"""Other options beside which an option changes nothing, and is refused."""
for method, model in METHODS.items():
    if issubclass(model, ClassifiedModel):
        SWITCHED_OFF[method, "head_scale"] = [{"head": head} for head in ("softmax", "triplet")]
        SWITCHED_OFF[method, "head_margin"] = [{"head": head} for head in ("softmax", "normalized_softmax")]
        SWITCHED_OFF[method, "triplet_margin"] = [{}]
        SWITCHED_OFF[method, "triplet_weight"] = [{"head": "triplet"}]
ALL = [(method, option) for method in METHODS for option in usual_options(method)]
NEVER = {
    *((method, "adapters") for method, model in METHODS.items() if model.embeds_in_memory),
    *((method, "metric") for method, option in ALL if option == "metric" and not METHODS[method].compares_by_l2),
    *((method, "logit_scale") for method in METHODS if method not in {"direct", "fct", "projection", "rbt", "xbt"}),
    *(("bt2", "batch_norm"), ("simclr", "batch_norm")),
}
"""Options that their method never reads, and which are refused: ``logit_scale`` of independent only without classes."""
ELSEWHERE = {
    ("fct", "logit_scale"): "a loss with the new model's classifier, tests/test_mapping_methods.py",
    ("query_map", "input"): "a model with penultimate features, tests/test_query_map.py",
    ("unibct", "propagation"): "read when the graph is built, tests/test_direct_methods.py",
    ("unibct", "temperature"): "read when the graph is built, tests/test_direct_methods.py",
}


def chosen(method: str, option: str) -> tuple[Any, dict[str, Any]]:
    """Return a value of an option under which something must change, and what is set beside it."""
    if (method, option) in OF_METHOD:
        return OF_METHOD[method, option]
    hint = get_type_hints(METHODS[method].config_class, localns={"torch": torch}, include_extras=True)[option]
    choices = get_args(hint) if get_origin(hint) is Literal else (True, 3.0, 0.3, 2)
    tried = [VALUES[option]] if option in VALUES else choices
    return next(value for value in tried if fits(hint, value) and value != usual_options(method)[option]), BESIDE.get(option, {})


def fits(hint: Any, value: Any) -> bool:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def made(method: str, folder: str, images: list[Image.Image], options: dict[str, Any]) -> str:
    """Return what comes of options: shapes, what is trained, the loss of a step and its gradients, or what a solved map gives."""
    model_class = METHODS[method]
    old = describe_old(OLD, dim=8, compatible_with=[OLDER]) if model_class.compares_with_old else None
    known = {"classes": CLASSES} if issubclass(model_class, ClassifiedModel) else {}
    torch.manual_seed(0)
    found: list[Any] = []
    try:
        model = model_class.from_encoder(folder, old=old, **known, **{**ALWAYS.get(method, {}), **options})
        found += [(name, tuple(each.shape), each.requires_grad) for name, each in model.named_parameters()]
        found += [model.views, model.refresh_at, model.metric, model.maps_galleries]
        if model.is_solved:
            model.fit([(NEW_ND, OLD_Nd)])
            found.append((model.upgrade(OLD_Nd) if model.maps_galleries else model.to_space(NEW_ND)).tolist())
        else:
            found += stepped(model, images)
    except XcompatError as error:  # such as a loss that this new model has no classifier for: it was read
        found.append(str(error))
    return repr(found)


def stepped(model: CompatModel, images: list[Image.Image]) -> list[Any]:
    """Return the loss of a batch and the gradients of all that is trained."""
    old = OldKnowledge(len(CLASSES), LABELS_N.numpy(), OLD_Nd.numpy(), OLD_ROWS_Cd.numpy())
    model.prepare(old, NEW_ND.numpy())
    batch = {"labels": LABELS_N[:4], "old_embeds": OLD_Nd[:4], "new_embeds": NEW_ND[:4], "old_text_embeds": OLD_Nd[4:8]}
    batch["pixel_values"] = model.processor.images(images)
    batch["second_pixel_values"] = model.processor.images([image.rotate(5) for image in images])
    if "input_ids" in model.columns:
        batch |= model.processor.texts(TEXTS)
    batch |= {name: torch.from_numpy(column[:4]) for name, column in model.extra_columns(old).items()}
    if crops := model.views.crops:
        side = model.views.crop_size
        batch["crop_pixel_values"] = unit(4 * crops * 3 * side, side).view(4, crops, 3, side, side)
    read = {*model.columns, *model.columns_if_known, "attention_mask"}
    shake(model)
    torch.manual_seed(0)
    loss = model.train()(**{name: column for name, column in batch.items() if name in read}, return_loss=True).loss
    loss.backward()
    return [loss.item(), *(each.grad.norm().item() for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize(
    ("method", "option"),
    mostly_nightly_rows(
        [pair for pair in ALL if pair not in NEVER | ELSEWHERE.keys()], lambda method, _: method in METHOD_OF_EACH_KIND
    ),
)
def test_an_option_changes_something(method: str, option: str, encoder_of: dict[str, str], images: list[Image.Image]) -> None:
    value, beside = chosen(method, option)
    assert value != usual_options(method)[option]
    METHODS[method].refuse_unread({**beside, option: value}, on_captions=False)
    folder = encoder_of["vit" if method == "simclr" else "clip"]
    assert made(method, folder, images, {**beside, option: value}) != made(method, folder, images, beside)


@pytest.mark.parametrize(("method", "option"), ALL)
def test_an_option_that_others_switch_off_is_refused(method: str, option: str) -> None:
    value, beside = chosen(method, option)
    others = [{}] if (method, option) in NEVER else SWITCHED_OFF.get((method, option), [])
    for each in others:
        with pytest.raises(XcompatError, match=f"options.{option}: .*; remove {option}"):
            METHODS[method].refuse_unread({**each, option: value}, on_captions=False)
    if (method, option) not in NEVER:
        METHODS[method].refuse_unread({**beside, option: value}, on_captions=False)


def test_no_option_is_forgotten() -> None:
    assert VALUES.keys() | BESIDE.keys() <= {option for _, option in ALL}
    assert NEVER | ELSEWHERE.keys() | SWITCHED_OFF.keys() | OF_METHOD.keys() <= set(ALL)

"""Every option of every method changes what is learned or embedded, or is refused by its name: none is accepted and ignored."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from conftest import TEXTS
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from schedule import METHOD_OF_EACH_KIND, mostly_nightly_rows
from test_models import CLASSES, OLD, OLDER, shake, unit

from xcompat.core.errors import XcompatError
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.classified import ClassifiedModel
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.training.stage_recipe import usual_options

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
    if views := model.views.crops:
        batch["crop_pixel_values"] = unit(4 * views * 3 * model.views.crop_size, model.views.crop_size).view(
            4, views, 3, model.views.crop_size, model.views.crop_size
        )
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
def test_an_option_changes_something(
    method: str, option: str, folder_of: dict[str, str], image_folder_of: dict[str, str], images: list[Image.Image]
) -> None:
    value, beside = chosen(method, option)
    assert value != usual_options(method)[option]
    METHODS[method].refuse_unread({**beside, option: value}, on_captions=False)
    folder = image_folder_of["vit"] if method == "simclr" else folder_of["clip"]
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

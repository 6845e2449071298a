"""Maps of other tools in ``.npz`` and ``.safetensors`` files: linear maps, or networks with a single hidden layer."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xcompat.core.errors import XcompatError, describe_error, nearest
from xcompat.heads import Projection
from xcompat.mapping.candidates import Described
from xcompat.mapping.request import Activation
from xcompat.methods import ProjectionModel, QueryMapModel, ResidualMlpModel
from xcompat.models import CompatModel

LARGEST = 2**31
"""Most bytes of an uncompressed adapter: a small file can expand beyond memory."""
SHARP = 2.0**10
"""Factor k in GELU(k·x) / k, which replaces max(x, 0). The two differ by less than 0.17 / k, near x = 0."""
_NAMES = {"W": "W", "weight": "W", "b": "b", "bias": "b", "scale": "scale", "scaling": "scale", "U": "U", "V": "V"}
_LAYER = re.compile(r"(\d+)\.(weight|bias)")
_FORMS = "W with b and scale, U and V with b and scale, or 0.weight, 0.bias, 2.weight, … of nn.Sequential"


class Adapter(NamedTuple):
    """Interpretation of an adapter file.

    Args:
        model: the map.
        how: interpretation of its arrays, in words.
    """

    model: CompatModel
    how: str


def read_adapters(path: Path, old: Described, new_dim: int, activation: Activation | None) -> list[Adapter]:
    """Read another tool's map, in all interpretations allowed by its array shapes.

    Args:
        path: ``.npz`` or ``.safetensors`` file.
        old: old model, from ``describe_old``.
        new_dim: D, the new embedding dimension.
        activation: activation of a network, if its file does not record it.

    Returns:
        The interpretations, at least 1.

    Raises:
        XcompatError: the file is damaged, maps between other dimensions, or contains an unsupported map.
    """
    arrays, named = _arrays(path)
    for name, array in arrays.items():
        if not array.isfinite().all():
            raise XcompatError(f"{name} in {path} contains NaN or infinite values; export the adapter again")
    arrays = _without_prefix(arrays)
    activation = _activation(path, activation, named)
    if any(_LAYER.fullmatch(name) for name in arrays):
        return list(_networks(path, arrays, old, new_dim, activation))
    if activation is not None:
        raise XcompatError(f"{path} contains a linear map, which has no activation; remove --activation")
    return list(_lines(path, arrays, old, new_dim))


# ------------------------------------------------------------------------------------------------------------ reading


def _arrays(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Return the arrays of a file as float32, and its recorded activation."""
    try:
        return _npz(path) if path.suffix == ".npz" else _safetensors(path)
    except (OSError, XcompatError):
        raise
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds of errors on damaged files
        raise XcompatError(f"cannot read arrays of numbers from {path} ({describe_error(error)}); export it again") from None


def _npz(path: Path) -> tuple[dict[str, Tensor], str | None]:
    with zipfile.ZipFile(path) as entries:
        if sum(entry.file_size for entry in entries.infolist()) > LARGEST:
            raise XcompatError(f"{path} contains more than {LARGEST // 2**30} GiB; choose a file with an adapter only")
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    activation = found.pop("activation", None)
    return {name: _float(path, name, torch.from_numpy(np.array(array))) for name, array in found.items()}, (
        str(activation) if activation is not None else None
    )


def _safetensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    try:
        with safe_open(path, framework="pt") as file:
            arrays = {name: _float(path, name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return arrays, (file.metadata() or {}).get("activation")
    except SafetensorError as error:
        raise XcompatError(f"{path} is not a safetensors file ({describe_error(error)}); export it again") from None


def _float(path: Path, name: str, array: Tensor) -> Tensor:
    if not array.is_floating_point():
        raise XcompatError(f"{name} in {path} is {str(array.dtype).removeprefix('torch.')}; weights must be floats")
    return array.float()


def _without_prefix(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove a common prefix of all names, e.g. a module's attribute, up to a dot."""
    parts = {name: name.split(".") for name in arrays}
    while parts and len({each[0] for each in parts.values()}) == 1 and min(map(len, parts.values())) > 1:
        parts = {name: each[1:] for name, each in parts.items()}
    return {".".join(each): arrays[name] for name, each in parts.items()}


def _activation(path: Path, given: Activation | None, named: str | None) -> Activation | None:
    if given is not None and named is not None and given != named.lower():
        raise XcompatError(f"{path} records the activation {named!r}, but --activation is {given!r}; remove --activation")
    if named is not None and named.lower() not in ("relu", "gelu"):
        raise XcompatError(f"{path} has the unsupported activation {named!r}; only relu and gelu are supported")
    return given or cast("Activation | None", named and named.lower())


# --------------------------------------------------------------------------------------------------------- linear maps


def _lines(path: Path, arrays: Mapping[str, Tensor], old: Described, new_dim: int) -> Iterator[Adapter]:
    """Yield the interpretations of x·W·scale + b."""
    old_dim = cast(int, old["dim"])
    for name in sorted(arrays.keys() - _NAMES.keys()):
        raise XcompatError(f"{path} contains the unknown array {name!r}; {nearest(name, _NAMES)} ({_FORMS})")
    named = {_NAMES[name]: array for name, array in arrays.items()}
    if len(named) < len(arrays) or named.keys() & {"W", "U", "V"} not in ({"W"}, {"U", "V"}):
        raise XcompatError(f"{path} contains {', '.join(arrays) or 'no array'}; an adapter has {_FORMS}")
    whole = _of_shape(named["W"], new_dim, old_dim) if "W" in named else _of_factors(named["U"], named["V"], new_dim, old_dim)
    matrices = dict(whole)
    if not matrices:
        shapes = " and ".join(f"{name} of {tuple(named[name].shape)}" for name in ("W", "U", "V") if name in named)
        raise XcompatError(
            f"{path} contains {shapes}, which cannot map {new_dim} to {old_dim} dimensions; use a map of these models"
        )
    zero_d, one_d = torch.zeros(old_dim), torch.ones(old_dim)
    bias_d = _vector(path, "b", named.get("b", zero_d), old_dim)
    scale_d = _vector(path, "scale", named.get("scale", one_d), old_dim)
    for how, weight_Dd in matrices.items():
        model = QueryMapModel(QueryMapModel.config_class(old=old, embedding_dim=new_dim, shape="linear"))
        assert model.linear is not None
        model.linear.load_state_dict({"weight": (weight_Dd * scale_d).T, "bias": bias_d})
        yield Adapter(model.for_inference(), how)


def _of_shape(weight: Tensor, new_dim: int, old_dim: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the possible matrices (D, d) of a weight."""
    if weight.shape == (new_dim, old_dim):
        yield "x·W", weight
    if weight.shape == (old_dim, new_dim):
        yield "W·x", weight.T


def _of_factors(first: Tensor, second: Tensor, new_dim: int, old_dim: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the possible matrices (D, d) of two low-rank factors."""
    if first.ndim != 2 or second.ndim != 2:
        return
    for name, left in (("U", first), ("Uᵀ", first.T)):
        for other, right in (("V", second), ("Vᵀ", second.T)):
            if left.shape[1] == right.shape[0] and {len(left), right.shape[1]} == {new_dim, old_dim}:
                for how, weight_Dd in _of_shape(left @ right, new_dim, old_dim):
                    yield how.replace("W", f"({name}·{other})"), weight_Dd


def _vector(path: Path, name: str, values: Tensor, dim: int) -> Tensor:
    if values.numel() not in (1, dim) or (name == "b" and values.numel() != dim):
        raise XcompatError(f"{name} in {path} has the shape {tuple(values.shape)}; it needs {dim} numbers")
    return values.reshape(-1).expand(dim)


# ------------------------------------------------------------------------------------------------------------ networks


def _networks(
    path: Path, arrays: Mapping[str, Tensor], old: Described, new_dim: int, activation: Activation | None
) -> Iterator[Adapter]:
    """Yield the interpretations of the layers of ``nn.Sequential``."""
    old_dim = cast(int, old["dim"])
    for name in arrays:
        if not _LAYER.fullmatch(name):
            raise XcompatError(
                f"{path} contains {name!r} beside layers of nn.Sequential, which have only a weight and a bias; remove this array"
            )
    if _is_projection(arrays, new_dim, old_dim) and activation != "relu":
        model = ProjectionModel(ProjectionModel.config_class(old=old, embedding_dim=new_dim))
        model.projection.load_state_dict(dict(arrays))
        yield Adapter(model.for_inference(), "XBT's φ, with LayerNorm and GELU")
        return
    weights, given = _two_layers(path, arrays)
    if activation is None:
        raise XcompatError(f"{path} does not record its activation; set --activation relu or gelu")
    found = list[Adapter]()
    for how, (first, last) in (("W·x", weights), ("x·W", (weights[0].T, weights[1].T))):
        biases = [torch.zeros(len(w)) if b is None else b for w, b in zip((first, last), given, strict=True)]
        fits = [len(bias) == len(weight) for weight, bias in zip((first, last), biases, strict=True)]
        if all(fits) and (first.shape[1], last.shape[1], len(last)) == (new_dim, len(first), old_dim):
            layers = dict(zip(("0.weight", "2.weight", "0.bias", "2.bias"), (first, last, *biases), strict=True))
            found.append(Adapter(_network(old, new_dim, layers, activation), f"two layers {how} with {activation}"))
    if not found:
        shapes = " and ".join(str(tuple(each.shape)) for each in weights)
        raise XcompatError(
            f"{path} contains layers of {shapes}, which cannot map {new_dim} to {old_dim} dimensions; use a map of these models"
        )
    yield from found


def _is_projection(arrays: Mapping[str, Tensor], new_dim: int, old_dim: int) -> bool:
    with torch.device("meta"):
        expected = Projection(new_dim, old_dim).state_dict()
    return {name: array.shape for name, array in arrays.items()} == {name: array.shape for name, array in expected.items()}


def _two_layers(path: Path, arrays: Mapping[str, Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor | None]]:
    """Return the weights and biases of a network with a single hidden layer; reject any other network."""
    layers = sorted({int(name.split(".")[0]) for name in arrays})
    for layer in layers:
        if arrays.get(f"{layer}.weight", torch.zeros(0)).ndim != 2:
            raise XcompatError(f"layer {layer} in {path} is not a linear layer; only XBT's φ can have other layers")
    if len(layers) != 2 or layers[1] == layers[0] + 1:
        raise XcompatError(
            f"{path} contains the layers {', '.join(map(str, layers))}; supported networks have two linear layers with an "
            "activation between them, or are XBT's φ"
        )
    first, last = (arrays[f"{layer}.weight"] for layer in layers)
    for name, bias in arrays.items():
        if name.endswith(".bias") and bias.ndim != 1:
            raise XcompatError(f"{name} in {path} has the shape {tuple(bias.shape)}; a bias is a row of numbers")
    return (first, last), [arrays.get(f"{layer}.bias") for layer in layers]


def _network(old: Described, new_dim: int, layers: dict[str, Tensor], activation: Activation) -> CompatModel:
    """Return a network as the residual of a zero linear map."""
    config = ResidualMlpModel.config_class(old=old, embedding_dim=new_dim, hidden=len(layers["0.bias"]))
    model = ResidualMlpModel(config)
    for parameter in model.skip.parameters():
        torch.nn.init.zeros_(parameter)
    if activation == "relu":
        first = {name: SHARP * layers[name] for name in ("0.weight", "0.bias")}
        layers = layers | first | {"2.weight": layers["2.weight"] / SHARP}
    model.residual.load_state_dict(layers)
    return model.for_inference()

"""Image encoders from any ``nn.Module``."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import field
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from PIL.Image import Resampling
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, CLIPImageProcessorPil, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention

from xcompat.core.errors import XcompatError
from xcompat.core.plugins import is_file_class, load_class

M = TypeVar("M", bound=type[nn.Module])
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class ModuleEncoder(PreTrainedModel):
    """Image model of transformers around a module. The module initialises its own weights."""

    main_input_name = "pixel_values"
    base_model_prefix = "module"
    module_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.module = self.module_class(**{name: getattr(config, name) for name in _options(self.module_class)})
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None: ...

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutputWithPoolingAndNoAttention:
        """Return the module's features as ``pooler_output`` (B, D)."""
        return BaseModelOutputWithPoolingAndNoAttention(pooler_output=self.module(pixel_values))


def register_encoder(module: M) -> M:
    """Make an image encoder known to recipes and transformers' auto classes, as decorator of its module.

    Its ``model_type`` is the class name in lower case, and its options are the arguments of ``__init__``.

    Args:
        module: maps pixels (B, 3, H, W) to features (B, D). Every argument of ``__init__`` has a default that JSON can store.

    Returns:
        The module class.

    Raises:
        XcompatError: an argument has no default, or the name belongs to another architecture.

    Example:
        >>> @register_encoder
        ... class MeanColour(nn.Module):
        ...     def __init__(self, width: int = 4) -> None:
        ...         super().__init__()
        ...         self.layer = nn.Linear(3, width)
        ...
        ...     def forward(self, pixel_values: Tensor) -> Tensor:
        ...         return self.layer(pixel_values.mean(dim=(2, 3)))
        >>> AutoConfig.for_model("meancolour").width
        4
    """
    name, options = module.__name__, _options(module)
    for key, option in options.items():
        if option.default is Parameter.empty:
            raise XcompatError(
                f"{name} has no default for {key!r}; add a default, because the configuration stores every argument"
            )
    model_type = name.lower()
    if model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type].__module__ != module.__module__:
        raise XcompatError(f"{name}: {CONFIG_MAPPING[model_type].__module__} also has a {model_type!r}; rename the class")
    defaults = {key: field(default_factory=partial(deepcopy, option.default)) for key, option in options.items()}
    fields = {"model_type": model_type, "__annotations__": dict.fromkeys(options, Any), "__module__": module.__module__}
    config_class: Any = type(f"{name}Config", (PreTrainedConfig,), fields | defaults)
    model_class = type(f"{name}Encoder", (ModuleEncoder,), {"config_class": config_class, "module_class": module})
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, model_class, exist_ok=True)
    return module


def _options(module: type[nn.Module]) -> dict[str, Parameter]:
    return {name: found for name, found in signature(module).parameters.items() if found.kind not in _VARIABLE}


def load_model_type(name: str) -> str:
    """Return the ``model_type`` of an architecture, or of ``path.py:Class``, which is registered.

    Args:
        name: ``model_type`` in a recipe.

    Raises:
        XcompatError: the file fails, or has no such module.
    """
    if not is_file_class(name):
        return name
    module = load_class(name, nn.Module)
    model_type = module.__name__.lower()
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type].__module__ != module.__module__:
        register_encoder(module)
    return model_type


def save_module(module: nn.Module, transform: object, folder: str | Path, **options: object) -> None:
    """Save a trained module with its transform, for :func:`~xcompat.encoders.load_encoder`.

    Args:
        module: of a class with :func:`register_encoder`.
        transform: torchvision's ``Compose`` of ``Resize``, ``CenterCrop``, a conversion to tensors and ``Normalize``.
        folder: output folder.
        options: arguments of the module's ``__init__`` that differ from their defaults.

    Raises:
        XcompatError: the transform has another part, or no size.
    """
    processor = image_processor_of(transform)
    model = AutoModel.from_config(AutoConfig.for_model(type(module).__name__.lower(), **options))
    model.module.load_state_dict(module.state_dict())
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def image_processor_of(transform: Any) -> CLIPImageProcessorPil:  # noqa: ANN401 - torchvision's
    """Return transformers' image processor with the same result as a torchvision transform.

    Args:
        transform: as in :func:`save_module`.

    Raises:
        XcompatError: the transform has another part, or no size.
    """
    settings: dict[str, Any] = {"do_resize": False, "do_center_crop": False, "do_normalize": False}
    for part in transform.transforms:
        kind = type(part).__name__
        if kind == "Resize":
            sides = [part.size] if isinstance(part.size, int) else list(part.size)
            size = {"shortest_edge": sides[0]} if len(sides) == 1 else {"height": sides[0], "width": sides[1]}
            kernel = getattr(part.interpolation, "value", part.interpolation)  # v2 has a plain name
            settings |= {"do_resize": True, "size": size, "resample": Resampling[kernel.upper()]}
        elif kind == "CenterCrop":
            settings |= {"do_center_crop": True, "crop_size": dict(zip(("height", "width"), part.size, strict=True))}
        elif kind == "Normalize":
            settings |= {"do_normalize": True, "image_mean": list(part.mean), "image_std": list(part.std)}
        elif kind not in ("ToTensor", "ToImage", "ToDtype", "PILToTensor", "ConvertImageDtype"):
            raise XcompatError(f"the transform has a {kind}; use only Resize, CenterCrop, ToTensor and Normalize")
    if not settings["do_resize"]:
        raise XcompatError("the transform has no Resize; add Resize with the size of the encoder's images")
    return CLIPImageProcessorPil(**settings)

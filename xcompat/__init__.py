"""Change the embedding model without re-embedding the gallery.

``import xcompat`` is cheap and registers its models with ``AutoConfig`` and ``AutoModel`` of transformers. Its classes load torch
and transformers at first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import wrapt

from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint

if TYPE_CHECKING:
    from xcompat.mapping import fit_map
    from xcompat.methods import *  # noqa: F403 - the lazy names of __getattr__, for type checkers
    from xcompat.models import *  # noqa: F403

__version__ = "0.1.0"

_PACKAGES = ("xcompat.methods", "xcompat.models")


def __getattr__(name: str) -> object:
    if name == "fit_map":
        return importlib.import_module("xcompat.mapping").fit_map
    if not name.startswith("_") and name.endswith(("Config", "Model")):
        for package in _PACKAGES:
            if name in (found := importlib.import_module(package)).__all__:
                return getattr(found, name)
    raise AttributeError(f"module 'xcompat' has no attribute {name!r}")


def __dir__() -> list[str]:
    lazy = [name for package in _PACKAGES for name in importlib.import_module(package).__all__]
    return sorted({*globals(), "fit_map", *(name for name in lazy if name.endswith(("Config", "Model")))})


_MODELING = "transformers.models.auto.modeling_auto"
_CONFIGURATION = "transformers.models.auto.configuration_auto"
_BASE = "transformers.modeling_utils"
_CONTRACT = "xcompat.models"


def _register(module: Any) -> None:  # noqa: ANN401 - a module
    if module.__name__ not in (_MODELING, _CONTRACT) and _MODELING in sys.modules:  # its own import calls this again
        return
    base = sys.modules.get(_BASE)
    if base is not None and not hasattr(base, "PreTrainedModel"):  # still being imported, but our models need it
        return
    contract = sys.modules.get(_CONTRACT)
    if contract is not None and not hasattr(contract, "CompatModel"):  # still being imported, but all methods need it
        return
    if _CONFIGURATION in sys.modules:
        importlib.import_module("xcompat.methods")


def _register_pipeline(_: object) -> None:
    importlib.import_module("xcompat.retrieval.pipeline")  # registers itself at import


_AUTO_CLASSES = {
    "configuration_auto": ("AutoConfig",),
    "modeling_auto": ("AutoModel", "AutoModelForZeroShotImageClassification"),
    "image_processing_auto": ("AutoImageProcessor",),
    "processing_auto": ("AutoProcessor",),
    "tokenization_auto": ("AutoTokenizer",),
}
"""Auto classes of transformers that read files of a model, by module."""


def _find_files(module: Any) -> None:  # noqa: ANN401 - a module
    """Make auto classes find the files of compatible models, as transformers cannot register files."""

    def load(wrapped: object, auto_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - as wrapt calls it
        return importlib.import_module("xcompat.auto_files").load(auto_class.__name__, wrapped, *args, **kwargs)

    for name in _AUTO_CLASSES[module.__name__.rpartition(".")[2]]:
        wrapt.wrap_function_wrapper(module, f"{name}.from_pretrained", load)


for _module in _AUTO_CLASSES:
    wrapt.register_post_import_hook(_find_files, f"transformers.models.auto.{_module}")
for _needed in (_MODELING, _CONFIGURATION, _BASE, _CONTRACT):
    wrapt.register_post_import_hook(_register, _needed)
wrapt.register_post_import_hook(_register_pipeline, "transformers.pipelines")

__all__ = ["Fingerprint", "FingerprintMismatchError", "XcompatError", "__version__", "fit_map"]

"""One file per method; to add one, write its file and name its model class below."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel

from xcompat.models.base import CompatConfig, CompatModel, describe_old
from xcompat.models.direct import DirectConfig, DirectModel
from xcompat.models.independent import IndependentConfig, IndependentModel
from xcompat.models.procrustes import ProcrustesConfig, ProcrustesModel
from xcompat.models.projection import ProjectionConfig, ProjectionModel
from xcompat.models.ridge import RidgeConfig, RidgeModel
from xcompat.models.xbt import XbtConfig, XbtModel

METHODS: dict[str, type[CompatModel]] = {
    model.config_class.model_type.removeprefix("xcompat-"): model
    for model in (DirectModel, IndependentModel, ProcrustesModel, ProjectionModel, RidgeModel, XbtModel)
}
"""Recipe name of every method."""

for _model in METHODS.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModel.register(_model.config_class, _model, exist_ok=True)

__all__ = [
    "METHODS",
    "CompatConfig",
    "CompatModel",
    "DirectConfig",
    "DirectModel",
    "IndependentConfig",
    "IndependentModel",
    "ProcrustesConfig",
    "ProcrustesModel",
    "ProjectionConfig",
    "ProjectionModel",
    "RidgeConfig",
    "RidgeModel",
    "XbtConfig",
    "XbtModel",
    "describe_old",
]

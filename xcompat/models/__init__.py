"""One file per method; to add one, write its file and name its model class below."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel

from xcompat.models.advbct import AdvBctConfig, AdvBctModel
from xcompat.models.autoencoder import AutoencoderConfig, AutoencoderModel
from xcompat.models.base import CompatModel
from xcompat.models.bct import BctConfig, BctModel
from xcompat.models.bt2 import Bt2Config, Bt2Model
from xcompat.models.config import CompatConfig, describe_old
from xcompat.models.contrast import ContrastConfig, ContrastModel
from xcompat.models.direct import DirectConfig, DirectModel
from xcompat.models.fct import FctConfig, FctModel
from xcompat.models.independent import IndependentConfig, IndependentModel
from xcompat.models.l2 import L2Config, L2Model
from xcompat.models.lce import LceConfig, LceModel
from xcompat.models.mixbct import MixBctConfig, MixBctModel
from xcompat.models.nccl import NcclConfig, NcclModel
from xcompat.models.oca import OcaConfig, OcaModel
from xcompat.models.procrustes import ProcrustesConfig, ProcrustesModel
from xcompat.models.projection import ProjectionConfig, ProjectionModel
from xcompat.models.query_map import QueryMapConfig, QueryMapModel
from xcompat.models.rbt import RbtConfig, RbtModel
from xcompat.models.residual_mlp import ResidualMlpConfig, ResidualMlpModel
from xcompat.models.ridge import RidgeConfig, RidgeModel
from xcompat.models.simclr import SimClrConfig, SimClrModel
from xcompat.models.unibct import UniBctConfig, UniBctModel
from xcompat.models.xbt import XbtConfig, XbtModel

METHODS: dict[str, type[CompatModel]] = {
    model.config_class.model_type.removeprefix("xcompat-"): model
    for model in (
        AdvBctModel,
        AutoencoderModel,
        BctModel,
        Bt2Model,
        ContrastModel,
        DirectModel,
        FctModel,
        IndependentModel,
        L2Model,
        LceModel,
        MixBctModel,
        NcclModel,
        OcaModel,
        ProcrustesModel,
        ProjectionModel,
        QueryMapModel,
        RbtModel,
        ResidualMlpModel,
        RidgeModel,
        SimClrModel,
        UniBctModel,
        XbtModel,
    )
}
"""Recipe name of every method."""

for _model in METHODS.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModel.register(_model.config_class, _model, exist_ok=True)

__all__ = [
    "METHODS",
    "AdvBctConfig",
    "AdvBctModel",
    "AutoencoderConfig",
    "AutoencoderModel",
    "BctConfig",
    "BctModel",
    "Bt2Config",
    "Bt2Model",
    "CompatConfig",
    "CompatModel",
    "ContrastConfig",
    "ContrastModel",
    "DirectConfig",
    "DirectModel",
    "FctConfig",
    "FctModel",
    "IndependentConfig",
    "IndependentModel",
    "L2Config",
    "L2Model",
    "LceConfig",
    "LceModel",
    "MixBctConfig",
    "MixBctModel",
    "NcclConfig",
    "NcclModel",
    "OcaConfig",
    "OcaModel",
    "ProcrustesConfig",
    "ProcrustesModel",
    "ProjectionConfig",
    "ProjectionModel",
    "QueryMapConfig",
    "QueryMapModel",
    "RbtConfig",
    "RbtModel",
    "ResidualMlpConfig",
    "ResidualMlpModel",
    "RidgeConfig",
    "RidgeModel",
    "SimClrConfig",
    "SimClrModel",
    "UniBctConfig",
    "UniBctModel",
    "XbtConfig",
    "XbtModel",
    "describe_old",
]

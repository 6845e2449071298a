"""Methods, a file per method. To add a method, write its file and list its model class below."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel

from xcompat.encoders import architectures  # noqa: F401 - register themselves with AutoModel, as methods do
from xcompat.methods.advbct import AdvBctConfig, AdvBctModel
from xcompat.methods.autoencoder import AutoencoderConfig, AutoencoderModel
from xcompat.methods.bct import BctConfig, BctModel
from xcompat.methods.bt2 import Bt2Config, Bt2Model
from xcompat.methods.contrast import ContrastConfig, ContrastModel
from xcompat.methods.direct import DirectConfig, DirectModel
from xcompat.methods.drift_adapter import DriftAdapterConfig, DriftAdapterModel
from xcompat.methods.fastfill import FastfillConfig, FastfillModel
from xcompat.methods.fct import FctConfig, FctModel
from xcompat.methods.geometry_residual import GeometryResidualConfig, GeometryResidualModel
from xcompat.methods.independent import IndependentConfig, IndependentModel
from xcompat.methods.l2 import L2Config, L2Model
from xcompat.methods.lambda_orthogonality import LambdaOrthogonalityConfig, LambdaOrthogonalityModel
from xcompat.methods.lce import LceConfig, LceModel
from xcompat.methods.mini_vec2vec import MiniVec2VecConfig, MiniVec2VecModel
from xcompat.methods.mixbct import MixBctConfig, MixBctModel
from xcompat.methods.nccl import NcclConfig, NcclModel
from xcompat.methods.oca import OcaConfig, OcaModel
from xcompat.methods.procrustes import ProcrustesConfig, ProcrustesModel
from xcompat.methods.projection import ProjectionConfig, ProjectionModel
from xcompat.methods.query_map import QueryMapConfig, QueryMapModel
from xcompat.methods.rbt import RbtConfig, RbtModel
from xcompat.methods.residual_mlp import ResidualMlpConfig, ResidualMlpModel
from xcompat.methods.ridge import RidgeConfig, RidgeModel
from xcompat.methods.simclr import SimClrConfig, SimClrModel
from xcompat.methods.unibct import UniBctConfig, UniBctModel
from xcompat.methods.whitened import WhitenedConfig, WhitenedModel
from xcompat.methods.xbt import XbtConfig, XbtModel
from xcompat.models.base import CompatModel

METHODS: dict[str, type[CompatModel]] = {
    model.config_class.model_type.removeprefix("xcompat-"): model
    for model in (
        AdvBctModel,
        AutoencoderModel,
        BctModel,
        Bt2Model,
        ContrastModel,
        DirectModel,
        DriftAdapterModel,
        FastfillModel,
        FctModel,
        GeometryResidualModel,
        IndependentModel,
        L2Model,
        LambdaOrthogonalityModel,
        LceModel,
        MiniVec2VecModel,
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
        WhitenedModel,
        XbtModel,
    )
}
"""Recipe name -> model class of each method."""

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
    "ContrastConfig",
    "ContrastModel",
    "DirectConfig",
    "DirectModel",
    "DriftAdapterConfig",
    "DriftAdapterModel",
    "FastfillConfig",
    "FastfillModel",
    "FctConfig",
    "FctModel",
    "GeometryResidualConfig",
    "GeometryResidualModel",
    "IndependentConfig",
    "IndependentModel",
    "L2Config",
    "L2Model",
    "LambdaOrthogonalityConfig",
    "LambdaOrthogonalityModel",
    "LceConfig",
    "LceModel",
    "MiniVec2VecConfig",
    "MiniVec2VecModel",
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
    "WhitenedConfig",
    "WhitenedModel",
    "XbtConfig",
    "XbtModel",
]

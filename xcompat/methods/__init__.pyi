# Written by `python docs/options.py`.
from xcompat.methods.advbct import AdvBctConfig as AdvBctConfig
from xcompat.methods.advbct import AdvBctModel as AdvBctModel
from xcompat.methods.autoencoder import AutoencoderConfig as AutoencoderConfig
from xcompat.methods.autoencoder import AutoencoderModel as AutoencoderModel
from xcompat.methods.bct import BctConfig as BctConfig
from xcompat.methods.bct import BctModel as BctModel
from xcompat.methods.bt2 import Bt2Config as Bt2Config
from xcompat.methods.bt2 import Bt2Model as Bt2Model
from xcompat.methods.contrast import ContrastConfig as ContrastConfig
from xcompat.methods.contrast import ContrastModel as ContrastModel
from xcompat.methods.direct import DirectConfig as DirectConfig
from xcompat.methods.direct import DirectModel as DirectModel
from xcompat.methods.drift_adapter import DriftAdapterConfig as DriftAdapterConfig
from xcompat.methods.drift_adapter import DriftAdapterModel as DriftAdapterModel
from xcompat.methods.fastfill import FastfillConfig as FastfillConfig
from xcompat.methods.fastfill import FastfillModel as FastfillModel
from xcompat.methods.fct import FctConfig as FctConfig
from xcompat.methods.fct import FctModel as FctModel
from xcompat.methods.geometry_residual import GeometryResidualConfig as GeometryResidualConfig
from xcompat.methods.geometry_residual import GeometryResidualModel as GeometryResidualModel
from xcompat.methods.independent import IndependentConfig as IndependentConfig
from xcompat.methods.independent import IndependentModel as IndependentModel
from xcompat.methods.l2 import L2Config as L2Config
from xcompat.methods.l2 import L2Model as L2Model
from xcompat.methods.lambda_orthogonality import LambdaOrthogonalityConfig as LambdaOrthogonalityConfig
from xcompat.methods.lambda_orthogonality import LambdaOrthogonalityModel as LambdaOrthogonalityModel
from xcompat.methods.lce import LceConfig as LceConfig
from xcompat.methods.lce import LceModel as LceModel
from xcompat.methods.mini_vec2vec import MiniVec2VecConfig as MiniVec2VecConfig
from xcompat.methods.mini_vec2vec import MiniVec2VecModel as MiniVec2VecModel
from xcompat.methods.mixbct import MixBctConfig as MixBctConfig
from xcompat.methods.mixbct import MixBctModel as MixBctModel
from xcompat.methods.nccl import NcclConfig as NcclConfig
from xcompat.methods.nccl import NcclModel as NcclModel
from xcompat.methods.oca import OcaConfig as OcaConfig
from xcompat.methods.oca import OcaModel as OcaModel
from xcompat.methods.procrustes import ProcrustesConfig as ProcrustesConfig
from xcompat.methods.procrustes import ProcrustesModel as ProcrustesModel
from xcompat.methods.projection import ProjectionConfig as ProjectionConfig
from xcompat.methods.projection import ProjectionModel as ProjectionModel
from xcompat.methods.query_map import QueryMapConfig as QueryMapConfig
from xcompat.methods.query_map import QueryMapModel as QueryMapModel
from xcompat.methods.rbt import RbtConfig as RbtConfig
from xcompat.methods.rbt import RbtModel as RbtModel
from xcompat.methods.residual_mlp import ResidualMlpConfig as ResidualMlpConfig
from xcompat.methods.residual_mlp import ResidualMlpModel as ResidualMlpModel
from xcompat.methods.ridge import RidgeConfig as RidgeConfig
from xcompat.methods.ridge import RidgeModel as RidgeModel
from xcompat.methods.simclr import SimClrConfig as SimClrConfig
from xcompat.methods.simclr import SimClrModel as SimClrModel
from xcompat.methods.unibct import UniBctConfig as UniBctConfig
from xcompat.methods.unibct import UniBctModel as UniBctModel
from xcompat.methods.whitened import WhitenedConfig as WhitenedConfig
from xcompat.methods.whitened import WhitenedModel as WhitenedModel
from xcompat.methods.xbt import XbtConfig as XbtConfig
from xcompat.methods.xbt import XbtModel as XbtModel
from xcompat.models.registry import METHODS as METHODS

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

"""Orthogonal Procrustes: the rotation that brings the new space nearest to the old one."""

from __future__ import annotations

import torch
from torch import Tensor

from xcompat.models.base import CompatConfig
from xcompat.models.closed_form import ClosedFormModel, Moments


class ProcrustesConfig(CompatConfig):
    """Configuration of :class:`ProcrustesModel`."""

    model_type = "xcompat-procrustes"


class ProcrustesModel(ClosedFormModel):
    """argmax tr(WᵀXᵀY) over W with orthonormal columns (rows, if d > D): W = UVᵀ of XᵀY = USVᵀ (Schönemann 1966)."""

    config_class = ProcrustesConfig
    citation = "Schönemann, A generalized solution of the orthogonal Procrustes problem, Psychometrika 1966"

    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """See :meth:`ClosedFormModel.solve`."""
        left, _, right = torch.linalg.svd(moments.new_old_Dd, full_matrices=False)
        return left @ right, torch.zeros_like(moments.old_d)

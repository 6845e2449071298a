"""Orthogonal Procrustes: the rotation that brings one space nearest to the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from typing_extensions import override

from xcompat.models.closed_form import LeastSquaresModel, Moments, solve_procrustes
from xcompat.models.mapped import MappedConfig
from xcompat.models.registry import register


class ProcrustesConfig(MappedConfig):
    """Configuration of :class:`ProcrustesModel`.

    Args:
        centre: whether to solve the rotation on centred embeddings; the map then moves the source's mean to the target's.
        scale: whether to multiply the rotation by the best factor; without ``centre``, normalisation undoes it.
    """

    model_type = "xcompat-procrustes"

    centre: bool = False
    scale: bool = False


@register
class ProcrustesModel(LeastSquaresModel):
    """argmax tr(WᵀXᵀY) over W with orthonormal columns (rows, if d > D): W = UVᵀ of XᵀY = USVᵀ (Schönemann 1966)."""

    config_class = ProcrustesConfig
    citation = "Schönemann, A generalized solution of the orthogonal Procrustes problem, Psychometrika 1966"

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if not options["centre"]:
            yield "scale", "normalisation undoes a factor if options.centre is false"

    @override
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        return solve_procrustes(moments, self.config.centre, self.config.scale)

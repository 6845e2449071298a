"""Base class for FCT and related methods, which map stored embeddings with side-information."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.heads import ForwardTransform, LayerNorms
from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig, Metric
from xcompat.outputs import Batch, CompatOutput

FREEZE_AT = 0.5
"""Share of training before batch-norm statistics are frozen: epoch 40 of 80."""


class ForwardMapConfig(CompatConfig):
    """Configuration of :class:`ForwardMapModel`.

    Args:
        side_info: model of the side-information ψ, described like ``old``; None for no side-information.
        new_side_info: model of the new side-information, to map ψ to it for the next update; None for no such map.
        mixer_width: width of the layers that join φ_old and ψ; Table 11 has 512 to 4096.
        norm: normalisation between layers, ``batch``, or ``layer`` (Appendix D.5).
    """

    side_info: dict | None = None
    new_side_info: dict | None = None
    mixer_width: int = 2048
    norm: LayerNorms = "batch"


class ForwardMapModel(CompatModel):
    """h(φ_old, ψ), and in an update chain g(φ_old, ψ) (FCT §3.3, §4.4); subclasses implement h's loss.

    Outputs have unit length (as in Appendix D.7) if their targets have; with ``metric: l2`` they are raw and use L2 distance, as
    in the paper's other tables. In the second half of training, batch norms use their running statistics and still train their
    affine part.

    Args:
        config: the configuration.
        encoder: frozen new encoder for later inference, not part of the checkpoint.
    """

    config_class = ForwardMapConfig
    columns: ClassVar[tuple[str, ...]] = ("new_embeds", "old_embeds")
    columns_if_known = ("side_info", "new_side_info")
    embedded = ("old_embeds", "side_info")
    embeds_in_memory = True
    maps_galleries = True
    compares_by_l2 = True

    def __init__(self, config: ForwardMapConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        assert config.old is not None
        if config.new_side_info is not None and config.side_info is None:
            raise XcompatError("new_side_info needs side_info; set side_info too")
        if (width := config.mixer_width) < 1:
            raise XcompatError(f"options.mixer_width is {width}; set 1 or more")
        self.transform = self._transform(config.embedding_dim, self.metric)
        new_side = config.new_side_info
        self.side_transform = self._transform(new_side["dim"], new_side.get("metric")) if new_side is not None else None
        known = (name for name in self.columns_if_known if getattr(config, name) is not None)
        self.columns = (*self.columns, *known)  # type: ignore[misc]  # the configuration decides which columns it reads

    def _transform(self, dim: int, metric: str | None) -> ForwardTransform:
        """Return h or g, with an output (B, ``dim``) for a metric."""
        config, side = self.config, self.config.side_info or {}
        given: Any = {"unit": metric != "l2", "unit_side": side.get("metric") != "l2", "norm": config.norm}
        return ForwardTransform(config.old["dim"], side.get("dim"), dim, config.mixer_width, **given)

    @property
    @override
    def metric(self) -> Metric:
        return (self.config.old or {}).get("metric", "cosine")

    @override
    def own_upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings into the new space with h."""
        self.require_side_info(side_info)
        return self.transform(old_embeds, side_info)

    def require_side_info(self, side_info: Tensor | None) -> None:
        """Raise if side-information is missing, unexpected or has another dimension."""
        side, name = self.config.side_info, type(self).__name__
        if side is not None and side_info is None:
            which = side["name"]
            raise XcompatError(f"{name} was trained with side-information: pass side_info of the same items, made by {which}")
        if side is None and side_info is not None:
            raise XcompatError(f"{name} was trained without side-information: remove side_info")
        if side is not None and side_info is not None and side_info.shape[1:] != (side["dim"],):
            raise XcompatError(f"{name} needs side-information (B, {side['dim']}), not {tuple(side_info.shape)}")

    @property
    def reads_side_info(self) -> bool:
        """Return whether the map was trained with side-information."""
        return self.config.side_info is not None

    @property
    def writes_side_info(self) -> bool:
        """Return whether the map has g."""
        return self.side_transform is not None

    def upgrade_side(self, old_embeds: Tensor, side_info: Tensor) -> Tensor:
        """Map stored side-information to the new model's with g, (B, S') L2-normalised."""
        if self.side_transform is None:
            return super().upgrade_side(old_embeds, side_info)
        return self.side_transform(old_embeds, side_info)

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        self.begin_batch(batch)
        return CompatOutput(image_embeds=self.transform(batch["old_embeds"], batch.get("side_info")))

    def begin_batch(self, batch: Batch) -> None:
        """Raise if a batch lacks an input for h, and freeze statistics in the second half of training."""
        self.require_columns(batch, (name for name in self.columns if name in ("old_embeds", "side_info")))
        if self.training and self.progress >= FREEZE_AT:
            for norm in (module for module in self.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)):
                norm.eval()  # in every step, because the Trainer calls train() before each

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return h's loss, plus g's mean squared distance to the new side-information."""
        loss = self.map_loss(output, batch)
        if self.side_transform is None:
            return loss
        mapped = self.side_transform(batch["old_embeds"], batch["side_info"])
        return loss + squared_distances(mapped, batch["new_side_info"], self.side_transform.unit).mean()

    @abstractmethod
    def map_loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return h's loss, a scalar."""


def squared_distances(mapped_BD: Tensor, target_BD: Tensor, unit: bool) -> Tensor:
    """Return each row's ‖x − t‖² (B,), with targets normalised if ``unit``."""
    target_BD = nn.functional.normalize(target_BD.float(), dim=-1) if unit else target_BD
    return (mapped_BD - target_BD).square().sum(dim=-1)

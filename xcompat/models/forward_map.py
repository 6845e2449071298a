"""The base of FCT and its kin: h maps stored old embeddings, with their side-information, and g that for the next update."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.heads import ForwardTransform
from xcompat.models.base import CompatModel
from xcompat.models.config import Compares, CompatConfig
from xcompat.outputs import Batch, CompatOutput

FREEZE_AT = 0.5
"""The share of training after which batch-norm statistics are frozen: epoch 40 of 80."""


class ForwardMapConfig(CompatConfig):
    """Configuration of :class:`ForwardMapModel`.

    Args:
        side_info: the model that makes the side-information ψ, described like ``old``; None for none.
        new_side_info: the model of the new model's side-information, to which ψ is mapped for the next update; None for none.
        mixer_width: width of the layers behind those that φ_old and ψ go through alone; Table 11 has 512 to 4096.
    """

    side_info: dict | None = None
    new_side_info: dict | None = None
    mixer_width: int = 2048


class ForwardMapModel(CompatModel):
    """h(φ_old, ψ), and, in a chain, g(φ_old, ψ) (FCT §3.3, §4.4); a subclass writes what h learns by.

    h and g have unit length (the form of Appendix D.7) where the embeddings that they approximate have; between models that are
    trained with ``metric: l2`` they are raw and compared by L2 distance, as in the paper's other tables. After half of the
    training, batch norms use their running statistics and still train their affine part.

    Args:
        config: the configuration.
        encoder: the frozen new encoder for later inference, not part of the checkpoint.
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
            raise XcompatError("new_side_info is what side_info is mapped to, and there is none; name side_info too")
        if (width := config.mixer_width) < 1:
            raise XcompatError(f"options.mixer_width is {width}; a layer is at least 1 wide")
        self.transform = self._transform(config.embedding_dim, self.metric)
        new_side = config.new_side_info
        self.side_transform = self._transform(new_side["dim"], new_side.get("metric")) if new_side is not None else None
        known = (name for name in self.columns_if_known if getattr(config, name) is not None)
        self.columns = (*self.columns, *known)  # type: ignore[misc]  # the configuration decides which columns it reads

    def _transform(self, dim: int, metric: str | None) -> ForwardTransform:
        """Return h or g, with an output (B, ``dim``) that is compared by that metric."""
        config, side = self.config, self.config.side_info or {}
        raw = {"unit": metric != "l2", "unit_side": side.get("metric") != "l2"}
        return ForwardTransform(config.old["dim"], side.get("dim"), dim, config.mixer_width, **raw)

    @property
    @override
    def metric(self) -> Compares:
        """Return how old embeddings are compared, and so the mapped ones."""
        return (self.config.old or {}).get("metric", "cosine")

    @override
    def own_upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings into the new space: h."""
        self.require_side_info(side_info)
        return self.transform(old_embeds, side_info)

    def require_side_info(self, side_info: Tensor | None) -> None:
        """Refuse side-information that is missing, or that the map was trained without."""
        side, name = self.config.side_info, type(self).__name__
        if side is not None and side_info is None:
            which = side["name"]
            raise XcompatError(f"{name} was trained with side-information: give side_info, what {which} makes of the same items")
        if side is None and side_info is not None:
            raise XcompatError(f"{name} was trained without side-information: leave side_info out")
        if side is not None and side_info is not None and side_info.shape[1:] != (side["dim"],):
            raise XcompatError(f"{name} takes side-information (B, {side['dim']}), not {tuple(side_info.shape)}")

    @property
    def reads_side_info(self) -> bool:
        """Return whether the map was trained with side-information."""
        return self.config.side_info is not None

    @property
    def writes_side_info(self) -> bool:
        """Return whether the map has g."""
        return self.side_transform is not None

    def upgrade_side(self, old_embeds: Tensor, side_info: Tensor) -> Tensor:
        """Map stored side-information to the new model's for the next update: g, (B, S') L2-normalised."""
        if self.side_transform is None:
            return super().upgrade_side(old_embeds, side_info)
        return self.side_transform(old_embeds, side_info)

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Map old embeddings by h."""
        self.begin_batch(batch)
        return CompatOutput(image_embeds=self.transform(batch["old_embeds"], batch.get("side_info")))

    def begin_batch(self, batch: Batch) -> None:
        """Refuse a batch that lacks an input of h, and freeze statistics in the second half of the training."""
        self.require_columns(batch, (name for name in self.columns if name in ("old_embeds", "side_info")))
        if self.training and self.progress >= FREEZE_AT:
            for norm in (module for module in self.modules() if isinstance(module, nn.BatchNorm1d)):
                norm.eval()  # in every step: the Trainer calls train() before each

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return what h learns by, and g's mean squared distance to the new side-information."""
        loss = self.map_loss(output, batch)
        if self.side_transform is None:
            return loss
        mapped = self.side_transform(batch["old_embeds"], batch["side_info"])
        return loss + squared_distances(mapped, batch["new_side_info"], self.side_transform.unit).mean()

    @abstractmethod
    def map_loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return the loss of h, a scalar."""


def squared_distances(mapped_BD: Tensor, target_BD: Tensor, unit: bool) -> Tensor:
    """Return ‖x − t‖² of each row (B,), of targets of any length, such as bits, brought to length 1 if ``unit``."""
    target_BD = nn.functional.normalize(target_BD.float(), dim=-1) if unit else target_BD
    return (mapped_BD - target_BD).square().sum(dim=-1)

"""What maps between two fixed spaces share: queries into the old one, or a gallery into the new one; solved or learned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, TypeVar

from torch import Tensor, nn

from xcompat.encoders.base import Encoder
from xcompat.fingerprint import Fingerprint
from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig
from xcompat.outputs import CompatOutput

Side = TypeVar("Side")


class MappedConfig(CompatConfig):
    """Configuration of :class:`MappedModel`.

    Args:
        direction: ``new_to_old`` maps every query and leaves galleries as they are; ``old_to_new`` maps a gallery once and
            leaves queries as they are.
    """

    direction: Literal["new_to_old", "old_to_new"] = "new_to_old"


class MappedModel(CompatModel):
    """A map from a source to a target space, one new and one old.

    Args:
        config: the configuration.
        encoder: the frozen new encoder for later inference, not part of the checkpoint.
    """

    config_class = MappedConfig
    columns: ClassVar[tuple[str, ...]] = ("new_embeds", "old_embeds")
    embeds_in_memory = True

    def __init__(self, config: MappedConfig, encoder: Encoder | None = None) -> None:
        self.maps_galleries = config.direction == "old_to_new"  # first: which space is remembered depends on it
        super().__init__(config, encoder)
        assert config.old is not None
        self.source_dim, self.target_dim = self.ordered(config.embedding_dim, config.old["dim"])

    def ordered(self, new: Side, old: Side) -> tuple[Side, Side]:
        """Return what belongs to the source and what to the target."""
        return (old, new) if self.maps_galleries else (new, old)

    @abstractmethod
    def map(self, embeds: Tensor) -> Tensor:
        """Map embeddings of the source (B, S) into the target (B, T), L2-normalised."""

    def own_view(self, embeds: Tensor, version: Fingerprint | None = None) -> Tensor:
        """Map new embeddings into the old space (see :meth:`CompatModel.own_view`)."""
        return self.map(embeds.to(self.dtype))

    @property
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        """Return None, unless the map says which (see :attr:`CompatModel.own_view_layers`)."""
        return None

    def own_upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings into the new space, if that is the direction (see :meth:`CompatModel.own_upgrade`)."""
        return self.map(old_embeds.to(self.dtype)) if self.maps_galleries else old_embeds


class LearnedMapModel(MappedModel):
    """A map that is trained; what it learns from is the subclass's :meth:`loss`."""

    @abstractmethod
    def loss(self, mapped_BT: Tensor, target_BT: Tensor, labels_B: Tensor | None) -> Tensor:
        """Return what is minimised."""

    def forward(
        self,
        new_embeds: Tensor | None = None,
        old_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the method's loss.

        Args:
            new_embeds: (B, D) L2-normalised embeddings of the new model.
            old_embeds: (B, d) L2-normalised embeddings of the old model.
            labels: (B,) int64 in [0, C), for methods that read them.
            return_loss: whether to compute the loss.

        Returns:
            Loss and the mapped embeddings.
        """
        given = {"new_embeds": new_embeds, "old_embeds": old_embeds, "labels": labels}
        self._require(**{name: given[name] for name in self.columns})
        assert new_embeds is not None and old_embeds is not None
        source, _ = self.ordered(new_embeds, old_embeds)
        output = CompatOutput(image_embeds=self.map(source.to(self.dtype)))
        return CompatOutput(loss=self.embeds_loss(output, given), **output) if return_loss else output

    def embeds_loss(self, output: CompatOutput, batch: Mapping[str, Tensor | None]) -> Tensor:
        """See :meth:`loss`."""
        _, target = self.ordered(batch["new_embeds"], batch["old_embeds"])
        assert output.image_embeds is not None and target is not None
        return self.loss(output.image_embeds, target, batch.get("labels"))

"""Base class for maps between two fixed spaces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from xcompat.encoders.base import Encoder
from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig
from xcompat.outputs import Batch, CompatOutput

Side = TypeVar("Side")


class MappedConfig(CompatConfig):
    """Configuration of :class:`MappedModel`.

    Args:
        direction: ``new_to_old`` maps every query and leaves galleries unchanged; ``old_to_new`` maps a gallery once and leaves
            queries unchanged.
    """

    direction: Literal["new_to_old", "old_to_new"] = "new_to_old"


class MappedModel(CompatModel):
    """Map between the new and the old model's space.

    Args:
        config: the configuration.
        encoder: frozen new encoder for later inference, not part of the checkpoint.
    """

    config_class = MappedConfig
    columns: ClassVar[tuple[str, ...]] = ("new_embeds", "old_embeds")
    embeds_in_memory = True

    def __init__(self, config: MappedConfig, encoder: Encoder | None = None) -> None:
        self.maps_galleries = config.direction == "old_to_new"  # before super().__init__, whose memory depends on it
        super().__init__(config, encoder)
        assert config.old is not None
        self.source_dim, self.target_dim = self.order_sides(config.embedding_dim, config.old["dim"])
        self.embedded = self.order_sides("new_embeds", "old_embeds")[:1]

    @classmethod
    @override
    def maps_galleries_with(cls, options: Mapping[str, object]) -> bool:
        return options.get("direction", cls.config_class.direction) == "old_to_new"

    def order_sides(self, new: Side, old: Side) -> tuple[Side, Side]:
        """Return a pair's source and target values."""
        return (old, new) if self.maps_galleries else (new, old)

    @abstractmethod
    def map(self, embeds: Tensor) -> Tensor:
        """Map source embeddings (B, S) to target embeddings (B, T), L2-normalised."""

    @override
    def to_old_space(self, embeds: Tensor) -> Tensor:
        return self.map(embeds.to(self.dtype))

    @property
    @override
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        return None

    @override
    def own_upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings into the new space; unchanged with ``new_to_old``."""
        return self.map(old_embeds.to(self.dtype)) if self.maps_galleries else old_embeds


class LearnedMapModel(MappedModel):
    """Base class for trained maps."""

    loss_of_embeddings = True

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        self.require_columns(batch, self.embedded)
        (source,) = self.embedded
        return CompatOutput(image_embeds=self.map(batch[source].to(self.dtype)))

    def target(self, batch: Batch) -> Tensor:
        """Return the target embeddings (B, T)."""
        _, target = self.order_sides("new_embeds", "old_embeds")
        return batch[target]

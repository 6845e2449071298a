"""Models with a projection φ, alone or on an encoder (XBT and its baselines)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from torch import Tensor, nn
from typing_extensions import override

from xcompat.encoders.base import Encoder
from xcompat.heads import Projection
from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig
from xcompat.outputs import PASSAGES, Batch, CompatOutput

TrainedPart = Literal["none", "layer_norm", "all"]


class PhiModel(CompatModel):
    """Model that maps its embeddings to the old space with φ."""

    def __init__(self, config: CompatConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        assert config.old is not None
        self.projection = Projection(config.embedding_dim, config.old["dim"])
        self.post_init()

    @classmethod
    @override
    def reads_logit_scale(cls, options: Mapping[str, object], on_captions: bool) -> bool:
        return True

    @override
    def to_old_space(self, embeds: Tensor) -> Tensor:
        return self.projection(embeds)

    @property
    @override
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        return self.projection


class ProjectedConfig(CompatConfig):
    """Configuration for an encoder with φ.

    Args:
        train_encoder: encoder weights to train in addition to adapters.
        train_projection: φ's weights to train.
    """

    train_encoder: TrainedPart = "none"
    train_projection: TrainedPart = "all"


class ProjectedModel(PhiModel):
    """Encoder with adapters and φ; subclasses implement :meth:`loss`.

    Args:
        config: the configuration.
        encoder: loaded encoder; by default built from the configuration, without weights.
    """

    config_class = ProjectedConfig
    encoder: Encoder
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "input_ids")
    columns_if_known = (*PASSAGES, "new_embeds")
    loss_of_embeddings = True

    @classmethod
    @override
    def trains_encoder(cls, options: Mapping[str, object]) -> bool:
        return options.get("train_encoder", cls.config_class.train_encoder) != "none"

    def set_trainable(self) -> None:
        """Freeze everything except adapters, prompts and the configured parts."""
        adapters = {id(parameter) for parameter in self.encoder.adapter_parameters()}
        for part, which in ((self.encoder, self.config.train_encoder), (self.projection, self.config.train_projection)):
            norms = {id(p) for layer in part.modules() if isinstance(layer, nn.LayerNorm) for p in layer.parameters()}
            for name, parameter in part.named_parameters():
                named = which == "all" or (which == "layer_norm" and id(parameter) in norms)
                used = part is self.projection or not any(word in name for word in self.encoder.unused)
                parameter.requires_grad_((named and used) or id(parameter) in adapters)

    @override
    def start_from(self, projection: nn.Module) -> None:
        self.projection.load_state_dict(projection.get_submodule("projection").state_dict())

    def self_view(self, embeds: Tensor) -> Tensor:
        """Return φ of own embeddings, which the loss trains and the paper compares in new/new."""
        return self.projection(embeds)

    @override
    def required_columns(self, batch: Batch) -> list[str]:
        """Return the required columns: embeddings of a frozen image tower instead of images if the batch contains them."""
        required = super().required_columns(batch)
        return ["new_embeds" if name == "pixel_values" and "new_embeds" in batch else name for name in required]

    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Return synthetic old embeddings φ(v_new), φ(w_new) (XBT Eqn. 4); a frozen image tower's v_new may be in the batch."""
        own = super().embed_batch(batch)
        if "new_embeds" in batch:
            own["image_embeds"] = batch["new_embeds"]
        return CompatOutput(**{name: self.projection(embeds) for name, embeds in own.items()})

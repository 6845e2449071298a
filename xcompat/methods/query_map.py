"""Query map: the new model is unchanged, and a trained map moves its queries to the old space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.encoders.penultimate import Penultimate
from xcompat.heads import Projection
from xcompat.losses import angular_alignment_loss, bank_contrast_loss, cross_entropy_to
from xcompat.models.base import CompatModel
from xcompat.models.closed_form import Moments, readable_pairs, solve_procrustes
from xcompat.models.config import CompatConfig
from xcompat.models.drawn_bank import DrawnBank
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput

NOT_PREPARED = "QueryMapModel is not prepared; call prepare(OldKnowledge(...)) first"
NO_CLASSES = "loss prototypes needs classes; set labelled images in data.images, or use loss bank"


class QueryMapConfig(CompatConfig):
    """Configuration of :class:`QueryMapModel`.

    Args:
        input: the map's input: the new model's ``embedding``, or its ``penultimate`` features, its last linear layer's input.
        shape: ``linear``, x·W + b; ``residual``, the same plus a network that starts at zero; ``projection``, XBT's φ from random
            weights. Maps with hidden layers overfit to the training classes and lose on unseen classes.
        loss: ``bank``, contrast against the training set's old embeddings; ``prototypes``, classification by the old class means;
            ``cosine``, to the sample's own old embedding.
        scale: factor on cosines in the loss.
        pull: weight for 1 − cos between the map and its closed-form start.
        bank_size: most old embeddings to compare with a batch, drawn for each batch.
    """

    model_type = "xcompat-query_map"

    input: Literal["embedding", "penultimate"] = "embedding"
    shape: Literal["linear", "residual", "projection"] = "linear"
    loss: Literal["bank", "prototypes", "cosine"] = "bank"
    scale: Annotated[float, Field(gt=0)] = 15.0
    pull: Annotated[float, Field(ge=0)] = 1.0
    bank_size: Annotated[int, Field(ge=1)] = 8192


@register
class QueryMapModel(CompatModel):
    """φ(x) = normalise(x·W + b) on the frozen new embedding, W and b from orthogonal Procrustes, trained by bank contrast.

    L = −mean_i mean_{j ≠ i, y_j = y_i} log softmax_j(s·cos(φ(x_i), o_j)) + pull·(1 − cos(φ(x_i), start(x_i))) over the training
    set's old embeddings o_j, which never change. Without labels, the only positive is the sample's own old embedding. New/new
    equals the independent model's, bit for bit.

    With penultimate features, x is their direction. The model then embeds images as unnormalised features (B, P). ``self_view``
    uses a copy of the new model's last layer to map them to its own embeddings.

    Args:
        config: the configuration.
        encoder: frozen new encoder for inference, not part of the checkpoint.
    """

    config_class = QueryMapConfig
    columns = ("new_embeds", "old_embeds")
    embedded = ("new_embeds",)
    loss_of_embeddings = True
    columns_if_known = ("labels", "index")
    embeds_in_memory = True
    citation = "This project's own; supervised contrast is Khosla et al., Supervised contrastive learning, NeurIPS 2020"
    bank_Kd: Tensor | None
    bank_labels_N: Tensor | None
    prototypes_Cd: Tensor | None
    start_Dd: Tensor | None
    start_d: Tensor | None

    def __init__(self, config: QueryMapConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        assert config.old is not None
        new_dim, old_dim = config.embedding_dim, config.old["dim"]
        self.head: nn.Linear | None = None
        if config.input == "penultimate":
            if config.encoder is None:
                raise XcompatError("input penultimate needs the last layer of the new model; use from_encoder or a recipe")
            self.head = nn.Linear(new_dim, config.encoder["dim"])
        self.linear = nn.Linear(new_dim, old_dim) if config.shape != "projection" else None
        self.network = Projection(new_dim, old_dim) if config.shape != "linear" else None
        if self.linear is not None and self.network is not None:
            for parameter in self.network[-1].parameters():
                nn.init.zeros_(parameter)
        self.drawn_bank: DrawnBank | None = None  # a bank above bank_size, whose rows are read per batch
        for name in ("bank_Kd", "bank_labels_N", "prototypes_Cd", "start_Dd", "start_d"):
            self.register_buffer(name, None, persistent=False)  # prepare() computes them from the caches
        self.post_init()
        self.set_trainable()

    @classmethod
    def embedding_dim_for(cls, encoder: Encoder, old: dict[str, object] | None, options: dict[str, object]) -> int:
        """Return D, the map's input dimension."""
        if cls.maps_features(options):
            return Penultimate(encoder, encoder.name).head.in_features
        return super().embedding_dim_for(encoder, old, options)

    @classmethod
    @override
    def maps_features(cls, options: Mapping[str, object]) -> bool:
        """Return whether the map reads penultimate features."""
        return options.get("input") == "penultimate"

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        loss = options["loss"]
        if loss == "cosine":
            yield "scale", "loss cosine has no factor on cosines"
        if loss != "bank":
            yield "bank_size", f"loss {loss} has no bank"

    def set_trainable(self) -> None:
        """Train the map; freeze the new model's last layer."""
        if self.head is not None:
            self.head.requires_grad_(False)

    def _get_encoder(self) -> Encoder | CompatModel | Penultimate:
        encoder = super()._get_encoder()
        return Penultimate(encoder, self.config.encoder["name"]) if self.head is not None else encoder

    @property
    def embeds_texts(self) -> bool:
        """Whether the model embeds texts; only images have penultimate features."""
        return self.head is None and super().embeds_texts

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Load the bank, copy the last layer, and start the map at the closed form."""
        old_Nd = old.embeddings("query_map")
        if self.config.loss == "prototypes" and not len(old.labels_N):
            raise XcompatError(NO_CLASSES)
        assert new_ND is not None
        self._copy_head()
        moments = Moments.compute((self._inputs(new_BD), old_Bd) for new_BD, old_Bd in readable_pairs(new_ND, old_Nd))
        self.start_Dd, self.start_d = (part.float().to(self.device) for part in solve_procrustes(moments, centre=True))
        if self.linear is not None:
            self.linear.load_state_dict({"weight": self.start_Dd.T, "bias": self.start_d})
        if len(old_Nd) > self.config.bank_size:
            self.drawn_bank = DrawnBank(old_Nd, self.config.bank_size)
        else:
            self.bank_Kd = torch.from_numpy(np.array(old_Nd[:])).to(self.device)
        if len(old.labels_N):
            self.bank_labels_N = torch.from_numpy(old.labels_N).to(self.device)
            if self.config.loss == "prototypes":
                self.prototypes_Cd = old.weights("prototypes").to(self.device)

    def _copy_head(self) -> None:
        if self.head is None:
            return
        given = self._outside_encoder
        encoder = self._get_encoder()
        assert isinstance(encoder, Penultimate)
        self.head.load_state_dict({"bias": torch.zeros_like(self.head.bias), **encoder.head.state_dict()})
        self._outside_encoder = given  # drops an encoder loaded only for its last layer

    def _inputs(self, embeds: Tensor) -> Tensor:
        """Return x: normalised penultimate features, or embeddings, which have length 1 already."""
        return embeds.float() if self.head is None else F.normalize(embeds.float(), dim=-1)

    @override
    def to_old_space(self, embeds: Tensor) -> Tensor:
        """Map new embeddings to the old space."""
        inputs = self._inputs(embeds).to(self.dtype)
        if self.linear is None:
            assert self.network is not None
            return self.network(inputs)
        mapped = self.linear(inputs).float()
        if self.network is not None:
            mapped = F.normalize(mapped, dim=-1) + nn.Sequential.forward(self.network, inputs).float()
        return F.normalize(mapped, dim=-1)

    @property
    @override
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        if self.linear is None:
            return self.network
        return (self.linear,) if self.network is None else None

    @override
    def self_view(self, embeds: Tensor) -> Tensor:
        """Return the new model's own embeddings."""
        return embeds if self.head is None else F.normalize(self.head(embeds.to(self.dtype)).float(), dim=-1)

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Map new embeddings, or penultimate features."""
        self.require_columns(batch, self.embedded)
        return CompatOutput(image_embeds=self.to_old_space(batch["new_embeds"]))

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return the chosen loss plus the pull towards the start."""
        mapped = output["image_embeds"]
        loss = self._loss(mapped, batch["old_embeds"], batch.get("labels"), batch.get("index"))
        if self.config.pull:
            start_Dd, start_d = self._prepare(self.start_Dd), self._prepare(self.start_d)
            started = self._inputs(batch["new_embeds"]) @ start_Dd + start_d
            loss = loss + self.config.pull * angular_alignment_loss(mapped, started)
        return loss

    def _loss(self, mapped_Bd: Tensor, old_Bd: Tensor, labels: Tensor | None, index: Tensor | None) -> Tensor:
        config = self.config
        if config.loss == "cosine":
            return angular_alignment_loss(mapped_Bd, old_Bd)
        if config.loss == "prototypes":
            if labels is None:
                raise XcompatError(NO_CLASSES)
            return cross_entropy_to(self._prepare(self.prototypes_Cd), mapped_Bd, labels, config.scale)
        bank_Kd, rows_K = self._bank(mapped_Bd.device)
        bank_labels_K = self.bank_labels_N[rows_K] if self.bank_labels_N is not None else None
        return bank_contrast_loss(mapped_Bd, old_Bd, bank_Kd, config.scale, labels, bank_labels_K, index, rows_K)

    def _bank(self, place: torch.device) -> tuple[Tensor, Tensor]:
        """Return the whole bank, or a draw from it, and the row numbers."""
        if self.bank_Kd is not None:
            return self.bank_Kd, torch.arange(len(self.bank_Kd), device=place)
        if self.drawn_bank is None:
            raise XcompatError(NOT_PREPARED)
        return self.drawn_bank.draw(place)

    def _prepare(self, buffer: Tensor | None) -> Tensor:
        if buffer is None:
            raise XcompatError(NOT_PREPARED)
        return buffer

"""Sentence-transformers module that runs an xcompat model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image
from sentence_transformers.base.modality import infer_batch_modality
from sentence_transformers.base.modules import InputModule
from torch import Tensor

from xcompat.core.errors import XcompatError
from xcompat.data.images import open_image
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.model_files import record_model
from xcompat.export.modules import ImageTower, Space, TextTower, Tower
from xcompat.models.base import CompatModel
from xcompat.models.embedder import load_checkpoint

ENCODER = "encoder"
"""Folder of a map's frozen encoder, beside the map."""


class CompatModule(InputModule):
    """Sentence-transformers module to embed texts and images in the old or the own space.

    Args:
        model: frozen, in evaluation mode, with an encoder.
        space: ``old`` to search the old model's index, ``own`` for the new model's index.

    Raises:
        XcompatError: the model does not map queries into an old space, or has no encoder.
    """

    config_file_name = "sentence_xcompat_config.json"
    config_keys = ["space"]  # noqa: RUF012 - as sentence-transformers declares it

    def __init__(self, model: CompatModel, space: Space = "old") -> None:
        super().__init__()
        self.space = space
        self.image = ImageTower(model, space) if model.embeds_images else None
        self.text = TextTower(model, space) if model.embeds_texts else None

    @property
    def tower(self) -> Tower:
        """Either tower."""
        tower = self.image or self.text
        assert tower is not None
        return tower

    @property
    def model(self) -> CompatModel:
        """The wrapped model."""
        return self.tower.model

    @property
    def modalities(self) -> list[Any]:
        """Supported inputs."""
        return [name for name, tower in (("text", self.text), ("image", self.image)) if tower is not None]

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens per text, or 0 without a text tower."""
        return self.model.processor.max_length

    def get_embedding_dimension(self) -> int:
        """Return the embedding dimension."""
        return self.tower.dim

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, task: str | None = None, **kwargs: object
    ) -> dict[str, Any]:
        """Prepare texts or images as a batch for :meth:`forward`.

        Args:
            inputs: texts, or images as PIL images, uint8 arrays (H, W, 3), or paths.
            prompt: prefix for every text, after the model's own prompt.
            task: ``query`` (from ``encode_query``) for the query prompt. In an old space all texts are queries.
            kwargs: ignored.
        """
        if infer_batch_modality(inputs, supported_modalities=self.modalities) == "text":
            processor = self.model.processor
            role = processor.for_queries() if task == "query" or self.space == "old" else processor
            return dict(role.texts([(prompt or "") + text for text in inputs]))
        images = [Image.fromarray(given) if isinstance(given, np.ndarray) else given for given in inputs]
        return {"pixel_values": self.model.processor.images([open_image(image) for image in images])}

    def forward(self, features: dict[str, object], **kwargs: object) -> dict[str, Any]:
        """Embed a batch from :meth:`preprocess`.

        Args:
            features: ``pixel_values``, or ``input_ids`` and optionally ``attention_mask``.
            kwargs: ignored.

        Returns:
            The batch with ``sentence_embedding`` (B, dim), float32, of length 1.
        """
        embeds: Tensor
        if "pixel_values" in features:
            assert self.image is not None
            embeds = self.image(features["pixel_values"])
        else:
            assert self.text is not None
            embeds = self.text(features["input_ids"], features.get("attention_mask"))
        return features | {"sentence_embedding": embeds}

    def save(self, output_path: str, *args: object, safe_serialization: bool = True, **kwargs: object) -> None:
        """Write the model for ``from_pretrained``, with a map's frozen encoder beside it.

        Args:
            output_path: an existing folder.
            args: ignored.
            safe_serialization: ignored. Weights are always safetensors.
            kwargs: ignored.
        """
        self.model.save_pretrained(output_path)
        described = self.model.config.encoder
        if self.model.embeds_in_memory:
            assert described is not None
            _save_encoder(described, Path(output_path) / ENCODER)
        self.save_config(output_path)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, object] | None = None,
        **kwargs: object,
    ) -> Self:
        """Load a saved module from a folder or the Hub (see sentence-transformers' ``Module.load``)."""
        where: dict[str, Any] = {
            "subfolder": subfolder,
            "token": token,
            "cache_folder": cache_folder,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        folder = cls.load_dir_path(model_name_or_path, **where)
        assert folder is not None
        model = load_checkpoint(str(Path(folder).resolve()))
        if (beside := Path(folder).resolve() / ENCODER).is_dir():
            model.config.encoder = {**model.config.encoder, "name": str(beside), "revision": None}
        return cls(model, **cls.load_config(model_name_or_path, **where))


def _save_encoder(described: dict[str, object], folder: Path) -> None:
    source = EncoderSource.from_description(described)
    folder.mkdir()
    if described["library"] == "xcompat":
        inner = load_checkpoint(source)
        if inner.embeds_in_memory:
            raise XcompatError(f"the map's model {source.name} is itself a map; export a map of an encoder")
        inner.export(folder)
    else:
        encoder, processor = load_encoder(source)
        encoder.save_pretrained(folder)
        processor.save_pretrained(folder)
        record_model(folder)

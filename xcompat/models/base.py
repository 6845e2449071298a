"""Base class for all methods: a transformers model with a compatible embedding space."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling

from xcompat.core.distributed import is_main_process
from xcompat.core.errors import XcompatError
from xcompat.encoders import AdapterConfig, EncoderSource, build_encoder, load_encoder, load_processor
from xcompat.encoders.adapters import VisualPrompts
from xcompat.encoders.base import EmbedsBatches, Encoder
from xcompat.encoders.penultimate import Penultimate
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_files import SENTENCE_TRANSFORMERS
from xcompat.hub.push import push
from xcompat.models import checkpoint
from xcompat.models.config import CompatConfig
from xcompat.models.indexed_memory import build_memory
from xcompat.models.push import PUSH_ARGUMENTS, prepare_push
from xcompat.models.query_memory import QueryMemory
from xcompat.models.trainable_model import LearningModel
from xcompat.outputs import Batch, CompatOutput


class CompatModel(LearningModel, EmbedsBatches):
    """Embedding model whose queries can search an old model's galleries.

    A subclass sets ``columns``, builds its parts in ``__init__`` after ``super().__init__`` and implements ``loss``. It
    overrides ``embed_batch`` if the loss needs other embeddings, and ``to_old_space`` or ``own_upgrade`` if the spaces differ.
    """

    config_class = CompatConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True

    def __init__(self, config: CompatConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config)
        self.encoder = None
        self._require_one_metric()
        self._processor: Processor | None = None
        self._outside_encoder: list[Encoder | CompatModel] = []  # a list hides it from the module tree, so that it is not saved
        self.memory: QueryMemory | None = None
        if config.memory is not None:
            self.memory = build_memory(config.memory, *self._memory_dims())
        if not self.embeds_in_memory:
            if config.encoder is None:
                raise XcompatError(
                    f"{type(self).__name__} needs an encoder; build it with {type(self).__name__}.from_encoder(name)"
                )
            # transformers would use the dtype of the encoder's configuration
            self.encoder = encoder or build_encoder(config.encoder).to(torch.get_default_dtype())
            self._no_split_modules = self.encoder.layer_classes
            if config.adapters is not None:
                self.encoder.add_adapters(AdapterConfig(**config.adapters))
        elif encoder is not None:
            self._outside_encoder = [encoder]

    def post_init(self) -> None:
        """Finish construction without initialising weights again, which would change LoRA's zero matrix.

        On the meta device, before a checkpoint is loaded, transformers' initialisation restores unsaved buffers.
        """
        if not any(parameter.is_meta for parameter in self.parameters()):
            for module in self.modules():
                module._is_hf_initialized = True  # type: ignore[assignment]
        super().post_init()
        self.all_tied_weights_keys = self.get_expanded_tied_weights_keys(all_submodels=True)  # e.g. of T5

    def get_input_embeddings(self) -> nn.Module | None:  # type: ignore[override]  # transformers would raise
        """Return None, because accelerate's FSDP would shard an embedding table separately."""
        return None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[Any] | None,
        *model_args: Any,  # noqa: ANN401 - transformers' own
        **kwargs: Any,  # noqa: ANN401
    ) -> Self:
        """Load a checkpoint (safetensors only) in evaluation mode.

        Args:
            pretrained_model_name_or_path: model folder, run folder or Hub name.
            model_args: as in transformers.
            kwargs: as in transformers. With ``dtype``, the model (and a map's encoder) computes in this precision and returns
                float32 embeddings. Its fingerprint stays the checkpoint's, but saving it creates another model.

        Returns:
            The model (with loading information, if requested).

        Raises:
            XcompatError: a file has changed; weights are missing, unexpected, in another shape or not safetensors; or an adapter
                checkpoint's base is missing or has changed.
        """
        return checkpoint.load(cls, pretrained_model_name_or_path, *model_args, **kwargs)

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:  # noqa: ANN401 - transformers' own
        super()._adjust_missing_and_unexpected_keys(loading_info)
        checkpoint.hide_base_weights(self, loading_info)

    @classmethod
    def from_encoder(
        cls,
        encoder: str | EncoderSource | tuple[Encoder, Processor],
        old: dict[str, object] | None = None,
        **options: Any,  # noqa: ANN401 - the method's own configuration
    ) -> Self:
        """Start a method from a pretrained encoder, in float32 and evaluation mode.

        Args:
            encoder: name, folder, source, or a loaded encoder and its processor.
            old: description of the old model (``describe_old``); None for methods without an old model.
            options: the method's configuration.

        Raises:
            XcompatError: the old model is missing, not described or not needed, or the method does not read an option.
        """
        cls.config_class(**options).require_ranges()  # raises on unknown options
        cls.refuse_unread(options, on_captions=options.get("classes") is None)
        if old is not None and not cls.compares_with_old:
            raise XcompatError(f"{cls.__name__} is trained without an old model and cannot search an old gallery; remove old")
        if old is None and cls.compares_with_old:
            raise XcompatError(f"{cls.__name__} needs an old model; pass old=load_embedder(NAME).describe_old()")
        if old is not None and not isinstance(old, dict):
            raise XcompatError(
                f"{cls.__name__} needs a description of the old model; pass load_embedder({str(old)!r}).describe_old()"
            )
        loaded, processor = encoder if isinstance(encoder, tuple) else load_encoder(encoder)
        description = loaded.description | {"fingerprint": loaded.fingerprint(processor).digest, "dim": loaded.embedding_dim}
        dim = cls.embedding_dim_for(loaded, old, options)
        config = cls.config_class(encoder=description, old=old, embedding_dim=dim, **options)
        model = cls(config, encoder=loaded)
        model._processor = processor
        model.set_trainable()
        return model.eval()

    @classmethod
    def embedding_dim_for(cls, encoder: Encoder, old: dict[str, object] | None, options: dict[str, object]) -> int:
        """Return D for an encoder; by default the encoder's dimension."""
        return encoder.embedding_dim

    def set_trainable(self) -> None:
        """Set ``requires_grad`` for the configuration; by default everything is trained."""

    # ----------------------------------------------------------------------------------------------- embedding

    @property
    def description(self) -> dict[str, Any]:
        """Return this model's description, for use as another configuration's encoder."""
        return {"library": "xcompat", "name": self.name_or_path, "revision": self.revision, "config": {}}

    @property
    def text_encoder(self) -> Encoder | None:
        """Return the encoder inside; None for maps."""
        return self.encoder

    @property
    def processor(self) -> Processor:
        """Return the encoder's preprocessing."""
        if self._processor is None and self.embeds_in_memory:
            self._get_encoder()
        if self._processor is None:
            assert self.config.encoder is not None
            self._processor = load_processor(self.config.encoder, EncoderSource(name=self.name_or_path, revision=self.revision))
        return self._processor

    def _get_encoder(self) -> Encoder | CompatModel | Penultimate:
        """Return the encoder inside, or a map's frozen outside encoder."""
        if self.encoder is not None:
            return self.encoder
        if not self._outside_encoder:
            described = self.config.encoder
            if described is None:
                raise XcompatError(
                    "this map was fitted on embeddings only: use embeddings as queries (--queries q.npy), set your "
                    "embedding function (--embed-with, embed_with=), or fit the map again with --new-model"
                )
            loaded, self._processor = checkpoint.load_map_encoder(described)
            self._outside_encoder = [nn.Module.to(loaded, self.dtype)]
        outside: Any = self._outside_encoder[0]
        if outside.dtype != self.dtype:  # do not change the caller's encoder
            self._outside_encoder = [outside := copy.deepcopy(outside).to(self.dtype)]
        # a traced model cannot be moved
        return outside if next(outside.parameters()).device == self.device else outside.to(self.device)

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed images for a new gallery.

        Args:
            pixel_values: (B, C, H, W) from ``processor.images``.

        Returns:
            (B, D) float32, L2-normalised.
        """
        return self._get_encoder().embed({"pixel_values": pixel_values}, "stored")

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed texts for a new gallery.

        Args:
            input_ids: (B, L) int64 from ``processor.texts``.
            attention_mask: (B, L) int64; None for models that read their padding.

        Returns:
            (B, D) float32, L2-normalised.
        """
        texts = {"input_ids": input_ids} | ({"attention_mask": attention_mask} if attention_mask is not None else {})
        return self._get_encoder().embed(texts, "stored")

    def get_image_features(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Return an output with :meth:`embed_images` as ``pooler_output``, as in transformers.

        Args:
            pixel_values: (B, C, H, W) float32.
        """
        return BaseModelOutputWithPooling(pooler_output=self.embed_images(pixel_values))

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutputWithPooling:
        """Return an output with :meth:`embed_texts` as ``pooler_output``, as in transformers.

        Args:
            input_ids: (B, L) int64.
            attention_mask: (B, L) int64, or None.
        """
        return BaseModelOutputWithPooling(pooler_output=self.embed_texts(input_ids, attention_mask))

    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Embed the images and texts in a batch."""
        return self.embed_inputs(batch)

    def embed_inputs(self, batch: Batch) -> CompatOutput:
        """Embed images and texts as in :meth:`embed_images` and :meth:`embed_texts`."""
        # images first, because the order determines the random numbers of dropout
        kinds = {"text_embeds": "", "passage_embeds": "passage_", "negative_embeds": "negative_"}
        embeds = {"image_embeds": self.embed_images(batch["pixel_values"])} if "pixel_values" in batch else {}
        for name, kind in kinds.items():
            if f"{kind}input_ids" in batch:
                embeds[name] = self.embed_texts(batch[f"{kind}input_ids"], batch.get(f"{kind}attention_mask"))
        if not embeds:
            self.require_columns(batch, self.embedded)
        return CompatOutput(**embeds)

    @property
    def embed_layers(self) -> Iterable[nn.Module] | None:
        """Return the layers from the encoder's features to the embedding before normalisation.

        Each is an ``nn.Linear``, ``nn.LayerNorm`` or ``nn.GELU``. None if the model is not a sequence of such layers.
        """
        return ()

    @property
    def embeds_texts(self) -> bool:
        """Return whether the model, or a map's encoder, embeds texts."""
        if self.encoder is not None:
            return self.encoder.has_text
        library = (self.config.encoder or {}).get("library")
        if library == "xcompat":
            inner = self._get_encoder()
            return isinstance(inner, CompatModel) and inner.embeds_texts
        return library in ("transformers", "open_clip", SENTENCE_TRANSFORMERS)

    @property
    def embeds_images(self) -> bool:
        """Return whether the model, or a map's encoder, embeds images."""
        library = (self.config.encoder or {}).get("library")
        if library == "xcompat":
            inner = self._get_encoder()
            return not isinstance(inner, CompatModel) or inner.embeds_images
        return library != SENTENCE_TRANSFORMERS

    # ------------------------------------------------------------------------------------------------ inference

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Embed like the original new model, bit for bit, inside the block."""
        with self.encoder.adapters_disabled() if self.encoder is not None else nullcontext():
            yield

    def for_inference(self) -> Self:
        """Return the model in evaluation mode, without training-only parts."""
        return self.requires_grad_(False).eval()

    def merge_adapters(self) -> Self:
        """Merge LoRA into the encoder's weights, with the same embeddings. Prompts stay."""
        if self.encoder is not None and self.config.adapters is not None:
            self.encoder.merge_adapters()
            self.config.adapters = {**self.config.adapters, "lora": None}
            self.config.weights = "all"  # merged weights differ from the base
        return self

    # -------------------------------------------------------------------------------------------------- writing

    def export(self, folder: str | Path) -> None:
        """Write the finished model with all parts for inference.

        Args:
            folder: output folder for ``from_pretrained``, created if missing.
        """
        self.save_pretrained(folder)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,  # noqa: ANN401 - transformers' own
        push_to_hub: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Write weights, configuration and, unless it is a map, its encoder's preprocessing. Optionally push them.

        Args:
            save_directory: output folder for ``from_pretrained``, created if missing.
            args: as in transformers.
            push_to_hub: whether to push the model, by default under the folder's name (``repo_id``).
            kwargs: as in transformers and :meth:`push_to_hub`.

        Raises:
            XcompatError: the preprocessing is no longer at the model's source; the weights are written.
        """
        of_push = {key: kwargs.pop(key) for key in PUSH_ARGUMENTS if push_to_hub and key in kwargs}
        checkpoint.save(self, save_directory, *args, **kwargs)
        if push_to_hub and is_main_process():
            self.push_to_hub(of_push.pop("repo_id", Path(save_directory).name), token=kwargs.get("token"), **of_push)

    def leave_out_base(self) -> Self:
        """Set the model to save only adapters, prompts and heads, with its base's commit.

        Raises:
            XcompatError: it has no adapters, or its base cannot be loaded.
            FingerprintMismatchError: the base has changed since training.
        """
        checkpoint.leave_out_base(self)
        return self

    def push_to_hub(  # type: ignore[override]  # transformers' own takes anything
        self,
        repo_id: str,
        *,
        overwrite: bool = False,
        private: bool | None = None,
        license: str | None = None,  # noqa: A002 - the Hub's word
        tags: str | list[str] | None = None,
        max_shard_size: int | str = "50GB",
        **kwargs: Any,  # noqa: ANN401 - the Hub's own
    ) -> str:
        """Push the model with its preprocessing and a card, and return the commit's address.

        Args:
            repo_id: ``user/name``.
            overwrite: whether to replace another model.
            private: whether the repository is private; by default only if the base is gated or private.
            license: license on the card.
            tags: additional card tags.
            max_shard_size: maximum size of a weight file.
            kwargs: as in transformers, e.g. ``revision``, ``token`` and ``commit_message``.

        Raises:
            XcompatError: the repository contains another model or has another visibility, or the Hub refuses or cannot be
                reached.
        """
        kwargs |= {"overwrite": overwrite, "private": private, "license": license}
        return push(prepare_push(self, max_shard_size), repo_id, tags=[tags] if isinstance(tags, str) else tags or [], **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, VisualPrompts):
            init.normal_(module.tokens, std=0.02)

"""Base class for all methods: a transformers model with a compatible embedding space."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling

from xcompat.core.distributed import is_main_process
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders import AdapterConfig, EncoderSource, build_encoder, load_encoder, load_processor
from xcompat.encoders.adapters import VisualPrompts
from xcompat.encoders.base import EmbedsBatches, Encoder
from xcompat.encoders.penultimate import Penultimate
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_files import SENTENCE_TRANSFORMERS
from xcompat.hub.push import push
from xcompat.models import checkpoint
from xcompat.models.config import CompatConfig
from xcompat.models.declarations import MethodDeclarations
from xcompat.models.indexed_memory import build_memory
from xcompat.models.lineage import Lineage, hash_model, identity_settings
from xcompat.models.push import PUSH_ARGUMENTS, prepare_push
from xcompat.models.query_memory import QueryMemory
from xcompat.outputs import Batch, CompatOutput
from xcompat.score_scale import CarriedThreshold, ScoreScales, carry_threshold


class CompatModel(MethodDeclarations, PreTrainedModel, EmbedsBatches):
    """Embedding model whose queries can search an old model's galleries.

    A subclass sets ``columns``, builds its parts in ``__init__`` after ``super().__init__`` and implements ``loss``. It
    overrides ``embed_batch`` if the loss needs other embeddings, and ``to_old_space`` or ``own_upgrade`` if the spaces differ.
    """

    config_class = CompatConfig
    base_model_prefix = "encoder"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # for the Trainer: losses are batch means, divided by the accumulated steps

    encoder: Encoder | None
    memory: QueryMemory | None
    revision: str | None = None
    """Commit of a model from the Hub; None for a folder."""
    progress: float = 0.0
    """Training progress in [0, 1), set before every step, for losses with a schedule."""
    refresh_at: Sequence[float] = ()
    """Progress values for calls of :meth:`refresh`."""
    _left_out: Set[str] = frozenset()
    _read_from: tuple[Any, dict[str, Any]] | None = None
    """Source of the weights, if they were loaded with a dtype."""
    _hashed: tuple[object, tuple[str, str]] | None = None

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

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, VisualPrompts):
            init.normal_(module.tokens, std=0.02)

    def get_input_embeddings(self) -> nn.Module | None:  # type: ignore[override]  # transformers would raise
        """Return None, because accelerate's FSDP would shard an embedding table separately."""
        return None

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
        cls._require_fitting_old(old)
        loaded, processor = encoder if isinstance(encoder, tuple) else load_encoder(encoder)
        description = loaded.description | {"fingerprint": loaded.fingerprint(processor).digest, "dim": loaded.embedding_dim}
        dim = cls.embedding_dim_for(loaded, old, options)
        config = cls.config_class(encoder=description, old=old, embedding_dim=dim, **options)
        model = cls(config, encoder=loaded)
        model._processor = processor
        model.set_trainable()
        return model.eval()

    # ----------------------------------------------------------------------------------------------- reading and writing

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

    def export(self, folder: str | Path) -> None:
        """Write the finished model with all parts for inference.

        Args:
            folder: output folder for ``from_pretrained``, created if missing.
        """
        self.save_pretrained(folder)

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

    # --------------------------------------------------------------------------------------------------------- embedding

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
            loaded, self._processor = checkpoint.load_map_encoder(self.config.encoder)
            self._outside_encoder = [nn.Module.to(loaded, self.dtype)]
        outside: Any = self._outside_encoder[0]
        if outside.dtype != self.dtype:  # do not change the caller's encoder
            self._outside_encoder = [outside := copy.deepcopy(outside).to(self.dtype)]
        # a traced model cannot be moved
        return outside if next(outside.parameters()).device == self.device else outside.to(self.device)

    @property
    def embeds_images(self) -> bool:
        """Return whether the model, or a map's encoder, embeds images."""
        library = (self.config.encoder or {}).get("library")
        if library == "xcompat":
            inner = self._get_encoder()
            return not isinstance(inner, CompatModel) or inner.embeds_images
        return library != SENTENCE_TRANSFORMERS

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

    # ---------------------------------------------------------------------------------------------------------- learning

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        old_embeds: Tensor | None = None,
        new_embeds: Tensor | None = None,
        return_loss: bool | None = None,
        **others: Tensor | None,
    ) -> CompatOutput:
        """Embed a batch and compute the method's loss.

        Args:
            pixel_values: (B, C, H, W) float32 from ``processor.images``.
            input_ids: (B, L) int64 from ``processor.texts``.
            attention_mask: (B, L) int64; None for models that read their padding.
            labels: (B,) int64 classes in [0, C).
            old_embeds: (B, d) the old model's embeddings, L2-normalised.
            new_embeds: (B, D) the new model's embeddings: independently trained, or a map's input.
            return_loss: whether to compute the loss; by default unless the batch contains only columns to embed.
            others: other columns in ``columns`` and ``columns_if_known``.

        Returns:
            The embeddings and the loss.

        Raises:
            XcompatError: the batch lacks a column.
        """
        if unknown := others.keys() - {*self.columns, *self.columns_if_known}:
            raise TypeError(f"{type(self).__name__} has no column {', '.join(sorted(unknown))}; remove it from the batch")
        given = {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        given |= {"old_embeds": old_embeds, "new_embeds": new_embeds, **others}
        batch = {name: column for name, column in given.items() if column is not None}
        wanted = self._needs_loss(batch) if return_loss is None else return_loss
        if wanted:
            self.require_columns(batch, self.required_columns(batch))
        # images or texts for a map; torch.compile cannot trace isdisjoint of keys
        has_no_source = self.embeds_in_memory and not any(name in batch for name in self.embedded)
        output = self.embed_inputs(batch) if has_no_source else self.embed_batch(batch)
        if wanted:
            output.loss = self.loss(output, batch)
        return output

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

    # ---------------------------------------------------------------------------------------------------------- identity

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint over encoder, adapters, heads, preprocessing and memory."""
        return self.lineage.model

    @property
    def lineage(self) -> Lineage:
        """Return the fingerprints and dimensions of all embeddings that the model writes or searches.

        Changed weights are hashed again. :attr:`compatible_with` and ``config.versions`` need no weights.
        """
        # cached, because galleries need it for every query and hashing gigabytes takes seconds
        settings = self._identity_settings()
        state = settings, Fingerprint.state(self)
        if self._hashed is None or self._hashed[0] != state:
            saved = checkpoint.load_unrounded(self)
            self._hashed = state, hash_model(saved, saved.memory, settings)
        return Lineage.build(self._display_name, self.config, self._hashed[1], self.stores_view)

    @property
    def written_lineage(self) -> Lineage:
        """Return the lineage after :meth:`save_pretrained`; rounded weights in a half-precision model change it."""
        if self._read_from is None:
            return self.lineage
        digests = hash_model(self, self.memory, self._identity_settings())
        return Lineage.build(self._display_name, self.config, digests, self.stores_view)

    def _identity_settings(self) -> str:
        return identity_settings(self.config, self.metric, None if self.embeds_in_memory else self.processor)

    @property
    def _display_name(self) -> str:
        return self.name_or_path or type(self).__name__

    @property
    def compatible_with(self) -> list[Fingerprint]:
        """Return the versions whose galleries this model can search, nearest first."""
        return [version.fingerprint for version in self.config.versions]

    def require_version(self, version: Fingerprint | None) -> None:
        """Raise if the model is not compatible with a gallery.

        Args:
            version: the gallery's version; None to use the old model from training.

        Raises:
            FingerprintMismatchError: the model is compatible with other versions, listed in the error.
            XcompatError: the model has no old model.
        """
        if self.config.old is None:
            raise XcompatError(f"{type(self).__name__} was trained without an old model and cannot search an old gallery")
        if version is not None and version not in (known := self.compatible_with):
            names = ", ".join(map(str, known))
            raise FingerprintMismatchError(
                f"this model is compatible with {names}, not with {version}; choose a model trained for it"
            )

    # ------------------------------------------------------------------------------------------------------ older spaces

    def to_space(self, embeds: Tensor, version: Fingerprint | None = None) -> Tensor:
        """Turn own embeddings into queries for an older gallery: :meth:`to_space_without_memory`, then the memory.

        Args:
            embeds: (B, D) from :meth:`embed_images` or :meth:`embed_texts`.
            version: the gallery's version; None to use the old model from training, the only version with a memory.

        Returns:
            (B, d) float32, L2-normalised.

        Raises:
            FingerprintMismatchError: the model is not compatible with this version.
            XcompatError: the model maps galleries, or the embeddings have a wrong type or shape.
        """
        self.require_version(version)
        if self.maps_galleries:
            raise XcompatError(f"{type(self).__name__} maps galleries: upgrade the stored embeddings instead")
        self._require_embeddings(embeds, "its own embeddings", self.config.embedding_dim)
        own = self.to_space_without_memory(embeds, version)
        return own if self.memory is None or version not in (None, self.compatible_with[0]) else self.memory(embeds, own)

    def to_space_without_memory(self, embeds: Tensor, version: Fingerprint | None = None) -> Tensor:
        """Convert own embeddings to an older space without the memory: :meth:`to_old_space`, or its first dimensions.

        Args:
            embeds: (B, D).
            version: a version in :attr:`compatible_with`; None to use the old model from training.

        Returns:
            (B, d) float32, L2-normalised.
        """
        view = self.to_old_space(embeds)
        dim = view.shape[1] if version is None else dict(self.config.versions).get(version, view.shape[1])
        return view if dim == view.shape[1] else self.apply_metric(view[:, :dim])

    def to_gallery_space(self, embeds: Tensor) -> Tensor:
        """Convert own embeddings for storage in a gallery, without the memory."""
        return self.to_space_without_memory(embeds) if self.stores_view else embeds

    def upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings into the new space: :meth:`own_upgrade`, then a gallery map's memory.

        Args:
            old_embeds: (B, d) stored embeddings.
            side_info: (B, S) stored side-information, for methods that use it.

        Returns:
            The embeddings to store instead.

        Raises:
            XcompatError: the embeddings have a wrong type or shape.
        """
        if self.maps_galleries:
            self._require_embeddings(old_embeds, "embeddings of the old model", self.config.old["dim"])
        own = self.own_upgrade(old_embeds, side_info)
        return own if self.memory is None or not self.maps_galleries else self.memory(old_embeds, own)

    @property
    def view_layers(self) -> Iterable[nn.Module] | None:
        """Return the nearest :meth:`to_space`'s layers, without normalisation (see :attr:`embed_layers`)."""
        return self.own_view_layers if self.memory is None else None

    def remember(self, memory: QueryMemory | None) -> Self:
        """Set or remove the memory for queries (in a gallery map, for stored embeddings), and return the model.

        The model's fingerprint changes, but not its stored embeddings' fingerprint.

        Args:
            memory: memory from new to old dimensions (old to new in a gallery map); None for no memory.

        Raises:
            XcompatError: the model has no old space, or the memory has other dimensions.
        """
        dims = self._memory_dims()
        if memory is not None:
            memory.require_fit(type(self).__name__, dims, self.metric == "l2")
        self.memory = memory.to(self.device).requires_grad_(False) if memory is not None else None
        self.config.memory = memory.settings if memory is not None else None
        return self

    def _memory_dims(self) -> tuple[int, int]:
        """Return the dimensions of keys (mapped space) and values (target space)."""
        if self.config.old is None:
            raise XcompatError(f"{type(self).__name__} has no old space for a memory; remove memory")
        new, old = self.config.embedding_dim, int(self.config.old["dim"])
        return (old, new) if self.maps_galleries else (new, old)

    @property
    def score_scales(self) -> ScoreScales | None:
        """Return the scales between scores for own and for old gallery embeddings, if known."""
        return ScoreScales.read(self.config.score_scales) if self.config.score_scales is not None else None

    def threshold(self, old: float) -> CarriedThreshold:
        """Return the new score threshold for an old threshold, for old-gallery queries without re-ranking.

        It was measured on validation pairs. Use ``xcompat evaluate --threshold`` to measure a test set.

        Args:
            old: the service's cosine threshold.

        Raises:
            XcompatError: there is no measurement for this threshold.

        Example:
            ``model.threshold(old=0.75).score``
        """
        return carry_threshold(self.config.thresholds, old, self._display_name)

    @property
    def is_confident(self) -> bool:
        """Return whether the model has a :meth:`confidence`."""
        return self.memory is not None and self.memory.calibration is not None and not self.maps_galleries

    def confidence(self, embeds: Tensor) -> Tensor | None:
        """Return the probability that each query finds no less than the old query, if the memory is calibrated (`xcompat map`).

        Args:
            embeds: (B, D) from :meth:`embed_images` or :meth:`embed_texts`.

        Returns:
            (B,) float32 in (0, 1); None without a calibration, and for a gallery map.
        """
        return self.memory.confidence(embeds) if self.memory is not None and self.is_confident else None

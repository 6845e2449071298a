"""Transformers pipeline ``compatible-retrieval``, and zero-shot image classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import AutoModel, AutoModelForZeroShotImageClassification, BatchEncoding, Pipeline
from transformers.image_utils import load_image
from transformers.models.auto import modeling_auto
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.image_feature_extraction import ImageFeatureExtractionPipeline
from transformers.pipelines.zero_shot_image_classification import ZeroShotImageClassificationPipeline
from transformers.utils.generic import ModelOutput

from xcompat.core.errors import XcompatError
from xcompat.core.paths import is_file
from xcompat.core.progress import notice_once
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.embeddings.provider import Function, Provider, ServedMap
from xcompat.encoders.processor import Processor
from xcompat.methods import METHODS
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.outputs import CompatOutput
from xcompat.retrieval.embedded_queries import require_dim
from xcompat.retrieval.fallback import Fallback, OldQueries
from xcompat.retrieval.fetching import fetch, shown_address
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.originals import load_originals
from xcompat.retrieval.reranking import Reranker

TASK = "compatible-retrieval"
_SEARCH = ("top_k", "where", "merge", "parameters", "group_by")


class Found(dict[str, Any]):
    """Hit as a dictionary with attributes; unlike ``ModelOutput`` it keeps None values.

    Example:
        >>> hit = Found(id="7.png", confidence=None)
        >>> hit["id"], hit.id, hit["confidence"], hit.confidence
        ('7.png', '7.png', None, None)
    """

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a hit has no {name!r}") from None


class CompatibleRetrievalPipeline(Pipeline):
    """Pipeline to search a gallery with texts and images, for any compatible model.

    A query is a text, an image (PIL, array, path or URL), or a vector: the model's query embedding as an array, tensor or list
    of floats. Lists of queries and matrices of vectors are searched in batches of ``batch_size``. Hits are dictionaries with
    attributes (:class:`Found`): ``id``, ``score``, ``version``, ``metadata``, ``confidence``, ``group``, ``standing``.

    Args:
        gallery: a gallery, or its folder.
        fallback: options ``model``, ``below`` and ``share`` for :class:`~xcompat.retrieval.fallback.Fallback`: use this old model
            for queries with low confidence.
        allow_private_addresses: whether URLs can point to this machine or private networks. Leave it off for untrusted URLs; see
            :func:`~xcompat.retrieval.fetching.fetch`.
        embed_with: embeds texts if the map is for a service's embeddings: a function, its name, or a
            :class:`~xcompat.embeddings.provider.Provider`.
        rerank: number of hits to re-rank, True for the number fitted with the model (or 20), or a
            :class:`~xcompat.retrieval.reranking.Reranker`.
        originals: path to the gallery's originals for ``rerank``; None to use the texts in the gallery's metadata.
        kwargs: arguments for every transformers pipeline; ``top_k``, ``where``, ``merge``, ``parameters`` and ``group_by`` become
            defaults for :meth:`~xcompat.retrieval.gallery.Gallery.search`.

    Example:
        ``find = pipeline("compatible-retrieval", model="user/model", gallery="gallery"); find("a red shoe", top_k=5)``
    """

    _load_processor = False  # type: ignore[assignment]
    _load_image_processor = False  # type: ignore[assignment]
    _load_feature_extractor = False  # type: ignore[assignment]
    _load_tokenizer = False  # type: ignore[assignment]

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        gallery: Gallery | str | Path | None = None,
        fallback: Mapping[str, object] | None = None,
        allow_private_addresses: bool = False,
        embed_with: str | Function | Provider | None = None,
        rerank: int | bool | Reranker | None = None,
        originals: str | Path | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if gallery is None:
            raise XcompatError("a retrieval pipeline searches a gallery; set its folder with gallery=...")
        super().__init__(*args, **kwargs)
        self.allow_private_addresses = allow_private_addresses
        self.gallery = gallery if isinstance(gallery, Gallery) else Gallery.open(gallery)
        self.asking: CompatModel | Embedder
        self._own: Callable[[Sequence[str | Image.Image]], Tensor]
        source: Embedder | ServedMap | CompatModel
        if embed_with is not None:
            source = ServedMap.load(self.model, embed_with)
            self.asking, self._own = source.model, source.embed
        elif isinstance(self.model, CompatModel):
            self.asking = source = self.model.for_inference()
            self._own = self._embed_own
        else:  # a plain encoder searches its own embeddings
            self.asking = source = load_embedder(str(self.model.name_or_path), self.device)
            self._own = partial(_in_order, source.processor, self._run)
        self.rerank = _reranker(source, rerank, originals)
        self.fallback = Fallback.for_model(self.asking, self.device, fallback)
        if self.fallback is not None:
            self.fallback.require(self.asking, self.gallery.manifest)

    def _sanitize_parameters(self, **kwargs: object) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
        unknown = kwargs.keys() - set(_SEARCH)
        if unknown:
            raise XcompatError(f"a retrieval pipeline takes {', '.join(_SEARCH)}, not {min(unknown)}")
        return {}, {}, kwargs

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see the class
        """Search for a single query, or for each query in a list.

        Args:
            inputs: a query, or a list of queries.
            args: none.
            kwargs: ``batch_size``, and arguments for :meth:`~xcompat.retrieval.gallery.Gallery.search`.

        Returns:
            A hit list, per query for a list of queries.
        """
        batch_size = kwargs.pop("batch_size", None) or self._batch_size or 1
        inputs = as_vectors(inputs)
        if not isinstance(inputs, list):
            return super().__call__(inputs, *args, **kwargs)
        if not inputs:
            return []
        _, _, searching = self._sanitize_parameters(**kwargs)
        with self.device_placement(), torch.inference_mode():
            blocks = [inputs[start : start + batch_size] for start in range(0, len(inputs), batch_size)]
            parts = [self._embed([self._read(query) for query in block]) for block in blocks]
        embedded = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return self.postprocess(embedded, **{**self._postprocess_params, **searching})

    def preprocess(self, input_: object, **_: object) -> dict[str, Any]:
        """Read a query."""
        return {"query": self._read(input_)}

    def _forward(self, input_tensors: dict[str, Any], **_: Any) -> ModelOutput:  # noqa: ANN401
        return ModelOutput({**self._embed([input_tensors["query"]]), "single": True})

    def postprocess(self, model_outputs: dict[str, Any], **searching: Any) -> Any:  # noqa: ANN401
        """Search the gallery with embedded queries."""
        if self.fallback is not None:
            searching["old_queries"] = OldQueries(self.fallback.model, model_outputs["old"], self.fallback.share)
        searching = {"top_k": 10, "rerank": self.rerank, **searching}
        hits = self.gallery.search(model_outputs["embeds"], self.asking, **searching)
        found = [[Found({**hit._asdict(), "version": str(hit.version)}) for hit in each] for each in hits]
        return found[0] if model_outputs.get("single") else found

    def _read(self, query: Any) -> Any:  # noqa: ANN401 - see the class
        """Return a query's image, or the query itself if it is a text or vector."""
        if isinstance(query := as_vectors(query), np.ndarray) and query.ndim == 1:
            require_dim(self.asking, len(query), "a query")
            return query
        image = as_image(query, self.allow_private_addresses)
        return query if image is None else image

    def _embed(self, queries: Sequence[str | Image.Image | NDArray[np.float32]]) -> dict[str, Tensor]:
        """Embed queries, and unsure ones with the old model too; keep vectors unchanged."""
        rows = {row: query for row, query in enumerate(queries) if isinstance(query, np.ndarray)}
        if rows and self.fallback is not None and self.fallback.below is not None:
            raise XcompatError("the fallback cannot embed a vector with the old model; choose a text or an image as query")
        others = {row: query for row, query in enumerate(queries) if not isinstance(query, np.ndarray)}
        parts = [torch.from_numpy(np.stack([*rows.values()]))] if rows else []
        parts += [self._own([*others.values()])] if others else []
        embeds_BD = torch.cat(parts)[torch.from_numpy(np.argsort([*rows, *others]))] if rows else parts[0]
        if (old := self.fallback) is None:
            return {"embeds": embeds_BD}

        def embed(places: list[int]) -> Tensor:
            return _in_order(old.model.processor, old.model.embed, [texts_and_images[place] for place in places])

        texts_and_images, old_Bd = [*others.values()], torch.full((len(queries), old.model.dim), float("nan"))
        if others:  # vectors cannot be re-embedded, so only the new query searches
            asked = [*others]
            found_Bd = old.old_queries(self.asking, self.gallery.manifest, embeds_BD[asked], embed)
            old_Bd[asked] = torch.from_numpy(found_Bd)
        return {"embeds": embeds_BD, "old": old_Bd}

    def _embed_own(self, queries: Sequence[str | Image.Image]) -> Tensor:
        return _in_order(cast("CompatModel", self.asking).processor, self._run, queries)

    def _run(self, batch: dict[str, Tensor]) -> Tensor:
        return self.asking.embed({name: tensor.to(self.asking.device) for name, tensor in batch.items()}).cpu()


def _reranker(
    source: Embedder | ServedMap | CompatModel, rerank: int | bool | Reranker | None, originals: str | Path | None
) -> Reranker | None:
    if isinstance(rerank, Reranker) or rerank is None or rerank is False:
        if originals is not None:
            raise XcompatError("originals are for re-ranking; add rerank=20")
        return rerank or None
    embedder = Embedder.from_model(source, "own") if isinstance(source, CompatModel) else source
    return Reranker(embedder, None if originals is None else load_originals(originals), None if rerank is True else rerank)


def _in_order(processor: Processor, embed: Callable[[dict[str, Tensor]], Tensor], queries: Sequence[str | Image.Image]) -> Tensor:
    """Embed texts and images in two batches; return the embeddings in query order."""
    of_texts = {row: query for row, query in enumerate(queries) if isinstance(query, str)}
    of_images = {row: query for row, query in enumerate(queries) if not isinstance(query, str)}
    parts = []
    if of_texts:
        asked = processor.for_queries()
        before = asked.count_truncated
        parts.append(embed(asked.texts(list(of_texts.values()))))
        if asked.count_truncated > before:
            notice_once(f"queries truncated to {asked.max_length} tokens")
    if of_images:
        parts.append(embed({"pixel_values": processor.images(list(of_images.values()))}))
    order = np.argsort([*of_texts, *of_images])
    return torch.cat(parts)[torch.from_numpy(order)]


def as_vectors(query: object) -> object:
    """Convert a vector to float32, and a matrix to a list of vectors; return anything else unchanged.

    Args:
        query: floats as an array or tensor with one or two dimensions, or as a list.
    """
    if isinstance(query, list) and query and all(isinstance(number, int | float) for number in query):
        return np.array(query, np.float32)
    if isinstance(query, Tensor) and query.ndim in (1, 2) and query.is_floating_point():
        query = query.detach().cpu().float().numpy()
    if isinstance(query, np.ndarray) and query.ndim in (1, 2) and query.dtype.kind == "f":
        return query.astype(np.float32) if query.ndim == 1 else list(query.astype(np.float32))
    return query


def as_image(query: object, allow_private_addresses: bool = False) -> Image.Image | None:
    """Return a query's image in mode RGB; None for a text.

    Args:
        query: an image, an array (H, W, 3) uint8, a path, or a string.
        allow_private_addresses: as in :class:`CompatibleRetrievalPipeline`.

    Raises:
        XcompatError: the query is empty or has another type, or its image cannot be read.
    """
    name, found = str(query), query
    if isinstance(query, str) and not query.strip():
        raise XcompatError("the query is empty; enter a text or an image")
    try:
        if isinstance(query, np.ndarray):
            name, found = f"of shape {query.shape} and {query.dtype}", _of_array(query)
        elif isinstance(query, str) and query.startswith(("http://", "https://")):
            name = shown_address(query)
            found = fetch(query, allow_private_addresses)
        elif isinstance(query, str):
            found = Path(query) if is_file(query) else None
        elif not isinstance(query, Image.Image | Path):
            raise XcompatError(f"a query is a text, an image, an array or a path, not {type(query).__name__}")
        return None if found is None else open_image(found)
    except UnusableSampleError as error:
        raise XcompatError(f"cannot read the image {name}: {error}") from None


def _of_array(array: np.ndarray) -> Image.Image:
    try:
        return Image.fromarray(array)
    except (TypeError, ValueError):
        raise XcompatError(f"an image array must be (H, W, 3) uint8, not {array.shape} {array.dtype}") from None


class EmbeddingPipeline(ImageFeatureExtractionPipeline):
    """``image-feature-extraction`` with a compatible model's own embeddings."""

    def _forward(self, model_inputs: Any) -> Any:  # type: ignore[override]  # noqa: ANN401 - as its base has it
        if isinstance(self.model, CompatModel):
            return self.model.get_image_features(**model_inputs)
        return super()._forward(model_inputs)


class ZeroShotPipeline(ZeroShotImageClassificationPipeline):
    """``zero-shot-image-classification`` with a compatible model's own preprocessing."""

    _load_tokenizer: Any = None  # optional, because open_clip models have no tokenizer of transformers

    def preprocess(  # type: ignore[override]  # as its base has it
        self,
        image: Any,  # noqa: ANN401 - a path, an address or an image
        candidate_labels: Sequence[str] = (),
        hypothesis_template: str = "This is a photo of {}.",
        timeout: float | None = None,
        **options: Any,  # noqa: ANN401 - of a tokenizer
    ) -> dict[str, Any]:
        """Return the model's inputs for an image and its candidate labels."""
        if not isinstance(self.model, CompatModel):
            return dict(super().preprocess(image, candidate_labels, hypothesis_template, timeout, **options))
        processor = self.model.processor
        pixels = processor.images(load_image(image, timeout=timeout)).to(self.dtype)
        texts = BatchEncoding(processor.texts([hypothesis_template.format(label) for label in candidate_labels]))
        return {"pixel_values": pixels, "candidate_labels": candidate_labels, "text_inputs": [texts]}


class _ZeroShot(CompatModel):
    """Compatible model for ``zero-shot-image-classification``, with logits in its own space."""

    def forward(  # type: ignore[override]  # as the pipeline calls it
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **_: object,
    ) -> CompatOutput:
        """Compare every image with every text.

        Args:
            pixel_values: (B, C, H, W) float32.
            input_ids: (T, L) int64.
            attention_mask: (T, L) int64, or None.

        Returns:
            Embeddings, and logits (B, T).
        """
        image_embeds = self.self_view(self.embed_images(pixel_values))
        text_embeds = self.self_view(self.embed_texts(input_ids, attention_mask))
        logits = self.config.logit_scale * image_embeds @ text_embeds.T
        return CompatOutput(image_embeds=image_embeds, text_embeds=text_embeds, logits_per_image=logits)


def register() -> None:
    """Register with transformers: the task, feature extraction, and zero-shot classification."""
    PIPELINE_REGISTRY.register_pipeline(TASK, CompatibleRetrievalPipeline, pt_model=(AutoModel,), type="multimodal")
    PIPELINE_REGISTRY.supported_tasks["image-feature-extraction"]["impl"] = EmbeddingPipeline
    PIPELINE_REGISTRY.supported_tasks["zero-shot-image-classification"]["impl"] = ZeroShotPipeline
    for name, method in METHODS.items():
        if "input_ids" in method.columns:
            zero_shot = type(f"{method.__name__}ForZeroShot", (_ZeroShot, method), {"config_class": method.config_class})
            AutoModelForZeroShotImageClassification.register(method.config_class, zero_shot, exist_ok=True)
            modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES[f"xcompat-{name}"] = zero_shot.__name__


register()

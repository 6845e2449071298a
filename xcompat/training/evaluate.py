"""From models and a test set to cases, verdict and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.data import PairSource, flatten_captions, load_classes, load_pairs, open_image
from xcompat.data.schema import CAPTION, ID, IMAGE, LABEL, captions_of
from xcompat.errors import XcompatError, nearest
from xcompat.evaluation import EmbeddedPairs, Evaluation, ZeroShot, class_embeddings, evaluate_cases
from xcompat.fingerprint import Fingerprint
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.report import Example, ExampleRow, Hit, ReportContent
from xcompat.training.caches import cached_captions, cached_images
from xcompat.training.recipe import EvaluationSettings, ZeroShotSettings

if TYPE_CHECKING:
    import datasets

Floats = NDArray[np.float32]
HITS_SHOWN = 5


@dataclass
class TestSet:
    """A paired test set, and perhaps one for zero-shot classification.

    Args:
        pairs: images and captions.
        texts: every distinct caption of every id.
        text_ids: the id of the image each caption describes.
        zero_shot: how to classify, and the labelled images.
        max_bad_share: the share of images that may be unreadable.
    """

    __test__ = False  # not a test case, whatever pytest thinks of its name

    pairs: datasets.Dataset
    texts: list[str]
    text_ids: list[str]
    zero_shot: tuple[ZeroShotSettings, datasets.Dataset] | None = None
    max_bad_share: float = 0.01


def load_test_set(source: PairSource, zero_shot: ZeroShotSettings | None = None) -> TestSet:
    """Load what models are judged on.

    Args:
        source: images and captions.
        zero_shot: labelled images and class names.

    Returns:
        The test set.
    """
    if source.streaming:
        raise XcompatError("data.test is read more than once and cannot be a stream; set its streaming to false")
    pairs = load_pairs(source)
    # A caption that several pictures of one thing share is one item of the gallery and one query, not several.
    distinct = dict.fromkeys(zip(*flatten_captions(pairs), strict=True))
    texts, text_ids = [text for text, _ in distinct], [text_id for _, text_id in distinct]
    labelled = (zero_shot, load_pairs(zero_shot.images)) if zero_shot else None
    return TestSet(pairs, texts, text_ids, labelled, source.max_bad_share)


def embed_test_set(embedder: Embedder, test: TestSet, cache_dir: Path) -> EmbeddedPairs:
    """Embed a test set with a frozen model, or open what was embedded before.

    Args:
        embedder: the model.
        test: the test set.
        cache_dir: folder of embedding caches.

    Returns:
        Its embeddings, unreadable images still in them as NaN (see :func:`readable`).
    """
    images = cached_images(embedder, test.pairs, cache_dir, test.max_bad_share)
    texts = cached_captions(embedder, test.texts, cache_dir)
    zero_shot = None
    if test.zero_shot is not None:
        settings, labelled = test.zero_shot
        classes = load_classes(settings.classes)
        prompts = [template.format(name) for name in classes for template in settings.templates]
        embeds_PD = cached_captions(embedder, prompts, cache_dir)[:]
        class_embeds_CD = class_embeddings(embeds_PD.reshape(len(classes), len(settings.templates), -1))
        image_embeds_ND = cached_images(embedder, labelled, cache_dir, settings.images.max_bad_share)[:]
        kept_N = np.isfinite(image_embeds_ND[:, 0])  # a picture that cannot be read is so for every model
        labels_N = np.array([label_index(label, classes) for label in labelled[LABEL]])
        zero_shot = ZeroShot(image_embeds_ND[kept_N], class_embeds_CD, labels_N[kept_N])
    return EmbeddedPairs(
        display_name(embedder.name), embedder.fingerprint, images[:], texts[:], test.pairs[ID], test.text_ids, zero_shot
    )


def label_index(label: int | str, classes: list[str]) -> int:
    """Return the class a label means: an index, an index written out, or the class's name.

    Args:
        label: as the data set has it.
        classes: names in order.

    Returns:
        The index.

    Raises:
        XcompatError: it is no such class.
    """
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if str(label).isdigit() and int(label) < len(classes):
        return int(label)
    raise XcompatError(f"the label {label!r} is none of the {len(classes)} classes; {nearest(str(label), classes)}")


def display_name(name: str) -> str:
    """Return what to call a model in a report: a run's own folder is called after its stage.

    Args:
        name: Hub name or folder.

    Returns:
        A short name.

    Example:
        >>> display_name("runs/quickstart/old/model"), display_name("openai/clip-vit-base-patch32")
        ('old', 'openai/clip-vit-base-patch32')
    """
    return Path(name).parent.name if Path(name).name == "model" else name


def map_pairs(
    pairs: EmbeddedPairs, name: str, fingerprint: Fingerprint, view: Callable[[Tensor], Tensor], device: torch.device
) -> EmbeddedPairs:
    """Put embeddings through ``view`` or ``self_view`` of a model on ``device``, everything else unchanged."""

    @torch.inference_mode()
    def through(embeds_ND: Any) -> Floats:  # noqa: ANN401 - array-like
        chunks = torch.from_numpy(np.asarray(embeds_ND, dtype=np.float32)).split(8192)
        return torch.cat([view(chunk.to(device)).cpu() for chunk in chunks]).numpy()

    zero = pairs.zero_shot
    mapped = zero and ZeroShot(through(zero.image_embeds_ND), through(zero.class_embeds_CD), zero.labels_N)
    return EmbeddedPairs(
        name, fingerprint, through(pairs.image_embeds_ND), through(pairs.text_embeds_MD), pairs.image_ids, pairs.text_ids, mapped
    )


def readable(pairs: Mapping[str, EmbeddedPairs]) -> dict[str, EmbeddedPairs]:
    """Drop the images that no model could read, and the captions of those that are gone altogether.

    Args:
        pairs: the models' embeddings of one test set.

    Returns:
        The same with equal rows left in each.
    """
    kept_N = np.all([np.isfinite(np.asarray(p.image_embeds_ND)[:, 0]) for p in pairs.values()], axis=0)
    if kept_N.all():
        return dict(pairs)
    some = next(iter(pairs.values()))
    rows_kept = np.flatnonzero(kept_N).tolist()
    left = {some.image_ids[row] for row in rows_kept}
    kept_M = np.array([text_id in left for text_id in some.text_ids])
    texts_kept = np.flatnonzero(kept_M).tolist()
    return {
        role: EmbeddedPairs(
            p.name,
            p.fingerprint,
            np.asarray(p.image_embeds_ND)[kept_N],
            np.asarray(p.text_embeds_MD)[kept_M],
            [p.image_ids[row] for row in rows_kept],
            [p.text_ids[row] for row in texts_kept],
            p.zero_shot,
        )
        for role, p in pairs.items()
    }


def embed_new(
    model: CompatModel, old: Fingerprint, independent: EmbeddedPairs, test: TestSet, cache_dir: Path
) -> tuple[EmbeddedPairs, EmbeddedPairs]:
    """Embed a test set with a compatible model.

    Args:
        model: the model; a map over embeddings is applied to ``independent``.
        old: whose gallery it is judged on.
        independent: what the unadapted new encoder makes of the test set.
        test: the test set.
        cache_dir: folder of embedding caches.

    Returns:
        The view of the old space, and the form in which the model's own embeddings are compared.

    Raises:
        FingerprintMismatchError: the model was not made for that gallery, or the map not for that encoder.
    """
    model.require_version(old)
    fingerprint = model.fingerprint()
    own = independent
    if model.embeds_in_memory:
        described = model.config.encoder
        encoder = Fingerprint(described["fingerprint"], described["name"])
        encoder.require(independent.fingerprint, f"what {display_name(model.name_or_path or type(model).__name__)} is applied to")
    else:
        raw = Embedder(model, model.processor, fingerprint, model.config.embedding_dim)
        own = embed_test_set(raw, test, cache_dir)
    name = display_name(model.name_or_path or type(model).__name__)
    view = map_pairs(own, name, fingerprint.derived("view"), model.view, model.device)
    return view, map_pairs(own, name, fingerprint, model.self_view, model.device)


@dataclass
class Contestants:
    """Everyone in an evaluation, as embeddings of one test set.

    Args:
        old: the model that embedded the gallery.
        new_view: the new model in the old space.
        new: the new model among its own.
        independent: the new encoder without any training for compatibility.
        extra: other query models in the old space, by name.
    """

    old: EmbeddedPairs
    new_view: EmbeddedPairs
    new: EmbeddedPairs | None = None
    independent: EmbeddedPairs | None = None
    extra: Mapping[str, EmbeddedPairs] | None = None


def judge(contestants: Contestants, settings: EvaluationSettings, seed: int) -> tuple[Evaluation, Contestants]:
    """Evaluate every case.

    Args:
        contestants: the models' embeddings.
        settings: cut-offs and resampling.
        seed: of the bootstrap.

    Returns:
        The evaluation, and the contestants without unreadable images.
    """
    present = {
        role: pairs for role in ("old", "new_view", "new", "independent") if (pairs := getattr(contestants, role)) is not None
    }
    clean = readable({**present, **{f"extra:{name}": pairs for name, pairs in (contestants.extra or {}).items()}})
    extra = {name.removeprefix("extra:"): pairs for name, pairs in clean.items() if name.startswith("extra:")}
    kept = Contestants(clean["old"], clean["new_view"], clean.get("new"), clean.get("independent"), extra)
    evaluation = evaluate_cases(
        kept.old,
        kept.new_view,
        kept.new,
        kept.independent,
        extra,
        ks=settings.ks,
        chunk_size=settings.chunk_size,
        n_resamples=settings.resamples,
        seed=seed,
    )
    return evaluation, kept


def example_searches(contestants: Contestants, test: TestSet, count: int, seed: int) -> list[Example]:
    """Search the old gallery for a few captions, with old and with new queries.

    The captions are drawn with a fixed seed, not picked: half of what is shown may fail.

    Args:
        contestants: the models' embeddings.
        test: where the pictures are.
        count: how many searches.
        seed: of the draw.

    Returns:
        The examples.
    """
    if not count:
        return []
    chosen = np.random.default_rng(seed).choice(len(test.texts), size=min(count, len(test.texts)), replace=False)
    gallery_ND = np.asarray(contestants.old.image_embeds_ND)
    image_ids = test.pairs[ID]
    examples = []
    for text in chosen.tolist():
        rows = []
        for label, queries in (("old query", contestants.old), ("new query", contestants.new_view)):
            scores_N = gallery_ND @ np.asarray(queries.text_embeds_MD)[text]
            scores_N = np.where(np.isfinite(scores_N), scores_N, -np.inf)  # a picture that cannot be read is not found
            hits = []
            for image in np.argsort(-scores_N, kind="stable")[:HITS_SHOWN].tolist():
                record = test.pairs[image]
                caption = next(iter(captions_of(record[CAPTION])), "")
                hits.append(Hit(open_image(record[IMAGE]), caption, image_ids[image] == test.text_ids[text]))
            rows.append(ExampleRow(label, hits))
        examples.append(Example(test.texts[text], rows))
    return examples


def make_report(
    contestants: Contestants,
    test: TestSet | None,
    settings: EvaluationSettings,
    method: str,
    seed: int,
    **about: Any,  # noqa: ANN401
) -> ReportContent:
    """Evaluate, and gather what a report shows.

    Args:
        contestants: the models' embeddings.
        test: the test set, for example searches; None when only embeddings are known.
        settings: how the result is judged.
        method: name of the method.
        seed: of bootstrap, examples and t-SNE.
        about: ``seconds`` and ``run`` of :class:`ReportContent`.

    Returns:
        What :func:`xcompat.report.write_report` writes.
    """
    evaluation, kept = judge(contestants, settings, seed)
    examples = example_searches(contestants, test, settings.examples, seed) if test else []
    return ReportContent(
        evaluation, kept.old, kept.new_view, kept.new, kept.independent, method, examples=examples, seed=seed, **about
    )

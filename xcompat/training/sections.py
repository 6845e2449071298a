"""Sections of a recipe: data and evaluation."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from xcompat.data import Augmentation, CorpusSource, LabelledSource, PairSource, Subset, TextPairSource, TextSource
from xcompat.data.sources import ImageSource

Rate = Annotated[float, Field(gt=0, lt=1)]
"""An accepted error rate."""


class Section(BaseModel):
    """Part of a recipe; unknown keys raise."""

    model_config = ConfigDict(extra="forbid")


def one_of(*models: type[BaseModel]) -> Discriminator:
    """Return a discriminator that chooses the model with the fewest unknown keys, so that errors concern one model only.

    Args:
        models: members of a union; the first wins if several fit equally.
    """

    def choose(given: Any) -> str:  # noqa: ANN401 - what YAML holds
        if isinstance(given, models):
            return type(given).__name__
        keys = given.keys() if isinstance(given, dict) else ()
        return min(models, key=lambda model: len(keys - model.model_fields.keys()) if keys else 0).__name__

    return Discriminator(choose)


class ZeroShotSettings(Section):
    """Zero-shot classification from prompts.

    Args:
        images: labelled images (with ``label_column``).
        classes: file with a class name per line, in the order of labels or sorted folders (see ``xcompat classes``).
        templates: prompts with ``{}`` for the class, averaged; ``openai`` for CLIP's 80, ``simple`` for seven of them.
    """

    images: PairSource
    classes: str
    templates: list[str] | Literal["openai", "simple"] = ["a photo of a {}"]

    @field_validator("templates")
    @classmethod
    def _name_the_class(cls, value: list[str] | str) -> list[str] | str:
        if not value:
            raise ValueError("templates is empty; add a prompt, e.g. 'a photo of a {}', or remove templates")
        for template in [] if isinstance(value, str) else value:
            if not _has_one_place(template):
                raise ValueError(f"{template!r} must contain {{}} once, for the class; double other braces: {{{{ and }}}}")
        return value

    def prompts(self) -> list[str]:
        """Return the prompt templates."""
        from xcompat.encoders.class_names import prompt_templates

        return prompt_templates(self.templates) if isinstance(self.templates, str) else self.templates


def _has_one_place(template: str) -> bool:
    try:
        places = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        template.format("class")
    except (ValueError, LookupError, AttributeError):
        return False
    return places == [""]


def _is_of_several(given: object) -> Literal["One", "Several"]:
    several = isinstance(given, dict) and given and not given.keys() & ZeroShotSettings.model_fields.keys()
    return "Several" if several else "One"


ZeroShotSets = Annotated[
    Annotated[ZeroShotSettings, Tag("One")]
    | Annotated[dict[Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")], ZeroShotSettings], Tag("Several")],
    Discriminator(_is_of_several),
]
"""One classification, or several by name; names cannot be keys of one."""


class JudgedTexts(Section):
    """Queries, passages, and relevance judgements.

    Args:
        queries: texts to search with; models embed them as queries.
        passages: texts to search.
        qrels: judgements of BEIR or TREC (:func:`xcompat.data.read_qrels`).
    """

    queries: TextSource
    passages: TextSource
    qrels: str


class JudgedTemplates(Section):
    """Templates (sets of images of a subject) to verify and identify, in the file formats of IJB-C.

    Args:
        images: images, e.g. aligned faces, with the names in ``members`` as ids.
        members: text file with an image, a template id and the id of the photo or video per line (``ijbc_face_tid_mid.txt``).
        pairs: text file with two template ids per line, and 1 for the same subject or 0 (``ijbc_template_pair_label.txt``).
        gallery: CSV files of template and subject. Their union is searched (``ijbc_1N_gallery_G1.csv``, ``…_G2.csv``).
        probes: CSV file of template and subject to search for (``ijbc_1N_probe_mixed.csv``).
    """

    images: ImageSource
    members: str
    pairs: str | None = None
    gallery: list[str] = []
    probes: str | None = None

    def files(self) -> dict[str, str]:
        """Return key -> file."""
        named = {"members": self.members, "pairs": self.pairs, "probes": self.probes}
        named |= {f"gallery.{number}": file for number, file in enumerate(self.gallery)}
        return {key: file for key, file in named.items() if file is not None}

    @model_validator(mode="after")
    def _something_to_do(self) -> JudgedTemplates:
        if bool(self.gallery) != (self.probes is not None):
            raise ValueError("gallery and probes belong together; set both or neither")
        if self.pairs is None and not self.gallery:
            raise ValueError("nothing to verify or to identify; set pairs, or gallery and probes")
        return self


Texts = Annotated[
    Annotated[CorpusSource, Tag("CorpusSource")] | Annotated[PairSource, Tag("PairSource")], one_of(CorpusSource, PairSource)
]


class DataSettings(Section):
    """Training and test data of a stage.

    Args:
        pairs: captioned images.
        text_pairs: queries with their passages, instead of ``pairs``.
        texts: corpora for φ and maps, without test captions and queries.
        texts_limit: maximum number of texts.
        remembered: captioned images for ``memory: pairs``; default: ``pairs``.
        test: captioned test images.
        judged_texts: texts with judgements, instead of ``test`` and ``queries``.
        templates: templates of images, instead of ``test`` and ``queries``.
        zero_shot: labelled images for prompts, or several sets by name.
        images: labelled training images.
        subset: classes and samples of ``images``.
        queries: labelled query images.
        gallery: labelled gallery images; default: ``queries``.
        test_subset: evaluated classes, e.g. those outside training.
        old_reads: whether the old model embeds images, or their captions (BT² §4.7).
        old_embeddings: ``cached``: plain images and captions, once. ``online``: the new model's augmented view, in every epoch;
            streams need it.
        new_embeddings: the same for BT²'s independent model.
        augmentation: random changes to training images.
        views: for image maps, augmented views per image, embedded once and all used in every epoch; 0 for plain images.
        samples_per_class: K images per class in a batch, for triplet losses.
        one_per_id: draw a single row per id and epoch, so equal ids are never negatives.
        embeddings_of: whether cached maps learn from texts (as in the paper) or images of pairs.
        shuffle_buffer: streamed samples shuffled together, in the same order every pass.
    """

    pairs: PairSource | None = None
    text_pairs: TextPairSource | None = None
    texts: list[Texts] = []
    texts_limit: int | None = Field(None, ge=1)
    remembered: PairSource | None = None
    test: PairSource | None = None
    judged_texts: JudgedTexts | None = None
    templates: JudgedTemplates | None = None
    zero_shot: ZeroShotSets | None = None
    images: LabelledSource | None = None
    subset: Subset | None = None
    queries: LabelledSource | None = None
    gallery: LabelledSource | None = None
    test_subset: Subset | None = None
    old_reads: Literal["images", "captions"] = "images"
    old_embeddings: Literal["cached", "online"] = "cached"
    new_embeddings: Literal["cached", "online"] = "cached"
    augmentation: Augmentation | None = None
    views: int = Field(0, ge=0)
    samples_per_class: int = Field(4, ge=2)
    one_per_id: bool = False
    embeddings_of: Literal["texts", "images"] = "texts"
    shuffle_buffer: int = Field(10_000, ge=0)

    def tests(self) -> bool:
        """Return whether there is a test set."""
        return any(each is not None for each in (self.test, self.queries, self.judged_texts, self.templates))

    @model_validator(mode="after")
    def _one_kind_of_pairs(self) -> DataSettings:
        if self.text_pairs is None:
            return self
        if self.pairs is not None:
            raise ValueError("a stage has a single training set; remove text_pairs or pairs")
        if self.one_per_id and self.text_pairs.id_column is None:
            raise ValueError("one_per_id: text_pairs has no id_column; set it, or remove one_per_id")
        return self

    def zero_shot_sets(self) -> dict[str, ZeroShotSettings]:
        """Return zero-shot classifications by name, empty for a single classification."""
        return {"": self.zero_shot} if isinstance(self.zero_shot, ZeroShotSettings) else self.zero_shot or {}

    @model_validator(mode="after")
    def _one_test_set(self) -> DataSettings:
        images = [name for name in ("test", "queries", "gallery", "zero_shot") if getattr(self, name) is not None]
        others = [name for name in ("judged_texts", "templates") if getattr(self, name) is not None]
        if len(others) > 1 or (others and images):
            one, other = (others + images)[:2]
            raise ValueError(f"a stage has a single test set; remove {one} or {other}")
        return self

    @model_validator(mode="after")
    def _cameras_of_both_sides(self) -> DataSettings:
        if self.queries is not None and self.gallery is not None and self.queries.with_cameras != self.gallery.with_cameras:
            without = "queries" if self.gallery.with_cameras else "gallery"
            raise ValueError(f"{without} has no cameras, but the other side has; also set its camera_column or format")
        return self


class EvaluationSettings(Section):
    """Settings of the evaluation.

    Args:
        ks: cut-offs of recall (default 1, 5, 10, 50) or CMC (default 1, 5).
        old_on_new: whether old queries also search the new gallery, e.g. of clients after a backfill, or texts among images.
        slerp: weight of the old query, 0 to 1, in a mix with the new query (:func:`xcompat.heads.slerp`). Adds ``slerp/old``,
            which needs both encoders.
        fallback: confidence, in (0, 1], below which the old query (or the ``slerp`` mix) searches. Adds ``fallback/old``; queries
            need a confidence (:meth:`xcompat.models.CompatModel.confidence`).
        fars: false acceptance rates in (0, 1) of verification, for TAR@FAR. Default: 1e-4 for templates.
        fpirs: false positive identification rates in (0, 1) of open-set identification, for TPIR@FPIR; some queries need classes
            outside the gallery. Default: 1e-2 for templates. Closed sets get TPIR@FAR, as in InsightFace.
        rerank: hits per new query to re-rank with the new model (:class:`xcompat.retrieval.Reranker`), or true for the number
            chosen with the model (or 20). Adds ``new+rerank/old``.
        rerank_weight: weight of old scores in re-ranking; default: chosen with the model, or 1/3.
        threshold: cosine cut-off of the old model; the report gives its equivalent for new queries.
        resamples: bootstrap resamples.
        chunk_size: rows per similarity block; does not change results.
        compare_with: earlier stages whose queries are also evaluated.
        examples: example searches in the report.
        tsne_pairs: items in t-SNE plots; 0 for none.
    """

    ks: list[Annotated[int, Field(ge=1)]] | None = None
    old_on_new: bool = False
    slerp: float | None = Field(None, ge=0, le=1)
    fallback: float | None = Field(None, gt=0, le=1)
    fars: list[Rate] = []
    fpirs: list[Rate] = []
    rerank: bool | Annotated[int, Field(ge=0)] = 0
    rerank_weight: float | None = Field(None, ge=0, lt=1)
    threshold: float | None = Field(None, gt=-1, lt=1)
    resamples: int = Field(1000, ge=100)
    chunk_size: int = Field(1024, ge=1)
    compare_with: list[str] = []
    examples: int = Field(3, ge=0)
    tsne_pairs: int = Field(500, ge=0)

    @model_validator(mode="after")
    def _one_case_per_name(self) -> EvaluationSettings:
        for name in ("slerp", "fallback"):
            if getattr(self, name) is not None and name in self.compare_with:
                raise ValueError(f"compare_with: evaluation.{name} reports its results as {name!r}; rename the stage")
        return self

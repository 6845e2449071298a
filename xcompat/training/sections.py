"""The sections of a recipe: training and test data, and the evaluation."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from xcompat.data import Augmentation, CorpusSource, LabelledSource, PairSource, Subset, TextPairSource, TextSource
from xcompat.data.sources import ImageSource

Rate = Annotated[float, Field(gt=0, lt=1)]
"""A share of wrong answers that is allowed."""


class Section(BaseModel):
    """A part of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class ZeroShotSettings(Section):
    """Zero-shot classification from prompts.

    Args:
        images: labelled images (with ``label_column``).
        classes: file with one class name a line, in the order of the labels, or of the sorted folders (``xcompat classes`` writes
            those of ImageNet and its kin).
        templates: prompts, ``{}`` standing for the class, or ``openai`` for CLIP's 80 and ``simple`` for seven of them; their
            embeddings are averaged.
    """

    images: PairSource
    classes: str
    templates: list[str] | Literal["openai", "simple"] = ["a photo of a {}"]

    @field_validator("templates")
    @classmethod
    def _name_the_class(cls, value: list[str] | str) -> list[str] | str:
        if not value:
            raise ValueError("there is no prompt; give one or more, such as 'a photo of a {}', or leave templates out")
        for template in [] if isinstance(value, str) else value:
            if not _has_one_place(template):
                raise ValueError(
                    f"{template!r} must hold {{}} once, where the class goes; write other braces twice: {{{{ and }}}}"
                )
        return value

    def prompts(self) -> list[str]:
        """Return the prompts themselves."""
        from xcompat.encoders.class_names import prompt_templates

        return prompt_templates(self.templates) if isinstance(self.templates, str) else self.templates


def _has_one_place(template: str) -> bool:
    try:
        places = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        template.format("class")
    except (ValueError, LookupError, AttributeError):
        return False
    return places == [""]


def _is_of_several(given: Any) -> Literal["One", "Several"]:  # noqa: ANN401 - what YAML holds
    several = isinstance(given, dict) and given and not given.keys() & ZeroShotSettings.model_fields.keys()
    return "Several" if several else "One"


ZeroShotSets = Annotated[
    Annotated[ZeroShotSettings, Tag("One")]
    | Annotated[dict[Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")], ZeroShotSettings], Tag("Several")],
    Discriminator(_is_of_several),
]
"""One zero-shot classification, or several by name; a name that is a key of one, such as ``images``, is taken for it."""


class JudgedTexts(Section):
    """Texts that search texts, and judgements of what they should find.

    Args:
        queries: the texts to search with; they and passages are embedded as each model embeds its queries and its passages.
        passages: the texts to search.
        qrels: the file of judgements, of BEIR or TREC (:func:`xcompat.data.read_qrels`).
    """

    queries: TextSource
    passages: TextSource
    qrels: str


class JudgedTemplates(Section):
    """Templates of images, pairs of them to verify, and subjects to identify, in the files of IJB-C.

    Args:
        images: the pictures, such as a folder of faces that are cropped and aligned; their ids are the names in ``members``.
        members: lines of image, template and medium (``ijbc_face_tid_mid.txt``).
        pairs: lines of two templates, and 1 if they are of one subject, else 0 (``ijbc_template_pair_label.txt``).
        gallery: tables of template and subject that are searched together (``ijbc_1N_gallery_G1.csv`` and ``…_G2.csv``).
        probes: a table of template and subject that are searched for (``ijbc_1N_probe_mixed.csv``).
    """

    images: ImageSource
    members: str
    pairs: str | None = None
    gallery: list[str] = []
    probes: str | None = None

    def files(self) -> dict[str, str]:
        """Return the key of each file -> the file."""
        named = {"members": self.members, "pairs": self.pairs, "probes": self.probes}
        named |= {f"gallery.{number}": file for number, file in enumerate(self.gallery)}
        return {key: file for key, file in named.items() if file is not None}

    @model_validator(mode="after")
    def _something_to_do(self) -> JudgedTemplates:
        if bool(self.gallery) != (self.probes is not None):
            raise ValueError("gallery and probes belong together; give both or neither")
        if self.pairs is None and not self.gallery:
            raise ValueError("there is nothing to verify or to identify; give pairs, or gallery and probes")
        return self


class DataSettings(Section):
    """The training and test data of a stage.

    Args:
        pairs: images with captions.
        text_pairs: queries with the passages that answer them, in place of ``pairs``, for methods that learn from both.
        texts: text-only corpora for pretraining φ and for maps; captions of ``test`` and queries of ``judged_texts`` are always
            left out.
        texts_limit: use the first so many texts.
        remembered: images with captions that queries remember (``memory: pairs``); those of ``pairs`` unless given.
        test: images with captions that no stage trains on.
        judged_texts: texts with judgements, on whose queries no stage trains, in place of ``test`` and ``queries``.
        templates: templates of images with pairs and subjects, in place of ``test`` and ``queries``.
        zero_shot: labelled images for classification from prompts, or several sets of them by name.
        images: labelled images, for methods that learn from classes.
        subset: which classes and samples of ``images`` the stage learns from.
        queries: labelled images that are searched for.
        gallery: labelled images that are searched; the queries themselves unless given.
        test_subset: which classes of ``queries`` and ``gallery`` models are judged on, such as those no map was trained on.
        old_reads: whether the old model embeds labelled images, or their captions as a text encoder does (BT² §4.7).
        old_embeddings: whether a method reads old embeddings of plain images and of captions (``cached``, computed once) or of
            the same augmented view as the new ones (``online``, computed in every epoch), as pairs that are streamed need it.
        new_embeddings: the same for the embeddings of the independent new model, which BT² reads.
        augmentation: random changes to training images; none unless given.
        views: for maps over images, how many augmented views of each one all models embed alike, once, in place of the plain
            image; 0 for plain images. An epoch has every view of every image.
        samples_per_class: K, the number of images per class in a batch, for heads with a triplet loss only.
        one_per_id: draw one row per id and epoch, so that images of one thing are never each other's negatives.
        embeddings_of: whether maps over cached embeddings learn from texts (the paper) or from the pairs' images.
        shuffle_buffer: for streaming pairs, the number of samples that are shuffled together; every pass has the same order.
    """

    pairs: PairSource | None = None
    text_pairs: TextPairSource | None = None
    texts: list[CorpusSource | PairSource] = []
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
            raise ValueError("text_pairs and pairs are two training sets, and a stage learns from one; leave one out")
        if self.one_per_id and self.text_pairs.id_column is None:
            raise ValueError("one_per_id: text_pairs names no id_column; set it, or leave one_per_id out")
        return self

    def zero_shot_sets(self) -> dict[str, ZeroShotSettings]:
        """Return the zero-shot classifications by name; the name of one without any is empty."""
        return {"": self.zero_shot} if isinstance(self.zero_shot, ZeroShotSettings) else self.zero_shot or {}

    @model_validator(mode="after")
    def _one_test_set(self) -> DataSettings:
        images = [name for name in ("test", "queries", "gallery", "zero_shot") if getattr(self, name) is not None]
        others = [name for name in ("judged_texts", "templates") if getattr(self, name) is not None]
        if len(others) > 1 or (others and images):
            one, other = (others + images)[:2]
            raise ValueError(f"{one} and {other} are two test sets, and a stage is judged on one; leave one out")
        return self

    @model_validator(mode="after")
    def _cameras_of_both_sides(self) -> DataSettings:
        if self.queries is not None and self.gallery is not None and self.queries.with_cameras != self.gallery.with_cameras:
            without = "queries" if self.gallery.with_cameras else "gallery"
            raise ValueError(f"{without}: the other side has cameras and this one has none; set its camera_column or format too")
        return self


class EvaluationSettings(Section):
    """How the result is judged.

    Args:
        ks: cut-offs of recall (1, 5, 10 and 50 unless given) or of CMC (1 and 5), each 1 or more.
        old_on_new: whether old queries search the new gallery too, in the space that both share: the results of clients that
            still have the old model after a backfill, or of texts among images if the old model is a text encoder.
        slerp: the weight of the old query, from 0 to 1, in a mix with the new query (:func:`xcompat.heads.slerp`). It adds the
            case ``slerp/old``. Such a search needs both encoders for every query.
        fallback: the lowest confidence, in (0, 1], with which a new query searches alone. Below it the old query searches, or the
            mix of ``slerp``. It adds the case ``fallback/old``. The model's queries must have a confidence
            (:meth:`xcompat.models.CompatModel.confidence`).
        fars: false acceptance rates in (0, 1) at which pairs of a query and a gallery image, or of templates, are verified: each
            adds TAR@FAR. None by default for images with classes, 1e-4 for templates.
        fpirs: false positive identification rates in (0, 1) at which queries are identified in an open set: each adds TPIR@FPIR,
            for which some queries must be of classes that the gallery lacks. None by default, 1e-2 for templates. Where every
            probe's subject is in the gallery it adds TPIR@FAR, as InsightFace's evaluation of IJB-C does.
        rerank: hits of each new query that the new model scores again (:class:`xcompat.retrieval.Reranker`); 0 for none. It adds
            the case ``new+rerank/old``. Nothing more is embedded, as the test set's new embeddings are there.
        rerank_weight: weight of old scores in a re-ranking; None for the one that was chosen with the model, or 1/3.
        threshold: cosine at which a service of the old model cuts off. The report says at which score new queries cut off alike.
        resamples: bootstrap draws.
        chunk_size: rows per block of the similarity matrix; results do not depend on it.
        compare_with: earlier stages whose queries are measured beside the new model's.
        examples: example searches in the report.
        tsne_pairs: items in the report's t-SNE maps; 0 leaves the maps out.
    """

    ks: list[Annotated[int, Field(ge=1)]] | None = None
    old_on_new: bool = False
    slerp: float | None = Field(None, ge=0, le=1)
    fallback: float | None = Field(None, gt=0, le=1)
    fars: list[Rate] = []
    fpirs: list[Rate] = []
    rerank: int = Field(0, ge=0)
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
                raise ValueError(
                    f"compare_with names a stage {name}, which is what evaluation.{name} calls its case; rename the stage"
                )
        return self

"""``xcompat export atlas``: test items of a run for Embedding Atlas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.core.progress import console, literal, silence_libraries
from xcompat.data import open_image
from xcompat.data.schema import CAPTION, ID, IMAGE, captions_of
from xcompat.evaluation import Evaluation
from xcompat.evaluation.cases import IMAGE_TO_IMAGE, IMAGE_TO_TEXT, TEXT_TO_IMAGE, TEXT_TO_TEXT
from xcompat.evaluation.selective import query_quality
from xcompat.models.embedder import load_checkpoint
from xcompat.report import ReportContent
from xcompat.report.storage import encode_png
from xcompat.report.tsne import project, sampled_rows
from xcompat.training.evaluate_command import plain_model
from xcompat.training.evaluation_models import EvaluationSet
from xcompat.training.evaluation_sets import LabelledTestSet, PairTestSet, load_test_set
from xcompat.training.judged_templates import TemplateTestSet
from xcompat.training.judged_texts import JudgedTestSet
from xcompat.training.model_evaluation import embed_new, evaluate_cases
from xcompat.training.record import RECIPE, find_model, read_started_settings
from xcompat.training.sections import DataSettings, EvaluationSettings
from xcompat.training.stored_models import load_frozen

MADE_BY = "export atlas"
X, Y = "projection_x", "projection_y"
"""Column names that Embedding Atlas reads as a projection."""


def to_atlas(run: Path, out: Path, items: int, seed: int, overwrite: bool) -> None:
    """Write a row per sampled test item and side (old or new model).

    Columns:

    - ``id``, ``kind`` (image, text, query), ``side`` (old, new), ``text``
    - ``projection_x``, ``projection_y``: t-SNE of both sides in the old space
    - ``image``: thumbnail, ``{"bytes", "path"}``
    - ``rank_old``, ``rank_new``: rank of the first match in the old gallery, from 1
    - ``gain``: new minus old average precision (classes) or reciprocal rank

    Ranks and gain are null for items other than queries.

    Args:
        run: folder of a finished run or stage.
        out: Parquet file; replaced if this command wrote it.
        items: maximum number of items or image-text pairs.
        seed: random seed for sample and projection.
        overwrite: whether to replace any other file.

    Raises:
        XcompatError: no old model, no test set, a gallery map, or another command's file.
    """
    silence_libraries()
    require_replaceable(out, MADE_BY, overwrite, [run])
    content, test = _load_evaluated(run, items, seed)
    panels = [panel for panel in project(content) if len(panel.series) > 1]
    if not panels or content.contestants.upgraded is not None:
        raise XcompatError(f"{run}: cannot project: fewer than 5 test items, or old and new embeddings do not share a space")
    rows = sampled_rows(content.contestants.old, items, seed)
    described = {kind: list(_describe_items(test, kind, content, rows_P)) for kind, rows_P in rows.items()}
    series, written = iter(panels[0].series), list[dict[str, object]]()
    for side in ("old", "new"):
        for kind, about in described.items():
            points_P2 = next(series).points_N2
            kinds = {"kind": kind.removesuffix("s"), "side": side} if kind != "queries" else {"kind": "query", "side": side}
            written += [{**each, **kinds, X: float(x), Y: float(y)} for each, (x, y) in zip(about, points_P2, strict=True)]
    _write(written, out, overwrite, run)
    shown = " --text text --image image" if any(row["image"] for row in written) else " --text text"
    console.print(f"[green]✓[/] {len(written):,} rows in {literal(str(out))}", soft_wrap=True)
    console.print(f"  [dim]embedding-atlas {literal(str(out))} --x {X} --y {Y}{shown}[/]", soft_wrap=True)


def _load_evaluated(run: Path, items: int, seed: int) -> tuple[ReportContent, EvaluationSet]:
    """Return report content and test set of a run, from its caches if possible."""
    folder = find_model(run)
    if not (folder.parent / RECIPE).exists():
        raise XcompatError(f"{run} has no {RECIPE}, so its test set is unknown; choose a run made by `xcompat train`")
    test = load_test_set(DataSettings.model_validate(read_started_settings(folder.parent)["data"]))
    if isinstance(test, TemplateTestSet):
        raise XcompatError(f"{run} was evaluated on templates of several images, which cannot be exported; choose another run")
    model = torch.nn.Module.to(load_checkpoint(str(folder)), device())
    if test is None or not model.compatible_with:
        raise XcompatError(f"{run} has no old model or no test set, so there is nothing to compare; choose a run with a report")
    cache_dir = next((place for place in (run / "cache", run.parent / "cache") if place.is_dir()), run / "cache")
    plain = plain_model(model) if model.embeds_in_memory else None
    old = test.embed(load_frozen(model.compatible_with[0].name, device()), cache_dir)
    independent = test.embed(plain, cache_dir) if plain is not None else None
    contestants = embed_new(model, old, independent, test, cache_dir)
    evaluation, kept = evaluate_cases(contestants, EvaluationSettings(resamples=100), seed)
    return ReportContent(evaluation, kept, model.config.model_type, tsne_pairs=items, seed=seed), test


def _describe_items(test: EvaluationSet, kind: str, content: ReportContent, rows_P: np.ndarray) -> Iterator[dict[str, object]]:
    """Yield id, text, image and search results of sampled items."""
    old, evaluation = content.contestants.old, content.evaluation
    if isinstance(test, PairTestSet):
        direction = IMAGE_TO_TEXT if kind == "images" else TEXT_TO_IMAGE
        ids = asking = old.image_ids if kind == "images" else old.text_ids
        dataset, texts = (test.pairs, None) if kind == "images" else (None, test.texts)
    elif isinstance(test, LabelledTestSet):
        direction, ids, asking = IMAGE_TO_IMAGE, old.gallery_ids, old.query_ids
        dataset, texts = test.gallery.dataset, list(old.gallery_labels)
    else:
        assert isinstance(test, JudgedTestSet)
        direction, ids, asking = TEXT_TO_TEXT, old.query_ids, old.query_ids
        dataset, texts = None, test.texts()
    every = test.gallery_ids if isinstance(test, LabelledTestSet) else dataset[ID] if dataset is not None else ids
    stored = every if len(every) != len(ids) else ids  # without unreadable images
    place_of = {name: place for place, name in reversed(list(enumerate(stored)))}
    query_of = {name: row for row, name in enumerate(asking)} if asking is not ids else {}
    for row in rows_P.tolist():
        about: dict[str, Any] = {"id": str(ids[row]), "text": str(texts[row]) if texts is not None else "", "image": None}
        if dataset is not None:
            record = dataset[row if stored is ids else place_of[ids[row]]]
            about["image"] = {"bytes": encode_png(open_image(record[IMAGE])), "path": record[IMAGE]["path"]}
            about["text"] = about["text"] or "; ".join(captions_of(record.get(CAPTION)))
        yield about | _search_results(evaluation, direction, row if asking is ids else query_of.get(ids[row]))


def _search_results(evaluation: Evaluation, direction: str, row: int | None) -> dict[str, Any]:
    nothing = {"rank_old": None, "rank_new": None, "gain": None}
    if row is None or evaluation.ranks["old", "old", direction][row] < 0:
        return nothing
    ranks = {f"rank_{who}": int(evaluation.ranks[who, "old", direction][row]) + 1 for who in ("old", "new")}
    old, new = (query_quality(evaluation.ranks, evaluation.average_precision, who, direction)[row] for who in ("old", "new"))
    return ranks | {"gain": float(new - old)}


def _write(rows: list[dict[str, object]], out: Path, overwrite: bool, read: Path) -> None:
    import pyarrow.parquet as pq

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    texts, numbers = dict.fromkeys(("id", "kind", "side", "text"), pa.string()), dict.fromkeys((X, Y, "gain"), pa.float64())
    schema = pa.schema(texts | {"image": image} | numbers | dict.fromkeys(("rank_old", "rank_new"), pa.int64()))
    with owned_path(out, MADE_BY, overwrite, [read]) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)

"""``xcompat map``: from two folders of embeddings to a model, a table of trials, and the verdict."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from xcompat.errors import NothingHeldOutError, XcompatError
from xcompat.files import write_json
from xcompat.fingerprint import Fingerprint
from xcompat.mapping.candidates import GUESS, Candidate, Known, Paired, fit
from xcompat.mapping.choosing import Choice, choose
from xcompat.mapping.folds import Searched
from xcompat.mapping.paired import PairedEmbeddings, load_paired
from xcompat.mapping.showing import as_json, choice_table, said_of
from xcompat.models import CompatModel
from xcompat.models.codes import require_codec
from xcompat.models.config import describe_old
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.ownership import owned_path, require_replaceable
from xcompat.progress import console, literal, silence_libraries, stage
from xcompat.provenance import provenance

MADE_BY = "map"


def map_embeddings(
    old: Path,
    new: Path,
    out: Path,
    old_model: str | None,
    new_model: str | None,
    searched: Searched,
    seed: int,
    overwrite: bool,
    codec: str | None = None,
) -> bool:
    """Choose a map of queries on held-out items, solve it on everything, and write it as a model.

    Args:
        old: the old model's embeddings (see :func:`~xcompat.mapping.paired.load_paired`).
        new: the new model's embeddings of the same items.
        out: gets ``model`` and ``report.json``.
        old_model: the gallery's model, or the gallery's name for it; the name of ``old`` if None.
        new_model: the model that embeds the queries; None if only embeddings are known, and queries come as embeddings.
        searched: what is known of the classes that will be searched.
        seed: of the folds.
        overwrite: whether anything at ``out`` may be replaced.
        codec: of the memory's entries, as in :meth:`RememberedClasses.memory`.

    Returns:
        Whether new queries find more than old ones by every protocol and metric.

    Raises:
        XcompatError: the embeddings cannot be used, or ``out`` holds files that this command did not write.
    """
    silence_libraries()
    require_replaceable(out, MADE_BY, overwrite, (old, new))
    seconds: dict[str, float] = {}
    with stage("read", seconds):
        pairs = load_paired(old, new)
    _require_codec(codec, pairs)
    described = _described_old(old_model, old, pairs)
    encoder = _described_new(new_model, pairs) if new_model is not None else None
    with stage("try what was held out", seconds):
        choice, no_choice = _choice(pairs, searched, seed)
    if choice is not None:
        console.print(choice_table(choice))
    beats = choice is not None and choice.chosen.worst > 0
    candidate = choice.chosen.candidate if choice is not None else GUESS
    said = [*pairs.notes, *(said_of(choice) if choice is not None else [f"{no_choice}: the line that is taken is a guess."])]
    with stage("solve on everything", seconds), owned_path(out, MADE_BY, overwrite, (old, new)) as temporary:
        temporary.mkdir()
        confidence = choice.confidence if choice is not None else None
        model = fit(candidate, Known(pairs, described, codec=codec), confidence)
        model.config.encoder = encoder
        model.save_pretrained(temporary / "model")
        document = _document(choice, candidate, pairs, model) | {"old": described, "new": encoder, "searched_classes": searched}
        document |= {
            "fingerprint": model.fingerprint().digest,
            "seed": seed,
            "verdict": beats,
            "said": said,
            "seconds": seconds,
            "run": provenance(),
        }
        write_json(temporary / "report.json", document)
    for line in said:
        console.print(literal(line), soft_wrap=True)
    console.print(f"[green]✓[/] {literal(out / 'model')}: {literal(candidate)}", soft_wrap=True)
    return beats


def _require_codec(codec: str | None, pairs: Paired) -> None:
    require_codec(codec)
    if codec is not None and isinstance(pairs, PairedEmbeddings) and pairs.labels_N is None:
        raise XcompatError("--memory-codec: without classes or captions nothing is remembered; leave it out")


def _choice(pairs: Paired, searched: Searched, seed: int) -> tuple[Choice | None, str | None]:
    """Return the choice, or why there is none."""
    try:
        return choose(pairs, searched, seed), None
    except NothingHeldOutError as error:
        return None, str(error)


def _described_old(name: str | None, path: Path, pairs: Paired) -> dict[str, Any]:
    """Describe the gallery's model: loaded, or by its name alone, as in galleries that adopted an index."""
    dim = pairs.dims[1]
    if name is None:
        return describe_old(Fingerprint.from_string(path.stem), dim)
    if "/" not in name and not Path(name).exists():  # no model of a Hub: the gallery's name for it
        return describe_old(Fingerprint.from_string(name), dim)
    old = load_embedder(name)
    _require_dim(old, dim, "--old-model")
    return old.describe_old()


def _described_new(name: str, pairs: Paired) -> dict[str, Any]:
    new = load_embedder(name)
    _require_dim(new, pairs.dims[0], "--new-model")
    return new.describe_encoder()


def _require_dim(model: Embedder, dim: int, option: str) -> None:
    if model.dim != dim:
        raise XcompatError(f"{option} {model.name} embeds in {model.dim} dimensions, the embeddings given have {dim}")


def _document(choice: Choice | None, candidate: Candidate, pairs: Paired, model: CompatModel) -> dict[str, Any]:
    """Gather the measurements for ``report.json``."""
    document: dict[str, Any] = {
        "items": len(pairs),
        "classes": (pairs.n_classes or None) if isinstance(pairs, PairedEmbeddings) else None,
        "model": {"name": str(candidate), **asdict(candidate)},
        "fingerprint": model.fingerprint().digest,
    }
    return document | (as_json(choice) if choice is not None else {})

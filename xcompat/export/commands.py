"""Commands of ``xcompat export`` with their console output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xcompat.core.files import list_entries, read_json
from xcompat.core.ownership import require_replaceable
from xcompat.core.paths import model_folder
from xcompat.core.progress import console, literal, silence_libraries
from xcompat.export import onnx_towers, query_transform, sentence_transformers
from xcompat.export.modules import Space
from xcompat.models import CompatModel
from xcompat.models.embedder import load_checkpoint
from xcompat.retrieval.versions import notice_missing_old
from xcompat.vectors.codecs import MemoryParts


def _folder_of(run: str) -> list[Path]:
    """Return the local folder of a run's model, if there is one, which the export must not replace."""
    folder = Path(model_folder(run))
    return [folder] if folder.exists() else []


def _read_alone(name: str, memory: MemoryParts) -> str:
    """Return the lowest result of a map's exported queries in parentheses, if `xcompat map` recorded it."""
    report = Path(model_folder(name)).parent / "report.json"
    alone = read_json(report).get("alone", {}) if report.is_file() else {}
    return f" (lowest gain: {alone[memory]})" if memory in alone else ""


@contextmanager
def _load_alone(name: str, memory: MemoryParts = "full") -> Iterator[CompatModel]:
    """Yield a model to export, and warn after a successful export if it needs the old model, which exports cannot include."""
    model = load_checkpoint(name)
    yield model
    notice_missing_old(model, _read_alone(name, memory))


def to_faiss(index: Path, model: str, out: Path, overwrite: bool, memory: MemoryParts = "transform") -> None:
    """Write a faiss index for the new model's queries, with the model's learned transform if it has one.

    The index cannot contain the entries of a memory. ``memory="full"`` refuses such a model, and others leave the entries out.
    """
    silence_libraries()
    query_transform.require_place(index, out, overwrite)
    with _load_alone(model, memory) as loaded:
        kept, entries = loaded.memory, 0
        if kept is not None and memory != "full" and not loaded.maps_galleries:
            entries = kept.settings["entries"]
            loaded = loaded.remember(kept.without_entries() if memory == "transform" else None)
        old, dim = literal(str(query_transform.to_faiss(loaded, index, out, overwrite))), loaded.config.embedding_dim
    ids = f"; their ids are in {literal(str(query_transform.ids_beside(out)))}" if index.is_dir() else ""
    console.print(
        f"[green]✓[/] {literal(str(out))} takes {dim}-dimensional queries; its vectors are those of {old}{ids}", soft_wrap=True
    )
    if entries:
        measured = literal(_read_alone(model, memory)) or (
            ". To measure such queries, fit the map with `xcompat map --memory transform --allow-worse`"
        )
        console.print(
            f"[yellow]![/] a faiss index cannot contain the map's memory ({entries:,} entries), so its queries differ from those "
            f"of the map{measured}",
            soft_wrap=True,
        )
    if query_transform.reads_features(loaded):
        console.print("queries are inputs of the new model's last linear layer, of any length")
    else:
        console.print("queries must have length 1, as the model embeds them: divide others by their norm")
    if index.is_file():
        console.print(
            f"[yellow]![/] a faiss file does not record its model: cannot verify that {old} made its vectors. "
            "Make a gallery with `xcompat gallery adopt` and export that to verify it"
        )


def to_sentence_transformers(run: str, out: Path, space: Space, overwrite: bool) -> None:
    """Write a folder that sentence-transformers loads."""
    silence_libraries()
    require_replaceable(out, sentence_transformers.MADE_BY, overwrite, _folder_of(run))
    with _load_alone(run) as model:
        enough = sentence_transformers.to_sentence_transformers(model, out, space, overwrite)
    flag, needs = ("", "without xcompat") if enough else (", trust_remote_code=True", "where xcompat is installed")
    load = f"SentenceTransformer({str(out)!r}{flag})"
    console.print(f"[green]✓[/] {literal(load)} embeds in the {space} space, {needs}", soft_wrap=True)


def to_onnx(run: str, out: Path, space: Space, overwrite: bool) -> None:
    """Write image and text tower as ONNX."""
    silence_libraries()
    require_replaceable(out, onnx_towers.MADE_BY, overwrite, _folder_of(run))
    with _load_alone(run) as model:
        onnx_towers.to_onnx(model, out, space, overwrite)
    towers = " and ".join(path.name for path in list_entries(out, "*.onnx"))
    allowed = f"within {onnx_towers.TOLERANCE:.0e} of PyTorch"
    console.print(f"[green]✓[/] {literal(str(out))}: {towers} embed in the {space} space, {allowed}", soft_wrap=True)

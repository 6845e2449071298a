"""Lineage of a checkpoint: its chain of older compatible models, on the Hub and in local folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from xcompat.core.errors import XcompatError
from xcompat.core.files import list_entries
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import split_revision
from xcompat.core.progress import literal
from xcompat.hub.endpoint import CONFIGS, hub_errors, is_hub_name, plain_name, read_config, read_repository

if TYPE_CHECKING:
    from rich.tree import Tree


@dataclass(frozen=True)
class Ancestor:
    """Model in a lineage.

    Args:
        name: Hub name, folder, or any other name.
        kind: its method, ``encoder`` or ``embeddings``. Empty if not found.
        fingerprint: its fingerprint according to the newer model. Empty for the first model.
        dim: dimension of its embeddings, or None if unknown.
        broken: single-line reason why the lineage breaks here. Empty if it does not.
        older: compatible older models, nearest first.
    """

    name: str
    kind: str
    fingerprint: str = ""
    dim: int | None = None
    broken: str = ""
    older: list[Ancestor] = field(default_factory=list)

    def walk(self) -> Iterator[Ancestor]:
        """Yield this model and all older models."""
        yield self
        for each in self.older:
            yield from each.walk()


class _Checkpoint(NamedTuple):
    config: dict[str, Any]
    place: str
    fingerprint: str | None


def trace_lineage(name: str) -> Ancestor:
    """Trace a checkpoint's compatible older models.

    Args:
        name: Hub name, a checkpoint's folder, or the folder of a finished run.

    Returns:
        The checkpoint. Missing or circular links are ``broken``.

    Raises:
        XcompatError: the checkpoint does not exist, or the Hub cannot be reached.
    """
    found = _find(name, None)
    if isinstance(found, str):
        raise XcompatError(found)
    return Ancestor(name, _kind(found.config), dim=found.config.get("embedding_dim"), older=_older(found, (found.place,)))


def require_whole(first: Ancestor) -> None:
    """Raise :class:`XcompatError` if a lineage is broken, with the first broken link."""
    broken = [each.broken for each in first.walk() if each.broken]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise XcompatError(f"the lineage of {first.name} is broken: {broken[0]}{more}; restore this model, or train again")


def draw(first: Ancestor) -> Tree:
    """Return a lineage as a tree for the terminal."""
    from rich.tree import Tree

    about = [first.kind or "not found", *([f"{first.dim} dimensions"] if first.dim else [])]
    identity = f"[dim]@{literal(first.fingerprint[:12])}[/]" if first.fingerprint else ""
    tree = Tree(f"[bold]{literal(first.name)}[/]{identity} ({literal(', '.join(about))})" + " [red]✗[/]" * bool(first.broken))
    for each in first.older:
        tree.children.append(draw(each))
    return tree


def _older(newer: _Checkpoint, path: tuple[str, ...]) -> list[Ancestor]:
    """Follow the compatible models without a link from a nearer model."""
    old = newer.config.get("old") if _kind(newer.config) not in ("encoder", "embeddings") else None
    if not old:
        return []
    seen: set[str] = set()
    followed = []
    for described in _versions(old, newer.place):
        if described["fingerprint"] not in seen:
            followed.append(_follow(described, path))
            seen |= {each.fingerprint for each in followed[-1].walk()}
    return followed


def _versions(old: object, place: str) -> list[dict[str, object]]:
    """Return the versions in a configuration, nearest first. Reject incomplete entries."""
    older = old.get("compatible_with", []) if isinstance(old, dict) else None
    listed: list[Any] = [old, *older] if isinstance(older, list) else [None]
    for described in listed:
        known = described if isinstance(described, dict) else {}
        if not all(isinstance(known.get(key), kind) for key, kind in (("name", str), ("fingerprint", str), ("dim", int))):
            raise XcompatError(f"the configuration of {place} has no valid compatible versions; push or train it again")
    return listed


def _follow(described: dict[str, Any], path: tuple[str, ...]) -> Ancestor:
    name, digest, dim = described["name"], described["fingerprint"], described["dim"]
    found = _find(name, described.get("revision"))
    if isinstance(found, str):
        return Ancestor(name, "", digest, dim, broken=found)
    if found.place in path:
        circle = " → ".join([*path[path.index(found.place) :], found.place])
        return Ancestor(
            name, _kind(found.config), digest, dim, broken=f"it leads in a circle, {circle}; push the older model again"
        )
    stated = found.fingerprint
    if stated is not None and digest not in (stated, Fingerprint(stated).derive("view").digest):
        changed = f"{name} is another model now ({stated[:12]}, not {digest[:12]}); use its earlier revision"
        return Ancestor(name, _kind(found.config), digest, dim, broken=changed)
    return Ancestor(name, _kind(found.config), digest, dim, older=_older(found, (*path, found.place)))


def _kind(config: dict[str, object]) -> str:
    kind = str(config.get("model_type", "encoder"))
    return kind.removeprefix("xcompat-") if kind.startswith("xcompat") or kind == "embeddings" else "encoder"


def _find(name: str, revision: str | None) -> _Checkpoint | str:
    name, named = split_revision(name)
    revision = revision or named
    if (folder := Path(plain_name(name))).is_dir():
        return _find_folder(folder)
    return _find_on_hub(name, revision) if is_hub_name(name) else f"{name} is neither a folder here nor a name on the Hub"


def _find_folder(folder: Path) -> _Checkpoint | str:
    for place in (folder, folder / "model"):
        for file in CONFIGS:
            if (place / file).exists():
                return _Checkpoint(read_config(place / file), str(place.resolve()), None)
    if list_entries(folder, "*.npy"):
        return _Checkpoint({"model_type": "embeddings"}, str(folder.resolve()), None)
    return f"{folder} contains no model"


def _find_on_hub(name: str, revision: str | None) -> _Checkpoint | str:
    repo, api = plain_name(name), HfApi()
    place = f"{repo}@{revision}" if revision else repo
    with hub_errors(name):
        try:
            held = read_repository(api, repo, revision)
        except GatedRepoError:  # a kind of RepositoryNotFoundError
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return f"{place} is neither a folder here nor on {api.endpoint}, or you have no access"
    if held.config is None:
        return f"{place} on {api.endpoint} contains no model"
    return _Checkpoint(held.config, place, held.fingerprint)

"""``xcompat push``: a model and its card on the Hub."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import AutoModel

from xcompat.core.checksums import CHECKSUMS
from xcompat.core.errors import XcompatError
from xcompat.core.files import list_entries, read_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import console, literal
from xcompat.data import addresses
from xcompat.data.addresses import PIPE, SCHEMES
from xcompat.encoders import load_encoder, reading_model
from xcompat.encoders.model_files import PATTERNS
from xcompat.encoders.text_files import MODEL_CONFIG, MODULES, module_folders
from xcompat.evaluation.cases import ALL
from xcompat.hub.card import ModelFacts, RunFacts
from xcompat.hub.endpoint import CONFIGS, is_dataset, plain_name, public_name
from xcompat.hub.metadata import Gain
from xcompat.hub.push import PushedModel, record_push
from xcompat.hub.push import push as push_model
from xcompat.mapping.choice_report import read_gains
from xcompat.models import CompatModel
from xcompat.models.embedder import is_checkpoint
from xcompat.models.push import prepare_push
from xcompat.report import Report, load_report, render_markdown, report_file
from xcompat.report.storage import is_report_of_map
from xcompat.report.wording import NOT_SHOWN, search_name
from xcompat.training.auto_map import read_verdict
from xcompat.training.record import find_model
from xcompat.training.stage_recipe import ROLES, STAGE_PREFIX
from xcompat.training.yaml_files import read_yaml
from xcompat.vectors.codecs import MemoryParts

Form = Literal["as it is", "merged", "adapters"]
HELD_OUT = "a validation split of its training set"
_OF_ENCODERS = (*PATTERNS, MODULES, MODEL_CONFIG, CHECKSUMS, "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
"""Pushed files of a plain encoder."""
_PARTS = ("images", "pairs", "text_pairs", "remembered", "texts", "queries", "gallery", "test", "judged_texts", "zero_shot")


def push(
    target: str | Path,
    repo: str,
    form: Form = "as it is",
    private: bool | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    license: str | None = None,  # noqa: A002 - the Hub's word
    memory: MemoryParts = "full",
) -> str:
    """Push a model with preprocessing and card.

    Args:
        target: folder of a run or checkpoint.
        repo: ``user/name``.
        form: whether to merge adapters, or push them without their base.
        private: visibility; None: private only if the base is gated or private.
        overwrite: whether to replace another model.
        revision: branch, created if missing; None for the default.
        license: license on the card.
        memory: pushed part of the memory (embeddings of training data): ``none``, ``transform`` (only the learned
            transform), or ``full``.

    Returns:
        Address of the commit.

    Raises:
        XcompatError: the model, its form or the repository does not fit, or the Hub fails.
    """
    folder = find_model(Path(target))
    model, run, known = (_checkpoint if is_checkpoint(str(folder)) else _encoder)(folder, form, memory)
    commit = push_model(model, repo, run, private=private, overwrite=overwrite, revision=revision, license=license)
    if form != "merged" and memory == "full":  # else existing galleries belong to another model
        try:
            record_push(folder, commit, known)
        except OSError as error:  # the push itself has succeeded
            said = f"cannot write to {folder} ({error.strerror}): newer models will name this folder, not {repo}"
            console.print(f"[yellow]{literal(said)}[/]", soft_wrap=True)
    return str(commit)


def _without_memory(model: CompatModel, folder: Path, memory: MemoryParts) -> CompatModel:
    if model.memory is None:
        raise XcompatError(f"{folder} has no memory; remove --memory {memory}")
    if model.maps_galleries and memory == "transform":
        raise XcompatError(f"{folder} maps galleries, which have no learned transform; use --memory none")
    return model.remember(model.memory.without_entries() if memory == "transform" else None)


def _encoder(folder: Path, form: Form, memory: MemoryParts) -> tuple[PushedModel, RunFacts, list[str]]:
    if form != "as it is" or memory != "full":
        raise XcompatError(f"{folder} is a plain encoder without adapters or a memory; push it as it is")
    encoder, processor = load_encoder(str(folder))
    known, citation = encoder.fingerprint(processor), "A plain encoder in its own library's format"
    about: dict[str, Any] = {"embeds_texts": encoder.has_text, "embeds_images": encoder.has_images, "library": encoder.library}
    facts = ModelFacts("encoder", citation, known, encoder.embedding_dim, embeds=[known.digest], **about)
    config = next(read_json(folder / name) for name in CONFIGS if (folder / name).exists())
    return PushedModel(facts, config, partial(_copy_model, folder)), run_facts(folder, known), [known.digest]


def _copy_model(folder: Path, target: Path) -> None:
    """Copy an encoder's own files only, without optimizer states or secrets."""
    for place in [folder, *module_folders(folder)]:
        copied = target / place.relative_to(folder)
        copied.mkdir(parents=True)
        for file in list_entries(place):
            if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _OF_ENCODERS):
                shutil.copy2(file, copied / file.name)


def _checkpoint(folder: Path, form: Form, memory: MemoryParts) -> tuple[PushedModel, RunFacts, list[str]]:
    """Return a compatible model in a form, facts about its run, and its fingerprints before."""
    with reading_model(str(folder)):
        model: CompatModel = AutoModel.from_pretrained(str(folder), trust_remote_code=False)
    lineage, written = model.lineage, model.written_lineage.model
    run = run_facts(folder, written)
    known = [lineage.model, written, lineage.embeds.fingerprint, lineage.stores.fingerprint]
    if memory != "full":
        model = _without_memory(model, folder, memory)
        run = _date_results(run, "before the memory was removed")
    if form == "merged":
        if model.encoder is None or not (model.config.adapters or {}).get("lora"):
            raise XcompatError(f"{folder} has no LoRA to merge; push it without --merged")
        model.merge_adapters()
        run = _date_results(run, "before LoRA was merged into the weights")
    elif form == "adapters":
        model.leave_out_base()
    pushed = prepare_push(model)
    facts = pushed.facts
    if facts.holds != "all" and facts.base is not None and facts.base["library"] != "xcompat" and facts.base_on_hub is None:
        base = facts.base["name"]
        if facts.holds == "adapters":
            raise XcompatError(f"its base {base} is a local folder, so others cannot load it; push the whole model")
        console.print(
            f"[yellow]its base {literal(base)} is a local folder: others can only apply the map to embeddings[/]", soft_wrap=True
        )
    return pushed, run, [each.digest for each in known]


def _date_results(run: RunFacts, when: str) -> RunFacts:
    results = f"Measured {when}.\n\n{run.results}" if run.results else ""
    return replace(run, results=results, measured_on=f"{run.measured_on}, {when}" if run.measured_on else "")


def run_facts(folder: Path, fingerprint: Fingerprint) -> RunFacts:
    """Read a model's recipe, results and environment.

    Args:
        folder: folder of the model in its stage.
        fingerprint: of the model; other models' reports are ignored.

    Returns:
        The facts; empty without a run.
    """
    stage = folder.parent
    if not (stage / "recipe.yaml").exists():
        return _with_results(RunFacts(), [folder, stage], fingerprint)
    recipes = _recipes(stage)
    environment = read_json(stage / "environment.json") if (stage / "environment.json").exists() else {}
    done = read_json(stage / "done.json") if (stage / "done.json").exists() else {}
    sections = [recipe.get("data") or {} for recipe in recipes]
    named = {part: [name for each in sections for name in _names(each.get(part))] for part in _PARTS}
    several = [shot for each in sections for shot in (each.get("zero_shot") or {}).values() if isinstance(shot, dict)]
    named["zero_shot"] += [name for shot in several for name in _names(shot)]
    names = {part: list(dict.fromkeys(each)) for part, each in named.items()}
    facts = RunFacts(
        data={part: [anonymise_name(name) for name in each] for part, each in names.items() if each},
        datasets=sorted({name for each in names.values() for name in each if is_dataset(name)}),
        recipe=yaml.safe_dump_all(map(_escape_values, recipes), sort_keys=False, allow_unicode=True).rstrip(),
        seconds=done.get("seconds"),
        machine=environment.get("machine", {}).get("device", ""),
        versions=environment.get("versions", {}),
        warning=_warning(stage),
    )
    return _with_results(facts, [folder, stage, stage.parent], fingerprint)


def _recipes(stage: Path) -> list[dict[str, Any]]:
    """Return the recipes of used stages, then the stage's own."""
    recipe = read_yaml(stage / "recipe.yaml")
    sources = [recipe.get("projection"), *((recipe.get(role) or {}).get("name") for role in ROLES)]
    named = dict.fromkeys(name.removeprefix(STAGE_PREFIX) for name in sources if name and name.startswith(STAGE_PREFIX))
    earlier = [each for name in named for each in _recipes(stage.parent / name)]
    return [each for row, each in enumerate(earlier) if each not in earlier[:row]] + [recipe]


def _with_results(run: RunFacts, folders: list[Path], fingerprint: Fingerprint) -> RunFacts:
    """Add the first report about the model."""
    for folder in folders:
        file = report_file(folder)
        if not file.exists():
            continue
        if is_report_of_map(document := read_json(file)):
            if document.get("fingerprint") == fingerprint.digest:
                gains = read_gains(document, file)  # none if the new model's neighbours replaced labels
                warning = "" if document.get("verdict") and gains else NOT_SHOWN
                return replace(run, gains=gains, measured_on=HELD_OUT, warning=warning)
            continue
        report = load_report(folder)
        if report.new.fingerprint in (fingerprint.digest, fingerprint.derive("view").digest):
            tested_on = ", ".join(run.data.get("test", [])) or "its test set"
            return replace(run, results=render_markdown(report), gains=_gains(report), measured_on=tested_on)
    return run


def _warning(stage: Path) -> str:
    return NOT_SHOWN if read_verdict(stage) is False else ""


def _gains(report: Report) -> list[Gain]:
    """Return the gains of a verdict with both models' metrics."""
    metrics = {
        (case.label, case.direction, case.population, name): value
        for case in report.cases
        for name, value in case.metrics.items()
    }
    gains = []
    for each in report.criterion.differences:
        search = each.direction, each.population
        old, new = (metrics.get((label, *search, each.metric)) for label in ("old/old", "new/old"))
        if old is not None and new is not None:
            where = each.direction if each.population == ALL else search_name(*search)
            gains.append(Gain(where, each.metric, old, new, each.mean, each.ci95))
    return gains


def _names(source: Any) -> Iterator[str]:  # noqa: ANN401 - a section of a recipe
    if isinstance(source, str):
        yield source
    elif isinstance(source, list):
        for each in source:
            yield from _names(each)
    elif isinstance(source, dict):
        for key in ("path", "images", "queries", "passages"):
            yield from _names(source.get(key))


def anonymise_name(name: str) -> str:
    """Return a name without local folders, and an address without secrets.

    Example:
        >>> anonymise_name("/home/me/photos/train"), anonymise_name("../shared/flickr/*.tar"), anonymise_name("nlphuji/flickr30k")
        ('train', 'shared/flickr/*.tar', 'nlphuji/flickr30k')
        >>> anonymise_name("https://me:secret@shards.example/0.tar?signature=secret")
        'https://shards.example/0.tar'
        >>> anonymise_name("sentence-transformers:/home/me/models/e5"), anonymise_name("photos/../../../home/me"), anonymise_name("file:///home/me/0.tar")
        ('e5', 'me', '0.tar')
    """
    if name.startswith(PIPE):
        return PIPE + anonymise_name(addresses.redact_address(name).removeprefix(PIPE))
    if name.startswith(SCHEMES):
        return addresses.redact_address(name)
    local = plain_name(name).removeprefix("file:")
    if ".." in Path(local).parts:
        local = os.path.normpath(local)
    if local.startswith(("/", "~", "../..")):  # local folders
        return public_name(local)
    below = re.sub(r"^(\.\.?/)+", "", local)
    return name if below == plain_name(name) else below  # keep the library of a model's name


def _escape_values(value: Any) -> Any:  # noqa: ANN401 - nested YAML
    if isinstance(value, dict):
        return {key: _escape_values(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_escape_values(inner) for inner in value]
    return anonymise_name(value) if isinstance(value, str) else value

"""``xcompat push``: push a run's model or a checkpoint to the Hub, with a card of how it was made and its results."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from xcompat.core.errors import XcompatError
from xcompat.core.files import listed, read_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.folder_checksums import CHECKSUMS
from xcompat.core.progress import console, literal
from xcompat.data import addresses
from xcompat.data.addresses import PIPE, SCHEMES
from xcompat.encoders import load_encoder, reading_model
from xcompat.encoders.model_files import PATTERNS
from xcompat.encoders.text_files import ABOUT, MODULES, module_folders
from xcompat.evaluation.cases import ALL
from xcompat.hub.card import ModelFacts, RunFacts
from xcompat.hub.endpoint import CONFIGS, is_dataset, plain_name, public_name
from xcompat.hub.metadata import Gain
from xcompat.hub.push import push_model, record_push
from xcompat.mapping.showing import gains_written
from xcompat.models import CompatModel
from xcompat.models.embedder import is_checkpoint
from xcompat.report import Report, load_report, render_markdown, report_file
from xcompat.report.storage import is_report_of_map
from xcompat.report.wording import NOT_SHOWN, search_name
from xcompat.training.chosen import read_verdict
from xcompat.training.record import find_model
from xcompat.training.stage_recipe import ROLES, STAGE_PREFIX
from xcompat.training.yaml_files import read_yaml

Form = Literal["as it is", "merged", "adapters"]
Remembered = Literal["all", "metric", "none"]
HELD_OUT = "what was held out of its training set"
_OF_ENCODERS = (*PATTERNS, MODULES, ABOUT, CHECKSUMS, "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
"""Name patterns of the files that a plain encoder is pushed with."""
_PARTS = ("images", "pairs", "text_pairs", "remembered", "texts", "queries", "gallery", "test", "judged_texts", "zero_shot")


class _Pushed(NamedTuple):
    """The first arguments of :func:`~xcompat.hub.push.push_model`, and the digests by which others know the model."""

    facts: ModelFacts
    config: dict[str, Any]
    write: Callable[[Path], object]
    run: RunFacts
    fingerprints: list[str]


def push(
    target: str | Path,
    repo: str,
    form: Form = "as it is",
    private: bool | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    license: str | None = None,  # noqa: A002 - the Hub's word
    memory: Remembered = "all",
) -> str:
    """Push a model with its preprocessing and its card.

    Args:
        target: a run's folder, or a checkpoint's.
        repo: ``user/name``.
        form: whether adapters are merged, or pushed without their base.
        private: whether the repository is private; None if it is to be only where the base is gated or private.
        overwrite: whether another model in the repository may be replaced.
        revision: the branch, made if missing; None for the default one.
        license: the license on the card.
        memory: how much of the queries' memory (embeddings of training data) is pushed: all, the metric alone, or none.

    Returns:
        The address of the commit.

    Raises:
        XcompatError: there is no model, it cannot take the form, the repository holds another one, is public where it is to be
            private or the other way round, or the Hub refuses or cannot be reached.
    """
    folder = find_model(Path(target))
    facts, config, write, run, known = (_checkpoint if is_checkpoint(str(folder)) else _encoder)(folder, form, memory)
    commit = push_model(repo, facts, config, write, run, private=private, overwrite=overwrite, revision=revision, license=license)
    if form != "merged" and memory == "all":  # else the pushed model is not the one whose galleries exist
        try:
            record_push(folder, commit, known)
        except OSError as error:  # the push itself has succeeded
            said = f"{folder} cannot be written to ({error.strerror}): newer models will name this folder and not {repo}"
            console.print(f"[yellow]{literal(said)}[/]", soft_wrap=True)
    return str(commit)


def _forgetting(model: CompatModel, folder: Path, memory: Remembered) -> CompatModel:
    """Remove the memory of a model, or all of it but the metric."""
    if model.memory is None:
        raise XcompatError(f"{folder} remembers nothing; leave out --memory {memory}")
    if model.maps_galleries and memory == "metric":
        raise XcompatError(f"{folder} maps galleries, which wear no metric; push it with --memory none")
    return model.remember(model.memory.metric_alone() if memory == "metric" else None)


def _encoder(folder: Path, form: Form, memory: Remembered) -> _Pushed:
    """Prepare a plain encoder for the push."""
    if form != "as it is" or memory != "all":
        raise XcompatError(f"{folder} is a plain encoder without adapters or a memory; push it as it is")
    encoder, processor = load_encoder(str(folder))
    known, citation = encoder.fingerprint(processor), "A plain encoder in its own library's format"
    about: dict[str, Any] = {"embeds_texts": encoder.has_text, "embeds_images": encoder.has_images, "library": encoder.library}
    facts = ModelFacts("encoder", citation, known, encoder.embedding_dim, embeds=[known.digest], **about)
    config = next(read_json(folder / name) for name in CONFIGS if (folder / name).exists())
    write = partial(_copy_model, folder)
    return _Pushed(facts, config, write, run_facts(folder, known), [known.digest])


def _copy_model(folder: Path, target: Path) -> None:
    """Copy the files of a plain encoder, and nothing else that lies in its folder, such as an optimizer's state or secrets."""
    for place in [folder, *module_folders(folder)]:
        copied = target / place.relative_to(folder)
        copied.mkdir(parents=True)
        for file in listed(place):
            if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _OF_ENCODERS):
                shutil.copy2(file, copied / file.name)


def _checkpoint(folder: Path, form: Form, memory: Remembered) -> _Pushed:
    """Prepare a compatible model for the push, in the given form."""
    from transformers import AutoModel

    with reading_model(str(folder)):
        model: CompatModel = AutoModel.from_pretrained(str(folder))
    run = run_facts(folder, model.written_fingerprint())
    known = [model.fingerprint(), model.written_fingerprint(), model.embeds_fingerprint(), model.stored_fingerprint()]
    if memory != "all":
        model = _forgetting(model, folder, memory)
        run = _measured(run, "before what queries remember was left out")
    if form == "merged":
        if model.encoder is None or not (model.config.adapters or {}).get("lora"):
            raise XcompatError(f"{folder} has no LoRA to merge; push it as it is")
        model.merge_adapters()
        run = _measured(run, "before LoRA was merged into the weights")
    elif form == "adapters":
        model.leave_out_base()
    facts = model.facts()
    if facts.holds != "all" and facts.base is not None and facts.base["library"] != "xcompat" and facts.base_on_hub is None:
        base = facts.base["name"]
        if facts.holds == "adapters":
            raise XcompatError(f"its base {base} is a folder of this machine, which nobody else has; push the whole model")
        console.print(
            f"[yellow]its base {literal(base)} is a folder of this machine: who pulls the map can apply it to embeddings alone[/]"
        )
    return _Pushed(facts, model.config.to_dict(), model.save_pretrained, run, [each.digest for each in known])


def _measured(run: RunFacts, when: str) -> RunFacts:
    """Add to the results when they were measured."""
    results = f"Measured {when}.\n\n{run.results}" if run.results else ""
    return replace(run, results=results, measured_on=f"{run.measured_on}, {when}" if run.measured_on else "")


# ------------------------------------------------------------------------------------------------------------- the run


def run_facts(folder: Path, fingerprint: Fingerprint) -> RunFacts:
    """Read the recipe, results and environment of a model from its run's folder.

    Args:
        folder: the model's folder, in the stage's folder.
        fingerprint: the model's; reports of other models are left out.

    Returns:
        The facts; those of a checkpoint without a run are empty.
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
        data={part: [shown(name) for name in each] for part, each in names.items() if each},
        datasets=sorted({name for each in names.values() for name in each if is_dataset(name)}),
        recipe=yaml.safe_dump_all(map(_shown, recipes), sort_keys=False, allow_unicode=True).rstrip(),
        seconds=done.get("seconds"),
        machine=environment.get("machine", {}).get("device", ""),
        versions=environment.get("versions", {}),
        warning=_warning(stage),
    )
    return _with_results(facts, [folder, stage, stage.parent], fingerprint)


def _recipes(stage: Path) -> list[dict[str, Any]]:
    """Return the resolved recipes of the stages that a stage is made from, then its own."""
    recipe = read_yaml(stage / "recipe.yaml")
    sources = [recipe.get("projection"), *((recipe.get(role) or {}).get("name") for role in ROLES)]
    named = dict.fromkeys(name.removeprefix(STAGE_PREFIX) for name in sources if name and name.startswith(STAGE_PREFIX))
    earlier = [each for name in named for each in _recipes(stage.parent / name)]
    return [each for row, each in enumerate(earlier) if each not in earlier[:row]] + [recipe]


def _with_results(run: RunFacts, folders: list[Path], fingerprint: Fingerprint) -> RunFacts:
    """Add what the first report about the model says."""
    for folder in folders:
        file = report_file(folder)
        if not file.exists():
            continue
        if is_report_of_map(document := read_json(file)):
            if document.get("fingerprint") == fingerprint.digest:
                gains = gains_written(document, file)  # none where the new model's neighbours had to stand for labels
                warning = "" if document.get("verdict") and gains else NOT_SHOWN
                return replace(run, gains=gains, measured_on=HELD_OUT, warning=warning)
            continue
        report = load_report(folder)
        if report.new.fingerprint in (fingerprint.digest, fingerprint.derived("view").digest):
            tested_on = ", ".join(run.data.get("test", [])) or "its test set"
            return replace(run, results=render_markdown(report), gains=_gains(report), measured_on=tested_on)
    return run


def _warning(stage: Path) -> str:
    """Return the sentence above the results of a chosen map that is not surely at or above old queries."""
    return NOT_SHOWN if read_verdict(stage) is False else ""


def _gains(report: Report) -> list[Gain]:
    """Return the gains of a report's verdict, with the metrics that they are the difference of."""
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


def shown(name: str) -> str:
    """Return the name of a file, folder or data set without the folders of this machine, and an address without its secrets.

    Example:
        >>> shown("/home/me/photos/train"), shown("../shared/flickr/*.tar"), shown("nlphuji/flickr30k")
        ('train', 'shared/flickr/*.tar', 'nlphuji/flickr30k')
        >>> shown("https://me:secret@shards.example/0.tar?signature=secret")
        'https://shards.example/0.tar'
        >>> shown("sentence-transformers:/home/me/models/e5"), shown("photos/../../../home/me"), shown("file:///home/me/0.tar")
        ('e5', 'me', '0.tar')
    """
    if name.startswith(PIPE):
        return PIPE + shown(addresses.shown(name).removeprefix(PIPE))
    if name.startswith(SCHEMES):
        return addresses.shown(name)
    local = plain_name(name).removeprefix("file:")
    if ".." in Path(local).parts:
        local = os.path.normpath(local)
    if local.startswith(("/", "~", "../..")):  # further up lie folders that only this machine has
        return public_name(local)
    below = re.sub(r"^(\.\.?/)+", "", local)
    return name if below == plain_name(name) else below  # a model's name keeps its library


def _shown(value: Any) -> Any:  # noqa: ANN401 - nested YAML
    if isinstance(value, dict):
        return {key: _shown(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return shown(value) if isinstance(value, str) else value

"""Model card of a checkpoint: compatibility, origin and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from xcompat.core.fingerprint import Fingerprint
from xcompat.core.markdown import markdown_templates, one_line, templates
from xcompat.core.metric_names import metric_name
from xcompat.hub.endpoint import HubModel, is_hub_name, look_up, plain_name, public_name
from xcompat.hub.metadata import EMBEDS, SEARCHES, Gain, results_of, tag

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model itself.

    Args:
        method: e.g. ``xbt``, or ``encoder`` for a plain encoder.
        citation: the method's citation.
        fingerprint: the model's fingerprint. None for a map over embeddings of an unknown model.
        dim: dimension of its own embeddings.
        compatible_with: searchable versions: ``name``, ``fingerprint``, ``dim``, and ``revision`` if known.
        base: its base encoder: ``name``, ``revision``, ``fingerprint``. None for none.
        holds: ``all`` weights, only the ``adapters``, or only the ``map``.
        embeds_texts: whether it embeds texts.
        embeds_images: whether it embeds images.
        maps_galleries: whether it maps stored embeddings rather than queries.
        remembers: number of memory entries, i.e. training embeddings or their means. 0 with only a learned
            transform, None for no memory.
        library: library of a plain encoder other than transformers.
        side_info: the model of side-information for the old embeddings, if needed.
        embeds: digests of its own and its galleries' embeddings. For a map, digests of its inputs.
        started_from: its initial map by ``name`` and ``revision``. None for none.
    """

    method: str
    citation: str
    fingerprint: Fingerprint | None
    dim: int
    compatible_with: list[dict[str, Any]] = field(default_factory=list)
    base: dict[str, Any] | None = None
    holds: str = "all"
    embeds_texts: bool = False
    embeds_images: bool = True
    maps_galleries: bool = False
    remembers: int | None = None
    library: str = ""
    side_info: dict[str, Any] | None = None
    embeds: list[str] = field(default_factory=list)
    started_from: dict[str, Any] | None = None

    @property
    def base_on_hub(self) -> str | None:
        """The base's name, if it has the form of a Hub name."""
        name = self.base["name"] if self.base is not None else ""
        return plain_name(name) if name != "from scratch" and is_hub_name(name) else None

    def look_up_base(self, token: str | bool | None = None) -> HubModel | None:
        """Return the Hub's facts about the base, or None if it is not on the Hub."""
        if self.base is None or self.base_on_hub is None:
            return None
        return look_up(self.base_on_hub, self.base.get("revision"), token)


@dataclass(frozen=True)
class RunFacts:
    """Facts about the training run.

    Args:
        results: the report in Markdown. Empty for none.
        gains: the gains over old queries, for metadata, and for readers if there is no report.
        measured_on: evaluation data.
        warning: a sentence above the results.
        data: role -> names of training and test data.
        datasets: names of the data sets on the Hub among them.
        recipe: the resolved recipe as YAML.
        seconds: training time.
        machine: training machine.
        versions: library -> version.
    """

    results: str = ""
    gains: list[Gain] = field(default_factory=list)
    measured_on: str = ""
    warning: str = ""
    data: dict[str, list[str]] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    recipe: str = ""
    seconds: float | None = None
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def model_card(
    repo: str,
    model: ModelFacts,
    base: HubModel | None,
    run: RunFacts | None = None,
    license: str | None = None,  # noqa: A002 - the Hub's word
    tags: Sequence[str] = (),
) -> ModelCard:
    """Write the card of a model.

    Args:
        repo: the model's name on the Hub.
        model: facts about the model.
        base: the Hub's facts about its base. None if it is not on the Hub.
        run: facts about its training run, if known.
        license: the Hub's identifier of the license. None to state none.
        tags: further tags.

    Returns:
        The card, with front matter for the Hub's search.
    """
    run = run or RunFacts()
    name = model.base_on_hub
    reads = "feature-extraction" if model.embeds_texts else "image-feature-extraction"
    versions = [_version(described) for described in model.compatible_with]
    data = ModelCardData(
        library_name="xcompat",
        pipeline_tag=reads,
        tags=_tags(model, tags),
        license=license,
        base_model=name,
        base_model_relation=("adapter" if model.holds == "adapters" else "finetune") if name is not None else None,
        datasets=run.datasets or None,
        model_name=repo if run.gains else None,
        eval_results=_results(run, reads),
        method=model.method,
        fingerprint=model.fingerprint.digest if model.fingerprint is not None else None,
        embeds=model.embeds or None,
        compatible_with=versions or None,
    )
    shown = {
        "repo": repo,
        "model": model,
        "versions": versions,
        "base": public_name(model.base["name"]) if model.base is not None else None,
        "started_from": public_name(model.started_from["name"]) if model.started_from is not None else None,
    }
    return ModelCard(
        markdown_templates(_HERE)
        .get_template("card.md.j2")
        .render(
            **shown,
            front_matter=data.to_yaml(),
            usage=_usage(shown),
            metric_name=metric_name,
            base_license=base.license if base is not None else None,
            license=license,
            run=run,
        )
    )


def _tags(model: ModelFacts, tags: Sequence[str]) -> list[str]:
    kinds = ["xcompat", model.method, *(["backward-compatible"] if model.compatible_with else [])]
    searches = [tag(SEARCHES, version["fingerprint"]) for version in model.compatible_with]
    return list(dict.fromkeys([*kinds, *tags, *searches, *(tag(EMBEDS, each) for each in model.embeds)]))


def _results(run: RunFacts, task: str) -> list[EvalResult] | None:
    data = run.measured_on if run.measured_on in run.datasets else "unknown"
    return results_of(run.gains, task, data, run.measured_on or "not named") or None


def _version(described: dict[str, Any]) -> dict[str, Any]:
    known = {key: described[key] for key in ("name", "fingerprint", "dim", "revision") if described.get(key) is not None}
    return known | {"name": public_name(described["name"])}


def _usage(shown: dict[str, object]) -> str:
    """Write the code to load and use the model. Names cannot break out of its strings and comments."""
    environment = templates(
        _HERE,
        keep_trailing_newline=False,
        autoescape=False,  # Python
        finalize=lambda value: one_line(value) if isinstance(value, str) else value,
    )
    return environment.get_template("usage.py.j2").render(shown)

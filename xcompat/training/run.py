"""Run a recipe stage by stage; finished stages are reused, interrupted ones continue."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from xcompat.core.distributed import barrier, device, from_main_process, is_main_process, process_state
from xcompat.core.errors import XcompatError, require_no_problems
from xcompat.core.files import atomic_path, clear_leftovers, write_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.precision import default_autocast
from xcompat.core.progress import console, literal, notice, silence_libraries
from xcompat.core.progress import stage as stage_line
from xcompat.core.provenance import provenance
from xcompat.encoders import EncoderSource
from xcompat.evaluation import EvaluatedModel, EvaluatedModels
from xcompat.evaluation.cases import OLD_WITH_MEMORY
from xcompat.mapping.candidates import Paired
from xcompat.mapping.score_scales import scale_scores
from xcompat.models import CompatModel
from xcompat.models.embedder import load_embedder
from xcompat.report import load_report, print_report, report_file, write_report
from xcompat.report.content import Cost, LossPoint
from xcompat.training.auto_map import choose_map, read_verdict
from xcompat.training.chains import hops_before, mapped_along
from xcompat.training.cost import cost_of, seconds_before
from xcompat.training.evaluation_models import EvaluationSet, display_name
from xcompat.training.evaluation_sets import load_test_set
from xcompat.training.headers import add_layout_to_errors
from xcompat.training.input_checks import check_paths, judged_files
from xcompat.training.learned_items import add_learned_items
from xcompat.training.memory import memory_of_one, pairs_to_remember, remember
from xcompat.training.model_evaluation import apply_memory, embed_new, make_report, side_info_of, use_chosen_reranking
from xcompat.training.output_checks import lock_run, require_places
from xcompat.training.recipe import Recipe
from xcompat.training.record import (
    CHOICE,
    DONE,
    ENVIRONMENT,
    EVALUATED,
    RECIPE,
    Done,
    EvaluationRecord,
    differences,
    dump_settings,
    logged_losses,
    read_record,
    read_started_settings,
    test_settings,
    write_recipe,
)
from xcompat.training.score_scales import FOLDER as SCALED
from xcompat.training.score_scales import pairs_to_scale, solver_of
from xcompat.training.sections import EvaluationSettings
from xcompat.training.sequence import AGAINST, write_sequence
from xcompat.training.stage import Stage, weights_digest
from xcompat.training.stage_recipe import AUTO_MAP, ROLES, STAGE_PREFIX, StageRecipe
from xcompat.training.test_data import check_test_sets
from xcompat.training.train_stage import check_inputs, fill_caches, train_stage
from xcompat.training.unused_settings import describe_unused_sections

_BELOW_OLD = (
    "no map is surely at or above old queries on held-out items. Compare it with old queries on your own data, or accept it with "
    "allow_worse: true in the recipe."
)


def run_recipe(recipe: Recipe) -> dict[str, Path]:
    """Run every unfinished stage of a recipe.

    Args:
        recipe: the validated recipe.

    Returns:
        Stage name -> folder of its report.

    Raises:
        XcompatError: a folder belongs to another recipe or launch, data are missing, or training diverged.
    """
    process_state()
    silence_libraries()
    reports = {}
    runs = [StageRun(recipe, settings) for settings in recipe.stages]
    _require_own_folders(recipe, runs)
    unfinished = [run for run in runs if not run.is_finished]
    require_no_problems(problem for run in unfinished for problem in run.settings.missing_inputs())
    with add_layout_to_errors(recipe.layout):
        for run in unfinished:
            check_paths(run.settings, run.is_done)
    for run in runs:
        run.settings.require_old_queries()
    with add_layout_to_errors(recipe.layout):
        check_test_sets([run.settings for run in unfinished])
    for run in runs:
        if not run.is_done:
            check_inputs(run, run.checkpoints)
    if is_main_process():
        for line in describe_unused_sections([run.settings for run in runs if not run.is_done]):
            notice(line)
    barrier()  # or the others would mistake files of the first process for the user's
    writes = from_main_process(lambda: bool(unfinished))  # finished runs are shown from read-only storage too
    with lock_run(recipe.output_dir) if writes else nullcontext():
        _require_own_folders(recipe, runs)  # again, now under the lock
        for run in runs:
            with stage_line(f"{recipe.name}: {run.settings.name}", result=run.folder), default_autocast(run.autocast):
                run.train_unless_done()
                if run.settings.is_judged:
                    reports[run.settings.name] = run.evaluate_unless_done()
        if is_main_process():
            write_sequence(recipe.output_dir, reports, console)
    return reports


def stages_below_old(recipe: Recipe) -> list[str]:
    """Print and return stages with a map not surely at or above old queries, unless allowed."""
    runs = [StageRun(recipe, settings) for settings in recipe.stages if not settings.allow_worse]
    names = [run.settings.name for run in runs if run.verdict is False]
    for name in names:
        console.print(f"{literal(name)}: {_BELOW_OLD}")
    return names


def _require_own_folders(recipe: Recipe, runs: Sequence[StageRun]) -> None:
    for run in runs:
        run.require_own_folder()
    require_places(recipe)


def embed_recipe(recipe: Recipe) -> None:
    """Fill the embedding caches of stages whose models exist."""
    process_state()
    silence_libraries()
    require_no_problems(problem for settings in recipe.stages for problem in settings.missing_inputs())
    with add_layout_to_errors(recipe.layout):
        for settings in recipe.stages:
            check_paths(settings)
        check_test_sets(recipe.stages)
    for run in (StageRun(recipe, settings) for settings in recipe.stages):
        with stage_line(f"{recipe.name}: embeddings for {run.settings.name}"), default_autocast(run.autocast):
            run.fill_caches()


class StageRun(Stage):
    """A stage's training and evaluation.

    Args:
        recipe: the recipe.
        settings: stage settings.
    """

    # ------------------------------------------------------------------------------------------------ training

    @property
    def is_done(self) -> bool:
        """Whether the stage is trained."""
        return (self.folder / DONE).exists()

    @property
    def is_finished(self) -> bool:
        """Whether stage, inputs and report are up to date."""
        made = [*self._reported_stages, *self.settings.source_stages()]
        trained = all((self.recipe.stage_dir(name) / DONE).exists() for name in made)
        return trained and (not self.settings.is_judged or self._is_evaluated(self._report_inputs()))

    def train_unless_done(self) -> None:
        """Train and save the model, or verify a finished model."""
        self._begin_folder()
        if self.is_done:
            self._require_same()
            console.print(f"  [dim]{literal(self.settings.name)} is done, reused from {literal(self.folder)}[/]", soft_wrap=True)
            return
        before = seconds_before(self.checkpoints) if is_main_process() else 0.0
        started = time.perf_counter()
        model = self._make_model()
        if is_main_process():
            assert model is not None
            with atomic_path(self.model_folder) as temporary:
                model.export(temporary)
            seconds = round(before + time.perf_counter() - started, 3)
            done = Done(seconds=seconds, model=weights_digest(self.model_folder), inputs=self.inputs())
            write_json(self.folder / DONE, done.model_dump())
        barrier()
        del model
        gc.collect()

    def _make_model(self) -> CompatModel | None:
        """Train, solve or choose the model; chosen models are None on all but the first process."""
        settings = self.settings
        if settings.method == AUTO_MAP:
            return choose_map(self, self.folder)
        model = train_stage(self, self.checkpoints)
        pairs: Paired | None
        if settings.memory is not None:
            pairs = pairs_to_remember(self, model.eval())
            if is_main_process():
                remember(model, pairs, settings, self.seed, self.folder)
        else:
            pairs = pairs_to_scale(self, model.eval(), self.folder / SCALED)
        if pairs is not None and is_main_process():
            scale_scores(model, pairs, solver_of(model))
            shutil.rmtree(self.folder / SCALED, ignore_errors=True)
        return model

    def require_own_folder(self) -> None:
        """Refuse a folder of another recipe."""
        if not (self.folder / RECIPE).exists():
            return
        wanted = dump_settings(self.settings, self.recipe.seed)
        if different := differences(wanted, read_started_settings(self.folder), self.settings.learns_from_texts):
            raise XcompatError(
                f"{self.folder} was made by a recipe with another {', '.join(different)}; "
                "choose another output_dir, or delete the folder to start again"
            )

    def _begin_folder(self) -> None:
        if is_main_process():
            for folder in {self.folder, self.report}:
                clear_leftovers(folder)
            if not (self.folder / RECIPE).exists():
                write_recipe(self.folder, dump_settings(self.settings, self.recipe.seed))
                write_json(self.folder / ENVIRONMENT, provenance())
        barrier()

    def _require_same(self) -> None:
        """Refuse a model whose inputs or weights have changed."""
        done = read_record(self.folder / DONE, Done)
        changed = [name for name, digest in self.inputs().items() if done.inputs.get(name) != digest]
        if changed:
            raise XcompatError(
                f"{self.folder} was made from a {' and a '.join(changed)} that has since been trained again; "
                f"delete {self.folder} to make it again"
            )
        if weights_digest(self.model_folder) != done.model:
            raise XcompatError(
                f"the weights in {self.model_folder} have changed since training; restore them, or delete "
                f"{self.folder} to train again"
            )

    def fill_caches(self) -> None:
        """Embed training and test data with all trained models."""
        test = load_test_set(self.settings.data) if self.settings.is_judged else None
        for role in ROLES:
            source = getattr(self.settings, role)
            if not isinstance(source, EncoderSource):
                continue
            if source.name.startswith(STAGE_PREFIX) and not Path(self.recipe.resolve(source.name)).exists():
                console.print(f"  [dim]{literal(source.name)} is not trained yet; its embeddings follow after training[/]")
                continue
            if self.settings.learns_from_pairs and (role == "old" or (role == "new" and self.method.embeds_in_memory)):
                self.remembered_caches(self.embedder(role))
            if not (self.settings.learns_from_pairs and self.settings.method == AUTO_MAP):
                fill_caches(self, role)
            if test is not None:
                frozen = self.frozen(role)
                test.embed(frozen, self.recipe.cache_dir)
                if role == "new":
                    new = frozen.require_model("contains embeddings, not a model")
                    test.embed(self.as_input(new), self.recipe.cache_dir)

    # ---------------------------------------------------------------------------------------------- evaluation

    def evaluate_unless_done(self) -> Path:
        """Write the report unless up to date; all processes rank, the first writes."""
        wanted = self._report_inputs()
        done = self._is_evaluated(wanted)
        barrier()
        if not done:
            test = load_test_set(self.settings.data)
            assert test is not None
            model = self.load_trained(self.settings.name)
            contestants = self._contestants(model, test)
            about = {"seconds": self._seconds(), "training": self._losses(), "costs": self._costs(), "verdict": self.verdict}
            self._write_report(contestants, test, self.report, about, model)
            for version, earlier in self._earlier_galleries(model, test):
                cache_dir, old_on_new = self.recipe.cache_dir, self._evaluation.old_on_new
                against = embed_new(model, earlier, contestants.independent, test, cache_dir, old_on_new)
                name = f"{display_name(version.name).replace('/', '-')}-{version.digest[:6]}"
                self._write_report(against, test, self.report / f"{AGAINST}{name}", {"seconds": {}}, model)
            for against in self._mapped_again(model, contestants, test):
                name = f"{against.old.name.replace('/', '-')}-{against.old.fingerprint.digest[:6]}"
                self._write_report(against, test, self.report / f"{AGAINST}{name}", {"seconds": {}}, model)
            if is_main_process():
                # the test data may have changed
                write_recipe(self.folder, dump_settings(self.settings, self.recipe.seed))
                write_json(self.report / EVALUATED, wanted.model_dump())
        barrier()
        if not console.quiet:
            print_report(load_report(self.report), console)
        return self.report

    @property
    def _evaluation(self) -> EvaluationSettings:
        assert self.settings.evaluation is not None
        return self.settings.evaluation

    @property
    def verdict(self) -> bool | None:
        """Whether the chosen map is surely at or above old queries; None if none was chosen."""
        return read_verdict(self.folder) if self.settings.method == AUTO_MAP else None

    def _report_inputs(self) -> EvaluationRecord:
        """Return the inputs of an up-to-date report."""
        return EvaluationRecord(
            settings=self._evaluation.model_dump(mode="json"),
            models={name: self.digest_of(name) for name in self._reported_stages} | self.inputs(),
            data=test_settings(dump_settings(self.settings, self.recipe.seed)),
            files=judged_files(self.settings),
        )

    def _is_evaluated(self, wanted: EvaluationRecord) -> bool:
        if not report_file(self.report).is_file():
            return False
        with suppress(XcompatError):  # an unreadable record counts as none
            made = read_record(self.report / EVALUATED, EvaluationRecord)
            return made.model_copy(update={"data": made.data or test_settings(read_started_settings(self.folder))}).is_up_to_date(
                wanted
            )
        return False

    def _write_report(
        self, contestants: EvaluatedModels, test: EvaluationSet, folder: Path, about: dict[str, object], model: CompatModel
    ) -> None:
        content = make_report(
            contestants,
            test,
            use_chosen_reranking(self._evaluation, model),
            self.settings.method,
            self.recipe.seed,
            shared=True,
            new=model,
            run=provenance(),
            **about,
        )
        if is_main_process():
            write_report(folder, content)

    def _contestants(self, model: CompatModel, test: EvaluationSet) -> EvaluatedModels:
        evaluation, cache_dir = self._evaluation, self.recipe.cache_dir
        old, plain = test.embed(self.frozen("old"), cache_dir), self.independent()
        independent = test.embed(plain, cache_dir) if plain is not None else None
        old, independent = add_learned_items(old, independent, self)
        contestants = embed_new(model, old, independent, test, cache_dir, evaluation.old_on_new)
        if evaluation.fallback is not None and contestants.confidence is None:
            raise XcompatError(
                f"{self.settings.name}: its queries have no confidence (see {CHOICE}); set evaluation.fallback to null"
            )
        others = {name: self.load_trained(name) for name in evaluation.compare_with}
        extra = {name: embed_new(other, old, independent, test, cache_dir).new_view for name, other in others.items()}
        memory, ceiling = memory_of_one(self.folder), None
        if memory is not None and model.maps_galleries:
            assert contestants.new is not None
            ceiling = apply_memory(contestants.new, memory)
        elif memory is not None:
            extra[OLD_WITH_MEMORY] = apply_memory(old, memory)
        return replace(contestants, extra={**contestants.extra, **extra}, ceiling=ceiling)

    def _earlier_galleries(self, model: CompatModel, test: EvaluationSet) -> Iterator[tuple[Fingerprint, EvaluatedModel]]:
        """Embed the test set with versions before the old model, whose galleries may still be in use."""
        for version in model.compatible_with[1:]:
            earlier = load_embedder(version.name, device())
            version.require(earlier.fingerprint, f"the model at {version.name}")
            yield version, test.embed(earlier, self.recipe.cache_dir)

    @property
    def _reported_stages(self) -> list[str]:
        """Stages in the report."""
        compared = self.settings.evaluation.compare_with if self.settings.evaluation is not None else []
        return [self.settings.name, *compared, *(hop.name for hop in self._hops)]

    @property
    def _hops(self) -> list[StageRecipe]:
        return hops_before(self.settings, self.recipe.stages)

    def _mapped_again(self, model: CompatModel, judged: EvaluatedModels, test: EvaluationSet) -> Iterator[EvaluatedModels]:
        """Map the galleries of earlier maps to this new model, hop by hop."""
        maps = [model]
        for hop in self._hops:
            maps.insert(0, first := self.load_trained(hop.name))
            old = test.embed(Stage(self.recipe, hop).frozen("old"), self.recipe.cache_dir)
            side_info = side_info_of(first, test, self.recipe.cache_dir)
            upgraded = mapped_along(maps, old, side_info)
            bare: dict[str, Any] = {"extra": {}, "forgetful": None, "ceiling": None, "side_info": side_info}
            yield replace(judged, old=old, upgraded=upgraded, **bare)

    def _seconds(self) -> dict[str, float]:
        finished = ((stage.name, self.recipe.stage_dir(stage.name) / DONE) for stage in self.recipe.stages)
        return {name: read_record(path, Done).seconds for name, path in finished if path.exists()}

    def _costs(self) -> dict[str, Cost]:
        costs = {stage.name: cost_of(self.recipe.stage_dir(stage.name)) for stage in self.recipe.stages}
        return {name: cost for name, cost in costs.items() if cost is not None}

    def _losses(self) -> dict[str, list[LossPoint]]:
        """Return training losses of the stage and its φ."""
        projection = self.settings.projection or ""
        names = [projection.removeprefix(STAGE_PREFIX)] if projection.startswith(STAGE_PREFIX) else []
        found = {name: logged_losses(self.recipe.stage_dir(name)) for name in (*names, self.settings.name)}
        return {name: points for name, points in found.items() if points}

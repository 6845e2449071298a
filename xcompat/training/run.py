"""Run a recipe: stage by stage, each reused when done and continued when killed."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from xcompat.data import flatten_captions, load_pairs, load_texts
from xcompat.data.corpora import normalise
from xcompat.data.notices import notice
from xcompat.distributed import barrier, is_main_process, process_state
from xcompat.embedding import EmbeddingCache
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.errors import XcompatError
from xcompat.evaluation import EmbeddedPairs
from xcompat.files import atomic_path, read_json, write_json
from xcompat.fingerprint import Fingerprint
from xcompat.models import METHODS, CompatModel, ProjectionModel
from xcompat.models.closed_form import ClosedFormModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.projected import ProjectedModel
from xcompat.progress import console, silence_libraries, stage
from xcompat.report import load_report, print_report, write_report
from xcompat.training.caches import cached_captions, cached_images, cached_texts
from xcompat.training.evaluate import Contestants, TestSet, display_name, embed_new, embed_test_set, load_test_set, make_report
from xcompat.training.provenance import provenance
from xcompat.training.recipe import STAGE_PREFIX, Recipe, StageRecipe
from xcompat.training.trainer import embedding_data, pair_data, train

if TYPE_CHECKING:
    import datasets
    import torch
    from torch import Tensor


def run_recipe(recipe: Recipe) -> dict[str, Path]:
    """Do every stage of a recipe that is not done yet.

    Args:
        recipe: validated.

    Returns:
        The folder of each stage's report, for stages that are evaluated.

    Raises:
        XcompatError: a stage's folder was made by a different recipe, data are missing, or training diverged.
    """
    process_state()
    silence_libraries()
    reports = {}
    for part in recipe.stages:
        with stage(f"{recipe.name}: {part.name}"):
            StageRun(recipe, part).train_unless_done()
            if part.evaluation is not None and part.data.test is not None and METHODS[part.method].compares_with_old:
                reports[part.name] = StageRun(recipe, part).evaluate_unless_done()
    return reports


def embed_recipe(recipe: Recipe) -> None:
    """Fill the embedding caches that the stages will read, as far as their models exist already.

    Args:
        recipe: validated.
    """
    process_state()
    silence_libraries()
    for part in recipe.stages:
        with stage(f"{recipe.name}: embeddings for {part.name}"):
            StageRun(recipe, part).fill_caches()


class StageRun:
    """One stage: its folder, what it needs from earlier ones, its training and its evaluation.

    Args:
        recipe: the whole recipe.
        part: the stage.
    """

    def __init__(self, recipe: Recipe, part: StageRecipe) -> None:
        self.recipe = recipe
        self.part = part
        self.folder = recipe.stage_dir(part.name)
        self.model_dir = self.folder / "model"
        # what a recipe is run for is its last stage: that report stands at the top
        self.report_dir = recipe.output_dir if part is recipe.stages[-1] else self.folder
        self.method = METHODS[part.method]

    # ------------------------------------------------------------------------------------------------ training

    def train_unless_done(self) -> None:
        """Train and save, or say that it is done."""
        self._check_folder()
        done = self.folder / "done.json"
        if done.exists():
            self._require_same_inputs(read_json(done))
            console.print(f"  [dim]{self.part.name} is done, reused from {self.folder}[/]")
            return
        started = time.perf_counter()
        model = self._closed_form() if issubclass(self.method, ClosedFormModel) else self._trained()
        if is_main_process():
            with atomic_path(self.model_dir) as temporary:
                model.export(temporary)
            seconds = round(time.perf_counter() - started, 3)
            write_json(done, {"seconds": seconds, "model": weights_digest(self.model_dir), "inputs": self._inputs()})
        barrier()
        del model
        gc.collect()

    def _check_folder(self) -> None:
        """Record the resolved stage, or refuse a folder that another recipe began."""
        resolved = self.part.model_dump(mode="json", exclude={"evaluation"}) | {"seed": self.recipe.seed}
        record = self.folder / "recipe.yaml"
        if record.exists():
            begun = yaml.safe_load(record.read_text(encoding="utf-8"))
            different = sorted(key for key in {*resolved, *begun} - {"evaluation"} if resolved.get(key) != begun.get(key))
            if different:
                raise XcompatError(
                    f"{self.folder} was made by a recipe that differs in {', '.join(different)}; "
                    "choose another output_dir, or delete the folder to start again"
                )
        elif is_main_process():
            with atomic_path(record) as temporary:
                temporary.write_text(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), encoding="utf-8")
            write_json(self.folder / "environment.json", provenance())
        barrier()

    def _inputs(self) -> dict[str, str]:
        """Return the digest of every earlier stage's model that this one is made from."""
        part = self.part
        named = [part.projection or "", *(source.name for source in (part.old, part.new) if isinstance(source, EncoderSource))]
        stages = sorted({name.removeprefix(STAGE_PREFIX) for name in named if name.startswith(STAGE_PREFIX)})
        return {name: self._made(name) for name in stages}

    def _made(self, name: str) -> str:
        digest: str = read_json(self.recipe.stage_dir(name) / "done.json")["model"]
        return digest

    def _require_same_inputs(self, done: dict[str, Any]) -> None:
        changed = [name for name, digest in self._inputs().items() if done["inputs"].get(name) != digest]
        if changed:
            raise XcompatError(
                f"{self.folder} was made from a {' and a '.join(changed)} that has been trained anew since; "
                f"delete {self.folder} to make it again"
            )

    def _trained(self) -> CompatModel:
        part, data = self.part, self.part.data
        if "pixel_values" in self.method.columns:
            if data.pairs is None:
                raise XcompatError(
                    f"{part.name}: method {part.method} learns from images with captions; name them under data.pairs"
                )
            old_caches = self._pair_caches(self._embedder("old")) if "old_embeds" in self.method.columns else None
            model = self._model_for_pairs()
            pairs = load_pairs(data.pairs)
            if not data.pairs.streaming:
                self._warn_of_overlap(pairs)
            dataset = pair_data(data, pairs, model.processor, self.recipe.seed, old_caches)
        else:
            model, new_cache, old_cache = self._map_and_caches()
            dataset = embedding_data(new_cache, old_cache)
        return train(model, dataset, part, self.recipe.seed, self.folder / "checkpoints")

    def _closed_form(self) -> CompatModel:
        model, new_cache, old_cache = self._map_and_caches()
        assert isinstance(model, ClosedFormModel)
        return model.fit(_readable_pairs(new_cache, old_cache))

    def _map_and_caches(self) -> tuple[CompatModel, EmbeddingCache, EmbeddingCache]:
        """Build a map and what it learns from; the encoders are gone when this returns."""
        new, old = self._embedder("new"), self._embedder("old")
        described = encoder_description(new)
        config = self.method.config_class(encoder=described, old=old.describe_old(), embedding_dim=new.dim, **self.part.options)
        seed_everything(self.recipe.seed)
        return self.method(config), self._cache(new), self._cache(old)

    def _model_for_pairs(self) -> CompatModel:
        part = self.part
        if part.new is None:
            raise XcompatError(f"{part.name}: method {part.method} needs a new encoder; name it under new")
        loaded = self._new_encoder(part.new)
        start = self._projection() if self.method.starts_from_projection else None
        if start is not None:
            wanted = Fingerprint(start.config.encoder["fingerprint"], start.config.encoder["name"])
            wanted.require(loaded[0].fingerprint(loaded[1]), f"the new encoder {loaded[0].name}")
        old = start.config.old if start is not None else self._described_old()
        seed_everything(self.recipe.seed)
        model = self.method.from_encoder(loaded, old=old, **part.options)
        if start is not None:
            assert isinstance(model, ProjectedModel)
            model.projection.load_state_dict(start.projection.state_dict())
        return model

    def _projection(self) -> ProjectionModel:
        part = self.part
        if part.projection is None:
            raise XcompatError(
                f"{part.name}: method {part.method} starts from a pretrained φ; name its folder (or stage:NAME) under projection"
            )
        return ProjectionModel.from_pretrained(self.recipe.resolve(part.projection))

    def _new_encoder(self, source: EncoderSource | ScratchSource) -> tuple[Any, Any]:
        if isinstance(source, EncoderSource):
            return load_encoder(self._resolved(source))
        assert self.part.data.pairs is not None
        texts = load_texts([self.part.data.pairs, *self.part.data.texts], exclude=self._test_captions())
        return encoder_from_scratch(source, texts["text"], self.recipe.seed)

    def _resolved(self, source: EncoderSource) -> EncoderSource:
        return source.model_copy(update={"name": self.recipe.resolve(source.name)})

    def _embedder(self, role: str) -> Embedder:
        source = getattr(self.part, role)
        if not isinstance(source, EncoderSource):
            raise XcompatError(f"{self.part.name}: method {self.part.method} needs a trained {role} model; name it under {role}")
        return load_embedder(self._resolved(source), device())

    def _described_old(self) -> dict[str, Any] | None:
        if self.part.old is None:
            return None
        described = self._embedder("old").describe_old()
        gc.collect()
        return described

    def _pair_caches(self, old: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
        assert self.part.data.pairs is not None
        pairs = load_pairs(self.part.data.pairs)
        captions, _ = flatten_captions(pairs)
        images = cached_images(old, pairs, self.recipe.cache_dir, self.part.data.pairs.max_bad_share)
        return images, cached_captions(old, captions, self.recipe.cache_dir)

    def fill_caches(self) -> None:
        """Embed what the stage's training and evaluation will read; models of stages not yet trained are left for later."""
        for role in ("old", "new"):
            source = getattr(self.part, role)
            if not isinstance(source, EncoderSource):
                continue
            if source.name.startswith(STAGE_PREFIX) and not Path(self.recipe.resolve(source.name)).exists():
                console.print(f"  [dim]{source.name} is not trained yet; its embeddings follow when it is[/]")
                continue
            embedder = self._embedder(role)
            if "new_embeds" in self.method.columns:
                self._cache(embedder)
            elif "old_embeds" in self.method.columns and role == "old":
                self._pair_caches(embedder)
            if self.part.data.test is not None:
                embed_test_set(embedder, load_test_set(self.part.data.test, self.part.data.zero_shot), self.recipe.cache_dir)

    def _cache(self, embedder: Embedder) -> EmbeddingCache:
        """Embed what a map over cached embeddings learns from."""
        data, cache_dir = self.part.data, self.recipe.cache_dir
        if data.embeddings_of == "texts":
            texts = load_texts(data.texts, exclude=self._test_captions(), limit=data.texts_limit)
            return cached_texts(embedder, texts, cache_dir)
        if data.pairs is None:
            raise XcompatError(f"{self.part.name}: data.embeddings_of is images, but data.pairs names none")
        return cached_images(embedder, load_pairs(data.pairs), cache_dir, data.pairs.max_bad_share)

    def _test_captions(self) -> list[str]:
        """Return the captions that no corpus may hold."""
        return load_test_set(self.part.data.test).texts if self.part.data.test is not None else []

    def _warn_of_overlap(self, pairs: datasets.Dataset) -> None:
        """Say when captions of the test set are trained on: texts leave them out, pairs are the user's own choice."""
        test = {normalise(text) for text in self._test_captions()}
        shared = test & {normalise(text) for text in flatten_captions(pairs)[0]} if test else set()
        if shared:
            notice(f"{len(shared)} of {len(test)} captions of data.test are in data.pairs too: the result will flatter the model")

    # ---------------------------------------------------------------------------------------------- evaluation

    def evaluate_unless_done(self) -> Path:
        """Write the stage's report unless it is there; return its folder.

        All processes embed; the first one judges and writes.
        """
        settings, data = self.part.evaluation, self.part.data
        assert settings is not None and data.test is not None
        judged = {name: self._made(name) for name in (self.part.name, *settings.compare_with)} | self._inputs()
        wanted = {"settings": settings.model_dump(mode="json"), "models": judged}
        marker = self.report_dir / "evaluated.json"
        done = marker.exists() and read_json(marker) == wanted
        barrier()
        if not done:
            test = load_test_set(data.test, data.zero_shot)
            contestants = self._contestants(test, self._embedder("old"))
            self._write_report(contestants, test, self.report_dir, self._seconds())
            for version, earlier in self._earlier_galleries(test):
                against = replace(contestants, old=earlier, extra=None)
                name = f"{display_name(version.name).replace('/', '-')}-{version.digest[:6]}"
                self._write_report(against, test, self.report_dir / f"against-{name}", {})
            if is_main_process():
                write_json(marker, wanted)
        barrier()
        if is_main_process():
            print_report(load_report(self.report_dir), console)
        return self.report_dir

    def _write_report(self, contestants: Contestants, test: TestSet, folder: Path, seconds: dict[str, float]) -> None:
        if is_main_process():
            assert self.part.evaluation is not None
            seed, method = self.recipe.seed, self.part.method
            write_report(
                folder, make_report(contestants, test, self.part.evaluation, method, seed, seconds=seconds, run=provenance())
            )

    def _contestants(self, test: TestSet, old: Embedder) -> Contestants:
        settings, cache_dir = self.part.evaluation, self.recipe.cache_dir
        assert settings is not None
        independent = embed_test_set(self._embedder("new"), test, cache_dir)
        model = self._load_model(self.part.name)
        new_view, new = embed_new(model, old.fingerprint, independent, test, cache_dir)
        others = {name: self._load_model(name) for name in settings.compare_with}
        extra = {name: embed_new(other, old.fingerprint, independent, test, cache_dir)[0] for name, other in others.items()}
        return Contestants(embed_test_set(old, test, cache_dir), new_view, new, independent, extra)

    def _load_model(self, name: str) -> CompatModel:
        from transformers import AutoModel

        return AutoModel.from_pretrained(str(self.recipe.stage_dir(name) / "model")).for_inference().to(device())

    def _earlier_galleries(self, test: TestSet) -> Iterator[tuple[Fingerprint, EmbeddedPairs]]:
        """Embed the test set with every version before the old one, whose galleries a chain of upgrades still serves."""
        for version in self._load_model(self.part.name).compatible_with[1:]:
            earlier = load_embedder(version.name, device())
            version.require(earlier.fingerprint, f"the model at {version.name}")
            yield version, embed_test_set(earlier, test, self.recipe.cache_dir)

    def _seconds(self) -> dict[str, float]:
        finished = ((part.name, self.recipe.stage_dir(part.name) / "done.json") for part in self.recipe.stages)
        return {name: read_json(path)["seconds"] for name, path in finished if path.exists()}


def weights_digest(folder: Path) -> str:
    """Hash the weights of a saved model.

    Args:
        folder: with one or more safetensors files.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def _readable_pairs(new: EmbeddingCache, old: EmbeddingCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield paired embeddings without the rows of images that could not be read."""
    for new_BD, old_Bd in zip(new.iterate(), old.iterate(), strict=True):
        kept_B = new_BD[:, 0].isfinite() & old_Bd[:, 0].isfinite()
        yield new_BD[kept_B], old_Bd[kept_B]


def encoder_description(embedder: Embedder) -> dict[str, Any]:
    """Describe a frozen encoder so that a map over its embeddings can load it later."""
    model = embedder.model
    described = model.config.encoder if isinstance(model, CompatModel) else model.description
    return described | {"fingerprint": embedder.fingerprint.digest}


def device() -> torch.device:
    """Return this process's device."""
    return process_state().device


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    from transformers import set_seed

    set_seed(seed)

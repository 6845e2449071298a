"""sentence-transformers model files: folders, checks and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json

MODULES = "modules.json"
MODEL_CONFIG = "config_sentence_transformers.json"
SETTINGS = "sentence_bert_config.json"
SENTENCE_TRANSFORMERS = "sentence-transformers"
"""Library name, and the default owner of its models on the Hub."""
PREFIX = f"{SENTENCE_TRANSFORMERS}:"
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_BESIDE = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_ELSEWHERE = ["onnx/*", "openvino/*", "*/onnx/*", "*/openvino/*"]
_OWN = "sentence_transformers."
_PASSAGES = ("document", "passage", "corpus")


def is_text_model(name: str) -> bool:
    """Return whether a name is a text model: by its prefix, or as a folder with modules that do not read images."""
    if name.startswith(PREFIX):
        return True
    settings = Path(name) / SETTINGS
    read = read_json(settings) if settings.exists() else {}
    return (Path(name) / MODULES).exists() and "image" not in (read.get("modality_config") or {})


def text_folder(name: str, revision: str | None, weights: bool = True, code: bool = False) -> Path:
    """Return a text model's folder, after downloading a Hub model (safetensors only).

    Args:
        name: folder, or Hub name without prefix.
        revision: branch, tag or commit; None to use the default branch.
        weights: whether to download weights.
        code: whether to download Python files.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    wanted = [*_BESIDE, *(WEIGHTS if weights else []), *(["*.py"] if code else [])]
    name = name if "/" in name else f"{SENTENCE_TRANSFORMERS}/{name}"
    return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_ELSEWHERE))


def first_module(folder: Path) -> str:
    """Return the first module's path, with the tokenizer; empty in checkpoints."""
    return _modules(folder)[0]["path"] if (folder / MODULES).exists() else ""


def module_folders(folder: Path) -> list[Path]:
    """Return the modules' folders; empty if it is not a sentence-transformers model."""
    return [folder / each["path"] for each in _modules(folder) if each["path"]] if (folder / MODULES).exists() else []


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = read_json(folder / MODULES)
    if not isinstance(modules, list) or not modules or not all(map(_is_module, modules)):
        raise XcompatError(f"{folder / MODULES} lists no modules; download or save the model again")
    return modules


def _is_module(listed: Any) -> bool:  # noqa: ANN401 - any JSON
    return isinstance(listed, dict) and all(isinstance(listed.get(key), str) for key in ("type", "path"))


def require_loadable(folder: Path, name: str, trust_remote_code: bool) -> None:
    """Raise if a model would run its own code, unpickle weights or download another model.

    Args:
        folder: the model folder.
        name: model name for errors.
        trust_remote_code: whether to run the model's code.
    """
    modules = _modules(folder) if (folder / MODULES).exists() else [{"type": _OWN, "path": ""}]
    for module in modules:
        place = folder / module["path"]
        if not trust_remote_code:
            if not module["type"].startswith(_OWN):
                raise untrusted_code_error(name, module["type"])
            if module["type"].endswith(".Dense"):
                activation = read_json(place / "config.json").get("activation_function", "torch.")
                if not activation.startswith("torch."):
                    raise untrusted_code_error(name, activation)
        if (place / "adapter_config.json").exists():
            raise XcompatError(
                f"{name} is a LoRA without its base ({place / 'adapter_config.json'}); merge it into the base with PEFT "
                "(merge_and_unload), save the merged model and use it"
            )
        if any(place.glob("pytorch_model*.bin")) and not any(place.glob("*.safetensors")):
            raise pickled_weights_error(name)


def untrusted_code_error(name: str, code: str) -> XcompatError:
    """Return the error for a model that runs its own code."""
    return XcompatError(
        f"{name} runs its own code ({code}); read that code, and if you trust it, set trust_remote_code: true in a recipe"
    )


def pickled_weights_error(name: str) -> XcompatError:
    """Return the error for a model with pickled weights."""
    return XcompatError(f"{name} has no safetensors: only safetensors are loaded; convert the weights first")


class Prompts(NamedTuple):
    """Prompts before queries and passages."""

    query: str
    passage: str


def own_prompts(folder: Path) -> Prompts:
    """Return a model's prompts. A missing prompt is the model's default prompt, or empty."""
    about = read_json(folder / MODEL_CONFIG) if (folder / MODEL_CONFIG).exists() else {}
    known = {role: prompt for role, prompt in (about.get("prompts") or {}).items() if prompt is not None}
    default = known.get(about.get("default_prompt_name"), "")
    return Prompts(known.get("query", default), next((known[role] for role in _PASSAGES if role in known), default))

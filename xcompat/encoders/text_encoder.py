"""sentence-transformers text encoders (safetensors only)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer import modules as stock
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.tokenization_utils_base import LARGE_INTEGER

from xcompat.core.errors import XcompatError
from xcompat.core.files import write_json
from xcompat.encoders.base import Encoder, architecture_of
from xcompat.encoders.build_limits import check_config_files
from xcompat.encoders.model_files import copy_permissions
from xcompat.encoders.text_files import (
    MODEL_CONFIG,
    MODULES,
    SENTENCE_TRANSFORMERS,
    SETTINGS,
    own_prompts,
    pickled_weights_error,
    require_loadable,
    text_folder,
    untrusted_code_error,
)
from xcompat.encoders.text_processor import TextProcessor, load_text_processor

TOLERANCE = 1e-4
"""Maximum difference from the embeddings of sentence-transformers."""
_READ = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
"""The supported modality configuration of a Transformer module."""
_SETTINGS = {"transformer_task": "feature-extraction", "modality_config": _READ, "module_output_name": "token_embeddings"}
_PROBES = ("a red shoe", "Two DOGS, and more: the longer of the 2 texts!")
Features = dict[str, Any]


class TokenStates(nn.Module):
    """A transformer's token states, without its unused pooler."""

    kind = Transformer

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a PreTrainedModel, whose parts are untyped
        super().__init__()
        if hasattr(model, "pooler"):
            model.pooler = None
        self.model = model

    def forward(self, features: Features) -> Features:
        """Add ``token_embeddings`` (B, L, W) to a batch."""
        states = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return features | {"token_embeddings": states.last_hidden_state}

    def describe(self) -> dict[str, Any]:
        """Return the arguments for :meth:`build`."""
        return {"architecture": type(self.model).__name__, "config": architecture_of(self.model.config.to_dict())}

    @classmethod
    def build(cls, described: dict[str, Any]) -> TokenStates:
        """Build the architecture without loading weights."""
        found = getattr(transformers, described["architecture"], None)
        if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
            raise XcompatError(f"transformers has no {described['architecture']}; load the original model")
        return cls(cast(Any, found)._from_config(AutoConfig.for_model(**described["config"])))

    def save(self, folder: str) -> None:
        """Write the model in the sentence-transformers format, without tokenizer."""
        self.model.save_pretrained(folder)


class TokenMeans(nn.Module):
    """Mean token embedding of a text.

    Args:
        means: sentence-transformers module; its input is all texts' tokens in a row.
    """

    kind = StaticEmbedding

    def __init__(self, means: StaticEmbedding) -> None:
        super().__init__()
        self.means = means

    def forward(self, features: Features) -> Features:
        """Add ``sentence_embedding`` (B, W), with the encoder's width W, to the features of a batch."""
        holds_BL = features["attention_mask"].bool()
        lengths_B = holds_BL.sum(dim=1)
        flat = {"input_ids": features["input_ids"][holds_BL], "offsets": lengths_B.cumsum(dim=0) - lengths_B}
        return features | {"sentence_embedding": self.means(flat)["sentence_embedding"]}

    def describe(self) -> dict[str, Any]:
        """Return the arguments for :meth:`build`."""
        return {"num_embeddings": self.means.num_embeddings, "embedding_dim": self.means.embedding_dim}

    @classmethod
    def build(cls, described: dict[str, Any]) -> TokenMeans:
        """Build the architecture without loading weights."""
        weights = torch.randn(described["num_embeddings"], described["embedding_dim"])
        return cls(StaticEmbedding(Tokenizer(BPE()), embedding_weights=weights))  # the processor has the tokenizer

    def save(self, folder: str) -> None:
        """Write the weights in the sentence-transformers format, without tokenizer."""
        save_file(self.means.state_dict(), Path(folder) / "model.safetensors")


class TextEncoder(Encoder):
    """Text tower from sentence-transformers modules.

    D is the last module's dimension, or ``truncate_dim`` (Matryoshka representations, Kusupati et al. 2022).
    """

    library: ClassVar[str] = SENTENCE_TRANSFORMERS
    has_images: ClassVar[bool] = False

    def _image_features(self, pixel_values: Tensor) -> NoReturn:
        raise XcompatError(f"{self.name} has no image tower; to embed images, choose an image-text model (CLIP, SigLIP)")

    def text_features(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return unnormalised text features (B, D)."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        features: Features = {"input_ids": input_ids, "attention_mask": mask}
        for module in self.model:
            features = module(features)
        return features["sentence_embedding"][:, : self.embedding_dim]

    @property
    def towers(self) -> dict[str, nn.Module]:
        """Return the text tower."""
        return {"text": self.model}

    @property
    def peft_base(self) -> nn.Module:
        """Return the transformer among the modules."""
        return self.model[0].model if isinstance(self.model[0], TokenStates) else self.model

    @property
    def layer_classes(self) -> set[str]:
        """Return the class names that FSDP shards as units."""
        return set(getattr(self.peft_base, "_no_split_modules", None) or ())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the modules. ``SentenceTransformer`` can load the folder after the processor is saved there."""
        folder, listed = Path(folder), []
        for index, module in enumerate(self.model):
            kind = getattr(module, "kind", type(module))
            path = f"{index}_{kind.__name__}" if index else ""
            (folder / path).mkdir(parents=True, exist_ok=True)
            module.save(str(folder / path))
            copy_permissions(folder / path, MODULES if (folder / path / MODULES).exists() else "config.json")
            listed.append({"idx": index, "name": str(index), "path": path, "type": f"{kind.__module__}.{kind.__name__}"})
        write_json(folder / MODULES, listed)
        if isinstance(self.model[0], TokenStates):
            lower = {"do_lower_case": True} if self.description["config"]["lower_case"] else {}
            write_json(folder / SETTINGS, _SETTINGS | lower)
        query, passage = self.description["query_prompt"], self.description["passage_prompt"]
        about = {
            "model_type": SentenceTransformer.model_type,
            "prompts": {"query": query, "document": passage},
            "default_prompt_name": "document" if query and query == passage else None,
            "similarity_fn_name": "cosine",
        }
        dim = self.description["config"]["truncate_dim"]
        write_json(folder / MODEL_CONFIG, about | ({"truncate_dim": dim} if dim is not None else {}))


def build_text_encoder(description: dict[str, Any]) -> TextEncoder:
    """Build a text encoder with random weights from :attr:`Encoder.description`.

    Raises:
        XcompatError: a module is unknown to sentence-transformers.
    """
    first, *rest = description["config"]["modules"]
    begins = {kind.kind.__name__: kind for kind in (TokenStates, TokenMeans)}
    if first["module"] not in begins or any(each["module"] not in stock.__all__ for each in rest):
        raise XcompatError(f"{description['name']} contains modules unknown to sentence-transformers; load the original model")
    modules = [begins[first["module"]].build(first), *(_build(each["module"], each["settings"]) for each in rest)]
    return TextEncoder(nn.Sequential(*modules), description["embedding_dim"], description)


def _build(name: str, settings: dict[str, Any]) -> nn.Module:
    settings = dict(settings)
    if (activation := settings.get("activation_function")) is not None:
        found = getattr(nn, activation.rsplit(".", 1)[-1], None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise XcompatError(f"torch has no activation {activation}; load the original model")
        settings["activation_function"] = found()
    return getattr(stock, name)(**settings)


def load_text_encoder(
    name: str,
    place: str,
    revision: str | None,
    trust_remote_code: bool,
    query_prompt: str | None = None,
    passage_prompt: str | None = None,
    truncate_dim: int | None = None,
) -> TextEncoder:
    """Load a sentence-transformers model in float32, in evaluation mode.

    Args:
        name: the user's name for the model.
        place: folder or Hub name.
        revision: branch, tag or commit; None to use the default branch.
        trust_remote_code: whether to run code from the repository.
        query_prompt: prompt before queries; None to use the default.
        passage_prompt: prompt before passages; None to use the default.
        truncate_dim: dimensions to keep; None to use the default.

    Raises:
        XcompatError: weights or code are unsafe or missing, or embeddings differ from sentence-transformers'.
    """
    folder = text_folder(place, revision, code=trust_remote_code)
    check_config_files(folder)
    require_loadable(folder, name, trust_remote_code)
    whole = _read(folder, name, trust_remote_code)
    prompts = own_prompts(folder)
    given: dict[str, Any] = {
        "query_prompt": prompts.query if query_prompt is None else query_prompt,
        "passage_prompt": prompts.passage if passage_prompt is None else passage_prompt,
    }
    _require_readable(whole, name, [*given.values()])
    first, *rest = whole
    begin = TokenMeans(first) if isinstance(first, StaticEmbedding) else TokenStates(cast(Any, first).model)
    _require_all_weights(begin, name)
    config = {
        "modules": [
            {"module": begin.kind.__name__, **begin.describe()},
            *({"module": type(each).__name__, "settings": cast(Any, each).get_config_dict()} for each in rest),
        ],
        "max_length": _limit(cast(Any, first)),
        "special_tokens": isinstance(begin, TokenStates),
        "lower_case": bool(getattr(first, "do_lower_case", False)),
        "truncate_dim": truncate_dim or whole.truncate_dim,
    }
    description = {"library": TextEncoder.library, "name": name, "revision": revision, "config": config, **given}
    encoder = TextEncoder(nn.Sequential(begin, *rest), 0, json.loads(json.dumps(description, default=str))).eval()
    return _check_dimension(encoder, load_text_processor(place, revision, trust_remote_code, encoder.description), whole)


def _read(folder: Path, name: str, trust_remote_code: bool) -> SentenceTransformer:
    kwargs: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
    try:
        whole = SentenceTransformer(
            str(folder),
            device="cpu",
            trust_remote_code=trust_remote_code,
            local_files_only=not trust_remote_code,  # trusted code may lie in another repository
            model_kwargs=kwargs,
        )
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise untrusted_code_error(name, "auto_map in its config.json") from error
        if "model.safetensors" in str(error):
            raise pickled_weights_error(name) from error
        raise
    return whole.float().eval()


def _require_readable(whole: SentenceTransformer, name: str, prompts: list[str]) -> None:
    """Raise if a module reads more than token ids, or pooling excludes prompts."""
    first: Any = whole[0]
    kind = type(first).__name__
    if kind in ("Router", "Asym"):
        raise XcompatError(
            f"{name} has separate encoders for queries and passages ({kind}); save the modules of each role as a separate "
            "model, and use these models"
        )
    others = [modality for modality in whole.modalities if modality != "text"]
    if others:
        raise XcompatError(
            f"{name} reads {', '.join(map(str, others))} in addition to texts ({kind}); name the image-text model that it "
            "contains, not the sentence-transformers model"
        )
    states = isinstance(first, Transformer) and first.modality_config == _READ and first.module_output_name == "token_embeddings"
    if not (states or isinstance(first, StaticEmbedding)):
        raise XcompatError(
            f"{name} starts with {kind}, not supported by xcompat; choose a model with a Transformer (last hidden state, "
            "pooled) or a StaticEmbedding as first module"
        )
    if any(isinstance(module, Pooling) and not module.include_prompt for module in whole) and any(prompts):
        raise XcompatError(
            f"{name} excludes its prompt from pooling (include_prompt: false), not supported by xcompat; set query_prompt "
            "and passage_prompt to ''"
        )


def _require_all_weights(begin: TokenMeans | TokenStates, name: str) -> None:
    """Raise if weights are missing, because sentence-transformers would draw random ones."""
    if isinstance(begin, TokenStates):
        # transformers marks loaded weights
        absent = [key for key, weight in begin.model.named_parameters() if not getattr(weight, "_is_hf_initialized", False)]
        if absent:
            raise XcompatError(f"{name} lacks {len(absent)} weights, e.g. {min(absent)}; download or save it again")


def _limit(first: Any) -> int | None:  # noqa: ANN401 - of either kind
    """Return the maximum number of tokens; None for no limit."""
    if isinstance(first, StaticEmbedding):
        return (first.tokenizer.truncation or {}).get("max_length")
    return first.max_seq_length if first.max_seq_length is not None and first.max_seq_length < LARGE_INTEGER else None


@torch.no_grad()
def _check_dimension(encoder: TextEncoder, processor: TextProcessor, whole: SentenceTransformer) -> TextEncoder:
    """Set an encoder's dimension and check its embeddings against sentence-transformers."""
    name, wanted = encoder.name, encoder.description["config"]["truncate_dim"]
    for role in (processor, processor.for_queries()):
        asked: dict[str, Any] = {"prompt": role.prompt, "normalize_embeddings": True, "truncate_dim": wanted}
        expected_ND = np.stack([whole.encode([text], **asked)[0] for text in _PROBES])
        dim = expected_ND.shape[1]
        if wanted is not None and wanted > dim:
            raise XcompatError(f"{name} has only {dim} dimensions, fewer than truncate_dim ({wanted}); remove truncate_dim")
        encoder.embedding_dim = encoder.description["embedding_dim"] = dim
        apart = float((encoder.embed_texts(**role.texts(_PROBES)) - torch.from_numpy(expected_ND)).abs().max())
        if not apart <= TOLERANCE:
            raise XcompatError(
                f"{name} reads more of a text than its token ids: embeddings differ from those of sentence-transformers by "
                f"{apart:.1e} (maximum {TOLERANCE:.0e}); choose a model without custom text settings"
            )
    processor.count_truncated = 0
    return encoder

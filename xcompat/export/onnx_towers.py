"""Export to ONNX: a verified file per tower, with a description for the service."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xcompat.core.errors import XcompatError
from xcompat.core.files import write_json
from xcompat.core.markdown import markdown_templates
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.encoders.image_encoder import ImageOnlyProcessor
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_processor import TextProcessor
from xcompat.encoders.transformers_encoder import TransformersProcessor
from xcompat.export.modules import ImageTower, Space, TextTower, Tower, convert_read_errors, sources_of
from xcompat.models.base import CompatModel
from xcompat.models.indexed_memory import NOT_EXPORTABLE, IndexedMemory

TOLERANCE = 1e-4
"""Maximum difference from PyTorch per coordinate, for embeddings of length 1."""
MOST_TOKENS = 4096
"""Maximum tokens of a compared text. Some models read texts of any length."""
OUTPUT = "embeds"
DESCRIPTION = "xcompat_onnx.json"
MADE_BY = "export onnx"

Batch = dict[str, Tensor]


def to_onnx(model: CompatModel, folder: str | Path, space: Space = "old", overwrite: bool = False) -> None:
    """Write a model's image and text towers as ONNX, for batches of any size.

    ``image.onnx`` and ``text.onnx`` output finished embeddings. Texts may have any length if the model does not read its padding.
    The folder also contains:

    - the preprocessing in the encoder library's format
    - ``xcompat_onnx.json`` with inputs, outputs, pixels, padding and the model whose indexes the embeddings search
    - ``README.md`` with instructions

    LoRA is merged, and half precision becomes float32.

    Args:
        model: any model that embeds. A map is written with its frozen encoder.
        folder: the output folder, replaced if it contains only an earlier export.
        space: ``old`` to search the old model's index, ``own`` for the new model's index.
        overwrite: whether to replace any folder.

    Raises:
        XcompatError: the folder has other content, the model does not map queries into an old space, PyTorch cannot export it or
            its memory, or onnxruntime's embeddings differ. Nothing is written then.
    """
    _require_libraries()
    if space == "old" and isinstance(model.memory, IndexedMemory) and not model.maps_galleries:
        raise XcompatError(NOT_EXPORTABLE)
    read = sources_of(model)
    require_replaceable(Path(folder), MADE_BY, overwrite, read)
    model = model.for_inference()
    if model.dtype != torch.float32:  # onnxruntime sums half precision differently on a CPU
        model = copy.deepcopy(model).float()
    tower, processor = Tower(model, space), model.processor
    about = _describe(model, tower, space, processor)
    model = _merge_adapters(model)
    with owned_path(folder, MADE_BY, overwrite, read) as temporary:
        temporary.mkdir()
        if model.embeds_images:
            about["image"] = _write(ImageTower(model, space), _pixels(processor), {0: "batch"}, temporary / "image.onnx") | {
                "size": list(processor.image_size),
                "mean": list(processor.mean),
                "std": list(processor.std),
                "interpolation": processor.interpolation,
                "resized_by": "Pillow",
            }
        if model.embeds_texts:
            free = {0: "batch"} if processor.pad_to_max_length else {0: "batch", 1: "length"}
            about["text"] = _write(TextTower(model, space), _texts(processor), free, temporary / "text.onnx") | {
                "max_length": processor.max_length,
                "pad_to_max_length": processor.pad_to_max_length,
                "pad_token_id": processor.pad_token_id,
            }
        processor.save_pretrained(temporary)
        write_json(temporary / DESCRIPTION, about)
        (temporary / "README.md").write_text(_readme(about, processor), encoding="utf-8")


def _describe(model: CompatModel, tower: Tower, space: Space, processor: Processor) -> dict[str, object]:
    searched = model.compatible_with[:1] if space == "old" else [model.lineage.embeds.fingerprint]
    return {
        "name": model.name_or_path or type(model).__name__,
        "fingerprint": model.fingerprint().digest,
        "space": space,
        "dim": tower.dim,
        "searches": [{"name": version.name, "fingerprint": version.digest} for version in searched],
        "preprocessing": json.loads(json.dumps(processor.describe_all(), default=str)),
    }


def _readme(about: dict[str, object], processor: Processor) -> str:
    of_transformers = isinstance(processor, TransformersProcessor) or type(processor) is ImageOnlyProcessor  # timm's is another
    template = markdown_templates(Path(__file__).parent).get_template("onnx_readme.md.j2")
    prompts, lower_case = {}, False
    if isinstance(processor, TextProcessor):
        given = {"a query": processor.query_prompt, "a passage": processor.passage_prompt}
        prompts, lower_case = {of: prompt for of, prompt in given.items() if prompt}, processor.lower_case
    described = {"image": None, "text": None} | about
    return template.render(about=described, images_by_transformers=of_transformers, prompts=prompts, lower_case=lower_case)


def _require_libraries() -> None:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - PyTorch's exporter needs it
    except ImportError:
        raise XcompatError(
            "this export needs onnx, onnxscript and onnxruntime; install them with "
            '`pip install -e ".[export]"` in a clone of xcompat'
        ) from None
    onnxruntime.set_default_logger_severity(3)  # its warnings are about PyTorch's graphs


def _merge_adapters(model: CompatModel) -> CompatModel:
    adapters = model.config.adapters
    return copy.deepcopy(model).merge_adapters() if adapters is not None and adapters.get("lora") else model


def _pixels(processor: Processor) -> list[Batch]:
    generator = np.random.default_rng(0)
    shapes = [(rows, 3, *processor.image_size) for rows in (2, 1, 3)]
    return [{"pixel_values": torch.from_numpy(generator.standard_normal(shape, np.float32))} for shape in shapes]


def _texts(processor: Processor) -> list[Batch]:
    """Return random text batches: short, as long as the model allows, and mixed."""
    generator = np.random.default_rng(0)
    words = [
        "".join(generator.choice(list("abcdefghijklmnopqrstuvwxyz"), 3))
        for _ in range(2 * min(processor.max_length, MOST_TOKENS))
    ]
    texts = [" ".join(words[:count]) for count in (1, 2, 4, len(words))]
    count_truncated = processor.count_truncated
    batches = [processor.texts(chosen) for chosen in (texts[:2], texts[3:], texts[:3], texts[1:])]
    processor.count_truncated = count_truncated  # these are not the user's texts
    return batches


@torch.no_grad()
def _write(tower: Tower, batches: Sequence[Batch], free: dict[int, str], path: Path) -> dict[str, object]:
    shapes = {name: dict(free) for name in batches[0]}
    try:
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns about its own code
            program = torch.onnx.export(
                tower, (), kwargs=batches[0], dynamic_shapes=shapes, dynamo=True, output_names=[OUTPUT], verbose=False
            )
    except torch.onnx.errors.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().splitlines()
        reason = " ".join(line.strip(" -") for line in cause if line.strip())[:300]
        raise XcompatError(f"PyTorch cannot export the {path.stem} tower with batches of any size: {reason}") from error
    assert program is not None
    program.save(path)
    inputs = _compare(tower, batches, path)
    return {"file": path.name, "inputs": inputs, "outputs": {OUTPUT: ["batch", tower.dim]}}


def _compare(tower: Tower, batches: Sequence[Batch], path: Path) -> dict[str, object]:
    """Raise if the file's embeddings differ from PyTorch's. Return its input types and shapes."""
    from onnxruntime import InferenceSession

    with convert_read_errors(path):
        session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in batches:
        (found,) = session.run([OUTPUT], {name: tensor.numpy() for name, tensor in batch.items()})
        apart = float(np.abs(found - tower(**batch).numpy()).max())
        if not apart <= TOLERANCE:
            raise XcompatError(
                f"embeddings of the {path.stem} tower in ONNX differ by {apart:.1e} from PyTorch's, more than {TOLERANCE:.0e}; "
                "nothing was written"
            )
    return {given.name: {"type": given.type, "shape": given.shape} for given in session.get_inputs()}

"""Export to a folder for ``SentenceTransformer``."""

from __future__ import annotations

from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.export.modules import Space, sources_of
from xcompat.models.base import CompatModel

MADE_BY = "export sentence-transformers"


def to_sentence_transformers(model: CompatModel, folder: str | Path, space: Space = "old", overwrite: bool = False) -> bool:
    """Write a model for sentence-transformers, for texts and images.

    If the model is a layer sequence on a transformers encoder, the folder contains only sentence-transformers modules, with LoRA
    merged. ``SentenceTransformer(folder)`` then loads it without xcompat. This applies to plain encoders and their projections φ
    (``projection``, ``xbt``, ``direct``, ``lce``), ``procrustes``, ``ridge``, a ``query_map`` that is linear or a projection, and
    the own space of maps over embeddings. The written folder is compared with the model.

    Opened images and arrays are read as by xcompat, with transparent parts on white. Open images first: from a path,
    sentence-transformers rotates an image by its EXIF orientation and drops its transparency. If sentence-transformers saves the
    model again, the new folder no longer records that PIL resizes images.

    Other models load with ``SentenceTransformer(folder, trust_remote_code=True)``: visual prompts, maps with a skip connection,
    ``rbt``, ``bt2``, ``simclr``, penultimate features, BLIP, SigLIP 2, timm and open_clip. The folder contains no code: the flag
    lets sentence-transformers import a module from the installed xcompat. Without the flag, use
    ``SentenceTransformer(modules=[CompatModule.load(folder)])``. ``from_pretrained`` reads the folder too.

    Args:
        model: any model that embeds. A map is written with its frozen encoder.
        folder: the output folder, replaced if it contains only an earlier export.
        space: ``old`` to search the old model's index, ``own`` for the new model's index.
        overwrite: whether to replace any folder.

    Returns:
        Whether the folder loads without the flag.

    Raises:
        XcompatError: the folder has other content, the model does not map queries into an old space, or has no encoder.
    """
    try:
        from sentence_transformers import SentenceTransformer

        from xcompat.export.sentence_builtin import prompts_of, save_stock, stock_modules
        from xcompat.export.sentence_module import CompatModule
    except ImportError:
        raise XcompatError(
            'this export needs sentence-transformers; install it with `pip install -e ".[export]"` in a clone of xcompat'
        ) from None
    read = sources_of(model)
    require_replaceable(Path(folder), MADE_BY, overwrite, read)
    own = SentenceTransformer(modules=[CompatModule(model.for_inference(), space)], device=str(model.device))
    modules = stock_modules(model, space)
    with owned_path(folder, MADE_BY, overwrite, read) as temporary:
        enough = modules is not None and save_stock(modules, temporary, own, prompts_of(model.processor, space))
        if not enough:
            own.save(str(temporary), create_model_card=False)
    return enough

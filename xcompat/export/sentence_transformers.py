"""Export a model to a folder that ``SentenceTransformer`` loads."""

from __future__ import annotations

from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.export.modules import Space, sources_of
from xcompat.models.base import CompatModel

MADE_BY = "export sentence-transformers"


def to_sentence_transformers(model: CompatModel, folder: str | Path, space: Space = "old", overwrite: bool = False) -> bool:
    """Write a model so that sentence-transformers embeds texts and pictures with it.

    If the model is a sequence of layers on an encoder that transformers loads by itself, the folder holds only modules of
    sentence-transformers, with LoRA merged: ``SentenceTransformer(folder)`` loads it without xcompat. This holds for plain
    encoders and projections of them, φ (``projection``, ``xbt``, ``direct``, ``lce``), ``procrustes``, ``ridge``, a ``query_map``
    that is linear or a projection, and the own space of maps over embeddings. Before the folder is kept, it is loaded and
    compared with the model. Opened pictures and arrays are read as by xcompat, with transparent parts on white. A picture given
    by its path is rotated by its EXIF orientation and loses its transparency, so open such pictures first. If
    sentence-transformers saves the model again, the new folder no longer says that PIL resizes pictures.

    Other models (visual prompts, maps with a skip connection, ``rbt``, ``bt2``, ``simclr``, penultimate features; BLIP, SigLIP 2,
    timm, open_clip) load with ``SentenceTransformer(folder, trust_remote_code=True)``. The flag allows sentence-transformers to
    import a module that is not its own: one of the installed xcompat, as the folder holds no code. Without the flag,
    ``SentenceTransformer(modules=[CompatModule.load(folder)])`` does the same, and ``from_pretrained`` reads the folder too.

    Args:
        model: any model that embeds; a map is written with its frozen encoder.
        folder: the folder to write; replaced if it holds only an earlier export.
        space: ``old`` to search an index of the old model, ``own`` for an index of the new one.
        overwrite: whether any folder may be replaced.

    Returns:
        Whether modules of sentence-transformers were enough, so that no flag is needed.

    Raises:
        XcompatError: the folder holds something else, the model brings no queries into an old space, or has no encoder.
    """
    try:
        from sentence_transformers import SentenceTransformer

        from xcompat.export.sentence_builtin import prompts_of, save_stock, stock_modules
        from xcompat.export.sentence_module import CompatModule
    except ImportError:
        raise XcompatError("this export needs sentence-transformers; install it with `pip install xcompat[export]`") from None
    read = sources_of(model)
    require_replaceable(Path(folder), MADE_BY, overwrite, read)
    own = SentenceTransformer(modules=[CompatModule(model.for_inference(), space)], device=str(model.device))
    modules = stock_modules(model, space)
    with owned_path(folder, MADE_BY, overwrite, read) as temporary:
        enough = modules is not None and save_stock(modules, temporary, own, prompts_of(model.processor, space))
        if not enough:
            own.save(str(temporary), create_model_card=False)
    return enough

"""A model as a folder that ``SentenceTransformer`` loads."""

from __future__ import annotations

from pathlib import Path

from xcompat.errors import XcompatError
from xcompat.export.modules import Space, sources_of
from xcompat.models.base import CompatModel
from xcompat.ownership import owned_path, require_replaceable

MADE_BY = "export sentence-transformers"


def to_sentence_transformers(model: CompatModel, folder: str | Path, space: Space = "old", overwrite: bool = False) -> bool:
    """Write a model so that sentence-transformers embeds with it, texts and pictures.

    Where the model is an encoder that transformers loads by itself and layers in a row on it, the folder holds modules of
    sentence-transformers alone, LoRA merged: ``SentenceTransformer(folder)`` loads it, and xcompat need not be installed. Such
    are plain encoders and projections of them, φ (``projection``, ``xbt``, ``direct``, ``lce``), ``procrustes``, ``ridge``, a
    ``query_map`` that is linear or a projection, and the own space of maps of embeddings. What was written is loaded and
    compared with the model before it is kept. Opened pictures and arrays are read as here, transparent parts laid on white; one
    given by its path is turned there as its camera says, and its transparency dropped, so open such first. Saved anew by
    sentence-transformers, the folder no longer says that pictures are resized by PIL.

    Elsewhere (visual prompts, maps with a skip connection, ``rbt``, ``bt2``, ``simclr``, penultimate features; BLIP, SigLIP 2,
    timm, open_clip) ``SentenceTransformer(folder, trust_remote_code=True)`` loads it. The flag is how sentence-transformers is
    told that it may import a module that is not its own: here one of the installed xcompat, as the folder holds no code. Without
    it, ``SentenceTransformer(modules=[CompatModule.load(folder)])`` does the same, and ``from_pretrained`` reads the folder too.

    Args:
        model: any that embeds; a map is written with its frozen encoder.
        folder: replaced if an earlier export made it, and nothing else is in it.
        space: ``old`` to search an index of the old model, ``own`` for an index of the new one.
        overwrite: whether any folder may be replaced.

    Returns:
        Whether modules of sentence-transformers were enough, so that no flag is needed.

    Raises:
        XcompatError: something else is there, the model brings no queries into an old space, or was fitted on embeddings alone.
    """
    try:
        from sentence_transformers import SentenceTransformer

        from xcompat.export.sentence_builtin import save_stock, stock_modules
        from xcompat.export.sentence_module import CompatModule
    except ImportError:
        raise XcompatError("this export needs sentence-transformers; install it with `pip install xcompat[export]`") from None
    read = sources_of(model)
    require_replaceable(Path(folder), MADE_BY, overwrite, read)
    own = SentenceTransformer(modules=[CompatModule(model.for_inference(), space)], device=str(model.device))
    modules = stock_modules(model, space)
    with owned_path(folder, MADE_BY, overwrite, read) as temporary:
        enough = modules is not None and save_stock(modules, temporary, own)
        if not enough:
            own.save(str(temporary), create_model_card=False)
    return enough

"""A model as a folder that ``SentenceTransformer`` loads."""

from __future__ import annotations

from pathlib import Path

from xcompat.errors import XcompatError
from xcompat.export.towers import Space
from xcompat.files import atomic_path
from xcompat.models.base import CompatModel


def to_sentence_transformers(model: CompatModel, folder: str | Path, space: Space = "old") -> None:
    """Write a model so that sentence-transformers embeds with it, texts and pictures.

    ``SentenceTransformer(folder, trust_remote_code=True)`` loads it. The flag is how sentence-transformers is told that it may
    import a module that is not its own: here one of the installed xcompat, as the folder holds no code. Without the flag,
    ``SentenceTransformer(modules=[CompatModule.load(folder)])`` does the same.

    Args:
        model: any that embeds; a map is written with its frozen encoder.
        folder: replaced if it exists; ``from_pretrained`` reads it as well.
        space: ``old`` to search an index of the old model, ``own`` for an index of the new one.

    Raises:
        XcompatError: the model brings no queries into an old space, or was fitted on embeddings alone.
    """
    try:
        from sentence_transformers import SentenceTransformer

        from xcompat.export.sentence_module import CompatModule
    except ImportError:
        raise XcompatError("this export needs sentence-transformers; install it with `pip install xcompat[export]`") from None
    module = CompatModule(model.for_inference(), space)
    with atomic_path(folder) as temporary:
        SentenceTransformer(modules=[module], device=str(model.device)).save(str(temporary), create_model_card=False)

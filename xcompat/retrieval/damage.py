"""What of a gallery is not what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.errors import XcompatError
from xcompat.retrieval.manifest import CURRENT, is_current_whole, require_generation

if TYPE_CHECKING:
    from xcompat.retrieval.gallery import Gallery


def find_damage(gallery: Gallery) -> list[str]:
    """Compare every file that a state names with what was written, while others write.

    Args:
        gallery: the gallery.

    Returns:
        One line for each file that differs.

    Raises:
        GenerationGoneError: the state was compacted away meanwhile.
    """
    wrong = []
    with gallery.reading():
        if not is_current_whole(gallery.path):
            wrong.append(f"{gallery.path / CURRENT} has changed since it was committed")
        for segment in gallery.segments:
            try:
                wrong += segment.damaged()
            except XcompatError as error:
                wrong.append(str(error))
    if wrong:
        require_generation(gallery.path, gallery.generation)
    return wrong

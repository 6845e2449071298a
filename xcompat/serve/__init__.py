"""Web page to search with old and new queries side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.errors import XcompatError
from xcompat.core.lazy import without_collection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xcompat.serve.options import Options


def serve_target(
    target: str,
    options: Options,
    model: str | None,
    old: str | None,
    sources: Sequence[Path],
    allow_changes: bool,
    ids: Path | None = None,
) -> None:
    """Serve a page until interrupted.

    Args:
        target: a gallery, an index or a run, as for :func:`~xcompat.serve.site_loading.load_site`.
        options: the page's address and password.
        model: the new model.
        old: the old model.
        sources: a gallery's images or texts.
        allow_changes: whether the page may change galleries.
        ids: file with an index's ids.

    Raises:
        XcompatError: the target, a model or a library is missing, or the page cannot be served.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise XcompatError(
            f'the page needs {error.name}; install it with `pip install -e ".[serve]"` in a clone of xcompat'
        ) from None
    with without_collection():
        from xcompat.serve.app import listen, serve
        from xcompat.serve.site_loading import load_site

    listen(options).close()  # raises before models are loaded
    serve(load_site(target, model, old, sources, allow_changes, ids), options)

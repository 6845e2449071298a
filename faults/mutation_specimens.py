"""One small specimen of every kind of file that is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from mutation_data import arrays, images, pairs, recipes, texts
from mutation_galleries import galleries, own_indexes, upgrades
from mutation_models import answers, caches, checkpoints, runs
from mutation_subjects import Subject


@contextlib.contextmanager
def all_subjects(base: Path) -> Iterator[list[Subject]]:
    """Make the specimens.

    Args:
        base: an empty folder.

    Yields:
        The subjects, as long as what answers them is there.
    """
    import datasets

    whole = base / "whole"
    whole.mkdir()
    (base / "datasets").mkdir()
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", base / "datasets"), mock.patch.dict(os.environ, COLUMNS="200"):
        made = [*galleries(whole), *own_indexes(whole), *upgrades(whole), *images(whole), *pairs(whole), *texts(whole)]
        made += [*recipes(whole), *arrays(whole), *checkpoints(whole), *caches(whole), *runs(whole), *answers(whole)]
        yield made

"""Emoji and their names in the place of the quickstart's characters: data on which nothing of it was set or chosen.

    python benchmarks/studies/emoji.py
    OMP_NUM_THREADS=1 xcompat quickstart --out runs/emoji && python benchmarks/studies/table.py runs/emoji

Needs ../shared/data/emoji. Of 1,644 emoji a quarter is searched, half is what the old model learns from, and all but those that
are searched are what the new model learns from and queries remember. Writes runs/emoji/data, which the quickstart takes as it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xcompat.core.files import atomic_path
from xcompat.core.progress import console
from xcompat.data import PairSource, load_pairs

EMOJI, DATA = "../shared/data/emoji/emoji-0000.tar", Path("runs/emoji/data")

if __name__ == "__main__":
    emoji = load_pairs(PairSource(path=EMOJI, caption_column="txt"))
    shuffled = np.random.default_rng(0).permutation(len(emoji))
    test, train = shuffled[: len(emoji) // 4], shuffled[len(emoji) // 4 :]
    with atomic_path(DATA) as temporary:
        for name, rows in {"old_train": train[: len(emoji) // 2], "new_train": train, "test": test}.items():
            emoji.select(np.sort(rows)).save_to_disk(temporary / name)
            console.print(f"{DATA / name}: {len(rows):,} emoji")

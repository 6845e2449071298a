"""What ``benchmarks/studies/bench_data.py`` makes: written by its own functions, of a few texts and images."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from datasets import Dataset
from datasets import Image as ImageFeature

from data_layouts.images import draw
from xcompat.encoders.standins import save_stand_in

PAIRS = 8
GROUPS = 300
"""As many as a batch of the models of texts needs."""


def make_bench(folder: Path, bench_data: ModuleType) -> None:
    """Make every part of the folder that the recipes call ``runs/bench_data``, by the script."""
    for kind in ("glyphs", "fashion"):
        for part in ("old_train", "new_train", "test"):
            files = [folder / "drawn" / kind / part / f"{row}.jpg" for row in range(PAIRS)]
            for file in files:
                draw(file)
            columns = {"image": list(map(str, files)), "caption": [f"{part} {row}" for row in range(PAIRS)]}
            pairs = Dataset.from_dict(columns | {"id": columns["caption"]}).cast_column("image", ImageFeature())
            pairs.save_to_disk(folder / kind / part)
    groups = [[f"thing {row} is of {material}" for material in ("wood", "stone", "glass")] for row in range(GROUPS)]
    texts = {f"passage {row}": group[0] for row, group in enumerate(groups)}
    queries = {f"query {row}": group[1] for row, group in enumerate(groups)}
    qrels = {f"query {row}": {f"passage {row}": 1.0} for row in range(GROUPS)}
    for name, apart in (("captions", True), ("scifact", False)):
        bench_data.write_task(folder / name, bench_data.Task(name, texts, queries, qrels, groups, apart))
    every, pairs = [text for group in groups for text in group], bench_data.pairs_of([groups])
    for name, dim, seed in (("text_old", 8, 1), ("text_new", 12, 2)):
        bench_data.words(every, pairs, dim, 200, 2, seed).save(str(folder / name), create_model_card=False)
    for name, dim, seed in (("towers_old", 8, 1), ("towers_new", 12, 2)):
        save_stand_in(folder / name, "vision-text-dual-encoder", dim, seed)

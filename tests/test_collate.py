"""From rows to batches: which rows either model learns from, in which order they come, and what happens to damaged images."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from torch.utils.data import BatchSampler, DataLoader

from xcompat import data
from xcompat.data import Augmentation, BadSamples, EmbeddingPairDataset, PairCollator, PairDataset, flatten_captions
from xcompat.data.labelled import LabelledImages
from xcompat.data.scenarios import Scenario, Subset, compute_shared_fraction, old_and_new_rows, select_subset


class StubProcessor:
    """Mean colour in, one token per character out."""

    image_size = (8, 8)
    interpolation = "bicubic"

    def require_images(self) -> None:
        """It reads images."""

    def images(self, images: Sequence[Image.Image]) -> torch.Tensor:
        return torch.stack([torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1).float() for image in images])

    def to_pixels(self, pixels_BCHW: torch.Tensor) -> torch.Tensor:
        assert pixels_BCHW.dtype == torch.uint8
        return pixels_BCHW.float() / 255

    def texts(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[len(text)] for text in texts])}


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (10, 10), level).save(buffer, "PNG")
    return buffer.getvalue()


def make(n: int = 6, broken: Sequence[int] = (), several: bool = False) -> datasets.Dataset:
    """Build a data set in which row r has grey level r, caption length r + 1 and label r % 2."""
    text, label = datasets.Value("string"), datasets.Value("int64")
    caption = datasets.List(text) if several else text
    features = datasets.Features({"image": datasets.Image(), "caption": caption, "id": text, "label": label, "face": text})
    rows = range(n)
    columns = {
        "image": [{"bytes": b"broken" if r in broken else png(r), "path": None} for r in rows],
        "caption": [["x" * (r + 1), "y" * (r + 1)] if several else "x" * (r + 1) for r in rows],
        "id": [f"id{r}" for r in rows],
        "label": [r % 2 for r in rows],
        "face": ["serif"] * n,
    }
    return datasets.Dataset.from_dict(columns, features=features)


def test_draws_are_decided_by_seed_epoch_and_sample() -> None:
    dataset = make(several=True)

    def draw(seed: int, epoch: int) -> str:
        pairs = PairDataset(dataset, seed=seed)
        pairs.set_epoch(epoch)
        return "".join(item["caption"][0] for item in pairs.__getitems__([0, 1, 2, 3, 4, 5]))

    assert draw(0, 0) == draw(0, 0)
    assert len({draw(seed, epoch) for seed in range(3) for epoch in range(3)}) > 6
    assert set(draw(0, 0) + draw(0, 1) + draw(0, 2)) == {"x", "y"}
    dataset, collate = make(160), PairCollator(StubProcessor(), Augmentation())  # type: ignore[arg-type]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one = collate(PairDataset(dataset, seed=1).__getitems__([90, 150]))["pixel_values"]
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(collate(PairDataset(dataset, seed=1).__getitems__([150, 90]))["pixel_values"].flip(0), one)
    assert not torch.equal(collate(PairDataset(dataset, seed=2).__getitems__([90, 150]))["pixel_values"], one)


def test_unreadable_images_are_replaced_or_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"old_embeds": np.arange(6, dtype=np.float32)[:, None]}
    bad = BadSamples(max_share=0.5, total=6)
    pairs = PairDataset(make(broken=[1, 2, 5]), image_extra=extra, bad=bad)
    items = pairs.__getitems__([0, 1, 5, 1])
    assert [item["index"] for item in items] == [0, 3, 0, 3]
    assert [float(item["old_embeds"][0]) for item in items] == [0, 3, 0, 3]
    assert [len(item["caption"]) for item in items] == [1, 4, 1, 4]
    assert list(bad.reasons) == ["id1", "id2", "id5"]
    assert capsys.readouterr().out.count("skipped id1") == 1
    captions = make().remove_columns("caption").add_column("caption", ["a", None, "c", " ", "e", "f"])
    bad = BadSamples(max_share=0.5, total=6)
    assert [item["caption"] for item in PairDataset(captions, bad=bad).__getitems__([1, 3])] == ["c", "e"]
    assert bad.reasons == {"id1": "it has no caption", "id3": "it has no caption"}
    bad = BadSamples(max_share=0.5, total=7)
    batches = list(data.iterate_images(make(7, broken=[0, 1, 4]), batch_size=2, bad=bad))
    assert [rows.tolist() for rows, _ in batches] == [[2, 3], [5], [6]]
    assert [image.getpixel((0, 0))[0] for _, images in batches for image in images] == [2, 3, 5, 6]
    assert len(bad.reasons) == 3
    only = list(data.iterate_images(make(7), batch_size=2, rows=[5, 2, 3]))
    assert [rows.tolist() for rows, _ in only] == [[5, 2], [3]]


def test_what_cannot_be_paired_stops_by_name() -> None:
    refuses(r"1 of 6 samples cannot be used.*id1", PairDataset(make(broken=[1])).__getitem__, 1)
    broken = PairDataset(make(2, broken=[0, 1]), bad=BadSamples(max_share=1, total=2))
    refuses("none of 2 samples", broken.__getitem__, 0)
    stream = make(150, broken=range(2, 150, 3)).cast_column("image", datasets.Image(decode=False)).to_iterable_dataset()
    refuses("samples cannot be used.*id2", list, data.stream_pairs(stream))
    refuses("old_embeds has 5 rows, the data set 6", PairDataset, make(), image_extra={"old_embeds": np.zeros((5, 2))})
    refuses("no column 'image'", PairDataset, make().remove_columns("image"))
    refuses("4 new embeddings but 3 old ones", EmbeddingPairDataset, np.zeros((4, 2)), np.zeros((3, 2)))
    refuses("no embeddings", EmbeddingPairDataset, np.zeros((0, 2)), np.zeros((0, 2)))


@pytest.mark.parametrize("threads", [1, 3])
def test_images_decoded_ahead_come_in_order_prepared_and_no_further_than_asked(threads: int) -> None:
    prepared: list[int] = []

    def prepare(images: list[Image.Image]) -> int:
        prepared.append(images[0].getpixel((0, 0))[0])
        return len(images)

    batches = data.iterate_images(make(40, broken=[4]), batch_size=2, bad=BadSamples(0.5, 40), prepare=prepare, threads=threads)
    first = [(rows.tolist(), count) for rows, count in islice(batches, 4)]
    assert first == [([0, 1], 2), ([2, 3], 2), ([5], 1), ([6, 7], 2)]
    batches.close()
    assert len(prepared) <= 4 + threads + 1, "what nobody asks for is not decoded"


def test_columns_by_caption_follow_the_caption_drawn() -> None:
    texts, ids = flatten_captions(make(3, several=True))
    assert texts == ["x", "y", "xx", "yy", "xxx", "yyy"]
    assert ids == ["id0", "id0", "id1", "id1", "id2", "id2"]
    assert flatten_captions(make(2)) == (["x", "xx"], ["id0", "id1"])
    dataset = make(3).remove_columns("caption").add_column("caption", [["p", "", "q"], None, ["r", "s", "t"]])
    texts, _ = flatten_captions(dataset)
    by_caption = np.array([[ord(text)] for text in texts], np.float16)
    pairs = PairDataset(dataset, caption_extra={"old_text_embeds": by_caption}, bad=BadSamples(max_share=0.5, total=3))
    drawn = set()
    for epoch in range(30):
        pairs.set_epoch(epoch)
        for item in pairs.__getitems__([0, 1, 2]):
            assert chr(int(item["old_text_embeds"][0])) == item["caption"]
            drawn.add(item["caption"])
    assert drawn == set("pqrst")
    refuses("old_text_embeds has 3 rows, the data set 5", PairDataset, dataset, caption_extra={"old_text_embeds": by_caption[:3]})


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_leave_out_what_cannot_be_read_and_lose_nothing_else(workers: int) -> None:
    dataset = make(20, broken=[3, 11]).cast_column("image", datasets.Image(decode=False))
    stream = data.stream_pairs(dataset.to_iterable_dataset(num_shards=2), shuffle_buffer=5, seed=1)
    loader = DataLoader(stream, batch_size=4, num_workers=workers, collate_fn=list)
    items = [item for batch in loader for item in batch]
    assert sorted(int(item["id"][2:]) for item in items) == [r for r in range(20) if r not in (3, 11)]
    assert all(item["image"].getpixel((0, 0))[0] == int(item["id"][2:]) for item in items)


@pytest.mark.parametrize("augmentation", [None, Augmentation.none(), Augmentation()])
def test_collated_batches(augmentation: Augmentation | None) -> None:
    pairs = PairDataset(make(), image_extra={"old_embeds": np.ones((6, 2), np.float16)})
    batch = PairCollator(StubProcessor(), augmentation)(pairs.__getitems__([1, 3]))  # type: ignore[arg-type]
    assert set(batch) == {"pixel_values", "input_ids", "labels", "old_embeds"}
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert (batch["pixel_values"].max() <= 1) == (augmentation == Augmentation())  # the stub only rescales in training
    assert batch["input_ids"].tolist() == [[2], [4]]
    assert batch["labels"].tolist() == [1, 1]
    assert batch["old_embeds"].dtype == torch.float32
    bare = PairDataset(make().remove_columns(["caption", "label"]))
    assert set(PairCollator(StubProcessor())(bare.__getitems__([0]))) == {"pixel_values"}  # type: ignore[arg-type]


def test_embedding_pairs_from_memory_maps(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    new, old = generator.standard_normal((50, 6)).astype(np.float16), generator.standard_normal((50, 4)).astype(np.float16)
    for name, array in {"new": new, "old": old}.items():
        np.save(tmp_path / f"{name}.npy", array)
    pairs = EmbeddingPairDataset(*(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("new", "old")))
    sampler = BatchSampler([7, 3, 3, 49, 0], 3, drop_last=False)
    batches = list(DataLoader(pairs, batch_sampler=sampler, collate_fn=data.collate_embeddings))
    for batch, rows in zip(batches, ([7, 3, 3], [49, 0]), strict=True):
        assert torch.equal(batch["new_embeds"], torch.from_numpy(new[rows].astype(np.float32)))
        assert torch.equal(batch["old_embeds"], torch.from_numpy(old[rows].astype(np.float32)))
    assert torch.equal(pairs[7]["new_embeds"], torch.from_numpy(new[7].astype(np.float32)))
    some = EmbeddingPairDataset(new, old, np.array([2, 5, 9]))
    assert len(some) == 3
    for side, array in (("new_embeds", new), ("old_embeds", old)):
        np.testing.assert_array_equal(some.__getitems__([2, 0])[side], array[[9, 2]])


@settings(max_examples=30)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20), st.integers(0, 5), st.integers(0, 3))
def test_one_per_id_has_each_id_once(ids: list[str], seed: int, epoch: int) -> None:
    dataset = make(len(ids)).remove_columns("id").add_column("id", ids)
    pairs = PairDataset(dataset, one_per_id=True, seed=seed)
    pairs.set_epoch(epoch)
    rows = [pairs[index]["index"] for index in range(len(pairs))]
    assert sorted(ids[row] for row in rows) == sorted(set(ids))
    again = PairDataset(dataset, one_per_id=True, seed=seed)
    again.set_epoch(epoch)
    assert [item["index"] for item in again.__getitems__(range(len(pairs)))] == rows


def indices_of(items: list[dict[str, int]]) -> list[int]:
    return [item["index"] for item in items]


def test_every_view_has_its_turn_even_in_workers_that_outlive_an_epoch() -> None:
    dataset = make(9).remove_columns("id").add_column("id", ["a"] * 8 + ["b"])
    pairs = PairDataset(dataset, one_per_id=True)
    loader = DataLoader(pairs, batch_size=2, num_workers=1, persistent_workers=True, collate_fn=indices_of)
    counts = Counter[int]()
    for epoch in range(160):
        pairs.set_epoch(epoch)
        counts.update(row for batch in loader for row in batch)
    assert counts[8] == 160
    assert all(4 < counts[row] < 40 for row in range(8))  # 20 expected, 4 standard deviations


SCENARIOS: list[Scenario] = ["extended-data", "extended-class", "open-data", "open-class"]
percents = st.integers(1, 99)


def naive(labels: list[int], n_classes: int, scenario: str, percent: int) -> tuple[list[int], list[int]]:
    """Walk through the samples one by one, counting in whole numbers."""
    old, seen = [], dict.fromkeys(range(n_classes), 0)
    n_old = max(1, n_classes * percent // 100)
    for row, label in enumerate(labels):
        total = labels.count(label)
        quota = (total * percent + 99) // 100
        if scenario == "open-data":
            quota = min(quota, total - 1)
        if label < n_old if scenario.endswith("class") else seen[label] < quota:
            old.append(row)
        seen[label] += 1
    return old, [row for row in range(len(labels)) if scenario.startswith("extended") or row not in old]


@given(
    counts=st.lists(st.integers(2, 12), min_size=2, max_size=12),
    percent=percents,
    scenario=st.sampled_from(SCENARIOS),
    seed=st.integers(0, 99),
)
def test_scenarios_match_a_loop(counts: list[int], percent: int, scenario: Scenario, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    old, new = old_and_new_rows(labels, len(counts), scenario, percent / 100)
    assert (old.tolist(), new.tolist()) == naive(labels.tolist(), len(counts), scenario, percent)
    everything = set(range(len(labels)))
    assert set(old.tolist()) | set(new.tolist()) == everything
    assert old.size and new.size
    if scenario.startswith("extended"):
        assert set(new.tolist()) == everything
    else:
        assert not set(old.tolist()) & set(new.tolist())
    classes_old, classes_new = set(labels[old].tolist()), set(labels[new].tolist())
    if scenario == "open-class":
        assert max(classes_old) < min(classes_new)
    if scenario.endswith("data"):
        assert classes_old == classes_new == set(range(len(counts)))
        assert np.bincount(labels[old]).tolist() == [
            min(-int(-Fraction(percent, 100) * n // 1), n - (scenario == "open-data")) for n in counts
        ]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_that_leave_nothing(scenario: Scenario) -> None:
    for fraction in (0.0, 1.0, -1.0):
        refuses("must be between 0 and 1", old_and_new_rows, np.array([0, 0]), 1, scenario, fraction)
    if scenario == "open-data":
        refuses("class 1 .* has only 1 sample", old_and_new_rows, np.array([0, 0, 1]), 2, scenario, 0.5)
    if scenario == "open-class":
        refuses("no sample to the new model", old_and_new_rows, np.array([0, 0]), 1, scenario, 0.5)
    if scenario.endswith("class"):
        refuses("no sample to the old model", old_and_new_rows, np.array([2, 3]), 4, scenario, 0.5)


@pytest.fixture(scope="module")
def labelled() -> LabelledImages:
    labels = [0, 1, 2, 3, 4, 3, 2, 1, 0, 0, 0, 2]
    columns = {
        "image": [{"bytes": b"", "path": f"{n}.png"} for n in range(12)],
        "id": [str(n) for n in range(12)],
        "label": labels,
    }
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "id": datasets.Value("string"), "label": datasets.Value("int64")}
    )
    return LabelledImages(datasets.Dataset.from_dict(columns, features), ["a", "b", "c", "d", "e"])


def rows_of(images: LabelledImages) -> list[int]:
    return [int(name) for name in images.dataset["id"]]


def test_subsets_keep_the_class_order_unless_reindexed(labelled: LabelledImages, tmp_path: Path) -> None:
    new = select_subset(labelled, Subset(scenario="open-class", fraction=0.4, side="new"))
    assert new.classes == labelled.classes
    assert new.present_classes() == ["c", "d", "e"]
    assert new.labels().tolist() == [2, 3, 4, 3, 2, 2]
    alone = new.reindex_labels()
    assert alone.classes == ["c", "d", "e"]
    assert alone.labels().tolist() == [0, 1, 2, 1, 0, 0]
    assert rows_of(alone) == rows_of(new) == [2, 3, 4, 5, 6, 11]
    assert alone.class_names() == new.class_names()
    listed = select_subset(labelled, Subset(classes=["d", "a"]))
    assert listed.present_classes() == ["a", "d"]  # in class order, whatever the order of the list
    (tmp_path / "few.txt").write_text("d\na\n")
    assert rows_of(select_subset(labelled, Subset(classes=str(tmp_path / "few.txt")))) == rows_of(listed) == [0, 3, 5, 8, 9, 10]
    assert rows_of(select_subset(labelled, Subset(limit_per_class=1))) == [0, 1, 2, 3, 4]
    assert rows_of(select_subset(labelled, Subset(classes=["a", "c"], limit_per_class=2))) == [0, 2, 6, 8]
    numbered = LabelledImages(labelled.dataset, ["7", "8", "9", "10", "11"])
    assert select_subset(numbered, Subset(classes=[8, 10])).present_classes() == ["8", "10"]  # YAML reads numbers


@pytest.mark.parametrize(
    ("scenario", "old_limit", "new_limit", "share"),
    [
        ("extended-data", 1, 1, 1),
        ("extended-data", 1, 2, 5 / 9),  # of the nine first two of five classes
        ("extended-data", None, None, 7 / 12),
        ("open-class", 1, 1, 0),
    ],
)
def test_what_the_old_model_knows_of_the_new_ones_images(
    labelled: LabelledImages, scenario: Scenario, old_limit: int | None, new_limit: int | None, share: float
) -> None:
    sides = {
        side: Subset(scenario=scenario, fraction=0.5, side=side, limit_per_class=limit)
        for side, limit in (("old", old_limit), ("new", new_limit))
    }
    assert compute_shared_fraction(labelled, sides["new"], sides["old"]) == pytest.approx(share)


def test_bad_class_lists(labelled: LabelledImages) -> None:
    many = LabelledImages(labelled.dataset, [*labelled.classes, *(f"class {n}" for n in range(50))])
    for images, classes, message in (
        (labelled, ["a", "f"], "class 'f' is not among the 5 classes of the data; known: a, b, c, d, e"),
        (many, ["class3"], "class 'class3' is not among the 55 .*did you mean 'class 3'"),
        (many, ["xyz"], "known are 55, first 'a'"),
        (many, ["a", "class 7"], "class 'class 7' has no image"),
        (many, [], "list of classes is empty"),
    ):
        refuses(message, select_subset, images, Subset(classes=classes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scenario": "open-class"}, "give all three"),
        ({"fraction": 0.3}, "give all three"),
        ({"scenario": "open-class", "fraction": 0.3, "side": "old", "classes": ["a"]}, "scenario or classes"),
        ({"scenario": "open-class", "fraction": 1.0, "side": "old"}, "less than 1"),
        ({"scenario": "open-classes", "fraction": 0.3, "side": "old"}, "open-class"),
        ({"limit": 3}, "not permitted"),
        ({"limit_per_class": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_subsets(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Subset.model_validate(fields)

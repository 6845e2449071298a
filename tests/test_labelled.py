"""Labelled images come out the same from every format and data set, in a stated class order; bad labels are one line."""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import yaml
from accelerate.data_loader import BatchSamplerShard
from conftest import Run, refuses
from data_layouts import make_all
from data_layouts.labelled import CATEGORIES, SYNSETS, records
from hypothesis import given
from hypothesis import strategies as st
from test_loading import png, write_shard
from torch.utils.data import BatchSampler

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import ClassBalancedSampler, PairSource, Subset, load_classes, load_pairs, open_image, select_subset
from xcompat.data.content_type import contains_images
from xcompat.data.labelled import MAX_INDEX, LabelledImages, LabelledSource, load_labelled
from xcompat.encoders.class_names import SETS, class_names
from xcompat.training.class_files import class_indices
from xcompat.training.push import run_facts
from xcompat.training.recipe import parse_recipe
from xcompat.training.sections import DataSettings, ZeroShotSettings

NAMES = ["cat", "dog", "eel"]
LABELS = [2, 0, 1, 2, 0, 0]  # in the order of NAMES


def write_images(folder: Path) -> list[str]:
    folder.mkdir()
    for number in range(len(LABELS)):
        (folder / f"{number}.png").write_bytes(png(number))
    return [f"{number}.png" for number in range(len(LABELS))]


def hf_dataset(labels: list[object], feature: object, **columns: list[object]) -> datasets.Dataset:
    data = {"image": [{"bytes": png(n), "path": None} for n in range(len(labels))], "label": labels, **columns}
    features = {"image": datasets.Image(), "label": feature, **{name: datasets.Value("string") for name in columns}}
    return datasets.Dataset.from_dict(data, features=datasets.Features(features))


def shards(content: Callable[[int], dict[str, bytes]], column: str | None = None) -> Callable[[Path], LabelledSource]:
    def write(folder: Path) -> LabelledSource:
        folder.mkdir()
        members = {f"k{n}": {"png": png(n), **content(label)} for n, label in enumerate(LABELS)}
        return LabelledSource(path=str(write_shard(folder / "a.tar", members)), label_column=column)

    return write


def shards_of_indices(folder: Path) -> LabelledSource:
    source = shards(lambda label: {"cls": str(label).encode()})(folder)
    (folder / "classes.tsv").write_text("index\tword\n" + "".join(f"{n}\t{name}\n" for n, name in enumerate(NAMES)))
    return source.model_copy(update={"path": str(folder)})


shards_of_json = shards(lambda label: {"json": json.dumps({"kind": NAMES[label]}).encode()}, "json.kind")


def saved_class_label(folder: Path) -> LabelledSource:
    hf_dataset(LABELS, datasets.ClassLabel(names=NAMES)).rename_column("label", "species").save_to_disk(folder)
    return LabelledSource(path=str(folder))


def saved(folder: Path, labels: list[object], feature: object = datasets.Value("string"), **columns: list[object]) -> str:
    hf_dataset(labels, feature, **columns).save_to_disk(folder / "set")
    return str(folder / "set")


def image_folder(folder: Path) -> LabelledSource:
    for number, label in enumerate(LABELS):
        (folder / NAMES[label]).mkdir(parents=True, exist_ok=True)
        (folder / NAMES[label] / f"{number}.png").write_bytes(png(number))
    return LabelledSource(path=str(folder))


def table(name: str, column: str = "class") -> Callable[[Path], LabelledSource]:
    def write(folder: Path) -> LabelledSource:
        rows = pd.DataFrame({"image": write_images(folder), column: [NAMES[label] for label in LABELS]})
        if name.endswith("jsonl"):
            rows.to_json(folder / name, orient="records", lines=True)
        elif name.endswith("parquet"):
            rows.to_parquet(folder / name)
        else:
            rows.to_csv(folder / name, sep="\t" if "tsv" in name else ",", index=False)
        return LabelledSource(path=str(folder / name if name.endswith("parquet") else folder))

    return write


FORMATS = [
    shards_of_indices,
    shards(lambda label: {"cls": NAMES[label].encode()}),
    shards_of_json,
    saved_class_label,
    lambda folder: LabelledSource(path=saved(folder, [NAMES[label] for label in LABELS])),
    image_folder,
    table("labels.csv"),
    table("metadata.tsv"),
    table("captions.jsonl"),
    table("table.parquet", "category"),
]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_labels_in_any_order(tmp_path: Path, write: Callable[[Path], LabelledSource]) -> None:
    source, order = write(tmp_path / "set"), ["eel", "cat", "dog"]
    images = load_labelled(source)
    assert images.classes == NAMES
    label_of = {bytes(open_image(png(n)).tobytes()): label for n, label in enumerate(LABELS)}
    assert [label_of[open_image(row["image"]).tobytes()] for row in images.dataset] == images.labels().tolist()
    assert sorted(images.labels().tolist()) == sorted(LABELS)
    assert images.class_names() == [NAMES[label] for label in images.labels()]
    assert len(set(images.dataset["id"])) == len(images) == len(LABELS)
    assert images.dataset.features["label"] == datasets.Value("int64")
    ordered = load_labelled(source, order)
    assert ordered.classes == order
    if write is shards_of_indices:  # an index is an index into the given list, whatever the file beside it says
        assert ordered.labels().tolist() == LABELS
        return
    assert ordered.class_names() == images.class_names()
    (tmp_path / "order.txt").write_text("\n".join(order))
    in_a_file = load_labelled(source.model_copy(update={"classes": str(tmp_path / "order.txt")}))
    assert in_a_file.labels().tolist() == ordered.labels().tolist()


def test_numbers_are_ordered_by_value_and_indices_stay(tmp_path: Path) -> None:
    for number in (0, 1, 2, 10, 11):
        (tmp_path / "set" / str(number)).mkdir(parents=True)
        (tmp_path / "set" / str(number) / "a.png").write_bytes(png(number))
    images = load_labelled(str(tmp_path / "set"))
    assert images.classes == ["0", "1", "2", "10", "11"]
    assert dict(zip(images.dataset["id"][:], images.labels().tolist(), strict=True))["10/a.png"] == 3
    named = load_labelled(LabelledSource(path=str(tmp_path / "set"), classes=[0, 10, 1, 11, 2]))  # YAML reads numbers
    assert named.classes == ["0", "10", "1", "11", "2"] and named.class_names() == images.class_names()
    hf_dataset([3, 0, 3], datasets.Value("int64")).save_to_disk(tmp_path / "indices")
    images = load_labelled(str(tmp_path / "indices"))
    assert (images.classes, images.labels().tolist()) == (["0", "1", "2", "3"], [3, 0, 3])
    assert images.present_classes() == ["0", "3"]
    relabelled = images.reindex_labels()
    assert relabelled.classes == ["0", "3"] and relabelled.labels().tolist() == [1, 0, 1]
    assert relabelled.class_names() == images.class_names()
    some = LabelledImages(images.dataset.select([2, 1]), images.classes).reindex_labels()
    assert some.labels().tolist() == [1, 0] and len(some.dataset.data) == 3, "the whole table, seen through the same rows"
    assert [row["image"] for row in some.dataset] == [images.dataset[row]["image"] for row in (2, 1)]


def test_splits_have_own_ids_and_columns_are_not_guessed(tmp_path: Path) -> None:
    data = hf_dataset([0, 1], datasets.Value("int64"))
    datasets.DatasetDict(train=data, test=data).save_to_disk(tmp_path / "set")
    ids = [load_labelled(LabelledSource(path=str(tmp_path / "set"), split=split)).dataset["id"][:] for split in ("train", "test")]
    assert not set(ids[0]) & set(ids[1])
    assert ids[1][1].endswith("test/1")
    data = hf_dataset([0, 1], datasets.ClassLabel(names=["a", "b"])).rename_column("label", "fine_label")
    data = data.add_column("coarse_label", [0, 0], feature=datasets.ClassLabel(names=["c"]))
    data.save_to_disk(tmp_path / "fine")
    refuses("set label_column", load_labelled, str(tmp_path / "fine"))
    assert load_labelled(LabelledSource(path=str(tmp_path / "fine"), label_column="fine_label")).classes == ["a", "b"]


def test_bad_labels(tmp_path: Path) -> None:
    for labels, feature, classes, message in (
        (["cat", "dgo"], datasets.Value("string"), ["cat", "dog"], "image '.*set/1' has class 'dgo'.*did you mean 'dog'"),
        (["cat", "cat"], datasets.Value("string"), ["cat", "dog"], "class 'dog' has no image"),
        (["cat", "cat"], datasets.Value("string"), ["cat", "cat"], "class 'cat' is listed twice"),
        ([0, 2], datasets.Value("int64"), ["cat", "dog"], "label index 2, but the 2 classes go from 0 to 1"),
        ([0, -2], datasets.Value("int64"), None, "label index -2"),
        (["1", "9"], datasets.Value("string"), ["cat", "dog"], "label index 9"),
        ([0, -1], datasets.ClassLabel(names=["a", "b"]), None, "image '.*set/1' has no label"),
        (["cat", None], datasets.Value("string"), None, "has no label"),
        ([0.5, 1.0], datasets.Value("float32"), None, "labels are floats, e.g. 0.5"),
        ([MAX_INDEX, 1], datasets.Value("int64"), None, "store them as text"),
    ):
        refuses(message, load_labelled, saved(tmp_path, labels, feature), classes)


def test_images_without_a_usable_label_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses("two images have the id 'x'.*id_column", load_labelled, saved(tmp_path, ["a", "b", "a"], id=["x", "y", "x"]))
    write_images(tmp_path / "flat")
    refuses("0.png has no label; move it into a folder", load_labelled, str(tmp_path / "flat"))
    for rows, message in (
        ("image,label\n0.png,\n", "0.png has no label"),
        ("image,label\n0.png,a\n0.png,b\n", "0.png has the labels 'a' and 'b'"),
        ("image,kind\n0.png,a\n", "no column named label or class .*set label_column"),
    ):
        (tmp_path / "flat" / "table.csv").write_text(rows)
        refuses(message, load_labelled, str(tmp_path / "flat" / "table.csv"))
    (tmp_path / "flat" / "table.csv").unlink()
    (tmp_path / "flat" / "labels.jsonl").write_text('{"image": "0.png", "label": null}\n{"image": "1.png", "label": 3}\n')
    refuses("0.png has no label", load_labelled, str(tmp_path / "flat"))
    members = {f"k{n}": {"png": png(n), "cls": b"0" if n % 2 else b"1"} for n in range(8)}
    del members["k3"]["cls"]
    members["k4"]["cls"] = b"dog"
    members["k5"]["cls"] = b""
    path = str(write_shard(tmp_path / "a.tar", members))
    said = "3 of 8 samples cannot be used.*k3: no cls; k4: cls is 'dog', not an index; k5: empty cls"
    refuses(said, load_labelled, path)
    assert load_labelled(LabelledSource(path=path, max_bad_share=0.5)).labels().tolist() == [1, 0, 1, 1, 0]
    assert "skipped 3 of 8 samples" in " ".join(capsys.readouterr().out.split())


def test_class_files_beside_other_labels_are_left_alone(tmp_path: Path) -> None:
    source = shards_of_json(tmp_path / "set")
    (tmp_path / "set" / "classes.txt").write_text("one\ntwo\n")
    assert load_labelled(source).classes == NAMES
    (tmp_path / "set" / "classes.txt").write_text("eel\ndog\ncat\nfox\n")  # fox is without images in this split
    assert load_labelled(source).classes == ["eel", "dog", "cat", "fox"]
    assert load_labelled(source.model_copy(update={"limit": 1})).present_classes() == ["eel"]
    (tmp_path / "set" / "classes.txt").write_text("eel\ndog\n")
    refuses("class 'cat', which is not in the class list", load_labelled, source)


def batches_of(sampler: ClassBalancedSampler) -> list[list[int]]:
    return list(BatchSampler(sampler, sampler.classes_per_batch * sampler.samples_per_class, drop_last=False))


@given(
    counts=st.lists(st.integers(2, 9), min_size=4, max_size=9),
    per_batch=st.integers(1, 4),
    per_class=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_balanced_batches(counts: list[int], per_batch: int, per_class: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)) * 3, counts))  # any integers are classes
    sampler = ClassBalancedSampler(labels, per_batch, per_class, seed=seed)
    batches = batches_of(sampler)
    assert sum(map(len, batches)) == len(sampler)
    for batch in batches:
        drawn = {label: [row for row in batch if labels[row] == label] for label in set(labels[batch].tolist())}
        assert len(drawn) == per_batch
        for label, rows in drawn.items():
            assert len(rows) == per_class and len(set(rows)) == min(per_class, counts[label // 3])
    assert batches_of(sampler) == batches


@given(n_classes=st.integers(6, 12), replicas=st.integers(1, 3), epoch=st.integers(0, 3))
def test_processes_share_the_batches(n_classes: int, replicas: int, epoch: int) -> None:
    labels = np.repeat(np.arange(n_classes), 6)

    def sampler(**part: int) -> ClassBalancedSampler:
        made = ClassBalancedSampler(labels, 2, 3, **part)
        made.set_epoch(epoch)
        return made

    parts = [batches_of(sampler(num_replicas=replicas, rank=rank)) for rank in range(replicas)]
    dealt = [batch for step in zip(*parts, strict=True) for batch in step]
    whole = batches_of(sampler())
    assert whole != batches_of(ClassBalancedSampler(labels, 2, 3, seed=1)), "drawn anew by seed and epoch"
    made = sampler()
    made.set_epoch(epoch + 1)
    assert whole != batches_of(made)
    assert dealt == whole[: len(dealt)]
    assert len(whole) - len(dealt) < replicas
    drawn = [row for batch in dealt for row in batch]
    assert len(set(drawn)) == len(drawn)  # no sample twice, on one process or on two
    for rank, part in enumerate(parts):  # accelerate deals the batches of one sampler the same way
        shard = BatchSamplerShard(BatchSampler(sampler(), 6, drop_last=True), replicas, rank, even_batches=False)
        assert list(shard)[: len(part)] == part


def test_what_a_triplet_cannot_be_made_of(tmp_path: Path) -> None:
    images = load_labelled(image_folder(tmp_path / "set"))
    refuses("fewer than two samples of class 'dog'; add", ClassBalancedSampler, images.labels(), 2, 2, classes=images.classes)
    refuses("fewer than two samples of class '0' and of 1 more", ClassBalancedSampler, np.array([0, 1, 2, 2]), 2, 2)
    for per_batch, per_class, processes, message in (
        (3, 2, 1, "classes_per_batch=3 exceeds the 2 classes"),
        (2, 1, 1, "samples_per_class=1 leaves samples without positives"),
        (2, 2, 2, "1 batches are too few for 2 processes"),
    ):
        refuses(message, ClassBalancedSampler, np.array([0, 0, 1, 1]), per_batch, per_class, num_replicas=processes)


@pytest.mark.parametrize("name", SETS)
def test_names_are_in_the_order_of_the_folders(name: str) -> None:
    """By what timm knows of the same classes: WordNet's numbers in order, nearly each with a word of the name."""
    of_timm = importlib.resources.files("timm.data").joinpath("_info")
    folders = of_timm.joinpath("imagenet_synsets.txt").read_text().split()
    if (listed := SETS[name]) is not None:
        folders = [folders[int(row)] for row in of_timm.joinpath(listed).read_text().split()]
    assert folders == sorted(folders) and len(class_names(name)) == len(folders)
    lemmas = dict(line.split("\t") for line in of_timm.joinpath("imagenet_synset_to_lemma.txt").read_text().splitlines())
    pairs = zip(class_names(name), folders, strict=True)
    known = [any(part in lemmas[folder].lower() for part in re.findall(r"\w+", own.lower())) for own, folder in pairs]
    assert np.mean(known) > 0.9


def test_a_class_file_is_written_and_never_overwritten(tmp_path: Path, run_xcompat: Run) -> None:
    file = tmp_path / "lists" / "r.txt"
    run_xcompat.output("classes", "imagenet-r", "--to", file)
    assert load_classes(file) == class_names("imagenet-r") and len(load_classes(file)) == 200
    assert run_xcompat.output("classes", "imagenet-r") == file.read_text()
    assert "imagenet-sketch  1000 classes" in run_xcompat.output("classes")
    for arguments, message in (
        (("imagenet", "--to", file), "already exists; choose another file with --to"),
        (("imagenet-x",), "did you mean 'imagenet-a'|no class names for 'imagenet-x'"),
        (("--to", tmp_path / "all.txt"), "needs the name of a data set: xcompat classes NAME --to FILE"),
    ):
        assert re.search(message, run_xcompat.refusal("classes", *arguments))


def test_labels_are_names_indices_or_folders_of_wordnet() -> None:
    classes = ["tench", "goldfish", "shark"]
    assert class_indices(["shark", "tench", "goldfish"], classes).tolist() == [2, 0, 1]
    assert class_indices([2, 0, 1], classes).tolist() == class_indices(["2", "0", "1"], classes).tolist() == [2, 0, 1]
    folders = ["n01484850", "n01440764", "n01443537", "n01440764"]
    assert class_indices(folders, classes).tolist() == [2, 0, 1, 0]
    assert class_indices([0, 1], classes, is_limited=True).tolist() == [0, 1]
    assert class_indices(["shark", "tench"], classes, is_limited=True).tolist() == [2, 0]
    assert class_indices(["crane", "tench"], ["crane", "tench", "crane"]).tolist() == [0, 1], "two classes of one name"
    for labels, message in (
        (folders[:2], "3 classes, but the images are in 2 folders"),
        ([0, 1], "'shark' of 3 classes has no image; use a class file with a line per label"),
        (["goldfish"], "'tench' and 1 more of 3 classes have no image"),
        ([0, 5], "label 5 is not among the 3 classes"),
        (["shark", "gold fish"], "label 'gold fish' is not among the 3 classes; did you mean 'goldfish'"),
    ):
        refuses(message, class_indices, labels, classes)


def test_zero_shot_is_one_set_or_several_by_name(tmp_path: Path) -> None:
    one = {"images": {"path": "x"}, "classes": "c.txt"}

    def parsed(given: object) -> DataSettings:
        data = {"texts": [{"path": "t"}], "test": {"path": "y"}, "zero_shot": given}
        raw = {"method": "ridge", "old": "a", "new": "b", "data": data}
        return parse_recipe(raw, "demo", "demo.yaml", is_quick=True).stages[0].data

    assert parsed(one).zero_shot_sets() == {"": ZeroShotSettings(**one)} and parsed(None).zero_shot_sets() == {}
    several = parsed({"imagenet": one, "imagenet_r": one | {"templates": "simple"}, "sketch": one | {"templates": "openai"}})
    plain, simple, openai = (shot.prompts() for shot in several.zero_shot_sets().values())
    assert plain == ["a photo of a {}"] and len(simple) == 7 and len(set(openai)) == 80 and set(simple) <= set(openai)
    assert all(prompt.count("{}") == 1 for prompt in openai)
    assert parsed(several.model_dump(mode="json")["zero_shot"]) == several, "as the copy in the run's folder has it"
    for wrong, message in (
        ({"images": {"path": "x"}}, r"data\.zero_shot\.classes: Field required"),
        ({"imagenet": {"images": {"path": "x"}}}, r"data\.zero_shot\.imagenet\.classes: Field required"),
        ({"imagenet": one | {"clases": 1}}, r"unknown key .*zero_shot\.imagenet\.clases'; did you mean 'classes'"),
        (one | {"imagenet": one}, r"unknown key .*zero_shot\.imagenet'; did you mean 'images'"),
        ({"image net": one}, r"zero_shot\.image net.*should match pattern"),
    ):
        refuses(message, parsed, wrong)
    shots = {name: {"images": {"path": f"data/{name}/val"}, "classes": "c.txt"} for name in ("imagenet", "sketch")}
    for written, named in ((shots, ["data/imagenet/val", "data/sketch/val"]), (shots["sketch"], ["data/sketch/val"])):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"data": {"zero_shot": written}}))
        assert run_facts(tmp_path / "model", Fingerprint.from_string("any")).data == {"zero_shot": named}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_all(folder)
    return folder


def labelled(path: Path | str, **fields: Any) -> Any:
    return load_labelled(LabelledSource(path=str(path), **fields))


def test_both_kinds_of_cifar_have_classes_in_the_order_of_labels(made: Path, tmp_path: Path) -> None:
    train = labelled(made / "cifar-100-binary" / "train.bin")
    assert train.classes == [f"fine {number}" for number in range(100)]
    assert train.labels().tolist() == list(range(99, -1, -1))
    assert train.dataset["id"][:2] == ["train.bin/0", "train.bin/1"], "no id of the test part"
    half = select_subset(train, Subset(scenario="extended-class", fraction=0.5, side="old"))
    assert sorted(half.labels().tolist()) == list(range(50))
    pixels_HWC = np.asarray(open_image(train.dataset[7]["image"]))
    assert pixels_HWC.shape == (32, 32, 3) and (pixels_HWC == 7).all()
    coarse = labelled(made / "cifar-100-binary" / "test.bin", label_column="coarse")
    assert coarse.classes == [f"coarse {number}" for number in range(20)]
    assert coarse.labels().tolist() == [number // 5 for number in range(100)] * 2
    ten = labelled(made / "cifar-10-batches-bin" / "data_batch_*.bin")
    assert ten.classes == [f"class {number}" for number in range(10)] and ten.labels().tolist() == list(range(10))
    shutil.copy(made / "cifar-10-batches-bin" / "test_batch.bin", tmp_path)
    assert labelled(tmp_path / "test_batch.bin").classes == [str(number) for number in range(10)], "no names beside it"
    pixels_CHW = np.random.default_rng(0).integers(0, 255, (3, 32, 32), dtype=np.uint8)
    (tmp_path / "planes").mkdir()
    (tmp_path / "planes" / "test.bin").write_bytes(bytes([3, 19]) + pixels_CHW.tobytes())
    (row,) = load_pairs(PairSource(path=str(tmp_path / "planes"), captions=False))
    assert np.array_equal(np.asarray(open_image(row["image"])), pixels_CHW.transpose(1, 2, 0)), "a lossless image"


def test_what_is_no_part_of_cifar_is_said(made: Path, tmp_path: Path) -> None:
    refuses(r"contains test\.bin, train\.bin; give the paths to read, e.g.", labelled, made / "cifar-100-binary")
    with pytest.raises(XcompatError, match="CIFAR-100 has no column 'fin'; did you mean 'fine'"):
        labelled(made / "cifar-100-binary" / "test.bin", label_column="fin")
    file = tmp_path / "train.bin"
    whole = records(np.array([[0, 0], [0, 1]]))
    file.write_bytes(whole[:-5])
    refuses(r"train\.bin is not a multiple of 3,074 bytes \(CIFAR-100\) or 3,073", labelled, file)
    file.write_bytes(records(np.array([[0, 0], [0, 100]])))
    refuses("record 1 has the fine label 100, but CIFAR-100 has 100 classes", labelled, file)
    file.write_bytes(whole)
    (tmp_path / "fine_label_names.txt").write_text("apple\nfish\n")
    refuses(r"fine_label_names\.txt names 2 classes, but fine labels of CIFAR-100 have 100", labelled, file)
    refuses("CIFAR has no captions", load_pairs, str(file))


@pytest.mark.parametrize("path", ["", "train"])
def test_the_python_version_of_cifar_is_not_opened(tmp_path: Path, path: str) -> None:
    for name in ("meta", "train", "test"):
        (tmp_path / name).write_bytes(b"\x80\x02no pickle is read")
    refuses(r"Python version of CIFAR: pickles .*cifar-100-binary\.tar\.gz", labelled, tmp_path / path)


def test_imagenet_faces_and_places_in_folders_and_as_lists(made: Path) -> None:
    train = labelled(made / "imagenet" / "train")
    assert train.classes == list(SYNSETS) and len(train) == 12
    folders, listed = labelled(made / "imagenet" / "val"), labelled(made / "imagenet" / "flat" / "val.txt")
    assert folders.labels().tolist() == listed.labels().tolist() == np.repeat(np.arange(4), 3).tolist()
    assert listed.classes == ["0", "1", "2", "3"]
    named = labelled(made / "imagenet" / "flat" / "val.txt", classes=train.classes)
    assert named.class_names() == folders.class_names()
    for part in ("train", "test"):
        folders, listed = labelled(made / "vggface2" / part), labelled(made / "vggface2" / f"{part}_list.txt")
        assert folders.class_names() == listed.class_names() and folders.classes == listed.classes
        assert folders.dataset["id"][:] == listed.dataset["id"][:]
    assert select_subset(listed, Subset(limit_per_class=2)).labels().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    folder = made / "places365"
    assert load_classes(folder / "categories_places365.txt") == list(CATEGORIES)
    train = labelled(folder / "places365_train_standard.txt", classes=str(folder / "categories_places365.txt"))
    assert train.labels().tolist() == np.repeat(np.arange(4), 3).tolist(), "not the folders, of which two have one name"
    assert train.dataset[0]["id"] == "a/airfield/00000001.jpg"
    assert train.dataset[0]["image"]["path"] == str((folder / "data_256/a/airfield/00000001.jpg").resolve())
    assert len(labelled(folder / "places365_val.txt").classes) == 4
    assert contains_images(str(folder / "places365_val.txt")), "a gallery takes a list too"


def test_class_lists(tmp_path: Path) -> None:
    words, alphabets = tmp_path / "words.tsv", tmp_path / "alphabets.tsv"
    words.write_text("index\twnid\twords\n1\tn2\tdog\n0\tn1\tcat\n")
    assert load_classes(words) == ["cat", "dog"] and load_classes(words, "wnid") == ["n1", "n2"]
    alphabets.write_text("index\talphabet\tcharacter\tsamples\n1\tGreek\tone\t2\n0\tLatin\tone\t2\n2\tGreek\ttwo\t2\n")
    assert load_classes(alphabets) == ["Latin one", "Greek one", "Greek two"]
    assert load_classes(alphabets, "character") == ["one", "one", "two"]
    for text, names in (
        ("cat\nsea lion\n\n", ["cat", "sea lion"]),
        ("b 1\na 0\n", ["a", "b"]),  # numbers behind names are labels if all of them are
        ("route 0\nroute 1\n", ["route 0", "route 1"]),
        ("area 51\nmars\n", ["area 51", "mars"]),
        ("a 1\nb 2\n", ["a 1", "b 2"]),
    ):
        (tmp_path / "classes.txt").write_text(text)
        assert load_classes(tmp_path / "classes.txt") == names
    for name, text, message in (
        ("kinds.tsv", "index\tkind\tcount\n1\tshoe\t7\n2\that\t7\n", "0 to 1"),
        ("blank.txt", "cat\n\ndog\n", "class 1 has a blank name"),
        ("empty.txt", "", "no class names"),
    ):
        (tmp_path / name).write_text(text)
        refuses(message, load_classes, tmp_path / name)
    refuses("not exist", load_classes, tmp_path / "none.txt")


def test_a_list_that_does_not_fit_is_said(tmp_path: Path, made: Path) -> None:
    shutil.copy(made / "coco/val2014/COCO_val2014_000000000000.jpg", tmp_path / "a.jpg")
    for text, message in (
        ("cat/1.jpg 0\ncat/2.jpg 0\n", r"list\.txt lists 2 images, and 2 of them do not exist, first .cat/1"),
        ("a.jpg 0\nwhat is this\n", r"list\.txt line 2 is not an image path with a class \('what is this'\)"),
        ("a.jpg 0\na.jpg 1\n", "two samples have the id 'a.jpg'"),
        ("a.jpg\n", "a.jpg has no class; write the class after the path"),
        ("a.jpg 0\n", "class 'dog' has no image; remove it from the class list"),
    ):
        (tmp_path / "list.txt").write_text(text)
        refuses(message, labelled, tmp_path / "list.txt", classes=["cat", "dog"])


def test_captions_as_distributed_and_json_without_any(made: Path, tmp_path: Path) -> None:
    for path, each, first in (
        ("coco/annotations/captions_val2014.json", 5, "thing 0 0"),
        ("nocaps/nocaps_val_4500_captions.json", 10, "thing 0 0"),
        ("flickr30k/results_20130124.token", 5, "thing 0 0 ."),
    ):
        loaded = load_pairs(str(made / path))
        assert isinstance(loaded, datasets.Dataset) and len(loaded) == 8
        assert [len(captions) for captions in loaded["caption"][:]] == [each] * 8 and loaded[0]["caption"][0] == first
        assert open_image(loaded[0]["image"]).size == (8, 8)
        assert len(set(loaded["id"][:])) == 8
    for held, message in (
        ({"images": []}, "'annotations' is missing"),
        ([1, 2], "not a COCO captions file with images and annotations"),
        ({"images": [], "annotations": [{"image_id": 4, "caption": "a"}]}, "4 is missing among the images or their keys"),
        ({"images": [{"id": 4, "file_name": "a.jpg"}], "annotations": []}, "contains no captions"),
        ({"images": [{"id": 4, "file_name": "a.jpg"}], "annotations": [{"image_id": 4, "caption": "a"}]}, "first 'a.jpg'"),
    ):
        (tmp_path / "captions.json").write_text(json.dumps(held))
        refuses(message, load_pairs, str(tmp_path / "captions.json"))

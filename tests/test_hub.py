"""The Hub: what is pushed is pulled, bit for bit, and what goes wrong on the way is one line."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ARCHITECTURES, Run, refuses, refusing
from hub_server import Hub, Repository
from huggingface_hub import ModelCard
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from schedule import METHOD_OF_EACH_KIND, mostly_nightly
from test_models import ADAPTERS, OLD, OLDER, build, embeddings, shake
from transformers import AutoModel, CLIPModel

from xcompat import Fingerprint, FingerprintMismatchError, ProcrustesConfig, ProcrustesModel, XcompatError
from xcompat.core.checksums import CHECKSUMS
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.standins import save_stand_in
from xcompat.evaluation import Case, Criterion, Difference
from xcompat.hub.lineage import Ancestor, require_whole, trace_lineage
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.models.embedder import is_checkpoint, load_checkpoint, load_embedder
from xcompat.models.query_memory import LearnedTransform, QueryMemory
from xcompat.report import ModelInfo, Report
from xcompat.report.storage import save_report
from xcompat.training.push import anonymise_name, find_model, push
from xcompat.vectors.codecs import MemoryParts


@pytest.fixture
def on_hub(hub: Hub, folder_of: dict[str, str]) -> dict[str, str]:
    hub.add("base/clip", folder_of["clip"])
    return {"clip": "base/clip"}


def usage(card: str) -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own card
    return names


@pytest.mark.parametrize("method", mostly_nightly(METHODS, METHOD_OF_EACH_KIND.__contains__))
def test_what_is_pushed_is_pulled(method: str, hub: Hub, on_hub: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, on_hub)
    shake(model)
    model.push_to_hub("me/model")
    again = AutoModel.from_pretrained("me/model")
    assert type(again) is type(model) and again.fingerprint() == model.fingerprint()
    assert again.compatible_with == model.compatible_with
    for first, second in zip(embeddings(model, images), embeddings(again, images), strict=True):
        assert torch.equal(first, second)
    assert bool([name for name in hub.files("me/model") if name.startswith("preprocessor")]) == (not model.embeds_in_memory)
    large = [asked for asked in hub.asked if asked.startswith("PUT /large/")]
    assert len(large) == 1, "weights go as a large file"
    names = usage(hub.files("me/model")["README.md"].decode())
    promised = {"queries": 8, "gallery": model.config.embedding_dim, "embeds": model.config.embedding_dim}
    found = next(name for name in promised if name in names)
    assert names[found].shape[1] == promised[found] and (found == "embeds") == (not model.compatible_with)


@pytest.mark.parametrize("architecture", mostly_nightly([*ARCHITECTURES, "vit"], ("clip", "open_clip", "vit").__contains__))
def test_adapters_alone_are_the_whole_model(
    architecture: str,
    encoder_of: dict[str, str],
    images: list[Image.Image],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    more = {"train_encoder": "layer_norm"} if architecture == "clip" else {}
    model = build("bct" if architecture == "vit" else "xbt", {"clip": encoder_of[architecture]}, adapters=ADAPTERS, **more)
    shake(model)
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    model.save_pretrained(whole)
    model.leave_out_base().export(alone)
    first, second = AutoModel.from_pretrained(whole), AutoModel.from_pretrained(alone)
    assert first.fingerprint() == second.fingerprint() == model.fingerprint()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    for own, loaded, rebuilt in zip(*(embeddings(each, images) for each in (model, first, second)), strict=True):
        assert torch.equal(own, loaded) and torch.equal(loaded, rebuilt)
    assert "XbtModel LOAD REPORT" not in caplog.text, "what comes from the base is not missed"
    kept = set(load_file(alone / "model.safetensors"))
    left_out = set(load_file(whole / "model.safetensors")) - kept
    assert {name for name in kept if "lora_" in name} and not {name for name in kept if "base_layer" in name}
    assert any(name.startswith("encoder.") and "norm" in name for name in kept) == (architecture == "clip")
    trained, again = ({name for name, p in each.named_parameters() if p.requires_grad} for each in (model, second))
    assert trained == again or architecture != "clip"
    assert all(name.startswith("encoder.model.") for name in left_out) and len(left_out) > 20


def test_peft_reads_the_lora_of_adapters_alone(folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    model = build("xbt", folder_of, adapters={"lora": {"rank": 2, "dropout": 0.1}})
    shake(model)
    model.leave_out_base().export(tmp_path / "alone")
    modes = {(tmp_path / "alone" / "lora" / name).stat().st_mode for name in ("adapter_config.json", "adapter_model.safetensors")}
    assert len(modes) == 1, "whoever may read the configuration may read the weights"
    base = CLIPModel.from_pretrained(folder_of["clip"])
    pixels = model.processor.images(images)
    with torch.inference_mode():
        plain = base.get_image_features(pixel_values=pixels).pooler_output
        adapted = PeftModel.from_pretrained(base, tmp_path / "alone", subfolder="lora").eval()
        found = adapted.base_model.model.get_image_features(pixel_values=pixels).pooler_output
        expected = model.eval().encoder.image_features(pixels)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-3)
    model.merge_adapters().export(tmp_path / "merged")
    assert not (tmp_path / "merged" / "lora").exists(), "there is no LoRA any more"


def test_adapters_stay_with_the_commit_of_their_base(
    hub: Hub, on_hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_xcompat: Run
) -> None:
    model = build("xbt", on_hub)
    shake(model)
    trained_on = hub.repos["base/clip"].branches["main"]
    model.export(tmp_path / "model")
    run_xcompat.output("push", tmp_path / "model", "me/adapters", "--adapters-only")
    hub.add("base/clip", save_stand_in(tmp_path / "other", "clip", 16, seed=9))
    assert json.loads(hub.files("me/adapters")["config.json"])["encoder"]["revision"] == trained_on
    assert AutoModel.from_pretrained("me/adapters").fingerprint() == model.fingerprint(), "main has moved on, the commit has not"
    with monkeypatch.context() as cut_off:  # undone before the Hub goes: else tests after this one would be online
        cut_off.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert AutoModel.from_pretrained("me/adapters").fingerprint() == model.fingerprint(), "all of it is in the cache"


def test_a_base_that_changed_is_refused(folder_of: dict[str, str], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder_of["clip"], base)
    model = build("xbt", {"clip": str(base)})
    model.leave_out_base().export(tmp_path / "adapters")
    shutil.copytree(save_stand_in(tmp_path / "other", "clip", 16, seed=9), base, dirs_exist_ok=True)
    refusal = rf"these adapters need {base}@\w{{12}}, but the base {base} is {base}@\w{{12}}; "
    with refusing(refusal, FingerprintMismatchError):
        AutoModel.from_pretrained(tmp_path / "adapters")
    with pytest.raises(FingerprintMismatchError, match="these adapters need"):
        model.save_pretrained(tmp_path / "again")
    shutil.rmtree(base)
    refuses(f"the base {base} of these adapters is unavailable", AutoModel.from_pretrained, tmp_path / "adapters")


def test_a_revision_is_that_commit(hub: Hub, on_hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("xbt", on_hub)
    model.export(tmp_path / "model")
    first = hub.add("me/model", tmp_path / "model")
    (tmp_path / "model" / CHECKSUMS).unlink()
    settings = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1] * 3}))
    hub.add("me/model", tmp_path / "model")
    pulled = AutoModel.from_pretrained("me/model", revision=first)
    assert pulled.fingerprint() == model.fingerprint() and pulled.revision == first
    assert AutoModel.from_pretrained("me/model").fingerprint() != model.fingerprint(), "its preprocessing is another"
    pinned, newest = load_embedder(f"me/model@{first}"), load_embedder("me/model")
    assert pinned.processor.mean != newest.processor.mean
    assert is_checkpoint(f"me/model@{first}") and load_checkpoint(f"me/model@{first}").revision == first
    assert EncoderSource(name=f"hf-hub:me/model@{first}").revision == first
    refuses("0123456789ab looks like an xcompat fingerprint; use a branch", load_encoder, "base/clip@0123456789ab")
    (tmp_path / "photo-model-0.5").mkdir()
    monkeypatch.chdir(tmp_path)
    refuses("there is no folder photo-model-0.33 either; did you mean 'photo-model-0.5'", load_encoder, "photo-model-0.33")
    (tmp_path / "me@home").mkdir()
    assert EncoderSource(name=str(tmp_path / "me@home")).revision is None
    with pytest.raises(ValueError, match="contains a revision"):
        EncoderSource(name="me/model@one", revision="two")


Finish = Callable[..., Path]


@pytest.fixture
def finished(hub: Hub, tmp_path: Path, on_hub: dict[str, str]) -> Finish:
    """Return a function that writes what a run of two stages leaves behind, with a good or a bad verdict."""

    def write(compatible: bool = True, method: str = "xbt", **options: Any) -> Path:
        folder = tmp_path / "run"
        hub.datasets.add("nlphuji/flickr30k")
        model = build(method, on_hub, **options)
        shake(model)
        build("projection", on_hub).export(folder / "phi" / "model")
        model.export(folder / "pair" / "model")
        data = {
            "pairs": {"path": "nlphuji/flickr30k"},
            "images": {"path": "photos/../../../home/alice"},
            "test": {"path": str(tmp_path / "photos")},
            "texts": [{"path": "my/texts"}],
        }
        for name, projection in (("phi", None), ("pair", "stage:phi")):
            recipe = {"name": name, "method": method, "projection": projection, "data": data, "training": {"max_steps": 7}}
            recipe["old"] = {"name": "sentence-transformers:/home/alice/secret/old"}
            recipe["new"] = {"name": "hf-hub:laion/clip"}
            (folder / name / "recipe.yaml").write_text(yaml.safe_dump(recipe))
            environment = {"machine": {"device": "A Processor, 2 cores"}, "versions": {"torch": "2.15"}, "command": str(tmp_path)}
            (folder / name / "environment.json").write_text(json.dumps(environment))
            (folder / name / "done.json").write_text(json.dumps({"seconds": 90.0}))
        gain = 0.1 if compatible else -0.1
        cases = [
            Case(query, "old", "text-to-image", 50, 60, {"recall@1": value}, {"recall@1": (value - 0.05, value + 0.05)})
            for query, value in (("old", 0.5), ("new", 0.5 + gain))
        ]
        failed = [] if compatible else ["text-to-image recall@1: new/old 0.4000 <= old/old 0.5000"]
        gains = [Difference("text-to-image", "recall@1", gain, (gain - 0.02, gain + 0.02))]
        criterion = Criterion(compatible, None, failed, gains)
        new = ModelInfo("pair", model.fingerprint().digest, 16)
        report = Report(ModelInfo("old", "0" * 64, 8), new, method, cases, criterion, {"phi": 1.0, "pair": 90.0}, {})
        save_report(folder, report)
        return folder

    return write


@pytest.mark.parametrize(("compatible", "verdict"), [(True, "yes"), (False, "no")])
def test_the_card_says_what_the_report_says(compatible: bool, verdict: str, finished: Finish, hub: Hub, tmp_path: Path) -> None:
    folder = finished(compatible)
    model = AutoModel.from_pretrained(folder / "pair" / "model")
    push(folder, "me/pair", license="mit")
    text = hub.files("me/pair")["README.md"].decode()
    stored = [model.lineage.embeds.fingerprint.digest, model.lineage.stores.fingerprint.digest]
    found_by = [f"searches:{each.digest[:32]}" for each in (OLD, OLDER)] + [f"embeds:{digest[:32]}" for digest in stored]
    card = ModelCard(text).data.to_dict()
    (result,) = card.pop("model-index")[0]["results"]
    gain = 0.1 if compatible else -0.1
    values = {metric["args"]["case"]: metric["value"] for metric in result["metrics"]}
    assert values == pytest.approx({"old/old": 0.5, "new/old": 0.5 + gain, "gain": gain})
    assert result["metrics"][-1]["args"]["ci95"] == pytest.approx([gain - 0.02, gain + 0.02])
    assert result["dataset"] == {"type": "unknown", "name": "photos", "config": "text-to-image"}
    assert card == {
        "library_name": "xcompat",
        "pipeline_tag": "feature-extraction",
        "tags": ["xcompat", "xbt", "backward-compatible", *found_by],
        "method": "xbt",
        "embeds": stored,
        "license": "mit",
        "base_model": "base/clip",
        "base_model_relation": "finetune",
        "datasets": ["nlphuji/flickr30k"],
        "fingerprint": model.fingerprint().digest,
        "compatible_with": [{"name": each.name, "fingerprint": each.digest, "dim": 8} for each in (OLD, OLDER)],
    }
    for wanted in (
        f"Backward compatible: {verdict}.",
        "| **new/old** | 60.0 (55.0 to 65.0) |" if compatible else "| **new/old** | 40.0 (35.0 to 45.0) |",
        model.citation,
        "Data, test: photos",
        "Training time: 1.5 minutes on A Processor, 2 cores",
        "License: mit; base model: unknown",
    ):
        assert wanted in text, wanted
    assert compatible or "- Failed: text to image R@1: new/old 40.0 % <= old/old 50.0 %" in text
    recipes = list(yaml.safe_load_all(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0]))
    assert [recipe["name"] for recipe in recipes] == ["phi", "pair"] and recipes[1]["training"] == {"max_steps": 7}
    assert (recipes[1]["old"], recipes[1]["new"]) == ({"name": "old"}, {"name": "hf-hub:laion/clip"})
    assert "home" not in text and "secret" not in text
    for name, content in hub.files("me/pair").items():
        assert str(tmp_path).encode() not in content, f"{name} names a folder of this machine"


def test_names_are_shown_without_the_folders_of_this_machine() -> None:
    for name, expected in (
        ("sentence-transformers:/home/alice/secret/e5", "e5"),
        ("sentence-transformers:../models/e5", "models/e5"),
        ("file:///home/alice/0.tar", "0.tar"),
        ("photos/../../../home/alice", "alice"),
        ("./photos/../texts", "texts"),
        ("pipe:/home/alice/bin/fetch 0.tar", "pipe:fetch ..."),
        *((name, name) for name in ("sentence-transformers:intfloat/e5-small", "stage:phi", "a photo of a {}..")),
    ):
        assert anonymise_name(name) == expected


def test_the_base_states_licence_and_privacy(finished: Finish, hub: Hub) -> None:
    folder = finished()
    base = hub.repos["base/clip"]
    base.commit(hub.files("base/clip") | {"README.md": b"---\nlicense: openrail\n---\n"})
    push(folder, "me/open")
    assert not hub.repos["me/open"].private
    assert "License: unknown; base model: openrail" in hub.files("me/open")["README.md"].decode()
    base.gated = "manual"
    push(folder, "me/gated")
    push(folder, "me/public", private=False)
    assert hub.repos["me/gated"].private and not hub.repos["me/public"].private
    AutoModel.from_pretrained(folder / "pair" / "model").push_to_hub("me/python")
    assert hub.repos["me/python"].private
    base.gated = False
    push(folder, "me/gated")
    assert hub.repos["me/gated"].private, "stays as it is"


def test_a_repository_that_exists_stays_as_private_as_it_is(finished: Finish, hub: Hub) -> None:
    folder = finished()
    for is_private, wanted, is_gated, reason in (
        (False, True, False, "me/pair is public, but --private, or a base .* requires private; make .* private .* --public"),
        (False, None, True, "me/pair is public, but --private, or a base that is gated or private, requires private"),
        (True, False, False, "me/pair is private, but --public requires public; make the repository public .* --private"),
    ):
        hub.repos["me/pair"] = Repository(is_private)
        hub.repos["me/pair"].commit({".gitattributes": b""})
        hub.repos["base/clip"].gated = is_gated
        for overwrite in (False, True):
            refuses(reason, push, folder, "me/pair", private=wanted, overwrite=overwrite)
        assert len(hub.repos["me/pair"].commits) == 1 and hub.repos["me/pair"].private == is_private
        push(folder, "me/pair", private=is_private)


def test_a_map_over_embeddings_alone_has_a_card(hub: Hub, folder_of: dict[str, str]) -> None:
    alone = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, dim=8), embedding_dim=16))
    for model in (alone, build("fct", folder_of, side_info=describe_old(OLDER, dim=4))):
        model.push_to_hub(f"me/{model.config.model_type}")
        text = hub.files(f"me/{model.config.model_type}")["README.md"].decode()
        usage(text)
        assert "base_model" not in ModelCard(text).data.to_dict() and folder_of["clip"] not in text


def test_forms_of_one_run_share_a_place(finished: Finish, hub: Hub, images: list[Image.Image]) -> None:
    folder = finished()
    whole = AutoModel.from_pretrained(folder / "pair" / "model")
    push(folder, "me/pair")
    commit = hub.repos["me/pair"].branches["main"]
    push(folder, "me/pair")
    assert hub.repos["me/pair"].branches["main"] == commit, "nothing has changed, so nothing is committed"
    size = len(hub.files("me/pair")["model.safetensors"])
    push(folder, "me/pair", "adapters")
    assert len(hub.files("me/pair")["model.safetensors"]) < size / 4
    assert "only adapters, prompts and heads" in hub.files("me/pair")["README.md"].decode()
    assert AutoModel.from_pretrained("me/pair").fingerprint() == whole.fingerprint()
    push(folder, "me/pair", "merged", revision="merged")
    merged = AutoModel.from_pretrained("me/pair", revision="merged")
    assert merged.config.adapters["lora"] is None and merged.compatible_with == whole.compatible_with
    pixels = whole.processor.images(images)
    torch.testing.assert_close(merged.embed_images(pixels), whole.embed_images(pixels), atol=1e-5, rtol=0)
    assert "Measured before LoRA was merged" in hub.files("me/pair", "merged")["README.md"].decode()
    assert AutoModel.from_pretrained("me/pair").fingerprint() == whole.fingerprint(), "the default branch is as it was"


def drawn_memory(dim: int, other_dim: int) -> QueryMemory:
    memory = QueryMemory(dim, other_dim, entries=3)
    torch.nn.init.normal_(memory.keys_KD)
    torch.nn.init.normal_(memory.values_Kd)
    return memory


@torch.no_grad()
@pytest.mark.parametrize("memory", ["transform", "none"])
def test_what_queries_remember_may_stay_at_home(memory: MemoryParts, hub: Hub, on_hub: dict[str, str], tmp_path: Path) -> None:
    model = build("ridge", on_hub)
    remembered = drawn_memory(model.config.embedding_dim, model.config.old["dim"])
    remembered.metric = LearnedTransform.solve(torch.ones(8) / 8, torch.diag(torch.arange(1.0, 9.0)), 0.5, 0.1)
    model.remember(remembered.calibrate(3.0, -1.0)).export(tmp_path / "model")
    push(tmp_path / "model", "me/whole")
    push(tmp_path / "model", "me/part", memory=memory)
    whole, part = AutoModel.from_pretrained("me/whole"), AutoModel.from_pretrained("me/part")
    held = [name for name in load_file_of(hub, "me/part", tmp_path) if "memory" in name and "transform" not in name.split(".")[1]]
    assert whole.memory is not None and "3 remembered" not in hub.files("me/part")["README.md"].decode()
    assert (part.memory is None) == (memory == "none") and (held == [] or part.memory.settings["entries"] == 0)
    embeds = torch.randn(5, model.config.embedding_dim, generator=torch.Generator().manual_seed(0))
    plain = whole.to_space_without_memory(embeds)
    torch.testing.assert_close(part.to_space(embeds), plain if memory == "none" else whole.memory.metric(plain))
    torch.testing.assert_close(whole.confidence(embeds), torch.sigmoid(3 * remembered.recall(embeds).norm(dim=1) - 1))
    assert part.confidence(embeds) is None, "how sure a query is goes with what it remembers"
    assert part.lineage.stores == whole.lineage.stores, "galleries stay its own"
    model.remember(None).export(tmp_path / "plain")
    refuses(f"has no memory; remove --memory {memory}", push, tmp_path / "plain", "me/plain", memory=memory)


@torch.no_grad()
def test_what_a_map_of_galleries_remembers_may_stay_at_home(hub: Hub, on_hub: dict[str, str], tmp_path: Path) -> None:
    model = build("fct", on_hub)
    model.remember(drawn_memory(model.config.old["dim"], model.config.embedding_dim)).export(tmp_path / "model")
    with pytest.raises(XcompatError, match="maps galleries, which have no learned transform; use --memory none"):
        push(tmp_path / "model", "me/part", memory="transform")
    push(tmp_path / "model", "me/whole")
    push(tmp_path / "model", "me/part", memory="none")
    said, kept = (hub.files(name)["README.md"].decode() for name in ("me/whole", "me/part"))
    assert "Training data in this repository: 3 class means by the old model" in said and "class means" not in kept
    assert not [name for name in load_file_of(hub, "me/part", tmp_path) if "memory" in name]
    part, stored = AutoModel.from_pretrained("me/part"), torch.randn(5, model.config.old["dim"])
    torch.testing.assert_close(part.upgrade(stored), model.own_upgrade(stored))
    assert part.lineage.stores == model.lineage.stores, "queries and native items stay its own"


def load_file_of(hub: Hub, repo: str, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "weights.safetensors").write_bytes(hub.files(repo)["model.safetensors"])
    return load_file(folder / "weights.safetensors")


def test_another_model_is_not_replaced(finished: Finish, hub: Hub, on_hub: dict[str, str]) -> None:
    folder = finished()
    build("ridge", on_hub).push_to_hub("me/ridge")
    hub.add("me/clip", folder / "phi" / "model")
    before = hub.files("me/ridge")
    reason = "me/ridge contains another model: its method is xcompat-ridge, not xcompat-xbt; .*--overwrite"
    refuses(reason, push, folder, "me/ridge")
    refuses("me/ridge contains another model", AutoModel.from_pretrained(folder / "pair" / "model").push_to_hub, "ridge")
    refuses("base/clip contains another model", push, folder, "base/clip")
    hub.repos["me/notes"] = Repository()
    hub.repos["me/notes"].commit({"README.md": b"", "thesis.pdf": b""})
    refuses(r"me/notes contains other files, e.g. thesis.pdf", push, folder, "me/notes")
    assert hub.files("me/ridge") == before
    push(folder, "me/notes", overwrite=True)
    assert "thesis.pdf" not in hub.files("me/notes")
    push(folder, "me/ridge", overwrite=True)
    assert AutoModel.from_pretrained("me/ridge").config.model_type == "xcompat-xbt"
    other = build("ridge", on_hub)
    other.config.old["fingerprint"] = OLDER.digest
    build("ridge", on_hub).push_to_hub("me/old")
    refuses(f"its old is {OLD.digest[:12]}, not {OLDER.digest[:12]}", other.push_to_hub, "me/old")
    hub.repos["me/old"].commit(hub.files("me/old") | {"merges.txt": b"of another model"})
    other.push_to_hub("me/old", overwrite=True)
    assert "merges.txt" not in hub.files("me/old")


def test_what_lies_beside_a_model_stays_and_its_old_weights_go(finished: Finish, hub: Hub) -> None:
    folder = finished()
    push(folder, "me/pair")
    theirs = {"LICENSE", "experiments/other/model.safetensors", "galleries/first.safetensors"}
    old = {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "lora/old.safetensors"}
    hub.repos["me/pair"].commit(hub.files("me/pair") | dict.fromkeys(theirs | old, b"mine"))
    push(folder, "me/pair")
    assert {name for name in theirs | old if name in hub.files("me/pair")} == theirs


def test_a_plain_encoder_is_pushed_as_it_is(hub: Hub, folder_of: dict[str, str], tmp_path: Path) -> None:
    mine = {"optimizer.pt", ".env", "notes.txt", "checkpoint-5/model.safetensors", "LICENSE"}
    for architecture in ("clip", "open_clip"):
        folder = Path(shutil.copytree(folder_of[architecture], tmp_path / architecture / "model"))
        model = {path.name for path in folder.iterdir()}
        (folder / "checkpoint-5").mkdir()
        for name in mine:
            (folder / name).write_text("mine")
        push(folder, f"me/{architecture}")
        push(folder, f"me/{architecture}")
        assert model <= hub.files(f"me/{architecture}").keys() and mine & hub.files(f"me/{architecture}").keys() == {"LICENSE"}
        text = hub.files(f"me/{architecture}")["README.md"].decode()
        encoder, processor = load_encoder(f"{'hf-hub:' * (architecture == 'open_clip')}me/{architecture}")
        assert ModelCard(text).data.to_dict()["fingerprint"] == encoder.fingerprint(processor).digest
        assert usage(text)["embeds"].shape == (1, 16)
    other = save_stand_in(tmp_path / "other", "clip", 16, seed=9)
    refuses("me/clip contains another model: its fingerprint is", push, other, "me/clip")


def test_impossible_push_forms(hub: Hub, folder_of: dict[str, str], tmp_path: Path) -> None:
    for method, form, reason in (
        ("bct", "adapters", "trained without adapters"),
        ("bct", "merged", "no LoRA to merge"),
        ("independent", "adapters", "is a plain encoder"),
        ("ridge", "adapters", "is a map without encoder"),
        ("xbt", "adapters", "is a local folder, so others cannot load it; push the whole model"),
    ):
        build(method, folder_of).export(tmp_path / "model")
        refuses(reason, push, tmp_path / "model", "me/model", form)
        assert "me/model" not in hub.repos


def test_the_model_of_a_run_and_its_report_are_found(finished: Finish, hub: Hub, tmp_path: Path) -> None:
    folder = finished()
    assert find_model(folder) == folder / "pair" / "model" == find_model(folder / "pair")
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").unlink()
    refuses(r"contains several models \(pair, phi\); choose one", push, folder, "me/pair")
    refuses("contains no model", push, tmp_path / "nowhere", "me/pair")
    report["new"]["fingerprint"] = "1" * 64  # of another model
    (folder / "report.json").write_text(json.dumps(report))
    push(folder, "me/pair")
    text = hub.files("me/pair")["README.md"].decode()
    assert "No report was pushed with this model" in text and "Backward compatible" not in text


def write_config(folder: Path, old: dict[str, Any] | None = None, model_type: str = "xcompat-bct") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "embedding_dim": 16, "old": old}))
    return str(folder)


def named(name: str, *older: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Describe a model as a newer one does: its fingerprint is made of its name."""
    described = describe_old(Fingerprint.from_string(name), dim=8) | more
    return described | {"compatible_with": [{key: each[key] for key in ("name", "fingerprint", "dim")} for each in older]}


def lines(name: str) -> list[str]:
    def walk(model: Ancestor, depth: int) -> Iterator[str]:
        yield "  " * depth + f"{model.name} ({model.kind})"
        for each in model.older:
            yield from walk(each, depth + 1)

    return list(walk(trace_lineage(name), 0))


def test_a_chain_is_followed_through_hub_and_folders(hub: Hub, on_hub: dict[str, str], tmp_path: Path) -> None:
    first = named("base/clip")
    local = write_config(tmp_path / "v1" / "model", first)
    second = named(local, first)
    hub.add("me/v2", write_config(tmp_path / "v2", second))
    stray = named(write_config(tmp_path / "stray", model_type="clip"))
    hub.add("me/v3", write_config(tmp_path / "v3", named("me/v2", second, first, stray)))
    expected = ["me/v3 (bct)", "  me/v2 (bct)", f"    {local} (bct)", "      base/clip (encoder)", f"  {stray['name']} (encoder)"]
    assert lines("me/v3") == expected
    assert lines(str(tmp_path / "v1")) == [f"{tmp_path / 'v1'} (bct)", "  base/clip (encoder)"]
    require_whole(trace_lineage("me/v3"))
    np.save(tmp_path / "image_embeds.npy", np.eye(2))
    assert lines(write_config(tmp_path / "v4", named(str(tmp_path))))[1] == f"  {tmp_path} (embeddings)"


def test_missing_links_and_circles_are_named(hub: Hub, on_hub: dict[str, str], tmp_path: Path) -> None:
    first, gone = named("base/clip"), named("me/gone")
    hub.add("me/v3", write_config(tmp_path / "v3", named("me/gone", first)))
    assert lines("me/v3") == ["me/v3 (bct)", "  me/gone ()", "  base/clip (encoder)"]
    moved = write_config(tmp_path / "v4", named("/no/such/model", gone))
    pinned = write_config(tmp_path / "v5", named("base/clip", revision="v1.0"))
    for name, said in (
        ("me/v3", f"the lineage of me/v3 is broken: me/gone is neither a folder here nor on {hub.url}"),
        (moved, r"/no/such/model is neither a folder here nor a name on the Hub \(and 1 more\)"),
        (pinned, "base/clip@v1.0 is neither a folder here nor on"),
    ):
        refuses(said, require_whole, trace_lineage(name))
    refuses("^me/nowhere is neither", trace_lineage, "me/nowhere")
    hub.add("me/a", write_config(tmp_path / "a", named("me/b")))
    hub.add("me/b", write_config(tmp_path / "b", named("me/a")))
    assert lines("me/a") == ["me/a (bct)", "  me/b (bct)", "    me/a (bct)"]
    refuses("the lineage of me/a is broken: it leads in a circle, me/a → me/b → me/a;", require_whole, trace_lineage("me/a"))


def test_an_older_model_that_changed_is_noticed(hub: Hub, on_hub: dict[str, str]) -> None:
    old = build("ridge", on_hub)
    old.push_to_hub("me/old")
    described = load_embedder("me/old").describe_old()
    METHODS["ridge"].from_encoder("base/clip", old=described).push_to_hub("me/new")
    old.weight.data += 1
    old.push_to_hub("me/old")
    assert [line.strip() for line in lines("me/new")] == ["me/new (ridge)", "me/old (ridge)", "old ()", "older ()"]
    del described["revision"]
    METHODS["ridge"].from_encoder("base/clip", old=described).push_to_hub("me/newer")
    refuses(f"me/old is another model now .*, not {described['fingerprint'][:12]}", require_whole, trace_lineage("me/newer"))


def test_transformers_own_ways_to_push(hub: Hub, folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("xbt", folder_of)
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/saved", commit_message="First", license="mit")
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"} <= hub.files("me/saved").keys()
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["encoder"]["name"] == folder_of["clip"], "stays as it is"
    assert json.loads(hub.files("me/saved")["config.json"])["encoder"]["name"] == "clip"
    assert not (tmp_path / "saved" / "README.md").exists()
    model.leave_out_base().push_to_hub("me/adapters")
    pushed = hub.files("me/adapters")
    read = json.loads(pushed["lora/adapter_config.json"])
    assert read["base_model_name_or_path"] == "clip" and "lora/adapter_model.safetensors" in pushed
    assert not any(folder_of["clip"].encode() in content for content in (*pushed.values(), *hub.files("me/saved").values()))
    model = build("xbt", folder_of)
    model.push_to_hub("me/saved", tags=["photos"], commit_message="Again", revision="second", max_shard_size="100KB")
    card = ModelCard(hub.files("me/saved", "second")["README.md"].decode())
    assert card.data.tags[:4] == ["xcompat", "xbt", "backward-compatible", "photos"]
    assert AutoModel.from_pretrained("me/saved", revision="second").fingerprint() == model.fingerprint()
    assert "model.safetensors" not in hub.files("me/saved", "second"), "which would be read in the place of its shards"
    assert json.loads(hub.files("me/saved", "second")["model.safetensors.index.json"])
    hub.token = "hf_of_somebody"
    refuses("hf auth login", model.push_to_hub, "me/other")
    model.push_to_hub("me/other", token="hf_of_somebody")
    assert "README.md" in hub.files("me/other")


def test_a_folder_that_was_pushed_is_named_by_its_place(hub: Hub, on_hub: dict[str, str], tmp_path: Path) -> None:
    base, first, second = (str(tmp_path / name / "model") for name in ("base", "v1", "v2"))
    save_stand_in(base, "clip", 16, seed=3)
    build("ridge", {"clip": base}).export(first)
    METHODS["ridge"].from_encoder(base, old=load_embedder(first).describe_old()).export(second)
    push(base, "me/base")
    push(first, "me/v1")
    push(second, "me/v2")
    config = json.loads(hub.files("me/v2")["config.json"])
    for role, repo in (("encoder", "me/base"), ("old", "me/v1")):
        assert (config[role]["name"], config[role]["revision"]) == (repo, hub.repos[repo].branches["main"])
    card = ModelCard(hub.files("me/v2")["README.md"].decode()).data.to_dict()
    assert card["base_model"] == "me/base" and card["compatible_with"][0]["name"] == "me/v1"
    assert lines("me/v2")[:2] == ["me/v2 (ridge)", "  me/v1 (ridge)"]
    assert AutoModel.from_pretrained("me/v2").fingerprint() == AutoModel.from_pretrained(second).fingerprint()
    assert "pushed.json" not in hub.files("me/base").keys() | hub.files("me/v2").keys()


def test_a_push_from_a_folder_that_cannot_be_written_to_succeeds(
    hub: Hub, folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("xcompat.training.push.record_push", fail)
    assert hub.url in push(folder_of["clip"], "me/clip") and "model.safetensors" in hub.files("me/clip")
    said = "".join(capsys.readouterr())
    assert "cannot write to" in said
    assert "(Read-only file system): newer models will name this folder, not me/clip" in said

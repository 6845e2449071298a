"""Captions that a model writes: one for each image, whatever is killed, and read by a recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
import warm
from conftest import invoke, refuses
from data_layouts.images import draw
from PIL import Image
from schedule import mostly_nightly
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from xcompat import XcompatError, captioning
from xcompat.captioning import Captioner, write_captions
from xcompat.data import LabelledSource, PairSource, load_labelled

WORDS = ["[PAD]", "[BOS]", "[EOS]", *["a", "dog", "cat", "on", "the", "red", "blue", "grass", "runs", "sits"]]
WORDS += ["with", "hat", "photo", "of", "USER", "ASSISTANT"]
IMAGE = "<image>"
PADS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VISION = {**SIZE, "image_size": 16, "patch_size": 8}
PIXELS = {"height": 16, "width": 16}
CHAT = (
    "{% for message in messages %}USER {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT{% endif %}"
)


def tokenizer(*more: str, text: str = "[BOS] $A [EOS]") -> transformers.PreTrainedTokenizerFast:
    """Return one of whole words, which puts a text ``$A`` between other tokens."""
    words = [*WORDS, *more]
    made = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single=text, special_tokens=[("[BOS]", 1), ("[EOS]", 2)])
    names = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "cls_token": "[BOS]", "sep_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=list(more), **names)


def save(folder: Path, model: nn.Module, processor: object) -> str:
    """Write both, of weights so large that images differ."""
    for parameter in model.parameters():
        parameter.data.mul_(20)
    model.save_pretrained(folder)  # type: ignore[operator]
    processor.save_pretrained(folder)  # type: ignore[attr-defined]
    return str(folder)


def blip(folder: Path) -> str:
    text = {**SIZE, **ENDS, "vocab_size": len(WORDS), "encoder_hidden_size": 16, "sep_token_id": 2, "projection_dim": 16}
    config = transformers.BlipConfig(text_config=text, vision_config={**VISION, "projection_dim": 16}, projection_dim=16)
    processor = transformers.BlipProcessor(transformers.BlipImageProcessor(size=PIXELS), tokenizer())
    return save(folder, transformers.BlipForConditionalGeneration(config), processor)


def git(folder: Path) -> str:
    config = transformers.GitConfig(vision_config=VISION, **SIZE, **ENDS, vocab_size=len(WORDS), max_position_embeddings=64)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=PIXELS)
    return save(folder, transformers.GitForCausalLM(config), transformers.GitProcessor(images, tokenizer()))


def pix2struct(folder: Path) -> str:
    width = {"hidden_size": 16, "d_kv": 8, "d_ff": 32}
    text = {**width, **ENDS, "vocab_size": len(WORDS), "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    vision = {**width, "patch_embed_hidden_size": 768, "num_hidden_layers": 1, "num_attention_heads": 2, "seq_len": 2048}
    model = transformers.Pix2StructForConditionalGeneration(transformers.Pix2StructConfig(text_config=text, vision_config=vision))
    images = transformers.Pix2StructImageProcessor(is_vqa=False)
    return save(folder, model, transformers.Pix2StructProcessor(images, tokenizer(text="$A [EOS]")))


def llava(folder: Path, template: str | None = CHAT.replace("IMAGE", IMAGE)) -> str:
    llama = transformers.LlamaConfig(**SIZE, **ENDS, vocab_size=len(WORDS) + 1)
    towers = {"vision_config": transformers.CLIPVisionConfig(**VISION, projection_dim=16), "text_config": llama}
    config = transformers.LlavaConfig(**towers, image_token_index=len(WORDS), vision_feature_layer=-1)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=PIXELS)
    patches = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    words = tokenizer(IMAGE, text="$A")
    processor = transformers.LlavaProcessor(images, words, **patches, chat_template=template, image_token=IMAGE)
    return save(folder, transformers.LlavaForConditionalGeneration(config), processor)


def qwen2_vl(folder: Path) -> str:
    """Return one whose questions are longer for larger images."""
    rows = {name: len(WORDS) + row for row, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    rope = {"type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZE, **ENDS, "num_key_value_heads": 2, "vocab_size": len(WORDS) + 4, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        **{f"{name}_token_id": row for name, row in rows.items()},
    )
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(patch_size=4, min_pixels=64, max_pixels=1024),
        tokenizer(*PADS, text="$A"),
        video_processor=transformers.Qwen2VLVideoProcessor(patch_size=4),
        chat_template=CHAT.replace("IMAGE", f"{PADS[2]}{PADS[0]}{PADS[3]}"),
    )
    return save(folder, transformers.Qwen2VLForConditionalGeneration(config), processor)


def vision_encoder_decoder(folder: Path) -> str:
    size = {**SIZE, "vocab_size": len(WORDS), "max_position_embeddings": 64}
    decoder = transformers.BertConfig(**size, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(transformers.ViTConfig(**VISION), decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    model = transformers.VisionEncoderDecoderModel(config)
    for name, token in {**ENDS, "decoder_start_token_id": 1}.items():
        setattr(model.generation_config, name, token)
    tokenizer().save_pretrained(folder)
    return save(folder, model, transformers.ViTImageProcessor(size=PIXELS))


def make(kind: Callable[[Path], str], folder: Path) -> str:
    transformers.set_seed(0)
    return kind(folder)


@pytest.fixture(scope="module")
def captioner_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(vision_encoder_decoder, tmp_path_factory.mktemp("captioner"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for row in range(11):
        draw(folder / ("cat" if row % 2 else "dog") / f"{row:02}.png")
    return folder


def lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_image_gets_the_caption_it_gets_alone(captioner_folder: str, photos: Path, tmp_path: Path) -> None:
    captioner = Captioner(captioner_folder, max_tokens=6)
    source = PairSource(path=str(photos), captions=False)
    assert write_captions(source, captioner, tmp_path / "captions.jsonl", batch_size=4) == 11
    found = lines(tmp_path / "captions.jsonl")
    assert len({row["id"] for row in found}) == 11 and len({row["caption"] for row in found}) > 3
    for row in found:
        assert captioner([Image.open(photos / row["id"]).convert("RGB")]) == [row["caption"]]
    assert not (tmp_path / "captions.jsonl.parts").exists()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a\u2028b.png").write_bytes((photos / "cat" / "01.png").read_bytes())
    write_captions(PairSource(path=str(tmp_path / "odd"), captions=False), captioner, tmp_path / "odd.jsonl")
    assert json.loads((tmp_path / "odd.jsonl").read_text())["id"] == "a\u2028b.png", "Unicode calls it a line separator"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_resume_after_kill(captioner_folder: str, photos: Path, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captioning, "ROWS", 4)
    captioner, source = Captioner(captioner_folder, max_tokens=6), PairSource(path=str(photos), captions=False)
    write_captions(source, captioner, tmp_path / "whole.jsonl")
    parts, asked, limit = captioning._lines, list[int](), 4 * at

    def counted(images: object, start: int, *rest: object) -> object:
        if start == limit:
            raise KeyboardInterrupt
        asked.append(start)
        return parts(images, start, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(captioning, "_lines", counted)
    with pytest.raises(KeyboardInterrupt):
        write_captions(source, captioner, tmp_path / "cut.jsonl")
    assert not (tmp_path / "cut.jsonl").exists()
    done, limit = len(list((tmp_path / "cut.jsonl.parts").glob("*.jsonl"))), -1
    asked.clear()
    longer = Captioner(captioner_folder, max_tokens=7)
    refuses("parts with other max_tokens", write_captions, source, longer, tmp_path / "cut.jsonl")
    write_captions(source, captioner, tmp_path / "cut.jsonl")
    assert len(asked) == 3 - done and done == at
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_cannot_be_captioned(captioner_folder: str, photos: Path, tmp_path: Path, folder_of: dict[str, str]) -> None:
    source, out = PairSource(path=str(photos), captions=False), tmp_path / "out.jsonl"
    captioner = Captioner(captioner_folder, max_tokens=4)
    parts = out.with_name("out.jsonl.parts")
    with mock.patch.object(captioning, "barrier", side_effect=lambda: parts.exists() and out.write_text("mine")):
        refuses("out.jsonl exists; choose another file", write_captions, source, captioner, out)
    assert out.read_text() == "mine"
    refuses("is a folder; choose a file for the captions", write_captions, source, captioner, tmp_path, overwrite=True)
    refuses("is a clip and writes no captions; choose a captioner", Captioner, folder_of["clip"])
    refuses("cannot be loaded as a captioner", Captioner, str(tmp_path))
    (tmp_path / "mixed" / "cat").mkdir(parents=True)
    (tmp_path / "mixed" / "cat" / "a.png").write_bytes(b"no image")
    (tmp_path / "mixed" / "cat" / "b.png").write_bytes((photos / "cat" / "01.png").read_bytes())
    with pytest.raises(XcompatError, match="1 of 2 images cannot be read"):
        write_captions(PairSource(path=str(tmp_path / "mixed"), captions=False), captioner, tmp_path / "mixed.jsonl")
    source = PairSource(path=str(tmp_path / "mixed"), captions=False, max_bad_share=0.5)
    assert write_captions(source, captioner, tmp_path / "mixed.jsonl") == 1


def test_two_processes_write_the_same_file_and_a_recipe_reads_it(captioner_folder: str, photos: Path, tmp_path: Path) -> None:
    given = ["caption", str(photos), "--model", captioner_folder, "--max-tokens", "6"]
    assert "11 captions" in invoke(*given, "--out", tmp_path / "one.jsonl")
    small = "from xcompat import captioning, cli\ncaptioning.ROWS = 4\ncli.main()"
    done = warm.run("-c", small, *given, "--out", tmp_path / "two.jsonl", folder=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    refuses("exists; choose another file", invoke, *given, "--out", tmp_path / "one.jsonl")
    loaded = load_labelled(LabelledSource(path=str(photos), caption_file=str(tmp_path / "one.jsonl")), captions=True)
    written = [{"id": item, "caption": text} for item, text in zip(loaded.dataset["id"], loaded.dataset["caption"], strict=True)]
    assert written == lines(tmp_path / "one.jsonl")
    (tmp_path / "short.jsonl").write_text((tmp_path / "one.jsonl").read_text().split("\n", 1)[1])
    with pytest.raises(XcompatError, match=r"short.jsonl has no caption for 1 of 11"):
        load_labelled(LabelledSource(path=str(photos), caption_file=str(tmp_path / "short.jsonl")), captions=True)


def test_unreadable_images(captioner_folder: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = Path(shutil.copytree(photos, tmp_path / "photos")), tmp_path / "out.jsonl"
    (folder / "cat" / "05.png").write_bytes(b"no image")
    given = ["caption", str(folder), "--model", captioner_folder, "--max-tokens", "4", "--max-bad-share", "0.1"]
    said = invoke(*given, "--out", out).replace("\n", "")
    assert "10 captions" in said and f"{{path: {folder}, caption_file: {out}, max_bad_share: 0.1}}" in said
    assert [row["id"] for row in lines(out) if row["caption"] is None] == ["cat/05.png"]
    source = LabelledSource(path=str(folder), caption_file=str(out), max_bad_share=0.1)
    capsys.readouterr()
    loaded = load_labelled(source, captions=True)
    assert "skipped cat/05.png: it could not be read when" in capsys.readouterr().out.replace("\n", " ")
    assert {row["id"]: row["caption"] for row in loaded.dataset.select_columns(["id", "caption"])} == {
        row["id"]: row["caption"] for row in lines(out) if row["caption"] is not None
    }
    assert loaded.class_names() == [name.split("/")[0] for name in loaded.dataset["id"]]
    assert len(load_labelled(source)) == 11, "without captions, all are there"
    with pytest.raises(XcompatError, match="1 of 11 samples cannot be used.*: cat/05.png: it"):
        load_labelled(source.model_copy(update={"max_bad_share": 0.01}), captions=True)
    rows = out.read_text().splitlines()
    out.write_text("\n".join(row for row in rows if "null" not in row))
    refuses("has no caption for 1 of 11 images, e.g. 'cat/05.png'; add captions", load_labelled, source, captions=True)
    out.write_text("\n".join(json.dumps({"id": json.loads(row)["id"], "caption": None}) for row in rows))
    with pytest.raises(XcompatError, match="has no captions: none of 11 images could"):
        load_labelled(source.model_copy(update={"max_bad_share": 1.0}), captions=True)
    out.write_text('{"id": "cat/05.png"}')
    refuses("line 1: write it as", load_labelled, source, captions=True)


@pytest.fixture(scope="module")
def folder_of_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kinds = (blip, git, pix2struct, llava, qwen2_vl)
    return {kind.__name__: make(kind, tmp_path_factory.mktemp(kind.__name__)) for kind in kinds}


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    sizes = ((16, 16), (24, 16), (16, 32), (40, 20))
    pixels = (np.random.default_rng(row).integers(0, 255, (*size, 3), dtype=np.uint8) for row, size in enumerate(sizes))
    return [Image.fromarray(each) for each in pixels]


@pytest.mark.parametrize("prompt", [None, "a photo of"])
@pytest.mark.parametrize(
    "kind", mostly_nightly(["blip", "git", "pix2struct", "llava", "qwen2_vl"], ("blip", "qwen2_vl").__contains__)
)
def test_kinds_of_captioners(folder_of_kind: dict[str, str], images: list[Image.Image], kind: str, prompt: str | None) -> None:
    captioner = Captioner(folder_of_kind[kind], max_tokens=6, prompt=prompt)
    together = captioner(images)
    assert together == [captioner([image])[0] for image in images]
    assert any(together) and not any("a photo of" in text or len(text.split()) > 6 for text in together)
    assert captioner.prompt == (prompt or (captioning.PROMPT if kind in ("llava", "qwen2_vl") else None))
    if kind != "blip":  # whose captions of random weights do not look at the image
        assert len(set(together)) > 1


@pytest.mark.parametrize("kind", ["blip", "git", "pix2struct"])
def test_a_caption_goes_on_where_the_prompt_ends(folder_of_kind: dict[str, str], images: list[Image.Image], kind: str) -> None:
    """By the tokens that the model is known to take: after [BOS], without an end, and none of them are in the caption."""
    captioner, (image, *_) = Captioner(folder_of_kind[kind], max_tokens=5, prompt="a photo of"), images
    pixels = dict(captioner.images(images=[image], return_tensors="pt"))
    ids = captioner.tokenizer("a photo of", add_special_tokens=False, return_tensors="pt")["input_ids"]
    begun = torch.cat([torch.tensor([[1]]), ids], dim=1)
    given = {
        "blip": {"input_ids": torch.cat([begun, torch.tensor([[2]])], dim=1)},  # generate takes its last token off
        "git": {"input_ids": begun},
        "pix2struct": {"decoder_input_ids": torch.cat([torch.tensor([[0]]), ids], dim=1)},
    }[kind]
    tokens = captioner.model.generate(**pixels, **given, max_new_tokens=5, do_sample=False)
    words = captioner.tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert words == f"a photo of {captioner([image])[0]}".strip()
    assert captioner([image]) != Captioner(folder_of_kind[kind], max_tokens=5)([image])


def test_prompts_are_taken_in_chats_or_refused(
    folder_of_kind: dict[str, str], images: list[Image.Image], photos: Path, tmp_path: Path, captioner_folder: str
) -> None:
    asked = Captioner(folder_of_kind["llava"], prompt="the dog")._model_inputs(images[:1])
    words = Captioner(folder_of_kind["llava"]).tokenizer.decode(asked["input_ids"][0])
    assert words == f"USER {' '.join([IMAGE] * 4)} the dog ASSISTANT"
    given = ["caption", str(photos), "--model", folder_of_kind["llava"], "--max-tokens", "6"]
    for name, more in (("usual", []), ("dog", ["--prompt", "the dog"])):
        assert "11 captions" in invoke(*given, *more, "--out", tmp_path / name)
    assert lines(tmp_path / "usual") != lines(tmp_path / "dog")
    refuses("starts captions by itself and takes no prompt; remove --prompt", Captioner, captioner_folder, prompt="a photo of")
    silent = llava(tmp_path, template=None)
    refuses(r"cannot write captions: .*; set a --prompt", Captioner(silent), images)
    assert len(Captioner(silent, max_tokens=4, prompt="USER <image> the dog ASSISTANT")(images)) == 4
    refuses(r"cannot write captions: .*; use another --prompt", Captioner(silent, prompt="the dog"), images)


def test_parts_of_others(folder_of_kind: dict[str, str], photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of_kind["git"], tmp_path / "git")
    source, out = PairSource(path=str(photos), captions=False), tmp_path / "out.jsonl"
    with mock.patch.object(captioning, "_join", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_captions(source, Captioner(folder_of_kind["git"], max_tokens=4), out)
    prompted = Captioner(folder_of_kind["git"], max_tokens=4, prompt="a photo of")
    refuses("parts with other prompt", write_captions, source, prompted, out)
    refuses("parts with other captioner", write_captions, source, Captioner(str(folder), max_tokens=4), out)
    plan = json.loads((tmp_path / "out.jsonl.parts" / captioning.PLAN).read_text())
    del plan["prompt"]  # as versions wrote it that knew no prompt
    (tmp_path / "out.jsonl.parts" / captioning.PLAN).write_text(json.dumps(plan))
    assert write_captions(source, Captioner(folder_of_kind["git"], max_tokens=4), out) == 11

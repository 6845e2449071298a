"""Tiny captioners of random weights, of every kind that asks for its inputs in its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    GitConfig,
    GitForCausalLM,
    GitProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Pix2StructConfig,
    Pix2StructForConditionalGeneration,
    Pix2StructImageProcessor,
    Pix2StructProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    set_seed,
)

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


def tokenizer(*more: str, text: str = "[BOS] $A [EOS]") -> PreTrainedTokenizerFast:
    """Return one of whole words, which puts a text ``$A`` between other tokens."""
    words = [*WORDS, *more]
    made = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single=text, special_tokens=[("[BOS]", 1), ("[EOS]", 2)])
    names = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "cls_token": "[BOS]", "sep_token": "[EOS]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=list(more), **names)


def save(folder: Path, model: nn.Module, processor: object) -> str:
    """Write both, of weights so large that images differ."""
    for parameter in model.parameters():
        parameter.data.mul_(20)
    model.save_pretrained(folder)  # type: ignore[operator]
    processor.save_pretrained(folder)  # type: ignore[attr-defined]
    return str(folder)


def blip(folder: Path) -> str:
    text = {**SIZE, **ENDS, "vocab_size": len(WORDS), "encoder_hidden_size": 16, "sep_token_id": 2, "projection_dim": 16}
    config = BlipConfig(text_config=text, vision_config={**VISION, "projection_dim": 16}, projection_dim=16)
    return save(folder, BlipForConditionalGeneration(config), BlipProcessor(BlipImageProcessor(size=PIXELS), tokenizer()))


def git(folder: Path) -> str:
    config = GitConfig(vision_config=VISION, **SIZE, **ENDS, vocab_size=len(WORDS), max_position_embeddings=64)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=PIXELS)
    return save(folder, GitForCausalLM(config), GitProcessor(images, tokenizer()))


def pix2struct(folder: Path) -> str:
    width = {"hidden_size": 16, "d_kv": 8, "d_ff": 32}
    text = {**width, **ENDS, "vocab_size": len(WORDS), "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    vision = {**width, "patch_embed_hidden_size": 768, "num_hidden_layers": 1, "num_attention_heads": 2, "seq_len": 2048}
    model = Pix2StructForConditionalGeneration(Pix2StructConfig(text_config=text, vision_config=vision))
    return save(folder, model, Pix2StructProcessor(Pix2StructImageProcessor(is_vqa=False), tokenizer(text="$A [EOS]")))


def llava(folder: Path, template: str | None = CHAT.replace("IMAGE", IMAGE)) -> str:
    llama = LlamaConfig(**SIZE, **ENDS, vocab_size=len(WORDS) + 1)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION, projection_dim=16),
        text_config=llama,
        image_token_index=len(WORDS),
        vision_feature_layer=-1,
    )
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=PIXELS)
    patches = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(images, tokenizer(IMAGE, text="$A"), **patches, chat_template=template, image_token=IMAGE)
    return save(folder, LlavaForConditionalGeneration(config), processor)


def qwen2_vl(folder: Path) -> str:
    """Return one whose questions are longer for larger images."""
    rows = {name: len(WORDS) + row for row, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    rope = {"type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        text_config={**SIZE, **ENDS, "num_key_value_heads": 2, "vocab_size": len(WORDS) + 4, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        **{f"{name}_token_id": row for name, row in rows.items()},
    )
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(patch_size=4, min_pixels=64, max_pixels=1024),
        tokenizer(*PADS, text="$A"),
        video_processor=Qwen2VLVideoProcessor(patch_size=4),
        chat_template=CHAT.replace("IMAGE", f"{PADS[2]}{PADS[0]}{PADS[3]}"),
    )
    return save(folder, Qwen2VLForConditionalGeneration(config), processor)


def make(kind: Callable[[Path], str], folder: Path) -> str:
    """Return the folder of a captioner of one kind, always the same one."""
    set_seed(0)
    return kind(folder)

"""Embedding models of the study of texts, each made in minutes on a core: latent semantic analyses, and small transformers.

What took long is kept under runs/texts: the weights of transformers, and every embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from tokenizers.implementations import BertWordPieceTokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import BertConfig, BertModel, get_cosine_schedule_with_warmup

from xcompat.losses import clip_contrastive_loss

OUT = Path("runs/texts")
console = Console(soft_wrap=True, markup=False, highlight=False, stderr=True)
LEARNED, LENGTH, EMBEDDED, VOCABULARY, SCALE = 24, 192, 256, 20_000, 20.0
"""Most tokens of a text to learn from and to embed, texts embedded at a time, tokens that there are, and a factor on cosines."""
Rows = NDArray[np.float32]
Embed = Callable[[Sequence[str]], Rows]
"""From texts to their embeddings, L2-normalised; a text without any known word is a row of zeros."""
Draw = Callable[[np.random.Generator, int], list[tuple[str, str]]]
"""From a generator and a number to as many pairs of texts that belong together."""


def words(texts: Sequence[str], dim: int = 128) -> Embed:
    """Fit a latent semantic analysis of words."""
    return _analysis(texts, dim, TfidfVectorizer(sublinear_tf=True, min_df=2, stop_words="english"))


def parts_of_words(texts: Sequence[str], dim: int = 512) -> Embed:
    """Fit a latent semantic analysis of parts of words."""
    parts = TfidfVectorizer(sublinear_tf=True, min_df=2, analyzer="char_wb", ngram_range=(3, 5), max_features=200_000)
    return _analysis(texts, dim, parts)


def _analysis(texts: Sequence[str], dim: int, vectoriser: TfidfVectorizer) -> Embed:
    model = make_pipeline(vectoriser, TruncatedSVD(dim, random_state=0), Normalizer()).fit(texts)
    return lambda texts: model.transform(texts).astype(np.float32)


class Transformer:
    """Two layers of 256 dimensions and a vocabulary of their own; an embedding is the mean over tokens.

    Args:
        folder: where weights and vocabulary lie, or will.
        peaks: whether the largest value of each dimension stands beside its mean, which doubles the dimensions.
    """

    def __init__(self, folder: Path, peaks: bool = False) -> None:
        self.folder, self.peaks = folder, peaks
        if (folder / "model.safetensors").exists():
            self.tokenizer = BertWordPieceTokenizer(str(folder / "vocab.txt"))
            self.bert = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
            self.tokenizer.enable_truncation(LENGTH)
            self.tokenizer.enable_padding()

    def learn(self, texts: Sequence[str], draw: Draw, *, steps: tuple[int, int], batch: int) -> Transformer:
        """Learn to find each text's partner among those of its batch: the vocabulary's vectors alone, then all layers.

        Args:
            texts: of which the vocabulary is made.
            draw: draws a batch of pairs.
            steps: numbers of batches of vectors alone, which are cheap, and of all layers.
            batch: number of pairs in each.
        """
        if (self.folder / "model.safetensors").exists():
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = BertWordPieceTokenizer()
        self.tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
        self.tokenizer.enable_truncation(LEARNED)
        self.tokenizer.enable_padding()
        torch.manual_seed(0)
        size = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(vocab_size=self.tokenizer.get_vocab_size(), max_position_embeddings=LENGTH, **size, **none)
        self.bert, generator = BertModel(config, add_pooling_layer=False), np.random.default_rng(0)
        for count, learning_rate, layers in ((steps[0], 5e-3, self.bert.embeddings), (steps[1], 5e-4, self.bert)):
            optimiser = torch.optim.AdamW(layers.parameters(), learning_rate)
            schedule = get_cosine_schedule_with_warmup(optimiser, count // 10, count)
            for step in range(count):
                first, second = (self._embed(side, layers) for side in zip(*draw(generator, batch), strict=True))
                loss = clip_contrastive_loss(first, second, SCALE)
                loss.backward()
                optimiser.step()
                optimiser.zero_grad()
                schedule.step()
                if step % 50 == 0 or step == count - 1:
                    console.print(f"{self.folder.name}: {type(layers).__name__} step {step}, loss {loss.item():.3f}")
        self.bert.eval()
        self.tokenizer.enable_truncation(LENGTH)
        self.tokenizer.save_model(str(self.folder))
        self.bert.save_pretrained(self.folder)
        return self

    def _embed(self, texts: Sequence[str], layers: torch.nn.Module) -> Tensor:
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids_BL = torch.tensor([each.ids for each in encodings])
        mask_BL = torch.tensor([each.attention_mask for each in encodings])
        positions_1L = torch.arange(ids_BL.shape[1]).clamp(max=LEARNED - 1)[None]  # of later ones nothing was learned
        if layers is self.bert:
            with torch.autocast("cpu", torch.bfloat16):
                states_BLD = self.bert(ids_BL, attention_mask=mask_BL, position_ids=positions_1L).last_hidden_state.float()
        else:
            states_BLD = layers(ids_BL, position_ids=positions_1L)
        told_BL1 = mask_BL[:, :, None].bool()
        pooled = states_BLD.where(told_BL1, 0).sum(1) / told_BL1.sum(1).clamp(min=1)
        if self.peaks:
            pooled = torch.cat([pooled, states_BLD.where(told_BL1, -torch.inf).amax(1)], dim=1)
        return F.normalize(pooled, dim=1).nan_to_num(0)  # a text without tokens has no largest values

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Rows:
        """Embed texts, those of one length together."""
        order, blocks = np.argsort([len(text) for text in texts], kind="stable"), list[Tensor]()
        for start in track(range(0, len(texts), EMBEDDED), f"{self.folder.name} embeds {len(texts):,} texts", console=console):
            blocks.append(self._embed([texts[row] for row in order[start : start + EMBEDDED]], self.bert))
        return torch.cat(blocks).numpy()[np.argsort(order)]

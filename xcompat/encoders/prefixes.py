"""Shared text prefixes: causal text towers compute each distinct prefix in a batch once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.encoders.base import Encoder

TREE = 128
"""Maximum tokens in a tree. Larger trees share more, but the cost of attention grows with the square."""

UNSEEN = torch.finfo(torch.float16).min  # valid in every dtype of weights and autocast, with exponential 0


@dataclass(frozen=True)
class PrefixTrees:
    """Texts as paths in T trees; a tree's N nodes are its texts' distinct prefixes.

    Args:
        token_ids_TN: each prefix's last token; 0 to pad small trees.
        depths_TN: this token's position in its texts.
        sees_TNN: attention mask: nodes see themselves and their ancestors.
        ends_B: each text's last node, counted over all trees.
    """

    token_ids_TN: NDArray[np.int64]
    depths_TN: NDArray[np.int64]
    sees_TNN: NDArray[np.bool_]
    ends_B: NDArray[np.int64]


def prefix_trees(token_ids_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], limit: int = TREE) -> PrefixTrees:
    """Build trees from the texts' distinct prefixes, in lexicographic order.

    Args:
        token_ids_BL: padded texts.
        lengths_B: number of tokens per text, at least 1.
        limit: maximum nodes per tree; longer texts get separate trees.

    Example:
        >>> trees = prefix_trees(np.array([[1, 5, 9, 0], [1, 5, 7, 9]]), np.array([3, 4]))
        >>> trees.token_ids_TN.tolist(), trees.ends_B.tolist()
        ([[1, 5, 7, 9, 9]], [4, 3])
    """
    order_B, shared_B = _in_order(token_ids_BL, lengths_B)
    sorted_BL, sorted_lengths_B = token_ids_BL[order_B], lengths_B[order_B]
    tree_B = _cut(sorted_lengths_B, shared_B, limit)
    shared_B = np.where(np.diff(tree_B, prepend=-1) > 0, 0, shared_B)  # trees share nothing
    columns_L = np.arange(token_ids_BL.shape[1])
    new_BL = (columns_L >= shared_B[:, None]) & (columns_L < sorted_lengths_B[:, None])
    numbers_BL = np.where(new_BL, np.cumsum(new_BL).reshape(new_BL.shape) - 1, 0)
    nodes_BL = np.maximum.accumulate(numbers_BL, axis=0)  # a shared token is the last new token above it in its column
    rows_V, depths_V = np.nonzero(new_BL)
    tree_V = tree_B[rows_V]
    sizes_T = np.bincount(tree_V)
    count, size = len(sizes_T), sizes_T.max()
    places_V = np.arange(len(tree_V)) - (np.cumsum(sizes_T) - sizes_T)[tree_V]
    token_ids_TN, depths_TN = np.zeros((2, count, size), dtype=np.int64)
    token_ids_TN[tree_V, places_V] = sorted_BL[rows_V, depths_V]
    depths_TN[tree_V, places_V] = depths_V
    sees_TNN = np.broadcast_to(np.eye(size, dtype=np.bool_), (count, size, size)).copy()
    below, above = np.nonzero(columns_L <= depths_V[:, None])
    sees_TNN[tree_V[below], places_V[below], places_V[nodes_BL[rows_V[below], above]]] = True
    ends_B = np.empty(len(order_B), dtype=np.int64)
    ends_B[order_B] = (tree_V * size + places_V)[nodes_BL[np.arange(len(order_B)), sorted_lengths_B - 1]]
    return PrefixTrees(token_ids_TN, depths_TN, sees_TNN, ends_B)


def length_sorted_batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches of row numbers, sorted by text length, with a limited number of tokens including padding.

    Args:
        lengths: number of tokens per text.
        tokens_per_batch: maximum tokens per batch; longer texts get separate batches.

    Example:
        >>> [rows.tolist() for rows in length_sorted_batches([3, 9, 3, 4], 8)]
        [[1], [3, 0], [2]]
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")  # longest first, so that out-of-memory errors come early
    start = 0
    while start < len(order):
        longest = max(lengths[order[start]], 1)
        stop = start + max(tokens_per_batch // longest, 1)
        yield order[start:stop]
        start = stop


def prefix_batches(token_ids: Sequence[Sequence[int]], tokens_per_batch: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches of row numbers, in the texts' lexicographic order, from whole trees.

    Args:
        token_ids: tokens per text.
        tokens_per_batch: maximum nodes per batch including padding; longer texts get separate batches.

    Example:
        >>> [rows.tolist() for rows in prefix_batches([[1, 5, 9], [1, 2, 9], [1, 5, 9]], 4)]
        [[1], [0, 2]]
    """
    if not len(token_ids):
        return
    lengths_B = np.array([len(ids) for ids in token_ids])
    padded_BL = np.zeros((len(lengths_B), lengths_B.max()), dtype=np.int64)
    padded_BL[np.arange(padded_BL.shape[1]) < lengths_B[:, None]] = np.concatenate(token_ids)
    order_B, shared_B = _in_order(padded_BL, lengths_B)
    tree_B = _cut(lengths_B[order_B], shared_B, min(TREE, tokens_per_batch))
    batch_B = tree_B // max(tokens_per_batch // max(TREE, lengths_B.max()), 1)
    yield from np.split(order_B, np.flatnonzero(np.diff(batch_B)) + 1)


@contextmanager
def shared_prefixes(encoder: Encoder) -> Iterator[None]:
    """Compute each distinct prefix in a text batch once inside the block, without gradients.

    In a causal tower, a token's state does not depend on later tokens. Results differ by rounding only. The block has no effect
    without :attr:`Encoder.shares_prefixes`, with gradients, or with an attention mask.

    Args:
        encoder: encoder with ``text_features``.

    Example:
        >>> from xcompat.encoders.standins import stand_in
        >>> encoder, processor = stand_in("clip", dim=8)
        >>> batch = processor.texts(["a red shoe", "a red dog"])
        >>> with torch.inference_mode(), shared_prefixes(encoder):
        ...     shared = encoder.embed_texts(**batch)
        >>> torch.allclose(shared, encoder.embed_texts(**batch), atol=1e-5)
        True
    """
    if not encoder.shares_prefixes:
        yield
        return
    vars(encoder)["text_features"] = partial(_text_features, encoder)  # shadows the method of the class
    try:
        yield
    finally:
        vars(encoder).pop("text_features", None)


def _text_features(encoder: Encoder, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() or attention_mask is not None:
        return type(encoder).text_features(encoder, input_ids, attention_mask)
    tower = encoder.model.text_model
    marks_BL = input_ids if tower.eos_token_id == 2 else (input_ids == tower.eos_token_id).int()  # as CLIPTextModel pools
    lengths_B = marks_BL.argmax(dim=-1) + 1
    return encoder.model.text_projection(
        _end_states(tower, prefix_trees(input_ids.numpy(force=True), lengths_B.numpy(force=True)))
    )


def _end_states(tower: Any, trees: PrefixTrees) -> Tensor:  # noqa: ANN401 - a CLIPTextModel, whose parts are untyped
    """Return the last states (B, W) at the text ends; the whole tower would reject trees longer than a text."""
    embeddings, device = tower.embeddings, tower.device
    token_ids_TN, depths_TN, ends_B = (
        torch.from_numpy(array).to(device) for array in (trees.token_ids_TN, trees.depths_TN, trees.ends_B)
    )
    mask_T1NN = torch.zeros(trees.sees_TNN.shape, dtype=tower.dtype, device=device)
    mask_T1NN = mask_T1NN.masked_fill_(torch.from_numpy(~trees.sees_TNN).to(device), UNSEEN)[:, None]
    states_TNW = embeddings.token_embedding(token_ids_TN) + embeddings.position_embedding(depths_TN)
    *layers, last = tower.encoder.layers
    for layer in layers:
        states_TNW = layer(states_TNW, mask_T1NN)
    states_TNW = states_TNW + last.self_attn(last.layer_norm1(states_TNW), mask_T1NN)[0]
    states_BW = states_TNW.flatten(0, 1)[ends_B]  # the last layer's other states are not needed
    return tower.final_layer_norm(states_BW + last.mlp(last.layer_norm2(states_BW)))


def _in_order(token_ids_BL: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the texts' lexicographic order, and how many tokens each shares with its predecessor."""
    kept_BL = np.where(np.arange(token_ids_BL.shape[1]) < lengths_B[:, None], token_ids_BL, -1)
    order_B = np.lexsort(kept_BL.T[::-1])
    same_BL = kept_BL[order_B[1:]] == kept_BL[order_B[:-1]]
    alike_B = np.logical_and.accumulate(same_BL, axis=1).sum(1)
    return order_B, np.append(0, np.minimum(alike_B, lengths_B[order_B[1:]]))


def _cut(lengths_B: NDArray[np.int64], shared_B: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Return each sorted text's tree."""
    trees, tree, size = [], -1, limit
    for length, shared in zip(lengths_B.tolist(), shared_B.tolist(), strict=True):
        size += length - shared
        if size > limit or tree < 0:
            tree, size = tree + 1, length
        trees.append(tree)
    return np.array(trees, dtype=np.int64)

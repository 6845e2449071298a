"""Query memories with many entries: stored as codes, searched with faiss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from xcompat.core.distributed import copy_to_gpus
from xcompat.core.errors import XcompatError
from xcompat.models.codes import Codec, open_lists
from xcompat.models.query_memory import LearnedTransform, QueryMemory, refuse_settings
from xcompat.vectors.codecs import CODECS, is_codec

FIRST, NEAREST, PROBES = 128, 256, 128
"""Default key dimensions in the index, entries in the softmax, and lists per search."""
_LISTS, _PER_LIST, _ROUNDS = 8192, 50, 10  # most lists, training samples per list, and rounds of k-means
_SAMPLED = 2**16  # minimum training samples of the codecs, if there are enough entries
_ROWS = 2**15  # entries read at a time
NOT_EXPORTABLE = (
    "a compressed query memory uses faiss and cannot be exported: make the map with --memory-codec float32 (memory_codec in a "
    "recipe), or remove the entries with model.remember(model.memory.without_entries())"
)
Read = Callable[[NDArray[np.int64]], Tensor]
"""Reads keys or values (n, dim) float32 by ascending entry numbers (n,)."""


def build_memory(settings: Mapping[str, Any], new_dim: int, old_dim: int) -> QueryMemory:
    """Build an empty memory from its settings.

    Args:
        settings: as in :attr:`QueryMemory.settings`.
        new_dim: D.
        old_dim: d.

    Raises:
        XcompatError: a setting is unknown, missing or out of range.
    """
    if not isinstance(settings, Mapping):
        raise XcompatError(f"memory is {settings!r}; it must be a mapping with {', '.join(QueryMemory.LEAST)}")
    kind = IndexedMemory if "codec" in settings else QueryMemory
    refuse_settings(settings, kind.LEAST)
    if kind is IndexedMemory and not is_codec(settings["codec"]):
        raise XcompatError(f"memory.codec is {settings['codec']!r}; use {CODECS}")
    return kind(new_dim, old_dim, **settings)


class IndexedMemory(QueryMemory):
    """Memory with a softmax over the nearest entries only, found with a faiss inverted file of codes.

    Keys are rotated onto their principal axes. The index compares the first dimensions, with most of the variance; the others
    complete the found entries' cosines. Entries are stored list by list: a key's first part is its list's centroid plus a decoded
    residual. Faiss reads codes in place, on the CPU. With faiss-gpu, GPUs compute the lists.

    Args:
        new_dim: D.
        old_dim: d.
        entries: K.
        sharpness: β.
        share: λ.
        confident: whether the memory is calibrated (:meth:`confidence`).
        codec: codec for keys and values, in :data:`~xcompat.models.codes.CODECS`.
        first: maximum key dimensions in the index.
        lists: L, number of lists.
        nearest: k, number of entries in the softmax.
        probes: number of lists per search.
    """

    LEAST: ClassVar = {**QueryMemory.LEAST, "entries": 1, "codec": None, "first": 1, "lists": 1, "nearest": 1, "probes": 1}

    centroids_LH: Tensor
    sizes_L: Tensor

    def __init__(
        self,
        new_dim: int,
        old_dim: int,
        entries: int,
        sharpness: float = 30.0,
        share: float = 0.5,
        confident: bool = False,
        *,
        codec: str,
        lists: int,
        first: int = FIRST,
        nearest: int = NEAREST,
        probes: int = PROBES,
    ) -> None:
        super().__init__(new_dim, old_dim, 0, sharpness, share, confident)
        del self.keys_KD, self.values_Kd
        self.key_metric = LearnedTransform(new_dim)
        self.entries, self.codec, self.lists, self.nearest, self.probes = entries, codec, lists, nearest, probes
        self.first = min(first, new_dim)
        for name, part in self._codecs().items():
            self.register_buffer(f"{name}_codes_KB", torch.zeros(entries, part.size, dtype=torch.uint8))
            self.register_buffer(f"{name}_codec_F", torch.zeros(part.n_learned))
        self.register_buffer("centroids_LH", torch.zeros(lists, self.first))
        self.register_buffer("sizes_L", torch.zeros(lists, dtype=torch.int64))
        self._opened_at: tuple[object, _OpenIndex] | None = None

    def _codecs(self) -> dict[str, Codec]:
        dims = {"first": self.first, "rest": self.dims[0] - self.first, "value": self.dims[1]}
        return {name: Codec(self.codec, dim) for name, dim in dims.items()}

    @classmethod
    def from_entries(cls, entries: int, keys: Read, values: Read, key_transform: LearnedTransform, codec: str) -> Self:
        """Encode entries, which need not fit into memory, with default learned transform, gate, sharpness and share.

        Args:
            entries: K.
            keys: reads L2-normalised keys after the key transform.
            values: reads values.
            key_transform: learned transform of new embeddings before they are compared with keys.
            codec: as in the class.

        Raises:
            XcompatError: there are too few entries for the codec, or it does not fit their dimensions.
        """
        lists = min(_LISTS, math.ceil(4 * math.sqrt(entries)), math.ceil(entries / _PER_LIST))
        sample_S = np.sort(np.random.default_rng(0).permutation(entries)[: max(_SAMPLED, _PER_LIST * lists)])
        keys_SD, values_Sd = keys(sample_S), values(sample_S)
        memory = cls(keys_SD.shape[1], values_Sd.shape[1], entries, codec=codec, lists=lists)
        turn_DD = torch.linalg.eigh((keys_SD.T @ keys_SD).double())[1].flip(1).float()
        memory.key_metric.mean_d.copy_(key_transform.mean_d)
        memory.key_metric.matrix_dd.copy_(key_transform.matrix_dd @ turn_DD)

        def parts(keys_ND: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
            turned_ND = (keys_ND @ turn_DD).numpy()
            return np.ascontiguousarray(turned_ND[:, : memory.first]), turned_ND[:, memory.first :]

        first_SH, rest_SR = parts(keys_SD)
        coarse = faiss.Kmeans(memory.first, lists, niter=_ROUNDS, spherical=True, seed=1, min_points_per_centroid=1)
        coarse.cp.max_points_per_centroid = _PER_LIST
        coarse.index = copy_to_gpus(coarse.index)
        coarse.train(first_SH)
        memory.centroids_LH.copy_(torch.from_numpy(coarse.centroids))
        first_SH -= coarse.centroids[coarse.assign(first_SH)[1]]
        codecs = memory._codecs()
        for name, sample in {"first": first_SH, "rest": rest_SR, "value": values_Sd.numpy()}.items():
            memory.get_buffer(f"{name}_codec_F").copy_(codecs[name].train(sample))
        blocks = [np.arange(start, min(start + _ROWS, entries)) for start in range(0, entries, _ROWS)]
        list_K = np.concatenate([coarse.assign(parts(keys(rows_B))[0])[1] for rows_B in blocks])
        memory.sizes_L.copy_(torch.from_numpy(np.bincount(list_K, minlength=lists)))
        place_K = np.empty(entries, np.int64)
        place_K[np.argsort(list_K, kind="stable")] = np.arange(entries)
        for rows_B in blocks:
            first_BH, rest_BR = parts(keys(rows_B))
            read = {"first": first_BH - coarse.centroids[list_K[rows_B]], "rest": rest_BR, "value": values(rows_B).numpy()}
            for name, embeds in read.items():
                memory.get_buffer(f"{name}_codes_KB").numpy()[place_K[rows_B]] = codecs[name].encode(embeds)
        return memory

    @property
    @override
    def settings(self) -> dict[str, Any]:
        return super().settings | {name: getattr(self, name) for name in ("codec", "first", "lists", "nearest", "probes")}

    @override
    def key_cosines(self, new_BD: Tensor) -> Tensor:
        return self._nearest(new_BD)[0]

    def _nearest(self, new_BD: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
        """Return unsorted cosines (B, k) to the nearest keys, and their code rows (row 0 and cosine -1 for missing keys)."""
        if torch.compiler.is_exporting():
            raise XcompatError(NOT_EXPORTABLE)
        opened, keyed_BD = self._open(), self.key_metric(new_BD).detach().cpu()
        opened.index.nprobe = min(self.probes, self.lists)
        cosines_Bk, rows_Bk = opened.index.search(keyed_BD[:, : self.first].numpy(), min(self.nearest, self.entries))
        rest_BkR = opened.read("rest", np.maximum(rows_Bk, 0))
        cosines_Bk = torch.from_numpy(cosines_Bk) + (rest_BkR @ keyed_BD[:, self.first :, None])[..., 0]
        return cosines_Bk.clamp(-1, 1).to(new_BD.device), np.maximum(rows_Bk, 0)

    @property
    @override
    def _numbers_per_query(self) -> int:  # keys and values of the nearest entries
        return min(self.nearest, self.entries) * sum(self.dims)

    @override
    def _recall_block(self, new_BD: Tensor) -> Tensor:
        cosines_Bk, rows_Bk = self._nearest(new_BD)
        values_Bkd = self._open().read("value", rows_Bk).to(new_BD.device)
        mean_B1d = (self.sharpness * cosines_Bk).softmax(1)[:, None] @ values_Bkd
        return self.familiarity(cosines_Bk)[:, None] * mean_B1d[:, 0]

    @override
    def check(self) -> None:
        """Raise if codes and lists do not match, because faiss would read invalid memory.

        Raises:
            XcompatError: a tensor contradicts the settings.
        """
        with torch.device("meta"):
            wanted = type(self)(**self.settings, new_dim=self.dims[0], old_dim=self.dims[1])
        alike = all(
            given.shape == other.shape and (given.dtype == other.dtype or other.is_floating_point())
            for given, other in zip(self.buffers(), wanted.buffers(), strict=True)
        )
        sizes_L = self.sizes_L
        if not alike or not 0 <= sizes_L.min() <= sizes_L.max() <= self.entries or int(sizes_L.sum()) != self.entries:
            raise XcompatError(
                f"the query memory is damaged: lists and codes of its {self.entries:,} entries do not match; "
                "restore the checkpoint"
            )

    def _open(self) -> _OpenIndex:
        """Return the index and codecs, rebuilt if a tensor has changed."""
        tensors = {name: tensor for name, tensor in self.named_buffers(recurse=False) if name not in ("gate", "calibration")}
        state = [(tensor.data_ptr(), None if tensor.is_inference() else tensor._version) for tensor in tensors.values()]
        if self._opened_at is None or self._opened_at[0] != state:
            self.check()
            arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            codes = {name: arrays[f"{name}_codes_KB"].numpy() for name in ("first", "rest", "value")}
            learned = {name: arrays[f"{name}_codec_F"].float().numpy() for name in codes}
            centroids_LH, sizes_L = arrays["centroids_LH"].float().numpy(), arrays["sizes_L"].tolist()
            index = open_lists(self.codec, centroids_LH, learned["first"], codes["first"], sizes_L)
            codecs = {name: codec.restore(learned[name]) for name, codec in self._codecs().items()}
            self._opened_at = state, _OpenIndex(index, codecs, codes)
        return self._opened_at[1]

    def __getstate__(self) -> dict[str, object]:
        """Exclude faiss objects, which :meth:`_open` rebuilds."""
        return self.__dict__ | {"_opened_at": None}


@dataclass(frozen=True)
class _OpenIndex:
    """Searchable index, with each part's codec and codes (``first``, ``rest``, ``value``)."""

    index: faiss.Index  # a faiss inverted file, which reads the first codes in place
    codecs: dict[str, Codec]
    codes: dict[str, NDArray[np.uint8]]

    def read(self, part: str, rows_Bk: NDArray[np.int64]) -> Tensor:
        """Decode a part's rows (B, k): (B, k, dim) float32."""
        decoded = self.codecs[part].decode(self.codes[part][rows_Bk.ravel()])
        return torch.from_numpy(decoded).view(*rows_Bk.shape, decoded.shape[1])

"""Losses against double loops, and over two processes against one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from torch.nn import functional as F

from xcompat.losses import clip_contrastive_loss, nt_xent_loss, siglip_loss


def naive_clip_loss(a: torch.Tensor, b: torch.Tensor, scale: float) -> float:
    total = 0.0
    for x, y in ((a, b), (b, a)):
        for i in range(len(x)):
            logits = [scale * float(x[i] @ y[j]) for j in range(len(y))]
            top = max(logits)
            total += top + math.log(sum(math.exp(logit - top) for logit in logits)) - logits[i]
    return total / (2 * len(a))


def naive_siglip_loss(a: torch.Tensor, b: torch.Tensor, scale: float, bias: float) -> float:
    total = 0.0
    for i in range(len(a)):
        for j in range(len(b)):
            sign = 1 if i == j else -1
            total += math.log1p(math.exp(-sign * (scale * float(a[i] @ b[j]) + bias)))
    return total / len(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("scale", [1.0, 1 / 0.07, 100.0])
def test_losses_equal_the_double_loop(dtype: torch.dtype, batch: int, scale: float) -> None:
    a = F.normalize(torch.randn(batch, 5, dtype=torch.float64), dim=-1)
    b = F.normalize(a + torch.randn(batch, 5, dtype=torch.float64), dim=-1)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    assert float(clip_contrastive_loss(a.to(dtype), b.to(dtype), scale)) == pytest.approx(
        naive_clip_loss(a, b, scale), rel=tolerance, abs=tolerance
    )
    assert float(siglip_loss(a.to(dtype), b.to(dtype), scale, -10.0)) == pytest.approx(
        naive_siglip_loss(a, b, scale, -10.0), rel=tolerance, abs=tolerance
    )


def test_loss_is_not_rounded_under_autocast() -> None:
    a, b = (F.normalize(torch.randn(9, 4), dim=-1) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(clip_contrastive_loss(a, b, 14.0), clip_contrastive_loss(a, b, 14.0).float())
        inside = clip_contrastive_loss(a, b, 14.0)
    torch.testing.assert_close(inside, clip_contrastive_loss(a, b, 14.0), atol=0, rtol=0)


def test_unequal_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the same shape"):
        clip_contrastive_loss(torch.randn(3, 2), torch.randn(4, 2), 1.0)


def _rank_main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for name, loss_of in LOSSES.items():
        a, b, weight = _batch()
        weight.requires_grad_(True)
        rows = slice(4 * rank, 4 * rank + 4)
        loss = loss_of(F.normalize(a[rows] @ weight, dim=-1), F.normalize(b[rows] @ weight, dim=-1))
        loss.backward()
        gradient = weight.grad / 2  # what data-parallel training averages
        dist.all_reduce(gradient)
        results[name] = (loss.detach(), gradient)
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(8, 6, generator=generator, dtype=torch.float64),
        torch.randn(8, 6, generator=generator, dtype=torch.float64),
        torch.randn(6, 5, generator=generator, dtype=torch.float64),
    )


LOSSES = {
    "clip": lambda a, b: clip_contrastive_loss(a, b, 14.0),
    "siglip": lambda a, b: siglip_loss(a, b, 10.0, -5.0),
    "nt_xent": lambda a, b: nt_xent_loss(a, b, 0.3),
    "crops": lambda a, b: nt_xent_loss(a, b, 0.3, [F.normalize(a + 2 * b, dim=-1), F.normalize(a - b, dim=-1)]),
}


def test_two_ranks_of_four_equal_one_of_eight(tmp_path: Path) -> None:
    warm.spawn(_rank_main, (str(tmp_path / "store"), str(tmp_path / "out")))
    for name, loss_of in LOSSES.items():
        a, b, weight = _batch()
        weight.requires_grad_(True)
        loss = loss_of(F.normalize(a @ weight, dim=-1), F.normalize(b @ weight, dim=-1))
        loss.backward()
        for rank in range(2):
            its_loss, its_gradient = torch.load(tmp_path / f"out.{rank}", weights_only=True)[name]
            torch.testing.assert_close(its_loss, loss.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(its_gradient, weight.grad, rtol=1e-10, atol=1e-12)

"""Gradient caching: large contrastive batches in the memory of small ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Self

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import get_device_states, set_device_states

from xcompat.core.errors import XcompatError
from xcompat.models import CompatModel
from xcompat.outputs import CompatOutput

Batch = Mapping[str, Tensor]


class RandomState(NamedTuple):
    """Random state of the CPU and a batch's devices, for dropout and noise.

    Args:
        cpu: state of the CPU.
        devices: indices of other devices.
        states: states of these devices.
        kind: type of these devices.
    """

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]
    kind: str

    @classmethod
    def capture(cls, batch: Batch) -> Self:
        """Return the current state."""
        first = next(iter(batch.values()))
        return cls(torch.get_rng_state(), *get_device_states(first), first.device.type)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states, device_type=self.kind)


def check_mini_batches(model: CompatModel, accelerator: Accelerator) -> None:
    """Raise if mini-batches would change the result or fail.

    Args:
        model: in training mode.
        accelerator: of the Trainer.

    Raises:
        XcompatError: active batch norms, or DeepSpeed.
    """
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    learning = [name for name in norms if model.get_submodule(name).training]
    if learning:
        raise XcompatError(
            f"mini_batch_size: {learning[0]} normalises over the batch, so mini-batches would change the result; remove "
            "mini_batch_size (training.activation_checkpointing also saves memory)"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise XcompatError("mini_batch_size does not work with DeepSpeed; launch with another accelerate_configs/*.yaml")


def backward_in_mini_batches(
    accelerator: Accelerator, model: nn.Module, batch: Batch, mini_batch_size: int, share: float = 1.0
) -> Tensor:
    """Backpropagate a loss over the whole batch with a single mini-batch's graph in memory.

    With e_i the embedding of sample i, ∂L/∂θ = Σ_i ∂L/∂e_i · ∂e_i/∂θ. The first factor comes from embeddings without a graph, the
    second from mini-batches with the same dropout and noise (Gao et al. 2021, "Scaling deep contrastive learning batch size under
    memory limited setup", Eqns. 6 to 9). Every sample is embedded twice; gradients equal the plain step's. Processes exchange
    embeddings once, and gradients with the last mini-batch.

    Args:
        accelerator: has prepared the model.
        model: with ``loss_of_embeddings``, possibly wrapped; gradients accumulate in its parameters.
        batch: columns of this process's B samples, on the device; B is equal on all processes.
        mini_batch_size: samples embedded at a time.
        share: factor on loss and gradients, for gradient accumulation.

    Returns:
        The loss times ``share``, detached.

    Raises:
        XcompatError: FSDP has sharded weights that the loss reads directly.
    """
    method = accelerator.unwrap_model(model)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in method.parameters())
    parts = _split(batch, mini_batch_size)
    states: list[RandomState] = []
    embedded: list[CompatOutput] = []
    with torch.no_grad():
        for part in parts:
            states.append(RandomState.capture(part))
            embedded.append(model(**part, return_loss=False))
    whole = {name: torch.cat([output[name] for output in embedded]).requires_grad_() for name in embedded[0]}
    loss = method.loss(CompatOutput(**whole), batch)
    # weights that the loss reads directly, e.g. a learned scale, get their gradients here
    weights = [parameter for parameter in method.parameters() if parameter.requires_grad]
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, [*whole.values(), *weights], allow_unused=True)
    cached = dict(zip(whole, gradients, strict=False))
    direct = [(weight, own) for weight, own in zip(weights, gradients[len(whole) :], strict=True) if own is not None]
    if is_sharded and direct:  # FSDP gathers weights only during a forward pass
        raise XcompatError(f"mini_batch_size: the loss of {type(method).__name__} reads its own weights; launch without FSDP")
    after = RandomState.capture(batch)
    for start, (part, state) in enumerate(zip(parts, states, strict=True)):
        is_last = start == len(parts) - 1
        rows = slice(start * mini_batch_size, (start + 1) * mini_batch_size)
        with nullcontext() if is_last else accelerator.no_sync(model):
            state.restore()
            output = model(**part, return_loss=False)
            terms = [(output[name] * gradient[rows]).sum() for name, gradient in cached.items() if gradient is not None]
            if is_last:  # here data-parallel training waits for every parameter's gradient
                terms += [(weight * gradient).sum() for weight, gradient in direct]
            accelerator.backward(share * torch.stack(terms).sum())
    after.restore()
    return share * loss.detach()


def _split(batch: Batch, size: int) -> list[dict[str, Tensor]]:
    columns = {name: column.split(size) for name, column in batch.items()}
    return [dict(zip(columns, part, strict=True)) for part in zip(*columns.values(), strict=True)]

"""Prepare a model for FSDP, and gather its weights afterwards; keep DDP from sending what never changes."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel

from xcompat.models import CompatModel


def shardable(model: CompatModel) -> CompatModel:
    """Give scalar parameters (CLIP's ``logit_scale``) one dimension, as FSDP cannot shard scalars; in place."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
    return model


def autocast_inside(model: CompatModel, accelerator: Accelerator) -> None:
    """Let a model that FSDP will shard compute in half precision as one that it does not: by autocast; in place.

    FSDP's own policy, which accelerate sets instead, casts weights, inputs and outputs; losses compute in float32 and would meet
    halves of them.

    Args:
        model: not sharded yet.
        accelerator: the Trainer's, whose ``unwrap_model`` takes the wrapper off; nothing is done without FSDP2.
    """
    if not accelerator.is_fsdp2:
        return
    accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if accelerator.native_amp:
        dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.bfloat16
        plain: Any = model.forward
        model._original_forward = plain
        model.forward = MethodType(torch.autocast(accelerator.device.type, dtype)(plain.__func__), model)  # type: ignore[method-assign]


def unsharded(model: CompatModel) -> CompatModel:
    """Gather the weights that FSDP sharded: a collective call.

    Args:
        model: sharded or not.

    Returns:
        The model itself if it is not sharded, else an equal one on the CPU of every process.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    whole: CompatModel = AutoModel.from_config(model.config)
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    gathered = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().reshape(shapes[name])
        for name, tensor in model.state_dict().items()
    }
    whole.load_state_dict(gathered)
    whole._processor = model._processor
    return whole


def send_constants_once(model: CompatModel, accelerator: Accelerator) -> None:
    """Send a model's own buffers from the first process to all, and not with every step as DDP would: a collective call.

    A method fills them before training (:meth:`CompatModel.prepare`), and where it refreshes them, every process does the same.
    Buffers of layers, such as the statistics of batch norms, stay DDP's to send: they follow the batches of one process.

    Args:
        model: prepared, not wrapped yet.
        accelerator: the Trainer's; nothing is done where it uses no DDP.
    """
    if not accelerator.distributed_type.value.startswith("MULTI_"):
        return
    own = dict(model.named_buffers(recurse=False))
    for buffer in own.values():
        sent = buffer.to(accelerator.device).contiguous()
        dist.broadcast(sent, src=0)
        buffer.copy_(sent)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(own))

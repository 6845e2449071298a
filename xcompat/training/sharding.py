"""Models for several processes: FSDP, DDP and batch norms."""

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

from xcompat.core.errors import XcompatError
from xcompat.models import CompatModel


def syncs_batch_norms(method: type[CompatModel], wanted: bool | None, processes: int, device: torch.device) -> bool:
    """Return whether the batch norms of all processes share their statistics in training.

    Args:
        method: class of the model.
        wanted: ``sync_batch_norm`` of the stage; None for the method's default on GPUs.
        processes: number of processes.
        device: training device.

    Raises:
        XcompatError: several processes without GPUs cannot share statistics, but should.
    """
    if processes == 1:
        return False
    if device.type != "cuda":
        if wanted:
            raise XcompatError(
                f"sync_batch_norm: PyTorch shares statistics between GPUs, not between {processes} processes on {device.type}; "
                "set it to false, or use one process"
            )
        return False
    return method.syncs_batch_norm if wanted is None else wanted


def sync_batch_norms(model: CompatModel) -> CompatModel:
    """Replace a model's batch norms in place by those that share statistics; weights and their names stay.

    timm's converter extends PyTorch's ``SyncBatchNorm.convert_sync_batchnorm``, which would drop activations of timm's layers.
    """
    from timm.layers.norm_act import convert_sync_batchnorm

    synced: CompatModel = convert_sync_batchnorm(model)
    return synced


def shardable(model: CompatModel) -> CompatModel:
    """Give scalar parameters a dimension in place, as FSDP cannot shard scalars."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
    return model


def autocast_inside(model: CompatModel, accelerator: Accelerator) -> None:
    """Make a model autocast its forward (in place), before FSDP shards it.

    FSDP's mixed precision also casts inputs and outputs, but losses need float32.

    Args:
        model: not sharded yet.
        accelerator: of the Trainer; without FSDP2 nothing happens.
    """
    if not accelerator.is_fsdp2:
        return
    accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if accelerator.native_amp:
        dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.bfloat16
        plain: Any = model.forward
        model._original_forward = plain
        model.forward = MethodType(torch.autocast(accelerator.device.type, dtype)(plain.__func__), model)  # type: ignore[method-assign]


def gather_weights(model: CompatModel) -> CompatModel:
    """Gather sharded FSDP weights (collective call).

    Args:
        model: sharded or not.

    Returns:
        The model, or an equal model on every process's CPU.
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
    """Broadcast a model's own buffers once, and let DDP skip them (collective call).

    Every process updates them alike (:meth:`CompatModel.prepare`). DDP still sends layers' buffers, e.g. batch norm statistics.

    Args:
        model: prepared, not wrapped.
        accelerator: of the Trainer; without DDP nothing happens.
    """
    if not accelerator.distributed_type.value.startswith("MULTI_"):
        return
    own = dict(model.named_buffers(recurse=False))
    for buffer in own.values():
        sent = buffer.to(accelerator.device).contiguous()
        dist.broadcast(sent, src=0)
        buffer.copy_(sent)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(own))

"""Prepare a model for FSDP, and gather its weights afterwards."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel

from xcompat.models import CompatModel


def shardable(model: CompatModel) -> CompatModel:
    """Give scalar parameters (CLIP's ``logit_scale``) one dimension, as FSDP cannot shard scalars; in place."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
    return model


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

"""torch.compile: a method's training step is a single graph, with the loss of the plain step."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from schedule import mostly_nightly
from test_models import TRAINED, batch_for, build

FAST = {"bct", "fct", "query_map"}
CUT = {"advbct"}  # its discriminator's batch norm takes the readable rows, and their number depends on the batch


@pytest.mark.parametrize("method", mostly_nightly([name for name in TRAINED if name not in CUT], FAST.__contains__))
def test_a_training_step_is_a_single_graph(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, folder_of).train()
    batch = batch_for(model, images)
    torch._dynamo.reset()
    losses = []
    for step in (model, torch.compile(model, fullgraph=True, backend="eager")):
        torch.manual_seed(0)
        losses.append(step(**batch).loss)
    torch.testing.assert_close(losses[1], losses[0])

"""Transformers' Trainer for a stage."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DynamoBackend, parse_flag_from_env
from huggingface_hub import HfApi
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils
from transformers.optimization import get_scheduler
from transformers.training_args import OptimizerNames

from xcompat.core.distributed import process_state, rank, share_buffers
from xcompat.core.errors import InterruptedRunError, XcompatError, nearest
from xcompat.core.precision import cuda_products, kept_products
from xcompat.core.progress import console, literal, notice
from xcompat.core.threads import keep_freed_memory
from xcompat.hub.endpoint import hub_errors
from xcompat.models import CompatModel
from xcompat.training.cached_gradients import backward_in_mini_batches, check_mini_batches
from xcompat.training.callbacks import DivergenceCallback, EpochCallback, HistoryCallback, InterruptCallback, ProgressCallback
from xcompat.training.checkpoints import CheckpointCallback, last_complete_checkpoint
from xcompat.training.cost import FILE as COST
from xcompat.training.cost import CostCallback
from xcompat.training.optimiser import ADAM, USUAL, OptimiserFactory, check_optimiser, class_of, in_transformers, with_momentum
from xcompat.training.preflight import not_installed
from xcompat.training.record import LOG
from xcompat.training.refreshing import RefreshCallback
from xcompat.training.sharding import (
    autocast_inside,
    gather_weights,
    send_constants_once,
    shardable,
    sync_batch_norms,
    syncs_batch_norms,
)
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.training_sets import Data

if TYPE_CHECKING:
    from collections.abc import Sequence


DEFAULTS: dict[str, object] = {
    "dataloader_drop_last": True,  # ranks must gather equal shapes, and a padded batch would hold false negatives
    "logging_steps": 10,
    "save_total_limit": 2,
    "ddp_find_unused_parameters": False,
    "optim": USUAL,
    "trackio_static_space_id": False,  # otherwise push_to_hub publishes Trackio's log in a Space
}
"""Changed defaults of transformers; recipes may set them."""
NEEDED: dict[str, object] = {
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,  # it would hide what DivergenceCallback looks for
}
"""Arguments that every training needs."""


class StageTrainer(Trainer):
    """Transformers' Trainer with samplers, mini-batches, several learning rates, and checks.

    Args:
        model: untrained model.
        args: transformers' arguments with :data:`NEEDED`.
        data: training set and collator, and optionally a sampler for all processes and frozen models.
        settings: the stage.
        callbacks: extra callbacks.
        cost: records the cost, if set.

    Raises:
        XcompatError: the data do not fill a batch, or mini-batches do not work.
    """

    def __init__(
        self,
        model: CompatModel,
        args: TrainingArguments,
        data: Data,
        settings: StageRecipe,
        callbacks: Sequence[TrainerCallback] = (),
        cost: CostCallback | None = None,
    ) -> None:
        dataset, collator, self.sampler, self.online = data
        self.cost = cost
        self.mini_batch_size = settings.mini_batch_size
        if args.device.type == "cpu":
            keep_freed_memory()
        drawn = self.sampler if self.sampler is not None else dataset
        check_size(len(drawn) if isinstance(drawn, Sized) else None, args)
        if syncs_batch_norms(type(model), settings.sync_batch_norm, args.world_size, args.device):
            model = sync_batch_norms(model)
        if parse_flag_from_env("ACCELERATE_USE_FSDP"):
            model = shardable(model)
        else:
            nn.Module.to(model, memory_format=torch.channels_last)  # faster convolutions; FSDP refuses it
        looked_after = [
            EpochCallback(dataset, self.sampler),
            DivergenceCallback(),
            RefreshCallback(model, dataset, collator),
            CheckpointCallback(),
        ]
        with kept_products():  # accelerate allows TF32 for compiled models
            super().__init__(
                model=model.train(),
                args=args,
                train_dataset=dataset,
                data_collator=collator,
                callbacks=[*([cost] if cost is not None else []), *callbacks, *looked_after],
                optimizer_cls_and_kwargs=(OptimiserFactory, _optimiser(args, settings)),  # type: ignore[arg-type]  # same call
            )
        autocast_inside(model, self.accelerator)
        send_constants_once(model, self.accelerator)
        if self.mini_batch_size is not None:
            check_mini_batches(model, self.accelerator)

    def train(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - its own
        """Train, with different noise in each process, and TF32 products on CUDA devices unless ``args.tf32`` is False."""
        torch.manual_seed(self.args.seed + rank())
        with cuda_products(tf32=self.args.tf32 is not False):
            return super().train(*arguments, **named)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Backpropagate a batch, in mini-batches if set."""
        if self.cost is not None:
            self.cost.count(inputs)
        if self.mini_batch_size is None or self.mini_batch_size == self.args.train_batch_size:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        share = 1 / self.current_gradient_accumulation_steps
        return backward_in_mini_batches(self.accelerator, model, self._prepare_inputs(inputs), self.mini_batch_size, share)

    def compute_loss(self, model: nn.Module, inputs: dict[str, object], *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - its own
        """Request the loss, so a missing column raises by name."""
        return super().compute_loss(model, {**inputs, "return_loss": True}, *arguments, **named)

    def _prepare_inputs(self, inputs: dict[str, object]) -> dict[str, Any]:
        """Move a batch to the device, and embed it with the frozen models."""
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        return prepared if self.online is None else self.online.embed(prepared)

    def _run_epoch(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401 - transformers' own arguments
        """Run an epoch, unless training was complete: transformers would train a step more after a restart."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*arguments, **settings)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.sampler if self.sampler is not None else super()._get_train_sampler(train_dataset)


def train(model: CompatModel, data: Data, settings: StageRecipe, seed: int, folder: Path) -> CompatModel:
    """Train, resuming from the last complete checkpoint.

    Args:
        model: untrained model.
        data: training set, collator and optional sampler.
        settings: the stage.
        seed: random seed for data order and noise.
        folder: for checkpoints; logs go beside it.

    Returns:
        The model, unwrapped and unsharded.

    Raises:
        XcompatError: the data do not fill a batch, training diverged, or Ctrl-C.
    """
    bar, interrupt, history = ProgressCallback(settings.name), InterruptCallback(), HistoryCallback(folder.with_name(LOG))
    arguments, cost = training_arguments(settings, seed, folder), CostCallback(folder.with_name(COST))
    trainer = StageTrainer(model, arguments, data, settings, [bar, interrupt, history], cost)
    trainer.remove_callback(PrinterCallback)
    last = last_complete_checkpoint(folder)
    if last is not None:
        console.print(f"  [dim]continuing from {literal(last)}[/]", soft_wrap=True)
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        bar.close()
        interrupt.release()
    if interrupt.interrupted:
        raise InterruptedRunError(
            f"interrupted at step {trainer.state.global_step}; a checkpoint is kept in {folder}: start again to continue"
        )
    trained = trainer.accelerator.unwrap_model(trainer.model)
    share_buffers(trained)
    return gather_weights(trained)


def training_arguments(settings: StageRecipe, seed: int, folder: Path) -> TrainingArguments:
    """Convert the training section to transformers' arguments.

    Args:
        settings: the stage.
        seed: random seed for data order and noise.
        folder: folder for checkpoints.
    """
    on_cpu = process_state().device.type == "cpu"
    fixed = NEEDED | {
        "output_dir": str(folder),
        "seed": seed,
        "data_seed": seed,
        "disable_tqdm": True,
        # ranks read their own shards, as dispatching from rank 0 would decode everything there; copies to the device overlap
        # with the previous step
        "accelerator_config": {"dispatch_batches": False, "non_blocking": not on_cpu},
    }
    given = {**DEFAULTS, "use_cpu": on_cpu, **settings.training}
    given["optim_args"] = with_momentum(given["optim"], given.get("optim_args"))
    given["optim"] = in_transformers(given["optim"])
    try:
        with kept_products():  # transformers sets tf32 for the whole process
            arguments = TrainingArguments(**{**given, **fixed})
    except (TypeError, ValueError) as error:
        raise XcompatError(f"{settings.name}: the training section does not fit: {' '.join(str(error).split())}") from None
    if arguments.n_gpu > 1:  # DataParallel would contrast each part of a batch only with itself
        notice(f"one of {arguments.n_gpu} GPUs is used; start with `accelerate launch -m xcompat` to use all")
        arguments._n_gpu = 1
    return arguments


def check_services(settings: StageRecipe, arguments: TrainingArguments) -> None:
    """Raise early for missing packages or a failing Hub.

    Args:
        settings: the stage.
        arguments: from :func:`training_arguments`.

    Raises:
        XcompatError: with the install command or the Hub's error.
    """
    _try_out(arguments, settings)
    known = set(integration_utils.INTEGRATION_TO_CALLBACK)
    for name in arguments.report_to or ():
        if name not in known:
            raise XcompatError(f"{settings.name}: training.report_to: unknown tracker {name!r}; {nearest(name, known)}")
        if name not in integration_utils.get_available_reporting_integrations():
            raise XcompatError(not_installed(settings.name, name))
    if arguments.push_to_hub:
        with hub_errors(arguments.hub_model_id or "the account of training.push_to_hub"):
            HfApi(token=arguments.hub_token).whoami()


def _try_out(arguments: TrainingArguments, settings: StageRecipe) -> None:
    """Build optimiser, schedule and compiler for a single layer, to fail before training."""
    layer, longer = nn.Linear(1, 1), 1000 + 2 * int(arguments.warmup_steps)  # than any warm-up
    steps = arguments.max_steps if arguments.max_steps > 0 else longer
    optimiser_of = _optimiser(arguments, settings)
    fields = "optim, optim_args"
    try:
        optimiser = OptimiserFactory()(layer, **optimiser_of)
        fields = "lr_scheduler_type, lr_scheduler_kwargs, warmup_steps"
        warmup, more = arguments.get_warmup_steps(steps), arguments.lr_scheduler_kwargs
        if isinstance(more, str):
            raise TypeError(f"{more!r} is not a mapping of keys to values")
        schedule = get_scheduler(arguments.lr_scheduler_type, optimiser, warmup, steps, more)
        for factor in getattr(schedule, "lr_lambdas", ()):
            float(factor(warmup) + factor(steps))
        fields = "torch_compile_backend, torch_compile_mode"
        backend = DynamoBackend((arguments.torch_compile_backend or "inductor").upper())
        if arguments.torch_compile and backend != DynamoBackend.NO:
            torch.compile(layer, backend=backend.value.lower(), mode=arguments.torch_compile_mode)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise XcompatError(f"{settings.name}: invalid training settings ({fields}): {reason}") from None


def _optimiser(arguments: TrainingArguments, settings: StageRecipe) -> dict[str, Any]:
    given = {name: value for name in ADAM if (value := getattr(arguments, name)) != getattr(TrainingArguments, name)}
    given |= {"optim": OptimizerNames(arguments.optim).value, "optim_args": arguments.optim_args}
    try:
        check_optimiser(given)
        optimiser, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
        optimiser = class_of(settings.training.get("optim"), optimiser)
    except (ImportError, ValueError) as error:
        raise XcompatError(f"{settings.name}: {' '.join(str(error).split())}") from None
    return {
        **options,
        "optimiser": optimiser,
        "prompt_lr_factor": settings.prompt_lr_factor,
        "encoder_lr_factor": settings.encoder_lr_factor,
        "weight_decay": arguments.weight_decay,
        "decayed": settings.weight_decay_on,
    }


def check_size(samples: int | None, arguments: TrainingArguments) -> None:
    """Raise if data do not fill a batch, or training has no end.

    Args:
        samples: per epoch; None for a stream.
        arguments: from :func:`training_arguments`.

    Raises:
        XcompatError: with the setting to change.
    """
    if samples is None:
        if arguments.max_steps <= 0:
            raise XcompatError("streaming pairs have no length; set training.max_steps")
        return
    batch = arguments.train_batch_size * arguments.world_size
    if samples < batch:
        raise XcompatError(
            f"{samples} training samples do not fill one batch of {batch}; lower training.per_device_train_batch_size"
        )

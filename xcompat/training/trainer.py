"""The stock transformers Trainer, set up for one stage."""

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

from xcompat.core.distributed import process_state, rank
from xcompat.core.errors import XcompatError, nearest
from xcompat.core.progress import console, literal, notice
from xcompat.core.threads import keep_freed_memory
from xcompat.hub.endpoint import hub_errors
from xcompat.models import CompatModel
from xcompat.training.beforehand import not_installed
from xcompat.training.cached_gradients import backward_in_parts, refuse_what_parts_change
from xcompat.training.callbacks import DivergenceCallback, EpochCallback, HistoryCallback, InterruptCallback, ProgressCallback
from xcompat.training.checkpoints import CheckpointCallback, last_complete_checkpoint
from xcompat.training.cost import FILE as COST
from xcompat.training.cost import CostCallback
from xcompat.training.optimiser import ADAM, USUAL, OptimiserFactory, check_optimiser, class_of, in_transformers, with_momentum
from xcompat.training.record import LOG
from xcompat.training.refreshing import RefreshCallback
from xcompat.training.sharding import autocast_inside, send_constants_once, shardable, unsharded
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.training_sets import Data

if TYPE_CHECKING:
    from collections.abc import Sequence


DEFAULTS: dict[str, Any] = {
    "dataloader_drop_last": True,  # ranks must gather equal shapes, and a padded batch would hold false negatives
    "logging_steps": 10,
    "save_total_limit": 2,
    "ddp_find_unused_parameters": False,
    "optim": USUAL,
    "trackio_static_space_id": False,  # else a push to the Hub would publish Trackio's log in a Space
}
"""What differs from transformers' defaults; a recipe may set each."""
NEEDED: dict[str, Any] = {
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,  # it would hide what DivergenceCallback looks for
}
"""What no training goes without."""


class StageTrainer(Trainer):
    """The stock Trainer, with what every training of a compatible model needs beside it.

    It draws from a sampler of ours where there is one, embeds in mini-batches where asked to, steps at several rates of learning,
    tells model and data how far training is, and looks after losses and checkpoints.

    Args:
        model: as its method built it.
        args: transformers' own; what :data:`NEEDED` holds must stand there.
        data: training set, collator and perhaps a sampler of samples for all processes; accelerate deals its batches in turn.
        settings: the stage: its mini-batches and rates of learning.
        callbacks: more of them.
        cost: counts what training takes; nothing does without it.

    Raises:
        XcompatError: the data do not fill a batch, or the model cannot be trained in mini-batches.
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
        dataset, collator, self.sampler = data
        self.cost = cost
        self.mini_batch_size = settings.mini_batch_size
        if args.device.type == "cpu":
            keep_freed_memory()
        drawn = self.sampler if self.sampler is not None else dataset
        check_size(len(drawn) if isinstance(drawn, Sized) else None, args)
        if parse_flag_from_env("ACCELERATE_USE_FSDP"):
            model = shardable(model)
        else:
            nn.Module.to(model, memory_format=torch.channels_last)  # the layout that convolutions are fastest in; FSDP refuses it
        looked_after = [
            EpochCallback(dataset, self.sampler),
            DivergenceCallback(),
            RefreshCallback(model, dataset, collator),
            CheckpointCallback(),
        ]
        super().__init__(
            model=model.train(),
            args=args,
            train_dataset=dataset,
            data_collator=collator,
            callbacks=[*([cost] if cost is not None else []), *callbacks, *looked_after],
            optimizer_cls_and_kwargs=(OptimiserFactory, _optimiser(args, settings)),  # type: ignore[arg-type]  # is called alike
        )
        autocast_inside(model, self.accelerator)
        send_constants_once(model, self.accelerator)
        if self.mini_batch_size is not None:
            refuse_what_parts_change(model, self.accelerator)

    def train(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - its own
        """Train; noise and dropout of two processes must differ, after weights that are alike everywhere."""
        torch.manual_seed(self.args.seed + rank())
        return super().train(*arguments, **named)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Compute and backpropagate the loss of one batch, in mini-batches where asked to."""
        if self.cost is not None:
            self.cost.count(inputs)
        if self.mini_batch_size is None or self.mini_batch_size == self.args.train_batch_size:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        share = 1 / self.current_gradient_accumulation_steps
        return backward_in_parts(self.accelerator, model, self._prepare_inputs(inputs), self.mini_batch_size, share)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - its own
        """Ask for the loss, so that a batch without a column that it needs is refused by the column's name."""
        return super().compute_loss(model, {**inputs, "return_loss": True}, *arguments, **named)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.sampler if self.sampler is not None else super()._get_train_sampler(train_dataset)


def train(model: CompatModel, data: Data, settings: StageRecipe, seed: int, folder: Path) -> CompatModel:
    """Train with the stock Trainer, continuing from the last complete checkpoint.

    Args:
        model: as its method built it.
        data: training set, collator and perhaps a sampler.
        settings: the stage.
        seed: of data order and noise.
        folder: where checkpoints go; what was logged goes beside it.

    Returns:
        The trained model, unwrapped and whole.

    Raises:
        XcompatError: the data do not fill a batch, training diverged, or Ctrl-C (after saving a checkpoint).
    """
    bar, interrupt, history = ProgressCallback(settings.name), InterruptCallback(), HistoryCallback(folder.with_name(LOG))
    arguments, cost = training_arguments(settings, seed, folder), CostCallback(folder.with_name(COST))
    trainer = StageTrainer(model, arguments, data, settings, [bar, interrupt, history], cost)
    trainer.remove_callback(PrinterCallback)
    last = last_complete_checkpoint(folder)
    if last is not None:
        console.print(f"  [dim]continuing from {literal(last)}[/]")
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    finally:
        bar.close()
        interrupt.release()
    if interrupt.interrupted:
        raise XcompatError(
            f"interrupted at step {trainer.state.global_step}; a checkpoint is kept in {folder}: start again to continue"
        )
    return unsharded(trainer.accelerator.unwrap_model(trainer.model))


def training_arguments(settings: StageRecipe, seed: int, folder: Path) -> TrainingArguments:
    """Turn the recipe's training section into transformers' own arguments.

    Args:
        settings: the stage.
        seed: of data order and noise.
        folder: where checkpoints go.

    Returns:
        The arguments.
    """
    on_cpu = process_state().device.type == "cpu"
    fixed = NEEDED | {
        "output_dir": str(folder),
        "seed": seed,
        "data_seed": seed,
        "disable_tqdm": True,
        # ranks read different shards themselves; dispatching from rank 0 would decode everything there. A batch is copied while
        # the step before it is computed; a copy that is waited for would hold up what is to be launched after it
        "accelerator_config": {"dispatch_batches": False, "non_blocking": not on_cpu},
    }
    given = {**DEFAULTS, "use_cpu": on_cpu, **settings.training}
    given["optim_args"] = with_momentum(given["optim"], given.get("optim_args"))
    given["optim"] = in_transformers(given["optim"])
    try:
        arguments = TrainingArguments(**{**given, **fixed})
    except (TypeError, ValueError) as error:
        raise XcompatError(f"{settings.name}: the training section does not fit: {' '.join(str(error).split())}") from None
    if arguments.n_gpu > 1:  # the Trainer would copy the model to each, and contrast every part of a batch with itself alone
        notice(f"one of {arguments.n_gpu} GPUs is used; start with `accelerate launch -m xcompat` to use all")
        arguments._n_gpu = 1
    return arguments


def check_services(settings: StageRecipe, arguments: TrainingArguments) -> None:
    """Refuse what is not installed and a Hub that cannot be pushed to: the Trainer notices when all is embedded.

    Args:
        settings: the stage.
        arguments: of :func:`training_arguments`.

    Raises:
        XcompatError: naming the tracker or the optimiser with the line that installs it, or what is wrong with the Hub.
    """
    _try_out(arguments, settings)
    known = set(integration_utils.INTEGRATION_TO_CALLBACK)
    for name in arguments.report_to or ():
        if name not in known:
            raise XcompatError(f"{settings.name}: training.report_to names {name!r}, which is no tracker; {nearest(name, known)}")
        if name not in integration_utils.get_available_reporting_integrations():
            raise XcompatError(not_installed(settings.name, name))
    if arguments.push_to_hub:
        with hub_errors(arguments.hub_model_id or "the account of training.push_to_hub"):
            HfApi(token=arguments.hub_token).whoami()


def _try_out(arguments: TrainingArguments, settings: StageRecipe) -> None:
    """Make optimiser and schedule of a single layer, and compile it if asked to: what they refuse is said before any training.

    Raises:
        XcompatError: naming the fields of the training section.
    """
    layer, longer = nn.Linear(1, 1), 1000 + 2 * int(arguments.warmup_steps)  # than a warm-up of any length
    steps = arguments.max_steps if arguments.max_steps > 0 else longer
    optimiser_of = _optimiser(arguments, settings)
    fields = "optim, optim_args"
    try:
        optimiser = OptimiserFactory()(layer, **optimiser_of)
        fields = "lr_scheduler_type, lr_scheduler_kwargs, warmup_steps"
        warmup, more = arguments.get_warmup_steps(steps), arguments.lr_scheduler_kwargs
        if isinstance(more, str):
            raise TypeError(f"{more!r} are no keys and values")
        schedule = get_scheduler(arguments.lr_scheduler_type, optimiser, warmup, steps, more)
        for factor in getattr(schedule, "lr_lambdas", ()):
            float(factor(warmup) + factor(steps))
        fields = "torch_compile_backend, torch_compile_mode"
        backend = DynamoBackend((arguments.torch_compile_backend or "inductor").upper())
        if arguments.torch_compile and backend != DynamoBackend.NO:
            torch.compile(layer, backend=backend.value.lower(), mode=arguments.torch_compile_mode)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise XcompatError(f"{settings.name}: training ({fields}) cannot be used as it is given: {reason}") from None


def _optimiser(arguments: TrainingArguments, settings: StageRecipe) -> dict[str, Any]:
    """Return what :class:`OptimiserFactory` makes the optimiser of.

    Raises:
        XcompatError: the optimiser takes no groups of parameters, does not read what is set, or its package is not installed.
    """
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
    """Refuse data of which no batch can be made, or of which nobody knows when an epoch ends.

    Args:
        samples: their number in an epoch; None for a stream.
        arguments: of :func:`training_arguments`.

    Raises:
        XcompatError: naming what to change in the training section.
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

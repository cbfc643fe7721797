"""The distillation stage of a run: data in, a saved drafter out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from falcon_lab.bars import Bar
from falcon_lab.config.load import to_plain
from falcon_lab.config.saved import opened_drafter
from falcon_lab.config.schema import Experiment
from falcon_lab.config.trainer import epoch_batches, training_steps
from falcon_lab.data.heldout import heldout_prompts
from falcon_lab.decoding.assembling import KINDS, assemble
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.distill.inputs import derive_seed
from falcon_lab.distill.module import Distillation
from falcon_lab.drafters.saved import (
    read_drafter,
    refuse_other_node,
    refuse_other_target,
    save_drafter,
)
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, TrainableDrafter, is_trainable
from falcon_lab.sampling import Sampling
from falcon_lab.trainer import check_arguments
from falcon_lab.training import train

if TYPE_CHECKING:
    from falcon_lab.data.datamodule import FalconDataModule
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components


def train_drafter(
    experiment: Experiment,
    target: Target,
    data: FalconDataModule,
    components: Components,
    *,
    folder: Path,
    save_to: Path,
    loggers: Any = None,
    announce: Callable[[str], None] = lambda line: None,
) -> None:
    """Train the experiment's drafter and save it.

    Args:
        experiment: the configuration.
        target: the frozen teacher.
        data: packed batches.
        components: the registry.
        folder: the run's folder, where checkpoints go.
        save_to: the folder of the finished drafter, written by the first process alone.
        loggers: Lightning loggers, or None.
        announce: is called with one line for the user.

    Raises:
        FalconLabError: the drafter has no weights to train, or the training diverged.
    """
    module, callbacks = training_of(experiment, target, components, data.token_counts)
    if epoch_batches(experiment.trainer) is None:  # now that the data are known
        check_arguments(
            experiment.trainer,
            folder,
            batches=len(data.train_dataloader()),
            validation=len(data.val_dataloader()),
        )

    def begin() -> None:
        if tokens := experiment.distillation.least_squares:
            begin_at_solution(module, data, tokens)

    trainer = train(
        module,
        data,
        {**experiment.trainer, "max_steps": module.max_steps},
        folder,
        loggers,
        experiment.distillation.checkpoint_every,
        [*callbacks, SayMemory(announce)],
        begin,
    )
    module.gather()
    if trainer.is_global_zero:
        save_drafter(
            save_to,
            module.drafter,
            node=experiment.drafter,
            provenance=components.provenance("drafter", experiment.drafter),
            target=target,
            card=f"# {experiment.drafter['name']}\n\nNot measured yet.\n",
            dtype=experiment.distillation.save_dtype,
        )


def begin_at_solution(module: Distillation, data: FalconDataModule, tokens: int) -> None:
    """Solve for the drafter's first weights on so many tokens of the training data, or all.

    Raises:
        FalconLabError: the drafter has no such solution, or no document is long enough for one.
    """
    batches, device, read = data.batches(), module.target.device, 0
    solution = module.drafter.first_weights()
    with Bar(total=tokens, desc="least squares", unit="tok") as bar:
        for number in range(len(data.train_dataloader())):
            if read >= tokens:
                break
            step = module.step(module.transfer_batch_to_device(batches[number], device, 0))
            teacher = step.teacher_pass()
            inputs = step.inputs(step.batch, teacher.features, teacher.taps, 0.0)
            solution.add(inputs, teacher.features)
            read += step.batch.tokens.numel()
            bar.update(step.batch.tokens.numel())
    if not solution.assign():
        raise FalconLabError(
            "distillation.least_squares found no document that is longer than a block; see data"
        )


def check_training(
    experiment: Experiment,
    target: Target,
    components: Components,
    folder: Path,
    *,
    stands_in: bool = False,
) -> None:
    """See that the drafter can be trained, without training it.

    Args:
        experiment: the configuration.
        target: the teacher, or a stand-in of its shape.
        components: the registry.
        folder: the run's folder, which need not be there.
        stands_in: whether it is a stand-in, for which no drafter can have been trained.

    Raises:
        FalconLabError: Lightning refuses an argument, or the drafter cannot be trained so.
    """
    data = experiment.data
    check_arguments(
        experiment.trainer,
        folder,
        batches=epoch_batches(experiment.trainer),
        validation=-(-data.validation // data.batch_size),
    )
    training_of(experiment, target, components, stands_in=stands_in)


def training_of(
    experiment: Experiment,
    target: Target,
    components: Components,
    token_counts: Callable[[], Tensor] | None = None,
    *,
    stands_in: bool = False,
) -> tuple[Distillation, list[Callback]]:
    """Assemble what is trained, and the callbacks that the experiment asks for.

    ``token_counts`` of the data choose a draft vocabulary; None where there are no data yet.
    """
    drafter = build_drafter(experiment, target, components, token_counts, stands_in=stands_in)
    context = BuildContext.of(target, drafter)
    module = Distillation(
        target,
        drafter,
        components.build("objective", experiment.objective, context),
        components.build("schedule", experiment.glancing, context),
        experiment.distillation,
        seed=experiment.seed,
        max_steps=training_steps(experiment.trainer),
        hyperparameters=to_plain(experiment),
    )
    callbacks: list[Callback] = []
    if experiment.distillation.decode_every:
        callbacks.append(decoding_check(experiment, target, drafter, components))
    return module, callbacks


def build_drafter(
    experiment: Experiment,
    target: Target,
    components: Components,
    token_counts: Callable[[], Tensor] | None = None,
    *,
    stands_in: bool = False,
) -> Any:
    """Build the drafter that is to be trained.

    Fresh weights depend on the experiment's seed alone, and a draft vocabulary on the data too;
    both are those of ``distillation.start`` where it names a drafter.

    Raises:
        FalconLabError: it has nothing to train, or the one to start with does not fit.
    """
    node, config = experiment.drafter, experiment.distillation
    if config.start is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(experiment.seed, "weights"))
            context = BuildContext(host=target, token_counts=token_counts, saved=refuse_saved)
            drafter = components.build("drafter", node, context)
    else:
        drafter = drafter_of(config.start, node, target, components, stands_in=stands_in)
    if not is_trainable(drafter):
        raise FalconLabError(
            f"drafter.name is {node['name']}, which has nothing to train; name a trainable one, "
            "or leave the stages data and distil out"
        )
    return drafter


def drafter_of(
    start: str,
    node: Mapping[str, Any],
    target: Target,
    components: Components,
    *,
    stands_in: bool = False,
) -> Any:
    """Read the drafter that a training starts with.

    Args:
        start: its folder or name.
        node: the kind and options that it must have.
        target: the teacher.
        components: the registry.
        stands_in: whether the teacher is a stand-in, of which only the sizes are compared.

    Raises:
        FalconLabError: there is no such drafter, it is another one, or was trained for another
            target.
    """
    try:
        with opened_drafter(start, components) as folder:
            refuse_other_node(folder, node, components)
            if stands_in:
                refuse_other_target(folder, target)
            return read_drafter(folder, target, components, force=stands_in)
    except FalconLabError as error:
        raise FalconLabError(f"distillation.start: {error}") from error


def refuse_saved(path: str | None) -> NoReturn:
    """Refuse to train a drafter that is said to be trained.

    Raises:
        FalconLabError: always.
    """
    raise FalconLabError(
        "drafter 'saved' is one that was trained before; name it in evaluation.methods and leave "
        "the stages data and distil out, or train it further: distillation.start=FOLDER beside the "
        "drafter that its config.json describes"
    )


def decoding_check(
    experiment: Experiment, target: Target, drafter: TrainableDrafter, components: Components
) -> DecodingCheck:
    """Build the callback that ``distillation.decode_every`` asks for."""
    config, parts = experiment.distillation, {key: getattr(experiment, key) for key in KINDS}
    engine = assemble(target, drafter, parts, components, decoding=experiment.decoding)
    # The seed keeps these prompts apart from those of the evaluation, which stay unseen.
    seed = derive_seed(experiment.data.seed, "probe") % 2**31
    found = heldout_prompts(experiment.data.corpus, target.tokenizer, seed=seed)
    texts = [prompt.turns[0] for prompt in islice(found, config.decode_prompts)]
    return DecodingCheck(
        engine,
        [target.tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts],
        every=config.decode_every,
        max_new_tokens=config.decode_tokens,
        stop=StopCondition(target.eos_ids, [], target.tokenizer),
        seed=experiment.seed,
    )


class SayMemory(Callback):
    """Says before the first step what a process has of a target that several share.

    Args:
        announce: is called with one line for the user.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it once, in the first process."""
        if isinstance(pl_module, Distillation) and pl_module.shared and trainer.is_global_zero:
            self._announce(pl_module.shared.sentence(pl_module.drafter))


class DecodingCheck(Callback):
    """Decodes a few prompts every so many steps and logs ``decode/mean_accepted``.

    That is the acceptance length τ, the bonus token counted. The first process does it alone.

    Args:
        engine: with the drafter that is being trained.
        prompts: ``[T]`` long each, on any device.
        every: optimiser steps between two checks.
        max_new_tokens: length of an answer.
        stop: what ends an answer.
        sampling: how tokens are drawn.
        seed: of the draws.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        prompts: Sequence[Tensor],
        *,
        every: int,
        max_new_tokens: int,
        stop: StopCondition,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        self.engine, self.prompts, self.every = engine, prompts, every
        self.max_new_tokens, self.stop = max_new_tokens, stop
        self.sampling = sampling or Sampling()
        self.seed = seed
        self._last_step = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decode when a step is due, once for all micro-batches of the step."""
        step = trainer.global_step
        if not self.every or step % self.every or step == self._last_step:
            return
        self._last_step = step
        if trainer.is_global_zero and (mean := self.acceptance_length(pl_module, step)) is not None:
            for logger in trainer.loggers:  # ``log`` would repeat the value in later steps
                logger.log_metrics({"decode/mean_accepted": mean}, step=step - 1)

    def acceptance_length(self, module: LightningModule, step: int) -> float | None:
        """Return the tokens per round over all prompts, or None where there was no round."""
        generator = torch.Generator(device=module.device)
        generator.manual_seed(derive_seed(self.seed, "decode", step))
        training = module.training
        module.eval()
        rounds = []
        for prompt in self.prompts:
            generation = self.engine.generate(
                prompt.to(module.device),
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                generator=generator,
                stop=self.stop,
            )
            rounds += generation.rounds
        module.train(training)
        if not rounds:
            return None
        return 1 + sum(done.accepted for done in rounds) / len(rounds)

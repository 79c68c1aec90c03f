"""Optimizer: the algorithm and the learning rate schedule."""

from comfy_api.latest import io

from ...train.optim.optimizers import check_arguments
from ...train.optim.options import LR_SCHEDULERS, OptimizerOptions
from ...train.optim.registry import OPTIMIZERS
from ..common.types import OptimizerType


class TesseraOptimizer(io.ComfyNode):
    """Options of the optimizer and its schedule."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraOptimizer",
            display_name="Optimizer",
            category="Tessera/training",
            description="Sets the optimizer and its learning rate schedule. Connect it to Train LoRA.",
            search_aliases=["adamw", "prodigy", "learning rate", "scheduler", "warm-up"],
            inputs=[
                io.Combo.Input(
                    "optimizer",
                    options=list(OPTIMIZERS),
                    default=OptimizerOptions.optimizer,
                    tooltip="adamw: the usual one. adamw8bit: the same with a quarter of the memory for its state "
                    "(needs the package bitsandbytes). prodigy: finds its own rate (needs the package prodigyopt; "
                    "set learning_rate to 1). adafactor: hardly any memory for its state. came: as steady as adamw "
                    "with half its memory (needs pytorch-optimizer). adamw_schedulefree: averages the weights itself "
                    "and needs no schedule (needs schedulefree). lion: half of adamw's memory, a tenth of its rate "
                    "(needs pytorch-optimizer). muon: updates all directions of a matrix equally, good for rank 32 "
                    "and above. custom: the class in optimizer_class.",
                ),
                io.Float.Input(
                    "learning_rate",
                    default=OptimizerOptions.learning_rate,
                    min=1e-7,
                    max=10.0,
                    step=1e-6,
                    round=False,
                    tooltip="Size of each step. For adamw 0.0001 is a good start: lower it if pictures fall apart, "
                    "raise it if nothing is learnt. For prodigy it is 1, for lion about 0.00002.",
                ),
                io.Combo.Input(
                    "lr_scheduler",
                    options=list(LR_SCHEDULERS),
                    default=OptimizerOptions.lr_scheduler,
                    tooltip="How the learning rate changes after the warm-up. constant: it stays. cosine and linear: "
                    "it falls to min_lr_ratio by the last step, which steadies the end of a long run. "
                    "cosine_with_restarts: falls lr_cycles times. polynomial: along a power. warmup_stable_decay: "
                    "only at the end. rex: late and fast. inverse_sqrt: slower and slower, whatever the length of "
                    "the run. curve: as set in lr_curve.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=OptimizerOptions.warmup_steps,
                    min=0,
                    max=1_000_000,
                    tooltip="Steps over which the learning rate rises to its full value; 0 starts with it. Must be "
                    "below steps. 50 to 100 helps if the loss jumps at the start.",
                ),
                io.Float.Input(
                    "max_grad_norm",
                    default=OptimizerOptions.max_grad_norm,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=False,
                    tooltip="Limits the gradient (its norm over the LoRA) to this, so one odd batch does no harm. 0 "
                    "turns it off.",
                ),
                io.Float.Input(
                    "weight_decay",
                    default=OptimizerOptions.weight_decay,
                    min=0.0,
                    max=10.0,
                    step=0.001,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Pulls the LoRA's weights towards zero: each step by this part of the learning rate. Raise "
                    "it to 0.1 against overfitting; 0 turns it off. custom reads it from optimizer_args.",
                ),
                io.Float.Input(
                    "beta1",
                    default=OptimizerOptions.beta1,
                    min=0.0,
                    max=0.9999,
                    step=0.01,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="How long the average of the gradients remembers, 0 to below 1. Rarely changed. "
                    "muon, custom and others that aren't of Adam's kind have values of their own, which "
                    "optimizer_args changes.",
                ),
                io.Float.Input(
                    "beta2",
                    default=OptimizerOptions.beta2,
                    min=0.0,
                    max=0.99999,
                    step=0.001,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="How long the average of the squared gradients remembers, 0 to below 1. 0.99 adapts "
                    "faster in short runs.",
                ),
                io.Float.Input(
                    "eps",
                    default=OptimizerOptions.eps,
                    min=1e-16,
                    max=1.0,
                    step=1e-9,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Prevents division by very small numbers. Rarely changed.",
                ),
                io.Float.Input(
                    "min_lr_ratio",
                    default=OptimizerOptions.min_lr_ratio,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Where the falling schedules end, as a part of learning_rate: 0 falls to zero, 0.1 to a "
                    "tenth. Not used by constant and curve.",
                ),
                io.Int.Input(
                    "lr_cycles",
                    default=OptimizerOptions.lr_cycles,
                    min=1,
                    max=1000,
                    optional=True,
                    advanced=True,
                    tooltip="How often cosine_with_restarts falls from the full rate; each fall but the last ends "
                    "in a jump back up. 1 is the same as cosine.",
                ),
                io.Float.Input(
                    "lr_power",
                    default=OptimizerOptions.lr_power,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="How polynomial falls: 1 is a straight line, 2 falls faster at first, 0.5 faster at "
                    "the end.",
                ),
                io.Float.Input(
                    "lr_decay_part",
                    default=OptimizerOptions.lr_decay_part,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="The last part of the run over which warmup_stable_decay falls; before that the rate is "
                    "constant. 0.1 to 0.2 is usual.",
                ),
                io.String.Input(
                    "lr_curve",
                    default=OptimizerOptions.lr_curve,
                    optional=True,
                    advanced=True,
                    tooltip="The rate of curve after the warm-up: points percent:factor, in percent of the steps and "
                    "as factor of learning_rate, with straight lines between them. 0:1, 50:1, 100:0.1 stays for half "
                    "the run and then falls to a tenth.",
                ),
                io.Float.Input(
                    "ema_decay",
                    default=OptimizerOptions.ema_decay,
                    min=0.0,
                    max=0.99999,
                    step=0.001,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Above 0 the saved LoRA is a moving average over the steps: steadier, but a little "
                    "slower to follow. 0.99 averages over about 100 steps, 0.999 over 1000; shorter at the start of "
                    "a run. 0 is off.",
                ),
                io.String.Input(
                    "optimizer_class",
                    default=OptimizerOptions.optimizer_class,
                    placeholder="torch.optim.NAdam",
                    optional=True,
                    advanced=True,
                    tooltip="For the optimizer custom: a class with its package, such as torch.optim.NAdam or "
                    "pytorch_optimizer.SOAP. It uses its own defaults except for learning_rate; optimizer_args "
                    "changes them.",
                ),
                io.String.Input(
                    "optimizer_args",
                    default=OptimizerOptions.optimizer_args,
                    multiline=True,
                    placeholder="key=value, one per line",
                    optional=True,
                    advanced=True,
                    tooltip="Further arguments of the optimizer, one key=value per line, with plain values: "
                    "betas=(0.9, 0.99) or decouple=True. They override the inputs above; arguments that the "
                    "optimizer doesn't know are an error.",
                ),
            ],
            outputs=[OptimizerType.Output(display_name="optimizer")],
        )

    # A coroutine, as ComfyUI runs those first: errors here are raised before anything is loaded or encoded.
    @classmethod
    async def execute(  # noqa: PLR0913
        cls,
        optimizer: str,
        learning_rate: float,
        lr_scheduler: str,
        warmup_steps: int,
        max_grad_norm: float,
        weight_decay: float = OptimizerOptions.weight_decay,
        beta1: float = OptimizerOptions.beta1,
        beta2: float = OptimizerOptions.beta2,
        eps: float = OptimizerOptions.eps,
        min_lr_ratio: float = OptimizerOptions.min_lr_ratio,
        lr_cycles: int = OptimizerOptions.lr_cycles,
        lr_power: float = OptimizerOptions.lr_power,
        lr_decay_part: float = OptimizerOptions.lr_decay_part,
        lr_curve: str = OptimizerOptions.lr_curve,
        ema_decay: float = OptimizerOptions.ema_decay,
        optimizer_class: str = OptimizerOptions.optimizer_class,
        optimizer_args: str = OptimizerOptions.optimizer_args,
    ) -> io.NodeOutput:
        options = OptimizerOptions(
            optimizer=optimizer,
            learning_rate=learning_rate,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            max_grad_norm=max_grad_norm,
            weight_decay=weight_decay,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            min_lr_ratio=min_lr_ratio,
            lr_cycles=lr_cycles,
            lr_power=lr_power,
            lr_decay_part=lr_decay_part,
            lr_curve=lr_curve,
            ema_decay=ema_decay,
            optimizer_class=optimizer_class.strip(),
            optimizer_args=optimizer_args,
        )
        check_arguments(options)
        return io.NodeOutput(options)


NODES: list[type[io.ComfyNode]] = [TesseraOptimizer]

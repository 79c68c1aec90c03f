"""The nodes that set how Train LoRA works; one that is not connected stands for the defaults that it shows."""

from comfy_api.latest import io

from ..train.options import LR_SCHEDULERS, OPTIMIZERS, NetworkOptions, OptimizerOptions
from ..train.targets import parse_targets

NetworkType = io.Custom("TESSERA_NETWORK")
OptimizerType = io.Custom("TESSERA_OPTIMIZER")


class TesseraLoraNetwork(io.ComfyNode):
    """Which layers are trained, and with how many numbers each."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraLoraNetwork",
            display_name="LoRA Network",
            category="Tessera/training",
            description="Sets the size of the LoRA and the layers that it changes. Connect it to Train LoRA.",
            search_aliases=["lora rank", "lora alpha", "lora targets"],
            inputs=[
                io.Combo.Input(
                    "algorithm",
                    options=["lora"],
                    default=NetworkOptions.algorithm,
                    tooltip="The kind of adapter. lora: two small matrices for each layer.",
                ),
                io.Int.Input(
                    "rank",
                    default=NetworkOptions.rank,
                    min=1,
                    max=1024,
                    tooltip="How much the LoRA can hold: the inner size of its matrices. 4 to 16 suits a face, a thing "
                    "or a simple style, 32 to 64 a wide subject. The file's size grows with it.",
                ),
                io.Float.Input(
                    "alpha",
                    default=NetworkOptions.alpha,
                    min=0.01,
                    max=4096.0,
                    step=0.5,
                    round=False,
                    tooltip="The update is scaled by alpha / rank. Equal to rank leaves it unscaled; half of rank is "
                    "about the same as half the learning rate. Change it only with the rank.",
                ),
                io.String.Input(
                    "targets",
                    default="",
                    multiline=True,
                    placeholder="empty: the layers that suit the model",
                    tooltip="The layers to train: one pattern of module names per line, with * for any text and ? for "
                    "any letter; a line that starts with - or ! leaves layers out. Empty trains what suits the model "
                    "(for FLUX every layer in its blocks but modulation). Examples for FLUX: "
                    "double_blocks.*.img_attn.* (attention to the picture), single_blocks.* (all single blocks), "
                    "-*.txt_mlp.* (leave these out of the lines above).",
                ),
                io.Float.Input(
                    "dropout",
                    default=NetworkOptions.dropout,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    round=False,
                    tooltip="The part of the LoRA's inner values that is set to zero at random in each step, 0 to 1. "
                    "0.1 can help against learning few pictures by heart; 0 is off.",
                ),
            ],
            outputs=[NetworkType.Output(display_name="network")],
        )

    @classmethod
    def execute(cls, algorithm: str, rank: int, alpha: float, targets: str, dropout: float) -> io.NodeOutput:
        include, exclude = parse_targets(targets)
        return io.NodeOutput(NetworkOptions(algorithm, rank, alpha, include, exclude, dropout))


class TesseraOptimizer(io.ComfyNode):
    """How the LoRA's weights are stepped."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraOptimizer",
            display_name="Optimizer",
            category="Tessera/training",
            description="Sets the optimizer and how its learning rate runs. Connect it to Train LoRA.",
            search_aliases=["adamw", "prodigy", "learning rate", "scheduler", "warm-up"],
            inputs=[
                io.Combo.Input(
                    "optimizer",
                    options=list(OPTIMIZERS),
                    default=OptimizerOptions.optimizer,
                    tooltip="adamw: the usual one. adamw8bit: the same with a quarter of the memory for its state "
                    "(needs the package bitsandbytes). prodigy: finds its rate by itself (needs the package "
                    "prodigyopt; set learning_rate to 1).",
                ),
                io.Float.Input(
                    "learning_rate",
                    default=OptimizerOptions.learning_rate,
                    min=1e-7,
                    max=10.0,
                    step=1e-6,
                    round=False,
                    tooltip="Size of each step. For adamw 0.0001 is a good start: lower it if the pictures fall apart, "
                    "raise it if nothing is learnt. For prodigy it is 1.",
                ),
                io.Combo.Input(
                    "lr_scheduler",
                    options=list(LR_SCHEDULERS),
                    default=OptimizerOptions.lr_scheduler,
                    tooltip="How the learning rate runs after the warm-up. constant: stays. cosine and linear: fall to "
                    "min_lr_ratio of it by the last step, which steadies the end of a long run.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=OptimizerOptions.warmup_steps,
                    min=0,
                    max=1_000_000,
                    tooltip="Steps over which the learning rate rises to its full value; 0 starts with it. Must be "
                    "below the steps of the run. 50 to 100 helps where the loss jumps at the start.",
                ),
                io.Float.Input(
                    "max_grad_norm",
                    default=OptimizerOptions.max_grad_norm,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=False,
                    tooltip="Gradients longer than this (their norm over all of the LoRA) are cut to it, so that one "
                    "odd batch does no harm. 0 turns it off.",
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
                    "it to 0.1 against overfitting; 0 turns it off.",
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
                    tooltip="How long the mean of the gradients remembers, 0 to below 1. Rarely changed.",
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
                    tooltip="How long the mean of their squares remembers, 0 to below 1. 0.99 adapts faster in short "
                    "runs.",
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
                    tooltip="Keeps the division by small gradients in bounds. Rarely changed.",
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
                    tooltip="Where cosine and linear end, as a part of learning_rate: 0 falls to nothing, 0.1 to a "
                    "tenth. The constant schedule does not read it.",
                ),
            ],
            outputs=[OptimizerType.Output(display_name="optimizer")],
        )

    @classmethod
    def execute(
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
    ) -> io.NodeOutput:
        return io.NodeOutput(
            OptimizerOptions(
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
            )
        )


NODES: list[type[io.ComfyNode]] = [TesseraLoraNetwork, TesseraOptimizer]

"""The node that sets what Train LoRA trains; not connected, it stands for the defaults that it shows."""

from comfy_api.latest import io

from ..train.options import NetworkOptions
from ..train.targets import parse_targets

NetworkType = io.Custom("TESSERA_NETWORK")


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


NODES: list[type[io.ComfyNode]] = [TesseraLoraNetwork]

"""Inputs of LoRA Network."""

from comfy_api.latest import io

from ...lora.options import ALGORITHMS, NONE, SAME, NetworkOptions
from ...models.adapters.registry import INITS
from ..common.types import LoraModelType
from .lora_files import lora_files


def _strength(name: str, tooltip: str) -> io.Input:
    """Build the input for the strength of a LoRA applied beneath the trained one."""
    default = getattr(NetworkOptions, name)
    return io.Float.Input(
        name,
        default=default,
        min=-10.0,
        max=10.0,
        step=0.05,
        round=False,
        optional=True,
        advanced=True,
        tooltip=tooltip,
    )


def _probability(name: str, tooltip: str) -> io.Input:
    """Build the input for the probability of a rarely used dropout."""
    default = getattr(NetworkOptions, name)
    return io.Float.Input(
        name, default=default, min=0.0, max=0.99, step=0.01, round=False, optional=True, advanced=True, tooltip=tooltip
    )


def network_inputs() -> list[io.Input]:
    """Build all inputs, in the order of saved workflows."""
    return [
        io.Combo.Input(
            "algorithm",
            options=list(ALGORITHMS),
            default=NetworkOptions.algorithm,
            tooltip="The kind of adapter. lora: two small matrices for each layer, read everywhere. dora: the same, "
            "with the length of the weights trained separately; often a little better at a low rank, and slower. "
            "loha: more detail at the same file size. lokr: very small files, good for styles. oft: rotates a "
            "layer's output and preserves what the model knows best.",
        ),
        io.Int.Input(
            "rank",
            default=NetworkOptions.rank,
            min=1,
            max=1024,
            tooltip="How much the LoRA can learn: the inner size of its matrices. 4 to 16 is good for a face, an "
            "object or a simple style, 32 to 64 for a broad subject. The file grows with it.",
        ),
        io.Float.Input(
            "alpha",
            default=NetworkOptions.alpha,
            min=0.01,
            max=4096.0,
            step=0.5,
            round=False,
            tooltip="The update is scaled by alpha / rank. alpha = rank leaves it unscaled; alpha = rank / 2 is "
            "about the same as half the learning rate. Change it only together with rank. oft ignores it.",
        ),
        io.String.Input(
            "targets",
            default="",
            multiline=True,
            placeholder="empty: the layers that suit the model",
            tooltip="The layers to train: one pattern of module names per line, with * for any text and ? for any "
            "letter; a line that starts with - or ! excludes layers. Empty trains what suits the model (for FLUX "
            "every layer in its blocks except modulation). Examples for FLUX: double_blocks.*.img_attn.* (attention "
            "to the picture), single_blocks.* (all single blocks), -*.txt_mlp.* (excludes these from the lines "
            "above).",
        ),
        io.Float.Input(
            "dropout",
            default=NetworkOptions.dropout,
            min=0.0,
            max=0.99,
            step=0.01,
            round=False,
            tooltip="The part of the LoRA's inner values that is set to zero at random in each step, 0 to 1. 0.1 can "
            "help against overfitting on few pictures; 0 is off.",
        ),
        io.Float.Input(
            "lora_plus_ratio",
            default=NetworkOptions.lora_plus_ratio,
            min=0.01,
            max=256.0,
            step=0.5,
            round=False,
            optional=True,
            advanced=True,
            tooltip="LoRA+: how many times faster the second matrix of each layer learns than the first. 1 is plain "
            "LoRA. 4 to 16 learns faster at the same learning_rate; lower that if the loss jumps. Not for prodigy, "
            "which uses one rate for everything.",
        ),
        io.Float.Input(
            "scale_weight_norms",
            default=NetworkOptions.scale_weight_norms,
            min=0.0,
            max=1000.0,
            step=0.1,
            round=False,
            optional=True,
            advanced=True,
            tooltip="The largest size (Frobenius norm) that the change of a layer may have; larger ones are scaled "
            "down after each step. 0 is off, 1 is usual. It stops a few layers from dominating, so LoRAs mix better; "
            "lower it if pictures look burnt. For lora, loha and lokr.",
        ),
        io.Combo.Input(
            "start_from",
            options=[NONE, *lora_files()],
            default=NONE,
            optional=True,
            tooltip="A LoRA that training starts from, from ComfyUI's LoRA folders, in any format that ComfyUI "
            "reads, trained on the same model. If your rank differs from its rank it is converted; a higher rank "
            "loses nothing.",
        ),
        LoraModelType.Input(
            "start_lora",
            optional=True,
            tooltip="The same from the graph: a LORA_MODEL, such as the output of another Train LoRA. Leave "
            "start_from at none.",
        ),
        io.Combo.Input(
            "base_lora",
            options=[NONE, *lora_files()],
            default=NONE,
            optional=True,
            advanced=True,
            tooltip="A LoRA that is applied while training but not trained, as if it were part of the model. The new "
            "one learns only what is missing, so use both together afterwards. A LoRA that is already on the MODEL "
            "does the same.",
        ),
        _strength(
            "base_strength",
            "How strongly base_lora is applied while training, as in a LoRA loader; use the same strength there "
            "afterwards.",
        ),
        _probability(
            "rank_dropout",
            "The probability that a rank is left out for one sample in one step, 0 to 1 (for loha and lokr a row of "
            "the update, for oft a block). 0.1 spreads learning over all ranks; 0 is off.",
        ),
        _probability(
            "module_dropout",
            "The probability that a layer goes without its adapter for one sample in one step, 0 to 1. 0.1 to 0.3 "
            "can help against overfitting on few pictures; 0 is off.",
        ),
        io.String.Input(
            "rank_patterns",
            default=NetworkOptions.rank_patterns,
            multiline=True,
            optional=True,
            placeholder="single_blocks.*: rank=8 alpha=4",
            tooltip="Another rank or alpha for some layers, one per line: a pattern as in targets, a colon, rank= or "
            "alpha= or both. A rank without an alpha keeps the ratio alpha / rank; later lines win. Blocks with "
            "different ranks are compiled separately. Use it to spend the file size where it matters.",
            advanced=True,
        ),
        io.Int.Input(
            "factor",
            default=NetworkOptions.factor,
            min=-1,
            max=1024,
            optional=True,
            advanced=True,
            tooltip="For lokr: the size of its small matrix. -1 splits each layer near its square root, for the "
            "smallest file; 4 to 16 makes larger files that can learn more.",
        ),
        io.Float.Input(
            "constraint",
            default=NetworkOptions.constraint,
            min=0.0,
            max=1.0,
            step=0.0001,
            round=False,
            optional=True,
            advanced=True,
            tooltip="For oft: how far a layer may rotate, as a fraction of its outputs. 0 is no limit; 0.0001 to "
            "0.001 stays close to the model.",
        ),
        io.Model.Input(
            "model",
            optional=True,
            tooltip="Only for a preview on this node: connect the model to see which layers match, how many numbers "
            "are trained and how large the file will be.",
        ),
        io.Combo.Input(
            "init",
            options=list(INITS),
            default=NetworkOptions.init,
            optional=True,
            advanced=True,
            tooltip="The LoRA's starting values; the model is unchanged at the start with all of them. kaiming: "
            "small random numbers, the usual choice. gaussian: larger ones, as in PEFT. pissa: the strongest "
            "directions of each layer, which learns faster in few steps; its file has twice the rank.",
        ),
        io.Combo.Input(
            "start_from_low_noise",
            options=[SAME, NONE, *lora_files()],
            default=SAME,
            optional=True,
            advanced=True,
            tooltip="For Wan 2.2 with model_low_noise connected to Train LoRA: the LoRA that the low noise expert "
            "starts from, such as the one that ends in _low_noise, with its partner at start_from. same uses "
            "start_from for both.",
        ),
        LoraModelType.Input(
            "start_lora_low_noise",
            optional=True,
            tooltip="The same from the graph: a LORA_MODEL, such as lora_low_noise of another Train LoRA. "
            "Leave start_from_low_noise at same.",
        ),
        io.Combo.Input(
            "base_lora_low_noise",
            options=[SAME, NONE, *lora_files()],
            default=SAME,
            optional=True,
            advanced=True,
            tooltip="For Wan 2.2 with model_low_noise connected: like base_lora, for the low noise expert. same uses "
            "base_lora and base_strength for both.",
        ),
        _strength(
            "base_strength_low_noise",
            "How strongly base_lora_low_noise is applied while training, as in a LoRA loader. Not used "
            "while that is same or none.",
        ),
        io.Combo.Input(
            "training_adapter",
            options=[NONE, *lora_files()],
            default=NONE,
            optional=True,
            advanced=True,
            tooltip="A LoRA that is applied only while training; previews, Compare LoRAs and the saved file don't "
            "have it. Use the training adapter of a distilled model here, such as Z-Image-Turbo's: it removes the "
            "distillation meanwhile, so your LoRA doesn't have to. Use your LoRA without it afterwards.",
        ),
        _strength(
            "training_adapter_strength",
            "How strongly training_adapter is applied while training, as in a LoRA loader. 1 is what adapters "
            "are made for.",
        ),
        io.Combo.Input(
            "training_adapter_low_noise",
            options=[SAME, NONE, *lora_files()],
            default=SAME,
            optional=True,
            advanced=True,
            tooltip="For Wan 2.2 with model_low_noise connected: the training adapter of the low noise expert. same "
            "uses training_adapter and its strength for both.",
        ),
        _strength(
            "training_adapter_strength_low_noise",
            "How strongly training_adapter_low_noise is applied while training. Not used while that is same or none.",
        ),
    ]

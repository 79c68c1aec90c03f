"""Merge LoRAs, Resize LoRA and Extract LoRA."""

from collections.abc import Callable, Mapping

import comfy.utils
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from torch import Tensor

from ...common.text import quoted
from ...lora.options import NetworkOptions
from ...lora.tools.components import Size
from ...lora.tools.conversion import ALGORITHMS, LORA, advice, check_conversion, convert_lora, with_network
from ...lora.tools.layerwise import NewLora, Tell, extract_lora, merge_loras, read_factors
from ...lora.tools.merge import METHODS, WEIGHTED
from ...lora.tools.updates import Updates, lora_model_of
from ...memory.weights.frozen import FrozenWeights, unload
from ...models.catalogue.registry import family_of
from ...models.convolutions import weight_shapes
from ..common.types import LoraModelType
from .compare_columns import read_strengths

_RANK = {"min": 0, "max": 4096}


def _energy() -> io.Input:
    return io.Float.Input(
        "energy",
        default=1.0,
        min=0.01,
        max=1.0,
        step=0.01,
        advanced=True,
        tooltip="How much of a layer's change is enough, as a part of its squared norm. 0.98 makes smaller files: a "
        "layer gets only the ranks that it needs for that.",
    )


def _outputs() -> list[io.Output]:
    return [
        LoraModelType.Output(display_name="lora", tooltip="For Save LoRA, Compare LoRAs or Load LoRA Model."),
        io.String.Output(display_name="report", tooltip="The ranks of the layers, and how much was left out."),
    ]


class TesseraMergeLoras(io.ComfyNode):
    """Merges several LoRAs of one model into one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraMergeLoras",
            display_name="Merge LoRAs",
            category="Tessera/output",
            description="Merges several LoRAs of one model into one, by a weighted sum or by a method that keeps them "
            "from cancelling each other.",
            search_aliases=["combine loras", "lora merge", "ties", "dare", "add loras"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input("model", tooltip="The model that the LoRAs are for, from any loader. It isn't changed."),
                io.Autogrow.Input(
                    "lora_models",
                    template=io.Autogrow.TemplatePrefix(LoraModelType.Input("lora"), prefix="lora", min=2, max=8),
                    tooltip="The LoRAs, from Load LoRA File or Train LoRA; another input appears when one is "
                    "connected.",
                ),
                io.String.Input(
                    "weights",
                    default="1",
                    tooltip="How much each LoRA counts, in their order, such as 1, 0.6. A single number counts for "
                    "all of them.",
                ),
                io.Combo.Input(
                    "method",
                    options=list(METHODS),
                    default=WEIGHTED,
                    tooltip="weighted: the same as loading all of them at these strengths. ties: where they disagree, "
                    "the stronger direction wins, for LoRAs that spoil each other. dare, dare ties: thinned out at "
                    "random first.",
                ),
                io.Int.Input(
                    "rank",
                    default=0,
                    **_RANK,
                    tooltip="The largest rank of the merged LoRA. 0 adds the ranks up, so that a weighted sum is "
                    "exact; a number makes a smaller file.",
                ),
                io.Float.Input(
                    "density",
                    default=0.5,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    advanced=True,
                    tooltip="For ties and dare: the part of each LoRA's numbers that is kept. 1 keeps all.",
                ),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**63 - 1, advanced=True, tooltip="For dare: which numbers are kept."
                ),
                _energy(),
            ],
            outputs=_outputs(),
        )

    @classmethod
    def execute(
        cls,
        model: ModelPatcher,
        lora_models: Mapping[str, Mapping[str, Tensor] | None],
        weights: str,
        method: str,
        rank: int,
        density: float,
        seed: int,
        energy: float,
    ) -> io.NodeOutput:
        loras = [lora for lora in lora_models.values() if lora is not None]
        if len(loras) < 2:
            raise ValueError("lora_models has fewer than two LoRAs; connect at least two.")
        if method not in METHODS:
            raise ValueError(f"method is {quoted(method)}; choose one of {', '.join(METHODS)}.")
        numbers = _weights(weights, len(loras))
        with torch.inference_mode(False), torch.no_grad():
            updates = [_updates(lora, model, f"lora_models: LoRA {n}") for n, lora in enumerate(loras, 1)]
            new_lora = merge_loras(updates, numbers, method, density, seed, Size(rank, energy), _tell(cls))
        return _result(new_lora, model, updates, {"ss_output_name": "merged"})


class TesseraResizeLora(io.ComfyNode):
    """Changes the rank of a LoRA, its algorithm, and the strength of its blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraResizeLora",
            display_name="Resize LoRA",
            category="Tessera/output",
            description="Makes a LoRA smaller by its rank, scales or drops its blocks, and turns LoRA, LoKr, LoHa, "
            "DoRA and OFT into LoRA, LoKr or LoHa.",
            search_aliases=["lora resize", "lora rank", "block weight", "shrink lora", "convert lokr", "convert loha"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                LoraModelType.Input("lora", tooltip="The LoRA, from Load LoRA File or Train LoRA."),
                io.Model.Input("model", tooltip="The model that the LoRA is for, from any loader. It isn't changed."),
                io.Int.Input(
                    "rank",
                    default=16,
                    **_RANK,
                    tooltip="The largest rank that a layer keeps. 0 keeps all. The report says how much is lost.",
                ),
                io.String.Input(
                    "blocks",
                    default="",
                    multiline=True,
                    placeholder="one per line, such as single_blocks.* 0.5",
                    tooltip="Layers or blocks with a number that their change is multiplied by, one per line, with * "
                    "for any text. 0 drops them. The names are those of the model, as in the report.",
                ),
                _energy(),
                io.Combo.Input(
                    "algorithm",
                    options=list(ALGORITHMS),
                    default=LORA,
                    optional=True,
                    tooltip="The kind of LoRA that comes out, whatever goes in. lora: read everywhere. lokr, loha: the "
                    "nearest of that kind; the report says how much is lost, which for a change that was trained as "
                    "another kind is often much. loha: rank 1 to 32, and it takes minutes.",
                ),
                io.Int.Input(
                    "factor",
                    default=NetworkOptions.factor,
                    min=-1,
                    max=1024,
                    optional=True,
                    advanced=True,
                    tooltip="For lokr: the size of its small matrix; rank is that of the large one, 0 keeps it whole. "
                    "-1 makes the smallest file; 2 or 4 leaves less out. A lokr that became a lora needs the factor "
                    "that it had.",
                ),
            ],
            outputs=_outputs(),
        )

    @classmethod
    def execute(
        cls,
        lora: Mapping[str, Tensor],
        model: ModelPatcher,
        rank: int,
        blocks: str,
        energy: float,
        algorithm: str = LORA,
        factor: int = NetworkOptions.factor,
    ) -> io.NodeOutput:
        size = Size(rank, energy)
        check_conversion(algorithm, factor, size)
        with torch.inference_mode(False), torch.no_grad():
            updates = _updates(lora, model, "lora")
            factors = read_factors(blocks, updates.layers())
            new_lora = convert_lora(updates, factors, algorithm, factor, size, _tell(cls))
        return _result(new_lora, model, [updates], getattr(lora, "metadata", {}))


class TesseraExtractLora(io.ComfyNode):
    """Makes a LoRA of the difference of two models."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraExtractLora",
            display_name="Extract LoRA",
            category="Tessera/output",
            description="Makes a LoRA of the difference of two models, such as a fine-tuned one and the one it came "
            "from.",
            search_aliases=["lora from checkpoint", "extract difference", "svd", "model difference"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input("model", tooltip="The model that the LoRA will be used on."),
                io.Model.Input(
                    "tuned_model", tooltip="The changed model of the same kind, whose difference becomes the LoRA."
                ),
                io.Int.Input(
                    "rank",
                    default=32,
                    **_RANK,
                    tooltip="The largest rank of a layer. 0 keeps the whole difference, which makes a file as large as "
                    "the model. 32 to 128 is usual.",
                ),
                _energy(),
            ],
            outputs=_outputs(),
        )

    @classmethod
    def execute(cls, model: ModelPatcher, tuned_model: ModelPatcher, rank: int, energy: float) -> io.NodeOutput:
        shapes, tuned_shapes = weight_shapes(model.model), weight_shapes(tuned_model.model)
        if shapes != tuned_shapes:
            layer = next(n for n in {**shapes, **tuned_shapes} if shapes.get(n) != tuned_shapes.get(n))
            raise ValueError(
                f"tuned_model is of another kind or size than model ({layer} differs); connect two models of one kind."
            )
        with torch.inference_mode(False), torch.no_grad():
            new_lora = extract_lora(list(shapes), _reader(model), _reader(tuned_model), Size(rank, energy), _tell(cls))
        if not new_lora.updates:
            raise ValueError("tuned_model has the same weights as model; connect the model that was changed.")
        return _result(new_lora, model, [], {"ss_output_name": "extracted"})


def _weights(text: str, count: int) -> list[float]:
    """Parse one number for all LoRAs, or one for each. Raises ValueError for anything else."""
    parts = [part for part in text.replace(",", " ").split() if part]
    try:
        numbers = [read_strengths(part)[0] for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, count):
        raise ValueError(f"weights is {quoted(text)}; give one number, or one for each of the {count} LoRAs.")
    return numbers * count if len(numbers) == 1 else numbers


def _updates(lora: Mapping[str, Tensor], model: ModelPatcher, name: str) -> Updates:
    return Updates.from_lora(lora, family_of(model), model.model, name, _reader(model))


def _reader(model: ModelPatcher) -> Callable[[str], Tensor]:
    """Make the function that reads a layer's weight as a matrix, with the patches of the MODEL."""
    weights: list[FrozenWeights] = []

    def read(layer: str) -> Tensor:
        if not weights:
            unload([model])
            weights.append(FrozenWeights(model, torch.device("cpu"), torch.float32))
        weight = weights[0].stored(f"{layer}.weight")
        assert weight is not None, layer
        return weight.float().flatten(1)

    return read


def _tell(node: type[io.ComfyNode]) -> Tell:
    bar = comfy.utils.ProgressBar(1, node_id=getattr(node.hidden, "unique_id", None))

    def tell(number: int, count: int) -> None:
        throw_exception_if_processing_interrupted()
        bar.update_absolute(number, count)

    return tell


def _result(
    new_lora: NewLora, model: ModelPatcher, updates: list[Updates], metadata: Mapping[str, str]
) -> io.NodeOutput:
    if not new_lora.updates:
        raise ValueError("No layer is left of the LoRA; change blocks or weights.")
    notes = [*new_lora.report(), *advice(new_lora), *(note for lora in updates for note in lora.notes())]
    lora = lora_model_of(
        new_lora.updates, weight_shapes(model.model), family_of(model), with_network(metadata, new_lora)
    )
    return io.NodeOutput(lora, "\n".join(notes), ui={"tessera": [{"notes": notes}]})


NODES: list[type[io.ComfyNode]] = [TesseraMergeLoras, TesseraResizeLora, TesseraExtractLora]

"""LoRA Network: algorithm, rank, targets and dropout. Unconnected, Train LoRA takes the same defaults."""

from collections.abc import Mapping
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from torch import Tensor

from ...lora.options import NONE, SAME, NetworkOptions
from ...lora.patterns import parse_targets
from ...lora.plan import describe_network
from ...models.catalogue.registry import family_of
from ..common.types import NetworkType
from .lora_files import lora_file_fingerprint, lora_source, low_noise_source
from .network_inputs import network_inputs

NO_MODEL = "Connect a model to LoRA Network to see which of its layers are trained."


class TesseraLoraNetwork(io.ComfyNode):
    """Options of the adapter network."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraLoraNetwork",
            display_name="LoRA Network",
            category="Tessera/training",
            description="Sets the size of the LoRA and the layers that it changes. Connect it to Train LoRA.",
            search_aliases=["lora rank", "lora alpha", "lora targets"],
            inputs=network_inputs(),
            outputs=[
                NetworkType.Output(display_name="network"),
                io.String.Output(
                    display_name="layers",
                    tooltip="Which layers of the connected model are trained, and with how many numbers. Connect a "
                    "model to see it.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        start_from: str | None = NONE,
        base_lora: str | None = NONE,
        start_from_low_noise: str | None = SAME,
        base_lora_low_noise: str | None = SAME,
        training_adapter: str | None = NONE,
        training_adapter_low_noise: str | None = SAME,
        **_: Any,
    ) -> object:
        return lora_file_fingerprint(
            start_from,
            base_lora,
            training_adapter,
            start_from_low_noise,
            base_lora_low_noise,
            training_adapter_low_noise,
        )

    # A coroutine, as ComfyUI runs those first: errors here are raised before anything is loaded or encoded.
    @classmethod
    async def execute(  # noqa: PLR0913
        cls,
        algorithm: str,
        rank: int,
        alpha: float,
        targets: str,
        dropout: float,
        lora_plus_ratio: float = NetworkOptions.lora_plus_ratio,
        scale_weight_norms: float = NetworkOptions.scale_weight_norms,
        start_from: str = NONE,
        start_lora: Mapping[str, Tensor] | None = None,
        base_lora: str = NONE,
        base_strength: float = NetworkOptions.base_strength,
        rank_dropout: float = NetworkOptions.rank_dropout,
        module_dropout: float = NetworkOptions.module_dropout,
        rank_patterns: str = NetworkOptions.rank_patterns,
        factor: int = NetworkOptions.factor,
        constraint: float = NetworkOptions.constraint,
        model: ModelPatcher | None = None,
        init: str = NetworkOptions.init,
        start_from_low_noise: str = SAME,
        start_lora_low_noise: Mapping[str, Tensor] | None = None,
        base_lora_low_noise: str = SAME,
        base_strength_low_noise: float = NetworkOptions.base_strength_low_noise,
        training_adapter: str = NONE,
        training_adapter_strength: float = NetworkOptions.training_adapter_strength,
        training_adapter_low_noise: str = SAME,
        training_adapter_strength_low_noise: float = NetworkOptions.training_adapter_strength_low_noise,
    ) -> io.NodeOutput:
        include, exclude = parse_targets(targets)
        options = NetworkOptions(
            algorithm,
            rank,
            alpha,
            include,
            exclude,
            dropout,
            lora_plus_ratio=lora_plus_ratio,
            scale_weight_norms=scale_weight_norms,
            start_from=lora_source("start_from", start_from, start_lora),
            base_lora=lora_source("base_lora", base_lora),
            base_strength=base_strength,
            rank_dropout=rank_dropout,
            module_dropout=module_dropout,
            rank_patterns=rank_patterns,
            factor=factor,
            constraint=constraint,
            init=init,
            start_from_low_noise=low_noise_source("start_from_low_noise", start_from_low_noise, start_lora_low_noise),
            base_lora_low_noise=low_noise_source("base_lora_low_noise", base_lora_low_noise),
            base_strength_low_noise=base_strength_low_noise,
            training_adapter=lora_source("training_adapter", training_adapter),
            training_adapter_strength=training_adapter_strength,
            training_adapter_low_noise=low_noise_source("training_adapter_low_noise", training_adapter_low_noise),
            training_adapter_strength_low_noise=training_adapter_strength_low_noise,
        )
        if model is None:
            return io.NodeOutput(options, NO_MODEL)
        text = describe_network(options, family_of(model), model.model)
        return io.NodeOutput(options, text, ui={"tessera": [{"text": text}]})


NODES: list[type[io.ComfyNode]] = [TesseraLoraNetwork]

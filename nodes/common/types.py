"""Types of connections between nodes: ours, and core's two that its training nodes define."""

from collections.abc import Iterator, Mapping
from functools import cache, wraps
from inspect import iscoroutinefunction
from typing import Any

from comfy_api.latest import io

from ...common.text import shown

# Core's, by their names: what its LoRA training node gives and its savers and plots take.
LoraModelType = io.Custom("LORA_MODEL")
LossMapType = io.Custom("LOSS_MAP")

DatasetType = io.Custom("TESSERA_DATASET")
TrainingDataType = io.Custom("TESSERA_TRAINING_DATA")
NetworkType = io.Custom("TESSERA_NETWORK")
OptimizerType = io.Custom("TESSERA_OPTIMIZER")
ObjectiveType = io.Custom("TESSERA_OBJECTIVE")
MemoryType = io.Custom("TESSERA_MEMORY")
PreviewType = io.Custom("TESSERA_PREVIEW")
ValidationType = io.Custom("TESSERA_VALIDATION")

# Connections whose values are of a kind that a workflow can write down as well.
_PLAIN: dict[str, type] = {"CONDITIONING": list, "LATENT": dict, "LORA_MODEL": dict, "LOSS_MAP": dict}


def refuse_literals(node: type[io.ComfyNode]) -> None:
    """Have a node refuse a text, number or list where a connection belongs; ComfyUI passes them on as they are.

    The node's `execute` then raises ValueError, which names the input.
    """
    execute = node.execute.__func__

    @cache
    def sockets() -> dict[str, tuple[str, bool]]:
        return dict(_sockets(node))

    def check(inputs: Mapping[str, Any]) -> None:
        for name, (kind, several) in sockets().items():
            given = inputs.get(name)
            if several and isinstance(given, Mapping):
                given = list(given.values())
            for value in given if several and isinstance(given, list) else [given]:
                if isinstance(value, (str, int, float, list, dict)) and not isinstance(value, _PLAIN.get(kind, ())):
                    raise ValueError(f"{name} is {shown(value)}; connect the output of a node that gives {kind}.")

    @wraps(execute)
    def checked(cls: type[io.ComfyNode], *args: Any, **inputs: Any) -> Any:
        check(inputs)
        return execute(cls, *args, **inputs)

    @wraps(execute)
    async def checked_async(cls: type[io.ComfyNode], *args: Any, **inputs: Any) -> Any:
        check(inputs)
        return await execute(cls, *args, **inputs)

    # ComfyUI awaits what is declared async, and nothing else.
    node.execute = classmethod(checked_async if iscoroutinefunction(execute) else checked)


def _sockets(node: type[io.ComfyNode]) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield name and type of each input that takes a connection, and True for one of several values."""
    schema = node.define_schema()
    for one in schema.inputs:
        if isinstance(one, io.Autogrow.Input):
            yield one.id, (one.template.input.get_io_type(), True)
        elif not isinstance(one, io.WidgetInput) and one.get_io_type() != io.AnyType.io_type:
            yield one.id, (one.get_io_type(), schema.is_input_list)

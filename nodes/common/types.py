"""Types of connections between nodes: those of this pack, and two of core's training nodes."""

from collections.abc import Iterator, Mapping
from functools import cache, wraps
from inspect import iscoroutinefunction
from typing import Any

from comfy_api.latest import io

from ...common.text import quoted

# Core's types, by name: outputs of its LoRA training node and inputs of its savers and plots.
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

# Connections whose values have a type that can also occur in workflow JSON.
_PLAIN: dict[str, type] = {"CONDITIONING": list, "LATENT": dict, "LORA_MODEL": dict, "LOSS_MAP": dict}


def refuse_literals(node: type[io.ComfyNode]) -> None:
    """Make a node reject a text, number or list in place of a connection; ComfyUI passes them on unchecked.

    The node's `execute` then raises ValueError, which names the input.
    """
    execute = node.execute.__func__

    @cache
    def sockets() -> dict[str, tuple[str, bool]]:
        return dict(_sockets(node))

    def check(inputs: Mapping[str, Any]) -> None:
        for name, (kind, several) in sockets().items():
            argument = inputs.get(name)
            if several and isinstance(argument, Mapping):
                argument = list(argument.values())
            for value in argument if several and isinstance(argument, list) else [argument]:
                if isinstance(value, (str, int, float, list, dict)) and not isinstance(value, _PLAIN.get(kind, ())):
                    raise ValueError(f"{name} is {quoted(value)}; connect the output of a node that gives {kind}.")

    @wraps(execute)
    def checked(cls: type[io.ComfyNode], *args: Any, **inputs: Any) -> Any:
        check(inputs)
        return execute(cls, *args, **inputs)

    @wraps(execute)
    async def checked_async(cls: type[io.ComfyNode], *args: Any, **inputs: Any) -> Any:
        check(inputs)
        return await execute(cls, *args, **inputs)

    # ComfyUI awaits only functions declared async.
    node.execute = classmethod(checked_async if iscoroutinefunction(execute) else checked)


def _sockets(node: type[io.ComfyNode]) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield (name, (type, several)) of each connection input; several: whether it takes several values."""
    schema = node.define_schema()
    for node_input in schema.inputs:
        if isinstance(node_input, io.Autogrow.Input):
            yield node_input.id, (node_input.template.input.get_io_type(), True)
        elif not isinstance(node_input, io.WidgetInput) and node_input.get_io_type() != io.AnyType.io_type:
            yield node_input.id, (node_input.get_io_type(), schema.is_input_list)

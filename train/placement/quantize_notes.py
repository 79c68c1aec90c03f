"""Notes on the effect of `quantize` of Training Memory, and the formats of a run for its summary."""

from collections.abc import Collection, Iterator, Sequence

import torch

from ...memory.low_bit.quantize import AS_STORED, QuantizeResult
from ...memory.weights.formats.stored_format import read_format
from ...models.family import Block
from ...models.layers.lora_linear import LoraLinear


def quantize_notes(quantize: str, blocks: Sequence[tuple[str, Block]], swapped: Collection[str]) -> Iterator[str]:
    """Yield sentences on the Linears of a run's blocks that are converted by `quantize`, and on those that are not.

    swapped: names of the swapped blocks. Call it before they are swapped.
    """
    if quantize == AS_STORED:
        return
    result = QuantizeResult()
    on_host = 0
    seconds = 0.0
    for name, block in blocks:
        for inside, layer in block.linears().items():
            layer_name = f"{name}.{inside}"
            if not isinstance(layer, LoraLinear):
                result.skip("a convolution", [layer_name])
                continue
            seconds = layer.quantize_seconds()
            stored_bytes, frozen = layer.bytes_as_stored(), layer.frozen()
            if stored_bytes is None:
                result.skip("already in 8 bit or less", [layer_name])
                continue
            if frozen.weight.dtype not in (torch.int8, torch.float8_e4m3fn):
                result.skip("all zero, or not finite", [layer_name])
                continue
            quantized_bytes = sum(
                part.nbytes for part in (frozen.weight, frozen.scale, *frozen.parts) if part is not None
            )
            rotated_or_fp8 = frozen.layout is None or read_format(frozen.layout).constants.get("convrot")
            result.count_quantized(stored_bytes, quantized_bytes, is_unrotated=not rotated_or_fp8)
            on_host += quantized_bytes if name in swapped else 0
    yield from result.notes(quantize, f" in {seconds:.0f} s for this run")
    if on_host:
        yield (
            f"quantize: the swapped blocks take {on_host / 2**30:.2f} GiB of extra RAM, because the MODEL keeps its "
            "own copy. With quantize on Load Diffusion Model (Block Swap) they don't."
        )


def quantize_summary(loaded: str, quantize: str) -> dict[str, dict[str, str]]:
    """Return the summary's entry on the formats of a run; empty if its weights are as stored.

    loaded: format that the MODEL's loader has converted to.
    quantize: format of Training Memory.
    """
    if loaded == quantize == AS_STORED:
        return {}
    return {"quantize": {"load_diffusion_model": loaded, "training_memory": quantize}}

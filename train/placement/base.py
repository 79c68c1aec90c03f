"""`base` of Training Memory: what came of it, in words; and the bases of a run, for its summary."""

from collections.abc import Collection, Iterator, Sequence

import torch

from ...memory.weights.frozen_linear import read_format
from ...memory.weights.requantise import AS_STORED, Requantised
from ...models.family import Block
from ...models.layers.lora_linear import LoraLinear


def base_notes(base: str, blocks: Sequence[tuple[str, Block]], swapped: Collection[str]) -> Iterator[str]:
    """Yield sentences on the Linears of a run's blocks that are held in `base`, and on those that are not.

    swapped: names of the blocks that stream. To be called before they do.
    """
    if base == AS_STORED:
        return
    result, on_host, seconds = Requantised(), 0, 0.0
    for name, block in blocks:
        for inside, layer in block.linears().items():
            left = f"{name}.{inside}"
            if not isinstance(layer, LoraLinear):
                result.left.setdefault("a convolution", []).append(left)
                continue
            seconds = layer.seconds_of_base()
            before, frozen = layer.bytes_before_base(), layer.frozen()
            if before is None:
                result.left.setdefault("already in 8 bit or less", []).append(left)
                continue
            if frozen.weight.dtype not in (torch.int8, torch.float8_e4m3fn):
                result.left.setdefault("all zero, or not finite", []).append(left)
                continue
            held = sum(part.nbytes for part in (frozen.weight, frozen.scale, *frozen.parts) if part is not None)
            turned = frozen.layout is None or read_format(frozen.layout).constants.get("convrot")
            result.count += 1
            result.unturned += not turned
            result.before += before
            result.after += held
            on_host += held if name in swapped else 0
    yield from result.notes(base, f" in {seconds:.0f} s for this run")
    if on_host:
        yield (
            f"base: the swapped blocks take {on_host / 2**30:.2f} GiB of extra RAM, because the MODEL keeps its own "
            "copy. With base on Load Diffusion Model (Block Swap) they don't."
        )


def base_facts(loaded: str, base: str) -> dict[str, dict[str, str]]:
    """Return the summary's entry on the bases of a run; none where its weights are as they were stored.

    loaded: what the MODEL's loader has put it into. base: of Training Memory.
    """
    if loaded == base == AS_STORED:
        return {}
    return {"base": {"load_diffusion_model": loaded, "training_memory": base}}

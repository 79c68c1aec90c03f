"""Low bit on paper and on a CPU: bytes of real models by `quantize`, and what further formats would cost in accuracy.

Run: python benchmarks low_bit --model all-MiniLM-L6-v2.safetensors > benchmarks/results/low_bit.md
The model is a BERT of sentence-transformers (all-MiniLM-L6-v2: 6 blocks, 384 wide), real weights that a CPU can do.
Matmuls run in fp32: errors are those of the stored format.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from comfyui import set_up_comfyui
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

MODELS = {"flux": "FLUX.1", "flux2_klein_9b": "FLUX.2 klein 9B", "chroma": "Chroma", "qwen_image": "Qwen-Image"} | {
    "wan": "Wan 2.1 14B"
}
GIB = 2**30
LINEARS = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense") + (
    "intermediate.dense",
    "output.dense",
)
RANK = 8
HEADS = 12
TOKENS = 128
BATCH = 8
E4M3 = torch.float8_e4m3fn
CONCLUSIONS = """
## What follows

- mxfp8 as e4m3 with a power of two for each row loses next to nothing and takes 2 % less. It would gain speed alone, by
  fp8 products, which no card has measured yet; until then it is dequantised at use, as it is stored.
- nvfp4 and int4 stay as they are stored: as int8 they lose little more than they have, but take twice the memory, for
  which a file of more bits is closer.
- There is no int4 in `quantize`: its gradient is the worst of all. GGUF's Q4_0 is closer at 4.5 bits and Q5_0 at 5.5,
  and both train as they are stored.
- Activations are not kept in 8 bit. int8 is close enough, and halves what is kept of 16 bits; but selective
  checkpointing at 0.5 keeps 58 % of it for FLUX.1 at 1024², is exact, and costs 6 % of a step by the rates of
  `counted.md`, where rounding and dequantising move about as many bytes as it does."""
Weights = dict[str, Tensor]


def real_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The weights of a model in its real shape."""
    from families import FULL

    entry: Any = FULL[name].entry
    shapes, sizes = entry.args
    weight_shapes: dict[str, tuple[int, ...]] = shapes(*sizes)
    return weight_shapes


def held_bytes(shapes: Mapping[str, tuple[int, ...]], quantize: str) -> int:
    """Bytes of a model's weights with its blocks converted by `quantize`, from a bf16 file."""
    quantize_module = import_module("tessera.memory.low_bit.quantize")
    file_names = import_module("tessera.nodes.model.file_names")
    in_blocks = import_module("tessera.models.blocks").in_blocks
    tensors = {key: torch.empty(size, dtype=torch.bfloat16, device="meta") for key, size in shapes.items()}
    matrices = [key for key, tensor in tensors.items() if key.endswith(".weight") and tensor.ndim >= 2]
    quantised_names = set(in_blocks(matrices)) & file_names.linear_weights(tensors, None).keys()
    total = 0
    for key, tensor in tensors.items():
        if quantize == quantize_module.AS_STORED or key not in quantised_names:
            total += tensor.nbytes
            continue
        quantised = quantize_module.quantized_zeros(tuple(tensor.shape), quantize, torch.device("cpu"))
        total += sum(part.nbytes for part in quantised.state_dict(key).values())
    return total


def by_layout(layout: str, **options: Any) -> Callable[[Tensor], tuple[Tensor, float]]:
    """Return a function that quantises by one of ComfyUI's layouts: (the dequantised values, bits of each)."""

    def quantise(weight: Tensor) -> tuple[Tensor, float]:
        from comfy.quant_ops import QuantizedTensor

        quantised = QuantizedTensor.from_float(weight, layout, **options)
        return quantised.dequantize(), 8 * sum(
            part.nbytes for part in quantised.state_dict("").values()
        ) / weight.numel()

    return quantise


def fp8(by_rows: bool) -> Callable[[Tensor], tuple[Tensor, float]]:
    def quantise(weight: Tensor) -> tuple[Tensor, float]:
        largest = weight.abs().amax(1, keepdim=True) if by_rows else weight.abs().max()
        scale = largest / torch.finfo(E4M3).max
        return (weight / scale).to(E4M3).float() * scale, 8 + 32 * scale.numel() / weight.numel()

    return quantise


def by_gguf(kind: str) -> Callable[[Tensor], tuple[Tensor, float]]:
    def quantise(weight: Tensor) -> tuple[Tensor, float]:
        import gguf

        kind_code = gguf.GGMLQuantizationType[kind]
        stored = gguf.quants.quantize(weight.numpy(), kind_code)
        return torch.from_numpy(gguf.quants.dequantize(stored, kind_code).copy()), 8 * stored.nbytes / weight.numel()

    return quantise


ROTATED = {"per_channel": True, "convrot": True}
FORMATS: dict[str, Callable[[Tensor], tuple[Tensor, float]]] = {
    "int8, rotated by 64, rows (quantize int8)": by_layout("TensorWiseINT8Layout", **ROTATED, convrot_groupsize=64),
    "fp8, one scale (quantize fp8)": fp8(False),
    "fp8, rows": fp8(True),
    "mxfp8": by_layout("TensorCoreMXFP8Layout"),
    "nvfp4": by_layout("TensorCoreNVFP4Layout"),
    "int4, rotated by 64": by_layout("TensorCoreConvRotW4A4Layout", convrot_groupsize=64),
    "GGUF Q8_0": by_gguf("Q8_0"),
    "GGUF Q5_0": by_gguf("Q5_0"),
    "GGUF Q4_0": by_gguf("Q4_0"),
}


def power_rows(weight: Tensor) -> Tensor:
    """As e4m3 with a power of two for each row, the least at which the row's largest number fits."""
    power = (weight.abs().amax(1, keepdim=True) / torch.finfo(E4M3).max).log2().ceil().exp2()
    return (weight / power).to(E4M3).float() * power


def int8_rows(weight: Tensor, rotated: bool) -> Tensor:
    options = ROTATED | {"convrot_groupsize": 64} if rotated else {"per_channel": True}
    return by_layout("TensorWiseINT8Layout", **options)(weight)[0]


def relative(approximate: Tensor, exact: Tensor) -> float:
    return ((approximate - exact).norm() / exact.norm()).item()


class Bert:
    """BERT's encoder (Devlin et al. 2018) with a LoRA on each Linear of its blocks, and a loss of fixed targets."""

    def __init__(self, weights: Weights):
        self.weights = {name: tensor.float() for name, tensor in weights.items() if tensor.is_floating_point()}
        self.blocks = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
        self.linears = [f"encoder.layer.{i}.{name}" for i in range(self.blocks) for name in LINEARS]
        source = torch.Generator().manual_seed(0)

        def normal(*shape: int, deviation: float) -> Tensor:
            return (deviation * torch.randn(*shape, generator=source)).requires_grad_()

        self.lora = {}
        for name in self.linears:
            rows, columns = self.weights[f"{name}.weight"].shape
            down = normal(RANK, columns, deviation=columns**-0.5)
            self.lora[name] = down, normal(rows, RANK, deviation=0.01)
        self.words = torch.randint(1000, 25000, (BATCH, TOKENS), generator=source)
        self.target = torch.randn(BATCH, TOKENS, len(self._weight("embeddings.LayerNorm.weight")), generator=source)

    def _weight(self, name: str) -> Tensor:
        return self.weights[name]

    def _linear(self, x: Tensor, name: str, weights: Weights) -> Tensor:
        down, up = self.lora[name]
        return linear(x, weights[f"{name}.weight"], self._weight(f"{name}.bias")) + linear(linear(x, down), up)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], self._weight(f"{name}.weight"), self._weight(f"{name}.bias"), 1e-12)

    def gradient(self, weights: Weights, saving: Any = None) -> Tensor:
        """The gradient of all LoRAs. weights: of the Linears; saving: a context of the forward."""
        with saving or nullcontext():
            table = "embeddings.{}_embeddings.weight".format
            x = self._weight(table("word"))[self.words] + self._weight(table("position"))[:TOKENS]
            x = self._norm(x + self._weight(table("token_type"))[0], "embeddings.LayerNorm")
            for i in range(self.blocks):
                x = self._block(x, f"encoder.layer.{i}", weights)
            loss = (x - self.target).square().mean()
        pairs = [part for pair in self.lora.values() for part in pair]
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, pairs)])

    def _block(self, x: Tensor, name: str, weights: Weights) -> Tensor:
        def project(part: str, x_in: Tensor) -> Tensor:
            return self._linear(x_in, f"{name}.{part}", weights)

        q, k, v = (project(part, x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in LINEARS[:3])
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self._norm(x + project("attention.output.dense", mixed), f"{name}.attention.output.LayerNorm")
        return self._norm(
            x + project("output.dense", gelu(project("intermediate.dense", x))), f"{name}.output.LayerNorm"
        )


class In8Bit(torch.autograd.graph.saved_tensors_hooks):
    """Save activations for backward in 8 bits, with a scale for each row."""

    def __init__(self, bert: Bert, kind: str):
        frozen = {tensor.data_ptr() for tensor in bert.weights.values()}
        frozen |= {part.data_ptr() for pair in bert.lora.values() for part in pair}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() in frozen or not tensor.is_floating_point() or tensor.ndim < 3 or tensor.shape[-1] < 8:
                return tensor
            largest = tensor.detach().abs().amax(-1, keepdim=True).clamp(min=1e-30)
            if kind == "int8":
                return (tensor.detach() * (127 / largest)).round() * (largest / 127)
            return (tensor.detach() * (448 / largest)).to(E4M3).float() * (largest / 448)

        super().__init__(pack, lambda tensor: tensor)


def errors_of_gradient(bert: Bert, approximate: Tensor, exact: Tensor) -> str:
    sizes = [part.numel() for pair in bert.lora.values() for part in pair]
    cosines = torch.stack(
        [torch.cosine_similarity(a, b, 0) for a, b in zip(approximate.split(sizes), exact.split(sizes), strict=True)]
    )
    return f"{relative(approximate, exact):.3f} | {cosines.min():.3f}"


def page(bert: Bert) -> Iterator[str]:
    yield "# Low bit: bytes, and what further formats would cost\n"
    yield "    python benchmarks low_bit --model all-MiniLM-L6-v2.safetensors > benchmarks/results/low_bit.md\n"
    yield "## Weights in GiB, of a bf16 file\n"
    yield "| model | as stored | quantize int8 | quantize fp8 |\n| --- | ---: | ---: | ---: |"
    for name, title in MODELS.items():
        sizes = (held_bytes(real_shapes(name), quantize) / GIB for quantize in ("as stored", "int8", "fp8"))
        yield f"| {title} | " + " | ".join(f"{size:.2f}" for size in sizes) + " |"
    originals = {f"{name}.weight": bert.weights[f"{name}.weight"] for name in bert.linears}
    exact = bert.gradient(originals)
    yield "\n## A real model's weights in each format (all-MiniLM-L6-v2)\n"
    yield "The gradient is that of a LoRA of rank 8 on each Linear, against the one over unquantised weights.\n"
    yield "| format | bits | weights off | gradient off | worst cosine |\n| --- | ---: | ---: | ---: | ---: |"
    stored: dict[str, Weights] = {}
    for format_, quantise in FORMATS.items():
        quantised = {name: quantise(weight) for name, weight in originals.items()}
        stored[format_] = weights = {name: values.float() for name, (values, _) in quantised.items()}
        bits = sum(b * originals[name].numel() for name, (_, b) in quantised.items()) / sum(
            w.numel() for w in originals.values()
        )
        error = relative(*(torch.cat([w.flatten() for w in part.values()]) for part in (weights, originals)))
        yield f"| {format_} | {bits:.2f} | {error:.4f} | {errors_of_gradient(bert, bert.gradient(weights), exact)} |"
    yield "\n## What is stored, expressed once more in 8 bit\n"
    yield "Beside the error of the format itself.\n"
    yield "| from | as | numbers that change | weights off |\n| --- | --- | ---: | ---: |"
    conversions: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("mxfp8", "e4m3, powers of two for rows", power_rows),
        ("nvfp4", "int8 rows", lambda w: int8_rows(w, False)),
        ("nvfp4", "int8 rows, rotated", lambda w: int8_rows(w, True)),
        ("int4, rotated by 64", "int8 rows, rotated", lambda w: int8_rows(w, True)),
    )
    for source, name, express in conversions:
        source_values = torch.cat([w.flatten() for w in stored[source].values()])
        converted = torch.cat([express(w).flatten() for w in stored[source].values()])
        changed = ((converted - source_values).abs() > 1e-6 * source_values.abs()).float().mean().item()
        yield f"| {source} | {name} | {100 * changed:.2f} % | {relative(converted, source_values):.5f} |"
    yield "\n## Activations kept in 8 bit, a scale for each row\n"
    yield "| kept in | gradient off | worst cosine |\n| --- | ---: | ---: |"
    for kind in ("int8", "fp8"):
        gradient = bert.gradient(originals, In8Bit(bert, kind))
        yield f"| {kind} | {errors_of_gradient(bert, gradient, exact)} |"
    yield CONCLUSIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True, help="safetensors file of a BERT, as of all-MiniLM-L6-v2")
    path = parser.parse_args().model
    set_up_comfyui("cpu")
    from safetensors.torch import load_file

    for line in page(Bert(load_file(path))):
        print(line)


if __name__ == "__main__":
    main()

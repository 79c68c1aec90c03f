"""What the step benchmark trains: a small FLUX.1 from a file, or one of the real shape with random weights.

Needs ComfyUI's model classes and this pack's train/, compile/, memory/ and models/ only; neither the node API nor the
server is imported.
"""

import importlib.util
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from train_step_figures import grid_of

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """Sizes of a FLUX.1 and of what it is shown. tokens: of the picture; text_tokens: of the caption."""

    hidden: int
    depth: int
    depth_single: int
    context_dim: int
    vec_dim: int
    tokens: int
    text_tokens: int

    def with_tokens(self, tokens: int | None, text_tokens: int | None) -> "Shape":
        return replace(self, tokens=tokens or self.tokens, text_tokens=text_tokens or self.text_tokens)


SHAPES = {
    "tiny": Shape(256, 2, 4, context_dim=64, vec_dim=32, tokens=1024, text_tokens=128),
    "full": Shape(3072, 19, 38, context_dim=4096, vec_dim=768, tokens=4096, text_tokens=512),
}


def _load(name: str, file: Path) -> ModuleType:
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_tiny_writers() -> ModuleType:
    """tests/tiny, which needs no ComfyUI to write its files."""
    return sys.modules.get("tiny") or _load("tiny", ROOT / "tests" / "tiny" / "__init__.py")


def set_up_comfyui(device: str) -> None:
    """Puts ComfyUI on the path with its options set, and the pack beside it as `tessera`."""
    # ComfyUI reads the command line at import; this one is ours.
    sys.argv[1:] = []
    sys.path.insert(0, str(_load("tessera_dev", ROOT / "dev.py").find_comfyui()))
    from comfy.cli_args import args

    args.cpu = device in ("cpu", "meta")
    args.use_pytorch_cross_attention = True
    # The pack's entry point imports the node API; a plain package over the same folder is enough here.
    pack = sys.modules["tessera"] = ModuleType("tessera")
    pack.__path__ = [str(ROOT)]
    load_tiny_writers()


def load_file(path: Path, dtype: torch.dtype) -> Any:
    """The MODEL that `UNETLoader` gives for this file with that `weight_dtype`."""
    return load_tiny_writers().load_flux(path, dtype)


def random_flux(shape: Shape, device: str, dtype: torch.dtype, disable_dynamic: bool = False) -> Any:
    """A MODEL of that shape with random weights made on `device`; on 'meta' it has no weights at all.

    disable_dynamic: as ComfyUI asks for where it makes the copy of a MODEL that core's trainer works on.
    """
    names = load_tiny_writers().flux.flux_shapes(
        shape.hidden, shape.depth, shape.depth_single, shape.context_dim, shape.vec_dim, guidance=True
    )
    patcher = random_model(detected(names, dtype), device, dtype)
    patcher.cached_patcher_init = (random_flux, (shape, device, dtype))
    return patcher


def detected(names: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Any:
    """What ComfyUI takes a file with weights of these names and shapes for: an entry of comfy.supported_models."""
    from comfy import model_detection

    state = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in names.items()}
    return model_detection.model_config_from_unet(state, "")


def random_model(config: Any, device: str, dtype: torch.dtype) -> Any:
    """A MODEL of that entry of comfy.supported_models, its random weights made on `device`; on 'meta' it has none."""
    from comfy import model_management
    from comfy.model_patcher import ModelPatcher

    config.set_inference_dtype(dtype, None)
    model = config.get_model({}, "", device=device)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.diffusion_model.named_parameters():
            if weight.ndim == 1 and not name.endswith("bias"):
                weight.fill_(1.0)  # of a norm
            elif generator is not None:
                inputs = weight[0].numel() if weight.ndim > 1 else len(weight)
                weight.normal_(0.0, inputs**-0.5, generator=generator)
    place = torch.device("meta") if device == "meta" else model_management.get_torch_device()
    return ModelPatcher(model, load_device=place, offload_device=place)


@dataclass(frozen=True)
class Pictures:
    """latents: (count, 16, H, W); texts: (count, L, D); pooled: (count, P); fp32 on the host."""

    latents: torch.Tensor
    texts: torch.Tensor
    pooled: torch.Tensor


def random_pictures(shape: Shape, count: int) -> Pictures:
    height, width = grid_of(shape.tokens)
    generator = torch.Generator().manual_seed(1)
    return Pictures(
        torch.randn(count, 16, 2 * height, 2 * width, generator=generator),
        torch.randn(count, shape.text_tokens, shape.context_dim, generator=generator),
        torch.randn(count, shape.vec_dim, generator=generator),
    )


def training_data(shape: Shape, pictures: Pictures) -> Any:
    """The pictures as our trainer takes them."""
    data = import_module("tessera.train.data")

    def sample(index: int) -> Any:
        tensors = data.SampleTensors(
            pictures.latents[index], pictures.texts[index][None], {"pooled_output": pictures.pooled[index][None]}
        )
        grid = (1, *grid_of(shape.tokens))
        return data.Sample(f"picture {index}", grid, shape.tokens, shape.text_tokens, lambda: tensors)

    return data.TrainingData(tuple(sample(i) for i in range(len(pictures.latents))), "random")


@dataclass(frozen=True)
class Work:
    """FLOP of one step of one picture. recompute: what full checkpointing computes again."""

    parameters: int
    forward: int
    backward: int
    recompute: int


def count_work(shape: Shape, rank: int, include: tuple[str, ...]) -> Work:
    """Counts the matrix products of our own forward and backward on the meta device, with a LoRA on `include`."""
    from torch.utils.flop_counter import FlopCounterMode

    flux = import_module("tessera.models.flux")
    lora, options = import_module("tessera.train.lora"), import_module("tessera.train.options")
    patcher = random_flux(shape, "meta", torch.bfloat16)
    parameters = sum(p.numel() for p in patcher.model.diffusion_model.parameters())
    transformer = flux.Flux().build(patcher, torch.device("meta"), torch.bfloat16, "auto")
    network = options.NetworkOptions(rank=rank, alpha=float(rank), include=include)
    targets = lora.choose_targets(flux.Flux(), patcher.model, network)
    for name in targets:
        linear = transformer.linears()[name]
        down, up = (rank, linear.weight.shape[1]), (linear.weight.shape[0], rank)
        linear.add_lora(*(torch.nn.Parameter(torch.empty(size, device="meta")) for size in (down, up)), scale=1.0)

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    inputs = flux.FluxInputs(
        tokens=empty(1, shape.tokens, 64),
        positions=empty(1, shape.tokens, 3, dtype=torch.float32),
        text=empty(1, shape.text_tokens, shape.context_dim),
        pooled=empty(1, shape.vec_dim),
        timestep=empty(1, dtype=torch.float32),
        guidance=empty(1),
    )
    in_blocks = []

    def run(block: Any, *args: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = block(*args, {})
        in_blocks.append(counter.get_total_flops())
        return result

    with FlopCounterMode(display=False) as forward:
        velocity = transformer.forward(run, inputs)
    with FlopCounterMode(display=False) as backward:
        velocity.sum().backward()
    return Work(parameters, forward.get_total_flops(), backward.get_total_flops(), sum(in_blocks))


def importable_without_nodes() -> bool:
    """True where the pack's training code was loaded without ComfyUI's node API, as a bare GPU machine needs it."""
    return not any(name == "comfy_api" or name.startswith("comfy_api.") for name in sys.modules)

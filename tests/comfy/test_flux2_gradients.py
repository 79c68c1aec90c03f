"""LoRA gradients of FLUX.2, and of FLUX.1 with reference pictures, in every mode equal an fp64 reference."""

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.models.flux.family import resolution_shift
from tessera.train.objective.noise import draw_noise
from tessera.train.objective.timestep_sampling import draw_sigma
from tessera.train.settings import MemoryOptions
from tiny.flux_core import to_tokens
from tiny.flux_data import flux_sample
from tiny.runs import training_data
from torch import Tensor

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "flux.py"))
ZERO = "index_timestep_zero"
MODES = ("none", "selective", "full")
# Largest relative error of one matrix's gradient, as for FLUX.1 (test_gradients.py).
FP32, BF16 = 1e-4, 0.06

# Three shapes of 24 tokens, and with a ragged edge of 23; two references each, in latent cells, of equal token counts.
GRIDS, RAGGED = [(4, 6), (3, 8), (12, 2)], [(4, 6), (5, 5), (3, 8)]
KONTEXT = [[(8, 4), (4, 6)], [(4, 8), (6, 4)], [(16, 2), (2, 12)]]
# Where ComfyUI's `offset` puts them, by hand: (1, first row, first column) in tokens. The second goes below the first
# where both together are wider than high, else beside it.
KONTEXT_PLACES = [[(1, 0, 0), (1, 0, 2)], [(1, 0, 0), (1, 2, 0)], [(1, 0, 0), (1, 0, 1)]]
FLUX2 = [[(4, 6), (3, 3)], [(6, 4), (1, 9)], [(8, 3), (9, 1)]]
FLUX2_PLACES = [[(10, 0, 0, 0), (20, 0, 0, 0)]] * 3


def kontext_data(tokens: int | None = None) -> Any:
    grids = GRIDS if tokens is None else RAGGED
    pairs = enumerate(zip(grids, KONTEXT, strict=True))
    return training_data(*(flux_sample(f"{i}", *g, 9, given, family="flux", tokens=tokens) for i, (g, given) in pairs))


def flux2_data(method: str | None = None, tokens: int | None = None) -> Any:
    """With two references each where a method is given."""
    grids, references = GRIDS if tokens is None else RAGGED, FLUX2 if method else [()] * 3
    pairs = enumerate(zip(grids, references, strict=True))
    return training_data(
        *(flux_sample(f"{i}", *g, 5 + 40 * i, given, method=method, tokens=tokens) for i, (g, given) in pairs)
    )


def placed(latent: Tensor, patch: int, place: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The tokens of a latent (C, H, W) and their ids, which count rows and columns from `place`; one sample's."""
    tokens = to_tokens(latent, patch)
    h, w = latent.shape[1] // patch, latent.shape[2] // patch
    ids = torch.zeros(h, w, len(place))
    ids[..., 1] += torch.arange(h)[:, None]
    ids[..., 2] += torch.arange(w)
    return tokens[None], (ids + torch.tensor(place)).reshape(1, h * w, -1)


def reference_velocity(tensors: dict[str, Tensor], index: int, sample: Any, x_t: Tensor, sigma: float, **lora: Any):
    """(1, N, C·patch) from the formulas, in fp64, on one sample of the data above. x_t: in the model's space."""
    read, keep = sample.load(), sample.tokens
    flux2 = len(x_t) == 128
    patch, zero = (1, (0, 0, 0, 0)) if flux2 else (2, (0, 0, 0))
    tokens, ids = (part[:, :keep] for part in placed(x_t, patch, zero))
    places = (FLUX2_PLACES if flux2 else KONTEXT_PLACES)[index]
    for reference, place in zip(read.conditioning.get("reference_latents", ()), places, strict=False):
        more, more_ids = placed(in_model_space(reference[0].double()), patch, place)
        tokens, ids = torch.cat([tokens, more], dim=1), torch.cat([ids, more_ids], dim=1)
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    guidance, text = torch.ones(1).double(), read.text.double()
    if not flux2:
        pooled, level = read.conditioning["pooled_output"].double(), torch.tensor([sigma], dtype=torch.float64)
        return REFERENCE["flux_forward"](tensors, tokens, ids, text, pooled, level, guidance, num_heads=1, **lora)[
            :, :keep
        ]
    levels = torch.full(tokens.shape[:2], sigma, dtype=torch.float64)
    if read.conditioning.get("reference_latents_method") == ZERO:
        levels[:, keep:] = 0
    text = torch.cat([text.new_zeros(1, 512 - text.shape[1], text.shape[2]), text], dim=1)
    return REFERENCE["flux2_forward"](tensors, tokens, ids, text, levels, guidance, num_heads=1, **lora)[:, :keep]


def in_model_space(latent: Tensor) -> Tensor:
    """FLUX.1's latent space as Black Forest Labs' autoencoder defines it; ComfyUI's VAE gives FLUX.2's as it is."""
    return latent if len(latent) == 128 else (latent - 0.1159) * 0.3611


def reference_gradients(trainer: Any, tensors: dict[str, Tensor], batch: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradients written out in fp64: mean over samples of mean((v − (noise − x0))²)."""
    settings = trainer.settings
    lora, masters = tiny.reference_masters(trainer)
    total = torch.zeros((), dtype=torch.float64)
    for place in range(batch):
        sample = trainer.data.samples[place]
        x0 = in_model_space(sample.load().latent.double())
        shift = resolution_shift(sample.tokens) if len(x0) == 128 else 1.0
        sigma = draw_sigma(settings.objective, generator(settings.seed, "sigma", 0, 0, place), sample.tokens, shift)
        sigma = float(torch.tensor(sigma, dtype=torch.float32))
        noise = draw_noise(x0.shape, generator(settings.seed, "noise", 0, 0, place)).double()
        velocity = reference_velocity(tensors, place, sample, (1 - sigma) * x0 + sigma * noise, sigma, lora=lora)
        target = to_tokens(noise - x0, 1 if len(x0) == 128 else 2)[None, : sample.tokens]
        total = total + (velocity - target).square().mean() / batch
    total.backward()
    return float(total.detach()), {name: gradient(p) for name, p in masters.items()}


def gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p).double() if p.grad is None else p.grad.double()


def check(load: Any, file: Path, data: Any, folder: Path, batch: int, bound: float = FP32, **settings: Any) -> Any:
    model = load(file)
    if bound == BF16:
        model.set_model_compute_dtype(torch.bfloat16)
        model.model.manual_cast_dtype = torch.bfloat16
    memory = MemoryOptions(checkpointing=settings.pop("mode", "none"), blocks_to_swap=settings.pop("swap", 0))
    trainer = tiny.make_trainer(model, data, folder, batch_size=batch, memory=memory, **settings)
    tiny.fill_up_matrices(trainer)
    loss = trainer.forward_backward([tiny.shown(*range(batch))])
    pairs = trainer.network.pairs.items()
    found = {f"{n}.{side}": gradient(p) for n, pair in pairs for side, p in zip(("down", "up"), pair, strict=True)}
    expected_loss, expected = reference_gradients(trainer, load_file(file), batch)
    assert abs(loss - expected_loss) < bound * expected_loss
    worst = {k: float((found[k] - expected[k]).norm() / expected[k].norm()) for k in expected}
    assert max(worst.values()) < bound, max(worst.items(), key=lambda item: item[1])
    trainer.close()
    return worst


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux2(tmp_path_factory.mktemp("klein") / "klein.safetensors", guidance=False)


# Compiling takes seconds a case: there swap and batch size change together, and the other pairs run by name.
CASES = [(None, batch, mode, swap) for batch in (1, 3) for mode in MODES for swap in (0, 3)]
COMPILED = {"none": ((3, 0), (1, 3)), "selective": ((1, 0), (3, 3)), "full": ((3, 0), (1, 3))}  # (batch, swap)
CASES += [("aot_eager", batch, mode, swap) for mode, pairs in COMPILED.items() for batch, swap in pairs]
REST = [
    ("aot_eager", batch, mode, swap)
    for batch, mode, swap in product((1, 3), MODES, (0, 3))
    if (batch, swap) not in COMPILED[mode]
]


@pytest.mark.parametrize(
    ("backend", "batch", "mode", "swap"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_gradients_of_flux2_equal_the_fp64_reference(tiny_files, tmp_path, backend, batch, mode, swap):
    """Alone without references, as three with two each, which see the sample's timestep or 0 by turns."""
    data = flux2_data() if batch == 1 else flux2_data(ZERO if swap else "index")
    check(tiny.load_flux2, tiny_files["flux2"], data, tmp_path, batch, backend=backend, mode=mode, swap=swap)


KONTEXT_CASES = [(None, "none", 3), (None, "selective", 0), (None, "full", 3), ("aot_eager", "full", 3)]
KONTEXT_CASES += [pytest.param("aot_eager", *case, marks=pytest.mark.slow) for case in (("none", 3), ("selective", 0))]


@pytest.mark.parametrize(("backend", "mode", "swap"), KONTEXT_CASES)
def test_gradients_of_kontext_equal_the_fp64_reference(tiny_files, tmp_path, backend, mode, swap):
    check(tiny.load_flux, tiny_files["flux"], kontext_data(), tmp_path, 3, backend=backend, mode=mode, swap=swap)


def test_gradients_of_ragged_edges_are_those_of_the_tokens_that_are_kept(tiny_files, klein, tmp_path):
    check(tiny.load_flux, tiny_files["flux"], kontext_data(23), tmp_path / "kontext", 3)
    check(tiny.load_flux2, klein, flux2_data(ZERO, 23), tmp_path / "klein", 3)


def test_gradients_reach_every_linear(tiny_files, tmp_path):
    """The modulations that all blocks share too."""
    network = NetworkOptions(rank=2, alpha=2.0, include=("*",))
    data = flux2_data(ZERO)
    worst = check(tiny.load_flux2, tiny_files["flux2"], data, tmp_path, 3, network=network, mode="full", swap=2)
    assert len(worst) == 2 * (2 + 4 + 3 + 2 * 8 + 2 * 2 + 2)


def test_gradients_in_bf16_stay_within_its_rounding(tmp_path):
    file = tiny.write_flux2(tmp_path / "bf16.safetensors", dtype=torch.bfloat16)
    check(tiny.load_flux2, file, flux2_data(ZERO), tmp_path, 3, BF16, backend="aot_eager", mode="full")


@pytest.mark.slow  # a cold inductor takes 30 to 80 s for each kind of block
def test_gradients_of_inductor_equal_the_fp64_reference(tiny_files, tmp_path):
    check(tiny.load_flux2, tiny_files["flux2"], flux2_data(ZERO), tmp_path, 3, backend="inductor", mode="full")

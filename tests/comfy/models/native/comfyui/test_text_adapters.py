"""Parts of a model that refine the text before its blocks see it run in the step: patched, and with gradients."""

import pytest
import torch
from tessera.lora.options import NetworkOptions
from tiny.native import TRAINED, build
from tiny.native.reference import plain_output, raw_output, tokens
from tiny.native.step import batch_of, difference, guidance_of, trainer_of, written_out
from tiny.train.reference_gradients import lora_gradients
from tiny.train.training import fill_up_matrices, micro_batch

ADAPTERS = {
    "anima": "llm_adapter.blocks.0.",
    "minimax-h3": "token_refiner.blocks.0.",
    "ltx-2": "video_embeddings_connector.transformer_1d_blocks.0.",
    "ltx-2.3": "video_embeddings_connector.transformer_1d_blocks.0.",
}
ROWS = [row for row in TRAINED if row.name in ADAPTERS]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_target_inside_has_the_gradient_of_plain_autograd(row, tmp_path):
    inside = ADAPTERS[row.name]
    network = NetworkOptions(rank=4, alpha=8.0, include=(f"{inside}*", "*blocks.0.*attn*"))
    trainer = trainer_of(row, tmp_path, network=network)
    fill_up_matrices(trainer)
    loss, expected = written_out(row, trainer)
    assert abs(trainer.train_step.forward_backward([micro_batch(0)]) - loss) <= 3e-3 * loss
    actual = lora_gradients(trainer)
    trainer.close()
    names = [name for name in actual if name.startswith(inside)]
    assert names and len(names) < len(actual)
    assert all(float(expected[name].norm()) > 0 for name in names)
    assert difference(actual, expected) <= 3e-3


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_patch_of_the_model_is_in_force_inside(row, tmp_path):
    """As ComfyUI's sampler, which refines the text under inference mode, has it on a patched MODEL."""
    patcher, inside = build(row), ADAPTERS[row.name]
    modules = patcher.model.diffusion_model.named_modules()
    name = next(name for name, m in modules if name.startswith(inside) and hasattr(m, "in_features"))
    shape = patcher.model.diffusion_model.get_submodule(name).weight.shape
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    patcher.add_patches({f"diffusion_model.{name}.weight": ("diff", (delta,))})
    trainer = trainer_of(row, tmp_path, model=patcher)
    batch = batch_of(trainer)
    sample = trainer.context.data.samples[0]
    guidance = guidance_of(trainer)
    with torch.no_grad():
        actual = trainer.placed.velocity(batch.inputs, (0, 0))[0]
    trainer.close()
    (group,) = batch.inputs.groups
    outputs = []
    for patched in (True, False):
        with torch.inference_mode():
            model = plain_output(build(row))
            model.diffusion_model.get_submodule(name).weight += patched * delta
            out = raw_output(model, row, sample, group.x[0].clone(), group.sigma, guidance)[0]
            outputs.append(tokens(out, sample.tokens))
    expected, plain = outputs
    assert float((actual - expected).norm()) <= 1e-4 * float(expected.norm())
    assert float((actual - plain).norm()) > 1e-3 * float(expected.norm())


@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "anima"], ids=str)
def test_blocks_inside_swap_as_all_others_do(row, tmp_path):
    """The only one of its structure, on a text that needs no gradient: it is brought back for its backward."""
    network = NetworkOptions(rank=4, alpha=8.0, include=(f"{ADAPTERS[row.name]}*", "*blocks.0.*attn*"))
    results = []
    for count in (0, 3):
        trainer = trainer_of(row, tmp_path / f"{count}", "full", network=network, blocks_to_swap=count)
        fill_up_matrices(trainer)
        results.append((trainer.train_step.forward_backward([micro_batch(0)]), lora_gradients(trainer)))
        trainer.close()
    (loss, expected), (other, gradients) = results
    assert loss == other and all(torch.equal(gradients[name], value) for name, value in expected.items())

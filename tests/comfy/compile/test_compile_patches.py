"""What other nodes put on a MODEL takes effect in compiled runs too: attention, patches, replaced blocks, wrappers,
ControlNets; and what is taken off again leaves the old graphs."""

import types
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import tiny
import torch
from comfy.patcher_extension import WrappersMP
from tessera.compile.settings import SCOPES
from thinned import one_in
from tiny.compile.compiling import Graphs, compiled
from tiny.models.sampling import sample
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_graphs")


# What nodes do to a MODEL. Each is far from doing nothing.


def override_attention(model: Any) -> None:
    def sharper(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return attention(2 * q, k, v, *args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = sharper


def patch_attention_inputs(model: Any) -> None:
    def sharper(
        q: Tensor, k: Tensor, v: Tensor, pe: Any = None, attn_mask: Any = None, extra_options: Any = None
    ) -> Any:
        return {"q": 2 * q, "k": k, "v": v, "pe": pe, "attn_mask": attn_mask}

    model.set_model_attn1_patch(sharper)


def patch_unet_attention_inputs(model: Any) -> None:
    model.set_model_attn1_patch(lambda n, context, value, extra_options: (2 * n, context, value))


def patch_attention_outputs(model: Any) -> None:
    model.set_model_attn1_output_patch(lambda out, extra_options: 2 * out)


def replace_a_block(model: Any) -> None:
    def doubled(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        return {name: value + value.roll(1, 1) for name, value in out.items()}

    model.set_model_patch_replace(doubled, "dit", "double_block", 1)


def patch_between_blocks(model: Any) -> None:
    model.set_model_double_block_patch(lambda args: args | {"img": args["img"] + args["img"].roll(1, 1)})


# And how many graphs more they take: one for each kind of block that sees them; in a UNet one for each transformer
# block, since these tell patches which of them they are.
CASES = [
    ("flux", override_attention, 2),
    ("flux", patch_attention_inputs, 2),
    ("flux", patch_attention_outputs, 2),
    ("flux", replace_a_block, 2),
    ("flux2", override_attention, 2),
    ("wan", override_attention, 1),
    ("wan", replace_a_block, 0),
    ("wan", patch_between_blocks, 1),
    ("qwen_image", override_attention, 1),
    ("qwen_image", patch_attention_inputs, 1),
    ("qwen_image", replace_a_block, 1),
    ("sdxl", patch_unet_attention_inputs, 14),
]


def and_then(model: Any, patch: Callable[[Any], None]) -> Any:
    clone = model.clone()
    patch(clone)
    return clone


@pytest.mark.parametrize(
    ("name", "patch", "extra"), one_in(3, CASES), ids=[f"{name}-{patch.__name__}" for name, patch, _ in CASES]
)
def test_a_patch_added_after_the_first_run_takes_effect_and_removed_gives_the_old_graphs(
    name, patch, extra, tiny_files
):
    model = tiny.load_model(name, tiny_files[name])
    plain, patched = sample(model, name), sample(and_then(model, patch), name)
    assert (plain - patched).abs().max() > 1e-2
    clone, compiled_model = compiled(model, dynamic="false")
    graphs = Graphs()
    assert torch.equal(sample(clone, name), plain)
    graph_count = graphs()
    assert torch.equal(sample(and_then(clone, patch), name), patched)
    with_patch = graphs()
    assert torch.equal(sample(clone, name), plain)
    assert torch.equal(sample(and_then(clone, patch), name, seed=3), sample(and_then(model, patch), name, seed=3))
    # A node that runs anew makes a new function of the same code; another number of steps changes the options.
    sample(and_then(clone, patch), name, steps=3)
    assert graphs() == with_patch == compiled_model.report().counts().graphs
    assert with_patch == graph_count + extra
    assert compiled_model.notes == [] and compiled_model.report().counts().graph_breaks == 0


@pytest.mark.parametrize(
    ("patch", "scope"),
    one_in(6, product([override_attention, patch_attention_inputs, replace_a_block], ["stack", "model"])),
)
def test_patches_take_effect_in_the_larger_scopes(patch, scope, tiny_files):
    model = tiny.load_model("flux", tiny_files["flux"])
    plain, patched = sample(model, "flux"), sample(and_then(model, patch), "flux")
    clone, compiled_model = compiled(model, scope=scope, dynamic="false")
    assert torch.equal(sample(clone, "flux"), plain)
    assert torch.equal(sample(and_then(clone, patch), "flux"), patched)
    counted = compiled_model.report().counts().graphs
    assert torch.equal(sample(clone, "flux"), plain)
    assert torch.equal(sample(and_then(clone, patch), "flux", seed=3), sample(and_then(model, patch), "flux", seed=3))
    assert compiled_model.report().counts().graphs == counted
    reason = "replaces blocks" if patch is replace_a_block else "patches the model"
    said = [f"scope stack: this run compiles block by block, because another node {reason}."]
    assert compiled_model.notes == (said if scope == "stack" else [])


def test_a_patch_whose_setting_changes_is_followed(tiny_files):
    model = tiny.load_model("flux", tiny_files["flux"])
    clone, _ = compiled(model)

    def scale_by(factor: float) -> Callable[[Any], None]:
        return lambda model: model.set_model_attn1_output_patch(lambda out, extra_options: factor * out)

    pictures = []
    for factor in (2.0, 0.5, 2.0):
        pictures.append(sample(and_then(clone, scale_by(factor)), "flux"))
        assert torch.equal(pictures[-1], sample(and_then(model, scale_by(factor)), "flux"))
    assert (pictures[0] - pictures[1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("place", "scope"),
    one_in(4, product(["diffusion_model.double_blocks.1", "diffusion_model.double_blocks"], SCOPES)),
)
def test_blocks_that_an_object_patch_puts_in_place_are_the_ones_that_run(place, scope, tiny_files):
    model = tiny.load_model("flux", tiny_files["flux"])
    blocks = tiny.load_model("schnell", tiny_files["schnell"]).model.diffusion_model.double_blocks
    blocks[1].img_mlp[2].weight.data *= 3

    def patch(model: Any) -> None:
        model.add_object_patch(place, blocks[1] if place.endswith("1") else blocks)

    plain, patched = sample(model, "flux"), sample(and_then(model, patch), "flux")
    assert (plain - patched).abs().max() > 1e-2
    clone, compiled_model = compiled(model, scope=scope)
    for patcher, expected in ((clone, plain), (and_then(clone, patch), patched), (clone, plain)):
        assert torch.equal(sample(patcher, "flux"), expected)
    assert compiled_model.notes == [] and all(
        region.report.eager_calls == 0 for region in compiled_model.regions.values()
    )


def halved_forward(block: nn.Module) -> Any:
    return types.MethodType(
        lambda self, *args, **kwargs: tuple(x / 2 for x in type(self).forward(self, *args, **kwargs)), block
    )


@pytest.mark.parametrize("scope", one_in(3, SCOPES))
def test_a_block_whose_forward_another_pack_replaced_runs_it(scope, tiny_files):
    model = tiny.load_model("flux", tiny_files["flux"])
    block = model.model.diffusion_model.double_blocks[1]
    plain = sample(model, "flux")
    clone, compiled_model = compiled(model, scope=scope, dynamic="false")
    assert torch.equal(sample(clone, "flux"), plain)
    block.forward = halved_forward(block)
    replaced = sample(model, "flux")
    assert (plain - replaced).abs().max() > 1e-2
    assert torch.equal(sample(clone, "flux"), replaced)
    eager = "double_blocks.1 and similar blocks run uncompiled, because another node replaced their forward."
    by_blocks = "scope stack: double_blocks is compiled block by block, because another node replaced a forward."
    assert compiled_model.notes == {"blocks": [eager], "stack": [by_blocks, eager], "model": []}[scope]
    assert "forward" in vars(block)
    del block.forward
    counted = compiled_model.report().counts().graphs
    assert torch.equal(sample(clone, "flux"), plain)
    assert compiled_model.report().counts().graphs == counted


@pytest.mark.parametrize("name", ["forward", "_forward"])
def test_a_model_whose_forward_another_pack_replaced_runs_it_with_scope_model(name, tiny_files):
    model = tiny.load_model("flux", tiny_files["flux"])
    unet = model.model.diffusion_model
    plain = sample(model, "flux")
    inner = type(unet)._forward
    setattr(unet, name, types.MethodType(lambda self, *args, **kwargs: inner(self, *args, **kwargs) / 2, unet))
    replaced = sample(model, "flux")
    assert (plain - replaced).abs().max() > 1e-2
    clone, compiled_model = compiled(model, scope="model")
    assert torch.equal(sample(clone, "flux"), replaced)
    said = "scope model: blocks are compiled instead, because another node replaced the model's forward."
    assert compiled_model.notes == ([said] if name == "_forward" else [])


@pytest.mark.parametrize("scope", one_in(3, SCOPES))
def test_a_wrapper_around_the_diffusion_model_takes_effect_and_compiles_nothing_more(scope, tiny_files):
    model = tiny.load_model("wan", tiny_files["wan"])

    def patch(model: Any) -> None:
        def half(executor: Any, *args: Any, **kwargs: Any) -> Any:
            return executor(*args, **kwargs) / 2

        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", half)

    plain, wrapped = sample(model, "wan"), sample(and_then(model, patch), "wan")
    assert (plain - wrapped).abs().max() > 1e-2
    clone, compiled_model = compiled(model, scope=scope)
    assert torch.equal(sample(clone, "wan"), plain)
    assert torch.equal(sample(and_then(clone, patch), "wan"), wrapped)
    said = "scope stack: this run compiles block by block, because another node's wrapper runs inside the model."
    assert compiled_model.notes == ([said] if scope == "stack" else [])
    assert compiled_model.report().counts().graphs == (2 if scope == "stack" else 1)


@pytest.mark.parametrize("by_name", one_in(2, [True, False]))
def test_wrappers_around_the_whole_model_may_pass_its_arguments_by_place_or_by_name(by_name, tiny_files):
    model = tiny.load_model("wan", tiny_files["wan"])

    def patch(model: Any) -> None:
        def half(
            executor: Any, x: Any, t: Any, c_concat: Any, c_crossattn: Any, control: Any, options: Any, **conds: Any
        ):
            if not by_name:
                return executor(x, t, c_concat, c_crossattn, control, options, **conds) / 2
            arguments = {"c_concat": c_concat, "c_crossattn": c_crossattn, "control": control}
            return executor(x, t, **arguments, transformer_options=options, **conds) / 2

        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "another pack", half)

    model = and_then(model, patch)
    for scope in SCOPES:
        clone, compiled_model = compiled(model, scope=scope)
        assert torch.equal(sample(clone, "wan"), sample(model, "wan")) and compiled_model.notes == []


def flux_residuals(x: Tensor) -> dict[str, Any]:
    tokens = x.shape[-1] * x.shape[-2] // 4
    generator = torch.Generator().manual_seed(0)
    residuals = [torch.randn(x.shape[0], tokens, 128, generator=generator) for _ in range(2)]
    return {"input": residuals[:1], "output": residuals[1:]}


def unet_residuals(x: Tensor) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (x.shape[0], 128, x.shape[-2] // 4, x.shape[-1] // 4)
    return {"middle": [torch.randn(shape, generator=generator)], "output": [], "input": []}


@pytest.mark.parametrize("scope", one_in(2, SCOPES))
@pytest.mark.parametrize(("name", "residuals"), one_in(2, [("flux", flux_residuals), ("sdxl", unet_residuals)]))
def test_residuals_of_a_controlnet_are_added(name, residuals, scope, tiny_files):
    if name == "sdxl" and scope == "stack":
        pytest.skip("the stacks of a UNet are single transformers, and control falls back as for FLUX")
    model = tiny.load_model(name, tiny_files[name])

    def patch(model: Any) -> None:
        def with_control(apply_model: Any, args: dict[str, Any]) -> Tensor:
            return apply_model(args["input"], args["timestep"], control=residuals(args["input"]), **args["c"])

        model.set_model_unet_function_wrapper(with_control)

    plain, controlled = sample(model, name), sample(and_then(model, patch), name)
    assert (plain - controlled).abs().max() > 1e-2
    clone, compiled_model = compiled(and_then(model, patch), scope=scope, dynamic="false")
    graphs = Graphs()
    assert torch.equal(sample(clone, name), controlled)
    assert graphs() == compiled_model.report().counts().graphs
    sample(clone, name, steps=3, seed=2)
    assert (
        graphs()
        == compiled_model.report().counts().graphs
        == {"blocks": 12 if name == "sdxl" else 2, "stack": 2, "model": 1}[scope]
    )
    said = "scope stack: this run compiles block by block, because a ControlNet adds to the blocks' results."
    assert compiled_model.notes == ([said] if scope == "stack" else [])


def test_vace_is_compiled_block_by_block_with_scope_stack(tiny_files):
    model = tiny.load_model("wan_vace", tiny_files["wan_vace"])
    clone, compiled_model = compiled(model, scope="stack")
    assert torch.equal(sample(clone, "wan_vace"), sample(model, "wan_vace"))
    said = "scope stack: this run compiles block by block, because VACE adds to the blocks' results."
    assert compiled_model.notes == [said]
    assert {region.report.label.partition(" ")[0] for region in compiled_model.regions.values()} == {
        "WanAttentionBlock",
        "VaceWanAttentionBlock",
    }


@pytest.mark.parametrize("scope", one_in(3, SCOPES))
def test_timesteps_reach_the_model_in_fp32(scope, tmp_path):
    path = tiny.write_flux(tmp_path / "flux.safetensors", depth=1, depth_single=1)
    model = tiny.load_flux(path, torch.bfloat16).clone()
    model.set_model_compute_dtype(torch.bfloat16)
    timesteps: list[Tensor] = []

    def patch(model: Any) -> None:
        def look(executor: Any, x: Tensor, timestep: Tensor, *args: Any, **kwargs: Any) -> Any:
            timesteps.append(timestep)
            assert x.dtype == torch.bfloat16
            return executor(x, timestep, *args, **kwargs)

        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", look)

    eager = sample(and_then(model, patch), "flux", steps=3)
    clone, _ = compiled(and_then(model, patch), scope=scope, backend="aot_eager")
    assert torch.equal(sample(clone, "flux", steps=3), eager)
    assert len(timesteps) == 6 and all(t.dtype == torch.float32 for t in timesteps)
    assert all(torch.equal(*pair) for pair in zip(timesteps[:3], timesteps[3:], strict=True))


def reading(model: type[nn.Module]) -> type[nn.Module]:
    """A model whose outer forward reads what the sampler put into the options, as SeedVR2 and HunyuanVideo do."""

    class Reading(model):  # type: ignore[misc, valid-type]
        def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
            options = next(arg for arg in args if isinstance(arg, dict))
            out = super()._forward(*args, **kwargs)
            return out * (1 + options["sigmas"][0]) * (2 if 1 in options["cond_or_uncond"] else 3)

    return Reading


@pytest.mark.parametrize("scope", one_in(3, SCOPES))
def test_a_model_may_read_in_its_outer_forward_what_the_sampler_tells(scope, tiny_files):
    model = tiny.load_model("wan", tiny_files["wan"])
    unet = model.model.diffusion_model
    unet.__class__ = reading(type(unet))
    clone, compiled_model = compiled(model, scope=scope, dynamic="false")
    for cfg in (1.0, 3.0):
        assert torch.equal(sample(clone, "wan", cfg=cfg), sample(model, "wan", cfg=cfg))
    assert compiled_model.report().counts().graphs == 2 and compiled_model.notes == []

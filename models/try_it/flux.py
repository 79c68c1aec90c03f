"""Names and shapes of a small FLUX.1 in Black Forest Labs' checkpoint format."""

from .weights import Shapes, linear

HEAD_SIZE = 128


def flux_shapes(
    hidden_size: int, depth: int, depth_single: int, context_dim: int, vec_dim: int, guidance: bool, channels: int = 16
) -> Shapes:
    """Return names and shapes of FLUX.1's parameters. ComfyUI's detection assumes hidden_size / 128 heads. Raises
    ValueError if `hidden_size` is not a multiple of 128.
    """
    if hidden_size % HEAD_SIZE:
        raise ValueError(
            f"hidden is {hidden_size}; FLUX's heads are {HEAD_SIZE} wide, so take a multiple of {HEAD_SIZE}."
        )
    mlp = 4 * hidden_size
    shapes: Shapes = {}
    linear(shapes, "img_in", 4 * channels, hidden_size)
    linear(shapes, "txt_in", context_dim, hidden_size)
    for name, inputs in ({"time_in": 256, "vector_in": vec_dim} | ({"guidance_in": 256} if guidance else {})).items():
        linear(shapes, f"{name}.in_layer", inputs, hidden_size)
        linear(shapes, f"{name}.out_layer", hidden_size, hidden_size)
    for block in range(depth):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            linear(shapes, f"{prefix}_mod.lin", hidden_size, 6 * hidden_size)
            linear(shapes, f"{prefix}_attn.qkv", hidden_size, 3 * hidden_size)
            linear(shapes, f"{prefix}_attn.proj", hidden_size, hidden_size)
            shapes[f"{prefix}_attn.norm.query_norm.scale"] = (HEAD_SIZE,)
            shapes[f"{prefix}_attn.norm.key_norm.scale"] = (HEAD_SIZE,)
            linear(shapes, f"{prefix}_mlp.0", hidden_size, mlp)
            linear(shapes, f"{prefix}_mlp.2", mlp, hidden_size)
    for block in range(depth_single):
        prefix = f"single_blocks.{block}"
        linear(shapes, f"{prefix}.linear1", hidden_size, 3 * hidden_size + mlp)
        linear(shapes, f"{prefix}.linear2", hidden_size + mlp, hidden_size)
        linear(shapes, f"{prefix}.modulation.lin", hidden_size, 3 * hidden_size)
        shapes[f"{prefix}.norm.query_norm.scale"] = (HEAD_SIZE,)
        shapes[f"{prefix}.norm.key_norm.scale"] = (HEAD_SIZE,)
    linear(shapes, "final_layer.adaLN_modulation.1", hidden_size, 2 * hidden_size)
    linear(shapes, "final_layer.linear", hidden_size, 4 * channels)
    return shapes

"""Names and shapes of a small FLUX.1 in Black Forest Labs' checkpoint format."""

from .weights import Shapes, linear

HEAD_SIZE = 128


def flux_shapes(
    hidden: int, depth: int, depth_single: int, context_dim: int, vec_dim: int, guidance: bool, channels: int = 16
) -> Shapes:
    """Names and shapes of FLUX.1's parameters. Detection takes the number of heads as hidden / 128.

    Raises ValueError where `hidden` is no multiple of that.
    """
    if hidden % HEAD_SIZE:
        raise ValueError(f"hidden is {hidden}; FLUX's heads are {HEAD_SIZE} wide, so take a multiple of {HEAD_SIZE}.")
    mlp = 4 * hidden
    shapes: Shapes = {}
    linear(shapes, "img_in", 4 * channels, hidden)
    linear(shapes, "txt_in", context_dim, hidden)
    for name, inputs in ({"time_in": 256, "vector_in": vec_dim} | ({"guidance_in": 256} if guidance else {})).items():
        linear(shapes, f"{name}.in_layer", inputs, hidden)
        linear(shapes, f"{name}.out_layer", hidden, hidden)
    for block in range(depth):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            linear(shapes, f"{prefix}_mod.lin", hidden, 6 * hidden)
            linear(shapes, f"{prefix}_attn.qkv", hidden, 3 * hidden)
            linear(shapes, f"{prefix}_attn.proj", hidden, hidden)
            shapes[f"{prefix}_attn.norm.query_norm.scale"] = (HEAD_SIZE,)
            shapes[f"{prefix}_attn.norm.key_norm.scale"] = (HEAD_SIZE,)
            linear(shapes, f"{prefix}_mlp.0", hidden, mlp)
            linear(shapes, f"{prefix}_mlp.2", mlp, hidden)
    for block in range(depth_single):
        prefix = f"single_blocks.{block}"
        linear(shapes, f"{prefix}.linear1", hidden, 3 * hidden + mlp)
        linear(shapes, f"{prefix}.linear2", hidden + mlp, hidden)
        linear(shapes, f"{prefix}.modulation.lin", hidden, 3 * hidden)
        shapes[f"{prefix}.norm.query_norm.scale"] = (HEAD_SIZE,)
        shapes[f"{prefix}.norm.key_norm.scale"] = (HEAD_SIZE,)
    linear(shapes, "final_layer.adaLN_modulation.1", hidden, 2 * hidden)
    linear(shapes, "final_layer.linear", hidden, 4 * channels)
    return shapes

"""A small CLIP-L and a small T5 whose vocabularies fit ComfyUI's tokenizers, with random weights.

ComfyUI cannot infer their sizes from the weights, so they are passed as model options.
"""

from torch import Tensor

from .weights import Shapes, fill, linear

CLIP_WIDTH = 32
T5_WIDTH = 64
CLIP_CONFIG = {"hidden_size": CLIP_WIDTH, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
T5_CONFIG = {"d_model": T5_WIDTH, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2}
CLIP_VOCABULARY, CLIP_POSITIONS = 49408, 77
T5_VOCABULARY, T5_BUCKETS = 32128, 32
# Rows of embeddings are filled with variance 1 / width; tokens are scaled to variance one, positions to half the scale.
CLIP_SCALES = {
    "text_model.embeddings.token_embedding.weight": CLIP_WIDTH**0.5,
    "text_model.embeddings.position_embedding.weight": CLIP_WIDTH**0.5 / 2,
}


def clip_shapes() -> Shapes:
    """Return shapes of a CLIP-L text encoder by Hugging Face's names."""
    width, mlp = CLIP_CONFIG["hidden_size"], CLIP_CONFIG["intermediate_size"]
    shapes: Shapes = {
        "text_model.embeddings.token_embedding.weight": (CLIP_VOCABULARY, width),
        "text_model.embeddings.position_embedding.weight": (CLIP_POSITIONS, width),
        "text_model.final_layer_norm.weight": (width,),
        "text_model.final_layer_norm.bias": (width,),
    }
    for index in range(CLIP_CONFIG["num_hidden_layers"]):
        layer = f"text_model.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(shapes, f"{layer}.self_attn.{name}", width, width)
        linear(shapes, f"{layer}.mlp.fc1", width, mlp)
        linear(shapes, f"{layer}.mlp.fc2", mlp, width)
        for name in ("layer_norm1", "layer_norm2"):
            shapes[f"{layer}.{name}.weight"] = shapes[f"{layer}.{name}.bias"] = (width,)
    linear(shapes, "text_projection", width, width, bias=False)
    return shapes


def t5_shapes(vocabulary: int, biases: int) -> Shapes:
    """Return names and shapes of a T5 v1.1 encoder.

    biases: the number of layers, from the first, with their own table of relative positions.
    """
    width = T5_CONFIG["d_model"]
    mlp = T5_CONFIG["d_ff"]
    heads = T5_CONFIG["num_heads"]
    inner = heads * T5_CONFIG["d_kv"]
    shapes: Shapes = {"shared.weight": (vocabulary, width), "encoder.final_layer_norm.weight": (width,)}
    for index in range(T5_CONFIG["num_layers"]):
        attention, feed_forward = (f"encoder.block.{index}.layer.{i}" for i in (0, 1))
        for name in "qkv":
            linear(shapes, f"{attention}.SelfAttention.{name}", width, inner, bias=False)
        linear(shapes, f"{attention}.SelfAttention.o", inner, width, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wi_0", width, mlp, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wi_1", width, mlp, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wo", mlp, width, bias=False)
        shapes[f"{attention}.layer_norm.weight"] = shapes[f"{feed_forward}.layer_norm.weight"] = (width,)
    for index in range(biases):
        bias = f"encoder.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes[bias] = (T5_BUCKETS, heads)
    return shapes


def t5_scales(biases: int) -> dict[str, float]:
    """Return factors for the filled weights of a T5, by name."""
    # T5 does not divide its attention scores by the root of the head size: the query weights compensate for it.
    scales = {"shared.weight": T5_WIDTH**0.5}
    for index in range(T5_CONFIG["num_layers"]):
        attention = f"encoder.block.{index}.layer.0.SelfAttention"
        scales[f"{attention}.q.weight"] = T5_CONFIG["d_kv"] ** -0.5
        if index < biases:
            scales[f"{attention}.relative_attention_bias.weight"] = 2
    return scales


def scaled(shapes: Shapes, scales: dict[str, float], seed: int) -> dict[str, Tensor]:
    """Make random weights of these shapes, multiplied by the factors in `scales`."""
    tensors = fill(shapes, seed)
    for name, scale in scales.items():
        tensors[name] *= scale
    return tensors

"""Spellings of LoRA keys: the wrappers that trainers write in front of a module's name, and their names of tensors."""

import re
from collections.abc import Iterator
from typing import NamedTuple

DOWN = "lora_down.weight"
UP = "lora_up.weight"
ALPHA = "alpha"
DORA = "dora_scale"

# Wrappers of dotted names. `tests/comfy/spellings.py` names the program that writes each.
_DOTTED = (
    "base_model.model.",
    "_fsdp_wrapped_module.",
    "lora_transformer.",
    "diffusion_model.",
    "transformer.",
    "lora_unet.",
    "pipe.dit.",
    "lycoris.",
    "module.",
    "model.",
    "pipe.",
    "unet.",
    "dit.",
    "net.",
)
# Wrappers of names with underscores for dots. VideoX-Fun writes two underscores.
_FLAT = (
    "Hunyuan_video_I2V_lora_",
    "lora_prior_unet_",
    "base_model_model_",
    "lora_transformer_",
    "diffusion_model_",
    "lora_unet_",
    "transformer_",
    "lycoris_",
    "lora_dit_",
    "module_",
    "model_",
    "unet_",
    "dit_",
    "net_",
    "_",
)
_NOT_A_WRAPPER = ("transformer_blocks_", "transformer_block_")
_CONTAINERS = ("base_model.model.", "_fsdp_wrapped_module.", "module.")
_LONGEST = 1_000  # characters of a module's name; no model has one of a third of it
_MOST_STAGES = 8
_INNER = re.compile(r"(?<=\.)(?:_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_TEXT_ENCODER = re.compile(
    r"(?:base_model\.model\.|pipe\.|module\.)*"
    r"(?:lora_(?:prior_)?te\d?_|lycoris_te\d?_|text_encoders?(?:_\d)?[._]|text_model[._]|te\d?\."
    r"|clip_[lgh][._]|t5xxl[._]|cond_stage_model\.|conditioner\.|text_projection\.|lora_text_encoder)"
)
# A name in brackets is the adapter's; torch allows no dot in it.
_ADAPTER = r"(?:\.(?!weight$|bias$)([^.]+))?"
_PAIRS = (
    (re.compile(rf"\.lora_(A|B|down|up){_ADAPTER}(?:\.weight)?$"), {"A": DOWN, "B": UP, "down": DOWN, "up": UP}),
    (re.compile(r"[._]lora(?:_linear_layer)?\.(down|up)()(?:\.weight)?$"), {"down": DOWN, "up": UP}),
    (re.compile(rf"\.(lora_magnitude_vector){_ADAPTER}(?:\.weight)?$"), {"lora_magnitude_vector": DORA}),
    (re.compile(rf"\.(lora_B){_ADAPTER}\.bias$"), {"lora_B": "diff_b"}),
)
# XLabs-AI/x-flux: the attention processors of FLUX.1, 1 for the picture and 2 for the text.
_XLABS = re.compile(r"((?:.*\.)?(?:double|single)_blocks\.\d+)\.processor\.(qkv|proj)_lora([12]?)\.(down|up)\.weight")
_XLABS_LAYERS = {
    ("qkv", "1"): "img_attn.qkv",
    ("qkv", "2"): "txt_attn.qkv",
    ("proj", "1"): "img_attn.proj",
    ("proj", "2"): "txt_attn.proj",
    ("qkv", ""): "linear1_qkv",
    ("proj", ""): "linear2",
}
# Suffixes with a dot in them.
_DOTTED_SUFFIXES = ("lora_mid.weight", *(f"{name}.weight" for name in ("a1", "a2", "b1", "b2")))


class KeyParts(NamedTuple):
    """A key of a file.

    module: name of the module as the file has it.
    adapter: name of the adapter, empty if the key has none.
    suffix: name of the tensor in kohya's and LyCORIS' files.
    """

    module: str
    adapter: str
    suffix: str


def split_key(key: str) -> KeyParts:
    """Split a key into module, adapter and suffix; the suffix in kohya's or LyCORIS' spelling."""
    if match := _XLABS.fullmatch(key):
        block, projection, side, way = match.groups()
        if layer := _XLABS_LAYERS.get((projection, side)):
            return KeyParts(f"{block}.{layer}", "", DOWN if way == "down" else UP)
    for pattern, suffixes in _PAIRS:
        if match := pattern.search(key):
            return KeyParts(key[: match.start()], match[2] or "", suffixes[match[1]])
    for suffix in _DOTTED_SUFFIXES:
        if key.endswith(f".{suffix}"):
            return KeyParts(key[: -len(suffix) - 1], "", suffix)
    module, _, suffix = key.rpartition(".")
    return KeyParts(module, "", suffix)


def unwrapped(name: str) -> Iterator[str]:
    """Yield the name of a module, and again after each known wrapper is removed from its front.

    Nothing else is ever removed: another prefix belongs to another module.
    """
    if len(name) > _LONGEST:
        return
    name = _INNER.sub("", name)
    wrappers = _DOTTED + _FLAT
    for _ in range(_MOST_STAGES):
        yield name
        wrapper = next((w for w in wrappers if name.startswith(w)), None)
        if wrapper is None or (wrapper == "transformer_" and name.startswith(_NOT_A_WRAPPER)):
            return
        name = name[len(wrapper) :]


def without_containers(name: str) -> str:
    """Remove the wrappers of torch and PEFT from a name's front, which no module of a model is called."""
    while container := next((c for c in _CONTAINERS if name.startswith(c)), None):
        name = name[len(container) :]
    return _INNER.sub("", name)


def is_text_encoder(key: str) -> bool:
    """Return whether a key belongs to a text encoder."""
    return _TEXT_ENCODER.match(key) is not None

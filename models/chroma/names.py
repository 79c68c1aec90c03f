"""The modules of Chroma: natively (lodestones, ComfyUI) and in diffusers."""

from ..flux.names import FLUX1_GAPS, FLUX1_NAMES
from ..name_table import NameTable

_APPROXIMATOR = "distilled_guidance_layer"
_LAYER = f"{_APPROXIMATOR}.layers.{{}}"


def _is_shared(name: str) -> bool:
    """Return whether Chroma has this module of FLUX.1: all but embedders and modulation."""
    return name in ("img_in", "txt_in", "final_layer.linear") or ("_blocks." in name and not name.endswith(".lin"))


# The layout is that of diffusers' loaders/single_file_utils.py, convert_chroma_transformer_checkpoint_to_diffusers.
_TO_DIFFUSERS: dict[str, tuple[str, ...]] = {
    **{name: parts for name, parts in FLUX1_NAMES.to_diffusers.items() if _is_shared(name)},
    f"{_APPROXIMATOR}.in_proj": (f"{_APPROXIMATOR}.in_proj",),
    f"{_APPROXIMATOR}.out_proj": (f"{_APPROXIMATOR}.out_proj",),
    f"{_LAYER}.in_layer": (f"{_LAYER}.linear_1",),
    f"{_LAYER}.out_layer": (f"{_LAYER}.linear_2",),
}
_NORMS = (*FLUX1_NAMES.extra_modules, f"{_APPROXIMATOR}.norms.{{}}")
CHROMA_NAMES = NameTable(_TO_DIFFUSERS, _NORMS, proportions=FLUX1_NAMES.proportions, gaps=FLUX1_GAPS)

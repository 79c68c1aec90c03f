"""Attachment of a compiled model to a MODEL."""

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..memory.weights.dynamic_vram import without_dynamic_vram
from .compiled_model import CompiledModel, compiled_model_for
from .settings import CompileSettings

KEY = "tessera.compile"


def compile_model(patcher: ModelPatcher, settings: CompileSettings) -> tuple[ModelPatcher, CompiledModel]:
    """Clone the MODEL so that it runs compiled. Raises ValueError for invalid settings."""
    settings.check()
    clone, why_not, note = _compilable_clone(patcher)
    compiled_model = compiled_model_for(clone.model, settings, clone.load_device)
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    if why_not is None:
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, compiled_model.apply_model)
        clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, compiled_model.next_run)
    for sentence in (why_not, note):
        if sentence is not None:
            compiled_model.notes.add(sentence)
    clone.set_attachments(KEY, compiled_model)
    return clone, compiled_model


def _compilable_clone(patcher: ModelPatcher) -> tuple[ModelPatcher, str | None, str | None]:
    """Return (clone, the reason it can't be compiled or None, a note for the user or None)."""
    clone = without_dynamic_vram(patcher)
    if clone is None:
        reason = (
            "This MODEL uses ComfyUI's dynamic VRAM and its loader can't load it without, so it runs uncompiled. "
            "Load it with Load Diffusion Model (Block Swap) or ComfyUI's own loader, or start ComfyUI with "
            "--disable-dynamic-vram."
        )
        return patcher.clone(), reason, None
    if not patcher.is_dynamic():
        return clone, None, None
    note = (
        "ComfyUI's dynamic VRAM can't be compiled, so this MODEL was loaded again without it. If it doesn't fit on "
        "the GPU completely, ComfyUI streams the rest each time."
    )
    return clone, None, note


def compiled_model_of(patcher: ModelPatcher) -> CompiledModel | None:
    """Return the compiled model of a MODEL from Compile Model, None for any other."""
    return patcher.get_attachment(KEY)

"""Each class that docs/models.md says is not trained is refused by name, before anything is encoded."""

import comfy.model_patcher
import comfy.supported_models
import pytest
import torch
from tessera.models.catalogue.registry import family_of
from tessera.models.native.facts.untrained import NEWER_UNTRAINED, UNTRAINED
from tiny.native import ROWS, build
from tiny.train.runs import Watcher, train, training_data

CPU = torch.device("cpu")
# Of these ComfyUI reads sizes from a checkpoint's weights, so that none is made without.
FROM_A_CHECKPOINT = {"Stable_Zero123", "StableAudio", "StableAudio3"}


def model_of(name):
    """A MODEL of this class, with the transformer of a tiny one that trains in place of its own."""
    kind = getattr(comfy.supported_models, name)
    config = kind({**kind.unet_config, "disable_unet_model_creation": True})
    config.set_inference_dtype(torch.float32, None)
    trained = build(ROWS[0])
    if name in FROM_A_CHECKPOINT:
        trained.model.model_config = config
        return trained
    with torch.inference_mode():
        model = config.get_model({}, "", device=CPU)
        model.diffusion_model = trained.model.diffusion_model
    return comfy.model_patcher.ModelPatcher(model, CPU, CPU)


@pytest.mark.parametrize("name", UNTRAINED)
def test_an_untrained_model_is_refused_by_name_with_the_reason(name):
    with pytest.raises(ValueError) as error:
        family_of(model_of(name))
    sentence = f"model is {name}, which Train LoRA can't train ({UNTRAINED[name]}); connect another MODEL."
    assert str(error.value) == sentence


@pytest.mark.parametrize("name", NEWER_UNTRAINED)
def test_an_untrained_model_of_a_newer_comfyui_is_refused_by_name_too(name):
    model = build(ROWS[0])
    config = type(model.model.model_config)
    newer = type(name, (config,), {"__module__": "comfy.supported_models"})
    model.model.model_config = newer(model.model.model_config.unet_config)
    with pytest.raises(ValueError, match=rf"^model is {name}, which .* can't train \({NEWER_UNTRAINED[name]}\)"):
        family_of(model)


def test_a_run_is_refused_before_the_model_is_loaded(tmp_path):
    watcher = Watcher()
    with pytest.raises(ValueError, match=r"^model is SeedVR2, which Train LoRA can't train \(upscales\)"):
        train(model_of("SeedVR2"), training_data(), tmp_path, watcher)
    assert "Loading the model" not in watcher.phases


def test_a_class_of_another_pack_with_a_name_of_core_s_is_not_core_s():
    model = build(ROWS[0])
    model.model.model_config = type("SeedVR2", (type(model.model.model_config),), {})(
        model.model.model_config.unet_config
    )
    assert family_of(model).title

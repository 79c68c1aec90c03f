"""Effect of sliders and erasures on the frozen model, judged by ComfyUI's own forward with the LoRA loaded by it."""

import json
from dataclasses import replace

import comfy.model_management
import comfy.sd
import pytest
import torch
from safetensors import safe_open
from tessera.data.concepts.prompt_data import with_concept
from tiny.data.other_encoders import load_z_image_clip
from tiny.native import ROWS, build, core_forward, data_of
from tiny.train.concepts import concept_data, erasure_of, picture_data, slider_of
from tiny.train.learning import WHOLE
from tiny.train.runs import sample, train

SIGMAS = (0.3, 0.6, 0.9)
# A random model changes as a whole, and a small step at the end leaves no noise of the optimizer.
RUN = {"save_every": 0, "network": WHOLE, "optimizer": {"learning_rate": 1e-3, "lr_scheduler": "cosine"}}
Z_IMAGE = next(row for row in ROWS if row.name == "z-image")


def at_strength(model, result, strength):
    return comfy.sd.load_lora_for_models(model, None, dict(result.lora), strength, 0)[0]


def flux_output(model, prompt, x_t, sigma):
    """Velocity of ComfyUI's own forward of FLUX.1, (1, 16, H, W)."""
    comfy.model_management.load_models_gpu([model])
    inputs = {"c_crossattn": prompt.text, "y": prompt.conditioning["pooled_output"], "guidance": torch.ones(1)}
    with torch.no_grad():
        return (x_t - model.model.apply_model(x_t, torch.tensor([sigma]), **inputs)) / sigma


def noisy(read, sigma):
    """A latent under noise that no run has seen, in the model's space."""
    x0 = read.latent[None]
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(77))
    return (1 - sigma) * 0.3611 * (x0 - 0.1159) + sigma * noise


def cosine(a, b):
    return float(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def test_a_slider_points_where_the_pairs_predictions_differ_and_turns_with_its_sign(tiny_flux, tmp_path):
    data = concept_data(slider_of(keep="a dog"))
    result = train(tiny_flux, data, tmp_path, steps=80, **RUN)
    models = {strength: at_strength(tiny_flux, result, strength) for strength in (-1.0, -0.5, 0.5, 1.0)}
    neutral, positive, negative = (target.prompt for target in data.samples[0].load().targets)
    for sigma in SIGMAS:
        x_t = noisy(sample("held out", 4, 4).load(), sigma)
        plain, up, down = (flux_output(tiny_flux, prompt, x_t, sigma) for prompt in (neutral, positive, negative))
        effects = {s: flux_output(model, neutral, x_t, sigma) - plain for s, model in models.items()}
        cosines = {strength: cosine(effect, up - down) for strength, effect in effects.items()}
        assert cosines[1.0] > 0.5 and cosines[-1.0] < -0.5, (sigma, cosines)
        assert cosines[0.5] > 0.5 and cosines[-0.5] < -0.5, (sigma, cosines)
        assert float(effects[0.5].norm()) < float(effects[1.0].norm())
        # Odd: half of the sum is what both strengths share.
        assert float((effects[1.0] + effects[-1.0]).norm()) < float((effects[1.0] - effects[-1.0]).norm())


def test_a_slider_from_pictures_leads_from_one_end_to_the_other(tiny_flux, tmp_path):
    """On a picture that no run has seen: it learns what the pairs have in common."""
    result = train(tiny_flux, picture_data(6), tmp_path, steps=120, batch_size=2, **RUN)
    models = {strength: at_strength(tiny_flux, result, strength) for strength in (-1.0, 1.0)}
    read = picture_data(10).samples[9].load()
    difference = 0.3611 * (read.opposite - read.latent)[None]  # of the velocities noise − x0
    for sigma in SIGMAS:
        x_t = noisy(read, sigma)
        frozen = flux_output(tiny_flux, read, x_t, sigma)
        effects = {strength: flux_output(model, read, x_t, sigma) - frozen for strength, model in models.items()}
        cosines = {strength: cosine(effect, difference) for strength, effect in effects.items()}
        assert cosines[1.0] > 0.5 and cosines[-1.0] < -0.5, (sigma, cosines)
        assert 0.5 < float((effects[1.0] - effects[-1.0]).norm() / difference.norm()) < 2, sigma


def test_an_erased_prompt_lands_at_its_target_and_kept_ones_stay(tiny_flux, tmp_path):
    data = concept_data(erasure_of())
    result = train(tiny_flux, data, tmp_path, steps=300, batch_size=2, **RUN)
    changed = at_strength(tiny_flux, result, 1.0)
    target, erased = (target.prompt for target in data.samples[0].load().targets)
    bus = sample("prompt a bus", 1, 1).load()
    for sigma in SIGMAS:
        x_t = noisy(sample("held out", 4, 4).load(), sigma)
        frozen = {name: flux_output(tiny_flux, prompt, x_t, sigma) for name, prompt in (("t", target), ("e", erased))}
        goal = 2 * frozen["t"] - frozen["e"]
        landed = flux_output(changed, erased, x_t, sigma)
        way = float((goal - frozen["e"]).norm())
        shift = float((flux_output(changed, bus, x_t, sigma) - flux_output(tiny_flux, bus, x_t, sigma)).norm())
        assert float((landed - goal).norm()) < 0.4 * way, sigma
        assert shift < 0.1 * float((landed - frozen["e"]).norm()), sigma


def test_a_slider_on_comfyuis_own_forward_turns_with_its_sign(tmp_path):
    """Z-Image, whose prompts keep their lengths."""
    model = build(Z_IMAGE)
    concept = slider_of(positive="an old, wrinkled person", negative="young", neutral="a person", guidance_scale=3.0)
    data = with_concept(
        data_of(Z_IMAGE), concept, load_z_image_clip(Z_IMAGE.text[1]), tmp_path / "cache", lambda *_: None, lambda: None
    )
    result = train(model, data, tmp_path, steps=100, **RUN)
    item, unseen = data.samples[0], data_of(Z_IMAGE, 3).samples[2]
    neutral, positive, negative = (target.prompt for target in item.load().targets)

    def output(patcher, prompt, sigma):
        read = replace(unseen.load(), text=prompt.text, conditioning=prompt.conditioning)
        return core_forward(patcher, Z_IMAGE, replace(unseen, load=lambda *_: read), sigma)

    models = {strength: at_strength(model, result, strength) for strength in (-1.0, 1.0)}
    for sigma in SIGMAS:
        plain, up, down = (output(model, prompt, sigma) for prompt in (neutral, positive, negative))
        outputs = {}
        for strength, patcher in models.items():
            comfy.model_management.load_models_gpu([patcher])
            outputs[strength] = output(patcher, neutral, sigma) - plain
        comfy.model_management.load_models_gpu([model])
        cosines = {strength: cosine(effect, up - down) for strength, effect in outputs.items()}
        assert cosines[1.0] > 0.5 and cosines[-1.0] < -0.5, (sigma, cosines)


@pytest.mark.parametrize("kind", ["slider", "erasure"])
def test_the_data_of_a_concept_names_its_prompts_in_the_file(kind, tiny_flux, tmp_path):
    concept = slider_of() if kind == "slider" else erasure_of()
    result = train(tiny_flux, concept_data(concept), tmp_path, steps=1)
    with safe_open(result.path, "pt") as file:
        header = json.dumps(file.metadata())
    assert kind in header and concept.terms[0].prompt in header

"""A LoRA of one edit, judged by ComfyUI's own forward and sampler with the LoRA loaded by its own loader."""

import pytest
import tiny
from tiny.learning import WHOLE, assert_draws, assert_loss_falls, core_loss, drawn_from_noise, with_lora
from tiny.qwen_data import qwen_sample
from tiny.runs import train, training_data


@pytest.mark.parametrize(
    "timestep_zero", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["qwen-image", "2511"]
)
def test_training_on_one_edit_lowers_its_loss_and_makes_the_sampler_draw_it(tmp_path, timestep_zero):
    model = tiny.load_qwen_image(
        tiny.write_qwen_image(tmp_path / "qwen.safetensors", layers=1, timestep_zero=timestep_zero)
    )
    data = training_data(qwen_sample("the picture", 4, 4, references=[(4, 4)] if timestep_zero else ()))
    tensors = data.samples[0].load()
    result = train(
        model,
        data,
        tmp_path,
        steps=450,
        batch_size=2,
        save_every=0,
        network=WHOLE,
        optimizer={"learning_rate": 3e-3, "lr_scheduler": "cosine"},
        objective={"shift": 1.0},
    )
    learned = with_lora(model, result)
    assert_loss_falls(lambda m, sigma: core_loss(m, tensors, sigma), model, learned)
    assert_draws(lambda m: drawn_from_noise(m, tensors), tensors.latent, (model, learned), near=0.4, far=1.5)

"""A LoRA of one picture, judged by ComfyUI's own forward and sampler with the LoRA loaded by its own loader."""

from tiny.learning import WHOLE, assert_draws, assert_loss_falls, core_loss, drawn_from_noise, with_lora
from tiny.runs import sample, train, training_data


def test_training_on_one_picture_lowers_its_loss_and_makes_the_sampler_draw_it(tiny_flux, tmp_path):
    # FLUX's latents have a deviation near 1 / 0.3611.
    data = training_data(sample("the picture", 4, 4, scale=2.77))
    tensors = data.samples[0].load()
    result = train(
        tiny_flux,
        data,
        tmp_path,
        steps=450,
        batch_size=2,
        save_every=0,
        network=WHOLE,
        optimizer={"learning_rate": 3e-3, "lr_scheduler": "cosine"},
    )
    learned = with_lora(tiny_flux, result)
    assert_loss_falls(lambda model, sigma: core_loss(model, tensors, sigma), tiny_flux, learned)
    assert_draws(
        lambda model: drawn_from_noise(model, tensors), tensors.latent, (tiny_flux, learned), near=0.35, far=1.5
    )

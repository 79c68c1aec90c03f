"""Gradients of sliders and erasures against fp64 autograd, written out; the adapter's sign; their graphs."""

from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.data.samples import PICTURE_SLIDER, SLIDER, SampleVariant
from tessera.train.config.settings import MemoryOptions
from tiny.train.concepts import concept_data, erasure_data, picture_data, pictures, slider_data, slider_of
from tiny.train.reference_row import ReferenceRow
from tiny.train.runs import training_data

FP32 = 1e-4


def masked_data():
    """A slider on a picture with a mask, one that regularises with its own caption, and a whole one."""
    masked, regularisation, whole = pictures().samples
    read = replace(masked.load(), weights=torch.linspace(0, 1, 16))
    masked = replace(masked, load=lambda *_: read)
    return concept_data(slider_of(), training_data(masked, replace(regularisation, regularisation=True), whole))


DATA = {
    "slider": slider_data,
    "erasure": erasure_data,
    "pictures": picture_data,
    "masks and regularisation": masked_data,
}


def written_out(trainer, tensors, micro_batches):
    """The loss and the gradients of a step in fp64. With g = 2 of a slider, of erasures 1, x the noisy latent:

    slider:   ½·mean((v(neutral; +W) − v₀(neutral) − g·d)²) + ½·mean((v(neutral; −W) − v₀(neutral) + g·d)²),
              d = v₀(positive) − v₀(negative)
    erasure:  mean((v(erased) − (2·v₀(target) − v₀(erased)))²)
    kept:     mean((v(kept; ±W) − v₀(kept))²)
    pictures: ½·mean((v(x⁺; +W) − v₀(x⁺) − h)²) + ½·mean((v(x⁻; −W) − v₀(x⁻) + h)²),
              h = ½·((u⁺ − v₀(x⁺)) − (u⁻ − v₀(x⁻)))
    """
    weights = {name: t.double() for name, t in tensors.items()}
    lora, masters = tiny.reference_masters(trainer)
    opposite = {name: (down, -up, scale) for name, (down, up, scale) in lora.items()}
    total = torch.zeros((), dtype=torch.float64)
    for micro, requests in enumerate(micro_batches):
        for place, (index, variant) in enumerate(requests):
            item = trainer.context.data.samples[index]
            read = item.load(variant)
            row = ReferenceRow(trainer.settings, weights, item, read, micro, place)
            if item.regularisation:
                assert len(read.targets) == 1 and torch.equal(read.text, pictures().samples[index].load().text)

            def frozen(prompt, reference=row):
                with torch.no_grad():
                    return reference.velocity(prompt, {})

            if item.concept == PICTURE_SLIDER:
                other = ReferenceRow(trainer.settings, weights, item, replace(read, latent=read.opposite), micro, place)
                residuals = row.target - frozen(read), other.target - frozen(read, other)
                half = (residuals[0] - residuals[1]) / 2
                errors = [
                    row.velocity(read, lora) - frozen(read) - half,
                    other.velocity(read, opposite) - frozen(read, other) + half,
                ]
            elif len(read.targets) == 1:  # kept
                sides = (lora, opposite) if item.concept == SLIDER else (lora,)
                errors = [row.velocity(read, side) - frozen(read) for side in sides]
            elif item.concept == SLIDER:
                neutral, positive, negative = (target.prompt for target in read.targets)
                assert torch.equal(read.text, neutral.text)
                direction = 2.0 * (frozen(positive) - frozen(negative))
                errors = [
                    row.velocity(neutral, lora) - frozen(neutral) - direction,
                    row.velocity(neutral, opposite) - frozen(neutral) + direction,
                ]
            else:
                target, erased = (target.prompt for target in read.targets)
                assert torch.equal(read.text, erased.text)
                errors = [row.velocity(erased, lora) - (2.0 * frozen(target) - frozen(erased))]
            counted = torch.ones(item.tokens) if read.weights is None else read.weights
            losses = [error.square().mean(dim=2)[0] * counted.double() for error in errors]
            loss = sum(loss.sum() for loss in losses) / counted.double().sum() / len(errors)
            total = total + loss / (len(requests) * len(micro_batches))
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in masters.items()}


MODES = {
    "eager": (None, MemoryOptions(checkpointing="none")),
    "compiled": ("aot_eager", MemoryOptions(checkpointing="none")),
    "full, compiled, swapped": (
        "aot_eager",
        MemoryOptions(checkpointing="full", blocks_to_swap=2, offload_activations=True),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DATA)
def test_gradients_equal_the_fp64_reference(kind, mode, tiny_files, tiny_flux, tmp_path):
    backend, memory = MODES[mode]
    settings = {"batch_size": 2, "gradient_accumulation": 2, "memory": memory}
    trainer = tiny.make_trainer(tiny_flux, DATA[kind](), tmp_path, backend=backend, **settings)
    tiny.fill_up_matrices(trainer)
    initial = {name: master.clone() for name, master in trainer.network.master_weights().items()}
    last = trainer.context.data.samples[0].caption_variants - 1  # a kept prompt, of those that have one
    micro_batches = [
        [(0, SampleVariant(caption=0)), (1, SampleVariant(caption=last))],
        [(2, SampleVariant(caption=last)), (0, SampleVariant(caption=last // 2))],
    ]
    loss = float(trainer.train_step.forward_backward(micro_batches))
    expected_loss, expected = written_out(trainer, load_file(tiny_files["flux"]), micro_batches)
    assert abs(loss - expected_loss) < FP32 * expected_loss
    tiny.check_gradients(trainer, expected, FP32)
    after = trainer.network.master_weights()
    assert all(torch.equal(initial[name], after[name]) for name in initial)
    trainer.close()

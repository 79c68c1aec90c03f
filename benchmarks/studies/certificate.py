"""Findings of the certificate on ten classes of models, and its cost in steps of the training that follows.

Run: python benchmarks certificate > benchmarks/results/certificate.md
Tiny models of ComfyUI's classes, as in tests/tiny/native, with a block swapped and full checkpointing, on a CPU; a few
minutes.
"""

import argparse
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comfyui import ROOT, set_up_comfyui
from figures import markdown_table

# Transformers and U-Nets, for pictures and video, with sound, a text adapter, experts and tokens of their own.
CLASSES = ("z-image", "krea-2", "sd3.5", "lumina-2", "hidream", "chroma-radiance", "sd1.5", "ltx-2.3") + (
    "wan-vace",
    "lens",
)
STEPS = 6
HEAD = """# The certificate on ten classes

    python benchmarks certificate > benchmarks/results/certificate.md

Tiny models of ten of ComfyUI's classes with random weights, one block swapped, full checkpointing, on a CPU.

- **gradient**: the largest relative error against central differences, of all layers that were compared.
- **blocks**: the largest difference between blocks as the run computes them and plain ones.
- **file**: layers of the LoRA that ComfyUI's loader takes.
- **effect**: how far what the file does to the output is from what the trainer's LoRA does. *Not checked* where the
  model's own rounding hides the differences of a layer, as in HiDream, whose experts are chosen by it.
- **steps**: time of all checks, as a number of forwards and backwards of the same run."""
TAIL = """
What a certificate has to find is planted in `tests/comfy/models/native/verify/test_certificate.py`: a forward 2 % off,
a gradient 10 % off, a layer without a gradient, a block 0.1 % off and one whose weights were half copied, a LoRA file
without a layer and one with a layer 1 % too strong. Each ends the run before its first step, by name of check and
block."""


def certificate_of(row: Any, dtype: torch.dtype, folder: Path) -> tuple[Any, float]:
    """Make a model's certificate and train it. Returns the certificate, and its seconds in steps."""
    rows, training = import_module("tiny.native"), import_module("tiny.train.training")
    settings = import_module("tessera.train.config.settings")
    memory = settings.MemoryOptions(checkpointing="full", blocks_to_swap=1)
    model, data = rows.build(row, dtype), rows.data_of(row)
    trainer = training.make_trainer(model, data, folder, memory=memory, steps=STEPS)
    make = import_module("tessera.train.certificate.certificate").make_certificate
    placed, samples = trainer.placed, trainer.context.data.samples
    try:
        certificate = make(placed, list(trainer.network.adapters), samples, 1.0, trainer.observer)
        seconds = []
        for step in range(STEPS):
            begin = time.perf_counter()
            trainer.train_step.forward_backward([training.micro_batch(step % len(samples))])
            seconds.append(time.perf_counter() - begin)
    finally:
        trainer.close()
    return certificate, certificate.seconds / median(seconds)


def line(name: str, dtype: str, certificate: Any, steps: float) -> list[str]:
    gradients, file = certificate.gradients, certificate.file
    worst = "not checked" if gradients is None else f"{gradients.worst:.1e} of {len(gradients.measured)}"
    blocks = "not checked" if certificate.blocks is None else f"{certificate.blocks:.1e}"
    layers = "not checked" if file is None else f"{file.layers - len(file.missing)} of {file.layers}"
    effect = "not checked" if certificate.effect is None else f"{certificate.effect:.1e}"
    return [f"`{name}`, {dtype}", "equal", worst, blocks, layers, effect, f"{steps:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--classes", nargs="+", default=CLASSES, help="tiny models of tests/tiny/native")
    args = parser.parse_args()
    set_up_comfyui("cpu")
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    torch.set_num_threads(1)
    by_name = {row.name: row for row in import_module("tiny.native").ROWS}
    lines = []
    for name in args.classes:
        for title, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            with tempfile.TemporaryDirectory() as folder:
                lines.append(line(name, title, *certificate_of(by_name[name], dtype, Path(folder))))
    print(f"{HEAD}\n")
    print(markdown_table(["model", "forward", "gradient", "blocks", "file", "effect", "steps"], lines))
    print(TAIL)


if __name__ == "__main__":
    main()

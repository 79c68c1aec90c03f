"""Comparing the LoRA gradients of a FamilyCase in one mode of training with those of its fp64 reference."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..models.family_case import FamilyCase, block_count, computing_in
from .reference_gradients import Gradients, lora_gradients, reference_gradients
from .runs import training_data
from .training import fill_up_matrices, make_trainer, micro_batch

SWAPPED = 3
# Largest relative error of one matrix's gradient. fp32: the sines of the timestep alone, whose arguments reach 1000,
# move the velocity by 1.3e-5; bf16 rounds each result to 2^-9 of itself.
FP32, BF16 = 1e-4, 0.06


class GradientCheck:
    """Compares the gradients of a batch of a case's samples with the reference's."""

    def __init__(self, files: Any, folder: Path, references: dict[Any, Any]) -> None:
        """references: earlier results of the reference, which are the same in every mode that starts from the same
        LoRA."""
        self.files = files
        self.folder = folder
        self.references = references

    def __call__(
        self,
        case: FamilyCase,
        batch: str,
        count: int,
        *,
        dtype: torch.dtype = torch.float32,
        mode: str = "full",
        swap: bool = False,
        backend: str | None = None,
        network: Any = None,
        **memory: Any,
    ) -> Gradients:
        """The gradients of the first `count` samples of a batch, after comparing; `memory`: fields of MemoryOptions."""
        from tessera.train.config.settings import MemoryOptions

        file, bound = self.files(case, dtype=dtype), FP32 if dtype == torch.float32 else BF16
        model = computing_in(case.load(file), dtype)
        options = MemoryOptions(
            checkpointing=mode, blocks_to_swap=min(SWAPPED, block_count(model)) if swap else 0, **memory
        )
        settings = {"memory": options} | ({"network": network} if network else {})
        data = training_data(*case.batches()[batch]())
        trainer = make_trainer(model, data, self.folder, backend=backend, batch_size=count, **settings)
        fill_up_matrices(trainer)
        expected_loss, expected = self.expected(case, trainer, file, (batch, count, dtype, network))
        loss = trainer.train_step.forward_backward([micro_batch(*range(count))])
        gradients = lora_gradients(trainer)
        assert abs(loss - expected_loss) < bound * expected_loss
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            assert float((gradients[name] - value).norm()) <= bound * float(value.norm()), name
        unreached = {name.rpartition(".")[0] for name, value in expected.items() if not value.norm()}
        last = list(trainer.placed.weights.transformer.blocks())[-1][0]
        assert unreached <= {f"{last}.{name}" for name in case.unused}
        trainer.close()
        return gradients

    def expected(self, case: FamilyCase, trainer: Any, file: Path, key: tuple[Any, ...]) -> tuple[float, Gradients]:
        start = {n: p.detach().clone() for n, p in trainer.network.master_weights().items()}
        key = (case.name, *key)
        if key not in self.references:
            reference = reference_gradients(case, trainer, load_file(file), range(key[2]))
            self.references[key] = start, reference
        reference_start, reference = self.references[key]
        assert reference_start.keys() == start.keys() and all(torch.equal(reference_start[n], start[n]) for n in start)
        return reference

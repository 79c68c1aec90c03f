from dataclasses import FrozenInstanceError, fields

import pytest
from tessera.lora.options import NetworkOptions
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.optim.options import OptimizerOptions
from tessera.train.optim.registry import OPTIMIZERS

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "values", "sentence"),
    [
        (NetworkOptions, {"algorithm": "ia3"}, "algorithm is 'ia3'; choose one of lora, loha, lokr, dora, oft."),
        (NetworkOptions, {"rank_dropout": 1.0}, "rank_dropout is 1.0; set it to 0 or more and below 1."),
        (NetworkOptions, {"module_dropout": -1.0}, "module_dropout is -1.0; set it to 0 or more and below 1."),
        (
            NetworkOptions,
            {"algorithm": "lokr", "dropout": 0.1},
            "dropout is 0.1 and lokr has no rank activations to drop; set it to 0, or use rank_dropout or "
            "module_dropout.",
        ),
        (
            NetworkOptions,
            {"algorithm": "oft", "lora_plus_ratio": 4.0},
            "lora_plus_ratio is 4 and oft has no two matrices A and B; set lora_plus_ratio to 1, or algorithm to lora.",
        ),
        (
            NetworkOptions,
            {"algorithm": "dora", "scale_weight_norms": 1.0},
            "scale_weight_norms is 1 and dora trains the lengths of a layer's columns apart from its matrices, whose "
            "size does not limit them; set scale_weight_norms to 0, or algorithm to lora, loha or lokr.",
        ),
        (
            NetworkOptions,
            {"algorithm": "oft", "scale_weight_norms": 0.5},
            "scale_weight_norms is 0.5 and oft rotates a layer's output, which keeps its size; set "
            "scale_weight_norms to 0 (constraint limits the rotation), or algorithm to lora, loha or lokr.",
        ),
        (NetworkOptions, {"factor": 0}, "factor is 0; set it to -1 (near the square root) or to 1 or more."),
        (NetworkOptions, {"constraint": -0.1}, "constraint is -0.1; set it to 0 (none) or above."),
        (
            NetworkOptions,
            {"rank_patterns": "a.*: rank=4\nb.* rank=4"},
            "Line 2 of rank_patterns is 'b.* rank=4'; write it as in 'single_blocks.*: rank=8 alpha=4'.",
        ),
        (
            NetworkOptions,
            {"rank_patterns": "a.*: rank=four"},
            "Line 1 of rank_patterns has the rank 'four'; give a whole number from 1.",
        ),
        (
            NetworkOptions,
            {"rank_patterns": "a.*: alpha=-1"},
            "Line 1 of rank_patterns has the alpha '-1'; give a number above 0.",
        ),
        (NetworkOptions, {"rank": 0}, "rank is 0; set it to 1 or more (16 suits most LoRAs)."),
        (NetworkOptions, {"alpha": 0.0}, "alpha is 0.0; set it above 0 (equal to rank keeps the update unscaled)."),
        (NetworkOptions, {"alpha": INF}, "alpha is inf; give a finite number."),
        (NetworkOptions, {"dropout": 1.0}, "dropout is 1.0; set it to 0 or more and below 1."),
        (NetworkOptions, {"dropout": -0.1}, "dropout is -0.1; set it to 0 or more and below 1."),
        (
            OptimizerOptions,
            {"optimizer": "sgd"},
            f"optimizer is 'sgd'; choose one of {', '.join(OPTIMIZERS)}.",
        ),
        (
            OptimizerOptions,
            {"lr_scheduler": "x"},
            "lr_scheduler is 'x'; choose one of constant, cosine, linear, cosine_with_restarts, polynomial, "
            "warmup_stable_decay, rex, inverse_sqrt, curve.",
        ),
        (OptimizerOptions, {"lr_cycles": 0}, "lr_cycles is 0; set it to 1 or more."),
        (OptimizerOptions, {"lr_power": 0.0}, "lr_power is 0.0; set it above 0 (1 is a straight line)."),
        (OptimizerOptions, {"lr_decay_part": 0.0}, "lr_decay_part is 0.0; set it above 0 and to 1 at most."),
        (OptimizerOptions, {"lr_decay_part": 1.1}, "lr_decay_part is 1.1; set it above 0 and to 1 at most."),
        (
            OptimizerOptions,
            {"ema_decay": 1.0},
            "ema_decay is 1.0; set it to 0 (off) or more and below 1 (0.999 is usual).",
        ),
        (
            OptimizerOptions,
            {"optimizer": "adamw_schedulefree", "ema_decay": 0.9},
            "ema_decay is 0.9 and adamw_schedulefree averages the weights by itself; set ema_decay to 0, or choose "
            "another optimizer.",
        ),
        (
            OptimizerOptions,
            {"optimizer": "adamw_schedulefree", "beta1": 0.0},
            "beta1 is 0.0, by which adamw_schedulefree divides; set it above 0 (0.9 is usual).",
        ),
        (
            OptimizerOptions,
            {"learning_rate": 0.0},
            "learning_rate is 0.0; set it above 0 (1e-4 suits AdamW, 1 suits Prodigy).",
        ),
        (OptimizerOptions, {"learning_rate": NAN}, "learning_rate is nan; give a finite number."),
        (OptimizerOptions, {"warmup_steps": -1}, "warmup_steps is -1; set it to 0 or more."),
        (OptimizerOptions, {"max_grad_norm": -1.0}, "max_grad_norm is -1.0; set it to 0 (no clipping) or more."),
        (OptimizerOptions, {"weight_decay": -0.1}, "weight_decay is -0.1; set it to 0 or more."),
        (OptimizerOptions, {"beta2": 1.0}, "beta1 and beta2 are 0.9 and 1.0; both must be 0 or more and below 1."),
        (OptimizerOptions, {"eps": 0.0}, "eps is 0.0; set it above 0."),
        (OptimizerOptions, {"min_lr_ratio": 1.5}, "min_lr_ratio is 1.5; set it between 0.0 and 1.0."),
        (
            ObjectiveOptions,
            {"timestep_sampling": "cubic"},
            "timestep_sampling is 'cubic'; choose one of logit_normal, uniform, resolution_shifted, resolution_flux2, "
            "resolution_qwen, sigmoid, mode, logsnr, beta, custom.",
        ),
        (ObjectiveOptions, {"loss": "l2"}, "loss is 'l2'; choose one of mse, huber, pseudo_huber, l1."),
        (ObjectiveOptions, {"shift": -1.0}, "shift is -1.0; set it to 0 (the family's own) or more."),
        (ObjectiveOptions, {"logit_std": 0.0}, "logit_std is 0.0; set it above 0."),
        (ObjectiveOptions, {"logit_mean": NAN}, "logit_mean is nan; give a finite number."),
        (ObjectiveOptions, {"guidance": -1.0}, "guidance is -1.0; set it to 0 or more (1 suits LoRA training)."),
        (
            MemoryOptions,
            {"checkpointing": "some"},
            "checkpointing is 'some'; choose one of none, selective, full, auto.",
        ),
        (MemoryOptions, {"attention": "sage"}, "attention is 'sage'; choose one of auto, sdpa, flash-attn, cudnn."),
        (MemoryOptions, {"activation_budget": 2.0}, "activation_budget is 2.0; set it between 0.0 and 1.0."),
        (
            MemoryOptions,
            {"blocks_to_swap": -2},
            "blocks_to_swap is -2; set it to -1 (fit to the free memory), 0 (none) or more.",
        ),
        (MemoryOptions, {"prefetch_blocks": 0}, "prefetch_blocks is 0; set it to 1 or more."),
        (MemoryOptions, {"pin_memory": "yes"}, "pin_memory is 'yes'; choose one of auto, on, off."),
    ],
)
def test_a_bad_value_is_one_sentence_with_its_name_and_the_fix(options, values, sentence):
    with pytest.raises(ValueError) as raised:
        options(**values)
    assert str(raised.value) == sentence


@pytest.mark.parametrize("options", [NetworkOptions, OptimizerOptions, ObjectiveOptions, MemoryOptions])
def test_options_are_frozen_and_their_defaults_are_valid(options):
    instance = options()
    assert instance == options()
    with pytest.raises(FrozenInstanceError):
        setattr(instance, fields(options)[0].name, "x")

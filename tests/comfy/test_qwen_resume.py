"""A run on Qwen-Image that is cancelled and goes on ends as one that was not, with layers that never get a gradient."""

import pytest
import tiny
from tiny.qwen_data import qwen_sample
from tiny.resuming import resumed_as_whole
from tiny.runs import training_data

# The last block's text goes nowhere: these start at zero and stay there.
UNUSED = ("1_attn_add_q_proj", "1_attn_to_add_out", "1_txt_mlp_net_0_proj", "1_txt_mlp_net_2")


@pytest.mark.parametrize("optimizer", ["adamw", "prodigy", "adamw8bit"])
def test_a_cancelled_run_goes_on_to_the_same_result(tiny_files, tmp_path, optimizer):
    shapes = [(4, 4, 5), (2, 8, 60), (8, 2, 128), (4, 4, 140)]
    data = training_data(*(qwen_sample(f"{i}", *s, references=[(4, 6)] * (i % 2)) for i, s in enumerate(shapes)))
    rate = 1.0 if optimizer == "prodigy" else 1e-2
    options = {
        "steps": 4,
        "gradient_accumulation": 2,
        "network": {"rank": 4, "alpha": 2.0, "dropout": 0.2},
        "optimizer": {"optimizer": optimizer, "learning_rate": rate},
    }
    whole = resumed_as_whole(tiny.load_qwen_image(tiny_files["qwen_image"]), data, tmp_path, **options)
    still = {name for name, t in whole.lora.items() if name.endswith("lora_up.weight") and not t.any()}
    assert still == {f"lora_unet_transformer_blocks_{name}.lora_up.weight" for name in UNUSED}

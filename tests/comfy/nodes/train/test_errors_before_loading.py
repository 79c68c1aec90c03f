"""What is wrong with options is told before anything is loaded or encoded, wherever their nodes stand in the graph."""

import pytest
from comfy_server import error_of
from PIL import Image
from tiny.nodes.prompt import node

OPTIONS = {
    "optimizer": (
        "TesseraOptimizer",
        {"optimizer": "custom", "learning_rate": 1e-3, "lr_scheduler": "constant", "warmup_steps": 0}
        | {"max_grad_norm": 1.0, "optimizer_class": "torch.optim.NoSuch"},
        "The optimizer torch.optim.NoSuch needs torch.optim.NoSuch",
    ),
    "network": (
        "TesseraLoraNetwork",
        {"algorithm": "lokr", "rank": 4, "alpha": 4.0, "targets": "", "dropout": 0.0, "lora_plus_ratio": 4.0},
        "lora_plus_ratio is 4 and lokr has no two matrices",
    ),
    "objective": (
        "TesseraObjective",
        {"timestep_sampling": "custom", "shift": 0.0, "loss": "mse", "guidance": 1.0, "sigma_curve": "1:0"},
        "sigma_curve",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_options_end_the_prompt_before_anything_is_loaded(name, server, tiny_loaders):
    folder = server.base / "input" / "told_first"
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (64, 64), (200, 80, 30)).save(folder / "a.png")
    (folder / "a.txt").write_text("a red wall")
    kind, inputs, sentence = OPTIONS[name]
    train = {"output_name": "told_first", "steps": 2, "learning_rate": 1e-3, "rank": 4, "batch_size": 1}
    train |= {"gradient_accumulation": 1, "seed": 0, "compile": "off", "save_every": 0, "resume": "latest"}
    prompt = tiny_loaders | {
        "pictures": node("TesseraImageFolder", folder="input/told_first"),
        "data": node("TesseraPrepareDataset", dataset=["pictures", 0], vae=["vae", 0], clip=["clip", 0]),
        "train": node("TesseraTrainLora", model=["model", 0], data=["data", 0], **train, **{name: [f"{name} set", 0]}),
        f"{name} set": node(kind, **inputs),
    }
    entry = server.wait(server.queue(prompt))
    (error,) = [message for event, message in entry["status"]["messages"] if event == "execution_error"]
    assert error_of(entry).startswith(f"{kind} ") and sentence in error_of(entry)
    assert not error["executed"], error["executed"]

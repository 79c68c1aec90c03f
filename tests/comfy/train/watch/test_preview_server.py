"""Train LoRA with Training Preview, and Compare LoRAs behind it, over the API: one graph, and core's own beside it."""

import numpy as np
import tiny
from PIL import Image
from tiny.nodes.prompt import node

SIZE = {"width": 64, "height": 64}
SAMPLER = {"steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "seed": 3}


def graph(loaders, **changes):
    train = {"output_name": "seen", "steps": 2, "learning_rate": 1e-2, "rank": 4, "batch_size": 1, "seed": 0}
    train |= {"gradient_accumulation": 1, "compile": "off", "save_every": 0, "resume": "latest"}
    sampler = {**SIZE, **SAMPLER, "seeds": 1}
    return loaders | {
        "latent": node("EmptySD3LatentImage", **SIZE, batch_size=1),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "data": node("TesseraLatentsToDataset", latents=["latent", 0], positive=["positive", 0]),
        "preview": node(
            "TesseraPreview", vae=["vae", 0], positive=["positive", 0], every_n_steps=1, at_start=True,
            **{**sampler, **changes},
        ),
        "train": node("TesseraTrainLora", model=["model", 0], data=["data", 0], preview=["preview", 0], **train),
        "sheet": node("SaveImage", images=["train", 6], filename_prefix="sheet"),
        "compare": node(
            "TesseraCompareLoras", model=["model", 0], vae=["vae", 0], positive=["positive", 0], loras="", run="none",
            strengths="1", without_lora=True, **sampler, **{"lora_models.lora0": ["train", 0]},
        ),
        "pictures": node("SaveImage", images=["compare", 1], filename_prefix="compared"),
        "applied": node("LoraModelLoader", model=["model", 0], lora=["train", 0], strength_model=1.0, bypass=False),
        "sampled": node(
            "KSampler", model=["applied", 0], positive=["positive", 0], negative=["positive", 0], denoise=1.0,
            latent_image=["latent", 0], **SAMPLER,
        ),
        "decoded": node("VAEDecode", samples=["sampled", 0], vae=["vae", 0]),
        "of_core": node("SaveImage", images=["decoded", 0], filename_prefix="of_core"),
    }  # fmt: skip


def test_one_graph_trains_previews_and_compares_and_each_picture_is_that_of_core_s_nodes(server, tiny_loaders):
    outputs = server.run(graph(tiny_loaders))["outputs"]

    def read(name, subfolder=""):
        with Image.open(server.base / "output" / subfolder / name) as picture:
            return np.asarray(picture.convert("RGB"))

    def images(key):
        return [read(image["filename"], image["subfolder"]) for image in outputs[key]["images"]]

    (run,) = outputs["train"]["tessera"]
    folder = run["path"].rpartition("/")[0]
    assert run["previews"]["files"] == [f"previews/step{step:06d}_0.png" for step in range(3)]
    assert outputs["train"]["images"] == [
        {"filename": "sheet.png", "subfolder": f"{folder}/previews", "type": "output"}
    ]
    untrained, _, last = (read(file, folder) for file in run["previews"]["files"])
    (expected,) = images("of_core")
    assert np.array_equal(last, expected) and not np.array_equal(untrained, expected)
    (sheet,) = images("sheet")
    assert np.array_equal(sheet, read("sheet.png", f"{folder}/previews"))
    first, second = images("pictures")
    assert np.array_equal(first, untrained) and np.array_equal(second, expected)
    assert len(outputs["compare"]["images"]) == 1

    # With other previews it is the same run, which is found on disk with its sheet.
    repeat = server.run(graph(tiny_loaders, seeds=2))["outputs"]["train"]
    assert repeat["images"] == outputs["train"]["images"] and repeat["tessera"][0]["loss"] == run["loss"]


def test_a_pair_of_the_graph_is_compared_with_two_experts_and_its_clips_run_on_the_node(server):
    """The two are one file, kept in two formats. Wan's clips of 2 latent frames, the experts change hands after 1 step
    of 2."""
    names, files = {"positive": ["positive", 0], "negative": ["positive", 0]}, dict(tiny.WAN_NAMES)
    unet, sampler = files["unet_name"], {**SAMPLER, "cfg": 1.0}
    steps = {"model": [0, 1, "enable", "enable"], "low": [1, 10000, "disable", "disable"]}
    prompt = {
        key: node("UNETLoader", unet_name=unet, weight_dtype=dtype)
        for key, dtype in (("model", "default"), ("low", "fp8_e4m3fn"))
    }
    seed = sampler.pop("seed")
    prompt |= {
        "clip": node("TesseraTinyClipLoader", clip_name1=files["clip_name"]),
        "vae": node("VAELoader", vae_name=files["vae_name"]),
        "latent": node("EmptyHunyuanLatentVideo", width=32, height=32, length=5, batch_size=1),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "data": node("TesseraLatentsToDataset", latents=["latent", 0], positive=["positive", 0]),
        "train": node(
            "TesseraTrainLora", model=["model", 0], model_low_noise=["low", 0], data=["data", 0], output_name="both",
            steps=1, learning_rate=1e-2, rank=4, batch_size=1, seed=0, gradient_accumulation=1, compile="off",
            save_every=0, resume="latest",
        ),
        "compare": node(
            "TesseraCompareLoras", model=["model", 0], model_low_noise=["low", 0], vae=["vae", 0], loras="", run="none",
            strengths="1", without_lora=False, latent_image=["latent", 0], switch_step=1, clips="animation", **names,
            **sampler, seed=seed, seeds=1, width=1024, height=1024,
            **{"lora_models.lora0": ["train", 0], "lora_models_low_noise.lora0": ["train", 3]},
        ),
        "clips": node("SaveImage", images=["compare", 1], filename_prefix="clips"),
        "decoded": node("VAEDecode", samples=["sampled_low", 0], vae=["vae", 0]),
        "of_core": node("SaveImage", images=["decoded", 0], filename_prefix="clips_of_core"),
    }  # fmt: skip
    for number, (key, (start, end, noise, leftover)) in enumerate(steps.items()):
        prompt[f"with_{key}"] = node(
            "LoraModelLoader", model=[key, 0], lora=["train", 3 * number], strength_model=1.0, bypass=False
        )
        latent = ["sampled_model", 0] if number else ["latent", 0]
        prompt[f"sampled_{key}"] = node(
            "KSamplerAdvanced", model=[f"with_{key}", 0], latent_image=latent, add_noise=noise, noise_seed=seed,
            start_at_step=start, end_at_step=end, return_with_leftover_noise=leftover, **names, **sampler,
        )  # fmt: skip
    outputs = server.run(prompt)["outputs"]

    def read(image):
        with Image.open(server.base / "output" / image["subfolder"] / image["filename"]) as picture:
            return np.asarray(picture.convert("RGB"))

    clips, expected = ([read(image) for image in outputs[key]["images"]] for key in ("clips", "of_core"))
    assert len(clips) == 5 and all(map(np.array_equal, clips, expected))
    (file_entry,) = outputs["compare"]["images"]
    assert outputs["compare"]["animated"] == [True] and file_entry["filename"].endswith(".webp")


def test_nodes_that_read_previews_do_not_run_without_them_and_the_rest_does(server, tiny_loaders):
    prompt = graph(tiny_loaders)
    keys = {"model", "clip", "vae", "latent", "positive", "data", "train", "sheet"}
    prompt = {key: node for key, node in prompt.items() if key in keys}
    del prompt["train"]["inputs"]["preview"]
    prompt["train"]["inputs"]["output_name"] = "unseen"
    outputs = server.run(prompt)["outputs"]
    assert "sheet" not in outputs and "images" not in outputs["train"]
    assert outputs["train"]["tessera"][0]["status"] == "finished"

"""Writes the files of this folder with the code of another checkout: python make.py CHECKOUT.

They are for tests/comfy/test_saved_files_stay_readable.py, and are to be made once, by an old version: commit edebd58.
For each family: a tiny checkpoint, its encoders, the cache of Prepare Dataset, a run of 6 steps with the state after
step 3, and its LoRA from Save LoRA in each format. `runs.json` holds what was set on the nodes.
"""

import asyncio
import importlib.util
import inspect
import json
import math
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS, SAVED_STEP = 6, 3
FORMATS = {"kohya": "bf16", "comfyui": "fp16", "diffusers": "fp32"}

# Each family has another optimizer, and other things that a cache holds.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "flux": {
        "TesseraImageFolder": {
            "folder": "input/pictures",
            "trigger_words": "sks",
            "mask_folder": "input/masks",
            "unmasked_weight": 0.25,
            "flip": "horizontal",
            "caption_dropout": 0.2,
        },
        "TesseraPrepareDataset": {"megapixels": 0.01, "max_text_length": "256"},
        "TesseraLoraNetwork": {
            "rank": 2,
            "alpha": 4.0,
            "dropout": 0.1,
            "targets": "double_blocks.0.img_attn.*\nsingle_blocks.0.linear*\nfinal_layer.adaLN_modulation.1",
        },
        "TesseraOptimizer": {"learning_rate": 1e-2, "ema_decay": 0.5},
        "TesseraValidation": {"part": 0.3, "every_n_steps": 1},
        "TesseraTrainLora": {"rank": 2, "learning_rate": 1e-2, "batch_size": 1, "gradient_accumulation": 2},
    },
    "flux2": {
        "TesseraImageFolder": {"folder": "input/pictures", "control_folder": "input/controls"},
        "TesseraPrepareDataset": {"megapixels": 0.01, "control_megapixels": 0.01},
        # Of 4096 numbers and more bitsandbytes keeps 8-bit moments.
        "TesseraLoraNetwork": {"rank": 8, "alpha": 4.0, "targets": "double_blocks.0.img_mlp.*"},
        "TesseraOptimizer": {"optimizer": "adamw8bit", "learning_rate": 1e-2},
        "TesseraTrainLora": {"rank": 8, "learning_rate": 1e-2, "batch_size": 2, "gradient_accumulation": 1},
    },
    "wan": {
        "TesseraImageFolder": {"folder": "input/pictures"},
        "TesseraVideoFolder": {"folder": "input/films", "target_frames": "5"},
        "TesseraPrepareDataset": {"megapixels": 0.01},
        "TesseraLoraNetwork": {"rank": 2, "alpha": 2.0, "targets": "blocks.0.self_attn.*\nblocks.0.ffn.*"},
        "TesseraOptimizer": {"optimizer": "prodigy", "learning_rate": 1.0},
        "TesseraTrainLora": {"rank": 2, "learning_rate": 1.0, "batch_size": 1, "gradient_accumulation": 2},
    },
    "qwen_image": {
        "TesseraImageFolder": {"folder": "input/pictures", "control_folder": "input/controls"},
        "TesseraPrepareDataset": {"megapixels": 0.01, "control_megapixels": 0.01},
        "TesseraLoraNetwork": {
            "rank": 2,
            "alpha": 1.0,
            "targets": "transformer_blocks.0.attn.to_*\ntransformer_blocks.0.img_mlp.*",
        },
        "TesseraOptimizer": {"optimizer": "adamw_schedulefree", "learning_rate": 1e-2},
        "TesseraTrainLora": {"rank": 2, "learning_rate": 1e-2, "batch_size": 1, "gradient_accumulation": 1},
    },
}
PICTURES = {"a": (64, 96), "b": (96, 64), "c": (80, 80)}
CAPTION, FILM_CAPTION = "a red house", "two boats"


def load_module(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def coarse(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same in few bits that survive any cast: of a matrix the signs, at a power of two that keeps its size."""
    import torch

    made = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and tensor.numel() > 1 and (size := float(tensor.float().std())) > 0:
            tensor = tensor.float().sign() * 2.0 ** round(math.log2(size))
        made[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    return made


def used_rows_only(tensors: dict[str, Any], vocabulary: str, rows: set[int]) -> None:
    kept = tensors[vocabulary].clone().zero_()
    for row in rows & set(range(len(kept))):  # CLIP-L's tokens and T5's are counted together
        kept[row] = tensors[vocabulary][row]
    tensors[vocabulary] = kept


def rewrite(path: Path, change: Any = coarse) -> Path:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    save_file(change(tensors), path, metadata)
    return path


def rows_of(clip: Any, texts: set[str]) -> set[int]:
    """Every token that these captions may take, with the special ones of the tokenizer."""
    tokens = [clip.tokenize(text) for text in texts]
    return {pair[0] for made in tokens for batches in made.values() for batch in batches for pair in batch}


def write_models(folder: Path) -> None:
    import tiny
    from safetensors.torch import save_file
    from tiny.data import image_encoders

    rewrite(tiny.write_flux(folder / "flux.safetensors", depth=1, depth_single=1))
    rewrite(tiny.write_flux2(folder / "flux2.safetensors", depth=1, depth_single=1, context_dim=96))
    rewrite(tiny.write_wan(folder / "wan.safetensors", layers=1))
    rewrite(tiny.write_qwen_image(folder / "qwen_image.safetensors", layers=1))

    texts = {"", CAPTION, FILM_CAPTION, f"sks, {CAPTION}"}
    tiny.write_clip_l(folder / "clip_l.safetensors")
    tiny.write_t5(folder / "t5.safetensors")
    tiny.write_qwen(folder / "qwen.safetensors")
    rewrite(tiny.write_umt5(folder / "umt5.safetensors"))
    flux = tiny.load_clip(folder / "clip_l.safetensors", folder / "t5.safetensors")
    qwen = image_encoders.load_seeing_qwen_clip(folder / "qwen.safetensors")
    klein = image_encoders.load_klein_clip()
    rows = rows_of(flux, texts)
    edit = [qwen.tokenizer.llama_template_images.format(f"Picture 1: {text}") for text in texts]
    qwen_tokens = qwen.tokenizer.qwen25_7b.tokenizer

    def shrunk(vocabulary: str, kept: set[int]) -> Any:
        def change(tensors: dict[str, Any]) -> dict[str, Any]:
            made = coarse(tensors)
            used_rows_only(made, vocabulary, kept)
            return made

        return change

    rewrite(folder / "clip_l.safetensors", shrunk("text_model.embeddings.token_embedding.weight", rows))
    rewrite(folder / "t5.safetensors", shrunk("shared.weight", rows))
    rows = {row for text in (*texts, *edit) for row in qwen_tokens(text)["input_ids"]} | rows_of(qwen, texts)
    rewrite(folder / "qwen.safetensors", shrunk("model.embed_tokens.weight", rows))
    visual = qwen.cond_stage_model.qwen25_7b.transformer.visual.state_dict()
    save_file(coarse(visual), folder / "qwen_vision.safetensors")
    made = coarse(klein.cond_stage_model.state_dict())
    used_rows_only(made, next(name for name in made if "embed_tokens" in name), rows_of(klein, texts))
    save_file(made, folder / "klein.safetensors")

    tiny.write_taesd(folder / "vae.safetensors")
    rewrite(tiny.write_wan_vae(folder / "wan_vae.safetensors"), without_decoder)
    vae = image_encoders.load_flux2_vae().first_stage_model.state_dict()
    save_file(thinned(without_decoder(vae)), folder / "flux2_vae.safetensors")


def without_decoder(tensors: dict[str, Any]) -> dict[str, Any]:
    made = coarse(tensors)
    return {name: t.clone().zero_() if name.startswith("decoder.") else t for name, t in made.items()}


def thinned(tensors: dict[str, Any]) -> dict[str, Any]:
    """Of a convolution only the centre, and there each output from a single input."""
    import torch

    made = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 4:
            kept = torch.zeros_like(tensor)
            outputs, inputs, height, width = tensor.shape
            for row in range(outputs):
                kept[row, row % inputs, height // 2, width // 2] = tensor[row, row % inputs, 0, 0].sign()
            tensor = kept
        made[name] = tensor.contiguous()
    return made


def write_data(folder: Path) -> None:
    import numpy as np
    from PIL import Image
    from tiny.films import write_film

    for seed, kind in enumerate(("pictures", "controls", "masks")):
        (folder / kind).mkdir(parents=True)
        for name, (height, width) in PICTURES.items():
            channels = () if kind == "masks" else (3,)
            squares = np.random.default_rng((seed, height)).integers(0, 256, (height // 16, width // 16, *channels))
            pixels = squares.astype(np.uint8).repeat(16, axis=0).repeat(16, axis=1)
            Image.fromarray(pixels).save(folder / kind / f"{name}.png")
    for name in PICTURES:
        (folder / "pictures" / f"{name}.txt").write_text(CAPTION)
    (folder / "films").mkdir()
    write_film(folder / "films" / "d.mp4", 6, size=(64, 96), caption=FILM_CAPTION)


def encoders_of(name: str, models: Path) -> tuple[Any, Any]:
    """(VAE, CLIP) of a family, as the test loads them."""
    import tiny
    from safetensors.torch import load_file
    from tiny.data import image_encoders

    if name == "flux":
        clip = tiny.load_clip(models / "clip_l.safetensors", models / "t5.safetensors")
        return tiny.load_vae(models / "vae.safetensors"), clip
    if name == "flux2":
        vae, clip = image_encoders.load_flux2_vae(), image_encoders.load_klein_clip()
        vae.first_stage_model.load_state_dict(load_file(models / "flux2_vae.safetensors"))
        clip.cond_stage_model.load_state_dict(load_file(models / "klein.safetensors"))
        return vae, clip
    vae = tiny.load_vae(models / "wan_vae.safetensors")
    if name == "wan":
        return vae, tiny.load_wan_clip(models / "umt5.safetensors")
    clip = image_encoders.load_seeing_qwen_clip(models / "qwen.safetensors")
    visual = clip.cond_stage_model.qwen25_7b.transformer.visual
    visual.load_state_dict(load_file(models / "qwen_vision.safetensors"))
    return vae, clip


def call(kind: str, **inputs: Any) -> Any:
    """The outputs of a node, with what is not given at the defaults that it shows."""
    import tessera
    import torch

    nodes = asyncio.run(asyncio.run(tessera.comfy_entrypoint()).get_node_list())
    (node,) = [node for node in nodes if node.GET_SCHEMA().node_id == kind]
    shown = {
        name: entry for group in node.INPUT_TYPES().values() if isinstance(group, dict) for name, entry in group.items()
    }
    given = {name: entry[1]["default"] for name, entry in shown.items() if len(entry) > 1 and "default" in entry[1]}
    with torch.inference_mode():
        made = node.PREPARE_CLASS_CLONE(None).execute(**(given | inputs))
        return (asyncio.run(made) if inspect.iscoroutine(made) else made).result


def make(name: str, models: Path) -> None:
    import folder_paths
    import tiny
    import torch

    run = RUNS[name]
    user, output = Path(folder_paths.get_user_directory()), Path(folder_paths.get_output_directory())
    vae, clip = encoders_of(name, models)
    dataset = None
    for kind in ("TesseraImageFolder", "TesseraVideoFolder"):
        if kind in run:
            (dataset,) = call(kind, **run[kind], dataset=dataset)
    data = call("TesseraPrepareDataset", dataset=dataset, vae=vae, clip=clip, **run["TesseraPrepareDataset"])[0]
    shutil.copytree(user / "tessera" / "cache", HERE / name / "cache")
    optimizer = {"lr_scheduler": "inverse_sqrt", "warmup_steps": 2} | run["TesseraOptimizer"]
    options = {
        "network": call("TesseraLoraNetwork", **run["TesseraLoraNetwork"])[0],
        "optimizer": call("TesseraOptimizer", **optimizer)[0],
    }
    if "TesseraValidation" in run:
        options["validation"] = call("TesseraValidation", **run["TesseraValidation"])[0]
    train = {"output_name": name, "steps": STEPS, "seed": 5, "compile": "off", "save_every": SAVED_STEP}
    train |= run["TesseraTrainLora"]
    run["TesseraOptimizer"], run["TesseraTrainLora"] = optimizer, train
    model = tiny.LOADERS[name](models / f"{name}.safetensors", torch.float32)
    lora, _, path, *_ = call("TesseraTrainLora", model=model, data=data, **train, **options)
    folder = Path(path).parent
    kept = HERE / name / folder.name
    kept.mkdir()
    for file in folder.iterdir():
        if file.name not in (f"{name}-step{SAVED_STEP:06d}.safetensors", f"state-{STEPS:06d}.tessera"):
            shutil.copy(file, kept)
    for format, dtype in FORMATS.items():
        (saved,) = call("TesseraSaveLora", lora=lora, filename_prefix=f"loras/{format}", format=format, dtype=dtype)
        shutil.move(saved, HERE / name / f"{format}.safetensors")
    shutil.rmtree(output / "loras")
    shutil.rmtree(user / "tessera" / "cache")


def main(checkout: Path) -> None:
    load_module("conftest", checkout / "tests" / "conftest.py")
    import comfy.model_management
    import folder_paths
    import torch

    comfy.model_management.vae_dtype = lambda *_, **__: torch.float32  # as the test has it on any device
    for made in (*RUNS, "input"):
        shutil.rmtree(HERE / made, ignore_errors=True)
    write_data(HERE / "input")
    shutil.copytree(HERE / "input", folder_paths.get_input_directory(), dirs_exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        write_models(models)
        with zipfile.ZipFile(HERE / "models.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(models.iterdir()):
                archive.write(file, file.name)
        for name in RUNS:
            make(name, models)
    (HERE / "runs.json").write_text(json.dumps(RUNS, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

"""One contestant of the step benchmark, in a process of its own.

Its parent sends one JSON command per line and gets one JSON reply per line: `{"do": "steps", "count": 3}` takes that
many training steps, `{"do": "memory"}` one step under the profiler's count of allocations, `{"do": "held"}` a forward
whose saved tensors are counted. Between commands the training stands still, inside the hook that torch calls after
every step of an optimizer, so contestants can take turns whoever wrote their loop.
"""

import argparse
import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from processes import take_over_stdout
from train_step_figures import MIB, peak_and_rest
from train_step_model import (
    DTYPES,
    SHAPES,
    Pictures,
    Shape,
    importable_without_nodes,
    load_file,
    random_flux,
    random_pictures,
    set_up_comfyui,
    training_data,
)
from train_step_turns import Memory, Turns, allocations, memory_profiler

ENDLESS = 10**6  # steps; the parent ends the run


def make_trainer(spec: dict[str, Any], patcher: Any, shape: Shape, pictures: Pictures, folder: Path) -> Any:
    """Our trainer on that MODEL. Compiled or eager as `spec` says."""
    options, run = import_module("tessera.train.options"), import_module("tessera.train.run")
    loop, lora = import_module("tessera.train.loop"), import_module("tessera.train.lora")
    events, apply = import_module("tessera.train.events"), import_module("tessera.compile.settings")
    family = import_module("tessera.models.registry").family_of(patcher)
    include = ("*",) if spec["targets"] == "all" else ()
    network = options.NetworkOptions(rank=spec["rank"], alpha=float(spec["rank"]), include=include)
    settings = run.TrainSettings(
        output_name="benchmark",
        steps=ENDLESS,
        batch_size=spec["batch_size"],
        gradient_accumulation=1,
        seed=0,
        compile="auto" if spec["compiled"] else "off",
        save_every=0,
        resume="off",
        network=network,
        optimizer=options.OptimizerOptions(),
        objective=options.ObjectiveOptions(),
        memory=options.MemoryOptions(checkpointing=spec["checkpointing"]),
    )
    return loop.Trainer(
        patcher,
        family,
        training_data(shape, pictures),
        lora.choose_targets(family, patcher.model, network),
        settings,
        apply.CompileSettings() if spec["compiled"] else None,
        run.RunFolder(folder, "benchmark"),
        "",
        lambda *_: {},
        events.Silent(),
    )


def held_for_backward(trainer: Any) -> dict[str, Any]:
    """Bytes that one forward leaves behind for its backward.

    held: what the forward allocated and has not released at its end (the CPU's allocator, all modes, the loss with it).
    saved: what autograd was asked to save, each storage once, without weights; what a selective policy keeps is not
    among it, as that is kept by the checkpoint itself. weights: bytes of weights that were saved by reference.
    """
    make_batch = import_module("tessera.train.batch").make_batch
    with torch.no_grad():
        samples = [(s, s.load()) for s in trainer.data.samples[: trainer.settings.batch_size]]
        objective, device = trainer.settings.objective, trainer.device
        batch = make_batch(trainer.patcher, trainer.family, samples, objective, device, 0, (0, 0))
    result: dict[str, Any] = {}
    with memory_profiler() as profiler:
        loss = trainer.loss(batch, (0, 0))
    del loss
    result["held_mib"] = peak_and_rest(allocations(profiler))[1] / MIB
    if trainer.runner.planned_graphs:
        return result  # hooks would be part of what a compiled graph is guarded on
    own = {t.untyped_storage().data_ptr() for m in trainer.transformer.linears().values() for t in m.buffers()}
    own |= {p.untyped_storage().data_ptr() for p in trainer.network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.loss(batch, (0, 0))  # held until here, so that no two storages share an address
    del loss
    result["saved_mib"] = sum(size for place, size in kept.items() if place not in own) / MIB
    result["weights_mib"] = sum(size for place, size in kept.items() if place in own) / MIB
    return result


def train_ours(spec: dict[str, Any], turns: Turns, patcher: Any, shape: Shape, pictures: Pictures) -> None:
    assert importable_without_nodes()
    with tempfile.TemporaryDirectory() as folder, torch.enable_grad():
        trainer = make_trainer(spec, patcher, shape, pictures, Path(folder))

        def facts() -> dict[str, Any]:
            assert bool(trainer.runner.planned_graphs) == spec["compiled"], "torch.compile does not work here"
            return {
                k: v for k, v in trainer.facts().items() if k in ("graphs_compiled", "graph_breaks", "compile_seconds")
            }

        turns.facts = facts
        turns.held = lambda: held_for_backward(trainer)
        try:
            turns.wait()
            trainer.run()
        finally:
            trainer.close()


def train_core(spec: dict[str, Any], turns: Turns, patcher: Any, pictures: Pictures) -> None:
    """Core's node with its defaults, but for steps, batch, rank and dtype; called as the executor calls it."""
    from comfy_extras.nodes_train import TrainLoraNode

    conditioning = [
        [[text[None], {"pooled_output": pooled[None], "guidance": 1.0}]]
        for text, pooled in zip(pictures.texts, pictures.pooled, strict=True)
    ]
    turns.wait()
    with torch.inference_mode():
        TrainLoraNode.execute(
            model=[patcher],
            latents=[{"samples": latent[None]} for latent in pictures.latents],
            positive=conditioning,
            batch_size=[spec["batch_size"]],
            steps=[ENDLESS],
            grad_accumulation_steps=[1],
            learning_rate=[1e-4],
            rank=[spec["rank"]],
            optimizer=["AdamW"],
            loss_function=["MSE"],
            seed=[0],
            training_dtype=["none" if spec["dtype"] == "fp16" else spec["dtype"]],
            lora_dtype=["bf16"],
            quantized_backward=[False],
            algorithm=["LoRA"],
            gradient_checkpointing=[True],
            checkpoint_depth=[1],
            offloading=[False],
            existing_lora=["[None]"],
            bucket_mode=[False],
            bypass_mode=[False],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", help="JSON, from train_step.py")
    spec = json.loads(parser.parse_args().spec)
    reply = take_over_stdout()
    set_up_comfyui(spec["device"])
    if spec["device"] == "cpu":
        torch.set_num_threads(spec["threads"])
    if spec["contestant"] == "core":
        try:
            import comfy_extras.nodes_train  # noqa: F401
        except ImportError as error:
            reply({"skipped": f"core's training nodes cannot be imported here ({error})"})
            return
    shape = SHAPES[spec["size"]].with_tokens(spec["tokens"], spec["text_tokens"])
    free = torch.cuda.mem_get_info()[0] if spec["device"] == "cuda" else 0
    with torch.inference_mode():  # as a loader's node makes it
        dtype = DTYPES[spec["dtype"]]
        patcher = load_file(spec["file"], dtype) if spec["file"] else random_flux(shape, spec["device"], dtype)
    pictures = random_pictures(shape, 2 * spec["batch_size"])
    memory = Memory(spec["device"], free)
    reply({"ready": True, "inference_dtype": str(patcher.model.get_dtype_inference()).removeprefix("torch.")})
    turns = Turns(memory, reply)
    if spec["contestant"] == "core":
        train_core(spec, turns, patcher, pictures)
    else:
        train_ours(spec, turns, patcher, shape, pictures)


if __name__ == "__main__":
    main()

"""One contestant of the step benchmark, in a process of its own.

Its parent sends one JSON command per line and gets one JSON reply per line: `{"do": "steps", "count": 3}` takes that
many training steps, `{"do": "memory"}` one step under the profiler's count of allocations, `{"do": "copies"}` one under
its count of copies to the GPU, `{"do": "held"}` a forward whose saved tensors are counted. Between commands training
waits inside the hook that torch calls after every step of an optimizer, so contestants can take turns with any training
loop.
"""

import argparse
import gc
import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from comfyui import DTYPES, importable_without_nodes, set_up_comfyui
from families import MODELS, Picture
from figures import MIB, peak_and_rest, swapped_blocks
from processes import take_over_stdout

from step.counts import count_calls, count_kernels
from step.data import for_core, random_data
from step.turns import Memory, Turns, allocations, memory_profiler

ENDLESS = 10**6  # steps; the parent ends the run


def make_trainer(spec: dict[str, Any], patcher: Any, data: Any, folder: Path) -> Any:
    """Our trainer on that MODEL, compiled or eager, with as many blocks swapped as `spec` says.

    spec: its optional "path" is "native" for ComfyUI's own forward; its optional "optimizer" and "memory" hold further
        options of these kinds; its optional "blocks" is blocks_to_swap, in place of the percents of "swap".
    """
    network_options = import_module("tessera.lora.options")
    optimizer_options, objective_options = (
        import_module("tessera.train.optim.options"),
        import_module("tessera.train.objective.options"),
    )
    run = import_module("tessera.train.config.settings")
    loop, plan = import_module("tessera.train.loop.trainer"), import_module("tessera.lora.plan")
    events, apply = import_module("tessera.train.report.observer"), import_module("tessera.compile.settings")
    registry = import_module("tessera.models.catalogue.registry")
    # A family of our own that is not there cannot claim the model.
    with patch.object(registry, "FAMILIES", () if spec.get("path") == "native" else registry.FAMILIES):
        family = registry.family_of(patcher)
    include = ("*",) if spec["targets"] == "all" else ()
    network = network_options.NetworkOptions(rank=spec["rank"], alpha=float(spec["rank"]), include=include)
    blocks = swapped_blocks(spec["swap"], sum(family.forward.block_lists(patcher.model).values()))
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
        optimizer=optimizer_options.OptimizerOptions(**spec.get("optimizer", {})),
        objective=objective_options.ObjectiveOptions(),
        memory=run.MemoryOptions(
            checkpointing=spec["checkpointing"],
            blocks_to_swap=spec.get("blocks", blocks),
            prefetch_blocks=spec["prefetch"],
            **spec.get("memory", {}),
        ),
    )
    context = import_module("tessera.train.preflight.context").RunContext(
        patcher=patcher,
        family=family,
        data=data,
        targets=plan.choose_targets(family, patcher.model, network),
        settings=settings,
        folder=import_module("tessera.train.runs.run_folder").RunFolder(folder, "benchmark"),
        lineage="",
        describe=lambda *_: {},
        compile_settings=apply.CompileSettings(spec.get("backend", "inductor")) if spec["compiled"] else None,
    )
    return loop.Trainer(context, events.SilentObserver())


def held_for_backward(trainer: Any) -> dict[str, Any]:
    """Measure the bytes that one forward leaves for its backward, and count its calls.

    held: allocated by the forward and not released at its end (the CPU's allocator, all modes, the loss with it).
    saved: tensors that autograd saved, each storage once, without weights and without those of a selective policy,
    which the checkpoint itself keeps. weights: bytes of weights that were saved by reference.
    """
    make_batch = import_module("tessera.train.objective.batch").make_batch
    with torch.no_grad():
        samples = [(s, s.load()) for s in trainer.context.data.samples[: trainer.settings.batch_size]]
        objective, device = trainer.settings.objective, trainer.device
        batch = make_batch(trainer.context.patcher, trainer.context.family, samples, objective, device, 0, (0, 0))
    result: dict[str, Any] = count_calls(trainer, batch)
    gc.collect()  # what others left in cycles is not to be freed, and counted off, within this forward
    with memory_profiler() as profiler:
        loss = trainer.train_step.losses.batch_loss(batch, (0, 0))
    del loss
    result["held_mib"] = peak_and_rest(allocations(profiler))[1] / MIB
    if trainer.placed.execution.runner.planned_graphs:
        return result  # a compiled graph has guards on hooks
    weight_storages = {
        t.untyped_storage().data_ptr() for m in trainer.placed.weights.transformer.frozen_modules() for t in m.buffers()
    }
    adapters = trainer.network.adapters.values()
    casts = [cast for adapter in adapters for cast in getattr(adapter, "casts", {}).values()]
    weight_storages |= {p.untyped_storage().data_ptr() for p in (*trainer.network.parameters(), *casts)}
    saved_sizes: dict[int, int] = {}
    result["saved_tensors"] = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        result["saved_tensors"] += 1
        saved_sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Held until here, so that no two storages share an address.
        loss = trainer.train_step.losses.batch_loss(batch, (0, 0))
    del loss
    result["saved_mib"] = sum(size for place, size in saved_sizes.items() if place not in weight_storages) / MIB
    result["weights_mib"] = sum(size for place, size in saved_sizes.items() if place in weight_storages) / MIB
    return result


class CountedCopies:
    """Bytes that block swap copies in a step, by the engine's own count."""

    def __init__(self, trainer: Any):
        self.ring = trainer.placed.weights.swap.ring
        self.last_counts = (0, 0)

    def since(self, steps: int) -> dict[str, float]:
        """Per step, over the steps since the last call."""
        previous, self.last_counts = self.last_counts, (self.ring.copies, self.ring.bytes_copied)
        copies, copied = (
            count - previous_count for count, previous_count in zip(self.last_counts, previous, strict=True)
        )
        return {"copies": copies / steps, "copied_bytes": copied / steps}


def train_ours(spec: dict[str, Any], turns: Turns, patcher: Any, data: Any, link: float) -> None:
    """link: bytes per second from the host."""
    assert importable_without_nodes()
    with tempfile.TemporaryDirectory() as folder, torch.enable_grad():
        trainer = make_trainer(spec, patcher, data, Path(folder))
        copies = CountedCopies(trainer) if trainer.placed.weights.swap is not None else None

        def facts() -> dict[str, Any]:
            assert bool(trainer.placed.execution.runner.planned_graphs) == spec["compiled"], (
                "torch.compile does not work here"
            )
            facts_of_run = trainer.summary()
            reported = {
                k: facts_of_run[k] for k in ("graphs_compiled", "graph_breaks", "compile_seconds", "blocks_swapped")
            }
            if spec["compiled"]:
                reported["kernels"] = count_kernels()
            return reported if copies is None else {**reported, **copies.since(len(turns.seconds)), "link": link}

        turns.facts = facts
        turns.held_figures = lambda: held_for_backward(trainer)
        try:
            turns.wait()
            trainer.run()
        finally:
            trainer.close()


def train_core(spec: dict[str, Any], turns: Turns, patcher: Any, data: Any) -> None:
    """Core's node with its defaults, but for steps, batch, rank and dtype; called as the executor calls it."""
    from comfy_extras.nodes_train import TrainLoraNode

    latents, positive = for_core(data)
    turns.wait()
    with torch.inference_mode():
        TrainLoraNode.execute(
            model=[patcher],
            latents=latents,
            positive=positive,
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
    free = torch.cuda.mem_get_info()[0] if spec["device"] == "cuda" else 0
    with torch.inference_mode():  # as a loader's node makes it
        model = MODELS[spec["size"]][spec["family"]]
        # Block swap streams from the host, to which a loader loads a model.
        patcher = model.load(spec["file"], spec["device"], DTYPES[spec["dtype"]], on_host=bool(spec["swap"]))
    data = random_data(patcher, Picture(**spec["picture"]), 2 * spec["batch_size"])
    link = link_bandwidth(patcher) if spec["swap"] else 0.0
    memory = Memory(spec["device"], free)
    reply({"ready": True, "inference_dtype": str(patcher.model.get_dtype_inference()).removeprefix("torch.")})
    turns = Turns(memory, reply)
    if spec["contestant"] == "ours":
        train_ours(spec, turns, patcher, data, link)
        return
    try:
        train_core(spec, turns, patcher, data)
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        reply({"skipped": f"it does not train this model here ({type(error).__name__}: {said})"})


def link_bandwidth(patcher: Any) -> float:
    """Bytes per second from page-locked host memory to the device."""
    return import_module("tessera.memory.host.staging").link_bandwidth(patcher.load_device)


if __name__ == "__main__":
    main()

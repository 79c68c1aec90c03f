"""One of several processes that train together: reads jobs from stdin, a line of JSON each, and answers on stdout.

It is started by its path, once for many jobs, since torch and ComfyUI take seconds to load.
"""

import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2] / "support")  # not this folder: its modules are `tiny`'s
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what ComfyUI prints is no answer

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import with_comfyui  # noqa: E402, F401

OTHER_COLLECTIVES = ("broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter_tensor", "barrier")


def act_at(job: dict[str, Any], world: Any, killing: list[threading.Timer]) -> None:
    """Let something go wrong on one rank, in the losses of a step."""
    from comfy.model_management import InterruptProcessingException
    from tessera.train.step.losses import StepLosses

    batch_loss, act = StepLosses.batch_loss, job["act"]

    def interrupted() -> None:
        world.interrupts.watch(lambda: None)
        raise InterruptProcessingException

    def acting(losses: Any, batch: Any, rng_key: tuple[int, int]) -> torch.Tensor:
        if act["do"] == "more":
            losses.placed.velocity_without(batch.inputs)
        loss = batch_loss(losses, batch, rng_key)
        if act["do"] == "slow":
            time.sleep(act["seconds"])
        elif rng_key[0] == act.get("step"):
            if act["do"] == "kill" and act.get("seconds"):
                if not killing:  # it may come in a save as well as in a sum
                    killing.append(threading.Timer(act["seconds"], os.kill, (os.getpid(), 9)))
                    killing[0].start()
            elif act["do"] == "kill":
                os.kill(os.getpid(), 9)
            if act["do"] == "hang":
                time.sleep(3600)
            if act["do"] == "cancel waiting" and world.rank == act["rank"]:
                world.interrupts.watch(interrupted)
            elif act["do"] == "cancel waiting":
                time.sleep(1)
            if act["do"] == "cancel":
                raise InterruptProcessingException
            if act["do"] == "error":
                raise RuntimeError("the cable was pulled")
            if act["do"] == "drift":
                next(iter(losses.placed.network.parameters())).data.add_(0.01)
            if act["do"] == "nan":
                loss = loss * float("nan")
        return loss

    if world.rank == act["rank"] or act["do"] == "cancel waiting":
        StepLosses.batch_loss = acting  # type: ignore[method-assign]


def act_in_forward(act: dict[str, Any], world: Any) -> Any:
    """Make one rank fail after it has gathered a shared block into its slot for the `at`th time."""
    from comfy.model_management import InterruptProcessingException
    from tessera.memory.swap.sharded import ShardedRing

    forward, calls = ShardedRing.forward, 0

    def acting(ring: Any, j: int) -> None:
        nonlocal calls
        forward(ring, j)
        calls += 1
        if world.rank == act.get("rank") and calls == act["at"]:
            if act["do"] == "kill":
                os.kill(os.getpid(), 9)
            if act["do"] == "cancel":
                raise InterruptProcessingException
            if act["do"] == "oom":
                raise torch.OutOfMemoryError("planted")

    if act:
        ShardedRing.forward = acting  # type: ignore[method-assign]
    return forward


def gguf_model(kind: str) -> Any:
    from tiny.memory.gguf import flux_state, model_of

    return model_of(flux_state(kind))


def previewer(job: dict[str, Any], world: Any, model: Any) -> Any:
    """Previews of this many prompts at each step; one of them fails on a rank."""
    import tiny
    from tessera.train.watch import previewer as module
    from tiny.train.runs import tiny_preview

    vae = tiny.load_vae(Path(job["vae"]))
    preview_watcher = module.Previewer([tiny_preview(vae, number) for number in range(job["previews"])], model)
    if world.rank == job.get("fails"):
        make = preview_watcher._make

        def failing(trainer: Any, step: int, due: Any) -> Any:
            if step == 1:
                raise RuntimeError("no colours left")
            return make(trainer, step, due)

        preview_watcher._make = failing  # type: ignore[method-assign]
    return preview_watcher


class Unloading:
    """Watcher that takes the weights of one rank off its device after the first step, as previews do."""

    def between_steps(self, run: Any) -> None:
        from tessera.memory.weights.frozen import unload

        if run.world.is_first and run.progress.step == 1:
            unload()
            assert not run.placed.weights.swap.ring.slots.tensors

    def is_due(self, step: int, steps: int) -> bool:
        return step == 1

    def summary(self, run: Any) -> dict[str, Any]:
        return {}


class Held:
    """Watcher that measures a rank's part of shared blocks, before the first step."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def between_steps(self, run: Any) -> None:
        from tessera.memory.swap.training import frozen_modules

        swap = run.placed.weights.swap
        if self.is_due(run.progress.step, 0) and hasattr(swap, "peers"):
            slots = {slot.untyped_storage().data_ptr() for slot in swap.ring.slots.tensors}
            buffers = [b for block in swap.blocks for m in frozen_modules(block).values() for b in m.buffers()]
            self.figures = {
                "held": swap.held_bytes(),
                "known": run.placed.weights.resident.bytes,
                "sizes": [layout.size for layout in swap.layouts],
                "outside": sum(tensor.untyped_storage().data_ptr() not in slots for tensor in buffers),
            }

    def is_due(self, step: int, steps: int) -> bool:
        return step == 0

    def summary(self, run: Any) -> dict[str, Any]:
        return {}


def change(job: dict[str, Any], world: Any, counts: dict[str, int]) -> Any:
    """Count the measurements and samplings of a rank, and change its behaviour as a job asks for.

    slow_save: seconds that rank 0 takes for the last save. other_start: rank that begins with another LoRA.
    other_moments: rank whose optimizer alone differs after the step `moments_after`.
    certificate: what a check of one rank's certificate does there, by rank: "fails", or "oom".

    Return a function that undoes all changes.
    """
    from tessera.train.certificate import certificate
    from tessera.train.loop.learner import Learner
    from tessera.train.loop.trainer import Trainer
    from tessera.train.watch import previewer as module
    from tessera.train.watch.validation import Validation

    changed = [(Validation, "_batch_losses"), (module, "decode"), (Trainer, "save_final"), (Trainer, "run")]
    changed += [(Learner, "step"), (certificate, "check_execution")]
    originals = [getattr(*attribute) for attribute in changed]
    measure, decode, save_final, run, step, check_execution = originals

    def counted(name: str, function: Any) -> Any:
        def counting(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return counting

    def saving(trainer: Trainer, *args: Any) -> Any:
        time.sleep(job.get("slow_save", 0) if world.is_first else 0)
        return save_final(trainer, *args)

    def running(trainer: Trainer) -> str:
        if job.get("other_start") == world.rank:
            trainer.network.parameters()[0].data.add_(0.01)
        return run(trainer)

    def stepping(learner: Learner) -> None:
        step(learner)
        counts["stepped"] += 1
        if job.get("other_moments") == world.rank and counts["stepped"] == job["moments_after"]:
            (state, *_) = learner.optimizer.state.values()
            next(value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim).view(-1)[0] += (
                1e-3
            )

    def checking(*args: Any) -> Any:
        fault = job.get("certificate", {}).get(str(world.rank))
        if fault == "oom":
            raise torch.OutOfMemoryError("planted")
        return ("layers.1 is 9.0% different", 0.09) if fault == "fails" else check_execution(*args)

    replacements = counted("measured", measure), counted("sampled", decode), saving, running, stepping, checking
    for attribute, function in zip(changed, replacements, strict=True):
        setattr(*attribute, function)
    return lambda: [setattr(*attribute, function) for attribute, function in zip(changed, originals, strict=True)]


class Slow:
    """Watcher that sleeps when it is called after the second step."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def between_steps(self, run: Any) -> None:
        if run.world.is_first and self.is_due(run.progress.step, 0):
            self.calls += 1
            time.sleep(self.seconds)

    def is_due(self, step: int, steps: int) -> bool:
        return step == 2

    def summary(self, run: Any) -> dict[str, Any]:
        return {"slow_calls": self.calls}


def run(job: dict[str, Any], store: Any) -> dict[str, Any]:
    import tiny
    from tessera.compile.settings import CompileSettings
    from tessera.memory.swap.sharded import ShardedRing
    from tessera.train.blocks.low_bit_policy import LowBitPolicy
    from tessera.train.distributed import barrier, node
    from tessera.train.distributed import world as worlds
    from tessera.train.placement import auto
    from tessera.train.placement.placed_model import PlacedModel
    from tessera.train.step.losses import StepLosses
    from tessera.train.train_lora import RunRequest, train_lora
    from tiny.train.runs import Watcher, mixed_data, partly_without_gradient, run_settings

    local_size = job.get("local", job["size"])  # as many of them are on one machine
    options = worlds.WorldOptions(
        timedelta(seconds=job.get("step_limit", 240)),  # half an hour would be that of the tests
        job.get("wait_limit", 60.0),
        barrier_before_sum=job.get("meets", False),
        gloo_gathers=not job.get("nccl_only"),
    )
    run_store = dist.PrefixStore(str(job["number"]), store)
    world = worlds.World(job["rank"], job["size"], run_store, local_size, options=options)
    barrier.GRACE, killing = job.get("grace", 5.0), list[threading.Timer]()
    sent_bytes: list[int] = []
    other_collectives: list[str] = []
    all_reduce = dist.all_reduce
    originals = {name: getattr(dist, name) for name in OTHER_COLLECTIVES}
    batch_loss = StepLosses.batch_loss
    begin = LowBitPolicy.__init__
    free = auto.free_memory
    check = PlacedModel.check_forward
    memory = psutil.virtual_memory
    measure = auto.measure
    planned = list[int]()

    def measured(*args: Any) -> Any:
        cost = measure(*args)
        planned.append(cost.machine.host)
        return cost

    if "host" in job:  # free bytes of the host's memory, as each rank finds them
        free_memory = memory()._replace(available=job["host"][world.rank])
        psutil.virtual_memory, auto.measure = lambda: free_memory, measured

    def with_precision(precision: str) -> Any:
        def init(self: Any, *args: Any) -> None:
            begin(self, *args)
            self.precisions = (precision,)

        return init

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent_bytes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted
    for name in OTHER_COLLECTIVES:
        setattr(dist, name, lambda *args, name=name, **options: other_collectives.append(name))
    gathers: list[int] = []
    gather = node.gather_pieces

    def counted_gather(output: torch.Tensor, piece: torch.Tensor, **options: Any) -> Any:
        gathers.append(output.numel())
        return gather(output, piece, **options)

    node.gather_pieces = counted_gather
    if job.get("act"):
        act_at(job, world, killing)
    if job.get("without_gradient"):
        StepLosses.batch_loss = partly_without_gradient(batch_loss)  # type: ignore[method-assign]
    if job.get("unchecked"):
        PlacedModel.check_forward = lambda *_: None  # type: ignore[method-assign]
    if precision := job.get("precisions", {}).get(str(world.rank)):
        LowBitPolicy.__init__ = with_precision(precision)  # type: ignore[method-assign]
    watcher, held_watcher = Watcher(), Held()
    # At the sum of a step its report is not there yet.
    watcher.asks = {int(step) - 1: frozenset(requests) for step, requests in job.get("asks", {}).items()}
    watchers = [held_watcher, *([Slow(job["slow_watcher"])] if "slow_watcher" in job else [])]
    watchers += [Unloading()] if job.get("unloads") else []
    ring_forward = act_in_forward(job.get("in_forward", {}), world)
    answer: dict[str, Any] = {}
    counts = {"measured": 0, "sampled": 0, "stepped": 0}
    change_back = change(job, world, counts)
    root = Path(job.get("roots", {}).get(str(world.rank), job["root"]))
    try:
        model = tiny.load_flux(Path(job["model"])) if "gguf" not in job else gguf_model(job["gguf"])
        settings = run_settings(**(job["settings"] | job.get("own", {}).get(str(world.rank), {})))
        source = import_module(job.get("data_from", "tiny.train.runs"))
        data = mixed_data() if "data" not in job else getattr(source, job["data"])()
        watchers += [previewer(job, world, model)] if "previews" in job else []
        compiler = CompileSettings(backend=job["backend"]) if "backend" in job else None
        if "free" in job:
            auto.free_memory = lambda patcher: job["free"][world.rank]
        if "experts" in job:
            (first, second), data = tiny.train.runs.planned_experts(job["experts"], settings)
            train_lora(RunRequest(first.model, data, first.settings, root, watcher), world)
            model, settings = second.model, second.settings
        result = train_lora(RunRequest(model, data, settings, root, watcher, compiler, watchers), world)
        answer["loss"], answer["summary"] = result.loss, result.summary
        answer["folder"], answer["is_there"] = result.path.parent.name, result.path.exists()
        from safetensors.torch import save_file

        save_file({name: t.contiguous() for name, t in result.lora.items()}, f"{job['out']}.{world.rank}")
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["trace"] = traceback.format_exc()
    finally:
        change_back()
        node.gather_pieces, ShardedRing.forward = gather, ring_forward  # type: ignore[method-assign]
        dist.all_reduce, StepLosses.batch_loss = all_reduce, batch_loss
        LowBitPolicy.__init__, auto.free_memory = begin, free  # type: ignore[method-assign]
        psutil.virtual_memory = memory
        auto.measure = measure
        PlacedModel.check_forward = check
        for timer in killing:
            timer.cancel()
        for name, function in originals.items():
            setattr(dist, name, function)
        if dist.is_initialized() and not job.get("ends"):  # it would wait for a sum that was given up
            dist.destroy_process_group()
    notes = {"planned": planned, "notes": watcher.notes, "files": watcher.files, "done": watcher.steps_done}
    counted = {
        "sent": sent_bytes,
        "others": other_collectives,
        "gathers": gathers,
        "waited": world.wait_time.seconds,
        "sums": world.collectives.sums,
    }
    return answer | notes | counted | counts | held_watcher.figures


def main() -> None:
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(job, store)), file=answers, flush=True)
        if job.get("ends"):
            os._exit(0)


main()

"""One of several processes that train together: reads jobs from stdin, a line of JSON each, and answers on stdout.

It is started by its path, once for many jobs, since torch and ComfyUI take seconds to load.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what ComfyUI prints is no answer

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import with_comfyui  # noqa: E402, F401

OTHER_COLLECTIVES = ("broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter_tensor", "barrier")


def act_at(job: dict[str, Any], world: Any) -> None:
    """Let something go wrong on one rank, in the losses of a step."""
    from comfy.model_management import InterruptProcessingException
    from tessera.train.step.losses import StepLosses

    of_batch, act = StepLosses.of_batch, job["act"]

    def interrupted() -> None:
        world.check_interrupted = lambda: None
        raise InterruptProcessingException

    def acting(losses: Any, batch: Any, rng_key: tuple[int, int]) -> torch.Tensor:
        loss = of_batch(losses, batch, rng_key)
        if act["do"] == "slow":
            time.sleep(act["seconds"])
        elif rng_key[0] == act["step"]:
            if act["do"] == "kill":
                os.kill(os.getpid(), 9)
            if act["do"] == "hang":
                time.sleep(3600)
            if act["do"] == "cancel waiting" and world.rank == act["rank"]:
                world.check_interrupted = interrupted
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
        StepLosses.of_batch = acting  # type: ignore[method-assign]


class Slow:
    """Watcher that takes its time where it is called, after the second step."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def between_steps(self, trainer: Any) -> None:
        if self.is_due(trainer.progress.step, 0):
            self.calls += 1
            time.sleep(self.seconds)

    def is_due(self, step: int, steps: int) -> bool:
        return step == 2

    def facts(self, trainer: Any) -> dict[str, Any]:
        return {"slow_calls": self.calls}


def run(job: dict[str, Any], store: Any) -> dict[str, Any]:
    from tessera.train.distributed import world as worlds
    from tessera.train.placement.products import BlockProducts
    from tessera.train.step.losses import StepLosses
    from tessera.train.train_lora import train_lora

    import tiny
    from tiny.runs import Watcher, mixed_data, run_settings

    world = worlds.World(job["rank"], job["size"], dist.PrefixStore(str(job["number"]), store), job["size"])
    world.wait_limit = 60.0
    world.meets = job.get("meets", False)
    if "step_limit" in job:
        world.step_limit = worlds.timedelta(seconds=job["step_limit"])
    sent: list[int] = []
    others: list[str] = []
    all_reduce = dist.all_reduce
    kept = {name: getattr(dist, name) for name in OTHER_COLLECTIVES}
    of_batch, begin = StepLosses.of_batch, BlockProducts.__init__

    def having(products: str) -> Any:
        def init(self: Any, *args: Any) -> None:
            begin(self, *args)
            self.tried = (products,)

        return init

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted
    for name in OTHER_COLLECTIVES:
        setattr(dist, name, lambda *args, name=name, **options: others.append(name))
    if job.get("act"):
        act_at(job, world)
    if products := job.get("products", {}).get(str(world.rank)):
        BlockProducts.__init__ = having(products)  # type: ignore[method-assign]
    watcher = Watcher()
    # At the sum of a step its report is not there yet.
    watcher.asks = {int(step) - 1: frozenset(asked) for step, asked in job.get("asks", {}).items()}
    watchers = [Slow(job["slow_watcher"])] if "slow_watcher" in job else []
    answer: dict[str, Any] = {}
    try:
        model = tiny.load_flux(Path(job["model"]))
        settings = run_settings(**(job["settings"] | job.get("own", {}).get(str(world.rank), {})))
        data = mixed_data() if "data" not in job else getattr(tiny.runs, job["data"])()
        result = train_lora(model, data, settings, Path(job["root"]), watcher, None, watchers, world=world)
        answer["loss"], answer["summary"] = result.loss, result.summary
        from safetensors.torch import save_file

        save_file({name: t.contiguous() for name, t in result.lora.items()}, f"{job['out']}.{world.rank}")
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["trace"] = traceback.format_exc()
    finally:
        dist.all_reduce, StepLosses.of_batch = all_reduce, of_batch
        BlockProducts.__init__ = begin  # type: ignore[method-assign]
        for name, function in kept.items():
            setattr(dist, name, function)
        if dist.is_initialized():
            dist.destroy_process_group()
    notes = {"notes": watcher.notes, "files": watcher.files, "done": watcher.done}
    return answer | notes | {"sent": sent, "others": others, "waited": world.waited, "sums": world.sums}


def main() -> None:
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), store)), file=answers, flush=True)


main()

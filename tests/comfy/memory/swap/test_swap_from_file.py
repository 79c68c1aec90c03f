"""Swapped blocks that stream from the mapped file where memory is short: the same pictures and the same LoRAs, and
next to nothing of the model in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.memory_management
import comfy.model_management as mm
import comfy.sd
import comfy.utils
import folder_paths
import psutil
import pytest
import tiny
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from safetensors import safe_open
from tessera.common.processes import SWITCH
from tessera.memory.host import mapped_file
from tessera.memory.host.flat_buffer import ScatteredBuffer
from tessera.memory.host.flat_weights import parts_of, weight_refs
from tessera.memory.host.mapped_file import FileMaps, KeepMapped, MappedWeights, bytes_in_file, copy_into_ram
from tessera.memory.host.pinning import stream_from_file
from tessera.memory.swap.host_copies import host_copies_retained
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tessera.nodes.model.load import TesseraLoadDiffusionModel
from tessera.train.config.settings import MemoryOptions
from tiny.compile.compiling import compiled, make_lora, with_lora
from tiny.models.qwen_image import qwen_sample
from tiny.models.sampling import conditioning, sample, sample_prompts
from tiny.train.runs import training_data

ROOT = Path(__file__).resolve().parents[4]
GB = 2**30
MB = 2**20
FP8 = torch.float8_e4m3fn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is mapped")


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes of memory are free."""
    real = psutil.virtual_memory

    def free(available: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: real()._replace(available=available))

    return free


# By name: the loader's name, how the file is written, and its weight_dtype.
FILES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "flux": ("flux", {}, None),
    "flux with a LoRA": ("flux", {}, None),
    "flux in fp8": ("flux", {"dtype": FP8}, FP8),
    "flux in scaled fp8": ("flux", {"dtype": torch.bfloat16, "fp8": True}, None),
    "flux in nvfp4": ("flux", {"dtype": torch.bfloat16, "quantised": "nvfp4 smoothed"}, None),
    "wan": ("wan", {}, None),
    "wan in fp8": ("wan", {"dtype": FP8}, FP8),
    "qwen_image": ("qwen_image", {}, None),
}


def write(name: str, folder: Path) -> Path:
    family, settings, _ = FILES[name]
    return getattr(tiny, f"write_{family}")(folder / f"{family}.safetensors", **settings)


def load(name: str, path: Path, in_file: bool) -> Any:
    """The MODEL with all blocks swapped, by its own loader; with a LoRA on each matrix where the name says so."""
    family, _, dtype = FILES[name]
    with torch.inference_mode():
        if in_file:
            with KeepMapped():
                plain = tiny.LOADERS[family](path, dtype)
        else:
            plain = tiny.LOADERS[family](path, dtype)
        model, notes = swap(plain, SwapSettings(len(blocks_of(plain))))
        if "LoRA" in name:
            width = 128
            generator = torch.Generator().manual_seed(1)
            keys = [k for k, w in plain.model.state_dict().items() if k.endswith("proj.weight") and w.shape[0] == width]
            model.add_patches({k: ("diff", (0.1 * torch.randn(width, width, generator=generator),)) for k in keys})
    assert model.swap.options.from_file is in_file and any("stream from the model file" in n for n in notes) is in_file
    return model


def blocks_of(model: Any) -> list[Any]:
    from tessera.models.blocks import find_blocks

    return find_blocks(model.model.diffusion_model)


def dirty(path: Path) -> int:
    """Bytes of the file's mapping that are no longer the file's: the system made a copy when they were written."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and not line.split()[0].endswith(":"):
            inside = str(path) in line
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) * 1024
    return total


# ComfyUI copies a layout's scales as it makes a parameter of a quantised weight, and nvfp4's are an eighth of it.
@pytest.mark.parametrize("name", [name for name in FILES if "nvfp4" not in name])
def test_pictures_are_those_of_masters_in_memory(name: str, tmp_path: Path, ram: Any) -> None:
    path = write(name, tmp_path)
    content = path.read_bytes()
    family = FILES[name][0]
    ram(64 * GB)
    ordinary = load(name, path, in_file=False)
    want = sample(ordinary, family)
    copies, copied = ordinary.swap.ring.copies, ordinary.swap.ring.bytes_copied
    mm.unload_all_models()
    ram(1)
    model = load(name, path, in_file=True)
    weights = [parameter for block in blocks_of(model) for parameter in block.module.parameters()]
    inside = bytes_in_file(weights)
    assert inside > 0.97 * sum(part.nbytes for w in weights for part in parts_of(w))
    for _ in range(2):
        assert torch.equal(sample(model, family), want)
        assert all(isinstance(master, ScatteredBuffer) for master in model.swap.ring.flat_weights)
        assert (model.swap.ring.copies, model.swap.ring.bytes_copied) == (copies, copied)
        model.swap.ring.copies = model.swap.ring.bytes_copied = 0
        with torch.inference_mode():
            mm.unload_all_models()
        assert model.swap.ring.flat_weights == [] and bytes_in_file(weights) == inside
    assert dirty(path) == 0 and path.read_bytes() == content


def trained(model: Any, folder: Path, family: str) -> Any:
    if family == "wan":
        data = training_data(*(tiny.wan_sample(f"sample {i}", (1, 4, 4), "2.1-t2v") for i in range(2)))
    elif family == "qwen_image":
        data = training_data(*(qwen_sample(f"sample {i}", 4, 4, 20) for i in range(2)))
    else:
        data = tiny.make_data([(4, 4), (2, 8)], [16, 16])
    swapped = len(blocks_of(model))
    memory = MemoryOptions(checkpointing="none", blocks_to_swap=swapped, pin_memory="off")
    trainer = tiny.make_trainer(model, data, folder, steps=2, memory=memory)
    tiny.fill_up_matrices(trainer)
    trainer.run()
    return trainer


@pytest.mark.parametrize("name", FILES)
def test_training_gives_the_gradients_of_masters_in_memory(name: str, tmp_path: Path, ram: Any) -> None:
    path, family = write(name, tmp_path), FILES[name][0]
    ram(64 * GB)
    want = trained(load(name, path, in_file=False), tmp_path / "ordinary", family)
    assert not any(isinstance(master, ScatteredBuffer) for master in want.placed.weights.swap.ring.flat_weights)
    assert not want.placed.weights.host.from_file
    ram(1)
    model = load(name, path, in_file=True)
    weights = [parameter for block in blocks_of(model) for parameter in block.module.parameters()]
    inside = bytes_in_file(weights)
    file_run = trained(model, tmp_path / "file", family)
    assert all(isinstance(master, ScatteredBuffer) for master in file_run.placed.weights.swap.ring.flat_weights)
    assert (
        file_run.placed.weights.host.from_file and "stream from the model file" in file_run.placed.weights.host.notes[0]
    )
    patched = sum(model.model.state_dict()[key].nbytes for key in model.patches)
    streamed = bytes_in_file(t for master in file_run.placed.weights.swap.ring.flat_weights for t in master.tensors)
    assert streamed >= 0.97 * inside - patched, "only what is patched or cast lies in memory"
    assert file_run.progress.loss == want.progress.loss
    rings = file_run.placed.weights.swap.ring, want.placed.weights.swap.ring
    assert rings[0].copies == rings[1].copies and rings[0].bytes_copied == rings[1].bytes_copied
    for (key, pair), other in zip(file_run.network.pairs.items(), want.network.pairs.values(), strict=True):
        for mine, reference in zip(pair, other, strict=True):
            assert (mine.grad is None and reference.grad is None) or torch.equal(mine.grad, reference.grad), key
            assert torch.equal(mine, reference), key
    # ComfyUI takes the memory and the run goes on; at its end the MODEL still lies in the file.
    mm.unload_all_models()
    assert not file_run.placed.weights.resident.resident and file_run.placed.weights.swap.held_bytes() == 0
    file_run.settings = type(file_run.settings)(**{**vars(file_run.settings), "steps": 3})
    file_run.run()
    file_run.close()
    assert bytes_in_file(weights) == inside and dirty(path) == 0


def test_a_checkpoint_is_saved_from_the_file(tmp_path: Path, ram: Any) -> None:
    path = write("flux with a LoRA", tmp_path)

    def saved(model: Any) -> Any:
        with torch.inference_mode():
            comfy.sd.save_checkpoint(str(tmp_path / "saved.safetensors"), model)
        mm.unload_all_models()
        return comfy.utils.load_torch_file(str(tmp_path / "saved.safetensors"))

    ram(64 * GB)
    want = {key: t.clone() for key, t in saved(load("flux with a LoRA", path, in_file=False)).items()}
    ram(1)
    actual = saved(load("flux with a LoRA", path, in_file=True))
    assert actual.keys() == want.keys() and all(torch.equal(actual[key], want[key]) for key in want)


# What decides.


@pytest.mark.parametrize(
    ("mode", "inside", "available", "streams", "said"),
    [
        ("auto", 20, 24, False, None),
        ("auto", 20, 23.9, True, "RAM is short: 23.9 GB are free and the swapped blocks need 20.0 GB, so they stream"),
        ("off", 20, 12, True, "set pin_memory to 'on' to keep them in RAM"),
        ("on", 20, 12, False, None),
        ("auto", 0, 4, False, None),
        ("auto", 0, 3, False, "They are in RAM already: only what Load Diffusion Model"),
    ],
)
def test_blocks_stream_from_the_file_where_memory_is_short(mode, inside, available, streams, said) -> None:
    actual, sentence = stream_from_file(mode, inside * GB, 20 * GB, int(available * GB))
    assert actual is streams and (sentence is None if said is None else said in sentence)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tiny_files: dict[str, Path]) -> Callable[..., Any]:
    """Runs Load Diffusion Model on the tiny FLUX: the MODEL, and what the node says."""
    monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda *_: str(tiny_files["flux"]))

    def run(**inputs: Any) -> Any:
        with torch.inference_mode():
            out = TesseraLoadDiffusionModel.execute(**{"unet_name": "flux", "weight_dtype": "default", **inputs})
        return out.args[0], " ".join(out.ui["tessera"][0]["notes"])

    return run


def test_load_diffusion_model_goes_by_the_free_memory(node: Any, ram: Any) -> None:
    ram(1)
    size = bytes_in_file(node(blocks_to_swap=4)[0].model.parameters())
    for free, inputs, file_bytes, streams, said in (
        (64 * GB, {}, 0, False, "Block swap: 4 of 4 blocks"),
        (4 * GB + size - 1, {}, size, False, "Block swap: 4 of 4 blocks"),  # only what streams has room
        (4 * GB, {}, size, True, "so they stream from the model file"),
        (4 * GB, {"pin_memory": "on"}, size, False, "Block swap: 4 of 4 blocks"),
        (3 * GB, {"weight_dtype": "fp8_e4m3fn"}, 0, False, "without converting it (weight_dtype 'default')"),
    ):
        ram(free)
        model, notes = node(**{"blocks_to_swap": 4, **inputs})
        assert bytes_in_file(model.model.parameters()) == file_bytes and model.swap.options.from_file is streams
        assert said in notes, notes
    ram(4 * GB)
    model, _ = node(blocks_to_swap=0)
    assert not bytes_in_file(model.model.parameters())


@pytest.mark.parametrize("location", ["in the file", "in memory, for a preview", "in flat buffers"])
def test_a_lora_on_a_compiled_model_is_in_every_block_wherever_it_lies(node: Any, ram: Any, location: str) -> None:
    """The loader's weights are of inference mode, and compiling exchanges those for others over the same memory."""
    ram(64 * GB)
    plain, _ = node(blocks_to_swap=0)
    lora = make_lora(plain, inside="_blocks.")
    bare, want = sample(plain, "flux"), sample(with_lora(plain, lora, 0.7), "flux")
    assert not torch.equal(bare, want)
    mm.unload_all_models()
    ram(1 if location == "in the file" else 64 * GB)
    model, _ = node(blocks_to_swap=4)
    weights = [parameter for block in blocks_of(model) for parameter in block.module.parameters()]
    assert all(weight.is_inference() for weight in weights)
    on_top = with_lora(compiled(model)[0], lora, 0.7)
    with host_copies_retained(model) if location == "in memory, for a preview" else nullcontext():
        for _ in range(2):
            assert torch.equal(sample(on_top, "flux"), want)
            masters = model.swap.ring.flat_weights
            assert all(isinstance(master, ScatteredBuffer) is (location != "in flat buffers") for master in masters)
            assert model.swap.ring.copies > 0 and torch.equal(sample(model, "flux"), bare)
            with torch.inference_mode():
                mm.unload_all_models()


def test_a_weight_of_another_node_in_a_block_that_streams_is_refused(node: Any, ram: Any) -> None:
    ram(64 * GB)
    model, _ = node(blocks_to_swap=4)
    layer = model.model.diffusion_model.double_blocks[1].img_attn.proj

    def replace(executor: Any, *args: Any, **kwargs: Any) -> Any:  # when the model is loaded already
        layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
        return executor(*args, **kwargs)

    model.add_wrapper(WrappersMP.APPLY_MODEL, replace)
    with pytest.raises(RuntimeError, match=r"replaced diffusion_model.double_blocks.1.img_attn.proj.weight"):
        sample(model, "flux")
    assert not model.swap.tensors.running
    mm.unload_all_models()


def test_a_model_under_dynamic_vram_streams_from_its_file_too(tiny_files: dict[str, Path], ram: Any) -> None:
    class UnderDynamicVram(ModelPatcher):
        def is_dynamic(self) -> bool:
            return True

    model = tiny.load_flux(tiny_files["flux"])
    want = sample(model, "flux")
    model.__class__ = UnderDynamicVram
    ram(1)
    swapped, _ = swap(model, SwapSettings(4))
    assert swapped.swap.options.from_file and torch.equal(sample(swapped, "flux"), want)
    mm.unload_all_models()


@pytest.mark.parametrize("is_known", [True, False])
def test_linears_that_dynamic_vram_makes_without_memory_stay_in_the_file(
    is_known: bool, node: Any, ram: Any, monkeypatch: Any
) -> None:
    """They are copied where ComfyUI loads them in another way than is known, which is told."""
    want = sample(node()[0], "flux")

    def load_safetensors(path: str) -> Any:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()

    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    monkeypatch.setattr(comfy.utils, "load_safetensors", load_safetensors)
    if not is_known:
        monkeypatch.setattr(mapped_file, "lazy_loading_code", lambda: None)
    ram(1)
    model, notes = node(blocks_to_swap=4)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", False)
    inside, whole = bytes_in_file(model.model.parameters()), mm.module_size(model.model.diffusion_model)
    assert inside == whole if is_known else inside < whole / 2
    assert ("can't be read from the file as needed: they take 0.01 GB of RAM" in notes) is not is_known
    assert torch.equal(sample(model, "flux"), want)
    mm.unload_all_models()


# The other weights.


def test_weights_that_left_the_file_for_the_device_are_put_back(tmp_path: Path) -> None:
    """On a machine without a GPU a copy stands for what ComfyUI moves."""
    with KeepMapped():
        model = tiny.load_flux(tiny.write_flux(tmp_path / "flux.safetensors", fp8=True)).model
    diffusion, maps = model.diffusion_model, FileMaps()
    rest = MappedWeights(weight_refs("", model))
    plain = diffusion.img_in
    quantised = diffusion.double_blocks[0].img_attn.proj
    bias = diffusion.txt_in

    def lies_there(*owners: Any) -> list[bool]:
        return [maps.holds(parts_of(owner.weight)[0]) for owner in owners]

    assert lies_there(plain, quantised, bias) == [True] * 3 and "diffusion_model.img_in.weight" in rest
    initial = {key: t.clone() for key, t in model.state_dict().items()}
    for key in ("img_in.weight", "txt_in.weight", "double_blocks.0.img_attn.proj.weight"):
        rest.copy_out(f"diffusion_model.{key}")
    assert lies_there(plain, quantised, bias) == [False] * 3
    rest.restore({"diffusion_model.txt_in.weight"}, device_type="cuda")
    assert lies_there(plain, quantised, bias) == [False] * 3
    rest.restore({"diffusion_model.txt_in.weight"}, device_type="cpu")
    assert lies_there(plain, quantised, bias) == [True, True, False]
    assert all(torch.equal(t, initial[key]) for key, t in model.state_dict().items())
    rest.drop_replaced(set())  # no patch is on it: another node has put it there
    rest.restore(set())
    assert lies_there(plain, quantised, bias) == [True, True, False]


def test_unloading_leaves_no_copy_of_them_in_memory(tmp_path: Path, ram: Any) -> None:
    ram(1)
    model = load("flux", write("flux", tmp_path), in_file=True)
    layer = model.model.diffusion_model.img_in

    def on_the_device() -> None:  # where there is no GPU
        with torch.inference_mode():
            mm.load_models_gpu([model])
        layer.weight.data = layer.weight.data.clone()
        assert not bytes_in_file([layer.weight])

    on_the_device()
    with torch.inference_mode():
        mm.unload_all_models()
    assert bytes_in_file([layer.weight])
    on_the_device()
    with torch.inference_mode():
        model.partially_unload(torch.device("cpu"), 1)
    assert bytes_in_file([layer.weight])
    mm.unload_all_models()


def hooked(model: Any) -> torch.Tensor:
    """The picture with a hook on two weights, of which one is in a block."""
    hook = comfy.hooks.WeightHook(strength_model=1.0)
    state = model.model.state_dict()
    names = ("img_in.weight", "double_blocks.0.img_attn.proj.weight")
    keys = [f"diffusion_model.{name}" for name in names]
    hook.weights, hook.need_weight_init = {key: ("diff", (torch.full_like(state[key], 0.05),)) for key in keys}, False
    group = comfy.hooks.HookGroup()
    group.add(hook)
    with torch.inference_mode():
        positive = comfy.hooks.set_hooks_for_conditioning(conditioning("flux", 16, 0), group)
    return sample_prompts(model, positive, positive, torch.zeros(1, 16, 8, 8))


@pytest.mark.parametrize(
    "inputs", [{"blocks_to_swap": -1}, {"blocks_to_swap": 2, "pin_memory": "on"}], ids=["nothing swapped", "pinned"]
)
def test_a_hook_never_writes_into_the_file_of_a_model_that_does_not_stream_from_it(
    inputs: dict[str, Any], node: Any, ram: Any, monkeypatch: Any, tiny_files: dict[str, Path]
) -> None:
    monkeypatch.setattr(mm, "get_free_memory", lambda *_: 64 * GB)  # of the device
    ram(64 * GB)
    ordinary = node(**inputs)[0]
    want, bare = hooked(ordinary), sample(ordinary, "flux")
    mm.unload_all_models()
    ram(1)
    model, _ = node(**inputs)
    assert bytes_in_file(model.model.parameters()) and hasattr(model, "swap") is (inputs["blocks_to_swap"] == 2)
    assert torch.equal(hooked(model), want) and not torch.equal(want, bare)
    mm.unload_all_models()
    assert dirty(tiny_files["flux"]) == 0 and torch.equal(sample(model, "flux"), bare)
    mm.unload_all_models()


def test_quantised_weights_leave_the_file_too_where_there_is_memory(tmp_path: Path, ram: Any) -> None:
    with KeepMapped():
        model = tiny.load_flux(tiny.write_flux(tmp_path / "flux.safetensors", dtype=torch.bfloat16, fp8=True)).model
    initial = {key: t.clone() for key, t in model.state_dict().items()}
    size = bytes_in_file(model.parameters())
    assert size > bytes_in_file(p for p in model.parameters() if type(p.data) is torch.Tensor)
    for free, remaining in ((4 * GB + size - 1, size), (4 * GB + size, 0)):
        ram(free)
        copy_into_ram(model)
        assert bytes_in_file(model.parameters()) == remaining
    assert all(torch.equal(t, initial[key]) for key, t in model.state_dict().items())


def test_processes_that_train_together_share_the_pages_of_the_file(
    node: Any, ram: Any, monkeypatch: Any, tiny_files: dict[str, Path]
) -> None:
    """However much memory there is, none of them has a page of it for itself."""
    ram(64 * GB)
    for switch, processes, in_file in (("", "2", False), (str(os.getpid()), "1", False), (str(os.getpid()), "2", True)):
        monkeypatch.setenv(SWITCH, switch)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        model = node(blocks_to_swap=-1)[0].model
        lying = bytes_in_file(model.parameters())
        assert lying == (sum(p.nbytes for p in model.parameters()) if in_file else 0)
    assert sum(float(p.float().sum()) for p in model.parameters())  # reads them
    assert dirty(tiny_files["flux"]) == 0


def test_a_hook_on_a_weight_that_lies_in_the_file_writes_beside_it(tmp_path: Path, ram: Any) -> None:
    path = write("flux", tmp_path)
    ram(64 * GB)
    ordinary = load("flux", path, in_file=False)
    want, bare = hooked(ordinary), sample(ordinary, "flux")
    mm.unload_all_models()
    ram(1)
    model = load("flux", path, in_file=True)
    assert torch.equal(hooked(model), want) and not torch.equal(want, bare)
    mm.unload_all_models()
    assert dirty(path) == 0 and torch.equal(sample(model, "flux"), bare)
    mm.unload_all_models()


# What it costs the host.

# Runs on its own, so that only this model is counted: after a warm-up, once in sampling and once in training.
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]) / "tests" / "support"))
import with_comfyui
import tiny, torch, psutil, folder_paths
import comfy.model_management
from tessera.nodes.model.load import TesseraLoadDiffusionModel
from tessera.train.config.settings import MemoryOptions
from tiny.memory.host_memory import Peak, anonymous, settle
from tiny.models.sampling import sample

real = psutil.virtual_memory
psutil.virtual_memory = lambda: real()._replace(available=1)

def load(path, blocks):
    folder_paths.get_full_path_or_raise = lambda *_: str(path)
    with torch.inference_mode():
        return TesseraLoadDiffusionModel.execute("flux", "default", blocks_to_swap=blocks).args[0]

def sampled(path, blocks, folder):
    model = load(path, blocks)
    for _ in range(2):
        sample(model, "flux")
        held = model.swap.held_bytes()
        comfy.model_management.unload_all_models()
    return held, 0

def trained(path, blocks, folder):
    memory = MemoryOptions(checkpointing="full", blocks_to_swap=blocks)
    trainer = tiny.make_trainer(load(path, blocks), tiny.make_data([(4, 4)], [16]), folder, steps=2, memory=memory)
    trainer.run()
    held = trainer.placed.weights.swap.held_bytes(), sum(p.nbytes for p in trainer.network.parameters())
    trainer.close()
    return held

folder = Path(sys.argv[2])
found = {}
for work in (sampled, trained):
    work(tiny.write_flux(folder / "warm.safetensors"), 4, folder / "warm")
    settle()
    start = anonymous()
    with Peak() as peak:
        slots, lora = work(sys.argv[3], 36, folder / "run")
    found[work.__name__] = {"peak": peak.highest - start, "slots": slots, "lora": lora}
    settle()
print(json.dumps(found))
"""


def test_next_to_nothing_of_the_model_lies_in_memory(tmp_path: Path) -> None:
    file = tiny.write_flux(tmp_path / "flux.safetensors", hidden=256, depth=6, depth_single=30)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path), str(file)],
        capture_output=True,
        text=True,
        # glibc keeps freed buffers of some megabytes for itself, more or fewer as threads happen to run.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "MALLOC_MMAP_THRESHOLD_": str(2**16)},
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    size = file.stat().st_size
    assert 150 * MB < size < 300 * MB
    for work, measured in json.loads(process.stdout.splitlines()[-1]).items():
        assert measured["slots"] < size / 8
        # The slots, and stages of the same size; the LoRA with its gradients and the optimizer's state; activations.
        assert measured["peak"] < 2 * measured["slots"] + 6 * measured["lora"] + size / 10, (work, measured, size)

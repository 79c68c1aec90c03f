"""Put ComfyUI on the path, set it up for tests and bring the fixtures of all tests that need it.

A folder of tests gets them by `from with_comfyui import pytest_configure as pytest_configure` in its conftest. The test
tools in tests/tiny are imported as `tiny`, the rows of tests/families as `family_cases`.
"""

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
_CPU_FACTS = Path("/proc/cpuinfo")
if _CPU_FACTS.is_file() and "AuthenticAMD" in _CPU_FACTS.read_text():
    # Else MKL's matmuls depend on the alignment of their operands, and a block streamed through a slot differs in the
    # last digit from one in a file's memory. See oneMKL's "Conditional Numerical Reproducibility".
    os.environ.setdefault("MKL_CBWR", "AUTO")

import psutil  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from with_pack import ROOT, TESTS, comfy_server, dev, load  # noqa: E402


def _set_up_comfyui(path: Path, base: Path) -> None:
    """Set ComfyUI's options before the modules that read them at import are there."""
    sys.path[:] = [str(path)] + [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    from comfy.cli_args import args

    for folder in ("input", "output", "temp", "user", "models", "datasets"):
        (base / folder).mkdir()
    args.base_directory = str(base)
    args.database_url = "sqlite:///:memory:"
    args.cpu = not torch.cuda.is_available()
    args.use_pytorch_cross_attention = True


torch.set_num_threads(1)
_base = Path(tempfile.mkdtemp(prefix="tessera-tests-"))
_set_up_comfyui(dev.find_comfyui(), _base)
tiny = load("tiny", TESTS / "tiny" / "__init__.py")
load("family_cases", TESTS / "families" / "__init__.py")


def pytest_configure(config: pytest.Config) -> None:
    """Register this module once, however many folders ask for it: one server and one set of files serve them all."""
    if not config.pluginmanager.has_plugin(__name__):
        config.pluginmanager.register(sys.modules[__name__], __name__)


def pytest_collection_finish() -> None:
    """Leave what torch and ComfyUI brought out of each later look of the garbage collector, and have it look less
    often at what a compiler's trace makes: a tenth of the time, and a twentieth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_runtest_setup() -> None:
    """Take torch's structured trace off, which nobody reads here: with pytest's capture it is a tenth of a compile."""
    logging.getLogger("torch.__trace").handlers.clear()


def pytest_unconfigure() -> None:
    shutil.rmtree(_base, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def enough_memory() -> Iterator[None]:
    """Report 64 GB of free RAM unless a test says otherwise: the place of streamed blocks and the notes depend on
    it."""
    memory = psutil.virtual_memory()._replace(available=64 * 2**30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: memory)
        yield


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints on disk, fp32: `flux` (dev-like), `schnell`, `flux2`, `wan`, `wan_vace`, `qwen_image`, `sdxl`,
    which `tiny.load_model` loads, and `clip_l`, `t5`, `umt5`, `qwen`, `vae`, `vae4`, `wan_vae`."""
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "flux": tiny.write_flux(folder / "flux.safetensors"),
        "schnell": tiny.write_flux(folder / "schnell.safetensors", guidance=False),
        "clip_l": tiny.write_clip_l(folder / "clip_l.safetensors"),
        "t5": tiny.write_t5(folder / "t5xxl.safetensors"),
        "umt5": tiny.write_umt5(folder / "umt5.safetensors"),
        "qwen": tiny.write_qwen(folder / "qwen.safetensors"),
        "vae": tiny.write_taesd(folder / "vae.safetensors"),
        "vae4": tiny.write_taesd(folder / "vae4.safetensors", channels=4),
        "wan_vae": tiny.write_wan_vae(folder / "wan_vae.safetensors"),
        "flux2": tiny.write_flux2(folder / "flux2.safetensors"),
        "wan": tiny.write_wan(folder / "wan.safetensors"),
        "wan_vace": tiny.write_wan(folder / "wan_vace.safetensors", vace_layers=2),
        "qwen_image": tiny.write_qwen_image(folder / "qwen_image.safetensors"),
        "sdxl": tiny.write_sdxl(folder / "sdxl.safetensors"),
    }


@pytest.fixture(scope="session")
def case_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The tiny checkpoint of a FamilyCase: `case_file(case, dtype=…, …)` with arguments of its `write`, made once."""
    folder = tmp_path_factory.mktemp("cases")
    files: dict[tuple[Any, ...], Path] = {}

    def file_of(case: Any, **changes: Any) -> Path:
        key = (case.name, *sorted(changes.items()))
        if key not in files:
            files[key] = case.write(folder / f"{len(files)}.safetensors", **changes)
        return files[key]

    return file_of


@pytest.fixture(scope="module")
def reference_values() -> dict[Any, Any]:
    """Cache of what references gave for a LoRA at its start, for tests that compare several modes with them."""
    return {}


@pytest.fixture
def check_gradients(case_file: Callable[..., Path], tmp_path: Path, reference_values: dict[Any, Any]) -> Any:
    """A `tiny.train.gradient_check.GradientCheck`."""
    from tiny.train.gradient_check import GradientCheck

    return GradientCheck(case_file, tmp_path, reference_values)


@pytest.fixture
def tiny_flux(tiny_files: dict[str, Path]) -> Any:
    """A fresh MODEL: FLUX.1 dev-like, fp32, hidden 128, two double and two single blocks."""
    return tiny.load_flux(tiny_files["flux"])


@pytest.fixture
def tiny_clip(tiny_files: dict[str, Path]) -> Any:
    """A fresh FLUX CLIP whose text and pooled widths fit `tiny_flux`."""
    return tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"])


@pytest.fixture
def tiny_vae(tiny_files: dict[str, Path]) -> Any:
    """A fresh 16-channel VAE that gives a picture back as its 8x8 means."""
    return tiny.load_vae(tiny_files["vae"])


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder in which alone ComfyUI lists LoRAs: empty at first, and of this file's tests only."""
    import folder_paths

    listed, folder = folder_paths.folder_names_and_paths["loras"], tmp_path_factory.mktemp("loras")
    folder_paths.folder_names_and_paths["loras"] = [str(folder)], listed[1]
    folder_paths.filename_list_cache.clear()
    yield folder
    folder_paths.folder_names_and_paths["loras"] = listed
    folder_paths.filename_list_cache.clear()


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """Unload all MODELs, and drop earlier compiled code before the test and its own after it."""
    import comfy.model_management

    torch._dynamo.reset()
    comfy.model_management.unload_all_models()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor finds neither a C++ compiler nor its cache."""
    import torch._inductor.config as inductor_config

    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    # Not by monkeypatch: taken back, these entries would be gone, and nothing would compile any more.
    with inductor_config.patch({"cpp.cxx": ("/nonexistent/compiler",), "force_disable_caches": True}):
        yield


@pytest.fixture
def other_family(tiny_files: dict[str, Path]) -> dict[str, Any]:
    """Inputs that FLUX cannot take: a VACE `model`, which no family trains, an SD1 `clip`, a 4-channel `vae`."""
    return {
        "model": tiny.load_wan(tiny_files["wan_vace"]),
        "clip": tiny.load_sd1_clip(tiny_files["clip_l"]),
        "vae": tiny.load_vae(tiny_files["vae4"]),
    }


def make_server(base: Path) -> Any:
    """A server over `base`, not started yet, with the tiny models in place."""
    if not (base / "models" / "vae").exists():
        tiny.write_models(base / "models")
    comfyui = dev.find_comfyui()
    return comfy_server.ComfyServer(base, comfyui, cpu=not torch.cuda.is_available(), env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running ComfyUI with the tiny FLUX, Wan and Qwen-Image (tiny.FLUX_NAMES, WAN_NAMES, QWEN_NAMES); its folders
    are `server.base / "input"` and so on."""
    server = make_server(tmp_path_factory.mktemp("comfyui"))
    tiny.write_wan_models(server.base / "models")
    tiny.write_qwen_models(server.base / "models")
    with server as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Any]:
    """A server of the test's own, not started, for tests that kill it."""
    server = make_server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def tiny_loaders() -> dict[str, dict[str, Any]]:
    """API nodes `model`, `clip` and `vae` that load the tiny files."""
    return {
        "model": {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": "tiny_flux.safetensors", "weight_dtype": "default"},
        },
        "clip": {
            "class_type": "TesseraTinyClipLoader",
            "inputs": {"clip_name1": "tiny_clip_l.safetensors", "clip_name2": "tiny_t5xxl.safetensors"},
        },
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "tiny_vae.safetensors"}},
    }

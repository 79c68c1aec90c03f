"""ComfyUI's own frontend in a headless Chromium, over a server with tiny models under the names of the real ones."""

import base64
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from comfy_server import ComfyServer
from PIL import Image
from tessera_dev import find_chromium, find_comfyui
from with_comfyui import pytest_configure as pytest_configure
from with_comfyui import tiny

CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
CHROMIUM_OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

PATIENCE = 120_000  # milliseconds until the page is given up: a busy machine takes many times what an idle one does

MODELS = {
    "diffusion_models/flux1-dev.safetensors": tiny.write_flux,
    "text_encoders/clip_l.safetensors": tiny.write_clip_l,
    "text_encoders/t5xxl_fp16.safetensors": tiny.write_t5,
    "vae/ae.safetensors": tiny.write_taesd,
    "diffusion_models/wan2.1_t2v_1.3B_fp16.safetensors": tiny.write_wan,
    "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors": tiny.write_umt5,
    "vae/wan_2.1_vae.safetensors": tiny.write_wan_vae,
    "diffusion_models/qwen_image_fp8_e4m3fn.safetensors": tiny.write_qwen_image,
    "text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors": tiny.write_qwen,
    "vae/qwen_image_vae.safetensors": tiny.write_wan_vae,
}
# Of these it is enough that they are there.
NAMED = [
    "diffusion_models/wan2.1_i2v_480p_14B_fp16.safetensors",
    "diffusion_models/wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
    "diffusion_models/wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
    "diffusion_models/qwen_image_edit_2509_fp8_e4m3fn.safetensors",
    "diffusion_models/flux1-dev-kontext_fp8_scaled.safetensors",
    "diffusion_models/flux-2-klein-base-4b.safetensors",
    "diffusion_models/Chroma1-HD-fp8mixed.safetensors",
    "diffusion_models/z_image_bf16.safetensors",
    "diffusion_models/krea2_raw_fp8_scaled.safetensors",
    "diffusion_models/krea2_turbo_fp8_scaled.safetensors",
    "diffusion_models/qwen_image_2.1_int8_convrot.safetensors",
    "diffusion_models/flux3-image-klein-base-int8-convrot.safetensors",
    "diffusion_models/ltx-2.5-22b-distilled-transformer-comfy-int8-convrot.safetensors",
    "diffusion_models/anima-base-v1.0.safetensors",
    "diffusion_models/hunyuanvideo1.5_720p_t2v_fp16.safetensors",
    "diffusion_models/minimax_h3_fl2va_pruned_int8_convrot.safetensors",
    "checkpoints/sd_xl_base_1.0.safetensors",
    "checkpoints/ltx-video-2b-v0.9.safetensors",
    "checkpoints/ltx-2.3-22b-dev-fp8.safetensors",
    "clip_vision/clip_vision_h.safetensors",
    "text_encoders/qwen_3_4b.safetensors",
    "text_encoders/qwen_3_06b_base.safetensors",
    "text_encoders/qwen3vl_8b_int8_convrot.safetensors",
    "text_encoders/qwen3vl_4b_fp8_scaled.safetensors",
    "text_encoders/qwen3vl_4b_int8_convrot.safetensors",
    "text_encoders/gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors",
    "text_encoders/t5xxl_fp8_e4m3fn_scaled.safetensors",
    "text_encoders/byt5_small_glyphxl_fp16.safetensors",
    "text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",
    "text_encoders/gemma_3_12B_it_fp4_mixed.safetensors",
    "vae/qwen_image_2.1_vae_bf16.safetensors",
    "vae/flux2-vae.safetensors",
    "vae/hunyuanvideo15_vae_fp16.safetensors",
    "vae/ltx-2.5-video-vae-bf16.safetensors",
    "vae/ltx-2.5-audio-vae-bf16.safetensors",
    "vae/minimax_h3_video_vae_fp16.safetensors",
    "vae/minimax_h3_audio_vae_fp32.safetensors",
    "loras/ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors",
    "loras/minimax_h3_training_adapter_v1.safetensors",
]
FOLDERS = ["my_clips", "my_edits", "my_edits_before", "my_pictures"]

NEW_RENDERER = "Comfy.VueNodes.Enabled"
READY = "!!(window.app?.graph && window.LiteGraph?.registered_node_types.TesseraTrainLora)"
# It shows the workflow that it begins with, and the mask of its start is gone: a file that is dropped while the mask
# fades leaves the mask behind for good. The server has told its name: it gets no events of prompts queued before.
STARTED = "app.graph.nodes.length > 0 && !document.querySelector('.p-blockui-mask') && !!app.api.clientId"

# `opened` once the graph is loaded, what is missing has been looked for, and what was found is drawn.
DROP = """([name, type, content]) => {
  window.opened = false
  app.loadGraphData = async (...given) => {
    delete app.loadGraphData
    await app.loadGraphData(...given)
    requestAnimationFrame(() => requestAnimationFrame(() => (window.opened = true)))
  }
  const data = new DataTransfer()
  data.items.add(new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name, { type }))
  const at = { dataTransfer: data, bubbles: true, cancelable: true, clientX: 600, clientY: 400 }
  document.querySelector('#graph-canvas').dispatchEvent(new DragEvent('drop', at))
}"""

# Newer frontends show a picture that is loaded late on the node of that number in the workflow that is open by then,
# and that of an earlier workflow too.
FORGET_PICTURES = "() => void (app.nodeOutputs = {})"
PICTURES_LOADED = "app.graph.nodes.every((n) => n.type !== 'LoadImage' || n.imgs?.length)"

FAULTS = """() => ({
  overlay: [...document.querySelectorAll('[data-testid=error-overlay], [role=dialog]')].map((e) => e.innerText),
  unknown: app.graph.nodes.filter((n) => !(n.type in LiteGraph.registered_node_types)).map((n) => n.type),
  red_nodes: app.graph.nodes.filter((n) => n.has_errors).map((n) => n.type),
  red_inputs: app.graph.nodes.flatMap((n) => n.inputs.filter((i) => i.hasErrors).map((i) => `${n.type} ${i.name}`)),
  refused: Object.values(app.lastNodeErrors ?? {}),
  overlapping: app.graph.nodes.flatMap((a, i) => app.graph.nodes.slice(i + 1).filter((b) => {
    const [p, q] = [a.boundingRect, b.boundingRect]
    return p[0] < q[0] + q[2] && q[0] < p[0] + p[2] && p[1] < q[1] + q[3] && q[1] < p[1] + p[3]
  }).map((b) => `${a.type} and ${b.type}`)),
})"""

# The tiny loader takes the id of core's, so that the prompt stays the one of the API workflow.
USE_TINY_ENCODERS = """names => {
  const old = app.graph.nodes.find((n) => n.type === 'DualCLIPLoader')
  const readers = old.outputs[0].links.map((id) => app.graph.links.get(id))
  app.graph.remove(old)
  const loader = LiteGraph.createNode('TesseraTinyClipLoader')
  loader.id = old.id
  loader.pos = old.pos
  app.graph.add(loader)
  for (const widget of loader.widgets) widget.value = names[widget.name]
  for (const { target_id, target_slot } of readers) loader.connect(0, app.graph.getNodeById(target_id), target_slot)
}"""

SET_WIDGETS = """values => {
  for (const node of app.graph.nodes)
    for (const [name, value] of Object.entries(values[node.type] ?? {})) {
      const widget = node.widgets.find((w) => w.name === name)
      widget.value = value
      widget.callback?.(value)
    }
}"""

# Brings nodes of these types into the middle of the page, all in view and no larger than they are. Returns where.
SHOW = """kinds => {
  app.canvas.deselectAll() // which have a toolbar
  const boxes = app.canvas.graph.nodes.filter((node) => kinds.includes(node.type)).map((node) => node.boundingRect)
  const [left, top] = [0, 1].map((side) => Math.min(...boxes.map((box) => box[side])))
  const [right, bottom] = [0, 1].map((side) => Math.max(...boxes.map((box) => box[side] + box[side + 2])))
  const [width, height] = [right - left, bottom - top]
  const scale = Math.min(1, (innerWidth - 500) / width, (innerHeight - 160) / height)
  app.canvas.ds.scale = scale
  app.canvas.ds.offset = [innerWidth / 2 / scale - left - width / 2, innerHeight / 2 / scale - top - height / 2]
  app.canvas.setDirty(true, true)
  const [x, y] = [innerWidth / 2 - (width * scale) / 2 - 2, innerHeight / 2 - (height * scale) / 2 - 2]
  return { x, y, width: width * scale + 4, height: height * scale + 4 }
}"""
VIEW = "() => ({ scale: app.canvas.ds.scale, offset: [...app.canvas.ds.offset] })"


class Frontend:
    """Acts of a person with a workflow in the browser. `crashes` are the errors of the page."""

    ENCODERS = {"clip_name1": "clip_l.safetensors", "clip_name2": "t5xxl_fp16.safetensors"}

    def __init__(self, page: Any, server: ComfyServer):
        self.page, self.server = page, server
        self.crashes: list[str] = []
        page.on("pageerror", lambda error: self.crashes.append(str(error)))

    def open(self) -> None:
        self.page.goto(self.server.url)
        self.page.wait_for_function(READY)
        self.page.wait_for_function(STARTED)

    def drop(self, workflow: str) -> None:
        """Drops a file with this text on the canvas and waits until its graph is there, checked for faults."""
        self.drop_file("dropped.json", "application/json", workflow.encode(), json.loads(workflow)["id"])

    def drop_file(self, name: str, kind: str, content: bytes, graph: str) -> None:
        """Drops a file on the canvas and waits until the graph of this id, which it carries, is there and checked."""
        self.page.evaluate(FORGET_PICTURES)
        self.page.evaluate(DROP, [name, kind, base64.b64encode(content).decode()])
        self.page.wait_for_function("id => window.opened && app.graph.id === id", arg=graph)
        self.page.wait_for_function(PICTURES_LOADED)

    def faults(self) -> dict[str, list[Any]]:
        """Faults that the frontend finds in the graph, by kind, without the kinds of which there is nothing."""
        return {kind: messages for kind, messages in self.page.evaluate(FAULTS).items() if messages}

    def use_new_renderer(self, enabled: bool) -> None:
        self.page.evaluate(f"on => app.extensionManager.setting.set('{NEW_RENDERER}', on)", enabled)

    def use_tiny_encoders(self) -> None:
        """In place of core's loader, which can't load tiny ones."""
        self.page.evaluate(USE_TINY_ENCODERS, self.ENCODERS)

    def set_widgets(self, values: dict[str, dict[str, Any]]) -> None:
        """values: by type of node and name of widget."""
        self.page.evaluate(SET_WIDGETS, values)

    def prompt(self) -> dict[str, Any]:
        """The graph in API form."""
        return self.page.evaluate("async () => (await app.graphToPrompt()).output")

    def picture(self, name: str, *kinds: str, locator: Any = None, themes: tuple[str, ...] = ("dark",)) -> None:
        """Save a picture of nodes of these types, or of `locator`, a part of the page, or else the page: into the
        folder TESSERA_PICTURES, where that is set. The name ends in the theme where it is light, and in _canvas for
        nodes of the canvas renderer."""
        if not (folder := os.environ.get("TESSERA_PICTURES")):
            return
        viewport, view = self.page.viewport_size, self.page.evaluate(VIEW)
        self.page.set_viewport_size({"width": viewport["width"], "height": 1400} if kinds else viewport)
        is_new = self.page.evaluate(f"app.extensionManager.setting.get('{NEW_RENDERER}')")
        canvas = "_canvas" if kinds and not is_new else ""
        box = self.page.evaluate(SHOW, kinds) if kinds else None
        self.page.mouse.move(900, 60)  # where nothing is that has a tooltip
        for theme in themes:
            self.page.evaluate(f"app.extensionManager.setting.set('Comfy.ColorPalette', '{theme}')")
            self.page.wait_for_timeout(1000)  # until it is drawn so
            path = f"{folder}/{name}{'' if theme == 'dark' else f'_{theme}'}{canvas}.png"
            locator.screenshot(path=path) if locator else self.page.screenshot(path=path, clip=box)
        self.page.set_viewport_size(viewport)
        self.page.evaluate("view => Object.assign(app.canvas.ds, view)", view)
        self.page.evaluate("app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")

    def run(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Presses the Run button; returns the prompt that it posted and its history entry."""
        posts = lambda reply: reply.url.endswith("/prompt") and reply.request.method == "POST"  # noqa: E731
        with self.page.expect_response(posts) as answer:
            self.page.get_by_test_id("queue-button").first.click()
        body = answer.value.json()
        assert answer.value.ok, body
        return answer.value.request.post_data_json["prompt"], self.server.wait(body["prompt_id"])


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server on the CPU, whose results repeat bit for bit, with the files that the shared workflows name."""
    base = tmp_path_factory.mktemp("browser")
    for path, write in MODELS.items():
        (file := base / "models" / path).parent.mkdir(parents=True, exist_ok=True)
        write(file)
    for path in NAMED:
        (file := base / "models" / path).parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for folder in FOLDERS:
        (base / "input" / folder).mkdir(parents=True)
    Image.new("RGB", (64, 64), "teal").save(base / "input" / "example.png")  # which ComfyUI brings
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    # Else the frontend greets with its templates, and opens what the page before had open.
    settings.write_text('{"Comfy.TutorialCompleted": true, "Comfy.Workflow.Persist": false}')
    with ComfyServer(base, find_comfyui(), cpu=True, env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a profile of its own."""
    playwright = pytest.importorskip("playwright.sync_api")
    if (executable := find_chromium(sys.executable)) is None:
        pytest.skip("There is no Chromium; `python dev.py test` installs it.")
    profile = tmp_path_factory.mktemp("profile")
    with playwright.sync_playwright() as session:
        context = session.chromium.launch_persistent_context(
            profile, executable_path=executable, args=CHROMIUM_OPTIONS, viewport={"width": 1800, "height": 1000}
        )
        context.set_default_timeout(PATIENCE)
        playwright.expect.set_options(timeout=PATIENCE)
        yield context
        context.close()


@pytest.fixture
def frontend(chromium: Any, comfyui: ComfyServer) -> Iterator[Frontend]:
    """The frontend, ready, with no more than its own start-up in it."""
    page = chromium.new_page()
    frontend = Frontend(page, comfyui)
    frontend.open()
    renderer = page.evaluate(f"app.extensionManager.setting.get('{NEW_RENDERER}')")
    yield frontend
    frontend.use_new_renderer(renderer)  # the server keeps it, and is shared by all files
    page.close()

"""Train LoRA's presets in ComfyUI's own frontend: what they fill in, by the model, and when they end."""

import pytest
from renderers import renderers

playwright = pytest.importorskip("playwright.sync_api")

NEW = """file => {
  app.graph.clear()
  const [loader, train] = ['UNETLoader', 'TesseraTrainLora'].map((type) => LiteGraph.createNode(type))
  app.graph.add(loader)
  app.graph.add(train)
  train.pos = [400, 0]
  loader.widgets[0].value = file
  loader.connect(0, train, 0)
}"""
TRAIN = "app.graph.nodes.find((n) => n.type === 'TesseraTrainLora')"
CONNECT_OPTIMIZER = f"""() => {{
  const options = LiteGraph.createNode('TesseraOptimizer')
  app.graph.add(options)
  options.connect(0, {TRAIN}, {TRAIN}.inputs.findIndex((i) => i.name === 'optimizer'))
}}"""

CHOOSE_FILE = """file => (app.graph.nodes.find((n) => n.type === 'UNETLoader').widgets[0].value = file)"""
# Of a name that tells of another family than the loader's file.
PUT_LORA_BETWEEN = f"""() => {{
  const lora = LiteGraph.createNode('LoraLoaderModelOnly')
  app.graph.add(lora)
  lora.widgets[0].value = 'wan_style.safetensors'
  app.graph.nodes.find((n) => n.type === 'UNETLoader').connect(0, lora, 0)
  lora.connect(0, {TRAIN}, 0)
}}"""
CONNECT_MODEL = f"() => app.graph.nodes.find((n) => n.type === 'UNETLoader').connect(0, {TRAIN}, 0)"
CHOOSE_BEFORE_CONNECTING = f"""preset => {{
  {TRAIN}.disconnectInput(0)
  const widget = {TRAIN}.widgets.find((w) => w.name === 'preset')
  widget.value = preset
  widget.callback(preset)
  const connect = {CONNECT_MODEL}
  connect()
}}"""
# To a number that is known only when the graph runs.
CONNECT_STEPS = f"""() => {{
  const number = LiteGraph.createNode('GetImageSize')
  app.graph.add(number)
  number.connect(0, {TRAIN}, {TRAIN}.inputs.findIndex((i) => i.name === 'steps'))
}}"""


def set_train(frontend, **values):
    frontend.set_widgets({"TesseraTrainLora": values})


def values(frontend):
    names = ("steps", "rank", "gradient_accumulation", "learning_rate", "preset")
    return frontend.page.evaluate(f"names => names.map((n) => {TRAIN}.widgets.find((w) => w.name === n).value)", names)


@renderers("new renderer")
def test_a_preset_fills_in_what_suits_the_model_and_says_so(frontend, new_renderer):
    page = frontend.page
    frontend.use_new_renderer(new_renderer)
    hint = page.locator(".tessera-hint")

    page.evaluate(NEW, "flux1-dev.safetensors")
    set_train(frontend, preset="style, balanced")
    assert values(frontend) == [2000, 16, 4, 1e-4, "style, balanced"]
    text = "style, balanced, for FLUX.1: steps 2000, rank 16, gradient_accumulation 4, learning_rate 0.0001."
    playwright.expect(hint).to_have_text(text)
    page.evaluate(CONNECT_OPTIMIZER)
    playwright.expect(hint).to_have_text(f"{text} The connected Optimizer sets learning_rate instead.")
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    playwright.expect(hint).to_have_text(f"{text} The connected Optimizer sets learning_rate instead.")
    assert values(frontend) == [2000, 16, 4, 1e-4, "style, balanced"]
    set_train(frontend, steps=1999)
    assert values(frontend) == [1999, 16, 4, 1e-4, "custom"]
    playwright.expect(hint).to_have_count(0)
    set_train(frontend, preset="motion, quick")
    assert values(frontend) == [1999, 16, 4, 1e-4, "custom"]
    playwright.expect(hint).to_contain_text("FLUX.1 makes pictures")

    page.evaluate(NEW, "wan2.1_t2v_1.3B_fp16.safetensors")
    set_train(frontend, preset="motion, quick")
    assert values(frontend) == [1500, 32, 1, 2e-4, "motion, quick"]
    playwright.expect(hint).to_contain_text("motion, quick, for Wan 2.1 and 2.2: steps 1500")
    assert not frontend.crashes


def test_a_preset_follows_the_model_that_is_connected_after_it_and_another_file(frontend):
    page, hint = frontend.page, frontend.page.locator(".tessera-hint")
    page.evaluate(NEW, "wan2.1_t2v_1.3B_fp16.safetensors")
    page.evaluate(f"{TRAIN}.disconnectInput(0)")
    set_train(frontend, preset="motion, quick")
    playwright.expect(hint).to_have_text(
        "motion, quick: steps 1500, rank 32, gradient_accumulation 1, learning_rate 0.0001."
    )
    page.evaluate(CONNECT_MODEL)
    wan = "for Wan 2.1 and 2.2: steps 1500, rank 32, gradient_accumulation 1, learning_rate 0.0002."
    playwright.expect(hint).to_contain_text(wan)
    page.evaluate(CHOOSE_FILE, "hunyuanvideo1.5_720p_t2v_fp16.safetensors")
    playwright.expect(hint).to_contain_text("for HunyuanVideo 1.5:")
    page.evaluate(PUT_LORA_BETWEEN)
    page.wait_for_timeout(600)  # two looks
    playwright.expect(hint).to_contain_text("for HunyuanVideo 1.5:")
    assert values(frontend) == [1500, 32, 1, 1e-4, "motion, quick"]
    page.evaluate(CHOOSE_FILE, "qwen_image_fp8_e4m3fn.safetensors")
    playwright.expect(hint).to_contain_text("Qwen-Image makes pictures")
    assert values(frontend) == [1500, 32, 1, 1e-4, "custom"]

    set_train(frontend, learning_rate=3e-4)
    page.evaluate(CHOOSE_FILE, "flux1-dev.safetensors")
    page.wait_for_timeout(600)
    playwright.expect(hint).to_contain_text("Qwen-Image makes pictures")  # of the last preset that was chosen
    assert values(frontend) == [1500, 32, 1, 3e-4, "custom"]
    assert not frontend.crashes


def test_a_model_connected_at_once_after_the_preset_was_chosen_counts(frontend):
    """Between two looks at the model in front, which was the same before."""
    page = frontend.page
    page.evaluate(NEW, "wan2.1_t2v_1.3B_fp16.safetensors")
    page.wait_for_timeout(600)  # two looks
    page.evaluate(CHOOSE_BEFORE_CONNECTING, "motion, quick")
    wan = "for Wan 2.1 and 2.2: steps 1500, rank 32, gradient_accumulation 1, learning_rate 0.0002."
    playwright.expect(page.locator(".tessera-hint")).to_contain_text(wan)
    assert values(frontend) == [1500, 32, 1, 2e-4, "motion, quick"]
    assert not frontend.crashes


def test_a_number_that_another_node_gives_is_left_to_it(frontend):
    page, hint = frontend.page, frontend.page.locator(".tessera-hint")
    page.evaluate(NEW, "flux1-dev.safetensors")
    page.evaluate(CONNECT_STEPS)
    set_train(frontend, preset="face, best")
    playwright.expect(hint).to_have_text(
        "face, best, for FLUX.1: rank 32, gradient_accumulation 1, learning_rate 0.0001. "
        "The node connected to steps sets it instead."
    )
    assert values(frontend)[:2] == [1000, 32]
    assert not frontend.crashes

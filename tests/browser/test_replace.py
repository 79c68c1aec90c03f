"""Core's Train LoRA in ComfyUI's own frontend: its menu puts the pack's nodes in its place, and they run."""

import pytest
from renderers import renderers
from tiny.nodes.prompt import node

playwright = pytest.importorskip("playwright.sync_api")

CORE = {
    "steps": ["8", 0], "learning_rate": 2e-3, "rank": 4, "batch_size": 300, "grad_accumulation_steps": 2, "seed": 77,
    "optimizer": "SGD", "loss_function": "MSE", "training_dtype": "bf16", "lora_dtype": "bf16", "algorithm": "LoHa",
    "gradient_checkpointing": True, "checkpoint_depth": 1, "offloading": True, "existing_lora": "[None]",
    "bucket_mode": False, "bypass_mode": False, "quantized_backward": False,
}  # fmt: skip
COPIED = {"steps": ["8", 0], "learning_rate": 2e-3, "rank": 4, "batch_size": 256, "gradient_accumulation": 2}
COPIED["seed"] = 77
TOLD = [
    "batch_size is 256, the most there is; it was 300.",
    "optimizer was SGD: Train LoRA (Tessera) uses AdamW; connect an Optimizer node to choose another.",
    "lora_dtype was bf16: here the LoRA is trained and saved in fp32; Save LoRA writes smaller files.",
    "algorithm was LoHa: this trains a LoRA; connect LoRA Network and choose loha there.",
    "offloading was on: connect Training Memory and set blocks_to_swap to -1.",
    "The seed was set to randomize after each run: here it is fixed, so that Run goes on with the same LoRA.",
    "The output steps is gone: type the number where it was connected.",
]


def graph(encoders):
    return {
        "1": node("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
        "2": node("TesseraTinyClipLoader", **encoders),
        "4": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "5": node("CLIPTextEncode", clip=["2", 0], text="a fox"),
        "6": node("TrainLoraNode", model=["1", 0], latents=["4", 0], positive=["5", 0], **CORE),
        "7": node("LossGraphNode", loss=["6", 1], filename_prefix="loss"),
        "8": node("PrimitiveInt", value=2),
        "9": node("SaveLoRA", lora=["6", 0], prefix="loras/replaced", steps=["6", 2]),
    }


OLD = "app.graph.nodes.find((n) => n.type === 'TrainLoraNode')"
# Where its title is seen on the page.
TITLE = f"""() => {{
  const node = {OLD}
  app.canvas.ds.scale = 0.5
  app.canvas.ds.offset = [800 - node.pos[0], 500 - node.pos[1]]
  app.canvas.setDirty(true, true)
  const [x, y] = app.canvas.ds.convertOffsetToCanvas([node.pos[0] + 90, node.pos[1] - 15])
  const box = app.canvas.canvas.getBoundingClientRect()
  return [x + box.left, y + box.top]
}}"""
STATE = """() => {
  const data = app.graph.serialize()
  const nodes = data.nodes.map((n) => [n.id, n.type, n.widgets_values])
  const links = data.links.map((l) => l.slice(1))
  return JSON.stringify([nodes.sort((a, b) => a[0] - b[0]), links.sort()])
}"""
NOTE = "app.graph.nodes.find((n) => n.type === 'Note').widgets[0].value"


def opened(frontend, name):
    page = frontend.page
    page.evaluate("([prompt, name]) => app.loadApiJson(prompt, name)", [graph(frontend.ENCODERS), name])
    page.wait_for_function("app.graph.nodes.length === 8")
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")  # undo begins here
    page.wait_for_function("app.graph.nodes.length === 8")


@renderers("new renderer")
def test_the_menu_puts_nodes_of_ours_in_its_place(frontend, new_renderer):
    page = frontend.page
    frontend.use_new_renderer(new_renderer)
    opened(frontend, "core")
    state = page.evaluate(STATE)
    page.wait_for_timeout(300)
    x, y = page.evaluate(TITLE)
    page.wait_for_timeout(300)  # until it is drawn there
    page.mouse.click(x, y, button="right")
    page.get_by_text("Replace by Tessera's").click(timeout=10000)
    page.wait_for_function(f"!{OLD}")

    prompt = frontend.prompt()
    nodes = {node["class_type"]: (key, node["inputs"]) for key, node in prompt.items()}
    data, train = nodes["TesseraLatentsToDataset"], nodes["TesseraTrainLora"]
    assert [data[1]["latents"], data[1]["positive"]] == [["4", 0], ["5", 0]]
    assert train[1] | COPIED | {"model": ["1", 0], "data": [data[0], 0]} == train[1]
    assert nodes["LossGraphNode"][1]["loss"] == [train[0], 1] and nodes["SaveLoRA"][1]["lora"] == [train[0], 0]
    head, *lines = page.evaluate(NOTE).splitlines()
    assert head == "Settings that couldn't be carried over:"
    assert [line.removeprefix("- ") for line in lines] == TOLD
    assert frontend.faults() == {}
    frontend.picture("replaced", "TesseraLatentsToDataset", "TesseraTrainLora", "Note")

    page.evaluate("app.extensionManager.command.execute('Comfy.Undo')")
    page.wait_for_function("() => !app.graph.nodes.some((n) => n.type === 'TesseraTrainLora')")
    assert page.evaluate(STATE) == state
    assert frontend.crashes == []


def test_the_new_nodes_run_in_a_subgraph_too(frontend):
    """The links to the subgraph's own inputs and outputs are moved as well."""
    page = frontend.page
    opened(frontend, "inner")
    page.evaluate(f"""() => {{
      {OLD}.widgets.find((w) => w.name === 'batch_size').value = 1
      const {{ subgraph }} = app.graph.convertToSubgraph(new Set([{OLD}]))
      app.canvas.setGraph(subgraph)
      const [inner] = subgraph.nodes
      app.collectNodeMenuItems(inner).find((item) => item?.content === "Replace by Tessera's").callback()
      const train = subgraph.nodes.find((n) => n.type === 'TesseraTrainLora')
      train.widgets.find((w) => w.name === 'compile').value = 'off' // a minute of compiling shows nothing here
      app.canvas.setGraph(app.graph)
    }}""")
    frontend.set_widgets({"SaveLoRA": {"steps": 2}})
    prompt, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]
    nodes = {node["class_type"]: (key, node["inputs"]) for key, node in prompt.items()}
    key, train = nodes["TesseraTrainLora"]
    assert train["model"] == ["1", 0] and train["steps"] == ["8", 0] and train["rank"] == 4
    assert nodes["LossGraphNode"][1]["loss"] == [key, 1] and nodes["SaveLoRA"][1]["lora"] == [key, 0]
    assert entry["outputs"][key]["tessera"][0]["steps_done"] == 2
    assert frontend.crashes == []

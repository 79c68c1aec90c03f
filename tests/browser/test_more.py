"""Fewer widgets at once, in ComfyUI's own frontend: what few need stands behind *more*, in both renderers."""

import json

import pytest

playwright = pytest.importorskip("playwright.sync_api")

RENDERERS = pytest.mark.parametrize("new_renderer", [False, True], ids=["canvas renderer", "new renderer"])

FIRST = ["output_name", "steps", "learning_rate", "rank", "batch_size", "save_every", "preset"]
EXTRA = [
    *("gradient_accumulation", "seed", "compile", "resume", "save_every_epochs", "keep_last", "devices"),
    *("while_others_wait", "minutes_between_pauses"),
]

NEW = """() => {
  app.graph.clear()
  const node = LiteGraph.createNode('TesseraTrainLora')
  node.pos = [400, 100]
  node.widgets.find((w) => w.name === 'output_name').value = 'of no run' // the panel of one would make it higher
  app.graph.add(node)
}"""
ALWAYS = """async on => {
  await app.extensionManager.setting.set('Comfy.Node.AlwaysShowAdvancedWidgets', on)
  app.canvas.setDirty(true, true)
}"""
TRAIN = "app.graph.nodes.find((n) => n.type === 'TesseraTrainLora')"
# Names of the widgets that lie within the node, as the canvas draws them.
DRAWN = f"""() => {{
  const node = {TRAIN}
  return node.widgets.filter((w) => node.isWidgetVisible(w) && w.y > 0 && w.y < node.size[1]).map((w) => w.name)
}}"""
BUTTON = f"""() => {{
  const node = {TRAIN}
  const y = node.pos[1] + node.widgets.find((w) => w.name === 'tessera_more').y + 10
  return app.canvasPosToClientPos([node.pos[0] + node.size[0] / 2, y])
}}"""
LINK_SEED = f"""() => {{
  const number = LiteGraph.createNode('PrimitiveInt')
  app.graph.add(number)
  number.connect(0, {TRAIN}, {TRAIN}.inputs.findIndex((i) => i.name === 'seed'))
}}"""
# As an older version of the pack saved it, which knew no *more* and had no button for it.
AS_OF_OLD = """graph => {
  for (const node of graph.nodes) {
    delete node.showAdvanced
    if (node.type === 'TesseraTrainLora') node.size[1] -= 24
  }
  return graph
}"""


def shows(frontend, new_renderer, names):
    """Waits until the node shows just these of its widgets."""
    labels = "[...document.querySelectorAll('[data-testid=widget-layout-field-label]')].map((e) => e.innerText)"
    known = json.dumps(FIRST + EXTRA)
    frontend.page.wait_for_function(
        f"names => String(({labels if new_renderer else f'({DRAWN})()'}).filter((n) => {known}.includes(n)).sort()) "
        "=== String(names.sort())",
        arg=names,
        timeout=15_000,
    )


def press_more(frontend, new_renderer):
    if new_renderer:
        frontend.page.get_by_test_id("advanced-inputs-button").first.click()
    else:
        previous = frontend.page.evaluate(f"{TRAIN}.showAdvanced")
        for _ in range(20):  # a click that comes while the graph is still being drawn finds no widget
            frontend.page.mouse.click(1200, 700)  # nothing is there; two clicks at one place would be a double click
            frontend.page.mouse.click(*frontend.page.evaluate(BUTTON))
            frontend.page.wait_for_timeout(100)
            if frontend.page.evaluate(f"{TRAIN}.showAdvanced") != previous:
                return
        raise AssertionError("The button does nothing.")


def saved(frontend):
    """The node in a saved workflow and in a prompt, as text."""
    values = frontend.page.evaluate(f"{TRAIN}.serialize().widgets_values")
    return json.dumps([values, frontend.prompt()])


def height(frontend):
    return frontend.page.evaluate(f"{TRAIN}.size[1]")


def open_again(frontend, change="graph => graph"):
    frontend.page.evaluate(f"async () => app.loadGraphData(({change})(app.graph.serialize()))")


@RENDERERS
def test_few_widgets_are_in_view_and_none_that_was_set_or_linked_is_out_of_it(frontend, new_renderer):
    page = frontend.page
    frontend.use_new_renderer(new_renderer)
    page.evaluate(NEW)
    shows(frontend, new_renderer, FIRST)
    previous, low = saved(frontend), height(frontend)
    frontend.picture("more", "TesseraTrainLora")
    assert len(json.loads(previous)[0]) == len(FIRST + EXTRA) + 1  # and control_after_generate, of the seed
    press_more(frontend, new_renderer)
    shows(frontend, new_renderer, FIRST + EXTRA)
    assert saved(frontend) == previous
    frontend.picture("more_shown", "TesseraTrainLora")
    open_again(frontend)
    shows(frontend, new_renderer, FIRST + EXTRA)
    press_more(frontend, new_renderer)
    shows(frontend, new_renderer, FIRST)
    assert saved(frontend) == previous
    assert new_renderer or height(frontend) == low

    frontend.set_widgets({"TesseraTrainLora": {"resume": "off", "keep_last": 3}})
    page.evaluate(LINK_SEED)
    page.wait_for_timeout(500)
    # Newer frontends, a moment later, show no widget of an input that is linked, of any node.
    linked = (
        ["seed"] if page.evaluate(f"{TRAIN}.isWidgetVisible({TRAIN}.widgets.find((w) => w.name === 'seed'))") else []
    )
    widgets = FIRST + [name for name in EXTRA if name != "seed" or linked]
    remaining = [*FIRST, *linked, "resume", "keep_last"]
    shows(frontend, new_renderer, remaining)
    frontend.set_widgets({"TesseraTrainLora": {"keep_last": 0}})  # it doesn't vanish under the hand
    shows(frontend, new_renderer, remaining)
    frontend.set_widgets({"TesseraTrainLora": {"keep_last": 3}})
    previous, low = saved(frontend), height(frontend)
    press_more(frontend, new_renderer)
    shows(frontend, new_renderer, widgets)
    open_again(frontend, AS_OF_OLD)
    shows(frontend, new_renderer, remaining)
    assert saved(frontend) == previous
    assert new_renderer or abs(height(frontend) - low) < 24  # less than a widget
    low = height(frontend)
    open_again(frontend)
    shows(frontend, new_renderer, remaining)
    assert new_renderer or height(frontend) == low
    page.evaluate(ALWAYS, True)
    shows(frontend, new_renderer, widgets)
    page.evaluate(ALWAYS, False)
    shows(frontend, new_renderer, remaining)
    assert not frontend.crashes

"""The help pages, in ComfyUI's own help panel of 370 pixels, are read without scrolling sideways."""

import os

from tessera.nodes import NODES

PANEL = 370  # pixels

SHOW = """async type => {
  const node = app.graph.add(LiteGraph.createNode(type))
  app.canvas.selectItems([node])
}"""
# What is wider than its room, and tables with a column of a few words to the line.
UNFIT = """() => {
  const content = document.querySelector('.node-help-content')
  const name = e => `${e.tagName} ${e.textContent.trim().slice(0, 60)}`
  const right = content.getBoundingClientRect().right + 1
  const wide = [content, ...content.querySelectorAll('*')].filter(
    (e) => e.getBoundingClientRect().right > right || (e.matches('div, table') && e.scrollWidth > e.clientWidth + 1))
  const narrow = [...content.querySelectorAll('td, th')].filter((e) => {
    const lines = e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).lineHeight)
    return lines > 4 && e.clientWidth < 150
  })
  return [...wide, ...narrow].map(name)
}"""
WIDTH = """width => {
  const panel = document.querySelector('[data-testid=properties-panel]')
  const frame = panel.closest('.p-splitterpanel')
  if (frame) frame.style.flex = `0 0 ${width}px`
  else panel.style.width = `${width}px` // newer frontends have another splitter
}"""
TITLE = "title => document.querySelector('.node-help-content h1')?.textContent === title"


def test_every_help_page_fits_the_panel(frontend):
    page = frontend.page
    unfit = {}
    for node in NODES:
        schema = node.GET_SCHEMA()
        page.evaluate("app.graph.clear()")
        page.evaluate(SHOW, schema.node_id)
        if not page.locator(".node-help-content").count():
            page.get_by_test_id("info-button").click()
            page.evaluate(WIDTH, PANEL)
        page.wait_for_function(TITLE, arg=schema.display_name)
        if folder := os.environ.get("TESSERA_LOOK"):
            page.get_by_test_id("properties-panel").screenshot(path=f"{folder}/{schema.node_id}.png")
        if overflow := page.evaluate(UNFIT):
            unfit[schema.node_id] = overflow
    assert not frontend.crashes
    assert not unfit, "\n".join(f"{name}: {overflow}" for name, overflow in unfit.items())

"""The workflows that compile, in ComfyUI's own frontend: the report is read on the node after a run."""

import json
from typing import Any

import pytest
from comfy_server import PACK
from renderers import renderers

playwright = pytest.importorskip("playwright.sync_api")

WORKFLOWS = PACK / "workflows"

# What a user would type to make the run small; the same values go into the API prompt.
SMALL = {
    "TesseraCompileModel": {"backend": "aot_eager"},
    "EmptySD3LatentImage": {"width": 128, "height": 64},
    "KSampler": {"steps": 2},
}


def ui_text(name: str) -> str:
    return (WORKFLOWS / f"{name}.json").read_text(encoding="utf-8")


def api_prompt(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def small_api_prompt(encoders: dict[str, str]) -> dict[str, Any]:
    prompt = api_prompt("flux_compile")
    for node in prompt.values():
        node["inputs"] |= SMALL.get(node["class_type"], {})
        if node["class_type"] == "DualCLIPLoader":
            node |= {"class_type": "TesseraTinyClipLoader", "inputs": dict(encoders)}
    return prompt


def without_titles(prompt: dict[str, Any]) -> dict[str, Any]:
    return {key: {"class_type": node["class_type"], "inputs": node["inputs"]} for key, node in prompt.items()}


def report_of(entry: dict[str, Any]) -> dict[str, Any]:
    prompt = entry["prompt"][2]
    (node,) = (key for key, node in prompt.items() if node["class_type"] == "TesseraCompileReport")
    (facts,) = entry["outputs"][node]["tessera"]
    return facts


@renderers("new renderer")
def test_after_the_run_button_the_report_is_read_on_the_node(frontend, new_renderer):
    frontend.use_new_renderer(new_renderer)
    frontend.drop(ui_text("flux_compile"))
    frontend.use_tiny_encoders()
    frontend.set_widgets(SMALL)
    posted, entry = frontend.run()
    assert without_titles(posted) == without_titles(small_api_prompt(frontend.ENCODERS))
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
    assert frontend.faults() == {} and frontend.crashes == []
    first = report_of(entry)
    table = read_table(frontend.page, calls=first["regions"][0]["compiled_calls"])
    assert table == cells_of(first)

    posted_again, entry = frontend.run()  # the frontend has drawn another seed by itself
    (sampler,) = (key for key, node in posted.items() if node["class_type"] == "KSampler")
    assert posted_again[sampler]["inputs"]["seed"] != posted[sampler]["inputs"]["seed"]
    second = report_of(entry)
    table = read_table(frontend.page, calls=second["regions"][0]["compiled_calls"])
    assert table == cells_of(second)
    assert {row["region"]: row["graphs"] for row in table} == {"DoubleStreamBlock": 1, "SingleStreamBlock": 1}
    assert second["compile_seconds"] == first["compile_seconds"]
    saved = {node["type"]: node["widgets_values"] for node in frontend.page.evaluate("app.graph.serialize().nodes")
             if node["type"].startswith("TesseraCompile")}  # fmt: skip
    assert saved["TesseraCompileReport"] == [] and len(saved["TesseraCompileModel"]) == 8  # the report is no value


@renderers("new renderer")
def test_choice_of_block_swap_is_read_on_the_loader(frontend, new_renderer):
    frontend.use_new_renderer(new_renderer)
    frontend.drop(ui_text("flux_block_swap"))
    frontend.use_tiny_encoders()
    frontend.set_widgets(SMALL | {"TesseraLoadDiffusionModel": {"blocks_to_swap": 3}})
    _, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
    assert frontend.faults() == {} and frontend.crashes == []
    (note,) = entry["outputs"]["2"]["tessera"][0]["notes"]
    assert note.startswith("Block swap: 3 of 4 blocks stream")
    playwright.expect(frontend.page.get_by_text(note)).to_be_visible()
    (loader,) = (
        node["widgets_values"]
        for node in frontend.page.evaluate("app.graph.serialize().nodes")
        if node["type"] == "TesseraLoadDiffusionModel"
    )
    assert loader[2:] == [3, 1, "auto", "as stored"]  # what is shown is no value


# All cells at one time, once the table says that the first region was called so often.
TABLE = """calls => {
  const { rows } = document.querySelector('.tessera-report table') ?? { rows: [] }
  const [heads, ...regions] = [...rows].map((row) => [...row.cells].map((cell) => cell.innerText))
  return regions.length > 0 && regions[0][heads.indexOf('calls')] === String(calls) && [heads, ...regions]
}"""


def read_table(page: Any, calls: int) -> list[dict[str, Any]]:
    """The table that a person sees on the node, once it is the one of so many calls."""
    heads, *rows = page.wait_for_function(TABLE, arg=calls).json_value()
    playwright.expect(page.locator(".tessera-report table")).to_be_visible()
    return [{head: number(cell) for head, cell in zip(heads, row, strict=True)} for row in rows]


def number(cell: str) -> float | str:
    return float(cell.rstrip("x")) if cell[:1].isdigit() and "/" not in cell else cell


def cells_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that the table has to show of the facts in the history."""

    def cells(region: dict[str, Any]) -> dict[str, Any]:
        (speed,) = region["speed"]
        hits, misses = (region[f"cache_{kind}"] + region[f"autograd_cache_{kind}"] for kind in ("hits", "misses"))
        return {
            "region": region["region"],
            "graphs": region["graphs"],
            "compile s": pytest.approx(region["compile_seconds"], abs=0.051),
            "tracing s": pytest.approx(region["tracing_seconds"], abs=0.051),
            "cache hit/miss": f"{hits}/{misses}",
            "calls": region["compiled_calls"],
            "eager": region["eager_calls"],
            "ms": pytest.approx(speed["compiled_ms"], abs=0.0051),
            "eager ms": pytest.approx(speed["eager_ms"], abs=0.0051),
            "gain": pytest.approx(speed["gain"], abs=0.0051),
            "MiB": region["memory_added_mib"],
        }

    return [cells(region) for region in report["regions"]]

"""List the texts that a language lacks; ComfyUI and the pack's frontend show those in English.

Run: python dev.py untranslated [LANGUAGE …]
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCALES = ROOT / "locales"
DOCS = ROOT / "nodes" / "web" / "docs"
SCRIPTS = sorted((ROOT / "nodes" / "web" / "js").rglob("*.js"))
LANGUAGES = sorted(path.parent.name for path in LOCALES.glob("*/nodeDefs.json") if path.parent.name != "en")
_TEXT = r"""('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_ROW = re.compile(r"^- `(\w+)`", re.M)


def read_locale(language: str, name: str) -> dict[str, Any]:
    """Read a JSON file of a language."""
    texts: dict[str, Any] = json.loads((LOCALES / language / name).read_text(encoding="utf-8"))
    return texts


def node_texts(schemas: Iterable[Any]) -> dict[str, Any]:
    """Return the English texts of nodes in the shape of nodeDefs.json."""
    return {
        schema.node_id: {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {item.id: {"name": item.id, "tooltip": item.tooltip} for item in schema.inputs},
            "outputs": {
                str(number): {"name": item.display_name} | ({"tooltip": item.tooltip} if item.tooltip else {})
                for number, item in enumerate(schema.outputs)
            },
        }
        for schema in schemas
    }


def words_of(script: str) -> set[str]:
    """Return the texts that `t` is called with, and those of the tables that it is called with, named …WORDS."""
    words = re.findall(rf"(?<![\w.])t\(\s*{_TEXT}", script)
    for table in re.findall(r"^(?:export )?const \w*WORDS = ([\[{].*?[\]}])$", script, re.M | re.S):
        words += re.findall(_TEXT, table)
    return {text[1:-1] for text in words}


def browser_words() -> dict[str, str]:
    """Return the words of the browser's code."""
    words = set().union(*(words_of(script.read_text(encoding="utf-8")) for script in SCRIPTS))
    return {word: word for word in sorted(words)}


def help_rows(node_id: str, language: str = "") -> list[str]:
    """Return the names of the inputs that a help page has a row for."""
    page = DOCS / f"{node_id}.md" if not language else DOCS / node_id / f"{language}.md"
    return _ROW.findall(page.read_text(encoding="utf-8"))


def missing(english: Mapping[str, Any], translated: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the place of each text that has no translation; a mapping that is missing as a whole counts once."""
    for name, text in english.items():
        if name not in translated:
            yield f"{place}{name}"
        elif isinstance(text, Mapping):
            yield from missing(text, translated[name], f"{place}{name}.")


def untranslated(language: str, schemas: Iterable[Any]) -> list[str]:
    """List the texts that a language lacks, by file."""
    titles = {"templateWorkflows": read_locale("en", "main.json")["templateWorkflows"]}
    texts = read_locale(language, "main.json")
    pages = sorted(DOCS.glob(f"*/{language}.md"))
    return [
        *(f"nodeDefs.json: {place}" for place in missing(node_texts(schemas), read_locale(language, "nodeDefs.json"))),
        *(f"main.json: {place}" for place in missing(titles | {"tessera": browser_words()}, texts)),
        *(
            f"{page.parent.name}/{language}.md: {name}"
            for page in pages
            for name in help_rows(page.parent.name)
            if name not in help_rows(page.parent.name, language)
        ),
    ]


def main(languages: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import with_comfyui  # noqa: F401
    from tessera.nodes import NODES

    schemas = [node.GET_SCHEMA() for node in NODES]
    for language in languages or LANGUAGES:
        texts = untranslated(language, schemas)
        print(f"{language}: {len(texts) or 'nothing'} untranslated")
        for text in texts:
            print(f"  {text}")


if __name__ == "__main__":
    main(sys.argv[1:])

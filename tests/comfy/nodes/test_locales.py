"""Translations of the nodes: none is left over, and each has the numbers of the English sentence.

What is missing is shown in English, and `python dev.py untranslated` lists it.
"""

import json
import re

import pytest
from tessera.nodes import NODES
from with_pack import ROOT, load

tool = load("untranslated", ROOT / "tools" / "untranslated.py")
LOCALES, LANGUAGES = tool.LOCALES, tool.LANGUAGES
DEFINITIONS = {
    language: json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8")) for language in LANGUAGES
}
SCHEMAS = {node.GET_SCHEMA().node_id: node.GET_SCHEMA() for node in NODES}
DOCS = ROOT / "nodes" / "web" / "docs"
# Of the first workflow. The frontend asks for <node id>/<language>.md and then for <node id>.md, which is English.
FIRST_RUN = [
    "TesseraLoadDiffusionModel",
    "TesseraImageFolder",
    "TesseraPrepareDataset",
    "TesseraTrainLora",
    "TesseraSaveLora",
    "TesseraTryItModels",
]
NOTE = "_machine_made"
SYNTAX = set("{}|@")  # of vue-i18n, which reads names and descriptions as messages but tooltips as they are


def translated(language, node_id):
    """The texts of a node, without those that are not translated."""
    return {"inputs": {}, "outputs": {}} | DEFINITIONS[language].get(node_id, {})


every_language = pytest.mark.parametrize("language", LANGUAGES)
every_node = pytest.mark.parametrize("node_id", SCHEMAS)


def numbers(text: str) -> set[str]:
    """The numbers of a sentence, without those of names such as FLUX.2, int8 and a_0.png."""
    return set(re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?!\w|-\d)", text, re.ASCII))


def test_these_languages_are_translated():
    assert LANGUAGES == ["ja", "ko", "zh"]


def test_english_says_in_brackets_which_outputs_are_of_the_low_noise_expert():
    """Workflows hold the names of outputs, so these stay; what is shown for them is a label."""
    texts = json.loads((LOCALES / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    names = [output.display_name for output in SCHEMAS["TesseraTrainLora"].outputs]
    labels = {str(n): name.replace("_low_noise", " (low noise)") for n, name in enumerate(names) if "_low_" in name}
    assert texts == {"TesseraTrainLora": {"outputs": {number: {"name": label} for number, label in labels.items()}}}
    assert len(labels) == 4


@every_language
def test_a_language_has_no_node_that_is_gone(language):
    assert set(DEFINITIONS[language]) <= {*SCHEMAS, NOTE}


@every_language
@every_node
def test_a_language_has_no_text_of_a_node_that_is_gone_and_inputs_in_order(language, node_id):
    schema, translation = SCHEMAS[node_id], translated(language, node_id)
    assert list(tool.missing(translation, tool.node_texts([schema])[node_id])) == []
    names = [i.id for i in sorted(schema.inputs, key=lambda item: item.optional)]
    assert list(translation["inputs"]) == [name for name in names if name in translation["inputs"]]


@every_language
@every_node
def test_a_translation_has_text_for_the_frontend_everywhere(language, node_id):
    translation = translated(language, node_id)
    items = [*translation["inputs"].values(), *translation["outputs"].values()]
    messages = [text for text in translation.values() if isinstance(text, str)]
    messages += [item["name"] for item in items if "name" in item]
    assert [text for text in messages if not text.strip() or SYNTAX & set(text)] == []
    assert [item for item in items if len(item.get("tooltip", "long enough")) < 5] == []


@every_language
@every_node
def test_a_tooltip_ends_with_the_name_that_messages_of_the_server_use(language, node_id):
    for name, item in translated(language, node_id)["inputs"].items():
        assert item.get("tooltip", f" [{name}]").endswith(f" [{name}]")


@every_language
@every_node
def test_a_translation_has_the_numbers_of_the_english_sentence(language, node_id):
    inputs = translated(language, node_id)["inputs"]
    english = {i.id: i.tooltip for i in SCHEMAS[node_id].inputs}
    texts = {name: item["tooltip"].removesuffix(f" [{name}]") for name, item in inputs.items() if "tooltip" in item}
    counted = {str(number) for number in range(1, 11)}  # which English writes as words
    missing = {name: numbers(english[name]) - numbers(text) for name, text in texts.items()}
    extra = {name: numbers(text) - numbers(english[name]) - counted for name, text in texts.items()}
    assert {name: difference for name, difference in [*missing.items(), *extra.items()] if difference} == {}


@every_language
def test_a_translation_says_that_it_is_machine_made(language):
    assert DEFINITIONS[language][NOTE].endswith("Machine-made; no speaker has read it yet.")


def test_the_nodes_of_the_first_run_have_a_chinese_help_page():
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.glob("*/*")} == {f"{node}/zh.md" for node in FIRST_RUN}


@pytest.mark.parametrize("node_id", FIRST_RUN)
def test_a_translated_help_page_has_the_inputs_and_defaults_of_the_english_one(node_id):
    english = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
    page = (DOCS / node_id / "zh.md").read_text(encoding="utf-8")
    section = re.split(r"\n##+ ", english.split("\n## Inputs\n", 1)[1])[0]
    rows = re.findall(r"^- `(\w+)`(?: \((?:default (`.*?`|.*?))?(?:, )?(advanced)?\))?<br>", section, re.M)
    inputs = DEFINITIONS["zh"][node_id]["inputs"]
    translated_rows = tool.help_rows(node_id, "zh")
    for name, default, advanced in rows:
        if name not in translated_rows:
            continue
        default = "默认为空" if default == "empty" else default and f"默认 {default}"
        notes = "，".join(filter(None, [default, advanced and "高级"]))
        assert f"- `{name}` {inputs[name]['name']}{notes and f'（{notes}）'}<br>" in page
    assert page.startswith(f"# {DEFINITIONS['zh'][node_id]['display_name']}\n")
    assert "Machine-made; no speaker has read it yet." in page


def outline(page: str) -> list[tuple[str, set[str], set[str]]]:
    """Each line of a help page as what no language changes: its kind, its code, and the numbers in its words."""
    elements = []
    for line in page.splitlines():
        if line and not line.startswith("> "):  # the translation's own note
            kind = re.match(r"#+ |- (?:\*\*|\*|`)?|\*\*|", line)[0]
            code = re.compile(r"`[^`]+`")
            elements.append((kind, set(code.findall(line)), numbers(code.sub("", line))))
    return elements


def behind(english: str, page: str) -> list[object]:
    """Find lines of the English page that the translation lacks or has with other code or numbers; rows of inputs may
    be missing."""
    row = re.compile(r"- `\w+`")
    present = set(row.findall(page))
    lines = [line for line in english.splitlines() if not (match := row.match(line)) or match[0] in present]
    english_outline, translated_outline = outline("\n".join(lines)), outline(page)
    if [kind for kind, _, _ in english_outline] != [kind for kind, _, _ in translated_outline]:
        return ["The pages have other headings, paragraphs or rows."]
    counted = {str(number) for number in range(1, 11)}  # which English writes as words
    return [
        (expected, actual)
        for expected, actual in zip(english_outline, translated_outline, strict=True)
        if expected[1] != actual[1] or expected[2] - actual[2] or actual[2] - expected[2] - counted
    ]


@pytest.mark.parametrize("node_id", FIRST_RUN)
def test_a_translated_help_page_says_line_by_line_what_the_english_one_says(node_id):
    english = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
    assert behind(english, (DOCS / node_id / "zh.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("node_id", FIRST_RUN)
def test_a_translated_help_page_without_one_of_its_lines_is_noticed(node_id):
    english = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
    lines = (DOCS / node_id / "zh.md").read_text(encoding="utf-8").splitlines()
    said = [number for number, line in enumerate(lines) if line and not re.match("> |- `", line)]
    for number in said:
        assert behind(english, "\n".join(lines[:number] + lines[number + 1 :]))


@pytest.mark.parametrize(
    ("english", "translation"),
    [("`rank`: 16", "`rank`：32"), ("`rank` 16", "`alpha` 16"), ("at most 9 pages", "最多 12 页")],
)
def test_a_translated_help_page_with_another_figure_or_name_is_noticed(english, translation):
    assert behind(english, translation) and not behind(english, english)


@pytest.mark.parametrize("node_id", FIRST_RUN)
def test_a_translated_help_page_names_the_errors_as_they_are_said(node_id):
    def said(page: str, heading: str) -> list[str]:
        section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ")[0] if f"\n## {heading}\n" in page else ""
        return re.findall(r"(?<![\w*])\*([^*\n]+)\*(?!\*)", section)

    english = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
    page = (DOCS / node_id / "zh.md").read_text(encoding="utf-8")
    assert said(page, "常见错误") == said(english, "Errors")


@every_language
def test_the_titles_of_workflows_are_translated_with_their_numbers(language):
    english, translation = (tool.read_locale(locale, "main.json") for locale in ("en", language))
    assert translation.pop(NOTE) == DEFINITIONS[language][NOTE]
    assert english.keys() == {"templateWorkflows"} and translation.keys() == {"templateWorkflows", "tessera"}
    assert list(tool.missing(translation["templateWorkflows"], english["templateWorkflows"])) == []
    for folder, titles in translation["templateWorkflows"]["template"].items():  # the list is sorted by their numbers
        for name, title in titles.items():
            assert english["templateWorkflows"]["template"][folder][name].split()[0] == title.split()[0]


@pytest.mark.parametrize("script", tool.SCRIPTS, ids=lambda script: script.stem)
def test_words_of_the_browser_are_called_by_their_text_or_from_a_table_of_words(script):
    code = script.read_text(encoding="utf-8")
    for called in re.findall(r"(?<![\w.])t\(\s*([^'\"\s][^,()]*)", code) if script.stem != "words" else []:
        assert "WORDS" in called or (called.isidentifier() and called.islower() and "WORDS" in code), called


@every_language
def test_the_words_of_the_browser_are_translated_with_their_values(language):
    translation, english = tool.read_locale(language, "main.json")["tessera"], tool.browser_words().keys()
    assert len(english) > 100 and translation.keys() - english == set()
    values = re.compile(r"\{\w+\}")
    assert {
        text
        for text, translated in translation.items()
        if not translated or sorted(values.findall(translated)) != sorted(values.findall(text))
    } == set()


@every_language
def test_untranslated_texts_are_listed(language, monkeypatch):
    schemas, read = list(SCHEMAS.values()), tool.read_locale
    earlier = tool.untranslated(language, schemas)

    def read_partly(locale, name):
        texts = read(locale, name)
        if locale == language and name == "nodeDefs.json":
            del texts["TesseraSaveLora"], texts["TesseraTrainLora"]["inputs"]["steps"]["tooltip"]
        return texts

    monkeypatch.setattr(tool, "read_locale", read_partly)
    listed = set(tool.untranslated(language, schemas)) - set(earlier)
    assert listed == {"nodeDefs.json: TesseraSaveLora", "nodeDefs.json: TesseraTrainLora.inputs.steps.tooltip"}

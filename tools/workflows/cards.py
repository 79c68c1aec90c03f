"""Draw the thumbnails of the workflows, `workflows/*.jpg`, and writes their titles and descriptions into
`locales/en/main.json`, from which ComfyUI's frontend reads them.

Run: python tools/workflows/cards.py
"""

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
SIZE = (1280, 720)
GROUND = "#16181d"
INK = "#f2f4f7"
FAINT = "#a9b4c0"
# The folders below custom_nodes that the pack is found in: the frontend's keys hold that name.
FOLDERS = ("tessera", "comfyui-tessera", "ComfyUI-Tessera")


@dataclass(frozen=True)
class Card:
    """Texts about a workflow.

    title: a sentence with the workflow's number in the list.
    text: its purpose, one sentence.
    model: the name in large letters.
    card: the GPU that it needs, as far as known (README's table of cards is of FLUX.1 dev alone).
    data: how many pictures or clips it takes.
    """

    title: str
    text: str
    model: str
    card: str
    data: str


PICTURES = "10 to 30 pictures"
CLIPS = "10 to 30 clips"
EDITS = "10 to 30 pairs of pictures"
NONE = "no pictures"
OWN = "pictures included"
NO_PICTURES = "two prompts"
SWAPPED, STREAMS = "8 GB or more", "any, it streams"
WHOLE = "must hold the whole model"
_ROWS = [
    ("try_it", "Try it: train a LoRA now", "tiny models", "not needed", OWN, "Nothing to download, a minute or two."),
    ("flux_lora", "Train a FLUX LoRA", "FLUX.1 dev", SWAPPED, PICTURES, "Samples with and without it."),
    ("flux2_lora", "Train a FLUX.2 LoRA", "FLUX.2 klein", STREAMS, PICTURES, "FLUX.2 dev trains the same way."),
    ("qwen_image_lora", "Train a Qwen-Image LoRA", "Qwen-Image", STREAMS, PICTURES, ""),
    ("z_image_lora", "Train a Z-Image LoRA", "Z-Image", STREAMS, PICTURES, "It works on Z-Image-Turbo too."),
    ("krea2_lora", "Train a Krea 2 LoRA", "Krea 2", STREAMS, PICTURES, "Trains on Raw, samples on Turbo."),
    ("chroma_lora", "Train a Chroma LoRA", "Chroma", STREAMS, PICTURES, ""),
    ("anima_lora", "Train an Anima LoRA", "Anima", STREAMS, PICTURES, "Captions may be tags or sentences."),
    ("sdxl_lora", "Train an SDXL LoRA", "SDXL", WHOLE, PICTURES, "Illustrious and Pony train the same way."),
    ("wan_t2v_lora", "Train a Wan LoRA on clips", "Wan 2.1", STREAMS, CLIPS, "Text to video."),
    ("wan_i2v_lora", "Train a Wan image to video LoRA", "Wan 2.1 I2V", STREAMS, CLIPS, ""),
    ("wan22_two_experts_lora", "Train Wan 2.2's two experts", "Wan 2.2", STREAMS, CLIPS, ""),
    ("hunyuan_video15_lora", "Train a HunyuanVideo 1.5 LoRA", "HunyuanVideo 1.5", STREAMS, CLIPS, ""),
    ("ltx_video_lora", "Train an LTX-Video LoRA", "LTX-Video", WHOLE, CLIPS, ""),
    ("ltx2_3_lora", "Train an LTX-2.3 LoRA", "LTX-2.3", "16 GB or more", CLIPS, "The sound isn't trained."),
    ("minimax_h3_lora", "Train a MiniMax H3 LoRA", "MiniMax H3", STREAMS, CLIPS, "Made with its training adapter."),
    ("flux_kontext_lora", "Train a FLUX Kontext LoRA on edits", "FLUX.1 Kontext", STREAMS, EDITS, ""),
    ("qwen_edit_lora", "Train a Qwen-Image-Edit LoRA", "Qwen-Image-Edit", STREAMS, EDITS, ""),
    ("lora_with_everything", "Train a LoRA with every option", "FLUX.1 dev", SWAPPED, PICTURES, "Made for a face."),
    ("lora_with_validation", "Train with validation", "FLUX.1 dev", SWAPPED, PICTURES, "Keeps the best LoRA."),
    ("everything_at_once", "Train compiled, with block swap", "FLUX.1 dev", SWAPPED, PICTURES, ""),
    ("compare_loras", "Compare the saves of a run", "FLUX.1 dev", WHOLE, NONE, "One grid for all saves."),
    ("flux_compile", "Compile FLUX to sample faster", "FLUX.1 dev", WHOLE, NONE, ""),
    ("qwen_image_compile", "Compile Qwen-Image to sample faster", "Qwen-Image", WHOLE, NONE, ""),
    ("wan_compile", "Compile Wan to sample faster", "Wan 2.1", WHOLE, NONE, ""),
    ("flux_block_swap", "Sample FLUX with block swap", "FLUX.1 dev", SWAPPED, NONE, "Compiled as well."),
    ("qwen_image21_lora", "Train a Qwen Image 2.1 LoRA", "Qwen Image 2.1", STREAMS, PICTURES, "ComfyUI 0.37 or newer."),
    ("prepare_folder", "Prepare a folder of pictures", "", "not needed", "your pictures", "Checks them and captions."),
    ("which_picture_hurts", "Find out which picture hurts", "FLUX.1 dev", SWAPPED, PICTURES, "At two sizes."),
    ("flux3_klein_lora", "Train a FLUX 3 Klein LoRA", "FLUX 3 Klein", STREAMS, PICTURES, "Never tried on the model."),
    ("ltx2_5_lora", "Train an LTX-2.5 LoRA", "LTX-2.5", STREAMS, CLIPS, "Never tried on the model."),
    ("age_slider", "Train an age slider", "FLUX.1 dev", SWAPPED, NO_PICTURES, "Two prompts are all it takes."),
]
CARDS = {
    name: Card(f"{number} {title}", f"{title}{f', on {model}' if model else ''}. {hint}".strip(), model, card, data)
    for number, (name, title, model, card, data, hint) in enumerate(_ROWS)
}


def draw(card: Card, colour: str) -> Image.Image:
    """A thumbnail, which the frontend shows about 300 pixels wide: few words, large."""
    image = Image.new("RGB", SIZE, GROUND)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, 36, SIZE[1]), fill=colour)
    number, _, title = card.title.partition(" ")
    y = 60
    for line in _lines(pen, title, 96):
        pen.text((100, y), line, INK, font=_font(96))
        y += 112
    pen.text((100, 360), card.model, colour, font=_fitting(pen, card.model, 92))
    pen.text((100, 500), f"GPU: {card.card}", FAINT, font=_font(64))
    pen.text((100, 590), card.data if card.data != NONE else "samples, no training", FAINT, font=_font(64))
    width = pen.textlength(number, font=_font(150))
    pen.text((SIZE[0] - 60 - width, 520), number, colour, font=_font(150))
    return image


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _fitting(pen: ImageDraw.ImageDraw, text: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    while pen.textlength(text, font=_font(size)) > SIZE[0] - 160:
        size -= 4
    return _font(size)


def _lines(pen: ImageDraw.ImageDraw, text: str, size: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font=_font(size)) > SIZE[0] - 160:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def colour_of(name: str, card: Card) -> str:
    """By kind: pictures, edits, clips, and what does not train."""
    colours = {PICTURES: "#5b9bc2", EDITS: "#b58ad1", CLIPS: "#7fb069", NONE: "#e8b75d"}
    return colours.get(card.data, "#d9774b")


def locale() -> dict[str, object]:
    """Titles and descriptions by the keys of ComfyUI's frontend."""
    titles = {name: card.title for name, card in CARDS.items()}
    texts = {name: card.text for name, card in CARDS.items()}
    return {
        "templateWorkflows": {
            "category": dict.fromkeys(FOLDERS, "Tessera: LoRA training"),
            "template": dict.fromkeys(FOLDERS, titles),
            "templateDescription": dict.fromkeys(FOLDERS, texts),
        }
    }


def main() -> None:
    for name, card in CARDS.items():
        draw(card, colour_of(name, card)).save(ROOT / "workflows" / f"{name}.jpg", quality=88, optimize=True)
    path = ROOT / "locales" / "en" / "main.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(locale(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

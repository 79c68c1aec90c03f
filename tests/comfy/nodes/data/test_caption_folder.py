"""The node Caption Folder: its inputs, and captions in ComfyUI's own folders by a tiny vision-language model."""

import folder_paths
import pytest
from PIL import Image
from tessera.nodes.captions.caption_folder import TesseraCaptionFolder
from tiny.data.image_encoders import load_qwen3vl_clip


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two pictures in ComfyUI's input folder; the second has a caption."""
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path / "input"))
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))
    folder = tmp_path / "input" / "photos"
    folder.mkdir(parents=True)
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (56, 28), colour).save(folder / f"{name}.png")
    (folder / "b.txt").write_text("mine")
    return folder


def run(folder="input/photos", **inputs):
    return TesseraCaptionFolder.PREPARE_CLASS_CLONE(None).execute(folder=folder, max_words=1, **inputs)


def test_missing_captions_are_written_and_others_stay(photos):
    clip = load_qwen3vl_clip()
    output = run(clip=clip, trigger_words="ohwx")
    assert output.result[0].startswith("Captions written: 1, left as they were: 1.")
    caption = (photos / "a.txt").read_text(encoding="utf-8")
    assert caption.startswith("ohwx, ") and (photos / "b.txt").read_text() == "mine"
    again = run(clip=clip, trigger_words="ohwx", existing_captions="append")
    assert again.result[0].startswith("Captions written: 1, written before: 1.")
    assert (photos / "a.txt").read_text(encoding="utf-8") == caption
    assert (photos / "b.txt").read_text(encoding="utf-8").startswith("ohwx, mine, ")


def test_inputs_that_name_no_model_or_two_are_refused(photos):
    with pytest.raises(ValueError, match="Nothing writes captions yet; connect clip"):
        run()
    with pytest.raises(ValueError, match="clip and tagger are both set"):
        run(clip=object(), tagger="wd.onnx")
    assert TesseraCaptionFolder.validate_inputs("input/../user").startswith("folder: ")
    assert TesseraCaptionFolder.validate_inputs("input/photos") is True
    assert sorted(file.name for file in photos.iterdir()) == ["a.png", "b.png", "b.txt"]

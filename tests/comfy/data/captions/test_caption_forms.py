"""Captions of several forms: each is encoded as core encodes its text, shown as often as asked, and costs no graph."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import comfy.model_management
import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy.stats import binomtest
from tessera.compile.settings import CompileSettings
from tessera.data.captions.options import CaptionOptions
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.folders.options import FolderOptions
from tessera.data.media.clip_windows import Extraction
from tessera.data.preparation.prepare import summary
from tessera.data.samples import FIRST_VARIANT, SampleVariant
from tessera.nodes.data import prepare as data_nodes
from tessera.train.train_lora import RunRequest, train_lora
from tiny.compile.compiling import Graphs
from tiny.data.films import write_film
from tiny.data.image_encoders import load_flux2_vae, load_klein_clip, load_mistral_clip, load_seeing_qwen_clip
from tiny.data.preparing import prepare
from tiny.train.runs import Watcher, cancel_at, run_settings, train

LINES = CaptionOptions(caption_per_line=True, wildcards=True, caption_dropout=0.2)
TAGS = CaptionOptions(shuffle_tags=True, tag_dropout=0.1, caption_dropout=0.3, caption_variants=6)
LONG = "tree " * 260
CAPTIONS = {"a": f"a (red) fox\n{LONG}\n", "b": "a {grey|white} wolf", "c": "a house"}


def write_pictures(folder, captions, size=(64, 96)):
    folder.mkdir(exist_ok=True)
    for index, (name, caption) in enumerate(captions.items()):
        pixels = np.random.default_rng(index).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
        if caption is not None:
            (folder / f"{name}.txt").write_text(caption)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_pictures(tmp_path / "photos", CAPTIONS)


@pytest.fixture
def encoders(tiny_files):
    """The VAE and the CLIP of a family."""

    def load(name):
        if name == "flux":
            return tiny.load_vae(tiny_files["vae"]), tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"])
        if name in ("klein", "mistral"):
            return load_flux2_vae(), load_klein_clip() if name == "klein" else load_mistral_clip()
        vae = tiny.load_vae(tiny_files["wan_vae"])
        return vae, tiny.load_wan_clip(tiny_files["umt5"]) if name == "wan" else load_seeing_qwen_clip(
            tiny_files["qwen"]
        )

    return load


def prepared(dataset, vae, clip, root, **changes):
    options = {"megapixels": 0.006, "max_graphs": 1, "fit": "ragged edge", "max_text_length": 512}
    with torch.inference_mode():
        options |= {"control_megapixels": 0.006, "cache_dir": root / "cache"}
        return prepare(dataset, vae, clip, **options | changes)


def core(clip, text, length):
    """Conditioning that core's CLIP Text Encode gives of a literal text; FLUX.1's T5 padded to at least `length`."""
    literal = text.replace("(", "\\(").replace(")", "\\)")
    tokens = clip.tokenize(literal, **({"tokenizer_options": {"t5xxl_min_length": length}} if length else {}))
    with torch.inference_mode():
        ((cond, extra),) = clip.encode_from_tokens_scheduled(tokens)
    return cond, {name: value for name, value in extra.items() if value is not None}


def assert_same(tensors, cond, extra):
    assert torch.equal(tensors.text, cond)
    for name, value in extra.items():
        assert torch.equal(tensors.conditioning[name], value), name


@pytest.mark.parametrize("name", ["flux", "klein", "mistral", "wan", "qwen"])
def test_each_form_and_the_empty_prompt_is_encoded_as_core_encodes_its_text(name, encoders, folder, tmp_path):
    vae, clip = encoders(name)
    prepared_data = prepared(scan_images(folder, trigger_words="ohwx", captions=LINES), vae, clip, tmp_path)
    texts = {
        "a.png": ("ohwx, a (red) fox", f"ohwx, {LONG.strip()}"),
        "b.png": ("ohwx, a grey wolf", "ohwx, a white wolf"),
        "c.png": ("ohwx, a house",),
    }
    for sample in prepared_data.data.samples:
        forms = texts[sample.name]
        assert (sample.caption_variants, sample.caption_dropout) == (len(forms), 0.2)
        length = sample.text_length if name == "flux" else 0
        if sample.name == "c.png" or name in ("flux", "qwen"):  # the others' are alike
            for number, text in enumerate(forms):
                assert_same(sample.load(SampleVariant(0, number)), *core(clip, text, length))
        assert_same(sample.load(SampleVariant(0, None)), *core(clip, "", length))
        assert torch.equal(sample.load().text, sample.load(SampleVariant(0, 0)).text)
    # All forms of a picture share a key, that of the longest.
    short = {"flux": 256, "qwen": 128}.get(name, 512)
    assert {s.name: s.text_length for s in prepared_data.data.samples} == {"a.png": 512, "b.png": short, "c.png": short}
    # Five forms, and the empty prompt once for each length that core gives it.
    files = len(list((tmp_path / "cache").rglob("*.safetensors"))) - 3
    assert files == 5 + (2 if name == "flux" else 1)
    byte_count = sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*.safetensors") if "cond" in load_file(f))
    assert (
        f"The 3 captions have up to 2 forms each: {files} texts, each encoded once, about {byte_count / 1e9:.2g} GB on "
        "disk."
    ) in summary(prepared_data)
    assert "The empty prompt takes a caption's place in 20 % of showings." in summary(prepared_data)


def test_an_edit_models_empty_prompt_is_its_template_with_the_control_pictures(encoders, folder, tmp_path):
    from comfy_extras.nodes_qwen import TextEncodeQwenImageEditPlus

    vae, clip = encoders("qwen")
    controls = write_pictures(tmp_path / "before", dict.fromkeys(CAPTIONS))
    (folder / "a.png").unlink()
    mirrored = FolderOptions(flip="horizontal")
    dataset = scan_images(folder, control_folder=controls, captions=LINES, options=mirrored)
    prepared_data = prepared(dataset, vae, clip, tmp_path)
    texts = {"b.png": ("a grey wolf", "a white wolf"), "c.png": ("a house",)}
    for sample in prepared_data.data.samples:
        image = torch.from_numpy(np.array(Image.open(controls / sample.name))).float()[None] / 255
        _, height, width = sample.grid
        assert (height * 16, width * 16) == image.shape[1:3]  # nothing is cropped
        assert (sample.image_variants, sample.caption_variants) == (2, len(texts[sample.name]))
        for number, text in [*enumerate(texts[sample.name]), (None, "")]:
            for picture, view in enumerate((image, image.flip(2))):
                with torch.inference_mode():
                    (((cond, _),),) = TextEncodeQwenImageEditPlus.execute(clip, text, image1=view).result
                assert torch.equal(sample.load(SampleVariant(picture, number)).text, cond)
    empty = [sample.load(SampleVariant(0, None)).text for sample in prepared_data.data.samples]
    assert not torch.equal(empty[0], empty[1])


def test_films_take_forms_for_all_their_clips(encoders, tmp_path):
    (tmp_path / "films").mkdir()
    write_film(tmp_path / "films" / "a.mp4", 10, size=(64, 96), caption="a, b, c, d, e")
    vae, clip = encoders("wan")
    dataset = scan_videos(tmp_path / "films", Extraction((5,), method="chunk"), trigger_words="ohwx", captions=TAGS)
    prepared_data = prepared(dataset, vae, clip, tmp_path, megapixels=0.003)
    assert len(prepared_data.data.samples) == 2 and {s.caption_variants for s in prepared_data.data.samples} == {
        len(dataset.entries[0].variants.texts)
    }
    for number, text in enumerate(dataset.entries[0].variants.texts):
        assert text == "ohwx" or text.startswith("ohwx, ")
        assert_same(prepared_data.data.samples[1].load(SampleVariant(0, number)), *core(clip, text, 0))


def tag_data(folder, vae, clip, root, options=TAGS):
    for name in CAPTIONS:
        (folder / f"{name}.txt").write_text(f"{name}, b, c, d, e")
    return prepared(scan_images(folder, trigger_words="ohwx", captions=options), vae, clip, root).data


def counted(sample, counts):
    """The sample, which counts in `shown` the captions that are read of it."""

    def load(choice=FIRST_VARIANT):
        counts[choice.caption] += 1
        return sample.load(choice)

    return replace(sample, load=load)


def test_training_shows_the_forms_without_a_text_encoder_and_the_same_ones_after_a_resume(
    tiny_flux, tiny_files, folder, tmp_path
):
    vae, clip = tiny.load_vae(tiny_files["vae"]), tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"])
    data = tag_data(folder, vae, clip, tmp_path)
    freed = weakref.ref(clip.cond_stage_model), weakref.ref(vae.first_stage_model)
    del clip, vae
    comfy.model_management.unload_all_models()
    gc.collect()
    assert [ref() for ref in freed] == [None, None]

    counts: Counter = Counter()
    watched = replace(data, samples=tuple(counted(sample, counts) for sample in data.samples))
    options = {"batch_size": 2, "steps": 6}
    whole = train(tiny_flux, watched, tmp_path / "whole", **options)
    assert counts[None] > 0 and len(counts) > 3  # of 12 showings
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        train(tiny_flux, data, tmp_path / "cut", cancel_at(3), **options)
    watcher = Watcher()
    resumed = train(tiny_flux, data, tmp_path / "cut", watcher, **options)
    assert "Resumed at step 3." in watcher.notes and resumed.loss == whole.loss
    assert all(torch.equal(resumed.lora[name], whole.lora[name]) for name in whole.lora)
    plain = replace(data, samples=tuple(replace(s, caption_variants=1, caption_weights=()) for s in data.samples))
    plain = replace(plain, samples=tuple(replace(s, caption_dropout=0.0) for s in plain.samples), fingerprint="plain")
    assert train(tiny_flux, plain, tmp_path / "plain", **options | {"steps": 1}).loss != whole.loss[:1]


def test_over_an_epoch_of_many_steps_the_loop_shows_the_empty_prompt_as_often_as_asked(
    tiny_flux, tiny_vae, tiny_clip, folder, tmp_path
):
    data = tag_data(folder, tiny_vae, tiny_clip, tmp_path)
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, batch_size=2, gradient_accumulation=2)
    batches = iter([(0, 1)] * 2000)
    draws = [
        choices
        for step in range(1000)
        for micro in trainer.train_step.batches.order.next_micro_batches(batches, step)
        for choices in micro
    ]
    trainer.close()
    assert len(draws) == 4000
    empty = sum(choice.caption is None for _, choice in draws)
    assert binomtest(empty, 4000, TAGS.caption_dropout).pvalue > 0.001
    weights = data.samples[0].caption_weights
    first = sum(choice.caption == 0 for index, choice in draws if index == 0)
    captioned = sum(choice.caption is not None for index, choice in draws if index == 0)
    assert binomtest(first, captioned, weights[0]).pvalue > 0.001


@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_forms_of_any_length_share_the_graphs_of_the_longest(name, encoders, tiny_files, folder, tmp_path):
    vae, clip = encoders(name)
    (folder / "b.txt").unlink(), (folder / "b.png").unlink()
    for other in "ac":
        (folder / f"{other}.txt").write_text(f"a fox\n{LONG}")
    data = prepared(scan_images(folder, captions=LINES), vae, clip, tmp_path).data
    assert len(data.graph_keys()) == 1
    torch._dynamo.reset()
    graphs = Graphs()
    model = tiny.load_flux(tiny_files["flux"]) if name == "flux" else tiny.load_qwen_image(tiny_files["qwen_image"])
    settings = run_settings(steps=5, compile="auto", save_every=0, batch_size=2)
    result = train_lora(RunRequest(model, data, settings, tmp_path / "run", Watcher(), CompileSettings("eager")))
    assert graphs() == result.summary["graphs_planned"] == (2 if name == "flux" else 1)


def test_each_option_changes_the_data_and_none_leaves_it_as_it_was(folder, tiny_vae, tiny_clip, tmp_path):
    changes = [
        {"caption_dropout": 0.1},
        {"caption_dropout": 0.2},
        {"shuffle_tags": True},
        {"shuffle_tags": True, "keep_tokens": 2},
        {"shuffle_tags": True, "caption_variants": 9},
        {"tag_dropout": 0.1},
        {"tag_dropout": 0.2},
        {"caption_per_line": True},
        {"wildcards": True},
        {"shuffle_tags": True, "keep_tokens_separator": "#"},
    ]
    for name in "bc":
        (folder / f"{name}.png").unlink()
    (folder / "a.txt").write_text("a, {b|c}, # c, d\ne, f")

    def fingerprint(captions=None):
        return prepared(scan_images(folder, captions=captions), tiny_vae, tiny_clip, tmp_path).data.fingerprint

    plain = fingerprint()
    assert plain == fingerprint(CaptionOptions()) == fingerprint(CaptionOptions(caption_variants=3))
    names = [plain, *(fingerprint(CaptionOptions(**change)) for change in changes)]
    assert len(set(names)) == len(names)
    often = []
    for caption in ("{a|b}", "{a|a|b}"):  # the same forms, not as often
        (folder / "a.txt").write_text(caption)
        often.append(fingerprint(CaptionOptions(wildcards=True)))
    assert often[0] != often[1]


def test_progress_counts_each_text_once(folder, tiny_vae, tiny_clip, tmp_path):
    messages = []
    for name in CAPTIONS:
        (folder / f"{name}.txt").write_text("a fox\na dog")
    prepared(
        scan_images(folder, captions=LINES),
        tiny_vae,
        tiny_clip,
        tmp_path,
        progress=lambda *args: messages.append(args),
    )
    assert messages[-1] == (3, 3, "Encoding captions: 3 of 3") and (2, 3, "Reading captions: 2 of 3") in messages


@pytest.mark.parametrize("node", [data_nodes.TesseraImageFolder, data_nodes.TesseraVideoFolder])
def test_both_nodes_hand_their_options_on(node, tmp_path, monkeypatch):
    from tessera.nodes.data import folders

    monkeypatch.setattr(folders, "resolve_folder", lambda choice: tmp_path)
    write_pictures(tmp_path, {"a": "x, {1|2}, y ||| z, z2\nq"})
    write_film(tmp_path / "a.mp4", 5, caption=(tmp_path / "a.txt").read_text())
    options = {
        "caption_dropout": 0.25,
        "shuffle_tags": True,
        "keep_tokens": 1,
        "tag_dropout": 0.125,
        "caption_per_line": True,
        "wildcards": True,
        "caption_variants": 5,
        "keep_tokens_separator": "|||",
    }
    schema = {i.id: getattr(i, "default", None) for i in node.GET_SCHEMA().inputs}
    assert {name: schema[name] for name in options} == vars(CaptionOptions())
    (dataset,) = node.execute(folder="f", trigger_words="t", **options).result
    scanned = scan_images(tmp_path, trigger_words="t", captions=CaptionOptions(**options))
    assert dataset.entries[0].variants == scanned.entries[0].variants and not dataset.entries[0].variants.plain
    with pytest.raises(ValueError, match=r"caption_variants is 1, so shuffle_tags would always show the same version"):
        node.execute(folder="f", shuffle_tags=True, caption_variants=1)

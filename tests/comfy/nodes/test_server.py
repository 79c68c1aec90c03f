"""The server fixture runs prompts, reports errors and survives being killed."""

import pytest
from comfy_server import ServerFailure, error_of
from PIL import Image
from tiny.nodes.prompt import ksampler, node


def text_to_image(loaders, steps=2, size=(128, 64)):
    width, height = size
    return loaders | {
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "latent": node("EmptySD3LatentImage", width=width, height=height, batch_size=1),
        "sampled": ksampler("model", steps=steps),
        "picture": node("VAEDecode", samples=["sampled", 0], vae=["vae", 0]),
        "saved": node("SaveImage", images=["picture", 0], filename_prefix="server_test"),
    }


def test_core_loaders_and_sampler_make_a_picture_with_the_tiny_models(server, tiny_loaders):
    entry = server.run(text_to_image(tiny_loaders))
    (image,) = entry["outputs"]["saved"]["images"]
    with Image.open(server.base / "output" / image["filename"], formats=["PNG"]) as picture:
        assert picture.size == (128, 64)
        assert max(high - low for low, high in picture.getextrema()) > 10


def test_a_prompt_that_core_refuses_fails_with_its_answer(server, tiny_loaders):
    prompt = text_to_image(tiny_loaders)
    prompt["vae"]["inputs"] = {"vae_name": "absent.safetensors"}
    with pytest.raises(ServerFailure, match="absent.safetensors"):
        server.queue(prompt)


def test_an_interrupted_prompt_ends_with_a_history_entry_that_says_so(server, tiny_loaders):
    prompt_id = server.queue(text_to_image(tiny_loaders, steps=10000))
    server.wait_until_running(prompt_id)
    entry = server.cancel(prompt_id)
    assert entry["status"]["status_str"] == "error"
    assert "interrupted" in error_of(entry)


def test_a_killed_server_starts_again_over_the_same_folders(own_server, tiny_loaders):
    own_server.start()
    own_server.queue(text_to_image(tiny_loaders, steps=10000))
    own_server.kill()
    own_server.start()
    assert own_server.run(text_to_image(tiny_loaders))["status"]["completed"]

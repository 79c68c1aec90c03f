"""Trainings that let other prompts of the queue pass, on a real server."""

import time

import pytest
from PIL import Image
from safetensors.torch import load_file
from tessera.train.runs.run_record import RunReader
from tiny.nodes.prompt import ksampler, node
from tiny.nodes.routes import ask
from tiny.nodes.server_runs import paused_at, put_pictures, training_graph, wait_for_step

JSON = {"Content-Type": "application/json"}
PASS = {"while_others_wait": "let them pass", "minutes_between_pauses": 0.0, "steps": 10, "save_every": 1}


def picture(color):
    image = node("EmptyImage", width=16, height=16, batch_size=1, color=color)
    return {"image": image, "saved": node("SaveImage", images=["image", 0], filename_prefix=f"passing{color}")}


def sampler_graph(tiny_loaders, steps):
    """Core's KSampler over the same model as the trainings'."""
    return tiny_loaders | {
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a sign"),
        "latent": node("EmptyLatentImage", width=32, height=32, batch_size=1),
        "sampler": ksampler("model", steps=steps),
        "decoded": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "saved": node("SaveImage", images=["decoded", 0], filename_prefix="sampled"),
    }


def summary_of(entry):
    return entry["outputs"]["train"]["tessera"][0]


def follow(server, prompt_id):
    """Return the history entries of a prompt and of those that went on with it, and the last one's id."""
    entries = [server.wait(prompt_id)]
    while summary_of(entries[-1])["status"] == "paused":
        prompt_id = summary_of(entries[-1])["next_prompt_id"]
        entries.append(server.wait(prompt_id))
    return entries, prompt_id


def started(entry):
    return next(m["timestamp"] for kind, m in entry["status"]["messages"] if kind == "execution_start")


def tensors(server, entry):
    return load_file(server.base / "output" / summary_of(entry)["path"])


@pytest.fixture
def uninterrupted(server, tiny_loaders):
    """The LoRA of the same run without others; made by the first test that needs it."""
    put_pictures(server.base)
    return tensors(server, server.run(training_graph(tiny_loaders, "alone", **PASS)))


@pytest.mark.parametrize("resume", ["latest", "off"])
def test_a_training_that_pauses_twice_gives_the_bits_of_one_that_does_not(resume, server, tiny_loaders, uninterrupted):
    name = f"pausing_{resume}"
    graph = training_graph(tiny_loaders, name, **PASS | {"resume": resume})
    graph["behind"] = node("TesseraSaveLora", lora=["train", 0], filename_prefix=name, format="kohya", dtype="fp32")
    graph["beside"] = node("SaveImage", images=["image0", 0], filename_prefix=f"{name}_beside")
    prompt_id, pictures = server.queue(graph), []
    for number, step in enumerate((3, 7)):
        with paused_at(server, step):
            wait_for_step(server, name, step - 1, prompt_id if not number else "unknown")
            pictures += [server.queue(picture(100 * step + index)) for index in range(2 - number)]
    entries, _ = follow(server, prompt_id)
    assert [summary_of(entry)["status"] for entry in entries] == ["paused", "paused", "finished"]
    assert [summary_of(entry)["steps_done"] for entry in entries] == [3, 7, 10]
    assert all(entry["status"]["status_str"] == "success" for entry in entries)
    starts = [started(server.history(id)) for id in pictures]
    assert started(entries[0]) < starts[0] < starts[1] < started(entries[1]) < starts[2] < started(entries[2])
    expected, actual = uninterrupted, tensors(server, entries[-1])
    assert expected.keys() == actual.keys() and all(expected[key].equal(actual[key]) for key in expected)
    assert len({summary_of(entry)["folder"] for entry in entries}) == 1
    # Each output is made once: the picture beside the training in the first prompt, the LoRA behind it in the last.
    savers = [entry["outputs"].keys() & {"beside", "behind"} for entry in entries]
    assert savers == [{"beside"}, set(), {"behind"}]
    assert len(list((server.base / "output").glob(f"{name}_beside*"))) == 1
    assert len(list((server.base / "output").glob(f"{name}_0*.safetensors"))) == 1
    (note,) = (text for text in summary_of(entries[-1])["notes"] if text.startswith("Paused"))
    assert note.startswith("Paused 2 times for 3 other prompts so far; the last pause took ")


def options_graph(tiny_loaders, name):
    """Training with previews, validation, an average of weights and a learning rate that changes at every step."""
    graph = training_graph(tiny_loaders, name, **PASS, optimizer=["optimizer", 0])
    schedule = {"lr_scheduler": "cosine", "warmup_steps": 2, "ema_decay": 0.8, "max_grad_norm": 1.0}
    preview = {"vae": ["vae", 0], "positive": ["positive", 0], "width": 32, "height": 32, "steps": 2, "cfg": 1.0}
    preview |= {"sampler_name": "euler", "scheduler": "simple", "seed": 1, "seeds": 1, "at_start": True}
    validation = {"part": 0.5, "at_start": True, "keep_best": True, "seed": 0, "min_sigma": 0.0, "max_sigma": 1.0}
    graph["optimizer"] = node("TesseraOptimizer", optimizer="adamw", learning_rate=1e-3, **schedule)
    graph["preview"] = node("TesseraPreview", every_n_steps=2, **preview)
    graph["validation"] = node("TesseraValidation", every_n_steps=1, **validation)
    graph["train"]["inputs"] |= {"preview": ["preview", 0], "validation": ["validation", 0]}
    return graph


def record_of(server, entry):
    """Losses, learning rates and validation losses of a run by its record, and the pixels of its previews."""
    folder = (server.base / "output" / summary_of(entry)["path"]).parent
    curve = RunReader(folder).read()
    pictures = {}
    for path in sorted(folder.glob("previews/*.png")):
        with Image.open(path, formats=["PNG"]) as opened:
            pictures[path.name] = opened.convert("RGB").tobytes()
    return curve.loss, curve.validation, pictures


def test_previews_validation_averages_and_schedule_do_not_notice_a_pause(server, tiny_loaders):
    put_pictures(server.base)
    whole = server.run(options_graph(tiny_loaders, "watched_whole"))
    prompt_id = server.queue(options_graph(tiny_loaders, "watched"))
    for step in (3, 6):  # one pause between two previews, one at a preview
        with paused_at(server, step):
            wait_for_step(server, "watched", step - 1, prompt_id if step == 3 else "unknown")
            server.queue(sampler_graph(tiny_loaders, 2 if step == 3 else 1))
    entries, _ = follow(server, prompt_id)
    assert [summary_of(entry)["steps_done"] for entry in entries] == [3, 6, 10]
    expected, actual = tensors(server, whole), tensors(server, entries[-1])
    assert expected.keys() == actual.keys() and all(expected[key].equal(actual[key]) for key in expected)
    loss, validation, pictures = record_of(server, whole)
    assert (len(loss), len(validation), len(pictures)) == (10, 11, 7)  # previews of 0, 2, … 10 and their strip
    assert record_of(server, entries[-1]) == (loss, validation, pictures)


def test_a_server_that_dies_in_a_pause_loses_nothing(own_server, tiny_loaders):
    put_pictures(own_server.base)
    own_server.start()
    whole = tensors(own_server, own_server.run(training_graph(tiny_loaders, "whole", **PASS)))
    with paused_at(own_server, 3):
        prompt_id = own_server.queue(training_graph(tiny_loaders, "killed", **PASS))
        wait_for_step(own_server, "killed", 2, prompt_id)
        own_server.queue(sampler_graph(tiny_loaders, 6))
        (own_server.base / "hold").write_text("4")  # the training passes and pauses, the sampler waits at its step 4
        assert summary_of(own_server.wait(prompt_id))["status"] == "paused"
        own_server.kill()
    own_server.start()
    (run,) = own_server.get("/tessera/runs?name=killed")["runs"]
    details = own_server.get(f"/tessera/runs/{run['id']}")
    assert (details["status"], details["next_prompt_id"]) == ("paused", "")
    status, answer = ask(own_server, "/tessera/go_on", "POST", {"prompt_id": prompt_id}, **JSON)
    assert status == 409 and "queue its workflow again to go on" in answer["error"]
    resumed = own_server.run(own_server.get(f"/tessera/runs/{run['id']}/workflow?prompt=1")["prompt"])
    actual = tensors(own_server, resumed)
    assert "Resumed at step 3." in summary_of(resumed)["notes"]
    assert whole.keys() == actual.keys() and all(whole[key].equal(actual[key]) for key in whole)


def test_trainings_keep_their_order_and_pictures_go_first(server, tiny_loaders, uninterrupted):
    names = ("earlier", "later")
    graphs = [training_graph(tiny_loaders, name, **PASS | {"steps": 6}) for name in names]
    with paused_at(server, 2):
        first = server.queue(graphs[0])
        wait_for_step(server, "earlier", 1, first)
        second = server.queue(graphs[1])
        pictures = [server.queue(picture(number)) for number in (1, 2)]
    (paused, resumed), _ = follow(server, first)
    (later,), _ = follow(server, second)
    order = [paused, *(server.wait(id) for id in pictures), resumed, later]
    starts = [started(entry) for entry in order]
    assert starts == sorted(starts)
    assert summary_of(paused)["steps_done"] == 2 and summary_of(later)["steps_done"] == 6


def test_a_prompt_whose_training_is_finished_passes_like_a_picture(server, tiny_loaders, uninterrupted):
    done = training_graph(tiny_loaders, "done_before", **PASS | {"steps": 2})
    server.run(done)
    done["again"] = node("TesseraSaveLora", lora=["train", 0], filename_prefix="again", format="kohya", dtype="fp16")
    with paused_at(server, 2):
        prompt_id = server.queue(training_graph(tiny_loaders, "longer", **PASS))
        wait_for_step(server, "longer", 1, prompt_id)
        other = server.queue(done)
    entries, _ = follow(server, prompt_id)
    assert len(entries) == 2 and started(server.wait(other)) < started(entries[1])


def test_a_training_that_was_ended_is_not_queued_again(server, tiny_loaders, uninterrupted):
    with paused_at(server, 2):
        prompt_id = server.queue(training_graph(tiny_loaders, "ended", **PASS))
        wait_for_step(server, "ended", 1, prompt_id)
        server.queue(picture(3))
        server.post("/interrupt", {})
    entry = server.wait(prompt_id)
    assert entry["status"]["status_str"] == "error"
    time.sleep(0.5)
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}


def test_a_paused_prompt_goes_on_when_its_user_says_so(server, tiny_loaders, uninterrupted):
    graph = training_graph(tiny_loaders, "by_hand", **{**PASS, "while_others_wait": "finish first"})
    with paused_at(server, 4):
        prompt_id = server.queue(graph)
        wait_for_step(server, "by_hand", 3, prompt_id)
        (run,) = server.get("/tessera/runs?name=by_hand")["runs"]
        path, body = f"/tessera/runs/{run['id']}", {"prompt_id": prompt_id}
        assert ask(server, "/tessera/go_on", "POST", body, **JSON)[0] == 409
        assert ask(server, f"{path}/pause", "POST", body, **JSON)[0] == 200
    entry = server.wait(prompt_id)
    assert (summary_of(entry)["status"], summary_of(entry)["next_prompt_id"]) == ("paused", "")
    assert server.get("/queue")["queue_pending"] == []
    told = server.get(path)
    assert (told["status"], told["text"]) == ("paused", "Paused at step 4 and saved.")
    assert (told["next_prompt_id"], told["ahead"]) == ("", 0)
    status, answer = ask(server, "/tessera/go_on", "POST", body, **JSON)
    assert status == 200
    resumed = server.wait(answer["prompt_id"])
    actual = tensors(server, resumed)
    assert summary_of(resumed)["status"] == "finished"
    assert all(uninterrupted[key].equal(actual[key]) for key in uninterrupted)

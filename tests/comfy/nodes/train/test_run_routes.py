"""The routes of a run on a real server: what a page that was not there, or a later server, finds of it."""

import json
import os
import shutil
import time
from io import BytesIO
from urllib.parse import quote

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from comfy_server import DIRECT, PATIENCE
from PIL import Image
from tessera.common.untrusted.budgets import PAGE_REQUEST
from tessera.common.untrusted.in_flight import PixelGate
from tessera.nodes.common import answers, asked_by
from tessera.nodes.train import run_deletion, run_files, run_routes
from tessera.train.preview import thumbnails
from tiny.nodes.prompt import awaited, node
from tiny.nodes.routes import ask
from tiny.nodes.server_runs import newest_step, paused_at, put_pictures, training_graph, wait_for_step


def listed(server, name):
    return server.get(f"/tessera/runs?name={quote(name)}")["runs"]


def run_of(server, name, since=0):
    return server.get(f"/tessera/runs/{listed(server, name)[0]['id']}?since={since}")


def wait_for(server, name, is_there):
    end = time.monotonic() + 60
    while not is_there(run := run_of(server, name)):
        assert time.monotonic() < end, run
        time.sleep(0.05)
    return run


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def status_of(server, path, method="GET", **headers):
    return ask(server, path, method, **headers)[0]


def test_a_run_that_is_queued_over_the_api_is_seen_killed_and_gone_on_with(own_server, tiny_loaders):
    put_pictures(own_server.base)
    own_server.start()
    with paused_at(own_server, 20):
        prompt_id = own_server.queue(training_graph(tiny_loaders, "seen"))
        wait_for_step(own_server, "seen", 18, prompt_id)
        details = wait_for(own_server, "seen", lambda run: run["step"] >= 19)
        (entry,) = listed(own_server, "seen")
        assert (
            details["running"] and entry["running"] and details["node"] == "train" and details["prompt_id"] == prompt_id
        )
        assert (details["output_name"], details["steps"], details["status"]) == ("seen", 40, "")
        assert [point[0] for point in details["loss"]] == list(range(1, details["step"] + 1))
        assert [point[0] for point in run_of(own_server, "seen", 15)["loss"]] == list(range(16, details["step"] + 1))
        assert details["saves"][:3] == [2, 4, 6] and details["seconds_per_step"] > 0
        own_server.kill()
    own_server.start()
    killed = run_of(own_server, "seen")  # its curve is there, and that it trains no more
    assert not killed["running"] and killed["status"] == "" and killed["loss"] == details["loss"]
    summary = own_server.run(training_graph(tiny_loaders, "seen"))["outputs"]["train"]["tessera"][0]
    whole = run_of(own_server, "seen")
    assert [point[1] for point in whole["loss"]] == summary["loss"] and len(summary["loss"]) == 40
    means = [sum(last) / len(last) for step in range(40) if (last := summary["loss"][max(0, step - 9) : step + 1])]
    assert [point[3] for point in whole["loss"]] == pytest.approx(means)
    assert whole["status"] == "finished" and whole["notes"] == summary["notes"]
    assert run_of(own_server, "seen", 25)["loss"] == whole["loss"][25:]
    assert whole["loss_ends"] == [pytest.approx(sum(part) / 2) for part in (summary["loss"][:2], summary["loss"][-2:])]
    assert (
        whole["timed_from"] in details["saves"] and 0 < whole["seconds"] < 600
    )  # from the state that was gone on from
    assert whole["can_go_on"] and details["lora"] == ""
    loaders = own_server.get("/object_info/LoraLoaderModelOnly")["LoraLoaderModelOnly"]
    assert whole["lora"] in loaders["input"]["required"]["lora_name"][0]
    assert whole["lora"].endswith("seen.safetensors")
    falls = {"optimizer": "adamw", "learning_rate": 1e-3, "lr_scheduler": "cosine"}
    falls |= {"warmup_steps": 0, "max_grad_norm": 1.0}
    graph = training_graph(tiny_loaders, "falling", steps=2, save_every=0, optimizer=["falls", 0])
    own_server.run(graph | {"falls": node("TesseraOptimizer", **falls)})
    falling = run_of(own_server, "falling")
    assert falling["status"] == "finished" and not falling["can_go_on"]  # its rate has come to its end
    assert falling["timed_from"] == 0


def post_status(server, path, body, **headers):
    return ask(server, path, "POST", body, **headers)[0]


JSON = {"Content-Type": "application/json"}


def test_an_origin_that_is_no_address_is_refused():
    headers = JSON | {"Host": "localhost", "Origin": "http://[::"}
    refused = asked_by.refused_post(make_mocked_request("POST", "/", headers=headers))
    assert refused is not None and refused.status == 403


@pytest.mark.parametrize(
    "body", [b'{"order": [1]}', b'{"order": [1], "x": "%s"}' % (b"y" * 2_000_000), b"[" * 500, b"\xff"]
)
def test_requests_of_pages_are_read_within_their_budget(body):
    pieces = [body[start : start + 65_536] for start in range(0, len(body), 65_536)]
    pieces_read = []

    class Content:
        async def iter_any(self):
            for piece in pieces:
                pieces_read.append(piece)
                yield piece

    request = make_mocked_request("POST", "/", payload=Content())
    answer = awaited(asked_by.posted_object(request))
    assert answer == ({"order": [1]} if body == b'{"order": [1]}' else {})
    assert sum(map(len, pieces_read)) <= PAGE_REQUEST.bytes + 65_536  # the rest stays unread


def test_numbers_that_json_lacks_leave_as_null():
    assert answers.answer({"loss": [float("nan"), float("inf"), 1.0]}).text == '{"loss": [null, null, 1.0]}'


def test_only_a_page_of_this_server_stops_the_run_that_trains_and_queued_again_it_goes_on(server, tiny_loaders):
    put_pictures(server.base)
    (other := server.base / "output" / "loras" / "other (001)").mkdir(parents=True)
    (other / "run.json").write_text("{}")
    graph = training_graph(tiny_loaders, "kept", save_every=0)
    graph["saved"] = node("TesseraSaveLora", lora=["train", 0], filename_prefix="kept", format="kohya", dtype="fp16")
    with paused_at(server, 9):
        prompt_id = server.queue(graph)
        wait_until(lambda: listed(server, "kept"))
        wait_for(server, "kept", lambda run: run["step"] >= 8)
        url, body = f"/tessera/runs/{listed(server, 'kept')[0]['id']}", {"prompt_id": prompt_id}
        host = server.url.removeprefix("http://")
        for headers, payload, answer in [
            (JSON | {"Sec-Fetch-Site": "cross-site"}, body, 403),
            (JSON | {"Sec-Fetch-Site": "same-site"}, body, 403),
            (JSON | {"Origin": "http://evil.example"}, body, 403),
            (JSON | {"Origin": "null"}, body, 403),
            ({"Content-Type": "text/plain"}, body, 415),
            ({"Content-Type": "application/x-www-form-urlencoded"}, body, 415),
            (JSON, {"prompt_id": "another"}, 409),
            (JSON, {"prompt_id": ""}, 409),
            (JSON, {"prompt_id": ["x"]}, 400),
            (JSON, [], 400),
            (JSON, {"prompt_id": prompt_id, "x": "x" * 1_000_000}, 400),
            (JSON, {"prompt_id": prompt_id, "x": [[[[[[]]]]]]}, 400),
        ]:
            assert post_status(server, f"{url}/sample", payload, **headers) == answer, (headers, payload)
            assert post_status(server, f"{url}/stop", payload, **headers) == answer, (headers, payload)
        assert post_status(server, f"/tessera/runs/{'0' * 16}/stop", body, **JSON) == 404
        other_at = f"/tessera/runs/{listed(server, 'other')[0]['id']}"
        for command in ("save", "stop"):  # of another run, though the prompt is the one that trains
            assert post_status(server, f"{other_at}/{command}", body, **JSON) == 409
        shutil.rmtree(other)
        assert post_status(server, f"{url}/delete", body, **JSON, Origin=f"http://{host}") == 409  # it is in training
        assert (server.base / "output" / "loras" / "kept (001)" / "run.json").is_file()
        assert post_status(server, f"/tessera/runs/{'0' * 16}/sample", body, **JSON) == 404
        assert post_status(server, f"{url}/sample", body, **JSON) == 409  # it has no Training Preview
        assert status_of(server, f"{url}/stop") in (404, 405)  # a link or a picture can't ask
        assert post_status(server, f"{url}/save", body, **JSON, Origin=f"http://{host}") == 200
        assert post_status(server, f"{url}/stop", body, **JSON, **{"Sec-Fetch-Site": "same-origin"}) == 200
    outputs = server.wait(prompt_id)["outputs"]
    (summary,) = outputs["train"]["tessera"]
    assert summary["status"] == "stopped" and 8 <= summary["steps_done"] < 12
    assert summary["path"].endswith("kept.safetensors") and "saved" in outputs  # the graph went on
    assert run_of(server, "kept")["status"] == "stopped"
    report = server.base / "output" / "loras" / "kept (001)" / "report.html"
    assert "Stopped and kept at step" in report.read_text()
    assert post_status(server, f"{url}/stop", body, **JSON) == 409  # it trains no more
    repeat = server.run(graph)["outputs"]["train"]["tessera"][0]  # the very same prompt
    assert f"Resumed at step {summary['steps_done']}." in repeat["notes"]
    assert repeat["status"] == "finished" and repeat["loss"][: summary["steps_done"]] == summary["loss"]
    assert "Finished after" in report.read_text()


def test_the_routes_refuse_foreign_pages_by_themselves():
    """ComfyUI's own check, which is off under --enable-cors-header, is not there."""

    async def answers(path):
        routes = web.RouteTableDef()
        run_routes.add_routes(routes)
        run_deletion.add_routes(routes)
        app = web.Application()
        app.add_routes(routes)
        async with TestClient(TestServer(app)) as client:
            address = client.make_url(path)
            home = f"http://{address.authority}"
            foreign = [
                "http://evil.example",
                f"{home}.evil.example",
                f"http://{address.host}",
                f"http://{address.host}:1",
                "null",
            ]
            foreign += ["http://[", f"http://evil.example#{home}", f"http://{address.authority}@evil.example", ""]
            statuses = []
            for headers in (
                *({"Origin": origin} for origin in foreign),
                *({"Origin": home, "Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "none", "")),
                *([] if path.endswith("empty") else [{"Origin": home, "Sec-Fetch-Site": "same-origin"}]),
            ):
                async with client.post(path, json={"prompt_id": "x"}, headers=headers) as answer:
                    statuses.append(answer.status)
        return statuses

    for path in ("stop", "save", "sample", "delete", "restore"):
        *refused, own_status = awaited(answers(f"/tessera/runs/{'0' * 16}/{path}"))
        assert set(refused) == {403} and own_status == 404, (path, refused, own_status)  # no run has this id
    assert set(awaited(answers("/tessera/trash/empty"))) == {403}


def test_a_run_that_is_deleted_while_it_is_looked_for_is_no_run(tmp_path, monkeypatch):
    folders = [tmp_path / f"fading ({number:03})" for number in (1, 2)]
    for folder in folders:
        folder.mkdir()
        (folder / "run.json").write_text('{"output_name": "fading"}')
    original = run_routes.own_file

    def deleted_after(folder, name):
        path = original(folder, name)
        if path == folders[0] / "run.json":
            path.unlink()
        return path

    monkeypatch.setattr(run_routes, "runs_folder", lambda: tmp_path)
    monkeypatch.setattr(run_routes, "own_file", deleted_after)
    assert [run["folder"] for run in run_routes.Runs().by_output_name("fading")] == ["fading (002)"]


def test_cancel_is_told_with_the_step_that_was_saved(server, tiny_loaders):
    put_pictures(server.base)
    with paused_at(server, 10):
        prompt_id = server.queue(training_graph(tiny_loaders, "stopped"))
        wait_for_step(server, "stopped", 4, prompt_id)
        (newer := server.base / "output" / "loras" / "stopped (002)").mkdir()
        (newer / "run.json").write_text("{}")
        os.utime(newer / "run.json", (2e9, 2e9))
        assert [run["running"] for run in listed(server, "stopped")] == [True, False]
        shutil.rmtree(newer)
        server.interrupt()
    server.wait(prompt_id)
    details = run_of(server, "stopped")
    assert details["status"] == "cancelled" and not details["running"]
    assert details["text"] == f"Stopped at step {newest_step(server, 'stopped')} and saved; Run goes on from there."


def test_files_that_no_run_has_are_refused_and_nothing_outside_is_told(server):
    loras = server.base / "output" / "loras"
    (outside := server.base / "outside (001)").mkdir()
    (outside / "run.json").write_text(json.dumps({"output_name": "outside"}))
    loras.mkdir(exist_ok=True)
    (loras / "hostile (001)").mkdir()
    facts = '{"output_name": ["<b>"], "steps": "many", "model": NaN, "can_go_on": 1}'
    (loras / "hostile (001)" / "run.json").write_text(facts)
    if os.name != "nt":
        (loras / "outside (001)").symlink_to(outside, target_is_directory=True)
        assert listed(server, "outside") == []
    for name in ("../outside", "/etc", "..", "a\x00b", "", "C:\\x"):
        assert status_of(server, f"/tessera/runs?name={quote(name)}") == 400, name
    assert listed(server, "absent") == []
    for name in ("pair_low_noise (001)", "pair_high_noise (001)", "pair_other (001)"):
        (loras / name).mkdir()
        (loras / name / "run.json").write_text("{}")
    assert {run["folder"] for run in listed(server, "pair")} == {"pair_low_noise (001)", "pair_high_noise (001)"}
    for folder in loras.glob("pair_*"):
        shutil.rmtree(folder)
    (entry,) = listed(server, "hostile")
    details = server.get(f"/tessera/runs/{entry['id']}")
    assert (details["output_name"], details["steps"], details["model"], details["loss"]) == ("", 0, "", [])
    assert (details["lora"], details["loss_ends"], details["seconds"], details["can_go_on"]) == ("", None, None, False)
    for id in ("0" * 16, "hostile%20(001)", "..%2Foutside%20(001)", "%2e%2e"):
        assert status_of(server, f"/tessera/runs/{id}") == 404, id
    for since in ("-1", "x", "1e9", "9" * 30, "٣"):
        assert status_of(server, f"/tessera/runs/{entry['id']}?since={quote(since)}") == 400, since
    assert status_of(server, "/tessera/runs?name=hostile", **{"Sec-Fetch-Site": "cross-site"}) == 403
    assert status_of(server, "/tessera/runs?name=hostile", "POST") == 405
    shutil.rmtree(loras / "hostile (001)")
    assert status_of(server, f"/tessera/runs/{entry['id']}") == 404


def fetched(server, path):
    with DIRECT.open(server.url + path, timeout=PATIENCE) as reply:
        return reply.headers, reply.read()


def test_previews_are_given_by_step_and_row_and_nothing_else_is(server):
    loras = server.base / "output" / "loras"
    (folder := loras / "shown (001)" / "previews").mkdir(parents=True)
    (loras / "shown (001)" / "run.json").write_text("{}")
    Image.new("RGB", (640, 320), "teal").save(folder / "step000004_0.png")
    clip = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    clip[0].save(folder / "step000004_1.webp", save_all=True, append_images=clip[1:], duration=100)
    (folder / "step000005_0.png").write_text("<script>hostile()</script>")
    (secret := server.base / "secret.png").write_bytes((folder / "step000004_0.png").read_bytes())
    places = [(4, 0), (4, 1), (5, 0), (6, 0), (7, 0), (8, 0), (-1, 0)]
    shots = [{"step": step, "row": row, "title": ["<b>"], "settings": {}, "frames": 1 + row} for step, row in places]
    (folder / "previews.json").write_text(json.dumps(shots))
    with open(folder / "step000008_0.png", "wb") as large:
        large.truncate(65 << 20)
    if os.name != "nt":
        (folder / "step000006_0.png").symlink_to(secret)
        (folder / "step000007_0.png").symlink_to(folder / "step000007_0.png")
    (entry,) = listed(server, "shown")
    url = f"/tessera/runs/{entry['id']}/previews"
    previews = server.get(url)["previews"]
    assert [(shot["step"], shot["row"]) for shot in previews] == [(4, 0), (4, 1), (5, 0), (8, 0)]
    assert {shot["title"] for shot in previews} == {""}
    headers, data = fetched(server, f"{url}/4/0")
    assert data == secret.read_bytes()
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == ("image/png", "nosniff")
    assert fetched(server, f"{url}/4/1")[0]["Content-Type"] == "image/webp"
    assert fetched(server, f"{url}/5/0")[0]["Content-Type"] == "image/png"  # never text/html
    for row, size in [(0, (192, 96)), (1, (64, 64))]:
        headers, data = fetched(server, f"{url}/4/{row}?small=1")
        assert headers["Content-Type"] == "image/webp"
        assert Image.open(BytesIO(data), formats=["WEBP"]).size == size
    wrong = ["6/0", "7/0", "8/0", "8/0?small=1", "5/0?small=1", "9/0", "-1/0", "4/../../run.json", "4/0.png", "4/x"]
    for place in [*wrong, "%2e%2e/0", "999999999/0", "4/99999", "٤/0"]:
        assert status_of(server, f"{url}/{quote(place, safe='/?=%')}") in (403, 404), place
    assert status_of(server, f"{url}/4/0", "POST") == 405
    assert status_of(server, f"/tessera/runs/{'0' * 16}/previews/4/0") == 404
    assert status_of(server, f"/tessera/runs/{'0' * 16}/saves") == 404
    for text in ('[{"step": 1e999, "row": 0, "title": "", "settings": {}, "frames": 1}]', "[" * 100_000, '{"a": 1}'):
        (folder / "previews.json").write_text(text)
        assert server.get(url) == {"previews": []}
    if os.name != "nt":
        folder.rename(elsewhere := server.base / "previews_elsewhere")
        folder.symlink_to(elsewhere, target_is_directory=True)
        assert server.get(url) == {"previews": []} and status_of(server, f"{url}/4/0") == 404
    shutil.rmtree(loras / "shown (001)")
    assert status_of(server, url) == 404


def test_a_preview_that_is_made_anew_has_a_thumbnail_of_its_own_though_it_is_as_long(tmp_path):
    (folder := tmp_path / "previews").mkdir()
    path = folder / "step000004_0.png"
    for second, colour in enumerate([(255, 0, 0), (0, 0, 255)]):
        Image.new("RGB", (640, 320), colour).save(buffer := BytesIO(), "PNG")
        path.write_bytes(buffer.getvalue().ljust(20_000, b"\0"))
        os.utime(path, (second, second))
        data, _ = run_files.read_preview(tmp_path, 4, 0, small=True)
        near = Image.open(BytesIO(data), formats=["WEBP"]).convert("RGB").getpixel((9, 9))
        assert max(abs(a - b) for a, b in zip(near, colour, strict=True)) < 30, second


def test_a_preview_of_more_pixels_than_any_has_no_thumbnail(tmp_path, monkeypatch):
    """The next larger bound is PIL's own, at nearly three times as many."""

    class Gate(PixelGate):
        def decoding(self, pixels):
            pixel_counts.append(pixels)
            return super().decoding(pixels)

    pixel_counts: list[int] = []
    monkeypatch.setattr(thumbnails, "page_pixels", Gate(1))
    (folder := tmp_path / "previews").mkdir()
    for rows, is_made in ((8000, True), (8001, False)):
        Image.new("1", (8000, rows)).save(folder / "step000004_0.png")
        assert (run_files.read_preview(tmp_path, 4, 0, small=True) is not None) == is_made
    assert pixel_counts == [64_000_000]


def test_saves_are_named_by_step_the_finished_one_last_and_of_many_some(server):
    loras = server.base / "output" / "loras"
    (folder := loras / "saves (001)").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "saves_steps").mkdir()
    for step in range(0, 2_000_000, 100_000):
        (folder / "saves_steps" / f"saves-step{step:06d}.safetensors").touch()
    (folder / "saves.safetensors").touch()
    files = server.get(f"/tessera/runs/{listed(server, 'saves')[0]['id']}/saves")["loras"]
    assert len(files) == 12 and files[0].endswith("step000000.safetensors")
    assert files[-2].endswith("step1800000.safetensors") and files[-1] == "saves (001)/saves.safetensors"
    shutil.rmtree(folder)

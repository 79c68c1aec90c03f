"""The list of all runs, their workflows, and their deletion, on a real server and by hostile requests."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from comfy_server import DIRECT, PATIENCE
from safetensors.torch import save_file
from server import create_block_external_middleware
from tessera.common.files import MACHINE
from tessera.nodes.common import asked_by
from tessera.nodes.train import run_deletion, run_files
from tessera.train.preflight.claim import lock_folder
from tessera.train.runs.run_folder import RunFolder
from tiny.nodes.prompt import awaited
from tiny.nodes.routes import ask
from tiny.nodes.server_runs import paused_at, put_pictures, training_graph, wait_for_step


def ask_status(server, path, method="POST", **headers):
    """The status and the answer. A header of None is not sent."""
    usual = {"Content-Type": "application/json", "Origin": server.url} if method == "POST" else {}
    header_fields = {name: value for name, value in (usual | headers).items() if value is not None}
    return ask(server, path, method, {} if method == "POST" else None, **header_fields)


def listed(server, query=""):
    return server.get(f"/tessera/runs?{query}")


def make_run(server, place, **facts):
    folder = server.base / "output" / "loras" / place
    folder.mkdir(parents=True)
    name = folder.name.partition(" (")[0]
    (folder / "run.json").write_text(json.dumps({"output_name": name, "model": "a.safetensors", "steps": 4, **facts}))
    (folder / f"{name}.safetensors").write_bytes(b"lora")
    return folder


@pytest.fixture
def run(server):
    """A run that is listed: its folder, and the path of its routes."""
    folder = make_run(server, "gone/fox (001)")
    (entry,) = listed(server, "filter=gone/fox")["runs"]
    yield folder, f"/tessera/runs/{entry['id']}"
    shutil.rmtree(server.base / "output" / "loras" / "gone", ignore_errors=True)
    shutil.rmtree(server.base / "output" / ".tessera-trash", ignore_errors=True)


def test_all_runs_are_listed_two_hundred_a_page_and_found_by_words(server):
    for number in range(1, 206):
        make_run(server, f"many/wolf ({number:03d})", steps=number)
    make_run(server, "many/fox (001)", model="<b>flux</b>.safetensors", steps="x", started=["x"])
    first, second = (listed(server, f"filter=MANY/&page={page}") for page in (0, 1))
    assert (first["count"], first["pages"], len(first["runs"]), len(second["runs"])) == (206, 2, 200, 6)
    assert listed(server, "filter=many/&page=9")["runs"] == []
    runs = first["runs"] + second["runs"]
    assert len({run["id"] for run in runs}) == 206 and not any(run["running"] for run in runs)
    (fox,) = listed(server, "filter=flux%20many/")["runs"]
    assert (fox["folder"], fox["model"], fox["steps"]) == ("many/fox (001)", "<b>flux</b>.safetensors", 0)
    assert fox["started"] == "" and abs(fox["changed"] - time.time()) < 600
    assert server.get(f"/tessera/runs/{fox['id']}")["last_lora"] == os.path.join("many", "fox (001)", "fox.safetensors")
    for page in ("-1", "x", "1e9", "9" * 30):
        assert ask_status(server, f"/tessera/runs?page={page}", "GET")[0] == 400
    for points in ("2", "2001", "x", "-4"):
        assert ask_status(server, f"/tessera/runs/{fox['id']}?points={points}", "GET")[0] == 400
    shutil.rmtree(server.base / "output" / "loras" / "many")


def test_a_sparkline_has_as_many_points_as_were_asked_for_and_the_newest_save_stands_in(server, run):
    folder, url = run
    lines = [{"kind": "step", "step": step, "loss": 1 / step, "rate": 1e-4} for step in range(1, 301)]
    (folder / "progress.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [len(server.get(f"{url}{query}")["loss"]) for query in ("", "?points=41")] == [300, 40]
    (folder / "fox.safetensors").unlink()
    assert server.get(url)["last_lora"] == ""
    (folder / "fox_steps").mkdir()
    for step in (100, 200):
        (folder / "fox_steps" / f"fox-step{step:06d}.safetensors").touch()
    details = server.get(url)
    assert details["lora"] == "" and details["last_lora"].endswith("fox-step000200.safetensors")
    loaders = server.get("/object_info/LoraLoaderModelOnly")["LoraLoaderModelOnly"]
    assert details["last_lora"] in loaders["input"]["required"]["lora_name"][0]
    if os.name != "nt":
        shutil.move(folder / "fox_steps", server.base / "elsewhere_steps")
        (folder / "fox_steps").symlink_to(server.base / "elsewhere_steps", target_is_directory=True)
        assert server.get(url)["last_lora"] == ""


def test_the_newest_lora_is_handed_out_where_a_stopped_run_went_on_and_was_cancelled(server, run):
    folder, url = run
    save_file({"a": torch.zeros(1)}, folder / "fox.safetensors", {"ss_steps": "200"})
    assert server.get(url)["lora"] == os.path.join("gone", "fox (001)", "fox.safetensors")
    (folder / "fox_steps").mkdir()
    for step in (150, 410):
        (folder / "fox_steps" / f"fox-step{step:06d}.safetensors").touch()
    details, newest = server.get(url), os.path.join("gone", "fox (001)", "fox_steps", "fox-step000410.safetensors")
    assert (details["lora"], details["last_lora"]) == (newest, newest)
    save_file({"a": torch.zeros(1)}, folder / "fox.safetensors", {"ss_steps": "410"})  # the run went on to its end
    assert server.get(url)["lora"].endswith("fox.safetensors")


def test_a_page_at_a_name_that_this_server_does_not_know_asks_nothing_of_a_run(server, run):
    _, url = run
    elsewhere = {"Host": "rebound.example:8188", "Origin": "http://rebound.example:8188"}
    body = {"prompt_id": "a"}
    usual = {"Content-Type": "application/json"}
    for command in ("save", "sample", "stop"):
        status, reply = ask(server, f"{url}/{command}", "POST", body, **usual, **elsewhere)
        assert status == 403 and '{"hosts": ["rebound.example"]}' in reply["error"], reply
    settings = server.base / "user" / "tessera.json"
    try:
        settings.write_text('{"hosts": ["Rebound.example"]}')
        assert ask(server, f"{url}/save", "POST", body, **usual, **elsewhere)[0] == 409  # it doesn't train
        settings.write_text('{"hosts": "rebound.example"}')
        assert "write a list of names" in ask(server, f"{url}/save", "POST", body, **usual, **elsewhere)[1]["error"]
    finally:
        settings.unlink()


def test_a_run_is_deleted_by_a_page_of_this_server_and_comes_back(server, run):
    folder, url = run
    (folder / "mine.txt").write_text("mine")
    status, reply = ask_status(server, f"{url}/delete", **{"Sec-Fetch-Site": "same-origin", "Origin": server.url})
    assert (status, reply["folder"], reply["left"]) == (200, "gone/fox (001)", 1)
    assert (server.base / "output" / reply["trash"] / "fox.safetensors").read_bytes() == b"lora"
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]
    assert listed(server, "filter=gone/fox")["count"] == 0 and ask_status(server, f"{url}/delete")[0] == 404
    status, reply = ask_status(server, f"{url}/restore")
    assert (status, reply["folder"]) == (200, "gone/fox (001)") and (folder / "fox.safetensors").read_bytes() == b"lora"
    assert listed(server, "filter=gone/fox")["count"] == 1 and ask_status(server, f"{url}/restore")[0] == 404
    assert not (server.base / "output" / ".tessera-trash").exists()
    assert ask_status(server, f"{url}/delete")[0] == 200
    (folder / "run.json").write_text("{}")
    status, reply = ask_status(server, f"{url}/restore")
    assert status == 409 and reply["error"].startswith("fox (001) is the folder of another run by now")


def test_deleted_runs_are_listed_with_their_size_and_removed_for_good(server, run):
    folder, url = run
    other = make_run(server, "gone/fox (002)")
    assert server.get("/tessera/trash") == {"runs": [], "bytes": 0}
    size = sum(file.stat().st_size for file in folder.iterdir())
    for entry in listed(server, "filter=gone/fox")["runs"]:
        assert ask_status(server, f"/tessera/runs/{entry['id']}/delete")[0] == 200
    reply = server.get("/tessera/trash")
    assert {run["folder"]: run["bytes"] for run in reply["runs"]} == {"gone/fox (001)": size, "gone/fox (002)": size}
    assert reply["bytes"] == 2 * size and {len(run["day"]) for run in reply["runs"]} == {10}
    id = url.rpartition("/")[2]
    assert ask_status(server, f"{url}/restore")[0] == 200
    assert [run["id"] != id for run in server.get("/tessera/trash")["runs"]] == [True]
    assert ask_status(server, "/tessera/trash/empty") == (200, {"removed": 1})
    assert server.get("/tessera/trash") == {"runs": [], "bytes": 0} and not other.exists() and folder.exists()
    assert not (server.base / "output" / ".tessera-trash").exists()
    assert ask_status(server, "/tessera/trash/empty") == (200, {"removed": 0})


@pytest.mark.parametrize("action", ["delete", "restore", "empty"])
def test_nobody_else_deletes_or_restores(server, run, action):
    folder, url = run
    if action != "delete":
        assert ask_status(server, f"{url}/delete")[0] == 200
    asks = "/tessera/trash/empty" if action == "empty" else f"{url}/{action}"
    files = sorted((server.base / "output").rglob("*"))
    for headers, answer in [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),  # no browser; a proxy may have made the Host that of this machine
        *(({name: "203.0.113.7"}, 403) for name in ("X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Forwarded")),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),  # a name that was made to lead to this server
        ({"Host": "192.168.0.7:8188", "Origin": "http://192.168.0.7:8188"}, 403),
        ({"Host": "[::", "Origin": None}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data"}, 415),
    ]:
        status, reply = ask_status(server, asks, **headers)
        assert status == answer, (headers, reply)
    for path in [
        *("/tessera/runs/" + "0" * 16, "/tessera/runs/fox (001)".replace(" ", "%20"), "/tessera/runs/%2e%2e"),
        *("/tessera/runs/gone%2Ffox%20(001)", "/tessera/runs/..%2F..%2Floras", f"{url}%2F.."),
    ]:
        assert ask_status(server, f"{path}/{action}")[0] in (404, 405), path
    assert ask_status(server, asks, "GET")[0] in (404, 405)
    assert sorted((server.base / "output").rglob("*")) == files and folder.exists() == (action == "delete")


def test_a_server_that_others_reach_deletes_only_where_its_user_allows_it(server, run):
    _, url = run
    settings = server.base / "user" / "tessera.json"
    elsewhere = {"Host": "my-server.example:8188", "Origin": "http://my-server.example:8188"}
    status, reply = ask_status(server, f"{url}/delete", **elsewhere)
    assert status == 403 and '{"delete_runs": true}' in reply["error"] and "tessera.json" in reply["error"]
    assert ask_status(server, "/tessera/deleting", "GET", Host="my-server.example")[1]["off"] == reply["error"]
    assert ask_status(server, "/tessera/deleting", "GET", Forwarded="for=203.0.113.7")[1]["off"] == reply["error"]
    assert server.get("/tessera/deleting") == {"off": ""}
    try:
        settings.write_text('{"delete_runs": "yes"}')
        status, reply = ask_status(server, f"{url}/delete", **elsewhere)
        assert status == 403 and reply["error"].endswith("has 'yes' under \"delete_runs\"; write true or false.")
        settings.write_text('{"delete_runs": true}')
        assert ask_status(server, f"{url}/delete", **elsewhere)[0] == 200
    finally:
        settings.unlink()


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1", False), ("127.0.0.1,::1", False), ("localhost", False), ("127.8.8.8", False),
        ("0.0.0.0", True), ("0.0.0.0,::", True), ("127.0.0.1,192.168.0.7", True), ("", True), ("my-server", True),
    ],
)  # fmt: skip
def test_deleting_is_off_where_the_server_listens_beyond_this_machine(monkeypatch, listen, expected):
    monkeypatch.setattr(asked_by.args, "listen", listen)
    assert bool(run_deletion.why_off({"Host": "localhost:8188"})) == expected
    assert run_deletion.why_off({"Host": "[::"}) and run_deletion.why_off({})
    assert not expected or "can be reached from other machines" in run_deletion.why_off({"Host": "[::1]:8188"})


def test_a_file_that_cannot_be_read_is_named_and_not_taken_for_a_dead_server(monkeypatch, tmp_path):
    def unreadable(folder):  # as a share is that went away
        raise PermissionError(13, "Permission denied", str(folder.path / "progress.jsonl"))

    monkeypatch.setattr(run_deletion.known_runs, "folder", lambda id: RunFolder(tmp_path / "fox (001)", "fox"))
    monkeypatch.setattr(run_deletion, "_check_over", unreadable)
    headers = {"Host": "localhost", "Origin": "http://localhost", "Content-Type": "application/json"}
    request = make_mocked_request("POST", "/", headers=headers, match_info={"id": "0"})
    answer = awaited(run_deletion.delete_run(request))
    assert answer.status == 409
    sentence = "progress.jsonl: Permission denied; make sure that ComfyUI may read and move the files of this run."
    assert json.loads(answer.text) == {"error": sentence}


def test_training_runs_are_never_deleted(server, tiny_loaders):
    put_pictures(server.base)
    with paused_at(server, 9):
        prompt_id = server.queue(training_graph(tiny_loaders, "trains", steps=12))
        wait_for_step(server, "trains", 4, prompt_id)
        (entry,) = listed(server, "filter=trains")["runs"]
        url = f"/tessera/runs/{entry['id']}"
        assert entry["running"]
        status, reply = ask_status(server, f"{url}/delete")
        assert (status, reply["error"]) == (409, "trains (001) is in training; stop it first.")
        workflow = server.get(f"{url}/workflow")  # from the beginning on
        assert workflow["prompt"]["train"]["class_type"] == "TesseraTrainLora"
    server.wait(prompt_id)
    assert server.get(url)["status"] == "finished" and not listed(server, "filter=trains")["runs"][0]["running"]
    assert ask_status(server, f"{url}/delete")[0] == 200
    assert not (server.base / "output" / "loras" / "trains (001)").exists()
    summary = server.run(training_graph(tiny_loaders, "trains", steps=12))["outputs"]["train"]["tessera"][0]
    assert "trains (002)" in summary["path"] or "trains (002)" in summary["folder"]  # numbers are not given twice
    assert ask_status(server, f"{url}/restore")[0] == 200


def test_a_run_of_another_process_or_machine_is_not_deleted(server, run, monkeypatch):
    folder, url = run
    with lock_folder(folder):  # this process is another one than the server's
        status, reply = ask_status(server, f"{url}/delete")
        assert (status, reply["error"]) == (409, "fox (001) is in training in another ComfyUI; stop it there first.")
    (folder / "run.json").write_text('{"machine": "ffffffff"}')
    status, reply = ask_status(server, f"{url}/delete")
    assert status == 409 and "may be in training on another machine" in reply["error"]
    (folder / "progress.jsonl").write_text('{"kind": "end", "status": "finished", "text": ""}\n')
    assert ask_status(server, f"{url}/delete")[0] == 200
    assert ask_status(server, f"{url}/restore")[0] == 200
    (folder / "progress.jsonl").unlink()
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))
    assert ask_status(server, f"{url}/delete")[0] == 200


def test_a_run_of_a_living_process_with_other_temporary_files_is_not_deleted(server, run):
    folder, url = run
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (folder / "run.json").write_text(json.dumps({"machine": MACHINE, "process": other.pid}))
        (folder / "progress.jsonl").write_text('{"kind": "start"}\n')
        status, reply = ask_status(server, f"{url}/delete")
        assert (status, reply["error"]) == (409, "fox (001) is in training in another ComfyUI; stop it there first.")
        other.stdin.close()
    assert ask_status(server, f"{url}/delete")[0] == 200


def test_a_run_whose_name_is_no_utf8_is_deleted_and_brought_back(server):
    folder = make_run(server, os.fsdecode(b"gone/wolf\xff (001)"))
    (entry,) = listed(server, "filter=gone/wolf")["runs"]
    url = f"/tessera/runs/{entry['id']}"
    assert ask_status(server, f"{url}/delete")[0] == 200 and not folder.exists()
    assert ask_status(server, f"{url}/restore")[0] == 200 and folder.exists()
    shutil.rmtree(folder.parent)


def test_copied_run_folder_is_json_that_a_browser_reads(server, run):
    folder, url = run
    losses = [{"kind": "step", "step": n, "loss": 1.7e308, "rate": 1e308} for n in (1, 2, 3)]
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    (folder / f"{folder.name.partition(' (')[0]}.api.json").write_text('{"1": {"class_type": "A", "x": 1e999}}')
    details = server.get(url)
    assert [point[1] for point in details["loss"]] == [1e30] * 3 and details["loss_ends"] == [1e30, 1e30]
    assert server.get(f"{url}/workflow")["prompt"]["1"]["x"] is None


def test_the_report_of_a_run_is_a_page_that_may_load_nothing(server, run):
    folder, url = run
    with DIRECT.open(f"{server.url}{url}/report", timeout=PATIENCE) as reply:
        assert reply.headers.get_content_type() == "text/html" and reply.headers["X-Content-Type-Options"] == "nosniff"
        policy = reply.headers["Content-Security-Policy"]
        assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"
        assert f"<h1>{folder.name}</h1>" in reply.read().decode()
    assert ask(server, f"{url}/report?beside={'0' * 16}")[0] == 404  # never half of what was asked for


def test_the_report_keeps_its_policy_where_comfyui_sets_one_for_all(tmp_path, monkeypatch):
    """As with --disable-api-nodes."""
    (tmp_path / "fox (001)").mkdir()
    (tmp_path / "fox (001)" / "run.json").write_text('{"output_name": "fox"}')
    monkeypatch.setattr(run_files.known_runs, "folder", lambda id: RunFolder(tmp_path / "fox (001)", "fox"))

    async def policies():
        routes = web.RouteTableDef()
        run_files.add_routes(routes)
        app = web.Application(middlewares=[create_block_external_middleware()])
        app.add_routes(routes)
        by_route = []
        async with TestClient(TestServer(app)) as client:
            for name in ("report", "saves"):
                async with client.get(f"/tessera/runs/{'0' * 16}/{name}") as reply:
                    assert reply.status == 200 and (name == "saves" or "<h1>fox (001)</h1>" in await reply.text())
                    by_route.append(reply.headers["Content-Security-Policy"])
        return by_route

    of_report, of_saves = awaited(policies())
    assert of_report == run_files.PAGE_HEADERS["Content-Security-Policy"]
    assert of_saves.startswith("default-src 'self'; script-src")


def test_a_workflow_is_given_as_it_was_queued_and_no_file_beside_it(server, run):
    folder, url = run
    assert ask_status(server, f"{url}/workflow", "GET")[1]["error"].startswith("This run has no workflow")
    (folder / "fox.api.json").write_text('{"1": {"class_type": "A", "is_changed": NaN}}')
    assert server.get(f"{url}/workflow") == {"prompt": {"1": {"class_type": "A", "is_changed": None}}}
    (folder / "fox.workflow.json").write_text('{"nodes": []}')
    assert server.get(f"{url}/workflow") == {"workflow": {"nodes": []}}
    for text in ("[" * 100_000, "[1]", '"x"', "{", "{}"):
        (folder / "fox.workflow.json").write_text(text)
        assert "prompt" in server.get(f"{url}/workflow")
    if os.name != "nt":
        for name in ("fox.workflow.json", "fox.api.json"):
            (folder / name).unlink()
            (folder / name).symlink_to(server.base / "user" / "default" / "comfy.settings.json")
        assert ask_status(server, f"{url}/workflow", "GET")[0] == 404
    with open(folder / "fox.x", "wb") as large:
        large.write(b'{"nodes": [], "x": "')
        large.truncate(33 << 20)
    os.replace(folder / "fox.x", folder / "fox.workflow.json")
    assert ask_status(server, f"{url}/workflow", "GET")[0] == 404
    assert ask_status(server, f"/tessera/runs/{'0' * 16}/workflow", "GET")[0] == 404


@pytest.mark.skipif(os.name == "nt", reason="links need rights")
def test_a_folder_that_became_a_link_is_not_deleted(server, run):
    folder, url = run
    outside = server.base / "outside_run"
    folder.rename(outside)
    folder.symlink_to(outside, target_is_directory=True)
    assert ask_status(server, f"{url}/delete")[0] == 404 and ask_status(server, f"{url}/workflow", "GET")[0] == 404
    assert (outside / "fox.safetensors").is_file() and listed(server, "filter=gone/fox")["count"] == 0

"""Processes of torchrun meet those of their own start, however many machines join, and whatever each counts."""

import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist
from tessera.train.distributed.rendezvous import common_name

# Trains for nobody: it meets, writes down whom, and goes on until torchrun starts it again.
SCRIPT = """
import importlib.util, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist

spec = importlib.util.spec_from_file_location("rendezvous", sys.argv[1])
rendezvous = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rendezvous)
folder, machine = Path(sys.argv[2]), os.environ["MACHINE"]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
name = rendezvous.common_name(dist.PrefixStore("tessera", store), rank, size, 60)
own = dist.PrefixStore(name, store)
fault = own.check(["fault"])
own.set(f"met/{rank}", "yes")
own.wait([f"met/{other}" for other in range(size)], timedelta(seconds=60))
line = f"{size} {machine}{os.environ['TORCHELASTIC_RESTART_COUNT']} {fault}"
(folder / f"{name} {rank}").write_text(line)
if size == 4 and (folder / "failed").exists():
    time.sleep(1 if rank == 0 else 0)  # the store may be in this process
    sys.exit(0)
own.set("fault", "yes")
time.sleep(1)
if size == 4 and machine == "a" and os.environ["LOCAL_RANK"] == "1":
    (folder / "failed").touch()
    sys.exit(1)
time.sleep(120)
"""


LAST = ["4 a1 False"] * 2 + ["4 b0 False"] * 2  # a counts its failure for itself
BOTH = ["4 a0 False"] * 2 + ["4 b0 False"] * 2
CASES = {
    "one store for all starts": ("2", "0", [BOTH, LAST]),
    # torch 2.14 can't have a machine join with one store; torchrun does not count that start.
    "a machine joins": ("1:2", "1", [["2 a0 False"] * 2, BOTH, LAST]),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_of_one_start_meet_though_each_machine_counts_for_itself(case, tmp_path):
    machines_wanted, own_store, expected = CASES[case]
    script, folder = tmp_path / "script.py", tmp_path / "met"
    script.write_text(SCRIPT)
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = Path(sys.modules[common_name.__module__].__file__)
    options = ["--nnodes", machines_wanted, "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x", "--rdzv-conf", "last_call_timeout=1"]
    options += ["--local-addr", "127.0.0.1"]

    def machine(name):
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(module), str(folder)]
        environment = os.environ | {"MACHINE": name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    machines = [machine("a")]
    try:
        end = time.monotonic() + 120
        while len(list(folder.iterdir())) < 2 and machines_wanted == "1:2":
            assert machines[0].poll() is None and time.monotonic() < end
            time.sleep(0.05)
        machines.append(machine("b"))
        outputs = [process.communicate(timeout=120)[1] for process in machines]
    finally:
        for process in machines:
            process.terminate()
            process.wait()
    assert [process.returncode for process in machines] == [0, 0], outputs
    starts = defaultdict(list)
    for path in folder.iterdir():
        if path.name != "failed":
            starts[path.name.split()[0]].append(path.read_text())
    assert sorted(sorted(start) for start in starts.values()) == expected


def test_ranks_that_do_not_come_are_not_waited_for_without_end():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("here/1", "of a process that is dead")
    for rank in range(2):
        with pytest.raises(TimeoutError):
            common_name(store, rank, 2, 0.2)

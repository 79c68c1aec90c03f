"""Run a workflow from a terminal, without a browser and without a server.

  python run.py WORKFLOW.api.json [--set NODE.INPUT=VALUE …] [--output FOLDER] [--log FILE] [--launch DEVICES]
                [--result FILE] [-- COMFYUI OPTIONS]

The file is one that ComfyUI exports with Workflow > Export (API); those of this pack are in workflows/api. ComfyUI is
the one with this pack in its custom_nodes, or the one that COMFYUI_PATH names. Arguments after -- go to ComfyUI, such
as --cuda-device 1 or --lowvram.

With --launch 2, two devices of this machine train together, one process each; on several machines, torchrun starts
this file in the same way: torchrun --nproc-per-node 2 run.py WORKFLOW.api.json. See docs/many_cards.md.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .comfyui import find_comfyui
from .errors import CANCELLED, TERMINATED, WRONG, UsageError
from .execution import Run
from .launch import check_launch, launch
from .parent import watch_parent
from .rank import Rank
from .reports import Reporter, Result, open_log
from .workflow import read_workflow, set_input

EXIT_CODES = """\
Exit codes: 0 done; 1 an error; 2 the workflow or an option is wrong, nothing ran; 75 ended by SIGTERM or an error, with
a state saved to go on from: run the same line again; 130 cancelled by Ctrl+C; 143 ended by SIGTERM, with nothing saved.
"""


def main(arguments: Sequence[str]) -> int:
    rank = Rank.from_environment()
    result = Result(None)
    try:
        options, comfyui_options = parse(arguments)
        watch_parent(rank, launches=options.launch is not None)
        result = Result(options.result if rank.rank == 0 else None)
        # Until ComfyUI runs, which saves on SIGTERM; nothing is trained yet.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(result.ended(TERMINATED)))
        prompt, extra_data = read_workflow(Path(options.workflow))
        changed = {set_input(prompt, change) for change in options.set}
        comfyui = find_comfyui()
        if options.launch is not None:
            if rank.size > 1:
                raise UsageError("--launch starts torchrun itself; leave it out where torchrun has started run.py.")
            check_launch(options.launch, prompt, comfyui_options)
            return result.ended(launch(options.launch, arguments, options.result))
        with (
            rank.prepared(prompt, comfyui_options) as comfyui_options,
            open_log(options.log if not rank.rank else None) as log,
        ):
            if options.output:
                comfyui_options = ["--output-directory", os.path.abspath(options.output), *comfyui_options]
            run = Run(prompt, extra_data, changed, Reporter(log, rank.rank), rank, result)
            return result.ended(run.execute(comfyui, comfyui_options))
    except UsageError as mistake:
        if rank.rank == 0 or mistake.is_local:
            print(rank.with_rank(str(mistake)), file=sys.stderr)
        return result.ended(WRONG)
    except KeyboardInterrupt:  # while ComfyUI starts
        return result.ended(CANCELLED)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the options of this file from ComfyUI's."""
    own_arguments, comfyui = list(arguments), []
    if "--" in own_arguments:
        separator = own_arguments.index("--")
        own_arguments, comfyui = own_arguments[:separator], own_arguments[separator + 1 :]
    parser = argparse.ArgumentParser(
        description="Run a workflow from a terminal, without a browser and without a server.",
        epilog=EXIT_CODES,
        usage="%(prog)s WORKFLOW [--set NODE.INPUT=VALUE …] [--output FOLDER] [--log FILE] [--launch DEVICES] "
        "[--result FILE] [-- COMFYUI OPTIONS]",
    )
    parser.add_argument("workflow", help="a workflow in API format, a JSON file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NODE.INPUT=VALUE",
        help="change an input; NODE is a node's number, title or class, such as TesseraTrainLora.steps=2000",
    )
    parser.add_argument("--output", help="folder in place of ComfyUI's output folder")
    parser.add_argument("--log", help="file to which each event is added as a line of JSON")
    parser.add_argument("--launch", type=int, metavar="DEVICES", help="train on as many devices of this machine")
    parser.add_argument("--result", help="file to which the exit code is written as JSON")
    return parser.parse_args(own_arguments), comfyui


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads of other packs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

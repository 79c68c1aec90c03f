"""Run a workflow from a terminal, without a browser and without a server; `python run.py --help` says how."""

import sys

from headless.command import exit_now, main

if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))

"""Watchers that check a run: the certificate before its first step, and its final file."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import comfy.model_management
import torch

from ...common.core import features
from ...common.fingerprint import fingerprint
from ...common.untrusted.budgets import RUN_SUMMARY
from ..config.environment import VERSION
from ..loop.watcher import RunView, Watcher
from ..preflight.context import RunContext
from ..report.errors import CannotContinue
from ..runs.run_record import SUMMARY, read_object
from .certificate import make_certificate
from .final_file import FinalFileWatcher


class CertificateWatcher:
    """Watcher that checks a run before its first step, and not again if it resumes with the same model, versions and
    plan.

    model: fingerprint of the MODEL.
    earlier: folder of the run that this one resumes from; None for a new one.
    """

    def __init__(self, context: RunContext, model: str, earlier: Path | None):
        self.context = context
        self.model = model
        self.earlier = earlier
        self.has_run = False
        self.entries: dict[str, Any] = {}

    def between_steps(self, run: RunView) -> None:
        """Make the certificate, once. Raises ValueError if a check fails."""
        if self.has_run:
            return
        self.has_run = True
        key, world = self._key(run), run.world
        # Rank 0 reads it: the others may have another disk, and all of them must make the checks, or none.
        earlier_entries = world.broadcast("certificate: earlier", _read_earlier(self.earlier, key))
        if earlier_entries is not None:
            self.entries = dict(earlier_entries)
            run.observer.note(f"{earlier_entries['text']} This was checked when the run began.")
            return
        context = self.context
        guidance = run.settings.objective.guidance
        try:
            certificate = make_certificate(run.placed, context.targets, context.data.samples, guidance, run.observer)
        except Exception as error:
            if not comfy.model_management.is_oom(error):
                raise
            if world.world_size > 1:  # the others are in the middle of a check
                raise CannotContinue(
                    "the memory of a device isn't enough to check this model; set verify to off on Training Memory"
                ) from error
            comfy.model_management.soft_empty_cache()
            run.observer.note(
                "verify is skipped: the memory isn't enough to check this model; a batch is compared with ComfyUI's "
                "forward all the same."
            )
            return
        finally:
            run.learner.zero_grad()
        self.entries = certificate.summary()
        if not certificate.is_transient:  # else a resumed run, with more memory or disk, makes it again
            self.entries["key"] = key
        if world.is_first:
            self._save()
        run.observer.note(certificate.text)
        run.observer.phase(run.placed.execution.runner.progress_text())

    def is_due(self, step: int, steps: int) -> bool:
        return False

    def summary(self, run: RunView) -> dict[str, Any]:
        """Return the certificate for summary.json."""
        return {"certificate": self.entries} if self.entries else {}

    def _save(self) -> None:
        """Write the certificate to the run's summary now, so that a run that crashes keeps it."""
        folder = self.context.folder
        with suppress(OSError):  # the summary is written again at the run's end
            summary = read_object(folder.path, SUMMARY, RUN_SUMMARY)
            folder.write_summary({**summary, "certificate": self.entries})

    def _key(self, run: RunView) -> str:
        """Fingerprint of model, versions and plan."""
        placed, settings = run.placed, run.settings
        memory = {name: str(value) for name, value in dataclasses.asdict(placed.memory.options).items()}
        return fingerprint(
            {
                "model": self.model,
                "pack": VERSION,
                "comfyui": features()["version"],
                "torch": torch.__version__,
                "device": str(run.placed.weights.device.type),
                "dtype": str(placed.weights.dtype),
                "memory": memory,
                "compile": str(run.placed.execution.compile_settings),
                "network": str(settings.network),
                "targets": list(self.context.targets),
            }
        )


def checking_watchers(context: RunContext, model: str, state: Path | None) -> list[Watcher]:
    """Make the watchers that check a run: its final file always, and a certificate before its first step if `verify` is
    'on', or 'auto' and no test covers the model by name.

    model: fingerprint of the MODEL.
    state: state that the run resumes from; None for a new run.
    """
    verify, final = context.settings.memory.verify, FinalFileWatcher(context)
    if verify == "off" or (verify == "auto" and context.family.tested_by_name):
        return [final]
    return [CertificateWatcher(context, model, None if state is None else state.parent), final]


def _read_earlier(earlier: Path | None, key: str) -> Mapping[str, Any] | None:
    """Read the certificate of an earlier run, None if it has none of this key."""
    folders = [] if earlier is None else [earlier, *list(earlier.parents)[:2]]
    for folder in folders:
        entries = read_object(folder, SUMMARY, RUN_SUMMARY).get("certificate", {})
        if isinstance(entries, dict) and entries.get("key") == key and isinstance(entries.get("text"), str):
            return entries
    return None

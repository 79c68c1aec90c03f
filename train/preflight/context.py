"""Run context: the results of preflight that trainer and saver are built from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...common.fingerprint import fingerprint
from ...compile.settings import CompileSettings
from ...data.samples import TrainingData
from ...models.family import Family
from ..checkpoint.history import continued_from, run_segments, segment_settings
from ..checkpoint.metadata import Describe, collect_facts, metadata_writer, utc_now
from ..checkpoint.state import read_header
from ..config.settings import TrainSettings
from ..distributed.share import Share
from ..distributed.world import SINGLE_PROCESS, World
from ..runs.run_folder import RunFolder
from .checks import CheckedRun
from .run_start import RunStart
from .validation_split import held_out_note


@dataclass(frozen=True)
class RunContext:
    """Inputs of the trainer and the saver of a run.

    patcher: the MODEL to train on, a clone of the input MODEL.
    family: the family of that model.
    data: the samples to train on.
    targets: names of the Linears that get an adapter.
    settings: all settings of the run.
    folder: the folder that the run writes to.
    lineage: fingerprint of everything that determines the run's steps (`TrainSettings.lineage`).
    describe: function that makes the metadata of a LoRA file.
    compile_settings: None trains eagerly.
    validation: held-out samples, None without validation.
    companion_files: texts to write next to the first LoRA, by the ending that follows its name.
    parts: the segments of the run with their settings, the current one last (`checkpoint.history`).
    continued_from: the earlier segments that had other settings.
    started: ISO 8601 with an offset.
    notes: sentences for the user.
    environment: facts of the state to resume from, and the choices of its plan (`placement.auto.choice_facts`).
    low_bit_matmul: layers with full-precision matmuls in that state's run (see `LowBitPolicy.decision`).
    world: the ranks that train together.
    """

    patcher: ModelPatcher
    family: Family
    data: TrainingData
    targets: list[str]
    settings: TrainSettings
    folder: RunFolder
    lineage: str
    describe: Describe
    compile_settings: CompileSettings | None = None
    validation: TrainingData | None = None
    companion_files: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[dict[str, Any]] = ()
    continued_from: Sequence[dict[str, Any]] = ()
    started: str = ""
    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    low_bit_matmul: Mapping[str, Any] = field(default_factory=dict)
    world: World = SINGLE_PROCESS

    @property
    def share(self) -> Share:
        """Samples of a step that this rank takes. Raises ValueError if the ranks can't share them evenly."""
        return self.world.shard(self.settings.batch_size, self.settings.gradient_accumulation)

    @property
    def device_settings(self) -> TrainSettings:
        """The settings with this rank's samples of a micro-batch as batch_size."""
        return replace(self.settings, batch_size=self.share.rows)

    @property
    def all_data(self) -> TrainingData:
        """Training and held-out samples together; their sizes decide which graphs the run needs."""
        if self.validation is None:
            return self.data
        return replace(self.data, samples=self.data.samples + self.validation.samples)

    @property
    def validation_key(self) -> str:
        """Fingerprint of samples, noise seed and sigmas that losses are measured on; empty without validation.

        Losses of two runs are comparable only under the same key.
        """
        options = self.settings.validation
        if options is None or self.validation is None:
            return ""
        return fingerprint(self.validation.fingerprint, options.seed, list(options.noise_levels))

    @property
    def pictures_key(self) -> str:
        """Fingerprint of the pictures and noise that losses by picture are measured on; empty if they are not."""
        options = self.settings.validation
        if options is None or not options.loss_by_picture:
            return ""
        return fingerprint(self.data.fingerprint, self.validation_key)


def make_context(
    checked: CheckedRun,
    run_start: RunStart,
    settings: TrainSettings,
    compile_settings: CompileSettings | None,
    companion_files: Mapping[str, str],
    world: World = SINGLE_PROCESS,
) -> RunContext:
    """Make the context of a run from its checks and its start.

    compile_settings: compile settings if `settings.compile` is 'auto'; None takes inductor's defaults.
    companion_files: texts to write next to the LoRA, by ending.
    """
    started = utc_now()
    facts = collect_facts(settings, checked.family, checked.patcher, checked.data, started)
    segment = segment_settings(facts, checked.data.fingerprint, run_start.weights)
    parts = run_segments(run_start.state, run_start.lineage, segment, run_start.asked_lineage)
    earlier = continued_from(parts)
    header = None if run_start.state is None else read_header(run_start.state)
    notes: tuple[str, ...] = ()
    if checked.validation is not None and settings.validation is not None and settings.validation.data is None:
        notes = (held_out_note(checked.validation, checked.full_data_fingerprint, parts),)
    return RunContext(
        patcher=checked.patcher,
        family=checked.family,
        data=checked.data,
        targets=checked.targets,
        settings=settings,
        folder=run_start.folder,
        lineage=run_start.lineage,
        describe=metadata_writer(replace(facts, continued_from=earlier)),
        compile_settings=(compile_settings or CompileSettings()) if settings.compile == "auto" else None,
        validation=checked.validation,
        companion_files=companion_files,
        parts=parts,
        continued_from=earlier,
        started=started,
        notes=notes,
        environment={} if header is None else header.environment,
        # With other settings, weights or data the decision belongs to another run.
        low_bit_matmul={} if header is None or header.lineage != run_start.lineage else header.low_bit_matmul,
        world=world,
    )

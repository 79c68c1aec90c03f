"""Compile Model and Compile Report."""

import logging
from dataclasses import replace
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from torch import nn

from ...compile.attach import compile_model, compiled_model_of
from ...compile.compile_report import CompileReport
from ...compile.settings import (
    DYNAMIC,
    MODES,
    PRESETS,
    SCOPES,
    CompileSettings,
    backends,
    check_backend,
    dynamic_named,
    parse_overrides,
)
from ...memory.low_bit.quantize import AS_STORED, quantize_of
from ..common.progress import client_server, prompt_id

log = logging.getLogger(__name__)

CUSTOM = "custom"
EVENT = "tessera.compile"


class BackendInput(io.Combo.Input):
    """Combo with lazily read choices.

    Importing torch's list of backends takes about half a second, which would delay ComfyUI's start.
    """

    def as_dict(self) -> dict[str, Any]:
        self.options = backends()
        return super().as_dict()


class TesseraCompileModel(io.ComfyNode):
    """The MODEL, compiled when a sampler first runs it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraCompileModel",
            display_name="Compile Model",
            category="Tessera/compile",
            description="Compiles a diffusion model with torch.compile, so it samples faster from the second picture "
            "on. Put it between the loader (or LoRAs) and the sampler; Train LoRA uses its settings too.",
            search_aliases=["torch.compile", "torch compile", "torchcompile", "inductor", "speed up", "optimize model"],
            hidden=[io.Hidden.unique_id],
            has_intermediate_output=True,  # its notes are sent again on a cache hit
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The diffusion model, from any loader. LoRAs can come before or after this node.",
                ),
                BackendInput(
                    "backend",
                    options=["inductor"],
                    default=CompileSettings.backend,
                    optional=True,
                    tooltip="What compiles the model. inductor generates fused kernels and is the one that makes it "
                    "faster. cudagraphs only saves launch time. aot_eager and eager compile nothing; use them to "
                    "find out whether a problem comes from inductor.",
                ),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default=CompileSettings.mode,
                    optional=True,
                    tooltip="How hard inductor tries. default compiles fastest. max-autotune-no-cudagraphs tries "
                    "several kernels for each matrix product: it compiles longer and may sample faster. "
                    "reduce-overhead and max-autotune add CUDA graphs, which save launch time and need memory. Other "
                    "backends have no modes.",
                ),
                io.Combo.Input(
                    "dynamic",
                    options=list(DYNAMIC),
                    default=CompileSettings.dynamic,
                    optional=True,
                    tooltip="What happens with a new picture size, batch or prompt length. auto: the second size "
                    "compiles one graph for any size. true: that graph from the start. false: a graph for each size, "
                    "which runs fastest; choose it if your sizes stay the same.",
                ),
                io.Boolean.Input(
                    "fullgraph",
                    default=CompileSettings.fullgraph,
                    optional=True,
                    advanced=True,
                    tooltip="On: code that can't be compiled as one graph is an error that names the line. Off: it "
                    "is compiled in pieces, or runs uncompiled. Switch it on only to find out what breaks a graph.",
                ),
                io.Int.Input(
                    "cache_size_limit",
                    default=CompileSettings.cache_size_limit,
                    min=1,
                    max=4096,
                    optional=True,
                    advanced=True,
                    tooltip="The most graphs for each block type; more sizes run uncompiled. Raise it if this node "
                    "says that the limit is reached.",
                ),
                io.Combo.Input(
                    "scope",
                    options=list(SCOPES),
                    default=CompileSettings.scope,
                    optional=True,
                    tooltip="What is compiled as one piece. blocks: each block type once, shared by all blocks of "
                    "that type; compiles fastest. stack: many blocks in a row; compile time grows with their number. "
                    "model: everything, which patches of other nodes break most easily. Try the larger ones if you "
                    "sample many pictures. Training always compiles block by block.",
                ),
                io.Combo.Input(
                    "preset",
                    options=[CUSTOM, *PRESETS],
                    default=CUSTOM,
                    optional=True,
                    tooltip="Fills mode and scope in: fast start compiles soonest, balanced tries more kernels, "
                    "maximum speed also compiles whole runs of blocks. custom uses mode and scope as set. Use a "
                    "preset if you don't want to choose.",
                    extra_dict={"presets": {name: {"mode": m, "scope": s} for name, (m, s) in PRESETS.items()}},
                ),
                io.String.Input(
                    "overrides",
                    default="",
                    multiline=True,
                    optional=True,
                    placeholder="double_blocks.* mode=max-autotune\nsingle_blocks.0-9 eager",
                    tooltip="Other settings for some blocks, a line each: a pattern (with * and ranges such as 0-9), "
                    "then eager (not compiled) or any of backend=, mode=, dynamic=, fullgraph=. The last line that "
                    "matches a block counts. Use it for a block that gains nothing or fails. Not for scope model.",
                    advanced=True,
                ),
            ],
            outputs=[io.Model.Output(tooltip="The compiled model, for a sampler, a LoRA loader or Train LoRA.")],
        )

    @classmethod
    def validate_inputs(cls, backend: str | None = None, dynamic: Any = None) -> bool | str:
        """Check the backend here, since core's own combo check names no fix, and dynamic case-insensitively.

        None is a linked input with a value not known yet; execute checks it.
        """
        try:
            if backend is not None:
                check_backend(backend)
            if dynamic is not None:
                dynamic_named(dynamic)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        model: ModelPatcher,
        backend: str = CompileSettings.backend,
        mode: str = CompileSettings.mode,
        dynamic: str = CompileSettings.dynamic,
        fullgraph: bool = CompileSettings.fullgraph,
        cache_size_limit: int = CompileSettings.cache_size_limit,
        scope: str = CompileSettings.scope,
        preset: str = CUSTOM,
        overrides: str = "",
    ) -> io.NodeOutput:
        dynamic, lines = dynamic_named(dynamic), parse_overrides(overrides)
        requested = CompileSettings(backend, mode, dynamic, fullgraph, cache_size_limit, scope, lines)
        settings, notes = with_preset(requested, preset)
        check_is_diffusion_model(model)
        compiled, compiled_model = compile_model(model, settings)
        node_id = getattr(cls.hidden, "unique_id", None)  # None if no server runs the node
        node_notes = NodeNotes(node_id, [*notes, *compiled_model.notes])
        compiled_model.notes.watch(node_notes.add)
        # The list itself, not a copy: ComfyUI writes it into /history when the prompt has ended, so notes added while
        # the sampler runs are included.
        return io.NodeOutput(compiled, ui={"tessera": [{"notes": node_notes.notes}]})


class TesseraCompileReport(io.ComfyNode):
    """Report of the compilation so far, as a table and as text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraCompileReport",
            display_name="Compile Report",
            category="Tessera/compile",
            description="Shows what Compile Model did for each block type: graphs, compile time, what failed or was "
            "compiled again and why, and how much faster it runs. It counts since the model was loaded.",
            search_aliases=["torch.compile report", "recompiles", "graph breaks", "compile time", "benchmark"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The MODEL that came out of Compile Model, directly or through LoRAs."),
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="Makes the report wait: connect the sampler's LATENT, or the decoded picture. Its value "
                    "is not used. Without it the report may be made before the sampler has run.",
                ),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The same as text.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Return a new NaN each time, since the report changes with each run.

        One shared NaN would not do: a tuple that holds the same object is equal to itself.
        """
        return float("nan")

    @classmethod
    def execute(cls, model: ModelPatcher, after: Any = None) -> io.NodeOutput:
        check_is_diffusion_model(model)
        compiled_model = compiled_model_of(model)
        if compiled_model is None:
            text = "This MODEL is not compiled: put Compile Model in front of it."
            report = CompileReport(text, [])
        else:
            report = compiled_model.report()
            if (quantize := quantize_of(model)) != AS_STORED:
                report = replace(report, heading=f"{report.heading}, quantize {quantize}")
            text = report.text()
        return io.NodeOutput(text, ui={"tessera": [report.facts() | {"text": text}]})


def with_preset(requested: CompileSettings, preset: str) -> tuple[CompileSettings, list[str]]:
    """Apply a preset. Returns the settings, and a note if they differ from those requested."""
    if preset == CUSTOM:
        return requested, []
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; choose one of {', '.join((CUSTOM, *PRESETS))}.")
    mode, scope = PRESETS[preset]
    settings = replace(requested, mode=mode, scope=scope)
    if settings == requested:
        return settings, []
    note = (
        f"The preset {preset} sets mode {mode} and scope {scope}, in place of {requested.mode} and {requested.scope}."
    )
    log.info(note)
    return settings, [note]


def check_is_diffusion_model(model: Any) -> None:
    """Raise ValueError for an input without a diffusion model, such as a CLIP."""
    inner = getattr(model, "model", None)
    if not isinstance(getattr(inner, "diffusion_model", None), nn.Module):
        kind = type(model if inner is None else inner).__name__
        raise ValueError(
            f"model is a {kind}, not a diffusion model; connect the MODEL of a loader, such as Load Diffusion Model."
        )


class NodeNotes:
    """Notes shown on one node, sent as an event of this pack each time one is added.

    ComfyUI shows progress text on the running node only, and most of these notes arise while the sampler runs.
    """

    def __init__(self, node_id: str | None, notes: list[str]):
        self.node_id, self.notes = node_id, notes
        self._send()

    def add(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)
            self._send()

    def _send(self) -> None:
        if server := client_server():
            event = {"node": self.node_id, "prompt_id": prompt_id(), "notes": list(self.notes)}
            server.send_sync(EVENT, event, server.client_id)


NODES = [TesseraCompileModel, TesseraCompileReport]

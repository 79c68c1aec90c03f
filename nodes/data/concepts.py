"""Slider, Slider from Pictures and Erase Concept: training data whose target is the model's own prediction."""

from collections.abc import Callable
from typing import Any

from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import io

from ...common.text import quantity
from ...data.concepts.picture_pairs import pair_pictures
from ...data.concepts.prompt_data import with_concept
from ...data.concepts.prompts import Concept, erasure, slider
from ...data.samples import TrainingData
from ...train.distributed.world import current_world
from ..common.folder_access import cache_folder
from ..common.progress import node_progress
from ..common.types import TrainingDataType


def _text(name: str, placeholder: str, tooltip: str, advanced: bool = False) -> io.Input:
    return io.String.Input(
        name, default="", multiline=True, placeholder=placeholder, advanced=advanced, tooltip=tooltip
    )


def _encoders() -> list[io.Input]:
    return [
        TrainingDataType.Input(
            "data",
            tooltip="Pictures to train on, from Prepare Dataset, or from Latents to Training Data with pictures that "
            "the model sampled itself. They show what it acts on; their captions aren't used.",
        ),
        io.Clip.Input("clip", tooltip="The text encoders of the model that will be trained, as for Prepare Dataset."),
    ]


def _data_output() -> list[io.Output]:
    return [TrainingDataType.Output(display_name="data", tooltip="What Train LoRA trains on.")]


def _refusal(make: Callable[..., Concept], **texts: str | None) -> bool | str:
    """Say before anything runs why texts make no concept. texts: None for those that come over a link."""
    if None in texts.values():
        return True
    try:
        make(**texts)
    except ValueError as error:
        return str(error)
    return True


def _with_concept(node: type[io.ComfyNode], data: TrainingData, concept: Concept, clip: Any) -> io.NodeOutput:
    """Encode the prompts; on several devices the first one does it, and the others read its cache."""
    check = throw_exception_if_processing_interrupted
    node_id = node.hidden.unique_id
    with current_world().after_first(f"prepared {node_id}", check):
        data = with_concept(data, concept, clip, cache_folder(), node_progress(node_id), check)
    return io.NodeOutput(data, ui={"tessera": [{"notes": [concept.describe()]}]})


class TesseraSlider(io.ComfyNode):
    """A direction between two prompts, as training data."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraSlider",
            display_name="Slider",
            category="Tessera/data",
            description="Makes Train LoRA train a slider: a LoRA that adds something at a positive strength and takes "
            "it away at a negative one. It learns from two prompts and the model's own predictions.",
            search_aliases=["concept slider", "lora slider", "age slider", "direction", "leco"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                *_encoders(),
                _text(
                    "positive",
                    "a photo of a very old person",
                    "What strength 1 should lead to. One prompt per line; each makes a pair with the same line of "
                    "negative.",
                ),
                _text(
                    "negative",
                    "a photo of a very young person",
                    "What strength -1 should lead to: the opposite, in the same words otherwise.",
                ),
                _text(
                    "neutral",
                    "a photo of a person",
                    "What the slider acts on. One line for all pairs, or one for each. Empty: the empty prompt, so "
                    "that it acts on everything.",
                ),
                _text(
                    "keep",
                    "a photo of a dog",
                    "Prompts that shouldn't change at any strength, one per line. Half of the steps go to them.",
                ),
                _text(
                    "attributes",
                    "male",
                    "What should stay as it is while the slider moves, one per line, such as male and female for an "
                    "age slider. Each is put behind all three prompts, so neither end has more of it.",
                    advanced=True,
                ),
                io.Float.Input(
                    "guidance_scale",
                    default=3.0,
                    min=0.1,
                    max=100.0,
                    step=0.1,
                    round=False,
                    tooltip="How far strength 1 goes, in differences of the two predictions. 2 to 4 is usual; lower it "
                    "if pictures get harsh at strength 1.",
                ),
            ],
            outputs=_data_output(),
        )

    @classmethod
    def validate_inputs(
        cls,
        positive: str | None = None,
        negative: str | None = None,
        neutral: str | None = None,
        keep: str | None = None,
        attributes: str | None = None,
    ) -> bool | str:
        return _refusal(slider, positive=positive, negative=negative, neutral=neutral, keep=keep, attributes=attributes)

    @classmethod
    def execute(  # noqa: PLR0913
        cls,
        data: TrainingData,
        clip: Any,
        positive: str,
        negative: str,
        neutral: str,
        keep: str,
        attributes: str,
        guidance_scale: float,
    ) -> io.NodeOutput:
        concept = slider(positive, negative, neutral, keep, attributes, guidance_scale)
        return _with_concept(cls, data, concept, clip)


class TesseraPictureSlider(io.ComfyNode):
    """A direction between pictures, as training data."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraPictureSlider",
            display_name="Slider from Pictures",
            category="Tessera/data",
            description="Makes Train LoRA train a slider from pairs of pictures that differ in one thing: two folders, "
            "in which both pictures of a pair have the same name.",
            search_aliases=["concept slider", "image slider", "visual slider", "before after"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                TrainingDataType.Input(
                    "positive",
                    tooltip="Pictures that strength 1 should lead to, from Prepare Dataset. Their captions are used "
                    "for both: write what the pair has in common, or nothing.",
                ),
                TrainingDataType.Input(
                    "negative",
                    tooltip="The same pictures without it, which strength -1 should lead to, from a Prepare Dataset "
                    "with the same settings. Names without endings and sizes must be equal.",
                ),
            ],
            outputs=_data_output(),
        )

    @classmethod
    def execute(cls, positive: TrainingData, negative: TrainingData) -> io.NodeOutput:
        data = pair_pictures(positive, negative)
        note = f"{quantity(len(data.samples), 'pair of pictures', 'pairs of pictures')}."
        return io.NodeOutput(data, ui={"tessera": [{"notes": [note]}]})


class TesseraEraseConcept(io.ComfyNode):
    """A prompt that the model forgets, as training data."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraEraseConcept",
            display_name="Erase Concept",
            category="Tessera/data",
            description="Makes Train LoRA train a LoRA with which the model no longer makes what a prompt names, but "
            "something else, while other prompts stay as they are.",
            search_aliases=["esd", "unlearn", "forget", "remove concept", "concept ablation"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                *_encoders(),
                _text(
                    "erase",
                    "a painting by Van Gogh",
                    "The prompts to forget, one per line. Several ways to say it hold better than one.",
                ),
                _text(
                    "target",
                    "a painting",
                    "What is made in their place. One line for all, or one for each. Empty: what the model makes of "
                    "the empty prompt.",
                ),
                _text(
                    "keep",
                    "a painting by Monet",
                    "Prompts that must stay as they are, one per line: the more they resemble what is erased, the more "
                    "they need it. Half of the steps go to them.",
                ),
                io.Float.Input(
                    "guidance_scale",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    tooltip="How far past the target to go, away from what is erased, in differences of the two "
                    "predictions. 0 ends at the target, 1 is usual, more erases harder and spreads further.",
                ),
            ],
            outputs=_data_output(),
        )

    @classmethod
    def validate_inputs(
        cls, erase: str | None = None, target: str | None = None, keep: str | None = None
    ) -> bool | str:
        return _refusal(erasure, erase=erase, target=target, keep=keep)

    @classmethod
    def execute(
        cls, data: TrainingData, clip: Any, erase: str, target: str, keep: str, guidance_scale: float
    ) -> io.NodeOutput:
        return _with_concept(cls, data, erasure(erase, target, keep, guidance_scale), clip)


NODES: list[type[io.ComfyNode]] = [TesseraSlider, TesseraPictureSlider, TesseraEraseConcept]

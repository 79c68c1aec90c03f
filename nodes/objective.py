"""The node that sets which noise levels are trained and what the loss is."""

from comfy_api.latest import io

from ..train.options import SIGMA_RANGE, TIMESTEP_SAMPLING, ObjectiveOptions

ObjectiveType = io.Custom("TESSERA_OBJECTIVE")


def _sigma(name: str, default: float, tooltip: str, least: float = 0.0, most: float = 1.0) -> io.Float.Input:
    """An input for a noise level."""
    return io.Float.Input(
        name,
        default=default,
        min=least,
        max=most,
        step=0.005,
        round=False,
        optional=True,
        advanced=True,
        tooltip=tooltip,
    )


class TesseraObjective(io.ComfyNode):
    """Which noise levels are trained, and what the loss is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraObjective",
            display_name="Training Objective",
            category="Tessera/training",
            description="Sets which noise levels are trained most and what the loss is. Connect it to Train LoRA.",
            search_aliases=["timestep sampling", "sigma", "shift", "guidance"],
            inputs=[
                io.Combo.Input(
                    "timestep_sampling",
                    options=list(TIMESTEP_SAMPLING),
                    default=ObjectiveOptions.timestep_sampling,
                    tooltip="How often each noise level is trained. logit_normal: mostly the middle ones, good for "
                    "nearly all. uniform: all alike, more fine detail. resolution_shifted: more noise for larger "
                    "pictures, as FLUX's sampler does, good for composition and likeness.",
                ),
                io.Float.Input(
                    "shift",
                    default=ObjectiveOptions.shift,
                    min=0.0,
                    max=100.0,
                    step=0.05,
                    round=False,
                    tooltip="Moves the noise levels: above 1 towards noise (composition), below 1 towards the picture "
                    "(detail). 0 takes what suits the model; any other value also replaces the shift of "
                    "resolution_shifted.",
                ),
                io.Combo.Input(
                    "loss",
                    options=["mse"],
                    default=ObjectiveOptions.loss,
                    tooltip="How the error is measured. mse: the mean square of the velocity's error.",
                ),
                io.Float.Input(
                    "guidance",
                    default=ObjectiveOptions.guidance,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    tooltip="What a guidance-distilled model such as FLUX.1 dev is told while it trains; 1 suits "
                    "LoRAs, whatever guidance you sample with later. Models without this input do not read it.",
                ),
                io.Float.Input(
                    "logit_mean",
                    default=ObjectiveOptions.logit_mean,
                    min=-10.0,
                    max=10.0,
                    step=0.1,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Centre of logit_normal and resolution_shifted: above 0 towards noise, below 0 towards the "
                    "picture.",
                ),
                io.Float.Input(
                    "logit_std",
                    default=ObjectiveOptions.logit_std,
                    min=0.01,
                    max=10.0,
                    step=0.1,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Width of logit_normal and resolution_shifted: below 1 keeps to the centre, above 1 trains "
                    "the ends more.",
                ),
                _sigma(
                    "min_sigma",
                    ObjectiveOptions.min_sigma,
                    "The least noise level that is trained, 0 (the picture) to 1 (noise). Raise it to train "
                    "composition only; for Wan 2.2's high noise expert alone set 0.875 (I2V: 0.9).",
                    most=0.995,
                ),
                _sigma(
                    "max_sigma",
                    ObjectiveOptions.max_sigma,
                    "The highest noise level that is trained. Lower it to train detail and style only; for Wan 2.2's "
                    "low noise expert alone set 0.875 (I2V: 0.9).",
                    least=0.005,
                ),
                io.Combo.Input(
                    "sigma_range",
                    options=list(SIGMA_RANGE),
                    default=ObjectiveOptions.sigma_range,
                    optional=True,
                    advanced=True,
                    tooltip="With min_sigma or max_sigma set. cut: levels outside are not drawn, those inside keep "
                    "their shares. squeeze: the whole distribution is mapped onto the range, shape and all.",
                ),
                _sigma(
                    "expert_boundary",
                    ObjectiveOptions.expert_boundary,
                    "With both experts of Wan 2.2 connected: the noise level where the high noise expert hands over to "
                    "the low noise one. 0 takes the model's own: 0.875, and 0.9 for image-to-video.",
                    most=0.995,
                ),
            ],
            outputs=[ObjectiveType.Output(display_name="objective")],
        )

    @classmethod
    def execute(
        cls,
        timestep_sampling: str,
        shift: float,
        loss: str,
        guidance: float,
        logit_mean: float = ObjectiveOptions.logit_mean,
        logit_std: float = ObjectiveOptions.logit_std,
        min_sigma: float = ObjectiveOptions.min_sigma,
        max_sigma: float = ObjectiveOptions.max_sigma,
        sigma_range: str = ObjectiveOptions.sigma_range,
        expert_boundary: float = ObjectiveOptions.expert_boundary,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            ObjectiveOptions(
                timestep_sampling=timestep_sampling,
                shift=shift,
                loss=loss,
                guidance=guidance,
                logit_mean=logit_mean,
                logit_std=logit_std,
                min_sigma=min_sigma,
                max_sigma=max_sigma,
                sigma_range=sigma_range,
                expert_boundary=expert_boundary,
            )
        )


NODES: list[type[io.ComfyNode]] = [TesseraObjective]

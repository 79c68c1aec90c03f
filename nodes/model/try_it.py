"""Try It Models: tiny models without a download, to see a training run before installing anything."""

from comfy_api.latest import io

from ...models.try_it.load import load_clip, load_model, load_vae


class TesseraTryItModels(io.ComfyNode):
    """A tiny untrained FLUX, its text encoders and its VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraTryItModels",
            display_name="Try It Models (Tessera)",
            category="Tessera/loaders",
            description="Tiny models that come with the pack, to try out training in a minute or two on any computer. "
            "They know no picture before you train them and are of no use for real pictures.",
            search_aliases=["try it", "demo", "tiny", "example", "tutorial"],
            inputs=[],
            outputs=[
                io.Model.Output(tooltip="A FLUX of a million random weights: it removes noise and knows no picture."),
                io.Clip.Output(tooltip="Its text encoders."),
                io.Vae.Output(tooltip="Its VAE: small pictures of 128 x 128 keep their shapes and colours."),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        clip = load_clip()
        return io.NodeOutput(load_model(clip), clip, load_vae())


NODES = [TesseraTryItModels]

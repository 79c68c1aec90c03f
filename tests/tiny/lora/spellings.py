"""Spellings of LoRA keys with the program that writes each: the name of one layer there, and the layer of the model."""

from typing import NamedTuple

KOHYA = ("{}.lora_down.weight", "{}.lora_up.weight", "{}.alpha")
PEFT = ("{}.lora_A.weight", "{}.lora_B.weight")
NAMED = ("{}.lora_A.default.weight", "{}.lora_B.default.weight")
OTHER_NAME = ("{}.lora_A.my_style.weight", "{}.lora_B.my_style.weight")
BARE = ("{}.lora_A", "{}.lora_B")
PROCESSOR = ("{}_lora.down.weight", "{}_lora.up.weight")
OLD = ("{}.lora.down.weight", "{}.lora.up.weight")
LINEAR = ("{}.lora_linear_layer.down.weight", "{}.lora_linear_layer.up.weight")
XLABS = ("{}.down.weight", "{}.up.weight")


class Spelling(NamedTuple):
    """One row.

    model: name of the tiny model.
    source: repository and file that writes it.
    name: of the layer in the file.
    tensors: keys of down, up and, where there is one, alpha.
    layer: of the model.
    rows: first row and number of rows that the file's layer is, None for all.
    """

    model: str
    source: str
    name: str
    tensors: tuple[str, ...]
    layer: str
    rows: tuple[int, int] | None = None


_KOHYA = "kohya-ss/sd-scripts: networks/"
_MUSUBI = "kohya-ss/musubi-tuner: src/musubi_tuner/networks/"
_PIPE = "tdrussell/diffusion-pipe: models/"
_DIFFUSERS = "huggingface/diffusers: "
_SIMPLE = "bghira/SimpleTuner: "
_ONE = "Nerogar/OneTrainer: modules/util/convert/lora/"
_SYNTH = "modelscope/DiffSynth-Studio: diffsynth/diffusion/training_module.py"
_PEFT = "huggingface/peft: src/peft/utils/save_and_load.py"
_AI = "ostris/ai-toolkit: toolkit/lora_special.py"
_CORE = "Comfy-Org/ComfyUI: comfy/lora.py, "
_TORCH = "pytorch/pytorch: torch/"

QKV, PROJ = "double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj"
TXT, LINEAR1 = "double_blocks.1.txt_attn.qkv", "single_blocks.0.linear1"
Q, BLOCK = "blocks.0.self_attn.q", "transformer_blocks.0"
UNET, THERE = "input_blocks.3.1.transformer_blocks.0.attn1", "down_blocks.1.attentions.0.transformer_blocks.0.attn1"

SPELLINGS = (
    # FLUX.1
    Spelling("flux", _KOHYA + "lora_flux.py", "lora_unet_double_blocks_0_img_attn_qkv", KOHYA, QKV),
    Spelling("flux", _KOHYA + "lora_flux.py", "lora_unet_single_blocks_0_linear1", KOHYA, LINEAR1),
    Spelling("flux", _PIPE + "flux.py", f"transformer.{BLOCK}.attn.to_q", PEFT, QKV, (0, 128)),
    Spelling("flux", _PIPE + "base.py", f"diffusion_model.{QKV}", PEFT, QKV),
    Spelling("flux", _DIFFUSERS + "loaders/lora_pipeline.py", f"transformer.{BLOCK}.attn.to_k", PEFT, QKV, (128, 128)),
    Spelling(
        "flux",
        _DIFFUSERS + "loaders/lora_pipeline.py",
        "transformer.transformer_blocks.1.attn.add_v_proj",
        PEFT,
        TXT,
        (256, 128),
    ),
    Spelling("flux", _AI, f"transformer.{BLOCK}.attn.to_v", PEFT, QKV, (256, 128)),
    Spelling("flux", _AI, "transformer.single_transformer_blocks.0.proj_mlp", PEFT, LINEAR1, (384, 512)),
    Spelling(
        "flux", _ONE + "convert_flux_lora.py", "lora_transformer_transformer_blocks_0_attn_to_q", KOHYA, QKV, (0, 128)
    ),
    Spelling(
        "flux",
        _ONE + "convert_flux_lora.py",
        "lora_transformer_single_transformer_blocks_0_attn_to_k",
        KOHYA,
        LINEAR1,
        (128, 128),
    ),
    Spelling(
        "flux",
        "KohakuBlueleaf/LyCORIS: lycoris/wrapper.py",
        "lycoris_transformer_blocks_0_attn_to_q",
        KOHYA,
        QKV,
        (0, 128),
    ),
    Spelling(
        "flux", _SIMPLE + "lycoris in " + _CORE + "Flux", "lycoris_transformer_blocks_0_attn_to_out_0", KOHYA, PROJ
    ),
    Spelling("flux", _SYNTH, f"pipe.dit.{QKV}", NAMED, QKV),
    Spelling("flux", _SYNTH, QKV, NAMED, QKV),
    Spelling(
        "flux", "XLabs-AI/x-flux: train_flux_lora_deepspeed.py", "double_blocks.0.processor.qkv_lora1", XLABS, QKV
    ),
    Spelling(
        "flux", "XLabs-AI/x-flux: train_flux_lora_deepspeed.py", "double_blocks.1.processor.qkv_lora2", XLABS, TXT
    ),
    Spelling(
        "flux", "XLabs-AI/x-flux: train_flux_lora_deepspeed.py", "double_blocks.0.processor.proj_lora1", XLABS, PROJ
    ),
    Spelling(
        "flux",
        "XLabs-AI/x-flux: train_flux_lora_deepspeed.py",
        "single_blocks.0.processor.qkv_lora",
        XLABS,
        LINEAR1,
        (0, 384),
    ),
    Spelling(
        "flux",
        "XLabs-AI/x-flux: train_flux_lora_deepspeed.py",
        "double_blocks.0.processor.proj_lora2",
        XLABS,
        "double_blocks.0.txt_attn.proj",
    ),
    Spelling(
        "flux",
        "XLabs-AI/x-flux: train_flux_lora_deepspeed.py",
        "single_blocks.0.processor.proj_lora",
        XLABS,
        "single_blocks.0.linear2",
    ),
    Spelling(
        "flux",
        "XLabs-AI/x-flux: with ComfyUI's prefix",
        "diffusion_model.double_blocks.0.processor.qkv_lora1",
        XLABS,
        QKV,
    ),
    Spelling("flux", _PEFT, f"base_model.model.{QKV}", PEFT, QKV),
    Spelling("flux", _PEFT, f"base_model.model.{BLOCK}.attn.to_q", OTHER_NAME, QKV, (0, 128)),
    Spelling(
        "flux",
        _PEFT + ", of a wrapped pipeline",
        f"transformer.base_model.model.{BLOCK}.attn.to_q",
        NAMED,
        QKV,
        (0, 128),
    ),
    Spelling("flux", _TORCH + "nn/parallel/distributed.py", f"module.{QKV}", KOHYA, QKV),
    Spelling("flux", _TORCH + "nn/parallel/distributed.py, over PEFT", f"module.base_model.model.{QKV}", PEFT, QKV),
    Spelling(
        "flux",
        _TORCH + "distributed/fsdp/fully_sharded_data_parallel.py",
        "_fsdp_wrapped_module.double_blocks.0._fsdp_wrapped_module.img_attn.qkv",
        PEFT,
        QKV,
    ),
    Spelling(
        "flux", _TORCH + "_dynamo/eval_frame.py", "diffusion_model.double_blocks.0._orig_mod.img_attn.qkv", PEFT, QKV
    ),
    Spelling(
        "flux", _DIFFUSERS + "models/attention.py, fuse_projections", f"transformer.{BLOCK}.attn.to_qkv", PEFT, QKV
    ),
    Spelling(
        "flux",
        _DIFFUSERS + "models/attention.py, fuse_projections",
        "transformer.transformer_blocks.1.attn.to_added_qkv",
        PEFT,
        TXT,
    ),
    Spelling("flux", "Comfy-Org/ComfyUI: comfy_extras/nodes_train.py", f"diffusion_model.{QKV}", KOHYA, QKV),
    Spelling(
        "flux",
        "two wrappers, of no program in particular",
        f"model.diffusion_model.{QKV}",
        PEFT,
        QKV,
    ),
    # FLUX.2, Chroma
    Spelling("flux2", _MUSUBI + "lora_flux_2.py", "lora_unet_double_blocks_0_img_attn_qkv", KOHYA, QKV),
    Spelling(
        "flux2",
        _DIFFUSERS + "loaders/lora_pipeline.py",
        "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj",
        PEFT,
        LINEAR1,
    ),
    Spelling("flux2", _AI, f"diffusion_model.{QKV}", PEFT, QKV),
    Spelling("chroma", _KOHYA + "lora_flux.py", "lora_unet_double_blocks_0_img_attn_proj", KOHYA, PROJ),
    Spelling("chroma", _ONE + "convert_chroma_lora.py", f"transformer.{BLOCK}.attn.to_q", KOHYA, QKV, (0, 128)),
    # Wan
    Spelling("wan", _MUSUBI + "lora_wan.py", "lora_unet_blocks_0_self_attn_q", KOHYA, Q),
    Spelling("wan", _PIPE + "wan/wan.py", f"diffusion_model.{Q}", PEFT, Q),
    Spelling("wan", _SYNTH, f"pipe.dit.{Q}", NAMED, Q),
    Spelling("wan", _SYNTH, Q, NAMED, Q),
    Spelling("wan", _DIFFUSERS + "loaders/lora_pipeline.py", "transformer.blocks.0.attn1.to_q", PEFT, Q),
    Spelling("wan", _AI + ", wan_lora_convert.py", f"diffusion_model.{Q}", PEFT, Q),
    Spelling(
        "wan", "aigc-apps/VideoX-Fun: videox_fun/utils/lora_utils.py", "lora_unet__blocks_0_self_attn_q", KOHYA, Q
    ),
    Spelling("wan", _SIMPLE + "simpletuner/helpers/training/save_hooks.py", "lycoris_blocks_0_attn1_to_q", KOHYA, Q),
    # Qwen-Image
    Spelling(
        "qwen_image",
        _MUSUBI + "lora_qwen_image.py",
        "lora_unet_transformer_blocks_0_attn_to_q",
        KOHYA,
        f"{BLOCK}.attn.to_q",
    ),
    Spelling("qwen_image", _SYNTH, f"{BLOCK}.attn.to_q", NAMED, f"{BLOCK}.attn.to_q"),
    Spelling("qwen_image", _AI, f"diffusion_model.{BLOCK}.attn.to_q", PEFT, f"{BLOCK}.attn.to_q"),
    Spelling(
        "qwen_image", "ModelTC/Qwen-Image-Lightning: README.md", f"{BLOCK}.attn.to_q", KOHYA, f"{BLOCK}.attn.to_q"
    ),
    # HunyuanVideo
    Spelling("hunyuan-video", _MUSUBI + "lora.py", "lora_unet_double_blocks_0_img_attn_qkv", KOHYA, QKV),
    Spelling("hunyuan-video", _PIPE + "hunyuan_video.py", "transformer.double_blocks.0.img_attn_qkv", PEFT, QKV),
    Spelling(
        "hunyuan-video", _DIFFUSERS + "loaders/lora_pipeline.py", f"transformer.{BLOCK}.attn.to_k", PEFT, QKV, (64, 64)
    ),
    Spelling(
        "hunyuan-video",
        _DIFFUSERS + "loaders/lora_pipeline.py",
        "transformer.single_transformer_blocks.0.proj_mlp",
        PEFT,
        LINEAR1,
        (192, 128),
    ),
    Spelling(
        "hunyuan-video",
        _ONE + "convert_hunyuan_video_lora.py",
        "lora_transformer_transformer_blocks_0_attn_to_v",
        KOHYA,
        QKV,
        (128, 64),
    ),
    Spelling(
        "hunyuan-video",
        "Tencent/HunyuanVideo-I2V: hyvideo/inference.py",
        "Hunyuan_video_I2V_lora_double_blocks_0_img_attn_qkv",
        KOHYA,
        QKV,
    ),
    Spelling("hunyuan-video-1.5", _MUSUBI + "lora_hv_1_5.py", "lora_unet_double_blocks_0_img_attn_proj", KOHYA, PROJ),
    Spelling(
        "hunyuan-video-1.5",
        _DIFFUSERS + "loaders/lora_pipeline.py",
        f"transformer.{BLOCK}.attn.to_q",
        PEFT,
        QKV,
        (0, 64),
    ),
    # Others that train through ComfyUI's own forward
    Spelling(
        "z-image", _MUSUBI + "lora_zimage.py", "lora_unet_layers_0_attention_qkv", KOHYA, "layers.0.attention.qkv"
    ),
    Spelling("z-image", _AI, "diffusion_model.layers.0.attention.to_q", PEFT, "layers.0.attention.qkv", (0, 256)),
    Spelling(
        "z-image",
        _DIFFUSERS + "loaders/lora_pipeline.py",
        "transformer.layers.0.attention.to_v",
        PEFT,
        "layers.0.attention.qkv",
        (512, 256),
    ),
    Spelling(
        "ltx-video",
        "Lightricks/LTX-2: packages/ltx-trainer",
        f"diffusion_model.{BLOCK}.attn1.to_q",
        PEFT,
        f"{BLOCK}.attn1.to_q",
    ),
    Spelling(
        "ltx-video",
        "huggingface/finetrainers: finetrainers",
        f"transformer.{BLOCK}.attn1.to_q",
        PEFT,
        f"{BLOCK}.attn1.to_q",
    ),
    Spelling(
        "anima", _KOHYA + "lora_anima.py", "lora_unet_blocks_0_self_attn_q_proj", KOHYA, "blocks.0.self_attn.q_proj"
    ),
    Spelling(
        "anima",
        "nvidia-cosmos/cosmos-predict2: names of the checkpoint",
        "net.blocks.0.self_attn.q_proj",
        PEFT,
        "blocks.0.self_attn.q_proj",
    ),
    Spelling(
        "sd3.5",
        _KOHYA + "lora_sd3.py",
        "lora_unet_joint_blocks_0_x_block_attn_qkv",
        KOHYA,
        "joint_blocks.0.x_block.attn.qkv",
    ),
    Spelling(
        "sd3.5",
        _ONE + "convert_sd3_lora.py",
        "lora_transformer_transformer_blocks_0_attn_to_q",
        KOHYA,
        "joint_blocks.0.x_block.attn.qkv",
        (0, 128),
    ),
    Spelling(
        "kandinsky-5",
        _PIPE + "kandinsky5.py",
        "diffusion_model.visual_transformer_blocks.0.self_attention.to_query",
        PEFT,
        "visual_transformer_blocks.0.self_attention.to_query",
    ),
    Spelling(
        "hidream",
        _SIMPLE + _CORE + "HiDream",
        "lycoris_double_stream_blocks_0_block_attn1_to_q",
        KOHYA,
        "double_stream_blocks.0.block.attn1.to_q",
    ),
    Spelling(
        "mochi",
        _CORE + "GenmoMochi, and genmoai/mochi: demos/fine_tuner",
        "blocks.0.attn.qkv_x",
        BARE,
        "blocks.0.attn.qkv_x",
    ),
    # U-Nets
    Spelling(
        "sdxl", _KOHYA + "lora.py", "lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_q", KOHYA, f"{UNET}.to_q"
    ),
    Spelling("sd1.5", _KOHYA + "lora.py", "lora_unet_" + THERE.replace(".", "_") + "_to_q", KOHYA, f"{UNET}.to_q"),
    Spelling(
        "sd1.5", _DIFFUSERS + "models/attention_processor.py", f"{THERE}.processor.to_q", PROCESSOR, f"{UNET}.to_q"
    ),
    Spelling(
        "sdxl",
        _DIFFUSERS + "models/attention_processor.py",
        f"unet.{THERE}.processor.to_out",
        PROCESSOR,
        f"{UNET}.to_out.0",
    ),
    Spelling("sdxl", _DIFFUSERS + "utils/state_dict_utils.py", f"unet.{THERE}.to_q", OLD, f"{UNET}.to_q"),
    Spelling("sdxl", _DIFFUSERS + "utils/state_dict_utils.py", f"unet.{THERE}.to_k", LINEAR, f"{UNET}.to_k"),
    Spelling("sdxl", _DIFFUSERS + "loaders/unet.py", f"unet.{THERE}.to_v", PEFT, f"{UNET}.to_v"),
    Spelling("sdxl", _PEFT, f"base_model.model.{THERE}.to_q", PEFT, f"{UNET}.to_q"),
)

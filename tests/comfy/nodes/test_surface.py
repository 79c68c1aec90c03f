"""The public surface, written down: workflows and API clients depend on it.

The contract of node ids, inputs and choices is frozen with the first release: until then they may be renamed here and
in everything that names them; from then on inputs and outputs may be appended, and nothing else."""

import json
import re
from pathlib import Path

import pytest
import tessera
from comfy_api.latest import io
from comfy_server import DIRECT
from tessera.nodes import NODES, TesseraExtension
from tessera.train.config.environment import VERSION
from tiny.nodes.prompt import awaited

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "nodes" / "web" / "docs"

# node id: (display name, is it an output node, inputs, outputs). An input is `name TYPE`, `name? TYPE` where it is
# optional, and has ` = default` where it shows one. An output is its type and its name.
SURFACE = {
    "TesseraLoadDiffusionModel": (
        "Load Diffusion Model (Block Swap)",
        False,
        [
            "unet_name COMBO",
            'weight_dtype COMBO = "default"',
            "blocks_to_swap? INT = 0",
            "prefetch_blocks? INT = 1",
            'pin_memory? COMBO = "auto"',
            'quantize? COMBO = "as stored"',
        ],
        ["MODEL"],
    ),
    "TesseraBlockSwap": (
        "Block Swap",
        False,
        ["model MODEL", "blocks_to_swap INT = -1", "prefetch_blocks INT = 1", 'pin_memory COMBO = "auto"'],
        ["MODEL"],
    ),
    "TesseraCompileModel": (
        "Compile Model",
        False,
        [
            "model MODEL",
            'backend? COMBO = "inductor"',
            'mode? COMBO = "default"',
            'dynamic? COMBO = "auto"',
            "fullgraph? BOOLEAN = false",
            "cache_size_limit? INT = 64",
            'scope? COMBO = "blocks"',
            'preset? COMBO = "custom"',
            'overrides? STRING = ""',
        ],
        ["MODEL"],
    ),
    "TesseraCompileReport": ("Compile Report", True, ["model MODEL", "after? *"], ["STRING report"]),
    "TesseraTuneCompile": (
        "Tune Compile",
        True,
        [
            "model MODEL",
            "width INT = 1024",
            "height INT = 1024",
            "time_budget? INT = 300",
            "frames? INT = 1",
            "batch_size? INT = 1",
            "text_length? INT = 0",
            "cfg? FLOAT = 0.0",
            "remeasure? BOOLEAN = false",
            "positive? CONDITIONING",
        ],
        ["MODEL", "IMAGE chart", "STRING report"],
    ),
    "TesseraImageFolder": (
        "Training Images",
        False,
        [
            "folder COMBO",
            'caption_extension? STRING = ".txt"',
            "repeats? INT = 1",
            'trigger_words? STRING = ""',
            "dataset? TESSERA_DATASET",
            'control_folder? COMBO = "none"',
            'mask_folder? COMBO = "none"',
            "alpha_mask? BOOLEAN = false",
            "unmasked_weight? FLOAT = 0.0",
            'flip? COMBO = "off"',
            "crops? INT = 1",
            "crop_zoom? FLOAT = 1.0",
            "loss_weight? FLOAT = 1.0",
            "regularisation? BOOLEAN = false",
            "caption_dropout? FLOAT = 0.0",
            "shuffle_tags? BOOLEAN = false",
            "keep_tokens? INT = 0",
            "tag_dropout? FLOAT = 0.0",
            "caption_per_line? BOOLEAN = false",
            "wildcards? BOOLEAN = false",
            "caption_variants? INT = 8",
            'keep_tokens_separator? STRING = "|||"',
            'class_word? STRING = ""',
            "blank_prompt_preservation? BOOLEAN = false",
            "sample_ratio? FLOAT = 1.0",
            'layout? COMBO = "auto"',
            'leave_out? STRING = ""',
        ],
        ["TESSERA_DATASET dataset"],
    ),
    "TesseraCheckFolder": (
        "Check Folder (Tessera)",
        True,
        [
            "folder COMBO",
            "megapixels? FLOAT = 1.0",
            "factor? FLOAT = 1.4",
            'trigger_words? STRING = ""',
            'caption_extension? STRING = ".txt"',
            'layout? COMBO = "auto"',
            "clip? CLIP",
            "clip_vision? CLIP_VISION",
        ],
        ["IMAGE sheet", "STRING report", "STRING leave_out"],
    ),
    "TesseraMaskFolder": (
        "Mask Folder (Tessera)",
        True,
        [
            "folder COMBO",
            "overwrite? BOOLEAN = false",
            "threshold? FLOAT = 0.5",
            'layout? COMBO = "auto"',
            "model? MODEL",
            "conditioning? CONDITIONING",
            "bg_removal_model? BACKGROUND_REMOVAL",
        ],
        ["STRING report"],
    ),
    "TesseraVideoFolder": (
        "Training Clips",
        False,
        [
            "folder COMBO",
            'caption_extension? STRING = ".txt"',
            "repeats? INT = 1",
            'target_frames? STRING = "25"',
            "fps? FLOAT = 16.0",
            'extraction? COMBO = "head"',
            "dataset? TESSERA_DATASET",
            'trigger_words? STRING = ""',
            "frame_stride? INT = 10",
            "frame_sample? INT = 4",
            "max_frames? INT = 81",
            'mask_folder? COMBO = "none"',
            "unmasked_weight? FLOAT = 0.0",
            'flip? COMBO = "off"',
            "crops? INT = 1",
            "crop_zoom? FLOAT = 1.0",
            "loss_weight? FLOAT = 1.0",
            "regularisation? BOOLEAN = false",
            "caption_dropout? FLOAT = 0.0",
            "shuffle_tags? BOOLEAN = false",
            "keep_tokens? INT = 0",
            "tag_dropout? FLOAT = 0.0",
            "caption_per_line? BOOLEAN = false",
            "wildcards? BOOLEAN = false",
            "caption_variants? INT = 8",
            'keep_tokens_separator? STRING = "|||"',
            'class_word? STRING = ""',
            "blank_prompt_preservation? BOOLEAN = false",
            "sample_ratio? FLOAT = 1.0",
            'layout? COMBO = "auto"',
        ],
        ["TESSERA_DATASET dataset"],
    ),
    "TesseraPrepareDataset": (
        "Prepare Dataset",
        True,
        [
            "dataset TESSERA_DATASET",
            "vae VAE",
            "clip CLIP",
            "megapixels? FLOAT = 1.0",
            "max_graphs? INT = 1",
            'fit? COMBO = "ragged edge"',
            'max_text_length? COMBO = "as ComfyUI"',
            "clip_vision? CLIP_VISION",
            "image_to_video? BOOLEAN = false",
            "control_megapixels? FLOAT = 1.0",
            'edit_prompt? COMBO = "plus (2509, 2511)"',
            "encode_empty_caption? BOOLEAN = false",
            'more_megapixels? STRING = ""',
        ],
        ["TESSERA_TRAINING_DATA data", "IMAGE plan", "STRING summary"],
    ),
    "TesseraCaptionFolder": (
        "Caption Folder (Tessera)",
        True,
        [
            "folder COMBO",
            "clip? CLIP",
            'tagger? COMBO = "none"',
            'existing_captions? COMBO = "keep"',
            'style? COMBO = "sentence"',
            "max_words? INT = 40",
            'trigger_words? STRING = ""',
            'never_use? STRING = ""',
            'instruction? STRING = ""',
            "tag_threshold? FLOAT = 0.35",
            "temperature? FLOAT = 0.0",
            "seed? INT = 0",
            'caption_extension? STRING = ".txt"',
            'layout? COMBO = "auto"',
        ],
        ["STRING summary"],
    ),
    "TesseraLatentsToDataset": (
        "Latents to Training Data",
        False,
        [
            "latents LATENT",
            "positive CONDITIONING",
            "max_graphs? INT = 1",
            "masked_loss? BOOLEAN = false",
            "empty? CONDITIONING",
        ],
        ["TESSERA_TRAINING_DATA data"],
    ),
    "TesseraLoraNetwork": (
        "LoRA Network",
        False,
        [
            'algorithm COMBO = "lora"',
            "rank INT = 16",
            "alpha FLOAT = 16.0",
            'targets STRING = ""',
            "dropout FLOAT = 0.0",
            "lora_plus_ratio? FLOAT = 1.0",
            "scale_weight_norms? FLOAT = 0.0",
            'start_from? COMBO = "none"',
            "start_lora? LORA_MODEL",
            'base_lora? COMBO = "none"',
            "base_strength? FLOAT = 1.0",
            "rank_dropout? FLOAT = 0.0",
            "module_dropout? FLOAT = 0.0",
            'rank_patterns? STRING = ""',
            "factor? INT = -1",
            "constraint? FLOAT = 0.0",
            "model? MODEL",
            'init? COMBO = "kaiming"',
            'start_from_low_noise? COMBO = "same"',
            "start_lora_low_noise? LORA_MODEL",
            'base_lora_low_noise? COMBO = "same"',
            "base_strength_low_noise? FLOAT = 1.0",
            'training_adapter? COMBO = "none"',
            "training_adapter_strength? FLOAT = 1.0",
            'training_adapter_low_noise? COMBO = "same"',
            "training_adapter_strength_low_noise? FLOAT = 1.0",
        ],
        ["TESSERA_NETWORK network", "STRING layers"],
    ),
    "TesseraOptimizer": (
        "Optimizer",
        False,
        [
            'optimizer COMBO = "adamw"',
            "learning_rate FLOAT = 0.0001",
            'lr_scheduler COMBO = "constant"',
            "warmup_steps INT = 0",
            "max_grad_norm FLOAT = 1.0",
            "weight_decay? FLOAT = 0.01",
            "beta1? FLOAT = 0.9",
            "beta2? FLOAT = 0.999",
            "eps? FLOAT = 1e-08",
            "min_lr_ratio? FLOAT = 0.0",
            "lr_cycles? INT = 3",
            "lr_power? FLOAT = 2.0",
            "lr_decay_part? FLOAT = 0.2",
            'lr_curve? STRING = "0:1, 50:1, 100:0.1"',
            "ema_decay? FLOAT = 0.0",
            'optimizer_class? STRING = ""',
            'optimizer_args? STRING = ""',
        ],
        ["TESSERA_OPTIMIZER optimizer"],
    ),
    "TesseraObjective": (
        "Training Objective",
        False,
        [
            'timestep_sampling COMBO = "logit_normal"',
            "shift FLOAT = 0.0",
            'loss COMBO = "mse"',
            "guidance FLOAT = 1.0",
            "logit_mean? FLOAT = 0.0",
            "logit_std? FLOAT = 1.0",
            "min_sigma? FLOAT = 0.0",
            "max_sigma? FLOAT = 1.0",
            'sigma_range? COMBO = "cut"',
            "expert_boundary? FLOAT = 0.0",
            "sigmoid_scale? FLOAT = 1.0",
            "mode_scale? FLOAT = 1.29",
            "logsnr_mean? FLOAT = -6.0",
            "logsnr_std? FLOAT = 2.0",
            "beta_alpha? FLOAT = 2.0",
            "beta_beta? FLOAT = 2.0",
            'sigma_curve? STRING = "0:1, 1:1"',
            'stratified? COMBO = "off"',
            'weighting? COMBO = "none"',
            "min_snr_gamma? FLOAT = 5.0",
            "huber_c? FLOAT = 0.1",
            'huber_schedule? COMBO = "constant"',
            "ip_noise_gamma? FLOAT = 0.0",
            "ip_noise_gamma_random_strength? BOOLEAN = false",
            "noise_offset? FLOAT = 0.0",
            "preservation_weight? FLOAT = 0.0",
            "guidance_loss_scale? FLOAT = 0.0",
        ],
        ["TESSERA_OBJECTIVE objective", "IMAGE distribution"],
    ),
    "TesseraMemory": (
        "Training Memory",
        False,
        [
            'checkpointing COMBO = "auto"',
            'attention COMBO = "auto"',
            "activation_budget? FLOAT = 0.5",
            "blocks_to_swap? INT = 0",
            "prefetch_blocks? INT = 1",
            'pin_memory? COMBO = "auto"',
            "offload_activations? BOOLEAN = false",
            'low_bit_matmul? COMBO = "off"',
            'quantize? COMBO = "as stored"',
            "shard? BOOLEAN = false",
            'verify? COMBO = "auto"',
        ],
        ["TESSERA_MEMORY memory"],
    ),
    "TesseraPreview": (
        "Training Preview",
        False,
        [
            "vae VAE",
            "positive CONDITIONING",
            "every_n_steps INT = 250",
            "at_start BOOLEAN = true",
            "width INT = 1024",
            "height INT = 1024",
            "steps INT = 20",
            "cfg FLOAT = 1.0",
            'sampler_name COMBO = "euler"',
            'scheduler COMBO = "simple"',
            "seed INT = 0",
            "seeds INT = 1",
            "negative? CONDITIONING",
            "latent_image? LATENT",
            "frames? INT = 1",
            'label? STRING = ""',
            "fps? FLOAT = 16.0",
            "use_ema? BOOLEAN = true",
            "preview? TESSERA_PREVIEW",
            "model? MODEL",
        ],
        ["TESSERA_PREVIEW preview"],
    ),
    "TesseraTrainingEstimate": (
        "Training Estimate",
        True,
        [
            "model MODEL",
            "data TESSERA_TRAINING_DATA",
            'output_name STRING = "my_lora"',
            "steps INT = 1000",
            "learning_rate FLOAT = 0.0001",
            "rank INT = 16",
            "batch_size INT = 1",
            "gradient_accumulation INT = 1",
            "seed INT = 0",
            'compile COMBO = "auto"',
            "save_every INT = 250",
            'resume COMBO = "latest"',
            "network? TESSERA_NETWORK",
            "optimizer? TESSERA_OPTIMIZER",
            "objective? TESSERA_OBJECTIVE",
            "memory? TESSERA_MEMORY",
            "model_low_noise? MODEL",
            "preview? TESSERA_PREVIEW",
            "validation? TESSERA_VALIDATION",
            "save_every_epochs? INT = 0",
            "keep_last? INT = 0",
            'devices? STRING = "this one"',
            'preset? COMBO = "custom"',
            'while_others_wait? COMBO = "finish first"',
            "minutes_between_pauses? FLOAT = 5.0",
        ],
        ["STRING report"],
    ),
    "TesseraTrainLora": (
        "Train LoRA (Tessera)",
        True,
        [
            "model MODEL",
            "data TESSERA_TRAINING_DATA",
            'output_name STRING = "my_lora"',
            "steps INT = 1000",
            "learning_rate FLOAT = 0.0001",
            "rank INT = 16",
            "batch_size INT = 1",
            "gradient_accumulation INT = 1",
            "seed INT = 0",
            'compile COMBO = "auto"',
            "save_every INT = 250",
            'resume COMBO = "latest"',
            "network? TESSERA_NETWORK",
            "optimizer? TESSERA_OPTIMIZER",
            "objective? TESSERA_OBJECTIVE",
            "memory? TESSERA_MEMORY",
            "model_low_noise? MODEL",
            "preview? TESSERA_PREVIEW",
            "validation? TESSERA_VALIDATION",
            "save_every_epochs? INT = 0",
            "keep_last? INT = 0",
            'devices? STRING = "this one"',
            'preset? COMBO = "custom"',
            'while_others_wait? COMBO = "finish first"',
            "minutes_between_pauses? FLOAT = 5.0",
        ],
        [
            "LORA_MODEL lora",
            "LOSS_MAP loss",
            "STRING path",
            "LORA_MODEL lora_low_noise",
            "LOSS_MAP loss_low_noise",
            "STRING path_low_noise",
            "IMAGE previews",
            "IMAGE previews_low_noise",
        ],
    ),
    "TesseraSaveLora": (
        "Save LoRA",
        True,
        [
            "lora LORA_MODEL",
            'filename_prefix STRING = ""',
            'format COMBO = "kohya"',
            'dtype COMBO = "bf16"',
            "save_workflow? BOOLEAN = false",
        ],
        ["STRING path"],
    ),
    "TesseraCompareLoras": (
        "Compare LoRAs",
        True,
        [
            "model MODEL",
            "vae VAE",
            "positive CONDITIONING",
            'loras STRING = ""',
            'run COMBO = "none"',
            'strengths STRING = "1"',
            "without_lora BOOLEAN = true",
            "width INT = 1024",
            "height INT = 1024",
            "steps INT = 20",
            "cfg FLOAT = 1.0",
            'sampler_name COMBO = "euler"',
            'scheduler COMBO = "simple"',
            "seed INT = 0",
            "seeds INT = 1",
            "negative? CONDITIONING",
            "latent_image? LATENT",
            "frames? INT = 1",
            'label? STRING = ""',
            "more_prompts? TESSERA_PREVIEW",
            "lora_models? COMFY_AUTOGROW_V3",
            "model_low_noise? MODEL",
            "lora_models_low_noise? COMFY_AUTOGROW_V3",
            "expert_boundary? FLOAT = 0.0",
            "switch_step? INT = 0",
            'clips? COMBO = "middle frame"',
            "fps? FLOAT = 16.0",
            "clip_vision? CLIP_VISION",
            "training_pictures? TESSERA_DATASET",
            'sort_by? COMBO = "as listed"',
        ],
        ["IMAGE grid", "IMAGE pictures"],
    ),
    "TesseraLossPlot": (
        "Loss Plot",
        True,
        ["loss LOSS_MAP", "smoothing FLOAT = 0.9", "log_scale BOOLEAN = false"],
        ["IMAGE plot"],
    ),
    "TesseraLossByPicture": (
        "Loss by Picture",
        True,
        ["loss LOSS_MAP"],
        ["IMAGE sheet", "STRING leave_out", "STRING summary"],
    ),
    "TesseraLoadLora": (
        "Load LoRA File (Tessera)",
        False,
        ["lora_file COMBO", "model MODEL"],
        ["LORA_MODEL lora", "STRING report"],
    ),
    "TesseraMergeLoras": (
        "Merge LoRAs",
        False,
        [
            "model MODEL",
            "lora_models COMFY_AUTOGROW_V3",
            'weights STRING = "1"',
            'method COMBO = "weighted"',
            "rank INT = 0",
            "density FLOAT = 0.5",
            "seed INT = 0",
            "energy FLOAT = 1.0",
        ],
        ["LORA_MODEL lora", "STRING report"],
    ),
    "TesseraResizeLora": (
        "Resize LoRA",
        False,
        [
            "lora LORA_MODEL",
            "model MODEL",
            "rank INT = 16",
            'blocks STRING = ""',
            "energy FLOAT = 1.0",
            'algorithm? COMBO = "lora"',
            "factor? INT = -1",
        ],
        ["LORA_MODEL lora", "STRING report"],
    ),
    "TesseraExtractLora": (
        "Extract LoRA",
        False,
        ["model MODEL", "tuned_model MODEL", "rank INT = 32", "energy FLOAT = 1.0"],
        ["LORA_MODEL lora", "STRING report"],
    ),
    "TesseraAverageStates": (
        "Average States",
        False,
        [
            "run COMBO",
            'profile COMBO = "exponential"',
            "decay FLOAT = 0.999",
            "width FLOAT = 0.1",
            "last_part FLOAT = 1.0",
        ],
        ["LORA_MODEL lora", "STRING report"],
    ),
    "TesseraValidation": (
        "Validation",
        False,
        [
            "part FLOAT = 0.1",
            "every_n_steps INT = 100",
            "at_start BOOLEAN = true",
            "keep_best BOOLEAN = true",
            "seed INT = 0",
            "min_sigma FLOAT = 0.0",
            "max_sigma FLOAT = 1.0",
            "data? TESSERA_TRAINING_DATA",
            'sigmas? STRING = ""',
            "loss_by_picture? BOOLEAN = false",
        ],
        ["TESSERA_VALIDATION validation"],
    ),
    "TesseraSlider": (
        "Slider",
        False,
        [
            "data TESSERA_TRAINING_DATA",
            "clip CLIP",
            'positive STRING = ""',
            'negative STRING = ""',
            'neutral STRING = ""',
            'keep STRING = ""',
            'attributes STRING = ""',
            "guidance_scale FLOAT = 3.0",
        ],
        ["TESSERA_TRAINING_DATA data"],
    ),
    "TesseraPictureSlider": (
        "Slider from Pictures",
        False,
        ["positive TESSERA_TRAINING_DATA", "negative TESSERA_TRAINING_DATA"],
        ["TESSERA_TRAINING_DATA data"],
    ),
    "TesseraEraseConcept": (
        "Erase Concept",
        False,
        [
            "data TESSERA_TRAINING_DATA",
            "clip CLIP",
            'erase STRING = ""',
            'target STRING = ""',
            'keep STRING = ""',
            "guidance_scale FLOAT = 1.0",
        ],
        ["TESSERA_TRAINING_DATA data"],
    ),
    "TesseraTryItModels": ("Try It Models (Tessera)", False, [], ["MODEL", "CLIP", "VAE"]),
}

# The names that the design promises to workflows and clients; none of them may ever be renamed or removed.
CONTRACT = {
    "TesseraLoadDiffusionModel": "unet_name weight_dtype blocks_to_swap prefetch_blocks pin_memory quantize",
    "TesseraBlockSwap": "model blocks_to_swap prefetch_blocks pin_memory",
    "TesseraCompileModel": "model backend mode dynamic fullgraph cache_size_limit scope preset overrides",
    "TesseraCompileReport": "model after",
    "TesseraTuneCompile": "model width height time_budget",
    "TesseraImageFolder": "folder caption_extension repeats trigger_words dataset",
    "TesseraCheckFolder": "folder megapixels factor trigger_words clip clip_vision",
    "TesseraMaskFolder": "folder overwrite threshold model conditioning bg_removal_model",
    "TesseraVideoFolder": "folder caption_extension repeats target_frames fps extraction dataset",
    "TesseraPrepareDataset": "dataset vae clip megapixels max_graphs fit clip_vision",
    "TesseraLatentsToDataset": "latents positive max_graphs",
    "TesseraSlider": "data clip positive negative neutral keep attributes guidance_scale",
    "TesseraPictureSlider": "positive negative",
    "TesseraEraseConcept": "data clip erase target keep guidance_scale",
    "TesseraLoraNetwork": "algorithm rank alpha targets dropout",
    "TesseraOptimizer": "optimizer learning_rate lr_scheduler warmup_steps max_grad_norm",
    "TesseraObjective": "timestep_sampling shift loss guidance",
    "TesseraMemory": "checkpointing attention blocks_to_swap offload_activations low_bit_matmul quantize shard verify",
    "TesseraPreview": "vae positive every_n_steps at_start width height steps cfg sampler_name scheduler seed seeds "
    "negative latent_image frames label fps use_ema preview",
    "TesseraTrainingEstimate": "model data output_name steps learning_rate rank batch_size gradient_accumulation seed "
    "compile save_every resume network optimizer objective memory model_low_noise preview",
    "TesseraTrainLora": "model data output_name steps learning_rate rank batch_size gradient_accumulation seed compile "
    "save_every resume network optimizer objective memory model_low_noise preview",
    "TesseraSaveLora": "lora filename_prefix format dtype",
    "TesseraCompareLoras": "model vae positive loras run strengths without_lora width height steps cfg sampler_name "
    "scheduler seed seeds negative latent_image frames label more_prompts lora_models model_low_noise "
    "lora_models_low_noise expert_boundary switch_step clips fps",
    "TesseraLossPlot": "loss smoothing log_scale",
    "TesseraLossByPicture": "loss",
    "TesseraLoadLora": "lora_file model",
    "TesseraMergeLoras": "model lora_models weights method rank density seed energy",
    "TesseraResizeLora": "lora model rank blocks energy algorithm factor",
    "TesseraExtractLora": "model tuned_model rank energy",
    "TesseraAverageStates": "run profile decay width last_part",
    "TesseraValidation": "part every_n_steps at_start keep_best seed min_sigma max_sigma data sigmas",
    "TesseraTryItModels": "",
    "TesseraCaptionFolder": "folder clip tagger existing_captions style max_words trigger_words never_use",
}

# Choices that workflows hold; more may be added.
CHOICES = {
    ("TesseraLoadDiffusionModel", "weight_dtype"): ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"],
    ("TesseraLoadDiffusionModel", "quantize"): ["as stored", "int8", "fp8"],
    ("TesseraCompileModel", "backend"): ["inductor", "cudagraphs", "aot_eager", "eager"],
    ("TesseraCompileModel", "mode"): ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    ("TesseraCompileModel", "dynamic"): ["auto", "true", "false"],
    ("TesseraCompileModel", "scope"): ["blocks", "stack", "model"],
    ("TesseraCompileModel", "preset"): ["custom", "fast start", "balanced", "maximum speed"],
    ("TesseraPrepareDataset", "fit"): ["whole grids", "ragged edge"],
    ("TesseraPrepareDataset", "max_text_length"): ["as ComfyUI", "512", "256"],
    ("TesseraPrepareDataset", "edit_prompt"): ["plus (2509, 2511)", "first edit"],
    ("TesseraVideoFolder", "extraction"): ["head", "chunk", "slide", "uniform", "full"],
    ("TesseraVideoFolder", "flip"): ["off", "horizontal"],
    ("TesseraImageFolder", "flip"): ["off", "horizontal"],
    ("TesseraImageFolder", "layout"): ["auto", "plain", "kohya folders", "dataset file", "captions file", "archives"],
    ("TesseraCheckFolder", "layout"): ["auto", "plain", "kohya folders", "dataset file", "captions file", "archives"],
    ("TesseraCaptionFolder", "existing_captions"): ["keep", "append", "replace"],
    ("TesseraCaptionFolder", "style"): ["sentence", "paragraph", "tags"],
    ("TesseraVideoFolder", "layout"): ["auto", "plain", "kohya folders", "dataset file", "captions file", "archives"],
    ("TesseraLoraNetwork", "algorithm"): ["lora", "loha", "lokr", "dora", "oft"],
    ("TesseraOptimizer", "optimizer"): [
        *("adamw", "adamw8bit", "prodigy", "adafactor", "came", "adamw_schedulefree", "lion", "muon", "custom")
    ],
    ("TesseraOptimizer", "lr_scheduler"): [
        *("constant", "cosine", "linear", "cosine_with_restarts", "polynomial", "warmup_stable_decay", "rex"),
        *("inverse_sqrt", "curve"),
    ],
    ("TesseraObjective", "timestep_sampling"): [
        *("logit_normal", "uniform", "resolution_shifted", "resolution_flux2", "resolution_qwen"),
        *("sigmoid", "mode", "logsnr", "beta", "custom"),
    ],
    ("TesseraObjective", "loss"): ["mse", "huber", "pseudo_huber", "l1"],
    ("TesseraObjective", "stratified"): ["off", "batch", "epoch"],
    ("TesseraObjective", "weighting"): ["none", "sigma_sqrt", "cosmap", "min_snr"],
    ("TesseraObjective", "huber_schedule"): ["constant", "snr", "exponential"],
    ("TesseraObjective", "sigma_range"): ["cut", "squeeze"],
    ("TesseraMemory", "checkpointing"): ["none", "selective", "full", "auto"],
    ("TesseraLoadDiffusionModel", "pin_memory"): ["auto", "on", "off"],
    ("TesseraBlockSwap", "pin_memory"): ["auto", "on", "off"],
    ("TesseraMemory", "attention"): ["auto", "sdpa", "flash-attn", "cudnn"],
    ("TesseraMemory", "low_bit_matmul"): ["off", "int8", "fp8", "auto"],
    ("TesseraMemory", "quantize"): ["as stored", "int8", "fp8"],
    ("TesseraMemory", "verify"): ["auto", "on", "off"],
    ("TesseraTrainLora", "compile"): ["auto", "off"],
    ("TesseraAverageStates", "profile"): ["exponential", "power", "equal"],
    ("TesseraTrainLora", "resume"): ["latest", "off"],
    ("TesseraCompareLoras", "clips"): ["middle frame", "3 frames", "5 frames", "9 frames", "animation"],
    ("TesseraMergeLoras", "method"): ["weighted", "ties", "dare", "dare ties"],
    ("TesseraCompareLoras", "sort_by"): ["as listed", "likeness", "variety", "validation loss"],
    ("TesseraSaveLora", "format"): ["kohya", "comfyui", "diffusers"],
    ("TesseraSaveLora", "dtype"): ["bf16", "fp16", "fp32"],
}

SCHEMAS = {node.GET_SCHEMA().node_id: node.GET_SCHEMA() for node in NODES}
every_node = pytest.mark.parametrize("node_id", SURFACE)


def described(item) -> str:
    """An input or output of a schema as SURFACE writes it."""
    if hasattr(item, "optional"):
        default = getattr(item, "default", None)
        default_text = "" if default is None else f" = {json.dumps(default)}"
        return f"{item.id}{'?' if item.optional else ''} {item.io_type}{default_text}"
    return " ".join(filter(None, (item.io_type, item.display_name)))


def help_rows(node_id: str) -> list[tuple[str, str, str, str]]:
    """(name, default, "advanced" or "", text) of the items of a help page's list of inputs."""
    page = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
    section = re.split(r"\n##+ ", page.split("\n## Inputs\n", 1)[1])[0]
    item = r"^- `(\w+)`(?: \((?:default `?(.*?)`?(?:, )?)?(advanced)?\))?<br>(.+)$"
    return re.findall(item, section, re.MULTILINE)


def test_nodes_are_exactly_these_and_each_is_listed_once():
    assert sorted(node.GET_SCHEMA().node_id for node in NODES) == sorted(SURFACE)


@every_node
def test_the_surface_of_a_node_is_as_written_down(node_id):
    schema = SCHEMAS[node_id]
    inputs, outputs = [described(i) for i in schema.inputs], [described(o) for o in schema.outputs]
    assert (schema.display_name, bool(schema.is_output_node), inputs, outputs) == SURFACE[node_id]


@every_node
def test_the_inputs_that_the_design_promises_are_there(node_id):
    assert CONTRACT.keys() == SURFACE.keys()
    missing = set(CONTRACT[node_id].split()) - {i.id for i in SCHEMAS[node_id].inputs}
    assert not missing


@every_node
def test_a_node_shows_at_most_seven_widgets_at_first(node_id):
    widgets = [i for i in SCHEMAS[node_id].inputs if isinstance(i, io.WidgetInput)]
    assert len([i.id for i in widgets if not i.advanced]) <= 7


@pytest.mark.parametrize(("node_id", "name"), CHOICES)
def test_choices_that_workflows_hold_are_still_there(node_id, name):
    (options,) = [i.as_dict()["options"] for i in SCHEMAS[node_id].inputs if i.id == name]
    assert set(CHOICES[node_id, name]) <= set(options)


@every_node
def test_a_node_says_what_it_is_and_every_input_what_it_does(node_id):
    schema = SCHEMAS[node_id]
    assert len(schema.description) > 30
    assert schema.category.startswith("Tessera/")
    assert [i.id for i in schema.inputs if len(i.tooltip or "") < 20] == []


@every_node
def test_the_help_page_explains_every_input_with_its_default(node_id):
    inputs = {i.id: getattr(i, "default", None) for i in SCHEMAS[node_id].inputs}
    rows = help_rows(node_id)
    assert [row[0] for row in rows] == list(inputs)
    advanced = [i.id for i in SCHEMAS[node_id].inputs if getattr(i, "advanced", None)]
    assert [name for name, _, mark, _ in rows if mark] == advanced
    texts = {None: "", "": "empty", False: "off", True: "on"}
    for name, default, _, text in rows:
        value = inputs[name]
        expected = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        assert default == (expected or texts.get(value, value)), name
        assert len(text) > 15, name


def test_every_help_page_belongs_to_a_node():
    pages = [entry for entry in DOCS.iterdir() if entry.is_file()]  # folders hold translations, see test_locales
    assert {page.stem for page in pages} == set(SURFACE)
    for page in pages:
        assert page.read_text(encoding="utf-8").startswith(f"# {SURFACE[page.stem][0]}\n")


def test_the_readme_lists_every_node():
    listed = re.findall(r"^\| ([A-Z].+?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, *_ in SURFACE.values()} - {*listed} - {f"{name} (Tessera)" for name in listed} == set()


def test_the_pack_is_of_the_new_node_api_only():
    assert not hasattr(tessera, "NODE_CLASS_MAPPINGS")  # it would shadow the nodes of comfy_entrypoint
    assert callable(tessera.comfy_entrypoint)
    assert TesseraExtension.__module__ == "tessera.nodes"


def test_the_version_is_that_of_the_package():
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version == VERSION


def test_the_server_offers_exactly_these_nodes_in_this_form(server):
    info = server.get("/object_info")
    own_nodes = {name: node for name, node in info.items() if node["python_module"].startswith("custom_nodes.")}
    assert set(own_nodes) == {*SURFACE, "TesseraTinyClipLoader", "TesseraTinyEncoders", "TesseraTinyNative"}
    for node_id, (display_name, is_output, inputs, outputs) in SURFACE.items():
        node = own_nodes[node_id]
        assert node["python_module"] == "custom_nodes.tessera"  # the frontend takes the help's address from it
        assert (node["display_name"], node["output_node"]) == (display_name, is_output)
        names = [line.split()[0] for line in inputs]
        assert node["input_order"].get("required", []) == [n for n in names if not n.endswith("?")], node_id
        assert node["input_order"].get("optional", []) == [n[:-1] for n in names if n.endswith("?")], node_id
        assert node["output"] == [line.split()[0] for line in outputs], node_id


def test_the_server_gives_the_help_pages_where_the_frontend_looks_for_them(server):
    for node_id in SURFACE:
        with DIRECT.open(f"{server.url}/extensions/tessera/docs/{node_id}.md", timeout=30) as reply:
            assert reply.read() == (DOCS / f"{node_id}.md").read_bytes()


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.define_schema().node_id)
@pytest.mark.parametrize("literal", ["hello " * 50, 7, [1, "x"], {"a": 1}], ids=["text", "number", "list", "dict"])
def test_values_written_where_a_connection_belongs_are_told(node, literal):
    schema = node.define_schema()
    for item in schema.inputs:
        is_grown = isinstance(item, io.Autogrow.Input)
        kind = item.template.input.get_io_type() if is_grown else item.get_io_type()
        plain = {"CONDITIONING": list, "LATENT": dict, "LORA_MODEL": dict, "LOSS_MAP": dict}.get(kind, str)
        if (
            (isinstance(item, io.WidgetInput) and not is_grown)
            or kind == "*"
            or type(literal) is plain
            and plain is not str
        ):
            continue
        argument = {"lora0": literal} if is_grown else [literal] if schema.is_input_list else literal
        with pytest.raises(
            ValueError, match=f"^{item.id} is .*; connect the output of a node that gives {kind}"
        ) as error:
            awaited(node.execute(**{item.id: argument}))
        assert len(str(error.value)) < 250

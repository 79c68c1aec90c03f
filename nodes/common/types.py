"""Types of connections between nodes: ours, and core's two that its training nodes define."""

from comfy_api.latest import io

# Core's, by their names: what its LoRA training node gives and its savers and plots take.
LoraModelType = io.Custom("LORA_MODEL")
LossMapType = io.Custom("LOSS_MAP")

DatasetType = io.Custom("TESSERA_DATASET")
TrainingDataType = io.Custom("TESSERA_TRAINING_DATA")
NetworkType = io.Custom("TESSERA_NETWORK")
OptimizerType = io.Custom("TESSERA_OPTIMIZER")
ObjectiveType = io.Custom("TESSERA_OBJECTIVE")
MemoryType = io.Custom("TESSERA_MEMORY")
PreviewType = io.Custom("TESSERA_PREVIEW")
ValidationType = io.Custom("TESSERA_VALIDATION")

// Sentences on what core's Train LoRA has and this pack's has not: only values that change something.
import { widgetOf } from '../common/widgets.js'

const NEW = 'Train LoRA (Tessera)'

const sentences = {
  optimizer: (value) => value !== 'AdamW' &&
    `optimizer was ${value}: ${NEW} uses AdamW; connect an Optimizer node to choose another.`,
  loss_function: (value) => value !== 'MSE' &&
    `loss_function was ${value}: ${NEW} uses mse; connect Training Objective to choose another loss.`,
  training_dtype: (value) => value === 'fp32' &&
    `training_dtype was fp32: ${NEW} computes in the type that the model is loaded in; set it on the model's loader.`,
  lora_dtype: (value) => value !== 'fp32' &&
    `lora_dtype was ${value}: here the LoRA is trained and saved in fp32; Save LoRA writes smaller files.`,
  quantized_backward: (value) => value &&
    'quantized_backward was on: connect Training Memory and choose int8 or fp8 under low_bit_matmul.',
  algorithm: (value) => value !== 'LoRA' &&
    `algorithm was ${value}: this trains a LoRA; connect LoRA Network and choose ${value.toLowerCase()} there.`,
  gradient_checkpointing: (value) => !value &&
    'gradient_checkpointing was off: here it is auto, the fastest that fits; connect Training Memory to switch it off.',
  checkpoint_depth: (value) => value !== 1 &&
    `checkpoint_depth was ${value}: here whole blocks are checkpointed; Training Memory has other ways.`,
  offloading: (value) => value &&
    'offloading was on: connect Training Memory and set blocks_to_swap to -1.',
  existing_lora: (value) => value !== '[None]' &&
    `existing_lora was ${value}: connect LoRA Network and choose the file under start_from.`,
  bucket_mode: (value) => value &&
    'bucket_mode was on: Latents to Training Data takes buckets as they are; raise its max_graphs to crop less.',
  bypass_mode: (value) => value &&
    'bypass_mode was on: nothing to set, models in 8 bits and GGUF train as they are.',
}

/** Sentences about the inputs and outputs of core's node that lead nowhere now. */
export function left(node) {
  const linked = new Set(node.inputs.filter((input) => input.link != null).map((input) => input.name))
  const found = Object.entries(sentences).map(([name, tell]) => {
    if (linked.has(name)) return `${name} came from another node: ${NEW} has no such input.`
    const widget = widgetOf(node, name)
    return widget && tell(widget.value)
  })
  const after = widgetOf(node, 'control_after_generate')?.value
  if (after && after !== 'fixed' && !linked.has('seed')) {
    found.push(`The seed was set to ${after} after each run: here it is fixed, so that Run goes on with the same LoRA.`)
  }
  if (node.outputs.find((output) => output.name === 'steps')?.links?.length) {
    found.push('The output steps is gone: type the number where it was connected.')
  }
  return found.filter(Boolean)
}

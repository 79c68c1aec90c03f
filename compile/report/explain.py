"""Explanations of torch's messages: the cause of a graph break, and advice for a recompile."""

import re
from itertools import takewhile

# By kind, the first line of torch's message (all kinds: torch/_dynamo/graph_break_registry.json); the first matching
# pattern counts. A kind that matches none gets torch's own explanation.
_BREAKS: tuple[tuple[str, str], ...] = (
    (
        r"recompile limit exceeded",
        "The limit of graphs was reached, so what did not fit runs uncompiled: raise cache_size_limit, or see which "
        "guard failed each time.",
    ),
    (
        r"Custom op missing fake impl|support running with fake tensors|no meta kernel|UnsupportedFakeTensorException",
        "A custom operator does not say what shape its result has (it has no fake kernel): its author has to register "
        "one.",
    ),
    (
        r"^(Unsupported Tensor\.item|Data.dependent|Dynamic (shape|slicing)|Tensor\.tolist|unsupported index\(Tensor\))"
        r"|non-scalar tensor|real value|data-dependent (expression|output shape)|guard_scalar",
        "The code reads a tensor's value to decide how to go on (`.item()`, `if tensor`, `nonzero()`), but a graph is "
        "made without values.",
    ),
    (r"^(Data pointer|invalid ptr)", "The code uses a tensor's memory address, which a graph does not have."),
    (
        r"logging\.Logger|reorder a debugging function",
        "The code prints or logs in the middle, which ends a graph.",
    ),
    (
        r"disable\(\)|skip_frame\(\)|graph_break\(\)|step_unsupported|^ComptimeContext|^Forced graph break",
        "The code's author excluded this function from compiling.",
    ),
    (
        r"[Gg]enerator\b(?! method)|^CLEANUP_THROW|^SEND|itertools|next\(\) call|tp_iter",
        "The code runs through a generator or an iterator that torch cannot follow.",
    ),
    (
        r"context manager|contextlib|contextmanager|GenericContextWrapping|escaped from compiled region|mem_pool",
        "The code enters a context manager (`with …`) that torch cannot follow.",
    ),
    (
        r"hook",
        "The code sets a hook on a tensor or a module, which a graph cannot hold.",
    ),
    (
        r"autograd|backward\(\)|requires_grad|grad_fn|retain_grad|custom (jvp|vjp)|gradient",
        "The code uses autograd in the middle of the forward.",
    ),
    (
        r"[Ss]ide effect|[Mm]utat|STORE_ATTR|STORE_GLOBAL|^setattr|setattr name|__setitem__|__delattr__|^Write to"
        r"|Tensor\.(resize|set_|sparse_resize|share_memory)|set tensor attribute|assignment on",
        "The code changes an object outside the graph in a way that torch cannot carry over.",
    ),
    (
        r"marked as skipped|builtin operator|not implemented in python|in C/C\+\+|C-implemented|Untraceable C"
        r"|C extensions|jit\.script|TorchScript|ScriptModule",
        "The code calls a function that torch cannot look into (one written in C, or one that torch skips).",
    ),
    (
        r"sparse|NestedTensor|tensor subclass|Tensor subclass|COW tensor|dual tensor",
        "The code uses a special kind of tensor (sparse, nested or a subclass) that torch cannot trace here.",
    ),
    (r"numpy|ndarray", "The code leaves torch for numpy."),
    (r"random|torch\.Generator|uniform_", "The code draws random numbers in a way that a graph cannot."),
    (r"^(Bad import|Import failure)", "The code imports a module in the middle."),
    (r"^Observed exception", "The code raised an error while it was traced."),
    (r"device mismatch", "Tensors of different devices meet in one operation."),
    (
        r"higher order|HigherOrder|\bHOP\b|^torch\.(cond|scan|map|switch|while_loop|associative_scan)\b",
        "The code uses one of torch's control-flow operators in a way that torch cannot trace.",
    ),
    (r"^graph break in loop", "The graph ended inside a loop, so the whole function runs uncompiled."),
    (r"distributed|P2P|FSDP|async_op", "The code talks to other processes."),
)

# For kinds that say only that something is unsupported: matched with the rest of the message, which names it.
_WITHIN: tuple[tuple[str, str], ...] = (
    (
        r"_FuncPtr|PyCFuncPtr|CFuncPtr|CFunctionType|ctypes",
        "The code calls into a C library through ctypes, which torch cannot look into, as ComfyUI's dynamic VRAM does.",
    ),
    (
        r"no fake impl|no meta kernel",
        "A custom operator does not say what shape its result has (it has no fake kernel): its author has to register "
        "one.",
    ),
    (r"builtin operator `print`|qualname: warn", "The code prints or logs in the middle, which ends a graph."),
    (r"data_ptr", "The code uses a tensor's memory address, which a graph does not have."),
)


def explain_break(cause: str) -> str:
    """Explain a graph break in one sentence, from torch's message (`Break.detail`, `CompileEvent.error`).

    Torch's summary names the last problem it met, while it handled the actual cause. The first cause is explained here.
    """
    first = cause.partition("*** While handling this graph break")[0].strip()
    kind, _, rest = first.partition("\n")
    first_line, *further_lines = rest.partition("Explanation: ")[2].split("\n")
    lines = takewhile(lambda line: not line.lstrip().startswith(("Hint:", "Developer debug context:")), further_lines)
    explanation = " ".join(" ".join((first_line, *lines)).split())
    context = " ".join(re.findall(r"(?:Developer debug context|In): (.*)", rest))
    for pattern, words in _WITHIN:
        if re.search(pattern, f"{explanation} {context}"):
            return words
    for pattern, words in _BREAKS:
        if re.search(pattern, kind):
            called = re.search(
                r"(?:builtin|function|operator) `<?(?:function )?([\w.]+?)\.?(?: at \w+)?>?`", explanation
            )
            error = re.search(r"raised exception (.*)", context)
            subject = called.group(1) if called else error.group(1) if error else None
            return f"{words[:-1]}: {subject}." if subject and ":" not in words else words
    # The operator's message from its run on fake tensors.
    said = re.sub(r"^.*?: got (?=\w+\()", "", explanation or kind).replace("Dynamo ", "torch ")
    return f"Torch cannot trace this ({kind.strip()}): {said[:300].rstrip('.')}."


_RECOMPILES: tuple[tuple[str, str], ...] = (
    (
        r"weight_function|bias_function|weight_lowvram|LowVramPatch",
        "A LoRA works on a partly loaded model, where its patches are part of the graph: free memory so that the model "
        "loads whole, or use fewer LoRAs.",
    ),
    (
        r"\.adapter\b|BypassForwardHook",
        "The strength of a bypass LoRA is part of the graph: use an ordinary LoRA loader, which compiles nothing.",
    ),
    (
        r"comfy_cast_weights",
        "The model is partly loaded, or other layers of it are than before: free memory so that it loads whole.",
    ),
    (
        r"transformer_options|optimized_attention_override|patches_replace",
        "A patch, an attention override or another entry of the transformer options changed: keep the same patch nodes "
        "on the MODEL from run to run.",
    ),
    (
        r"dispatch key",
        "A weight or an input changed between an ordinary tensor and one made under inference mode, as when a LoRA is "
        "baked into some of the weights: add the LoRA before the first run and keep it on.",
    ),
    (
        r"device mismatch",
        "A tensor is on another device, for example because a model is partly offloaded: free memory so that the "
        "model loads whole, or use Block Swap.",
    ),
    (
        r"dtype mismatch",
        "A tensor came in another dtype, as when a model is partly offloaded or loaded with another weight_dtype: "
        "keep one dtype.",
    ),
    (
        r"grad_mode|requires_grad|autocast",
        "The model ran both with gradients and without (or under autocast), which needs a graph each.",
    ),
    (
        r"^GLOBAL_STATE|^utils_device|^___check_(global_state|torch_function_mode)|saved_tensors_hooks",
        "A setting of torch that holds for the whole process changed between two runs, as another node may do.",
    ),
    (
        r"size mismatch|rank mismatch|\.size\(\)|\.storage_offset\(\)",
        "The size changed (picture, batch or text length): set dynamic to true, or keep one size.",
    ),
    (
        r"stride mismatch|\.stride\(\)",
        "A tensor has another memory layout than before, because of a node in front or another batch.",
    ),
    (
        r"___check_type_id|type mismatch",
        "An object of another class is in the model, for example because a node replaces a layer: keep the nodes in "
        "front as they are.",
    ),
    (
        r"___check_obj_id|\bis\b",
        "Another object or function is in the model, for example because a node replaces one at each run: keep the "
        "nodes in front as they are.",
    ),
    (
        r"\blen\(|^not |dict_contains|hasattr|dict\.keys",
        "A list or a set of options has more or fewer entries than before: keep the nodes in front as they are.",
    ),
    (
        r"==|!=|<=|>=|<|>",
        "A number or an option that the model's code reads has another value: keep the settings in front as they are.",
    ),
    (r"invalid", "An object that the graph was made for is gone, as after a reload of the model."),
)


def advice(guard: str) -> str:
    """Explain a failed guard (`Recompile.guards`): the change, and the remedy in the workflow."""
    for pattern, words in _RECOMPILES:
        if re.search(pattern, guard):
            return words
    return "Something that the graph was made for has changed: keep the nodes in front of Compile Model as they are."

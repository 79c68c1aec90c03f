"""Private names of torch that reporting needs. They are used in `events` and `guards` and nowhere else.

If a torch lacks one, its part of the event is None and `unavailable` says so; nothing fails.
"""

import importlib

import torch

TESTED_TORCH = ("2.14",)

# Information that is unknown if a name is missing, and the names: "module:attribute", dotted.
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "graphs and compile seconds": (
        "torch._dynamo.utils:_compilation_metrics",
        "torch._dynamo.utils:CompilationMetrics.compile_id",
        "torch._dynamo.utils:CompilationMetrics.co_name",
        "torch._dynamo.utils:CompilationMetrics.co_filename",
        "torch._dynamo.utils:CompilationMetrics.co_firstlineno",
        "torch._dynamo.utils:CompilationMetrics.duration_us",
        "torch._dynamo.utils:CompilationMetrics.aot_autograd_cumulative_compile_time_us",
        "torch._dynamo.utils:CompilationMetrics.has_guarded_code",
        "torch._dynamo.utils:CompilationMetrics.graph_op_count",
        "torch._dynamo.utils:CompilationMetrics.graph_node_shapes",
        "torch._dynamo.utils:CompilationMetrics.fail_type",
        "torch._dynamo.utils:CompilationMetrics.fail_reason",
        "torch._dynamo.utils:CompilationMetrics.fail_user_frame_filename",
        "torch._dynamo.utils:CompilationMetrics.fail_user_frame_lineno",
    ),
    "cache hits": (
        "torch._dynamo.utils:CompilationMetrics.inductor_fx_local_cache_hit_count",
        "torch._dynamo.utils:CompilationMetrics.inductor_fx_local_cache_miss_count",
        "torch._dynamo.utils:CompilationMetrics.aotautograd_local_cache_hit_count",
        "torch._dynamo.utils:CompilationMetrics.aotautograd_local_cache_miss_count",
        "torch._dynamo.utils:counters",
    ),
    "graph breaks": ("torch._dynamo.utils:graph_break_reasons", "torch._dynamo.output_graph:GraphCompileReason"),
    "the guard that failed": (
        "torch._dynamo.utils:register_hook_for_recompile_user_context",
        "torch._dynamo.utils:get_hook_for_recompile_user_context",
        "torch._dynamo.convert_frame:_compile",
        "torch._dynamo.guards:GuardManagerWrapper.check_verbose",
        "torch._C._dynamo.guards:RootGuardManager.get_epilogue_lambda_guards",
        "torch._C._dynamo.guards:GuardManager.get_leaf_guards",
        "torch._C._dynamo.guards:GuardManager.get_child_managers",
        "torch._C._dynamo.guards:GuardManager.get_source",
        "torch._C._dynamo.guards:DictGuardManager.get_key_value_managers",
        "torch._C._dynamo.guards:LeafGuard.verbose_code_parts",
    ),
}
# Locals of torch._dynamo.convert_frame._compile.
COMPILE_LOCALS = ("cache_entries_for_reasons", "frame")


def missing(name: str) -> bool:
    """Return True if the installed torch lacks one of the PRIVATE_NAMES."""
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
        first, _, rest = attribute.partition(".")
        holder = getattr(imported, first)
        # A field without a default is not an attribute of its dataclass.
        return bool(rest) and rest not in getattr(holder, "__dataclass_fields__", ()) and not hasattr(holder, rest)
    except (ImportError, AttributeError):
        return True


def unavailable() -> tuple[str, ...]:
    """List the information that this torch does not report, one sentence each; empty if it has all the names."""
    lacking = (feature for feature, names in PRIVATE_NAMES.items() if any(map(missing, names)))
    return tuple(f"This torch ({torch.__version__}) does not tell {feature}." for feature in lacking)

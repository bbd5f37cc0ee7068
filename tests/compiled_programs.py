"""Compiles the programs, with all features, for GPUs that need not be there, and prints the shared memory that each
takes, as lines of JSON: for compute capability 8.0 and 9.0.
"""

import json

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from regard.kernels.strips.gpu import passes, programs

FEATURES = "CAPS", "HAS_ROW", "HAS_DENSE", "DROPS", "HAS_SINK", "WRITES"
TENSORS = "query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value"
KINDS = (
    dict.fromkeys(("lse", "delta", "sink", "row", "dense", "grads"), "*fp32")
    | dict.fromkeys(("scale", "plain_scale", "softcap", "factor"), "fp32")
    | dict.fromkeys(("begins", "columns", "rows", "cell_of", "cells", "of_queries", "of_keys", "odd"), "*i32")
)


def compiled(program, half, width, size, capability):
    """As `passes` launches it, on tensors whose rows begin at multiples of 16 bytes."""
    element = "*bf16" if half else "*fp32"
    constants = {"QK": width, "WIDTH": width, "V": width, "V_WIDTH": width, "QUERIES": size.queries, "KEYS": size.keys}
    constants |= dict.fromkeys(FEATURES, True) | {
        "PRECISION": passes.precision(torch.bfloat16 if half else torch.float32)
    }
    constants = {name: value for name, value in constants.items() if name in program.arg_names}
    signature = {
        name: "constexpr" if name in constants else element if name in TENSORS else KINDS.get(name, "i32")
        for name in program.arg_names
    }
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(program.arg_names)
        if signature[name].startswith("*") or name[-2:] in ("_m", "_n")
    }
    options = {"num_warps": size.warps, "num_stages": size.stages}
    target = GPUTarget("cuda", capability, 32)
    return compile(ASTSource(program, signature, constants, even), target=target, options=options)


for (half, width), of_programs in passes.SIZES.items():
    for name, sizes in zip(passes.PROGRAMS, of_programs, strict=True):
        for capability in (80, 90):
            program = getattr(programs, name)
            shared = [compiled(program, half, width, size, capability).metadata.shared for size in sizes]
            found = {"program": name, "half": half, "width": width, "capability": capability, "shared": shared}
            print(json.dumps(found), flush=True)

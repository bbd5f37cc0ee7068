"""Results of one benchmark for each kind of processor: where oneDNN multiplies float32 matrices, where MKL does, on
Intel's own or on others, and where AMX multiplies those of bfloat16, or no instruction does and torch imitates them, as
with AVX2. Where the compiled library is not there, or turned off by REGARD_NATIVE=0, is another kind.

Which of them does decides most of the choices in `regard.kernels`, so a page that shows one kind alone says little
about the others. A run writes the file of the kind of processor that it runs on, or of a GPU.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def file(benchmark: str, machine: dict[str, Any]) -> Path:
    """Where the results of this machine go: benchmarks/results/features-mkl-and-amx.json."""
    kind = "gpu" if "gpu" in machine else _products(machine).lower().replace(" ", "-")
    return RESULTS / f"{benchmark}-{kind}.json"


def _products(machine: dict[str, Any]) -> str:
    """By what is multiplied."""
    products: str = machine["products"]
    return products if machine.get("library") else f"{products} without the library"


def every(benchmark: str) -> list[dict[str, Any]]:
    """The committed results, of each kind."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{benchmark}-*.json"))]


def heading(machine: dict[str, Any]) -> list[str]:
    """The beginning of a page's part for one kind, in Markdown."""
    if "gpu" in machine:
        told = f"{machine['gpu']}, {machine['gpu_gib']} GiB, CUDA {machine['cuda']}, torch {machine['torch']}."
        return ["", "## On a GPU", "", told]
    by = f"the compiled library for {machine['library']}" if machine.get("library") else "torch's operators alone"
    told = f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}; computed by {by}."
    if machine.get("limited"):
        told += f" Limited to {machine['limited'].upper()}: a stand-in for processors without more."
    return ["", f"## Products by {_products(machine)}", "", told]

"""All models of the adversary, by library. A library's list is imported only when it is asked for."""

import importlib

from benchmarks.robustness.adversary.entry import Entry

LIBRARIES = {
    "torchvision": ("torchvision_models",),
    "timm": ("timm_models",),
    "transformers": ("transformers_text", "transformers_other"),
    "peft": ("peft_models",),
    "graphs": ("graph_models",),
    "odd": ("odd_layers", "odd_models", "odd_flows"),
}


def entries(library: str = "", only: str = "") -> list[Entry]:
    """The entries of one library or of all, whose name holds `only`."""
    chosen = [library] if library else list(LIBRARIES)
    found = [
        e
        for name in chosen
        for module in LIBRARIES[name]
        for e in importlib.import_module(f"{__package__}.{module}").ENTRIES
    ]
    names = [e.name for e in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two models are called {sorted(twice)}")
    return [e for e in found if only in e.name]

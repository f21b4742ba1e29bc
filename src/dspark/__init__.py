"""DSpark speculative decoding: guess ahead cheaply, check in one pass, change nothing."""

__version__ = "0.1.0"

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.errors import DSparkError
    from dspark.llm import LLM
    from dspark.types import Chunk, Output, SamplingParams, Stats

__all__ = ["LLM", "Chunk", "DSparkError", "Output", "SamplingParams", "Stats", "__version__"]

_HOME = {
    "LLM": "dspark.llm",
    "DSparkError": "dspark.errors",
    "Chunk": "dspark.types",
    "Output": "dspark.types",
    "SamplingParams": "dspark.types",
    "Stats": "dspark.types",
}


def __getattr__(name: str) -> object:
    """Import on first use: `import dspark` must not cost the seconds that PyTorch takes."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dspark' has no attribute {name!r}")

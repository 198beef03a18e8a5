"""Random checkpoints and what transformers makes of them: a program for a process of its own.

Usage: transformers_models.py CASES, a JSON list of objects with directory (made here), config (the
config.json as a user would find it), ids, seed. Into each directory go the weights, in several
files, and logprobs.npy [T, V]. See `transformers_logits` for why a process of its own.
"""

import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def hide_repository() -> None:
    """Neither the search path nor the finder of an editable installation leads to it."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != REPOSITORY]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]


hide_repository()

import numpy as np  # noqa: E402 - after the repository is hidden
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that every part of the model matters to its answers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if name.endswith("bias"):
            values = 0.5 * normal(parameter)
        elif parameter.dim() == 1:
            # Around what the norm begins with, which is zero where it adds one.
            values = parameter.data + 0.3 * normal(parameter)
        elif "embed" in name or "lm_head" in name:
            # Both, where they are one; logits are then a few units apart.
            values = 2.0 * normal(parameter) * parameter.shape[-1] ** -0.5
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            values = gain * normal(parameter) * parameter.shape[-1] ** -0.5
        parameter.data.copy_(values)


def main(cases_path: str) -> None:
    for case in json.loads(Path(cases_path).read_text()):
        directory = Path(case["directory"])
        directory.mkdir(parents=True)
        text = json.dumps(case["config"])
        (directory / "config.json").write_text(text)
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        randomize(model, case["seed"])
        model.save_pretrained(directory, max_shard_size=case["shard_size"])
        if not case["rewritten"]:
            (directory / "config.json").write_text(text)
        with torch.no_grad():
            logits = model(torch.tensor([case["ids"]])).logits[0]
        np.save(directory / "logprobs.npy", logits.float().log_softmax(dim=-1).numpy())


if __name__ == "__main__":
    main(sys.argv[1])

"""Tiny random checkpoints of every architecture, with the log-probabilities transformers gives.

All of a session are made by one process, when the first is asked for: its start costs more than
they do. config.json is written as users find it, by older versions or by the present one.
"""

import atexit
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

PROGRAM = Path(__file__).with_name("transformers_models.py")
CONTEXT = 64
ORIGINAL = 16
"""The context before it was extended, in kinds of rotary embedding that know one."""
TOKENS = 44
WINDOW = 9
SHARD_SIZE = "30KB"
"""Of a weight file, so that every model has several."""
_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 83,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, **_LLAMA3},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}


def new_rope(kind: str, base: float = 300.0, **more: object) -> dict[str, object]:
    """As transformers 5 writes it."""
    values = {"rope_type": kind, "rope_theta": base, **SCALINGS[kind], **more}
    return {"rope_parameters": values}


def old_rope(
    kind: str, key: str = "type", base: float = 300.0, **more: object
) -> dict[str, object]:
    """As earlier versions did, the name of the kind under "type" or "rope_type"."""
    scaling = {key: kind, **SCALINGS[kind], **more}
    return {"rope_theta": base} | ({} if kind == "default" else {"rope_scaling": scaling})


@dataclass(frozen=True)
class ReferenceModel:
    """One checkpoint. rewritten: config.json is as transformers saves it, not as given here."""

    name: str
    config: dict[str, object] = field(hash=False)
    seed: int
    rewritten: bool

    @property
    def ids(self) -> list[int]:
        """The text that is scored."""
        draw = random.Random(self.seed)
        return [draw.randrange(int(str(self.config["vocab_size"]))) for _ in range(TOKENS)]

    @property
    def path(self) -> Path:
        """Its directory."""
        return _made() / self.name

    def logprobs(self) -> torch.Tensor:
        """[T, V]: of the token that follows each."""
        return torch.from_numpy(np.load(self.path / "logprobs.npy"))


def _model(
    name: str,
    architecture: str,
    rope: dict[str, object],
    *,
    seed: int = 7,
    rewritten: bool = False,
    **changes: object,
) -> ReferenceModel:
    """changes: of a value None takes the key away."""
    values = {"model_type": architecture, **_SIZES, **rope, **changes}
    config = {key: value for key, value in values.items() if value is not None}
    return ReferenceModel(name, config, seed, rewritten)


_GEMMA = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "query_pre_attn_scalar": 11,
    "sliding_window": WINDOW,
    # Its files leave it out, for it is always so.
    "tie_word_embeddings": None,
}
MODELS = {
    model.name: model
    for model in (
        _model("llama", "llama", new_rope("default"), head_dim=16, tie_word_embeddings=True),
        _model(
            "llama-biased",
            "llama",
            old_rope("llama3", key="rope_type"),
            attention_bias=True,
            mlp_bias=True,
            rewritten=True,
        ),
        _model(
            "mistral", "mistral", old_rope("default"), sliding_window=WINDOW, num_key_value_heads=1
        ),
        _model(
            "qwen2",
            "qwen2",
            new_rope("yarn", truncate=False, beta_slow=0.1, beta_fast=0.5),
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
            head_dim=16,
        ),
        _model(
            "qwen2-plain", "qwen2", old_rope("yarn", attention_factor=1.3), sliding_window=WINDOW
        ),
        _model(
            "qwen3",
            "qwen3",
            old_rope("linear"),
            head_dim=10,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        _model("qwen3-plain", "qwen3", new_rope("default"), head_dim=16, tie_word_embeddings=True),
        _model(
            "gemma3",
            "gemma3_text",
            {"rope_theta": 900.0, "rope_local_base_freq": 50.0},
            sliding_window_pattern=3,
            final_logit_softcapping=4.0,
            rope_scaling={"rope_type": "linear", "factor": 4.0},
            **_GEMMA,
        ),
        _model(
            "gemma3-new",
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
            rewritten=True,
            **_GEMMA | {"num_hidden_layers": 7, "query_pre_attn_scalar": 16},
        ),
    )
}
"""What every run compares."""
ROPES = {
    model.name: model
    for kind in SCALINGS
    for form, rope in (
        ("new", new_rope(kind)),
        ("old", old_rope(kind, key="rope_type")),
        ("older", old_rope(kind)),
    )
    for model in (
        _model(
            f"{kind}-{form}",
            "llama",
            rope,
            num_key_value_heads=1,
            head_dim=14,
            num_hidden_layers=2,
        ),
    )
}
"""Of the field report on variants of config.json."""


@functools.cache
def _made() -> Path:
    root = Path(tempfile.mkdtemp(prefix="polychip-reference-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    cases = [
        {
            "directory": str(root / model.name),
            "config": model.config,
            "ids": model.ids,
            "seed": model.seed,
            "shard_size": SHARD_SIZE,
            "rewritten": model.rewritten,
        }
        for model in (*MODELS.values(), *ROPES.values())
    ]
    (root / "cases.json").write_text(json.dumps(cases))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, str(PROGRAM), str(root / "cases.json")],
        check=True,
        timeout=300,
        cwd=root,
        env=environment | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    )
    return root

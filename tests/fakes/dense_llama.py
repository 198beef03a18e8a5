"""A second, independent Llama: dense attention over the whole text, no cache, no batch, float64."""

import torch

from tests.fakes.checkpoints import TinyLlama


def dense_logits(
    model: TinyLlama, tensors: dict[str, torch.Tensor], token_ids: list[int]
) -> torch.Tensor:
    """Logits of every position: [T, V] float64."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][token_ids]
    for index in range(model.layers):
        layer = {
            name.removeprefix(f"model.layers.{index}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{index}.")
        }
        normed = _norm(hidden, layer["input_layernorm.weight"])
        hidden = hidden + _attention(model, layer, normed)
        normed = _norm(hidden, layer["post_attention_layernorm.weight"])
        gate = normed @ layer["mlp.gate_proj.weight"].T
        up = normed @ layer["mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + torch.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(hidden, weights["model.norm.weight"]) @ head.T


def dense_greedy(
    model: TinyLlama, tensors: dict[str, torch.Tensor], prompt_ids: list[int], count: int
) -> list[int]:
    """The next `count` tokens, each the likeliest."""
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(int(dense_logits(model, tensors, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden / (hidden.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight


def _attention(
    model: TinyLlama, layer: dict[str, torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    tokens = hidden.shape[0]

    def project(name: str, heads: int) -> torch.Tensor:
        return (hidden @ layer[f"self_attn.{name}.weight"].T).view(tokens, heads, model.head_size)

    query = _rotate(model, project("q_proj", model.query_heads))
    key = _rotate(model, project("k_proj", model.kv_heads))
    value = project("v_proj", model.kv_heads)
    outputs = []
    for head in range(model.query_heads):
        kv_head = head * model.kv_heads // model.query_heads
        scores = query[:, head] @ key[:, kv_head].T / model.head_size**0.5
        seen = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        outputs.append(weights @ value[:, kv_head])
    return torch.cat(outputs, dim=-1) @ layer["self_attn.o_proj.weight"].T


def _rotate(model: TinyLlama, heads: torch.Tensor) -> torch.Tensor:
    """Rotation as multiplication of complex numbers (x[i], x[i + d/2])."""
    half = model.head_size // 2
    speeds = model.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(heads.shape[0], dtype=torch.float64)[:, None] * speeds
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)

"""A tiny random Gemma 3 checkpoint: layers with a window and without, caps, norms of heads."""

from tests.fakes.checkpoints import TinyLlama


class TinyGemma(TinyLlama):
    """The sixth layer sees all, the others eleven tokens; scores and logits are capped."""

    def tensors(self):
        found = super().tensors()
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            norm = found[f"{prefix}.input_layernorm.weight"]
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                found[f"{prefix}.{name}.weight"] = norm.clone()
            for name in ("q_norm", "k_norm"):
                found[f"{prefix}.self_attn.{name}.weight"] = norm[: self.head_size].clone()
        return found

    def hugging_face_config(self):
        return super().hugging_face_config() | {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": 11,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 500.0,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        }

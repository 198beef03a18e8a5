"""What a checkpoint says about its model, in one vocabulary for every file format."""

from collections.abc import Mapping
from dataclasses import dataclass

from chip_worker.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `kind` is "default" or the name of a scaling scheme."""

    kind: str
    base: float
    rotary_size: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder-only model."""

    architecture: str
    layers_count: int
    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    norm_epsilon: float
    rope: RopeConfig
    tied_embeddings: bool
    activation: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        """Raises ModelError where the sizes contradict each other."""
        for name in ("layers_count", "hidden_size", "intermediate_size", "query_heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ModelError(
                f"{self.query_heads} query heads cannot share {self.kv_heads} key/value heads"
            )


class _Fields:
    """Typed look-up in a configuration; an absent or mistyped field is a ModelError naming it."""

    def __init__(self, source: str, values: Mapping[str, object], prefix: str = "") -> None:
        self._source = source
        self._values = values
        self._prefix = prefix

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self._source}: {self._prefix}{name} is {value!r}, not an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self._source}: {self._prefix}{name} is {value!r}, not a number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self._source}: {self._prefix}{name} is {value!r}, not a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._value(name, default))

    def mapping(self, name: str) -> Mapping[str, object]:
        value = self._values.get(self._prefix + name) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self._source}: {self._prefix}{name} is {value!r}, not an object")
        return value

    def _value(self, name: str, default: object) -> object:
        value = self._values.get(self._prefix + name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._source}: field {self._prefix}{name} is missing")
        return value


def config_from_hugging_face(source: str, values: Mapping[str, object]) -> ModelConfig:
    """The model that a config.json describes. Raises ModelError naming source and field."""
    fields = _Fields(source, values)
    query_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_size = fields.integer("head_dim", hidden_size // query_heads)
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    rope_values = {**fields.mapping("rope_scaling"), **fields.mapping("rope_parameters")}
    rope = _Fields(source, rope_values)
    base = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    return ModelConfig(
        architecture=fields.text("model_type"),
        layers_count=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        query_heads=query_heads,
        kv_heads=fields.integer("num_key_value_heads", query_heads),
        head_size=head_size,
        vocabulary_size=fields.integer("vocab_size"),
        context_tokens=fields.integer("max_position_embeddings"),
        norm_epsilon=fields.number("rms_norm_eps"),
        rope=RopeConfig(
            kind=rope.text("rope_type", rope.text("type", "default")),
            base=base,
            rotary_size=int(head_size * partial),
        ),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        activation=fields.text("hidden_act", "silu"),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def config_from_gguf(
    source: str, values: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
    """The model of GGUF metadata and tensor table. Raises ModelError naming the field."""
    architecture = _Fields(source, values).text("general.architecture")
    fields = _Fields(source, values, f"{architecture}.")
    query_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_size = fields.integer("attention.key_length", hidden_size // query_heads)
    embedding_shape = shapes.get("token_embd.weight")
    if embedding_shape is None:
        raise ModelError(f"{source}: tensor token_embd.weight is missing")
    kind = fields.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in shapes:
        kind = "llama3"
    return ModelConfig(
        architecture=architecture,
        layers_count=fields.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        query_heads=query_heads,
        kv_heads=fields.integer("attention.head_count_kv", query_heads),
        head_size=head_size,
        vocabulary_size=fields.integer("vocab_size", embedding_shape[0]),
        context_tokens=fields.integer("context_length"),
        norm_epsilon=fields.number("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(
            kind="default" if kind == "none" else kind,
            base=fields.number("rope.freq_base", 10000.0),
            rotary_size=fields.integer("rope.dimension_count", head_size),
        ),
        tied_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
    )

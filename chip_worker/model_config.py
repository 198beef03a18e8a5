"""What a checkpoint says about its model, in one vocabulary for every file format.

File formats bring `ConfigFields`, named as config.json names them; an architecture makes of them a
`ModelConfig`, see `chip_worker.models.configuration`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from chip_worker.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `kind` is "default" or the name of a scaling scheme.

    factor: how many times longer the context became. original_tokens: the context the model was
    trained with. llama3: low_frequency and high_frequency bound what is scaled; divisors: of every
    frequency, where the file has them instead. yarn: beta_fast and beta_slow bound what is scaled,
    in whole dimensions if truncated; attention_factor multiplies cosines and sines; None follows
    from the factor.
    """

    kind: str
    base: float
    rotary_size: int
    factor: float = 1.0
    original_tokens: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    divisors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncated: bool = True
    attention_factor: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder-only model.

    window_rope: rotary embedding of layers with a window, where it differs. layer_windows: of each
    layer the tokens it sees, 0 for all; empty: all see all. attention_scale: of the scores; None is
    head_size ** -0.5. output_norms: what attention and MLP give is normed before it is added.
    Soft caps: 0 for none. norm_offset: what the checkpoint's norm weights lack. The sum is made in
    float32, but kept in the chip's dtype, which loses what is fine about weights near 0: with 1.0
    in bfloat16 they come in steps of 1/128 (1/256 where they are negative).
    """

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
    query_key_value_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    output_norms: bool = False
    window_rope: RopeConfig | None = None
    layer_windows: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0

    def __post_init__(self) -> None:
        """Raises ModelError where the sizes contradict each other."""
        for name in (
            "layers_count",
            "hidden_size",
            "intermediate_size",
            "query_heads",
            "kv_heads",
            "head_size",
            "vocabulary_size",
            "context_tokens",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) < 0:
                raise ModelError(f"{name} is {getattr(self, name)}; it must not be below 0")
        if self.head_size % 2:
            raise ModelError(f"head_size is {self.head_size}; rotary embedding needs an even one")
        if self.query_heads % self.kv_heads:
            raise ModelError(
                f"{self.query_heads} query heads cannot share {self.kv_heads} key/value heads"
            )
        if self.layer_windows and len(self.layer_windows) != self.layers_count:
            raise ModelError(
                f"windows of {len(self.layer_windows)} layers for {self.layers_count} layers"
            )

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale


@dataclass(frozen=True)
class ConfigFields:
    """Typed look-up by the names of config.json; an absent or mistyped field is a ModelError.

    A field that is null counts as absent. file_names: what the file calls a field, where that
    differs, for messages. from_gguf: then an architecture's defaults for config.json do not hold,
    and norm weights are what is multiplied, whatever its own checkpoints keep.
    """

    source: str
    values: Mapping[str, object]
    file_names: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    from_gguf: bool = False

    def filled(self, defaults: Mapping[str, object]) -> "ConfigFields":
        """The same, where an absent field (null is not absent here) has these defaults."""
        return replace(self, values={**defaults, **self.values})

    def has(self, name: str) -> bool:
        """True if the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "not an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """An integer or float."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "not a number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "not a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "neither true nor false")
        return value

    def nested(self, name: str) -> "ConfigFields":
        """The fields of an object; none of them if it is absent."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "not an object")
        start = f"{name}."
        names = {
            each.removeprefix(start): shown
            for each, shown in self.file_names.items()
            if each.startswith(start)
        }
        return replace(self, values=value, file_names=names, prefix=f"{self.prefix}{start}")

    def items(self, name: str) -> tuple[object, ...]:
        """The elements of a list; none if it is absent."""
        value = self.values.get(name) or ()
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise self.wrong(name, "not a list")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """The elements of a list of numbers; none if it is absent."""
        found = []
        for each in self.items(name):
            if not isinstance(each, int | float):
                raise self.wrong(name, "not a list of numbers")
            found.append(float(each))
        return tuple(found)

    def wrong(self, name: str, why: str) -> ModelError:
        """An error that shows field and value."""
        return ModelError(f"{self.source}: {self._shown(name)} is {self.values[name]!r}, {why}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: field {self._shown(name)} is missing")
        return value

    def _shown(self, name: str) -> str:
        return self.file_names.get(name, f"{self.prefix}{name}")

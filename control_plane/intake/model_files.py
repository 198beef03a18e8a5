"""What intake must know of a model, from its files: a GGUF file or a Hugging Face directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError
from control_plane.intake.gguf_metadata import Value, read_gguf_metadata

Kind = TypeVar("Kind")

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
GGUF_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
SENTENCEPIECE = "llama"
BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Pre-tokenizers whose models begin with the start token unless the file says otherwise, as in
llama.cpp; a tokenizer model of the SentencePiece style always does."""

MAKERS_END_TOKENS = {
    "gemma3": ("<end_of_turn>",),
    "llama": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "qwen2": ("<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
}
"""By architecture: control tokens that the makers' generation_config.json lets end an answer. GGUF
has no key for a list of them, so a file may name one only."""

GEMMA_3 = {"vocab_size": 262208, "max_position_embeddings": 131072}
CONFIG_DEFAULTS = {"gemma3": GEMMA_3, "gemma3_text": GEMMA_3}
"""By model_type: what config.json may leave out, being what transformers' configuration class has
anyway (Gemma3TextConfig)."""

CONTROL_TOKEN = 3


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """A tokenizer of the `tokenizers` library, stored as it saves itself."""

    path: Path


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer as GGUF metadata holds it; token_types are GGUF's, [] if it has none.

    merges: of byte-level models. scores, unknown_id, add_space_prefix: of the SentencePiece style.
    """

    model: str
    pre: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    scores: list[float]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


TokenizerSource = TokenizerJson | GgufVocabulary


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts of a model that clients see, and the source of its tokenizer.

    special_tokens: texts that chat templates refer to, such as bos_token. chat_template: None if
    the model has none. end_token_ids: every id that ends an answer, ascending.
    """

    path: Path
    name: str
    architecture: str
    context_tokens: int
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]
    tokenizer: TokenizerSource

    @staticmethod
    def load(path: Path) -> "ModelFiles":
        """Reads metadata only; raises ConfigurationError naming the file and what is wrong."""
        if path.is_dir():
            return _from_directory(path)
        if path.is_file():
            return _from_gguf(path)
        what = (
            "it is neither a file nor a directory" if path.exists() else "no such file or directory"
        )
        raise ConfigurationError(
            f"model {path}: {what}; give a GGUF file or a directory that holds "
            "config.json, tokenizer.json and safetensors files"
        )


def load_intake_model(config: ControlPlaneConfig) -> ModelFiles:
    """Reads the metadata of the configured model (0.2 s for 50 k tokens).

    Raises ConfigurationError if its files cannot be used, or the configuration does not fit it.
    """
    model = ModelFiles.load(Path(config.model_path))
    config.check_model_context(model.context_tokens)
    return model


# ---------------------------------------------------------------- GGUF


def _from_gguf(path: Path) -> ModelFiles:
    fields = read_gguf_metadata(path)
    architecture = _gguf(fields, path, "general.architecture", str)
    context_tokens = _gguf(fields, path, f"{architecture}.context_length", int)
    vocabulary, ids = _gguf_vocabulary(fields, path)
    tokens = vocabulary.tokens
    template = fields.get("tokenizer.chat_template")
    return ModelFiles(
        path=path,
        name=path.stem,
        architecture=architecture,
        context_tokens=context_tokens,
        vocabulary_size=_gguf(fields, path, f"{architecture}.vocab_size", int, len(tokens)),
        end_token_ids=_gguf_end_token_ids(vocabulary, ids, architecture),
        chat_template=template if isinstance(template, str) else None,
        special_tokens={
            name: tokens[ids[key]] for name, key in GGUF_SPECIAL_KEYS.items() if key in ids
        },
        tokenizer=vocabulary,
    )


def _gguf_vocabulary(fields: dict[str, Value], path: Path) -> tuple[GgufVocabulary, dict[str, int]]:
    """The tokenizer, and the ids of its special tokens by their metadata keys."""
    tokens = _gguf(fields, path, "tokenizer.ggml.tokens", list)
    ids = {
        key: value
        for key in (*GGUF_END_KEYS, *GGUF_SPECIAL_KEYS.values())
        if isinstance(value := fields.get(f"tokenizer.ggml.{key}"), int)
        and 0 <= value < len(tokens)
    }
    model = _gguf(fields, path, "tokenizer.ggml.model", str)
    pre = _gguf(fields, path, "tokenizer.ggml.pre", str, "")
    begins = model == SENTENCEPIECE or pre in BOS_BY_DEFAULT
    vocabulary = GgufVocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        token_types=_gguf(fields, path, "tokenizer.ggml.token_type", list, []),
        merges=_gguf(fields, path, "tokenizer.ggml.merges", list, []),
        scores=_gguf(fields, path, "tokenizer.ggml.scores", list, []),
        bos_id=ids.get("bos_token_id"),
        eos_id=ids.get("eos_token_id"),
        unknown_id=ids.get("unknown_token_id"),
        add_bos=_gguf(fields, path, "tokenizer.ggml.add_bos_token", bool, begins),
        add_eos=_gguf(fields, path, "tokenizer.ggml.add_eos_token", bool, False),
        add_space_prefix=_gguf(
            fields, path, "tokenizer.ggml.add_space_prefix", bool, model == SENTENCEPIECE
        ),
    )
    return vocabulary, ids


def _gguf_end_token_ids(
    vocabulary: GgufVocabulary, ids: dict[str, int], architecture: str
) -> tuple[int, ...]:
    known = MAKERS_END_TOKENS.get(architecture, ())
    typed = enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=False))
    makers = {index for index, (text, kind) in typed if kind == CONTROL_TOKEN and text in known}
    return tuple(sorted(makers | {ids[key] for key in GGUF_END_KEYS if key in ids}))


def _gguf(
    fields: dict[str, Value], path: Path, key: str, kind: type[Kind], default: Kind | None = None
) -> Kind:
    return _checked(fields.get(key, default), kind, f"model file {path}: metadata key {key}")


def _checked(value: object, kind: type[Kind], what: str) -> Kind:
    if isinstance(value, kind):
        return value
    problem = "is missing" if value is None else f"is {value!r:.60}, not {kind.__name__}"
    raise ConfigurationError(f"{what} {problem}")


# ---------------------------------------------------------------- Hugging Face directory


def _from_directory(path: Path) -> ModelFiles:
    config = _read_json(path / "config.json")
    nested = config.get("text_config")  # of models that see as well as read
    text_config = nested if isinstance(nested, dict) else config
    where = f"model file {path / 'config.json'}: field"
    architecture = _checked(text_config.get("model_type"), str, f"{where} model_type")
    text_config = CONFIG_DEFAULTS.get(architecture, {}) | text_config
    tokenizer_config = _read_json(path / "tokenizer_config.json", optional=True)
    tokenizer_path = path / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ConfigurationError(
            f"model directory {path}: tokenizer.json is missing; convert the tokenizer with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    special_tokens = {
        name: text
        for name in SPECIAL_TOKEN_NAMES
        if (text := _token_text(tokenizer_config.get(name))) is not None
    }
    return ModelFiles(
        path=path,
        name=path.resolve().name,
        architecture=architecture,
        context_tokens=_checked(
            text_config.get("max_position_embeddings"), int, f"{where} max_position_embeddings"
        ),
        vocabulary_size=_checked(text_config.get("vocab_size"), int, f"{where} vocab_size"),
        end_token_ids=_end_token_ids(path, config, special_tokens),
        chat_template=_directory_template(path, tokenizer_config),
        special_tokens=special_tokens,
        tokenizer=TokenizerJson(tokenizer_path),
    )


def _end_token_ids(
    path: Path, config: dict[str, Any], special_tokens: dict[str, str]
) -> tuple[int, ...]:
    """The generation config's ids, else the model's, and the tokenizer's own end token."""
    declared = _read_json(path / "generation_config.json", optional=True).get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id", [])
    ids = declared if isinstance(declared, list) else [declared]
    if "eos_token" in special_tokens:
        added = _read_json(path / "tokenizer.json").get("added_tokens", [])
        ids += [each["id"] for each in added if each.get("content") == special_tokens["eos_token"]]
    if not all(isinstance(each, int) for each in ids):
        raise ConfigurationError(
            f"model directory {path}: eos_token_id {declared!r:.60} is neither an id nor a list of "
            "ids"
        )
    return tuple(sorted(set(ids)))


def _directory_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A file of its own comes first, as in transformers; of several named ones, "default"."""
    separate = path / "chat_template.jinja"
    if separate.is_file():
        return _read_text(separate)
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = _read_json(path / "chat_template.json", optional=True).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str | None:
    """tokenizer_config.json writes a token as text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    text = _read_text(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"model file {path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"model file {path}: holds no JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"model file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"model file {path}: not UTF-8: {error.reason}") from error

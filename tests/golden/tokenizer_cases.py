"""The reference ids of 236 awkward texts for the packaged models; gguf-tokenizers.json says how."""

import json
from dataclasses import dataclass
from pathlib import Path

REFERENCE = json.loads((Path(__file__).parent / "gguf-tokenizers.json").read_text())


@dataclass(frozen=True)
class TokenizerCases:
    """Texts with their ids; start_ids go before a prompt; special_tokens by what they are for."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    start_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    end_token_ids: tuple[int, ...]


def tokenizer_cases(name: str) -> TokenizerCases:
    """Of the packaged model of this name."""
    model = REFERENCE["models"][name]
    return TokenizerCases(
        texts=tuple(REFERENCE["texts"]),
        ids=tuple(map(tuple, model["ids"])),
        start_ids=tuple(model["start_ids"]),
        special_tokens=model["special"],
        end_token_ids=tuple(model["end_token_ids"]),
    )

"""Log-probabilities in the shapes HTTP clients know: OpenAI's two, and vLLM's for prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.http_json import finite
from control_plane.intake.tokenizer import Tokenizer
from control_plane.scheduling.messages import TopTokens


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Consecutive tokens; None for the first of a prompt, which nothing predicts.

    tops: the likeliest tokens at each place, best first, or empty.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    tops: Sequence[TopTokens | None] = ()


class LogprobsWriter:
    """top_logprobs: most alternatives listed with each token."""

    def __init__(self, tokenizer: Tokenizer, top_logprobs: int) -> None:
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs

    def completion(self, scored: ScoredTokens, offsets: list[int]) -> dict[str, object]:
        """For /v1/completions. offsets: where each token begins in the text."""
        tops = None
        if self._top_logprobs:
            tops = [self._alternatives_by_text(scored, i) for i in range(len(scored.token_ids))]
        return {
            "tokens": list(map(self._distinct_text, scored.token_ids)),
            "token_logprobs": list(map(_finite_or_none, scored.logprobs)),
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def chat(self, scored: ScoredTokens) -> dict[str, object]:
        """For /v1/chat/completions."""
        content = []
        for index, (token_id, logprob) in enumerate(
            zip(scored.token_ids, scored.logprobs, strict=True)
        ):
            alternatives = [self._chat_token(*each) for each in self._alternatives(scored, index)]
            content.append(self._chat_token(token_id, logprob) | {"top_logprobs": alternatives})
        return {"content": content}

    def prompt(self, scored: ScoredTokens) -> list[dict[str, dict[str, object]] | None]:
        """vLLM's `prompt_logprobs`: by token id, the prompt's own token first."""
        entries: list[dict[str, dict[str, object]] | None] = []
        for index, (token_id, logprob) in enumerate(
            zip(scored.token_ids, scored.logprobs, strict=True)
        ):
            if logprob is None:
                entries.append(None)
                continue
            entry = {str(token_id): self._prompt_token(token_id, logprob)}
            for rank, (other_id, its_logprob) in enumerate(self._alternatives(scored, index), 1):
                known = entry.setdefault(str(other_id), self._prompt_token(other_id, its_logprob))
                known["rank"] = rank
            entries.append(entry)
        return entries

    # ---------------------------------------------------------------- parts

    def _alternatives(self, scored: ScoredTokens, index: int) -> list[tuple[int, float]]:
        top = scored.tops[index] if index < len(scored.tops) else None
        if top is None:
            return []
        return list(zip(top.token_ids, top.logprobs, strict=True))[: self._top_logprobs]

    def _alternatives_by_text(
        self, scored: ScoredTokens, index: int
    ) -> dict[str, float | None] | None:
        logprob = scored.logprobs[index]
        if logprob is None:
            return None
        chosen = (scored.token_ids[index], logprob)
        found: dict[str, float | None] = {}
        for token_id, its_logprob in [*self._alternatives(scored, index), chosen]:
            found.setdefault(self._distinct_text(token_id), finite(its_logprob))
        return found

    def _chat_token(self, token_id: int, logprob: float | None) -> dict[str, object]:
        return {
            "token": self._text(token_id),
            "logprob": _finite_or_none(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _prompt_token(self, token_id: int, logprob: float) -> dict[str, object]:
        return {"logprob": finite(logprob), "decoded_token": self._text(token_id)}

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def _distinct_text(self, token_id: int) -> str:
        """As OpenAI writes what is no text: "bytes:\\xe2\\x80"."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextOffsets:
    """Where tokens begin in the text of a completion. echoed: the prompt's text before it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], echoed: str) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._echoed = echoed
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._offset = len(echoed)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next output tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.feed(token_id))
        return offsets

    def of_prompt(self) -> list[int]:
        """Of the prompt's tokens in the echoed text."""
        detokenizer = Detokenizer(self._tokenizer, ())
        offsets, offset = [], 0
        for token_id in self._prompt_ids:
            offsets.append(min(offset, len(self._echoed)))
            own_bytes = self._tokenizer.token_bytes(token_id)
            if own_bytes != self._tokenizer.text_bytes(token_id):
                # A special token is part of the text only if the client wrote its name there.
                name = own_bytes.decode(errors="replace")
                offset += len(name) if self._echoed.startswith(name, offset) else 0
            else:
                offset += len(detokenizer.feed(token_id))
        return offsets


def _finite_or_none(logprob: float | None) -> float | None:
    return None if logprob is None else finite(logprob)

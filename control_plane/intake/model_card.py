"""What clients are told about the served model, and the limits their requests are held to."""

from dataclasses import dataclass

from control_plane.errors import ModelNotFound
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.shown import shown

ALIAS = "default"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """names: every name the model answers to, its own first. context_tokens: prompt and output.

    vocabulary_size: ids from it on do not exist, though the model may have logits for them.
    """

    names: tuple[str, ...]
    architecture: str
    context_tokens: int
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    has_chat_template: bool

    @property
    def name(self) -> str:
        """The name answers carry."""
        return self.names[0]

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound if no model of this name is served."""
        if name not in self.names:
            raise ModelNotFound(
                f"model: {shown(name)} is not served here; ask for one of "
                f"{', '.join(map(repr, self.names))}",
                field="model",
            )

    @staticmethod
    def of(
        model: ModelFiles, name: str, context_tokens: int | None, tokenizer_size: int
    ) -> "ModelCard":
        """The card of a model; name: "" means the name of its file. context_tokens: a lower limit
        than the model's own, if one is set. tokenizer_size: number of ids it knows."""
        vocabulary_size = min(model.vocabulary_size, tokenizer_size)
        return ModelCard(
            names=tuple(dict.fromkeys((name or model.name, ALIAS))),
            architecture=model.architecture,
            context_tokens=min(model.context_tokens, context_tokens or model.context_tokens),
            vocabulary_size=vocabulary_size,
            end_token_ids=tuple(each for each in model.end_token_ids if each < vocabulary_size),
            has_chat_template=model.chat_template is not None,
        )

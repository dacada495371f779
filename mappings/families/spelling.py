"""How a checkpoint spells the way to its language model, found from the names it holds."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from tensorferry.mappings.rules.rule import Rule, Tie


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a checkpoint spells the way to its language model.

    Attributes:
      prefix: what stands where the tables say ``model.``.
      head: the output head's name.
    """

    prefix: str = "model."
    head: str = "lm_head.weight"

    def name(self, name: str) -> str:
        """A table's name in this spelling."""
        if name == "lm_head.weight":
            return self.head
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def rules(self, rules: Iterable[Rule]) -> tuple[Rule, ...]:
        """A table's rules in this spelling."""
        return tuple(replace(rule, source=self.name(rule.source)) for rule in rules)

    @property
    def tie(self) -> Tie:
        return Tie(self.head, to=self.name("model.embed_tokens.weight"))

    @property
    def note(self) -> str:
        return f"the language model's tensors begin with {self.prefix!r}"


PREFIXES = ("model.language_model.", "language_model.model.", "thinker.model.", "model.")
_HEADS = ("language_model.lm_head.weight", "model.language_model.lm_head.weight", "thinker.lm_head.weight")


def spelling(names: Collection[str]) -> Spelling:
    """The spelling that a checkpoint uses, found from the names it holds."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in names), "model.")
    return Spelling(prefix, next((head for head in _HEADS if head in names), "lm_head.weight"))

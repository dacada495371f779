"""A checkpoint's own config.json, in the spellings of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from tensorferry.mappings.words.problems import PlanError, Problem

_ALIASES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_local_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "n_routed_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "dtype": ("dtype", "torch_dtype"),
}
_MISSING = object()


class Config:
    """Read access to config.json; remembers which key gave which size, for error messages.

    Multimodal checkpoints nest the language model under ``text_config``, Qwen3-Omni that under ``thinker_config``: the
    innermost values win, but for ``tie_word_embeddings``, which transformers takes from outside where it is stated.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = dict(raw)
        outer = self.raw | (self.raw.get("thinker_config") or {})
        text = outer.get("text_config") or outer.get("llm_config") or {}
        self._merged: dict[str, Any] = outer | {key: value for key, value in text.items() if value is not None}
        if outer.get("tie_word_embeddings") is not None:
            self._merged["tie_word_embeddings"] = outer["tie_word_embeddings"]

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type") or "")

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.raw.get("architectures") or ())

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key under any of its spellings; ``null`` counts as absent."""
        for alias in _ALIASES.get(key, (key,)):
            value = self._merged.get(alias)
            if value is not None:
                return value
        return default

    def size(self, key: str, default: int | object = _MISSING) -> int:
        """A positive size.

        Raises:
          PlanError: the key is absent and has no default, or its value is not a positive integer.
        """
        value = self.get(key, default)
        if value is _MISSING:
            raise PlanError([self._problem(key, "no such key")])
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise PlanError([self._problem(key, repr(value))])
        return value

    def _problem(self, key: str, found: str) -> Problem:
        spelled = " or ".join(_ALIASES.get(key, (key,)))
        return Problem(
            f"config.json key {spelled}",
            "a positive integer: a size of the model follows from it",
            found,
            "Add the key to config.json, or take config.json from the model's own repository.",
            file="config.json",
        )

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies; transformers 5 keeps it in ``rope_parameters``."""
        return float(self.get("rope_theta") or self.rope.get("rope_theta") or 10_000.0)

    @property
    def rope(self) -> dict[str, Any]:
        """Rope scaling parameters: ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4)."""
        found = self.get("rope_parameters") or self.get("rope_scaling") or {}
        return dict(found) if isinstance(found, Mapping) else {}

    @property
    def rope_type(self) -> str:
        return str(self.rope.get("rope_type") or self.rope.get("type") or "default")

    @property
    def head_dim(self) -> int:
        """``head_dim``, or hidden size over heads where the key is absent."""
        default = self.size("hidden_size") // self.size("num_attention_heads")
        return self.size("head_dim", default)

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads", self.size("num_attention_heads"))

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Config":
        """The same config with values for keys that it leaves out, as the family's own config class fills them in."""
        changed = Config(self.raw)
        changed._merged = {**self._merged, **{k: v for k, v in defaults.items() if self.get(k) is None}}
        return changed

    def part(self, key: str) -> "Config":
        """A nested config, such as ``vision_config``."""
        return Config(self._merged.get(key) or {})

    def with_tied(self, tied: bool) -> "Config":
        """The same config with the output head tied to the embedding, or not."""
        changed = Config(self.raw)
        changed._merged = {**self._merged, "tie_word_embeddings": tied}
        return changed

    @property
    def tied(self) -> bool:
        return bool(self.get("tie_word_embeddings", False))

"""Multi-token prediction: the extra layers behind the main ones, kept with ``--mtp`` or left out with a reason."""

from collections.abc import Iterable
from dataclasses import replace

from tensorferry.mappings.rules.layout import parse_layout
from tensorferry.mappings.rules.rule import Ignore, Rule, Tie

_WHY = "multi-token prediction layer, which MaxText's decoder does not run"
_INSTEAD = "; --mtp converts it for a model with mtp_num_layers set"


def ignores(prefix: str, layers: Iterable[int]) -> tuple[Ignore, ...]:
    """Prediction layers stored as layers after the last: left out, MaxText keeps them with ``--mtp``."""
    return tuple(Ignore(f"{prefix}{layer}.*", why=_WHY + _INSTEAD) for layer in layers)


def unsupported(pattern: str) -> Ignore:
    """Prediction layers for which MaxText has no place."""
    return Ignore(pattern, why=_WHY)


def rules(block: Iterable[Rule], word: str, prefix: str, layers: Iterable[int]) -> tuple[Rule, ...]:
    """Rules of prediction layers: those of an ordinary layer, each in a block of its own, and what joins them.

    ``eh_proj`` reads the embedding's half first and the hidden state's second, on both sides.

    Args:
      block: rules of the layer group that the prediction layers look like.
      word: the index word of that group.
      prefix: Hugging Face name before a layer's number.
      layers: Hugging Face numbers of the prediction layers.
    """
    found: list[Rule] = []
    for number, layer in enumerate(layers, 1):
        source = f"{prefix}{layer}."
        target = f"params-mtp_block-mtp_layer_{number}-mtp_{number}_"
        found += [_alone(rule, word, layer, f"{target}transformer_layer-") for rule in block]
        found += [
            Rule(f"{source}enorm.weight", f"{target}embedding_norm-scale", "embed -> embed"),
            Rule(f"{source}hnorm.weight", f"{target}hidden_state_norm-scale", "embed -> embed"),
            Rule(f"{source}eh_proj.weight", f"{target}projection-kernel", "embed joined -> joined embed"),
            Rule(f"{source}shared_head.norm.weight", f"{target}final_norm-scale", "embed -> embed"),
        ]
    return tuple(found)


def ties(prefix: str, layers: Iterable[int]) -> tuple[Tie, ...]:
    """Embedding and head that a prediction layer stores again."""
    return tuple(
        Tie(f"{prefix}{layer}.{name}", to)
        for layer in layers
        for name, to in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    )


def _alone(rule: Rule, word: str, layer: int, target: str) -> Rule:
    """A layer group's rule for one layer outside of it."""
    layout = str(parse_layout(rule.layout).without(frozenset({word})))
    source = rule.source.replace(f"{{{word}}}", str(layer))
    return replace(rule, source=source, target=rule.target.replace(f"params-decoder-[{word}]-", target), layout=layout)

"""Layers that repeat with a period, as MaxText's cyclic models scan them."""

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.rules.rule import Block
from tensorferry.mappings.words.problems import PlanError, Problem


def layer_cycle(layers: int, period: int) -> tuple[dict[str, range], dict[str, Block]]:
    """Layers that repeat with a period, one stack per place in the cycle; what is left over is not stacked.

    Returns:
      Dims and blocks of the words ``layer_0``, ``layer_1``, … and, when layers are left over, ``rest``.
    """
    whole = layers - layers % period
    dims = {f"layer_{place}": range(place, whole, period) for place in range(period) if whole}
    blocks = {word: Block(f"layers-layers_{place}", f"layers_{{{word}}}") for place, word in enumerate(dims)}
    if whole < layers:
        dims["rest"] = range(whole, layers)
        blocks["rest"] = Block("layers_remainder-layers_{rest.pos}", "layers_{rest}", stacked=False)
    return dims, blocks


def refuse_remainder(layers: int, period: int, fix: str = "Convert with --no-scan-layers.") -> None:
    """MaxText takes most cyclic models in whole cycles only.

    Raises:
      PlanError: layers are left over.
    """
    if layers % period:
        expected = f"a multiple of {period}: MaxText takes this model in cycles of {period} layers"
        name = "config.json key num_hidden_layers"
        raise PlanError([Problem(name, expected, str(layers), fix, file="config.json")])


def refuse_layer_types(config: Config, period: int, why: str, others: str = "sliding_attention") -> None:
    """MaxText fixes which layers attend to everything: the last of each cycle.

    Raises:
      PlanError: config.json says otherwise.
    """
    types = list(config.get("layer_types") or [])
    cycle = [others] * (period - 1) + ["full_attention"]
    fixed = [cycle[layer % period] for layer in range(len(types))]
    wrong = next((layer for layer, (a, b) in enumerate(zip(types, fixed, strict=True)) if a != b), None)
    if wrong is not None:
        raise PlanError([Problem(
            "config.json key layer_types",
            f"full attention in every {period}th layer and {others.replace('_', ' ')} in all others, as {why}",
            f"{types[wrong]} in layer {wrong}",
            "MaxText cannot run this model; there is no layout to convert to.",
            file="config.json",
        )])  # fmt: skip

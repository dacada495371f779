"""The README's table of families, made from the registry and MaxText's own trees and values.

python tests/readme_table.py --write   writes it into README.md
"""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
_HEADER = (
    "family",
    "`model_type`",
    "sizes tried",
    "scanned",
    "unrolled",
    "low-bit sources",
    "equal to MaxText",
    "back to Hugging Face",
)
# Schemes are resolved before any mapping, so every family takes all of them; these are the pairs that tests convert.
_LOW_BIT = {
    "llama": "all; FP8 carried",
    "qwen3_5_moe": "all; block FP8 carried, equal to MaxText",
    "gpt_oss": "all; MXFP4",
}
# What MaxText 0.2.5 has no tree or no converted values of.
_WHY_NOT = {
    "deepseek4": "tree; values by formula, no converted sample",
    "gemma4": "tree; values by formula, no converted sample",
    "llama4": "tree; values by formula, MaxText has no converter for it",
    "mistral": "MaxText has no mapping for it; Llama's rules, half-split lanes",
    "qwen3_omni_moe": "tree; values by formula, no converted sample",
    "qwen3_vl": "tree; values by formula, no converted sample",
    "qwen3_vl_moe": "tree; values by formula, no converted sample",
}


def table() -> str:
    """The table as Markdown."""
    from tensorferry.mappings.families.registry import family_names

    rows = [_HEADER, tuple("---" for _ in _HEADER), *(_row(name) for name in family_names())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(family: str) -> tuple[str, ...]:
    from oracle_models import has_values, models_by_family, modes_of

    models = models_by_family().get(family, [])
    sizes = ", ".join(models) or "made-up ones"
    modes = {mode for name in models for mode in modes_of(name)} or {"scan", "unscan"}
    exact = any(has_values(name) for name in models)
    equal = "tree and values, bit for bit" if exact else _WHY_NOT[family]
    low_bit = _LOW_BIT.get(family, "all")
    return (
        family,
        _model_types(family),
        sizes,
        _mark("scan" in modes),
        _mark("unscan" in modes),
        low_bit,
        equal,
        _back(family),
    )


def _mark(yes: bool) -> str:
    return "yes" if yes else "not in MaxText"


def _model_types(family: str) -> str:
    from tensorferry.mappings.families.registry import model_types

    return ", ".join(f"`{name}`" for name in model_types(family))


def _back(family: str) -> str:
    """What test_round_trip insists on."""
    from round_trips import rounded_modules

    scaled, shifted = rounded_modules(family)
    told = [f"{', '.join(sorted(scaled))} to one unit in the last place"] if scaled else []
    assert all("norm" in module for module in shifted)
    told += ["norms from 2^-16 up"] if shifted else []
    return f"byte for byte, {'; '.join(told)}" if told else "byte for byte"


def with_table(text: str) -> str:
    """The README's text with the table of today."""
    return re.sub(
        r"(<!-- families -->\n).*?(<!-- /families -->)",
        lambda marks: f"{marks[1]}{table()}{marks[2]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    if "--write" not in sys.argv[1:]:
        sys.exit(__doc__)
    README.write_text(with_table(README.read_text()))

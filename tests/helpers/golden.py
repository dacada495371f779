"""Golden plans: the plan of one small model of each family and mode as text, to be reviewed as a diff.

python tests/golden.py --write   writes them anew into tests/data/golden
"""

import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "golden"
# One model of each family that MaxText has a tree of, in both modes where it has both.
MODELS = {
    "deepseek": "deepseek2-16b",
    "deepseek4": "deepseek4-284b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
    "gemma4": "gemma4-26b",
    "gpt_oss": "gpt-oss-20b",
    "llama": "llama3.1-8b",
    "llama4": "llama4-17b-16e",
    "mixtral": "mixtral-8x7b",
    "olmo3": "olmo3-7b",
    "qwen2": "qwen2.5-1.5b",
    "qwen3": "qwen3-0.6b",
    "qwen3_5_moe": "qwen3.5-35b-a3b",
    "qwen3_moe": "qwen3-30b-a3b",
    "qwen3_omni_moe": "qwen3-omni-30b-a3b",
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen3_vl": "qwen3-vl-2b",
    "qwen3_vl_moe": "qwen3-vl-30b-a3b",
}


def golden_plans() -> Iterator[tuple[str, str]]:
    """File name and text of every golden plan."""
    from oracle_models import plan_of
    from tensorferry.mappings.plan.plan_report import plan_text

    for family, name in MODELS.items():
        for mode in ("scan", "unscan"):
            plan = plan_of(name, mode)
            if plan is not None:
                body = plan_text(plan).split("plan digest")[0].rstrip()
                yield f"{family}.{mode}.txt", f"{name}\n{body}\n"


def main() -> None:
    """Writes every golden plan, and removes those of families that are gone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    plans = dict(golden_plans())
    for stale in FOLDER.iterdir():
        if stale.name not in plans:
            stale.unlink()
    for name, text in plans.items():
        (FOLDER / name).write_text(text)
    print(f"{len(plans)} golden plans in {FOLDER}")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    if "--write" not in sys.argv[1:]:
        sys.exit(__doc__)
    main()

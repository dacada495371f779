"""The MaxText model file that loads a converted checkpoint, and the same as command-line overrides."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorferry.mappings.families.family import Family
from tensorferry.mappings.plan.conversion_plan import PlanOptions

_HEADER = """\
# MaxText settings that load this checkpoint, from the source's own config.json.
# Put them on MaxText's command line, or into your config file, with override_model_config=true.
"""


def write_settings(path: Path, family: Family, options: PlanOptions) -> None:
    """Writes the settings as YAML, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(settings_text(family, options))
    os.replace(draft, path)


def all_settings(family: Family, options: PlanOptions) -> dict[str, Any]:
    """Every setting: MaxText's default model, changed to what the family says."""
    return {"model_name": "default", **family.settings, "scan_layers": options.scan_layers}


def settings_text(family: Family, options: PlanOptions) -> str:
    """The settings as YAML; JSON scalars and lists are YAML."""
    settings = all_settings(family, options)
    return _HEADER + "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())


def overrides(family: Family, options: PlanOptions) -> str:
    """The settings as one line of MaxText overrides.

    Lists are quoted for a shell: ``mlp_activations='["silu","linear"]'``. What is in a section of its own is named with
    it: ``lora.lora_rank=8``.
    """
    words = [f"{key}={_word(value)}" for key, value in _flat(all_settings(family, options))]
    return " ".join([*words, "override_model_config=true"])


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", one) for name, one in value.items() if one not in (None, ""))
        else:
            yield key, value


def _word(value: Any) -> str:
    if isinstance(value, str) and not value.isidentifier():
        return shlex.quote(value)
    if isinstance(value, list):
        return "'" + json.dumps(value, separators=(",", ":")) + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The MaxText model file that loads a converted checkpoint, and the same as command-line overrides."""

import json
import os
from pathlib import Path
from typing import Any

from mappings.family import Family
from mappings.plan import PlanOptions

_HEADER = """\
# MaxText settings that load this checkpoint, from the source's own config.json.
# Use: model_name=default override_model_config=true, with these values on the command line or in your config file.
"""


def write_settings(path: Path, family: Family, options: PlanOptions) -> None:
    """Writes the settings as YAML, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(settings_text(family, options))
    os.replace(draft, path)


def settings_text(family: Family, options: PlanOptions) -> str:
    """The settings as YAML; JSON scalars and lists are YAML."""
    settings = {**family.settings, "scan_layers": options.scan_layers}
    return _HEADER + "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())


def overrides(family: Family, options: PlanOptions) -> str:
    """The settings as one line of MaxText overrides.

    Lists are quoted for a shell: ``mlp_activations='["silu","linear"]'``.
    """
    settings = {**family.settings, "scan_layers": options.scan_layers}
    words = [f"{key}={_word(value)}" for key, value in settings.items()]
    return " ".join(["model_name=default", "override_model_config=true", *words])


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "'" + json.dumps(value, separators=(",", ":")) + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)

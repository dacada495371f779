"""Writes metadata.json, the flex template's form, from the options of ``tensorferry convert``.

``python -m deploy.make_metadata``
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tensorferry.pipelines.cli.main import convert_actions

# Of Beam's own options, what a launch of this template has to be able to say; the others are of its environment.
BEAM_PARAMETERS = (
    {
        "name": "sdk_container_image",
        "label": "Sdk container image",
        "helpText": "image of the workers: the template's own, which holds everything",
        "isOptional": True,
        "paramType": "TEXT",
    },
)
FILE = Path(__file__).parent / "metadata.json"


def metadata() -> dict[str, Any]:
    """The template's metadata."""
    return {
        "name": "Tensorferry convert",
        "description": "Converts a Hugging Face checkpoint into an Orbax checkpoint in MaxText's layout.",
        "parameters": [*(_parameter(action) for action in convert_actions()), *BEAM_PARAMETERS],
    }


def _parameter(action: argparse.Action) -> dict[str, Any]:
    option = action.option_strings[-1].removeprefix("--")
    text = " ".join((action.help or "").split())
    entry: dict[str, Any] = {"name": option.replace("-", "_"), "label": option.replace("-", " ").capitalize(),
                             "helpText": text or option, "isOptional": not action.required}  # fmt: skip
    return entry | _type(action)


def _type(action: argparse.Action) -> dict[str, Any]:
    if action.nargs == 0:
        return {"paramType": "BOOLEAN"}
    if action.choices:
        return {"paramType": "ENUM", "enumOptions": [{"label": one, "value": one} for one in action.choices]}
    if action.dest == "output":
        return {"paramType": "GCS_WRITE_FOLDER", "regexes": ["^gs://[^/]+(/.*)?$"]}
    if action.dest == "source":
        return {"paramType": "TEXT", "regexes": ["^(gs|hf|https)://.+$"]}
    return {"paramType": "TEXT"}


def text() -> str:
    """The file's content."""
    return json.dumps(metadata(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

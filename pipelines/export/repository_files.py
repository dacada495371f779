"""What a repository holds beside its shards."""

import json

from tensorferry.mappings.export.shards import INDEX_FILE, index_of
from tensorferry.pipelines.export.export_planning import Export
from tensorferry.pipelines.huggingface.repository import CONFIG


def small_files(export: Export) -> dict[str, bytes]:
    """Every file but the shards and the manifest: copies from ``--config``, its changed config.json, the index."""
    repository = export.repository
    found = {name: repository.source.read(name, 0, size) for name, size in repository.files.items()}
    found |= {**export.fp8.files(), CONFIG: export.config}
    if len(export.plan.shards) > 1:
        found[INDEX_FILE] = (json.dumps(index_of(export.plan.shards), indent=2) + "\n").encode()
    return found

"""Buckets of Google Cloud Storage as obstore opens them: credentials from the usual places, or an emulator."""

import json
import os
from functools import cache
from typing import Any

from tensorferry.mappings.words.problems import FerryError, Problem

# The same variable that Google's own clients read.
_EMULATOR = "STORAGE_EMULATOR_HOST"


def split_bucket_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of ``gs://bucket/path``; the prefix is empty or ends in a slash.

    Raises:
      FerryError: there is no bucket in it.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if scheme.lower() != "gs" or not bucket:
        raise FerryError(str(Problem(url, "gs://bucket/path", "no bucket", "Name the bucket.")))
    path = path.strip("/")
    return bucket, f"{path}/" if path else ""


def bucket_store(bucket: str) -> Any:
    """The obstore store of a whole bucket."""
    return _store(bucket, emulator_address())


def emulator_address() -> str:
    """URL of the emulator that the environment names; empty for the real store."""
    emulator = os.environ.get(_EMULATOR, "")
    return emulator if not emulator or "://" in emulator else f"http://{emulator}"


@cache
def _store(bucket: str, emulator: str) -> Any:
    from obstore.store import GCSStore

    # Retries are ours (tensorferry.pipelines.storage.retries): obstore's own do not cover short bodies.
    options: dict[str, Any] = {"retry_config": {"max_retries": 0}}
    if not emulator:
        return GCSStore(bucket, **options)
    key = {"gcs_base_url": emulator, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    options["config"] = {"service_account_key": json.dumps(key)}
    options["client_options"] = {"allow_http": True}
    return GCSStore(bucket, **options)

"""Leaves beside the arrays of an OCDBT database in a bucket: written in the one commit of its index.

Orbax adds them to a database that is there already, which writes the index a second time; an object store takes about
one write a second of an object.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensorferry.pipelines.orbax.orbax_log import quiet_orbax
from tensorferry.pipelines.orbax.orbax_metadata import write_item_metadata
from tensorferry.pipelines.sinks.ocdbt import OcdbtSink, read_values
from tensorferry.pipelines.sinks.sink import Sink
from tensorferry.pipelines.storage.kvstores import is_local


def with_leaves(sink: Sink, leaves: Mapping[tuple[str, ...], Any]) -> Sink:
    """The sink whose ``finalize`` writes the leaves too, where that spares a write of the index; else the same sink.

    Args:
      sink: of the item.
      leaves: as `write_item_metadata` takes them.

    Raises:
      FerryError: Orbax cannot write them.
    """
    if not isinstance(sink, OcdbtSink) or is_local(sink.root) or not leaves:
        return sink
    with tempfile.TemporaryDirectory(prefix="tensorferry-") as scratch:
        item = Path(scratch, "items")
        item.mkdir()
        with quiet_orbax():
            write_item_metadata(item, (), leaves, sink.store_format)
        return replace(sink, beside=read_values(str(item)))

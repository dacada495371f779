"""Where a migration keeps things: its own state, and a run directory for every step."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensorferry.mappings.tunix.step_plan import MigrateOptions
from tensorferry.pipelines.migrate.step_record import StepRecord
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.bucket_run import BucketRun
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.output.run_dir import RunDir
from tensorferry.pipelines.output.small_files import read_small, receipts_at
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.sinks.sink import Sink, open_sink
from tensorferry.pipelines.storage.kvstores import is_local

Run = RunDir | BucketRun


@dataclass(frozen=True)
class Form:
    """How the new steps are stored.

    Attributes:
      store_format: ``zarr3``, ``ocdbt`` or ``zarr2``.
      compression: of chunks that are written anew.
      chunk_bytes: the aim for one of them.
      look: take digests and statistics of the values of chunks that move as they are stored.
      choices: what the user chose about the trees.
    """

    store_format: str = "zarr3"
    compression: str = "none"
    chunk_bytes: int = 64 << 20
    look: bool = True
    choices: MigrateOptions = field(default_factory=MigrateOptions)

    def sink(self, run: Run, record: StepRecord) -> Sink:
        """The sink of a step's item."""
        kept = {array.spec.key: array.codecs for array in record.arrays if array.codecs}
        return open_sink(run.item_root, self.store_format, self.compression, kept=kept)

    def options(self) -> Mapping[str, Any]:
        """Everything that decides what is written, as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Places:
    """Paths, the same for all workers.

    Attributes:
      output: the folder that receives the runs.
      state: the migration's own folder.
    """

    output: str
    state: str

    @property
    def records(self) -> str:
        """Folder of step records."""
        return f"{self.state}/records"

    @property
    def faults(self) -> Receipts | BucketReceipts:
        """Sentences about steps that could not be read, by number."""
        return receipts_at(f"{self.state}/faults")

    @property
    def results(self) -> Receipts | BucketReceipts:
        """What the commit said, by number."""
        return receipts_at(f"{self.state}/results")

    def step_url(self, path: str) -> str:
        """Where a step is published."""
        return f"{self.output.rstrip('/')}/{path}"

    def manifest(self, path: str) -> dict[str, Any] | None:
        """The manifest of a whole step in a step's place; None where there is none, empty where it is unreadable."""
        url = self.step_url(path)
        found = read_small(url, f"items/{MANIFEST_NAME}")
        if found is None or read_small(url, "commit_success.txt") is None:
            return None
        try:
            manifest = json.loads(found)
        except ValueError:
            return {}
        return manifest if isinstance(manifest, dict) else {}

    def is_pending(self, path: str) -> bool:
        """Whether a run has begun a step, and has not yet tidied up behind itself."""
        parent, _, name = self.step_url(path).rpartition("/")
        files = (f".tensorferry-{name}/{file}" for file in ("commit.json", "run.json"))
        return any(read_small(parent, file) is not None for file in files)

    def run_dir(self, record: StepRecord, form: Form) -> Run:
        """The run directory of a step; not opened."""
        parent, _, name = self.step_url(record.path).rpartition("/")
        if is_local(parent):
            return RunDir(Path(parent), record.digest, form.options(), step=name)
        return BucketRun(parent, record.digest, form.options(), step=name)

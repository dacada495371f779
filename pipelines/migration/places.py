"""Where a migration keeps things: its own state, and a run directory for every step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mappings.tunix.plan import MigrateOptions
from pipelines.migration.record import StepRecord
from pipelines.receipts import Receipts
from pipelines.run_dir import RunDir
from pipelines.sink import Sink, open_sink


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

    def sink(self, run: RunDir, record: StepRecord) -> Sink:
        """The sink of a step's item."""
        kept = {array.spec.key: array.codecs for array in record.arrays if array.codecs}
        return open_sink(str(run.item_dir), self.store_format, self.compression, kept=kept)

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
        return str(Path(self.state, "records"))

    @property
    def faults(self) -> Receipts:
        """Sentences about steps that could not be read, by number."""
        return Receipts(str(Path(self.state, "faults")))

    @property
    def results(self) -> Receipts:
        """What the commit said, by number."""
        return Receipts(str(Path(self.state, "results")))

    def step_folder(self, path: str) -> Path:
        """Where a step is published."""
        return Path(self.output, path)

    def is_publishing(self, path: str) -> bool:
        """Whether a killed run was about to publish a step, or had just done so."""
        folder = self.step_folder(path)
        return (folder.parent / f".tensorferry-{folder.name}" / "commit.json").exists()

    def run_dir(self, record: StepRecord, form: Form) -> RunDir:
        """The run directory of a step; not opened."""
        folder = self.step_folder(record.path)
        return RunDir(folder.parent, record.digest, form.options(), step=folder.name)

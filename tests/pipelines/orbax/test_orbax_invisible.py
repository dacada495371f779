"""An unfinished run beside a trainer's checkpoints: Orbax neither sees it nor cleans it up."""

import os
import subprocess
import sys
from pathlib import Path

from tensorferry.pipelines.output.run_dir import RunDir

TRAINER = """
import sys, warnings
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1
root = sys.argv[1]
options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, max_to_keep=1)
with ocp.CheckpointManager(root, options=options) as manager:
    assert manager.all_steps() == [], manager.all_steps()
    for step in (5, 6):
        manager.save(step, args=ocp.args.StandardSave({"x": np.arange(3)}))
    manager.wait_until_finished()
    assert manager.all_steps() == [6], manager.all_steps()
with v1.training.Checkpointer(root) as checkpointer:
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [6]
"""


def test_a_trainer_on_the_same_directory_leaves_an_unfinished_run_alone(tmp_path):
    run = RunDir(tmp_path, "d1")
    run.open()
    (run.item_dir / "layers.kernel").mkdir()
    (run.item_dir / "layers.kernel" / "zarr.json").write_text("{}")
    (run.building / "commit_success.txt").write_text("")
    before = sorted(path for path in run.state_dir.rglob("*"))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", TRAINER, str(tmp_path)], check=True, env=environment, timeout=120)
    assert sorted(Path(run.state_dir).rglob("*")) == before
    run.close()

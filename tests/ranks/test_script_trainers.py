"""Short scripts for the launchers and trainers that people use: the steps of all of their ranks are measured.

Tests whose packages are not installed are skipped.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ddpperf.specs import ScriptSpec
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import SetOptions
from ddpperf.workers.script_run import run_scripts
from tests.project import REPOSITORY

TORCHRUN = "torchrun --standalone --nproc-per-node {ranks} train.py"
MODEL = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self):
            return 2000
        def __getitem__(self, i):
            return {"x": torch.ones(64), "labels": torch.zeros(1)}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 1)
        def forward(self, x, labels):
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}
"""
LOOP = """
    def train(model, optimizer, loader):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
"""
DDP = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def ddp(**group):
        dist.init_process_group("gloo", **group)
        model = DistributedDataParallel(Model())
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Data(), 4))
"""
SPAWN = """
    def main(rank, file):
        ddp(init_method=f"file://{file}", rank=rank, world_size=2)

    if __name__ == "__main__":
        import tempfile
        torch.multiprocessing.spawn(main, (tempfile.mktemp(),), nprocs=2)
"""
ACCELERATE = """
    from accelerate import Accelerator
    model = Model()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(*accelerator.prepare(model, optimizer, DataLoader(Data(), 4)))
"""
LIGHTNING = """
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()
        def training_step(self, batch, i):
            return self.model(**batch)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Module(), DataLoader(Data(), 4))
"""
TRAINER = """
    from transformers import Trainer, TrainingArguments
    arguments = TrainingArguments("out", use_cpu=True, report_to="none", per_device_train_batch_size=4)
    Trainer(Model(), arguments, train_dataset=Data()).train()
"""


@pytest.mark.parametrize(
    ("package", "command", "parts"),
    [
        pytest.param("torch", TORCHRUN, [LOOP, DDP, "ddp()"], id="torchrun"),
        pytest.param("torch", "python train.py", [LOOP, DDP, SPAWN], id="multiprocessing"),
        pytest.param("accelerate", TORCHRUN, [LOOP, ACCELERATE], id="accelerate", marks=pytest.mark.slow),
        pytest.param("lightning", "python train.py", [LIGHTNING], id="lightning", marks=pytest.mark.slow),
        pytest.param("transformers", TORCHRUN, [TRAINER], id="trainer", marks=pytest.mark.slow),
    ],
)
def test_steps_of_both_ranks_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, command: str, parts: list[str]
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    text = "\n".join(map(textwrap.dedent, [MODEL, *parts]))
    (tmp_path / "train.py").write_text(text)
    spec = ScriptSpec(command=command, world_size=2, steps=30)
    options = SetOptions(size=2, device="cpu", rounds=7, deadline_seconds=60.0)
    (found,) = run_scripts([("A1", Side(), spec)], options, lambda part: None)
    assert [rank["rank"] for rank in found.ranks] == [0, 1]
    assert [rank["count"] for rank in found.ranks] == [10 + 16 + 30] * 2
    assert found.steps == 30

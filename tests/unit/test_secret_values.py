"""Secrets of the command line and of the environment are neither stored nor printed."""

from __future__ import annotations

import json
import re

import pytest

from ddpperf.io.secret_values import shown_command_line, shown_value, shown_word
from tests.canned import CannedSuite

VALUE = "hunter2"
TRAINING = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(world_size=2, per_rank_batch_size=8, strategy="ddp"))
"""


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "PGPASSWORD", "MY_CREDENTIALS", "apikey", "X_AUTH", "MYSQL_PWD", "GITHUB_PAT"],
)
def test_secret_names_hide_their_values(name: str) -> None:
    assert shown_value(name, VALUE) == "***"
    assert shown_word(f"--candidate={name}={VALUE}") == f"--candidate={name}=***"
    assert shown_word(f"{name}={VALUE}=more") == f"{name}=***"


def test_command_line_hides_secrets_alone() -> None:
    words = ["perf", "-k", "test_keys[a=b]", "--candidate", "NCCL_IB_PKEY=1", "--rounds=3", "MY_PATH=a"]
    assert shown_command_line(words) == (
        "perf -k 'test_keys[a=b]' --candidate NCCL_IB_PKEY=1 --rounds=3 MY_PATH=a"
    )
    assert shown_value("TOKENIZERS_PARALLELISM", "false") == "false"
    words = ["--api-token", VALUE, f"--password={VALUE}", f"--db=postgres://me:{VALUE}@host/db", "perf"]
    assert (
        shown_command_line(words) == "--api-token '***' '--password=***' '--db=postgres://***@host/db' perf"
    )


def test_run_stores_and_prints_no_secret(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(TRAINING)
    canned_suite.environment["NVIDIA_API_KEY"] = VALUE
    written = ["--verdict", "v.md", "--report", "r.html", "--junitxml", "j.xml", "--benchmark-json", "b.json"]
    secrets = ["--candidate", f"HF_TOKEN={VALUE}", f"--candidate=DB_PASSWORD={VALUE}"]
    run = canned_suite.run("perf", *written, *secrets, "--candidate", "OMP_DYNAMIC=true")
    assert run.status in (0, 125), run
    assert VALUE not in run.output
    assert "HF_TOKEN=*** DB_PASSWORD=*** OMP_DYNAMIC=true" in re.sub(r"\s+", " ", run.output)
    files = [
        path for path in canned_suite.root.rglob("*") if path.is_file() and path != canned_suite.experiment
    ]
    assert len(files) > 6
    assert [path.name for path in files if VALUE.encode() in path.read_bytes()] == []
    (saved,) = canned_suite.saved_runs()
    assert saved["ddpperf"]["judged"]["sides"]["candidate"]["environment"]["HF_TOKEN"] == "***"
    assert saved["ddpperf"]["environment"]["variables"]["NVIDIA_API_KEY"] == "***"
    assert "--candidate 'HF_TOKEN=***'" in json.dumps(saved["ddpperf"]["options"]["command_line"])


@pytest.mark.parametrize("words", [["MY-TOKEN"], ["MY_TOKEN", "MY_TOKEN"]], ids=["wrong name", "given twice"])
def test_refusal_prints_no_secret(canned_suite: CannedSuite, words: list[str]) -> None:
    named = [f"--candidate={name}={VALUE}{number}" for number, name in enumerate(words)]
    run = canned_suite.run("perf", *named)
    assert run.status == 4, run
    assert VALUE not in run.output
    assert "TOKEN" in run.output

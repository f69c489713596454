#!/usr/bin/env bash
# Run ddpperf on one or several nodes of a Slurm cluster. Arguments are those of pytest:
#
#   sbatch --gpus-per-node=4 docs/slurm/ddpperf.sh perf/ --benchmark-compare
#   sbatch --nodes=2 --gpus-per-node=4 docs/slurm/ddpperf.sh perf/ --interface=ib0
#
# Submit the script in the root of the checkout, whose .venv it uses; PYTHON names another interpreter.
# The exit status of the job is that of pytest, and the folder ddpperf-JOBID has all results.
#SBATCH --job-name=ddpperf
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=ddpperf-%j.log
set -euo pipefail
python=${PYTHON:-.venv/bin/python}

refuse() {
    echo "$1" >&2
    exit 4
}

[ -n "${SLURM_JOB_ID:-}" ] || refuse "this is no job of Slurm; submit the script with sbatch --gpus-per-node=N"
results=ddpperf-$SLURM_JOB_ID
command -v "$python" >/dev/null ||
    refuse "the interpreter $python was not found; make the environment, or set PYTHON to its interpreter"
if [ -z "${SLURM_GPUS_ON_NODE:-}" ]; then
    echo "the job has no GPUs, so ddpperf measures the CPU; for GPUs, pass --gpus-per-node=N to sbatch"
fi
if [ -n "$(ls -A "$results" 2>/dev/null)" ]; then
    refuse "the output folder $results exists and is not an empty folder; move it away"
fi
mkdir -p "$results"
if [ "$#" -eq 0 ]; then set -- perf/ --benchmark-compare; fi

if [ "${SLURM_NNODES:-1}" -gt 1 ]; then set -- --nodes="$SLURM_NNODES" "$@"; fi # srun starts the ranks

"$python" -m pytest --verdict="$results/verdict.md" --report="$results/report.html" \
    --junitxml="$results/junit.xml" --benchmark-json="$results/run.json" "$@" &
pytest=$!
# Two minutes before the time limit Slurm sends SIGTERM. ddpperf then stores what it has measured.
trap 'signalled=yes; kill -TERM "$pytest" 2>/dev/null || true' TERM
signalled=yes
while [ -n "$signalled" ]; do # a signal ends the wait, and not pytest
    signalled='' status=0
    wait "$pytest" || status=$?
done
exit "$status"

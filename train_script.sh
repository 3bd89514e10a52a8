#!/usr/bin/env bash
#SBATCH --job-name=llm-policy
#SBATCH --array=0-2
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%x-%A_%a.log
#
# One training run per array task, the task's index is the seed:
#
#   mkdir -p logs && sbatch train_script.sh
#   sbatch --array=0-9 --time=01:00:00 train_script.sh --config configs/gemma_2b_it.yaml --learning_rate 1e-4
#   bash train_script.sh --max_steps 2           # the same job without SLURM, seed 0
#
# Three minutes before the time limit SLURM sends USR1: the run finishes its step, writes a checkpoint and leaves with
# code 75; the job is then requeued and goes on from there. Arguments are train_script.py's.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}"

seed="${SLURM_ARRAY_TASK_ID:-0}"
output_dir="runs/${SLURM_JOB_NAME:-local}-${SLURM_ARRAY_JOB_ID:-0}/seed-${seed}"
python=python
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi

command=("$python" train_script.py --seed "$seed" --output_dir "$output_dir" --resume_from_checkpoint auto "$@")
echo "$(date -Is) $(hostname) job ${SLURM_JOB_ID:-none}, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
"$python" -c 'import torch, transformers, trl, peft
print(*(f"{m.__name__} {m.__version__}" for m in (torch, transformers, trl, peft)), f"cuda {torch.version.cuda}")'
printf '%q ' "${command[@]}"
echo

# The batch shell gets the signal (B:); it hands it on and waits for the checkpoint.
"${command[@]}" &
training=$!
trap 'kill -USR1 "$training" 2>/dev/null || true' USR1
trap 'kill -TERM "$training" 2>/dev/null || true' TERM
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ends `wait` early
  code=0
  wait "$training" || code=$?
done
if [[ $code -eq 75 && -n "${SLURM_JOB_ID:-}" ]]; then
  echo "interrupted after a checkpoint: requeueing job ${SLURM_JOB_ID}"
  scontrol requeue "${SLURM_JOB_ID}"
fi
exit "$code"

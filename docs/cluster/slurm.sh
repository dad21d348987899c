#!/bin/bash
# A run on Slurm: starts Ray on the machines of the job, then the command. Submit it again to resume:
#   sbatch docs/cluster/slurm.sh
#SBATCH --job-name=sufficit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#SBATCH --requeue
set -euo pipefail

GPUS=4   # per machine, as above
DATA=/shared/photos
OUT=/shared/run

# A token for this job alone, which srun hands to the other machines in the environment.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
ip=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
address=$ip:$((20000 + SLURM_JOB_ID % 10000))
start() {  # Ray on some machines: options of srun, --, options of `ray start`
    local machines=()
    while [[ $1 != -- ]]; do machines+=("$1"); shift; done
    # Without SLURM_NTASKS Lightning, which trains adapters, takes no worker for a task of Slurm.
    srun "${machines[@]}" --cpus-per-task="$SLURM_CPUS_PER_TASK" env -u SLURM_NTASKS \
        ray start "${@:2}" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$GPUS" --block &
}

start --nodes=1 --ntasks=1 -w "$head" -- --head --node-ip-address="$ip" --port="${address#*:}" \
    --temp-dir="/tmp/ray-$SLURM_JOB_ID" --include-dashboard=false
for _ in $(seq 60); do
    ray status --address "$address" > /dev/null 2>&1 && break
    sleep 2
done
others=$((SLURM_JOB_NUM_NODES - 1))
if ((others > 0)); then
    start --nodes="$others" --ntasks="$others" --exclude="$head" -- --address="$address"
fi

env -u SLURM_NTASKS sufficit compare --model torchvision:resnet50 --data "$DATA" --out "$OUT" \
    --precision bf16 --workers "$address"

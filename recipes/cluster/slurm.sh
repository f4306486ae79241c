#!/bin/bash
# One run on several machines under Slurm: a head on the first, the others join it, the run, and all of it ends.
#
#   sbatch --nodes 2 recipes/cluster/slurm.sh RECIPE [--section.setting VALUE ...]
#
# Submit it in a directory that all machines see, with the Python environment active; or name its skirl: SKIRL=/a/skirl.
# What NCCL and the run read of the environment must be set here: Ray's workers inherit it (docs/cluster.md).
# The exit code is that of the run. The time limit, scancel and a failure all end the run first and then the nodes. What is
# sent 180 s before the time limit lets the run end its step and write a checkpoint: raise that where steps are longer.
#SBATCH --job-name=skirl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --output=%x-%j.log
set -euo pipefail

[[ $# -ge 1 ]] || { echo "usage: sbatch --nodes N $0 RECIPE [--section.setting VALUE ...]" >&2; exit 2; }
skirl=${SKIRL:-skirl}
directory=/tmp/skirl-$SLURM_JOB_ID # on a disk of each machine; short, for Ray's sockets lie below it
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
run='' workers=''

end() {
    local code=$?
    trap - EXIT
    trap '' TERM INT
    if [[ -n $run ]]; then
        kill -TERM "$run" 2>/dev/null || true # submit passes it on: the run ends after its step
        wait "$run" || true
    fi
    if [[ -n $workers ]]; then
        kill -TERM "$workers" 2>/dev/null || true # srun passes it on, and each node stops itself
        wait "$workers" || true
    fi
    "$skirl" cluster down --temp-dir "$directory" --force || true
    rm -rf "$directory"
    exit "$code"
}
trap end EXIT
trap 'exit 143' TERM INT

# The batch script runs on the first machine: the head is a process of its own. Its output names the address.
address=$("$skirl" cluster up --port 0 --temp-dir "$directory" | tee /dev/stderr |
    sed -n 's/^the head is up at \([^ ]*\) .*/\1/p')

others=$((${#machines[@]} - 1))
if ((others > 0)); then
    # srun takes no --cpus-per-task from sbatch since Slurm 22.05
    srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --nodelist="$(IFS=,; echo "${machines[*]:1}")" \
        "$skirl" cluster up --address "$address" --temp-dir "$directory" --block &
    workers=$!
fi

# In the background, for a trap runs only when bash is not waiting for a command in the foreground.
"$skirl" cluster submit --temp-dir "$directory" --nodes "${#machines[@]}" --timeout 600 "$@" &
run=$!
wait "$run"

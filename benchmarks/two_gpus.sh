#!/usr/bin/env bash
# What needs two GPUs, piece by piece; each has its own deadline and writes its figures after every part.
#   benchmarks/two_gpus.sh OUTPUT_DIRECTORY [tests] [separate] [separate4b] [separate4b-buckets] [colocate] [colocate4b] [colocate4b-zero3] [tensor] [tensor4b] [losses] [losses4b]
#   WORKLOAD=text-tiny benchmarks/two_gpus.sh OUTPUT_DIRECTORY separate colocate tensor losses     # a trial on CPUs
# A model is built once a machine, below TMPDIR. NVLink multicast stays off: not every host lends it to its guests.
set -u
out=${1:?usage: two_gpus.sh OUTPUT_DIRECTORY [piece ...]}
shift
mkdir -p "$out"
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_ALLREDUCE_USE_FLASHINFER=0
python=${PYTHON:-python3}
small=${WORKLOAD:-text-0.6B}
sizes=()
[ "$small" = text-tiny ] && sizes=(--trainer.max_tokens_per_micro_batch 1024)

# measure DEADLINE PIECE WORKLOAD NAME [option ...]
measure() {
    local deadline=$1 piece=$2 workload=$3 name=$4
    shift 4
    timeout -s INT -k 60 "$deadline" "$python" -m benchmarks.two_gpus "$piece" --workload "$workload" \
        --directory "${TMPDIR:-/tmp}/skirl-two-gpus/$workload" --out "$out/two-$name.json" "$@" 2>&1 | tail -60
}
vllm=(--rollout.vllm.max_num_seqs 512 --rollout.vllm.max_num_batched_tokens 8192)

"$python" -c 'import torch; print(torch.__version__, [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])'
[ $# -gt 0 ] || set -- tests separate losses
for piece in "$@"; do
    echo "== $piece, $(date +%T)"
    case $piece in
    tests) timeout 240 "$python" -m pytest tests/distributed/test_weight_broadcast.py tests/distributed/test_two_gpus.py -m gpu -q -x \
        -p no:cacheprovider --junit-xml="$out/two-tests.xml" 2>&1 | tail -30 ;;
    separate) measure 330 separate "$small" "separate-$small" --steps 4 "${vllm[@]}" ;;
    separate4b) measure 420 separate text-4B separate-text-4B --limit 340 --steps 3 "${vllm[@]}" ;;
    separate4b-buckets) measure 420 separate text-4B separate-text-4B-2048 --limit 340 --steps 2 "${vllm[@]}" \
        --rollout.commit.bucket_mb 2048 ;;
    colocate) measure 590 colocate "$small" "colocate-$small" --limit 230 --steps 3 "${vllm[@]}" ;;
    colocate4b) measure 590 colocate text-4B colocate-text-4B --limit 280 --only one,zero2 --steps 2 "${vllm[@]}" ;;
    colocate4b-zero3) measure 400 colocate text-4B colocate-text-4B --add --limit 330 --only zero3 --steps 2 "${vllm[@]}" ;;
    tensor) measure 590 tensor "$small" "tensor-$small" --limit 230 --steps 2 "${vllm[@]}" ;;
    tensor4b) measure 590 tensor text-4B tensor-text-4B --limit 280 --steps 2 "${vllm[@]}" ;;
    losses) measure 400 losses "$small" "losses-$small" --limit 120 ${sizes[@]+"${sizes[@]}"} ;;
    losses4b) measure 590 losses text-4B losses-text-4B --limit 160 ;;
    *) echo "no piece named $piece" ;;
    esac
done

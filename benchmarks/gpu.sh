#!/usr/bin/env bash
# What needs one GPU, piece by piece; each has its own deadline and writes its figures.
#   benchmarks/gpu.sh OUTPUT_DIRECTORY [tests] [engines] [text] [text4b] [rollouts] [speech] [ipc] [ppo] [update] [smollm2]
set -u
out=${1:?usage: gpu.sh OUTPUT_DIRECTORY [piece ...]}
shift
mkdir -p "$out"
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
vllm=(--rollout.engine vllm --rollout.vllm.max_num_seqs 512 --rollout.vllm.max_num_batched_tokens 8192)
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
[ $# -gt 0 ] || set -- tests engines text text4b rollouts speech
for piece in "$@"; do
    echo "== $piece, $(date +%T)"
    case $piece in
    tests) timeout 420 python3 -m pytest tests/gpu/test_cuda.py -m gpu -q -p no:cacheprovider \
        --junit-xml="$out/gpu-tests.xml" 2>&1 | tail -40 ;;
    engines) timeout 300 python3 -m pytest tests/gpu/test_engines.py tests/distributed/test_weight_broadcast.py -m gpu -q -x -p no:cacheprovider \
        --junit-xml="$out/gpu-engines.xml" 2>&1 | tail -60 ;;
    text) timeout 400 python3 benchmarks/grpo.py --workload text-0.6B --steps 4 --out "$out/text-0.6B.json" \
        "${vllm[@]}" 2>&1 | tail -60 ;;
    text4b) timeout 400 python3 benchmarks/grpo.py --workload text-4B --steps 3 --out "$out/text-4B.json" \
        "${vllm[@]}" 2>&1 | tail -60 ;;
    rollouts) timeout 400 python3 -m benchmarks.rollouts --workload text-4B --out "$out/rollouts-4B.json" 2>&1 | tail -30 ;;
    ipc) timeout 120 python3 -m pytest tests/distributed/test_weight_broadcast.py -m gpu -q -p no:cacheprovider 2>&1 | tail -15 ;;
    speech) timeout 240 python3 benchmarks/grpo.py --workload speech-0.6B --steps 3 --out "$out/speech-0.6B-vllm.json" \
        "${vllm[@]}" 2>&1 | tail -60 ;;
    ppo) timeout 420 python3 benchmarks/grpo.py --workload text-0.6B --steps 4 --out "$out/ppo-0.6B.json" \
        --method.preset ppo --method.mini_batches 1 "${vllm[@]}" 2>&1 | tail -60 ;;
    update) timeout 400 python3 benchmarks/update.py --workload text-4B --out "$out/update-4B.json" 2>&1 | tail -40 ;;
    smollm2) timeout 560 python3 benchmarks/smollm2.py run "${SMOLLM2:?a directory of benchmarks/smollm2.py prepare}" \
        --out "$out/smollm2.json" 2>&1 | tail -20 ;;
    *) echo "no piece named $piece" ;;
    esac
done

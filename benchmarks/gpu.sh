#!/usr/bin/env bash
# Everything of this project that needs one GPU, in about eight minutes: the gpu tests, then the speech step by phase.
#   benchmarks/gpu.sh OUTPUT_DIRECTORY
set -u
out=${1:?usage: gpu.sh OUTPUT_DIRECTORY}
mkdir -p "$out"
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
timeout 420 python3 -m pytest tests/gpu -m gpu -q -p no:cacheprovider --junit-xml="$out/gpu-tests.xml" 2>&1 | tail -40
timeout 200 python3 benchmarks/speech_grpo.py --size 0.6B --steps 4 --out "$out/speech-0.6B.json" 2>&1 | tail -40
timeout 150 python3 benchmarks/speech_grpo.py --size 0.6B --steps 3 --out "$out/speech-0.6B-zero3.json" \
    --trainer.backend.zero_stage 3 --model.gradient_checkpointing true 2>&1 | tail -12

"""Transcribes held-out clips with an exported model and plain transformers; nothing of skirl is imported.

python demo/transcribe.py runs/demo/grpo/hf/step-000100 [CLIP ...]
"""

import json
import sys
from pathlib import Path

import numpy as np
import soundfile
import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor


def main() -> None:
    """Greedy transcripts of the clips given, or of the first four held-out ones of the harder domain."""
    directory, clips = sys.argv[1], [Path(name) for name in sys.argv[2:]]
    references = {}
    if not clips:
        manifest = Path("demo/data/hard_test.jsonl")
        rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()[:4]]
        clips = [manifest.parent / row["audio"] for row in rows]
        references = {clip: row["text"] for clip, row in zip(clips, rows, strict=True)}
    processor = AutoProcessor.from_pretrained(directory)
    model = AutoModelForMultimodalLM.from_pretrained(directory)
    for clip in clips:
        with soundfile.SoundFile(clip) as file:
            file.seek(0)  # libsndfile leaves an Opus file's pre-skip in until the first seek
            samples, rate = file.read(dtype="float32"), file.samplerate
        assert rate == 16000, f"{clip} is at {rate} Hz; this script wants 16 kHz"
        samples = np.pad(samples, (0, max(0, 16000 - len(samples))))
        inputs = processor.apply_transcription_request(audio=[samples], language=[None])
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        text = processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        said = f"   (reference: {references[clip]})" if clip in references else ""
        sys.stdout.write(f"{clip}: {text}{said}\n")


if __name__ == "__main__":
    main()

"""CPU seconds of attention over a packed row, forward and backward, as the row gets more sequences.

python benchmarks/by_sequence.py [--length 36]

Where no fused function takes packed rows (CPUs; float32 on GPUs) the sequences of a row are computed one after another.
"growth" is the ratio that holds across machines: seconds of 4 times as many sequences to those of so many, 4 where each
costs the same. It was 17 (from 64 to 256) while each sequence was a slice, whose gradient is as long as the row.
"""

import argparse
import json
import sys
import time
from itertools import pairwise

import torch

from skirl.models.attention import packed_attention

COUNTS = (16, 64, 256)
ROUNDS = 5


def seconds(count: int, length: int) -> float:
    """Least of a few passes, CPU time."""
    borders = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    query, key, value = (torch.randn(1, 4, count * length, 16, requires_grad=True) for _ in range(3))
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        out, _ = packed_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=borders)
        out.sum().backward()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Writes the figures to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=36, help="tokens of each sequence")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {count: seconds(count, options.length) for count in COUNTS}
    growth = {f"{a} to {b}": found[b] / found[a] for a, b in pairwise(COUNTS)}
    sys.stdout.write(json.dumps({"seconds": found, "growth": growth, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()

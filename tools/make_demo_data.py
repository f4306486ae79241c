"""Make the demo's speech corpus: spoken numbers in English and Mandarin, spoken by espeak-ng.

Two domains with disjoint voices. "clean": a few voices at a normal pace. "hard": other voices, a wider range of paces
and pitches, and additive noise. A model fine-tuned on the clean domain mistakes one language for the other and inserts
words in the hard one: the shift that reinforcement learning then reduces. Every clip has the faint hiss of a recording,
because a model that has only heard digital silence around the words is lost with any noise.

Each split is one manifest, ``OUT/SPLIT.jsonl``, in the Qwen3-ASR form with extra columns, beside one Ogg/Opus file a
clip, ``OUT/audio/SPLIT/NAME.ogg`` (mono, 16 kHz). The same seed and counts give the same bytes, if the versions of
espeak-ng, libsndfile and libopus are the same.

Needs: espeak-ng on the PATH; numpy, soundfile, soxr.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

Samples = npt.NDArray[np.float32]

SAMPLE_RATE = 16_000
OPUS_COMPRESSION = 0.98
"""libsndfile's scale from 0 (256 kbit/s) to 1 (6 kbit/s) for one channel: 0.98 is about 11 kbit/s."""
SPEECH_RMS = 0.08
HISS_SNR_DB = (25.0, 40.0)
"""Range of the faint noise that every clip has."""
PEAK_LIMIT = 0.95
SILENCE_LEVEL = 0.003
SILENCE_KEPT_S = 0.05
KEYWORD_SHARE = 0.3
MAX_DIGITS = 4
MAX_ATTEMPTS = 1_000
OGG_CRC_POLYNOMIAL = 0x04C11DB7


@dataclass(frozen=True)
class Language:
    """How the digits of one language are written and joined."""

    name: str
    code: str
    digits: tuple[str, ...]
    separator: str


@dataclass(frozen=True)
class Domain:
    """What the clips of one domain may sound like; ranges include both ends."""

    name: str
    voices: Mapping[str, tuple[str, ...]]
    """Language code -> espeak-ng voices."""
    speeds: tuple[int, int]
    """Words a minute."""
    pitches: tuple[int, int]
    """espeak-ng's scale, 0 to 99."""
    snr_db: tuple[float, float] | None
    """Signal-to-noise ratio of the added noise; None adds none."""


@dataclass(frozen=True)
class Utterance:
    """One clip before noise: what is said, and how."""

    language: Language
    words: tuple[str, ...]
    voice: str
    speed: int
    pitch: int
    samples: Samples

    @property
    def transcript(self) -> str:
        """The words, joined as the language writes them."""
        return self.language.separator.join(self.words)


ENGLISH_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LANGUAGES = (
    Language("English", "en", ENGLISH_DIGITS, " "),
    Language("Chinese", "zh", tuple("零一二三四五六七八九"), ""),
)
# The plain `cmn` voice of espeak-ng 1.51 spells pinyin with English tone numbers; this one reads hanzi.
MANDARIN = "cmn-latn-pinyin"
CLEAN = Domain(
    name="clean",
    voices={
        "en": ("en-us+m1", "en-us+f2", "en-us+m4", "en-gb+m3", "en-gb+f1", "en-gb+f4"),
        "zh": tuple(f"{MANDARIN}+{variant}" for variant in ("m1", "m3", "m4", "f1", "f2", "f4")),
    },
    speeds=(140, 190),
    pitches=(35, 65),
    snr_db=None,
)
HARD = Domain(
    name="hard",
    voices={
        "en": ("en-us+m2", "en-us+f3", "en-us+m7", "en-gb+f5", "en-gb+m6", "en-gb-x-rp+f3"),
        "zh": tuple(f"{MANDARIN}+{variant}" for variant in ("m2", "f3", "m7", "f5", "m6", "m5")),
    },
    speeds=(130, 210),
    pitches=(30, 70),
    snr_db=(12.0, 25.0),
)
SPLITS = {"clean_train": CLEAN, "clean_test": CLEAN, "hard_train": HARD, "hard_test": HARD}
COUNTS = {"clean_train": 900, "clean_test": 120, "hard_train": 500, "hard_test": 320}


def speak(text: str, *, voice: str, speed: int, pitch: int) -> Samples:
    """Let espeak-ng say a text.

    Args:
        text: what to say.
        voice: an espeak-ng voice, with its variant.
        speed: words a minute.
        pitch: 0 to 99.

    Returns:
        Mono samples at 16 kHz, silence at both ends cut, with a fixed root mean square.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        options = ["-v", voice, "-s", str(speed), "-p", str(pitch), "-w", str(path)]
        subprocess.run(["espeak-ng", *options, "--", text], check=True)
        samples, rate = soundfile.read(path, dtype="float32")
    resampled = soxr.resample(samples, rate, SAMPLE_RATE).astype(np.float32)
    return at_rms(without_outer_silence(resampled), SPEECH_RMS)


def without_outer_silence(samples: Samples) -> Samples:
    """Cut the silence at both ends, but for 50 ms."""
    loud = np.flatnonzero(np.abs(samples) > SILENCE_LEVEL)
    kept = int(SILENCE_KEPT_S * SAMPLE_RATE)
    return samples[max(0, loud[0] - kept) : loud[-1] + kept]


def at_rms(samples: Samples, rms: float) -> Samples:
    """Scale samples to a root mean square."""
    return (samples * (rms / np.sqrt(np.mean(np.square(samples, dtype=np.float64))))).astype(np.float32)


def white_noise(rng: np.random.Generator, length: int) -> Samples:
    """Gaussian noise with a flat spectrum."""
    return rng.standard_normal(length).astype(np.float32)


def pink_noise(rng: np.random.Generator, length: int) -> Samples:
    """Gaussian noise whose power falls as 1/f."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    spectrum /= np.sqrt(np.maximum(1, np.arange(len(spectrum))))
    return np.fft.irfft(spectrum, length).astype(np.float32)


def babble(rng: np.random.Generator, length: int, pool: Sequence[Utterance]) -> Samples:
    """Four clips of the pool at once, each repeated from a random place."""
    mixed = np.zeros(length, np.float32)
    for index in rng.choice(len(pool), size=4):
        samples = pool[index].samples
        mixed += np.resize(np.roll(samples, int(rng.integers(len(samples)))), length)
    return mixed


def add_noise(speech: Samples, noise: Samples, snr_db: float) -> Samples:
    """Add noise at a signal-to-noise ratio, measured over the whole clip."""
    level = SPEECH_RMS * 10 ** (-snr_db / 20)
    return speech + at_rms(noise, level)


def draw_utterance(
    rng: np.random.Generator, domain: Domain, language: Language, used: set[tuple[str, str, int]]
) -> Utterance:
    """Draw and speak one utterance whose transcript, voice and speed were not used together before.

    Args:
        rng: source of every choice.
        domain: voices, speeds and pitches to choose from.
        language: language of the words.
        used: (transcript, voice, speed) of all earlier utterances; the new one is added.

    Returns:
        The utterance, without noise.

    Raises:
        ValueError: if the domain has no combination left.
    """
    for _ in range(MAX_ATTEMPTS):
        count = int(rng.integers(1, MAX_DIGITS + 1))
        words = tuple(language.digits[index] for index in rng.integers(len(language.digits), size=count))
        voice = str(rng.choice(domain.voices[language.code]))
        speed = int(rng.integers(domain.speeds[0], domain.speeds[1] + 1))
        pitch = int(rng.integers(domain.pitches[0], domain.pitches[1] + 1))
        key = (language.separator.join(words), voice, speed)
        if key not in used:
            used.add(key)
            return Utterance(language, words, voice, speed, pitch, speak(key[0], voice=voice, speed=speed, pitch=pitch))
    raise ValueError(f"no unused utterance after {MAX_ATTEMPTS} draws in domain {domain.name!r}; ask for fewer clips")


def make_noise(rng: np.random.Generator, kind: str, length: int, pool: Sequence[Utterance]) -> Samples:
    """Noise of a kind: white, pink, or babble of the pool's clips."""
    if kind == "white":
        return white_noise(rng, length)
    if kind == "pink":
        return pink_noise(rng, length)
    return babble(rng, length, pool)


def recorded(
    rng: np.random.Generator, utterance: Utterance, domain: Domain, pool: Sequence[Utterance]
) -> tuple[Samples, dict[str, Any]]:
    """The clip as it is stored, with hiss and the domain's noise, and the manifest columns that describe the latter."""
    length = len(utterance.samples)
    hiss = make_noise(rng, str(rng.choice(["white", "pink"])), length, ())
    speech = add_noise(utterance.samples, hiss, float(rng.uniform(*HISS_SNR_DB)))
    if domain.snr_db is None:
        return speech, {"snr_db": None, "noise": None}
    kind = str(rng.choice(["white", "pink", "babble"]))
    snr_db = round(float(rng.uniform(*domain.snr_db)), 1)
    return add_noise(speech, make_noise(rng, kind, length, pool), snr_db), {"snr_db": snr_db, "noise": kind}


def draw_keywords(rng: np.random.Generator, utterance: Utterance) -> list[str] | None:
    """For some rows, a list of hot words: one that is said and two others; None for the rest."""
    if rng.random() >= KEYWORD_SHARE:
        return None
    said = str(rng.choice(utterance.words))
    others = [word for word in utterance.language.digits if word not in utterance.words]
    return sorted([said, *(str(word) for word in rng.choice(others, size=2, replace=False))])


def encode(samples: Samples, serial: int) -> bytes:
    """Encode a clip as Ogg/Opus.

    Args:
        samples: mono, 16 kHz; scaled down if they would clip.
        serial: number of the Ogg stream. libsndfile draws it from the clock, so that equal clips differ; this one
            takes its place.

    Returns:
        The bytes of the file.
    """
    peak = float(np.abs(samples).max())
    quiet = samples * min(1.0, PEAK_LIMIT / peak)
    buffer = io.BytesIO()
    soundfile.write(buffer, quiet, SAMPLE_RATE, format="OGG", subtype="OPUS", compression_level=OPUS_COMPRESSION)
    return with_ogg_serial(buffer.getvalue(), serial)


def ogg_crc_table() -> list[int]:
    """Remainders of all bytes for the checksum of Ogg pages (32 bits, most significant first)."""
    table = []
    for byte in range(256):
        value = byte << 24
        for _ in range(8):
            value = (value << 1) ^ (OGG_CRC_POLYNOMIAL if value & 0x80000000 else 0)
        table.append(value & 0xFFFFFFFF)
    return table


OGG_CRC_TABLE = ogg_crc_table()


def with_ogg_serial(data: bytes, serial: int) -> bytes:
    """Set the stream number of every page of an Ogg file, and the pages' checksums.

    Args:
        data: a whole Ogg file with one stream.
        serial: the new number, 32 bits.

    Returns:
        The changed file.

    Source: RFC 3533, section 6.
    """
    result = bytearray(data)
    start = 0
    while start < len(result):
        num_segments = result[start + 26]
        end = start + 27 + num_segments + sum(result[start + 27 : start + 27 + num_segments])
        result[start + 14 : start + 18] = serial.to_bytes(4, "little")
        result[start + 22 : start + 26] = bytes(4)
        crc = 0
        for byte in result[start:end]:
            crc = ((crc << 8) & 0xFFFFFFFF) ^ OGG_CRC_TABLE[(crc >> 24) ^ byte]
        result[start + 22 : start + 26] = crc.to_bytes(4, "little")
        start = end
    return bytes(result)


def make_split(
    out: Path, split: str, count: int, *, rng: np.random.Generator, used: set[tuple[str, str, int]]
) -> list[dict[str, Any]]:
    """Make the clips and the manifest of one split; languages take turns.

    Args:
        out: folder of the manifests.
        split: name of the split, a key of SPLITS.
        count: number of clips.
        rng: source of every choice.
        used: (transcript, voice, speed) of all splits so far; changed.

    Returns:
        The rows of the manifest.
    """
    domain = SPLITS[split]
    folder = out / "audio" / split
    folder.mkdir(parents=True)
    utterances = [draw_utterance(rng, domain, LANGUAGES[i % len(LANGUAGES)], used) for i in range(count)]
    rows = []
    for index, utterance in enumerate(utterances):
        samples, noise = recorded(rng, utterance, domain, utterances)
        name = f"{utterance.language.code}{index:04d}"
        path = folder / f"{name}.ogg"
        path.write_bytes(encode(samples, serial=index))
        row = {
            "id": f"{split}_{name}",
            "audio": path.relative_to(out).as_posix(),
            "text": f"language {utterance.language.name}<asr_text>{utterance.transcript}",
            "voice": utterance.voice,
            "speed": utterance.speed,
            **noise,
            "domain": domain.name,
        }
        keywords = draw_keywords(rng, utterance)
        rows.append(row if keywords is None else {**row, "keywords": keywords})
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return rows


def parse_counts(items: Sequence[str]) -> dict[str, int]:
    """Read SPLIT=NUMBER items over the default counts."""
    counts = dict(COUNTS)
    for item in items:
        split, _, number = item.partition("=")
        if split not in COUNTS or not number.isdigit():
            raise ValueError(f"--counts got {item!r}; give SPLIT=NUMBER with SPLIT one of {', '.join(COUNTS)}")
        counts[split] = int(number)
    return counts


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo/data"), help="folder of the manifests (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every random choice (%(default)s)")
    parser.add_argument(
        "--counts",
        nargs="*",
        default=[],
        metavar="SPLIT=NUMBER",
        help="clips of a split; default: " + " ".join(f"{split}={count}" for split, count in COUNTS.items()),
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make every split; return the exit status."""
    args = parse_arguments(arguments)
    try:
        counts = parse_counts(args.counts)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if shutil.which("espeak-ng") is None:
        sys.stderr.write("espeak-ng is not on the PATH; install it first (Debian: apt-get install espeak-ng)\n")
        return 2
    used: set[tuple[str, str, int]] = set()
    shutil.rmtree(args.out / "audio", ignore_errors=True)
    for number, (split, count) in enumerate(counts.items()):
        rows = make_split(args.out, split, count, rng=np.random.default_rng([args.seed, number]), used=used)
        size_bytes = sum((args.out / row["audio"]).stat().st_size for row in rows)
        sys.stdout.write(f"{split}: {len(rows)} clips, {size_bytes:,} bytes of audio\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

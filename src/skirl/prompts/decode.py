"""Audio files to samples: 16 kHz mono float32, with a length that is known from the header alone.

soundfile reads wav, flac, ogg (Vorbis, Opus), mp3 and more; ``av`` reads what it cannot (m4a, mp4, webm, aac).
Every engine and trainer gets its samples from ``load_clip``, so all of them see the same array.
"""

import io
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from skirl.errors import DataError
from skirl.records import Media

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

__all__ = [
    "SAMPLE_RATE",
    "SEGMENT_REMEDY",
    "UNREADABLE_REMEDY",
    "AudioHeader",
    "clip_frames",
    "clip_num_samples",
    "clip_seconds",
    "load_clip",
    "padded_num_samples",
    "read_header",
]

SAMPLE_RATE = 16_000
"""Hz of every decoded clip."""
UNREADABLE_REMEDY = "Check that it plays; convert it to wav or flac, or leave it out of the manifest."
"""What a user can do about a file that is no audio; last sentence of such an error."""
SEGMENT_REMEDY = "Correct its start (offset) and duration in the manifest."
"""The same for a segment that is not in its file."""

# Lengths of compressed files are exact to a packet or two: a clip may lack this much against its header (seconds),
# and a segment may end this far behind the end of its file, as rounded times in manifests do.
FRAME = 160
"""Samples between two frames of features, in every encoder that skirl knows: 10 ms."""
_SLACK_S = 0.1
# A lossy decoder needs some history before its output is that of a decode from the start.
_PREROLL_S = 1.0
# libvorbis lands on wrong samples when it seeks into the last page of a file; a page is at most 64 KiB.
_VORBIS_TAIL_S = 30.0
_LOSSY = frozenset({"VORBIS", "OPUS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"})

_Frames = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What the header of a whole file says.

    Attributes:
        sample_rate: Hz. num_channels: at least 1. num_frames: samples of one channel.
        reader: the library that reads it.
    """

    sample_rate: int
    num_channels: int
    num_frames: int
    reader: Literal["soundfile", "av"] = "soundfile"

    @property
    def seconds(self) -> float:
        """Length of the whole file."""
        return self.num_frames / self.sample_rate


def read_header(media: Media) -> AudioHeader:
    """Reads the header of the file behind a clip; decodes nothing. A file that did not change is not opened again.

    Raises:
        DataError: the file is missing, empty, or neither soundfile nor av can read it.
    """
    _check_file(media)
    if media.data is not None:
        return _header(media)
    found = os.stat(media.path)
    return _file_header(media.path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1 << 20)
def _file_header(path: str, size_bytes: int, changed_ns: int) -> AudioHeader:
    """By what changes with the contents."""
    return _header(Media(path))


def _header(media: Media) -> AudioHeader:
    try:
        with soundfile.SoundFile(_source(media)) as file:
            return AudioHeader(file.samplerate, file.channels, file.frames)
    except soundfile.LibsndfileError as error:
        return _av_header(media, why=str(error.error_string))


def clip_frames(media: Media, header: AudioHeader) -> tuple[int, int]:
    """First frame and number of frames of the clip in its file, at the file's own rate.

    Raises:
        DataError: the segment does not lie inside the file (its end may pass the file's by 0.1 s and is cut).
    """
    rate = header.sample_rate
    start = round(media.start_s * rate)
    end = header.num_frames if media.duration_s is None else round((media.start_s + media.duration_s) * rate)
    if start < 0 or end - header.num_frames > _SLACK_S * rate or (start >= header.num_frames and start > 0):
        raise DataError(
            f"{media.path}: the segment from {media.start_s:g} s to {end / rate:g} s does not lie inside the file, "
            f"which is {header.seconds:g} s long. {SEGMENT_REMEDY}"
        )
    return start, max(0, min(end, header.num_frames) - start)


def clip_seconds(media: Media) -> float:
    """Length of the clip before any padding, from the header, seconds. Raises DataError as ``read_header``."""
    header = read_header(media)
    return clip_frames(media, header)[1] / header.sample_rate


def clip_num_samples(media: Media) -> int:
    """Number of 16 kHz samples that the decoded clip has before padding, from the header.

    Raises:
        DataError: the file cannot be read, or the clip holds no audio.
    """
    header = read_header(media)
    return _num_samples(media, header, clip_frames(media, header)[1])


def padded_num_samples(media: Media, min_samples: int) -> int:
    """Length of ``load_clip``'s array, from the header."""
    return _padded(clip_num_samples(media), min_samples)


def _padded(num_samples: int, min_samples: int) -> int:
    if not min_samples:
        return num_samples
    return max(num_samples - num_samples % FRAME, min_samples)


def load_clip(media: Media, min_samples: int = 0) -> _Frames:
    """Decodes one clip.

    Channels are averaged, the rate is brought to 16 kHz (soxr, HQ), and a clip that peaks above 1 is scaled to 1.

    Args:
        media: the clip.
        min_samples: of a model's encoder: shorter clips get zeros at their end up to this length, and longer ones are
            cut to whole frames of 10 ms, so that every feature extractor counts the same number (vLLM 0.26 rounds up
            where transformers rounds down). 0 takes the clip as it is.

    Returns:
        float32 ``[padded_num_samples(media, min_samples)]``.

    Raises:
        DataError: the file cannot be read or decoded, ends more than 0.1 s before its header says, or holds NaN.
    """
    header = read_header(media)
    start, count = clip_frames(media, header)
    num_samples = _num_samples(media, header, count)
    read = _read_soundfile if header.reader == "soundfile" else _read_av
    frames = read(media, header, start, count)
    lacking = count - len(frames)
    if lacking > _SLACK_S * header.sample_rate:
        raise DataError(
            f"{media.path}: is cut short: {count / header.sample_rate:g} s by its header, but only "
            f"{len(frames) / header.sample_rate:g} s can be decoded. Copy or encode the file again."
        )
    mono = np.pad(frames, (0, lacking))
    if header.sample_rate != SAMPLE_RATE:
        mono = soxr.resample(mono, header.sample_rate, SAMPLE_RATE, quality="HQ")
    assert abs(len(mono) - num_samples) <= 2, (len(mono), num_samples, header)
    clip = np.zeros(_padded(num_samples, min_samples), dtype=np.float32)
    kept = min(len(mono), num_samples, len(clip))
    clip[:kept] = mono[:kept]
    peak = float(np.abs(clip).max())
    if not math.isfinite(peak):
        raise DataError(f"{media.path}: holds samples that are not finite. Encode the file again, or leave it out.")
    return clip / np.float32(peak) if peak > 1 else clip


# -------------------------------------------------------------------------------------------------------------- sources
def _source(media: Media) -> str | io.BytesIO:
    return media.path if media.data is None else io.BytesIO(media.data)


def _check_file(media: Media) -> None:
    if media.data is None:
        if not os.path.isfile(media.path):
            raise DataError(f"{media.path}: there is no such file. Correct the path in the manifest.")
        if media.path.lower().endswith(".raw"):
            raise DataError(f"{media.path}: raw samples have no header, so no rate. Convert the file to wav or flac.")
    if (os.path.getsize(media.path) if media.data is None else len(media.data)) == 0:
        raise DataError(f"{media.path}: is empty (0 bytes). Copy the file again, or leave it out of the manifest.")


def _num_samples(media: Media, header: AudioHeader, count: int) -> int:
    num_samples = round(count * SAMPLE_RATE / header.sample_rate)
    if num_samples < 1:
        raise DataError(f"{media.path}: the clip holds no audio. Leave it out of the manifest.")
    return num_samples


def _unreadable(media: Media, why: str) -> DataError:
    return DataError(f"{media.path}: cannot be read as audio ({why.strip().rstrip('.')}). {UNREADABLE_REMEDY}")


# ------------------------------------------------------------------------------------------------------------ soundfile
def _read_soundfile(media: Media, header: AudioHeader, start: int, count: int) -> _Frames:
    """Mono frames [at most count] at the file's rate."""
    try:
        with soundfile.SoundFile(_source(media)) as file:
            seek = start
            if file.subtype in _LOSSY:
                seek -= round(_PREROLL_S * header.sample_rate)
            if file.subtype == "VORBIS":
                seek = min(seek, header.num_frames - round(_VORBIS_TAIL_S * header.sample_rate))
            seek = max(0, seek)
            file.seek(seek)  # to 0 as well: until its first seek, libsndfile 1.2.2 leaves Opus' pre-skip in
            frames = file.read(start - seek + count, dtype="float32", always_2d=True)[start - seek :]
    except soundfile.LibsndfileError as error:
        raise _unreadable(media, str(error.error_string)) from error
    return frames.mean(axis=1, dtype=np.float32)


# ------------------------------------------------------------------------------------------------------------------- av
def _av_header(media: Media, why: str) -> AudioHeader:
    import av
    from av.error import FFmpegError

    try:
        with av.open(_source(media), mode="r") as container:
            if not container.streams.audio:
                raise _unreadable(media, "it has no audio track")
            stream = container.streams.audio[0]
            rate = stream.codec_context.sample_rate
            channels = stream.codec_context.channels
            return AudioHeader(rate, channels, round(_av_seconds(container, stream) * rate), "av")
    except FFmpegError as error:
        raise _unreadable(media, f"soundfile: {why.strip().rstrip('.')}; av: {error.strerror}") from error


def _av_seconds(container: "InputContainer", stream: "AudioStream") -> float:
    """Length of an audio track; browsers record webm without one, so its packets are counted then."""
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None:
        return container.duration / 1_000_000
    ticks = [
        packet.pts + (packet.duration or 0) - (stream.start_time or 0)
        for packet in container.demux(stream)
        if packet.pts is not None
    ]
    return float(max(ticks) * stream.time_base) if ticks and stream.time_base is not None else 0.0


def _read_av(media: Media, header: AudioHeader, start: int, count: int) -> _Frames:
    """As ``_read_soundfile``; a segment starts to the precision of the container's clock (1 ms in webm)."""
    import av
    from av.error import FFmpegError

    chunks: list[_Frames] = []
    first, have = 0, 0
    try:
        with av.open(_source(media), mode="r") as container:
            stream = container.streams.audio[0]
            clock = stream.time_base
            assert clock is not None, media.path
            origin = stream.start_time or 0
            seek = start - round(_PREROLL_S * header.sample_rate)
            if seek > 0:
                container.seek(origin + int(seek / header.sample_rate / clock), stream=stream)
            to_planar = av.AudioResampler(format="fltp")
            for frame in container.decode(stream):
                if not chunks and seek > 0 and frame.pts is not None:
                    first = round(float((frame.pts - origin) * clock) * header.sample_rate)
                for planar in to_planar.resample(frame):
                    chunks.append(planar.to_ndarray().mean(axis=0, dtype=np.float32))
                    have += len(chunks[-1])
                if first + have >= start + count:
                    break
    except FFmpegError as error:
        raise _unreadable(media, str(error.strerror)) from error
    frames = np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.float32)
    return frames[max(0, start - first) :][:count]

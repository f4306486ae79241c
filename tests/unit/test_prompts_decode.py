"""Decoding: exact lengths from headers, segments, rates, channels, containers, and broken files."""

import io
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from skirl.errors import DataError
from skirl.prompts.decode import clip_num_samples, clip_seconds, load_clip, padded_num_samples, read_header
from skirl.records import Media

Signal = npt.NDArray[np.float32]
LIBRIVOX = Path(__file__).parents[1] / "data" / "librivox"


def sweep(seconds: float, rate: int) -> Signal:
    """A tone that rises from 100 to 1000 Hz: every place in it differs from every other."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * (100 * time + 450 * time**2 / seconds))).astype(np.float32)


def lag(heard: Signal, wanted: Signal) -> int:
    """Samples by which one signal comes later than the other."""
    size = 2 * max(len(heard), len(wanted))
    product = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(wanted, size)))
    best = int(np.argmax(product))
    return best if best < size // 2 else best - size


def alike(heard: Signal, wanted: Signal) -> float:
    """Cosine of the angle between two signals of the same sound."""
    size = min(len(heard), len(wanted))
    heard, wanted = heard[:size], wanted[:size]
    return float(heard @ wanted / np.linalg.norm(heard) / np.linalg.norm(wanted))


def encode_with_av(target: Path | io.RawIOBase, signal: Signal, *, codec: str, kind: str, rate: int) -> None:
    pcm = (signal[None] * 32767).astype(np.int16)
    with av.open(target if isinstance(target, io.RawIOBase) else str(target), "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)


class Pipe(io.RawIOBase):
    """A stream that cannot seek, as a browser's recorder writes to."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.data += bytes(data)
        return len(data)


@pytest.mark.parametrize(
    ("name", "kind", "subtype", "rate"),
    [
        ("a.wav", "WAV", "PCM_16", 16000),
        ("a.wav", "WAV", "FLOAT", 44100),
        ("a.flac", "FLAC", "PCM_16", 8000),
        ("a.ogg", "OGG", "VORBIS", 22050),
        ("a.opus", "OGG", "OPUS", 48000),
        ("a.opus", "OGG", "OPUS", 24000),
        ("a.mp3", "MP3", "MPEG_LAYER_III", 44100),
    ],
)
def test_length_is_known_from_the_header_and_the_sound_is_kept(
    tmp_path: Path, name: str, kind: str, subtype: str, rate: int
) -> None:
    num_frames = round(3.217 * rate) + 1
    signal = sweep(num_frames / rate, rate)
    soundfile.write(tmp_path / name, signal, rate, format=kind, subtype=subtype)
    media = Media(str(tmp_path / name))
    clip = load_clip(media)
    assert clip.dtype == np.float32
    assert len(clip) == clip_num_samples(media) == round(num_frames * 16000 / rate)
    assert clip_seconds(media) == num_frames / rate
    wanted = sweep(num_frames / rate, 16000)
    assert lag(clip, wanted) == 0
    assert alike(clip, wanted) > 0.995


def test_opus_of_another_encoder_has_its_pre_skip_and_end_cut(tmp_path: Path) -> None:
    signal = sweep(2.5013, 48000)
    encode_with_av(tmp_path / "a.opus", signal, codec="libopus", kind="ogg", rate=48000)
    media = Media(str(tmp_path / "a.opus"))
    assert read_header(media).num_frames == len(signal)
    assert lag(load_clip(media), sweep(2.5013, 16000)) == 0
    assert alike(load_clip(media), sweep(2.5013, 16000)) > 0.995


@pytest.mark.parametrize("subtype", ["PCM_16", "VORBIS", "OPUS"])
def test_a_segment_is_that_part_of_the_whole(tmp_path: Path, subtype: str) -> None:
    """The last page of a Vorbis file is where a plain seek gives wrong samples."""
    path = tmp_path / "long.audio"
    soundfile.write(path, sweep(40.0, 16000), 16000, format="WAV" if subtype == "PCM_16" else "OGG", subtype=subtype)
    whole = load_clip(Media(str(path)))
    for start_s, duration_s in [(0.0, 1.0), (1.5, 2.0), (38.0, 1.5), (39.5, None), (39.9, 0.1)]:
        media = Media(str(path), start_s, duration_s)
        part = load_clip(media)
        start = round(start_s * 16000)
        end = len(whole) if duration_s is None else start + round(duration_s * 16000)
        assert len(part) == clip_num_samples(media) == end - start
        np.testing.assert_allclose(part, whole[start:end], atol=1e-3 if subtype == "OPUS" else 1e-6)


@pytest.mark.parametrize(
    ("name", "codec", "kind", "rate", "delay"),
    [
        ("a.m4a", "aac", "ipod", 44100, 372),  # the test's encoder does not mark its delay of 1024 frames
        ("a.mp4", "aac", "mp4", 16000, 1024),
        ("a.webm", "libopus", "webm", 48000, 0),
    ],
)
def test_av_reads_what_libsndfile_cannot(
    tmp_path: Path, name: str, codec: str, kind: str, rate: int, delay: int
) -> None:
    path = tmp_path / name
    encode_with_av(path, sweep(6.0, rate), codec=codec, kind=kind, rate=rate)
    media = Media(str(path))
    assert read_header(media).reader == "av"
    whole = load_clip(media)
    assert len(whole) == clip_num_samples(media)
    assert clip_seconds(media) == pytest.approx(6.0, abs=0.1)
    assert lag(whole, sweep(6.0, 16000)) == delay
    assert alike(whole[delay:], sweep(6.0, 16000)) > 0.99
    part = load_clip(Media(str(path), 3.0, 1.5))
    assert len(part) == 24000
    assert abs(lag(part, whole[48000:72000])) <= (16 if kind == "webm" else 0)  # webm's clock ticks once a millisecond
    assert alike(part, whole[48000 - lag(part, whole[48000:72000]) :]) > 0.99


def test_a_webm_without_a_length_in_its_header_is_counted(tmp_path: Path) -> None:
    pipe = Pipe()
    encode_with_av(pipe, sweep(2.0, 48000), codec="libopus", kind="webm", rate=48000)
    media = Media("recording", data=pipe.data)
    assert clip_seconds(media) == pytest.approx(2.0, abs=0.03)
    assert len(load_clip(media)) == clip_num_samples(media)


def test_channels_are_averaged_and_loud_clips_scaled(tmp_path: Path) -> None:
    signal = sweep(1.0, 16000)
    soundfile.write(tmp_path / "a.wav", np.stack([signal, np.zeros_like(signal)], axis=1), 16000, subtype="FLOAT")
    np.testing.assert_array_equal(load_clip(Media(str(tmp_path / "a.wav"))), signal / 2)
    soundfile.write(tmp_path / "b.wav", 6 * signal, 16000, subtype="FLOAT")
    np.testing.assert_allclose(load_clip(Media(str(tmp_path / "b.wav"))), signal / np.abs(signal).max(), rtol=1e-6)


def test_short_clips_are_padded_with_zeros(tmp_path: Path) -> None:
    signal = sweep(0.3, 16000)
    soundfile.write(tmp_path / "a.wav", signal, 16000, subtype="FLOAT")
    media = Media(str(tmp_path / "a.wav"))
    clip = load_clip(media, 16000)
    assert len(clip) == padded_num_samples(media, 16000) == 16000
    np.testing.assert_array_equal(clip[:4800], signal)
    assert not clip[4800:].any()
    assert padded_num_samples(media, 100) == len(load_clip(media, 100)) == 4800


def test_bytes_decode_as_the_file_does() -> None:
    path = sorted(LIBRIVOX.glob("*.wav"))[0]
    np.testing.assert_array_equal(
        load_clip(Media("table", 1.0, 2.0, path.read_bytes())), load_clip(Media(str(path), 1.0, 2.0))
    )


def test_every_rate_and_length_gives_the_promised_number_of_samples(tmp_path: Path) -> None:
    for rate in (8000, 11025, 22050, 32000, 44100, 96000):
        for num_frames in (10, 801, 12345):
            soundfile.write(tmp_path / "a.wav", np.full(num_frames, 0.1), rate)
            media = Media(str(tmp_path / "a.wav"))
            assert len(load_clip(media)) == round(num_frames * 16000 / rate)


def _wav_of(signal: Signal) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, signal, 16000, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"clip: is empty \(0 bytes\)\. Copy the file again"),
        (b"this is no audio at all" * 9, r"clip: cannot be read as audio \(soundfile: Format not recognised; av: Inv"),
        (_wav_of(np.zeros(0, np.float32)), "the clip holds no audio"),
        (_wav_of(np.array([0.1, np.nan], np.float32)), "holds samples that are not finite"),
    ],
    ids=["nothing", "text", "no samples", "NaN"],
)
def test_unusable_clips_are_errors_that_name_the_clip_and_the_remedy(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_clip(Media("clip", data=data))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.wav: there is no such file"):
        read_header(Media(str(tmp_path / "gone.wav")))


@pytest.mark.parametrize(
    ("kind", "message"), [("FLAC", "cannot be read as audio"), ("MP3", "is cut short: 4 s by its")]
)
def test_a_file_that_is_cut_short_is_an_error(kind: str, message: str) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.random.default_rng(0).uniform(-0.5, 0.5, 64000), 16000, format=kind)
    with pytest.raises(DataError, match=f"clip: {message}"):
        load_clip(Media("clip", data=buffer.getvalue()[: len(buffer.getvalue()) // 2]))


def test_segments_outside_the_file_are_errors(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", sweep(2.0, 16000), 16000)
    path = str(tmp_path / "a.wav")
    assert clip_seconds(Media(path, 1.0, 1.05)) == 1.0  # rounded times may end a little behind the file
    for start_s, duration_s in [(2.5, None), (1.0, 1.2), (-1.0, 1.0)]:
        with pytest.raises(DataError, match="does not lie inside the file, which is 2 s long"):
            clip_seconds(Media(path, start_s, duration_s))


def test_a_file_is_opened_for_its_header_once_however_many_clips_are_cut_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the data and the prompts both ask, of every clip, and on a network each opening waits."""
    path, opened, open_file = tmp_path / "a.wav", list[str](), soundfile.SoundFile

    def counting(file: str) -> soundfile.SoundFile:
        opened.append(file)
        return open_file(file)

    soundfile.write(path, sweep(3.0, 16000), 16000)
    monkeypatch.setattr(soundfile, "SoundFile", counting)
    parts = [Media(str(path), float(start), 1.0) for start in range(3)]
    assert [clip_seconds(part) for part in parts] == [1.0, 1.0, 1.0]
    assert [padded_num_samples(part, 16000) for part in parts] == [16000] * 3
    assert len(opened) == 1
    monkeypatch.undo()
    soundfile.write(path, sweep(2.0, 8000), 8000)
    assert read_header(parts[0]).seconds == 2.0
    with pytest.raises(DataError, match="does not lie inside the file"):
        load_clip(parts[2])

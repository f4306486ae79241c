"""The check of all rows before a run: headers only, every problem in one report, nothing repaired."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from skirl.config.schema import DataConfig, SourceConfig
from skirl.errors import DataError
from skirl.prompts.decode import SAMPLE_RATE, SEGMENT_REMEDY, UNREADABLE_REMEDY, AudioHeader, clip_frames, read_header
from skirl.prompts.manifests import made_up_id, read, read_texts
from skirl.prompts.manifests.columns import Source
from skirl.records import Media, Row
from skirl.speech.languages import LANGUAGES, count_scripts, script_of
from skirl.speech.normalize import vanishes

__all__ = [
    "KINDS",
    "Finding",
    "Kind",
    "Report",
    "TooManyTokens",
    "load_examples",
    "load_prompts",
    "load_rows",
    "validate",
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem: how bad, what it is called, what a user can do."""

    severity: Literal["invalid", "warning"]
    title: str
    remedy: str


KINDS: Mapping[str, Kind] = {
    "missing_file": Kind(
        "invalid", "file is missing", "Correct the path; relative paths count from the manifest's directory."
    ),
    "empty_file": Kind("invalid", "file holds no audio", "Copy or encode the file again, or remove the row."),
    "unreadable_file": Kind("invalid", "file cannot be read as audio", UNREADABLE_REMEDY),
    "bad_segment": Kind("invalid", "segment is not inside its file", SEGMENT_REMEDY),
    "too_short": Kind("invalid", "clip is too short", "Remove the row, or lower data.min_seconds."),
    "too_long": Kind("invalid", "clip is too long", "Cut the clip, remove the row, or raise data.max_seconds."),
    "empty_reference": Kind(
        "invalid",
        "reference is empty",
        "Fill it in; name its column with text_key; or, if nothing is spoken, mark the row with no_speech: true.",
    ),
    "tags_in_reference": Kind(
        "invalid",
        "reference holds tags",
        'Remove them: a reference is plain text, at most after one prefix "language X<asr_text>".',
    ),
    "unread_row": Kind("invalid", "row cannot be understood", "Correct what is named, or remove the row."),
    "no_prompt": Kind("invalid", "row makes no prompt for this model", "Correct what is named, or remove the row."),
    "bad_row": Kind(
        "invalid", "row does not fit the command", "Correct what is named; docs/offline.md lists the columns."
    ),
    "too_many_tokens": Kind(
        "invalid",
        "row has more tokens than a micro-batch",
        "Shorten it, or raise trainer.max_tokens_per_micro_batch; nothing is cut off.",
    ),
    "duplicate_id": Kind("invalid", "id stands twice in its source", "Give each row its own id, or remove one."),
    "speech_rate": Kind(
        "warning", "more text than can be spoken in the time", "Check that clip and reference belong together."
    ),
    "script": Kind(
        "warning", "reference is not in the script of its language", "Check the row's language and its reference."
    ),
    "duration": Kind(
        "warning",
        "length differs from the manifest's duration",
        "Check the path; to cut a part out, give the row an offset (start) as well. The file's length is used.",
    ),
}
"""Kind -> severity, title, remedy; in the order of the report."""

# Fastest plausible speech, letters a second. Mandarin runs at 4 to 8, English at 12 to 20.
_FASTEST = {"Han": 12.0, "Hangul": 12.0, "Hiragana": 15.0, "Katakana": 15.0}
_FASTEST_OTHER = 25.0
_TAG = re.compile(r"<[|/]?[A-Za-z_][^<>\s]*>|^\s*language \w+<")
_FEW_LATIN_LETTERS = 8
_READ_THREADS = 8
_FILES_AT_ONCE = 8192  # what a pool is given costs 2 KB a file until all are read


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of one row. ``index`` is the row's place in what was checked, ``detail`` the value found."""

    kind: str
    index: int
    source: str
    row_id: str
    where: str
    detail: str

    @property
    def severity(self) -> Literal["invalid", "warning"]:
        """Invalid rows stop the run or are dropped; warnings do neither."""
        return KINDS[self.kind].severity


@dataclass(frozen=True, slots=True)
class Report:
    """What the check found.

    Attributes:
        num_rows: rows checked, by source.
        findings: every problem, in order of the rows.
        seconds: length of each row's clips by their headers; the manifest's where they could not be read.
        sample_rates: clips by sample rate, Hz. num_stereo: clips of more than one channel.
        num_dropped: rows that were left out because of it.
    """

    num_rows: Mapping[str, int]
    findings: tuple[Finding, ...]
    seconds: tuple[float, ...]
    sample_rates: Mapping[int, int]
    num_stereo: int
    num_dropped: int = 0

    @property
    def invalid(self) -> frozenset[int]:
        """Indices of the invalid rows."""
        return frozenset(finding.index for finding in self.findings if finding.severity == "invalid")

    @property
    def invalid_ids(self) -> frozenset[str]:
        """ "source/id" of the invalid rows; of rows that share an id only the first may be valid."""
        return frozenset(f"{found.source}/{found.row_id}" for found in self.findings if found.severity == "invalid")

    def render(self, max_examples: int = 3) -> str:
        """The report as text for a console: counts, then each kind of problem with examples and what to do."""
        lines = [self._summary()]
        by_kind: dict[str, list[Finding]] = defaultdict(list)
        for finding in self.findings:
            by_kind[finding.kind].append(finding)
        for name, kind in KINDS.items():
            found = by_kind.get(name, [])
            if not found:
                continue
            lines += ["", f"{kind.severity.upper()}  {kind.title}: {_count(len(found), 'row')}"]
            for finding in found[:max_examples]:
                name = f"  id {finding.row_id!r}" if finding.row_id else ""
                lines += [f"    {finding.where}{name}", f"        {finding.detail}"]
            if len(found) > max_examples:
                lines.append(f"    ... and {len(found) - max_examples} more")
            lines.append(f"    -> {kind.remedy}")
        return "\n".join(lines)

    def _summary(self) -> str:
        total = sum(self.num_rows.values())
        sources = ", ".join(f"{name} {count}" for name, count in self.num_rows.items())
        warned = {finding.index for finding in self.findings if finding.severity == "warning"}
        lines = [
            f"Data check: {_count(total, 'row')} ({sources}), {len(self.invalid)} invalid"
            + (f" ({self.num_dropped} dropped)" if self.num_dropped else "")
            + f", {len(warned)} with warnings"
        ]
        if self.sample_rates:
            rates = ", ".join(f"{count} at {rate / 1000:g} kHz" for rate, count in sorted(self.sample_rates.items()))
            resampled = sum(count for rate, count in self.sample_rates.items() if rate != SAMPLE_RATE)
            lines.append(f"    audio: {_duration(sum(self.seconds))} in {rates}")
            lines.append(f"    {resampled} will be resampled to 16 kHz, {self.num_stereo} averaged to one channel")
        return "\n".join(lines)


class TooManyTokens(DataError):
    """A row that does not fit into a micro-batch."""


class HasRow(Protocol):
    """What a record was understood as; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def row(self) -> Row:
        """Its prompt."""
        ...


Made = TypeVar("Made")
Parsed = TypeVar("Parsed", bound=HasRow)
Example = TypeVar("Example")


def load_rows(sources: Mapping[str, SourceConfig], data: DataConfig) -> tuple[list[Row], Report]:
    """Reads and checks all sources; ``Row.seconds`` comes from the headers.

    Args:
        sources: by name, ``data.train`` or ``data.eval``.
        data: bounds, and what invalid rows do.

    Returns:
        The rows in order of the sources, and the report on them all.

    Raises:
        DataError: a manifest cannot be read; with on_invalid "stop" any row is invalid (the message is the report);
            with "drop" no row is left.
    """
    return load_prompts(sources, data, lambda row: row)


def load_prompts(
    sources: Mapping[str, SourceConfig], data: DataConfig, make: Callable[[Row], Made]
) -> tuple[list[Made], Report]:
    """As ``load_rows``, with what is made of each row; a row of which nothing can be made is invalid, too.

    Args: make: raises DataError for such a row.
    """
    rows: list[Row] = []
    unread: list[tuple[str, str, DataError]] = []
    for name, config in sources.items():
        rows += read(name, config, lambda where, error, name=name: unread.append((name, where, error)))
    found = validate(rows, min_seconds=data.min_seconds, max_seconds=data.max_seconds)
    invalid, made, findings = found.invalid, list[Made](), list(found.findings)
    for index, (row, seconds) in enumerate(zip(rows, found.seconds, strict=True)):
        if index in invalid:
            continue
        try:
            made.append(make(replace(row, seconds=seconds)))
        except DataError as error:
            kind = "too_many_tokens" if isinstance(error, TooManyTokens) else "no_prompt"
            detail = str(error).removeprefix(f"{row.where}: ")
            findings.append(Finding(kind, index, row.source, row.id, row.where, detail))
    findings.sort(key=lambda finding: finding.index)
    report = replace(found, findings=tuple(findings))
    return made, settle(_with_unread(report, unread), data)


def _with_unread(report: Report, unread: Sequence[tuple[str, str, DataError]]) -> Report:
    """The report with records that made no row: (source, "file:line", why); they count behind the rows."""
    findings = [
        Finding("unread_row", len(report.seconds) + k, name, "", where, str(error).removeprefix(f"{where}: "))
        for k, (name, where, error) in enumerate(unread)
    ]
    return replace(
        report,
        num_rows=Counter(report.num_rows) + Counter(name for name, _, _ in unread),
        findings=(*findings, *report.findings),
    )


def load_examples(
    sources: Mapping[str, SourceConfig],
    data: DataConfig,
    parse: Callable[[Source, Mapping[str, Any], str], Parsed],
    build: Callable[[Parsed], Example],
) -> tuple[list[Example], Report]:
    """Reads text sources whose rows are more than a prompt: pairs, labelled responses, steps, conversations.

    Args:
        sources, data: as in ``load_rows``.
        parse: (source, record, "file:line") -> what the row holds.
        build: what is trained on; both raise DataError for a row that does not fit.

    Raises:
        DataError: as in ``load_rows``.
    """
    found: list[Example] = []
    findings: list[Finding] = []
    num_rows: Counter[str] = Counter()
    index = 0
    for name, config in sources.items():
        source, first_of_id = Source(name, config), dict[str, str]()
        for number, (where, record) in enumerate(read_texts(source), start=1):
            num_rows[name] += 1
            row_id = str(record.get("id") or "")
            try:
                parsed = _with_id(parse(source, record, where), source, number)
                row_id = parsed.row.id
                first = first_of_id.setdefault(row_id, where)
                if first != where:
                    findings.append(Finding("duplicate_id", index, name, row_id, where, f"first in {first}"))
                else:
                    found.append(build(parsed))
            except DataError as error:
                kind = "too_many_tokens" if isinstance(error, TooManyTokens) else "bad_row"
                findings.append(Finding(kind, index, name, row_id, where, str(error).removeprefix(f"{where}: ")))
            index += 1
        if not num_rows[name]:
            raise DataError(f"{config.path}: holds no rows. Correct {source.setting}.path, or fill the manifest.")
    return found, settle(Report(num_rows, tuple(findings), (0.0,) * index, {}, 0), data)


def _with_id(parsed: Parsed, source: Source, number: int) -> Parsed:
    row = parsed.row
    return parsed if row.id else replace(parsed, row=replace(row, id=made_up_id(source, row, number)))


def settle(report: Report, data: DataConfig) -> Report:
    """What becomes of invalid rows: raises, or returns the report with their number as dropped."""
    invalid, total = report.invalid, sum(report.num_rows.values())
    if invalid and data.on_invalid == "stop":
        raise DataError(
            f"{report.render()}\n\n{_count(len(invalid), 'row')} cannot be used. Correct the data as said above, "
            "or leave such rows out with data.on_invalid: drop."
        )
    if total and len(invalid) == total:
        raise DataError(f"{report.render()}\n\nNo row is left. Correct the data as said above.")
    return replace(report, num_dropped=len(invalid))


def validate(rows: Sequence[Row], *, min_seconds: float, max_seconds: float) -> Report:
    """Checks every row; reads the header of every file once, in threads, and decodes nothing.

    Args:
        rows: as read from manifests.
        min_seconds, max_seconds: bounds of a row's total audio; beyond them it is invalid. Text rows have no bounds.
    """
    headers = _read_headers(rows)
    findings: list[Finding] = []
    seconds: list[float] = []
    first_of_id: dict[tuple[str, str], Row] = {}
    rates: Counter[int] = Counter()
    num_stereo = 0
    for index, row in enumerate(rows):
        found = list(_row_problems(row, first_of_id))
        length = row.seconds
        if row.media:
            row_headers = [headers[_file_key(media)] for media in row.media]
            clips = [_clip(media, header) for media, header in zip(row.media, row_headers, strict=True)]
            lengths = [clip for clip in clips if not isinstance(clip, tuple)]
            found += [clip for clip in clips if isinstance(clip, tuple)]
            if len(lengths) == len(clips):
                length = sum(lengths)
                found += _length_problems(row, length, min_seconds, max_seconds)
            readable = [header for header in row_headers if isinstance(header, AudioHeader)]
            rates.update(header.sample_rate for header in readable)
            num_stereo += sum(header.num_channels > 1 for header in readable)
        seconds.append(length)
        findings += [Finding(kind, index, row.source, row.id, row.where, detail) for kind, detail in found]
    return Report(Counter(row.source for row in rows), tuple(findings), tuple(seconds), dict(rates), num_stereo)


# -------------------------------------------------------------------------------------------------------------- headers
Problem = tuple[str, str]
"""Kind and detail."""


def _file_key(media: Media) -> tuple[str, int]:
    """Segments of one file share it."""
    return media.path, 0 if media.data is None else id(media.data)


def _read_headers(rows: Sequence[Row]) -> dict[tuple[str, int], AudioHeader | Problem]:
    files = {_file_key(media): media for row in rows for media in row.media}
    waiting, headers = iter(files.values()), list[AudioHeader | Problem]()
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        while some := list(islice(waiting, _FILES_AT_ONCE)):
            headers += pool.map(_header, some)
    return dict(zip(files, headers, strict=True))


def _header(media: Media) -> AudioHeader | Problem:
    if media.data is None and not os.path.exists(media.path):
        return "missing_file", media.path
    if (os.path.getsize(media.path) if media.data is None else len(media.data)) == 0:
        return "empty_file", f"{media.path} (0 bytes)"
    try:
        header = read_header(media)
    except DataError as error:
        return "unreadable_file", str(error).removesuffix(f" {UNREADABLE_REMEDY}")
    return header if header.num_frames > 0 else ("empty_file", f"{media.path} (a header and no samples)")


def _clip(media: Media, header: AudioHeader | Problem) -> float | Problem:
    """Seconds of the clip, or what is wrong with it."""
    if not isinstance(header, AudioHeader):
        return header
    try:
        return clip_frames(media, header)[1] / header.sample_rate
    except DataError as error:
        return "bad_segment", str(error).removesuffix(f" {SEGMENT_REMEDY}")


# --------------------------------------------------------------------------------------------------------------- checks
def _row_problems(row: Row, first_of_id: dict[tuple[str, str], Row]) -> Iterator[Problem]:
    """What can be seen without the audio."""
    first = first_of_id.setdefault((row.source, row.id), row)
    if first is not row:
        yield "duplicate_id", f"first in {first.where}"
    if not row.media:
        return
    text = row.text or ""
    if not text and not row.no_speech:
        yield "empty_reference", "the row has no reference" if row.text is None else "the reference is ''"
    elif not row.no_speech and not any(map(str.isalnum, text)) and vanishes(text, row.language):
        yield "empty_reference", f"the reference is {_shown(text)}, of which nothing is counted"
    tag = _TAG.search(text)
    if tag is not None:
        yield "tags_in_reference", f"{tag[0]} in {_shown(text)}"
    foreign = _foreign_script(text, row.language)
    if foreign is not None:
        yield "script", f"{row.language} in {foreign} letters: {_shown(text)}"


def _length_problems(row: Row, seconds: float, min_seconds: float, max_seconds: float) -> Iterator[Problem]:
    """What the length of the clip and the text say together."""
    if seconds < min_seconds:
        yield "too_short", f"{seconds:.3g} s, data.min_seconds is {min_seconds:g}"
    if seconds > max_seconds:
        yield "too_long", f"{seconds:.6g} s, data.max_seconds is {max_seconds:g}"
    needed = sum(1 / _FASTEST.get(script_of(char) or "", _FASTEST_OTHER) for char in row.text or "" if char.isalnum())
    if needed > seconds > 0:
        num_letters = sum(char.isalnum() for char in row.text or "")
        yield "speech_rate", f"{num_letters} letters in {seconds:.3g} s: {_shown(row.text or '')}"
    if row.seconds > 0 and abs(row.seconds - seconds) > max(0.5, 0.05 * seconds):
        yield "duration", f"{seconds:.6g} s by the file's header, {row.seconds:.6g} s by the manifest"


def _foreign_script(text: str, language: str | None) -> str | None:
    """The script that most letters are in, where that is none of the language's."""
    if language is None:
        return None
    counts = count_scripts(text)
    scripts = LANGUAGES[language].scripts
    native = sum(counts[script] for script in scripts)
    foreign = Counter({script: count for script, count in counts.items() if script not in scripts})
    if native > 0 or foreign["Latin"] <= _FEW_LATIN_LETTERS:  # names and code switches are right in any language
        del foreign["Latin"]
    return foreign.most_common(1)[0][0] if sum(foreign.values()) > native else None


# ------------------------------------------------------------------------------------------------------------ rendering
def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"

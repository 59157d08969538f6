"""Whether what workers and clients did can have happened to a storage that keeps its promises.

A worker writes down what it asks of its storage and what it is told, a client what it presents and what it receives.
Times are those of the machine's monotonic clock, which its processes share. What a killed worker was not told any more
may have taken effect, or not; everything else is judged:

| violation      | what happened                                                                                     |
|----------------|---------------------------------------------------------------------------------------------------|
| `claim`        | a generation number was issued twice, or after a higher one                                       |
| `fence`        | an append that began after its generation was superseded, or given up, was acknowledged           |
| `order`        | of two appends to a stream the later has the lower seq, or something follows the answer           |
| `duplicate`    | a seq was given twice, an event was stored twice, or a client received one twice on a connection  |
| `splice`       | a connection carries another stream than the one that was asked for                               |
| `skip`         | a connection carries an event without all that lie between its cursor and it                      |
| `foreign`      | a client received what no worker wrote at that place                                              |
| `lost`         | an acknowledged event of a generation that lived was not received by who received a later one     |
| `wrong_resume` | a cursor was honoured whose generation was superseded, or given up, before it was presented       |
| `wrong_refusal`| a cursor was refused for a reason that did not apply                                              |
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Append",
    "Claim",
    "End",
    "GivenUp",
    "History",
    "Reading",
    "Violation",
    "check",
    "digest_of",
    "read_log",
    "write_log",
]

Stream = tuple[str, str, str]
"""Session, generation and stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A generation was begun; `ended` is None where the worker was not told any more."""

    session: str
    generation: str
    began: float
    ended: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Events were handed to a storage.

    Attributes:
        session: Of the stream.
        generation: The writer's.
        stream: Of the events.
        places: The digest of each; None is a hole.
        is_terminal: The last of them is the answer.
        began: When it was asked for.
        ended: When the worker was told; None where it never was.
        seq: Of the last of them; None where it was not acknowledged.
        is_refused: The storage said that nothing was stored.
    """

    session: str
    generation: str
    stream: str
    places: tuple[str | None, ...]
    is_terminal: bool
    began: float
    ended: float | None
    seq: int | None
    is_refused: bool = False

    @property
    def key(self) -> Stream:
        return (self.session, self.generation, self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A worker was told that a session of another one is given up."""

    session: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What may have ended a session: its worker was killed or stopped, or it was deleted."""

    session: str
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One connection of a client.

    Attributes:
        client: Whose; one client reads a call from its beginning to its end.
        session: The client's.
        cursor: What it presented; None for the connection that made the call.
        began: Before it was asked for.
        ended: After it was over.
        received: Event id and digest of each event that it carried.
        refusal: The reason, where it was refused; by status or in the stream.
    """

    client: str
    session: str
    cursor: str | None
    began: float
    ended: float
    received: tuple[tuple[str, str], ...] = ()
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not happen."""

    kind: str
    detail: str


@dataclass
class History:
    """All that happened, in any order."""

    claims: list[Claim] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    given_up: list[GivenUp] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def __str__(self) -> str:
        """Return one line."""
        unknown = sum(append.seq is None and not append.is_refused for append in self.appends)
        refused = sum(append.is_refused for append in self.appends)
        resumes = [reading for reading in self.readings if reading.cursor is not None]
        refusals = sum(reading.refusal is not None for reading in resumes)
        return (
            f"{len(self.claims)} claims, {len(self.appends)} appends ({refused} refused, {unknown} unknown), "
            f"{len(self.given_up)} times given up, {len(resumes)} resumes ({refusals} refused), "
            f"{sum(len(reading.received) for reading in self.readings)} events received"
        )


def digest_of(event: bytes) -> str:
    """Return what tells events apart."""
    return hashlib.sha256(event).hexdigest()[:16]


def check(history: History) -> list[Violation]:
    """Return every violation."""
    return list(_Checker(history).run())


def write_log(path: Path, entry: Claim | Append | GivenUp) -> None:
    """Add one line to a worker's log; what is written outlives the worker."""
    with path.open("ab", buffering=0) as log:
        log.write(json.dumps({"kind": type(entry).__name__, **asdict(entry)}).encode() + b"\n")


def read_log(path: Path, into: History) -> None:
    """Read a worker's log. An append has two lines, the first from before it was asked for."""
    appends: dict[tuple[str, str, str, float], Append] = {}
    for line in path.read_bytes().splitlines():
        entry: dict[str, Any] = json.loads(line)
        kind = entry.pop("kind")
        if kind == "Append":
            append = Append(**{**entry, "places": tuple(entry["places"])})
            appends[(*append.key, append.began)] = append
        elif kind == "Claim":
            into.claims.append(Claim(**entry))
        else:
            into.given_up.append(GivenUp(**entry))
    into.appends += appends.values()


def _counter(generation: str) -> int:
    return int(generation.partition("-")[0])


def _parse(event_id: str) -> tuple[str, str, int]:
    generation, stream, seq = event_id.split(":")
    return generation, stream, int(seq)


class _Checker:
    def __init__(self, history: History) -> None:
        self._history = history
        self._appends: dict[Stream, list[Append]] = defaultdict(list)
        for append in sorted(history.appends, key=lambda append: append.began):
            self._appends[append.key].append(append)
        # What is at each place for certain, by seq.
        self._places: dict[Stream, dict[int, str | None]] = defaultdict(dict)
        self._claims: dict[str, list[Claim]] = defaultdict(list)
        for claim in history.claims:
            self._claims[claim.session].append(claim)
        self._given_up: dict[str, list[GivenUp]] = defaultdict(list)
        for given_up in history.given_up:
            self._given_up[given_up.session].append(given_up)

    def run(self) -> Iterator[Violation]:
        for claims in self._claims.values():
            yield from self._check_claims(claims)
        for appends in self._appends.values():
            yield from self._check_appends(appends)
        for reading in self._history.readings:
            if reading.refusal is not None:
                yield from self._check_refusal(reading, reading.refusal)
            yield from self._check_reading(reading)
        by_client: dict[str, list[Reading]] = defaultdict(list)
        for reading in self._history.readings:
            by_client[reading.client].append(reading)
        for client, readings in by_client.items():
            yield from self._check_client(client, readings)

    def _check_claims(self, claims: list[Claim]) -> Iterator[Violation]:
        told = [claim for claim in claims if claim.ended is not None]
        counters = [_counter(claim.generation) for claim in told]
        if len(set(counters)) != len(counters):
            yield Violation("claim", f"session {claims[0].session}: a number twice in {sorted(counters)}")
        for earlier in told:
            for later in told:
                is_before = earlier.ended is not None and earlier.ended < later.began
                if is_before and _counter(earlier.generation) >= _counter(later.generation):
                    yield Violation("claim", f"{later} after {earlier}")

    def _check_appends(self, appends: list[Append]) -> Iterator[Violation]:
        key = appends[0].key
        places = self._places[key]
        stored: set[str] = set()
        newest: Append | None = None
        for append in appends:
            if append.seq is None:
                continue
            if self._is_over(append.session, append.generation, append.began):
                yield Violation("fence", f"{append}")
            first = append.seq - len(append.places) + 1
            if newest is not None and newest.seq is not None and newest.ended is not None:
                if newest.ended < append.began and first <= newest.seq:
                    yield Violation("order", f"{append} after {newest}")
                if newest.is_terminal:
                    yield Violation("order", f"{append} after the answer")
            for seq, place in enumerate(append.places, first):
                if seq in places:
                    yield Violation("duplicate", f"seq {seq} of {key} twice")
                if place is not None and place in stored:
                    yield Violation("duplicate", f"event {place} of {key} twice, again at {seq}")
                places[seq] = place
                stored |= {place} if place is not None else set()
            newest = append

    def _is_over(self, session: str, generation: str, at: float) -> bool:
        """Tell whether a generation was superseded or given up, for all to know, before a time."""
        own = [claim for claim in self._claims[session] if claim.generation == generation]
        return any(
            claim.ended is not None and claim.ended < at and _counter(claim.generation) > _counter(generation)
            for claim in self._claims[session]
        ) or any(
            given_up.ended < at and all((claim.ended or claim.began) < given_up.began for claim in own)
            for given_up in self._given_up[session]
        )

    def _answered(self, key: Stream) -> Append | None:
        """Return the append of a stream's answer, if it may have been stored."""
        answers = [append for append in self._appends[key] if append.is_terminal and not append.is_refused]
        return answers[-1] if answers else None

    def _check_reading(self, reading: Reading) -> Iterator[Violation]:
        if reading.cursor is not None:
            generation, stream, seq = _parse(reading.cursor)
        elif reading.received:
            generation, stream, seq = *_parse(reading.received[0][0])[:2], 0
        else:
            return
        key = (reading.session, generation, stream)
        if reading.cursor is not None and reading.refusal is None:
            answer = self._answered(key)
            is_readable = answer is not None and answer.began < reading.ended
            is_superseded = any(
                claim.ended is not None and claim.ended < reading.began for claim in self._later_claims(key)
            )
            if is_superseded or (not is_readable and self._is_over(reading.session, generation, reading.began)):
                yield Violation("wrong_resume", f"{reading}")
        maybe = {
            place
            for append in self._appends[key]
            if append.seq is None and not append.is_refused
            for place in append.places
        }
        for event_id, digest in reading.received:
            if _parse(event_id)[:2] != (generation, stream):
                yield Violation("splice", f"{event_id} on a connection of {key}: {reading}")
                return
            at = _parse(event_id)[2]
            if at <= seq:
                yield Violation("duplicate", f"{event_id} after seq {seq}: {reading}")
            elif at != seq + 1:
                yield Violation("skip", f"{event_id} after seq {seq}: {reading}")
            if at in self._places[key]:
                if self._places[key][at] != digest:
                    yield Violation("foreign", f"{event_id} is {self._places[key][at]}, received {digest}")
            elif digest not in maybe:
                yield Violation("foreign", f"{event_id} was never written: {reading}")
            seq = at

    def _later_claims(self, key: Stream) -> list[Claim]:
        session, generation, _ = key
        return [claim for claim in self._claims[session] if _counter(claim.generation) > _counter(generation)]

    def _check_client(self, client: str, readings: Iterable[Reading]) -> Iterator[Violation]:
        received: dict[Stream, set[int]] = defaultdict(set)
        for reading in readings:
            for event_id, _ in reading.received:
                generation, stream, seq = _parse(event_id)
                received[reading.session, generation, stream].add(seq)
        for key, seqs in received.items():
            missing = [seq for seq, place in self._places[key].items() if place is not None and seq not in seqs]
            lost = [seq for seq in missing if seq < max(seqs)]
            if lost:
                yield Violation("lost", f"{client} has {max(seqs)} of {key}, and never received {lost}")

    def _check_refusal(self, reading: Reading, refusal: str) -> Iterator[Violation]:
        assert reading.cursor is not None, "only a cursor is refused"
        if refusal == "storage_unavailable":
            return  # No verdict: ask again.
        generation, stream, seq = _parse(reading.cursor)
        key = (reading.session, generation, stream)
        answer = self._answered(key)
        holes = [
            at
            for append in self._appends[key]
            for at, place in enumerate(append.places, 1 + (append.seq or 0) - len(append.places))
            if place is None and append.seq is not None
        ]
        applies = {
            "session_not_found": any(
                end.session == reading.session and end.began < reading.ended for end in self._history.ends
            ),
            "generation_mismatch": any(claim.began < reading.ended for claim in self._later_claims(key)),
            "stream_completed": answer is not None and (answer.seq is None or seq >= answer.seq),
            "replay_gap": any(at > seq for at in holes),
        }
        if not applies.get(refusal, False):
            yield Violation("wrong_refusal", f"{refusal}: {reading}")

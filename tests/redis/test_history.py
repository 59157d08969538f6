"""The history checker finds what it is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.redis.history import Append, Claim, End, GivenUp, History, Reading, check, read_log, write_log

G1, G2 = "1-aaaaaaaaaaaa", "2-bbbbbbbbbbbb"


def claim(generation: str = G1, began: float = 0, ended: float | None = 1) -> Claim:
    return Claim(session="s", generation=generation, began=began, ended=ended)


def append(
    seq: int | None, event: str | None, began: float, generation: str = G1, *, is_terminal: bool = False
) -> Append:
    return Append(
        session="s",
        generation=generation,
        stream="1.Nw",
        places=(event,),
        is_terminal=is_terminal,
        began=began,
        ended=began + 1 if seq is not None else None,
        seq=seq,
    )


def reading(cursor: int | None, *events: tuple[int, str], began: float = 5, generation: str = G1) -> Reading:
    return Reading(
        client="c",
        session="s",
        cursor=None if cursor is None else f"{generation}:1.Nw:{cursor}",
        began=began,
        ended=began + 20,
        received=tuple((f"{generation}:1.Nw:{seq}", event) for seq, event in events),
    )


def refused(cursor: int, reason: str) -> Reading:
    return replace(reading(cursor), refusal=reason)


def right() -> History:
    """Three events and an answer; the call's connection is cut after two, and one resume gets the rest."""
    return History(
        claims=[claim()],
        appends=[
            append(1, "a", 10),
            append(2, "b", 12),
            append(3, "c", 14),
            append(4, "answer", 16, is_terminal=True),
        ],
        readings=[reading(None, (1, "a"), (2, "b")), reading(2, (3, "c"), (4, "answer"))],
    )


def kinds(history: History) -> set[str]:
    return {violation.kind for violation in check(history)}


def test_a_right_history_has_no_violation() -> None:
    assert check(right()) == []
    assert check(History()) == []


def test_a_number_issued_twice_is_found() -> None:
    history = right()
    history.claims.append(claim("1-cccccccccccc", 2, 3))
    assert kinds(history) == {"claim"}


def test_a_lower_number_after_a_higher_one_is_found() -> None:
    assert kinds(History(claims=[claim(G2), claim(G1, 2, 3)])) == {"claim"}
    # At the same time is another matter.
    assert check(History(claims=[claim(G2, 0, 3), claim(G1, 0, 3)])) == []


def test_an_append_to_a_superseded_generation_is_found() -> None:
    history = right()
    history.claims.append(claim(G2, 12, 13))
    assert kinds(history) == {"fence"}
    # While the claim is under way it may still come first.
    history.claims[1] = claim(G2, 12, 17)
    assert check(history) == []
    history.claims[1] = claim(G2, 12, None)
    assert check(history) == []


def test_an_append_after_the_session_was_given_up_is_found() -> None:
    history = right()
    history.given_up.append(GivenUp(session="s", began=12, ended=13))
    assert kinds(history) == {"fence"}
    # What was refused was not stored, and what began anew is not given up.
    history = History(claims=[claim()], given_up=[GivenUp(session="s", began=12, ended=13)])
    history.appends.append(replace(append(None, "a", 20), is_refused=True))
    history.claims.append(claim(G2, 14, 15))
    history.appends.append(append(1, "a", 22, G2))
    assert check(history) == []


def test_seqs_out_of_order_are_found() -> None:
    history = right()
    history.appends[1:3] = [append(3, "c", 12), append(2, "b", 14)]
    assert kinds(history) == {"order"}


def test_an_event_after_the_answer_is_found() -> None:
    history = right()
    history.appends.append(append(5, "d", 18))
    assert kinds(history) == {"order"}


def test_a_seq_given_twice_is_found() -> None:
    history = right()
    history.appends.append(append(2, "x", 12.5))
    assert "duplicate" in kinds(history)


def test_an_event_stored_twice_is_found() -> None:
    history = right()
    history.appends[2] = append(3, "b", 14)
    history.readings.pop()
    assert kinds(history) == {"duplicate"}


def test_an_event_received_twice_on_a_connection_is_found() -> None:
    history = right()
    history.readings[1] = reading(2, (3, "c"), (3, "c"), (4, "answer"))
    assert kinds(history) == {"duplicate"}
    history.readings[1] = reading(2, (2, "b"), (3, "c"), (4, "answer"))
    assert kinds(history) == {"duplicate"}


def test_a_skipped_event_is_found_on_the_connection_and_at_the_client() -> None:
    history = right()
    history.readings[1] = reading(2, (4, "answer"))
    assert kinds(history) == {"skip", "lost"}


def test_an_event_lost_between_two_connections_is_found() -> None:
    history = right()
    history.readings[1] = reading(3, (4, "answer"))
    assert kinds(history) == {"lost"}


def test_an_event_of_unknown_outcome_may_be_missing_and_may_be_received() -> None:
    history = right()
    history.appends[3] = append(None, "answer", 16, is_terminal=True)
    assert check(history) == []
    history.readings[1] = reading(2, (3, "c"))
    assert check(history) == []


def test_another_streams_event_is_found() -> None:
    history = right()
    history.readings[1] = replace(history.readings[1], received=((f"{G2}:1.Nw:3", "c"),))
    assert kinds(history) == {"splice"}
    history.readings[1] = replace(history.readings[1], received=((f"{G1}:2.Nw:3", "c"),))
    assert kinds(history) == {"splice"}


def test_an_event_that_nobody_wrote_is_found() -> None:
    history = right()
    history.readings[1] = reading(2, (3, "x"), (4, "answer"))
    assert kinds(history) == {"foreign"}
    history.readings[1] = reading(2, (3, "c"), (4, "answer"), (5, "x"))
    assert kinds(history) == {"foreign"}


def test_what_a_refused_append_holds_must_not_be_received() -> None:
    history = right()
    history.appends[3] = replace(append(None, "answer", 16, is_terminal=True), is_refused=True)
    assert kinds(history) == {"foreign"}


def test_a_hole_that_is_passed_is_found() -> None:
    history = right()
    history.appends[2] = append(3, None, 14)
    history.readings[1] = reading(2, (4, "answer"))
    assert kinds(history) == {"skip"}


def test_a_resume_of_a_superseded_generation_is_found() -> None:
    history = right()
    history.claims.append(claim(G2, 30, 31))
    history.readings.append(reading(2, began=32))
    assert kinds(history) == {"wrong_resume"}
    history.readings[-1] = reading(2, began=30)
    assert check(history) == []


def test_a_resume_of_what_was_given_up_is_found_unless_it_is_complete() -> None:
    history = right()
    history.given_up.append(GivenUp(session="s", began=30, ended=31))
    history.readings.append(reading(2, (3, "c"), (4, "answer"), began=32))
    assert check(history) == []
    history.appends.pop()
    history.readings[1:] = [reading(2, (3, "c"), began=32)]
    assert kinds(history) == {"wrong_resume"}


def test_a_refusal_that_does_not_apply_is_found() -> None:
    for reason in ("session_not_found", "generation_mismatch", "stream_completed", "replay_gap", "future_event_id"):
        history = right()
        history.readings.append(refused(2, reason))
        assert kinds(history) == {"wrong_refusal"}


def test_a_refusal_that_applies_is_none() -> None:
    history = right()
    history.claims.append(claim(G2, 17.5, 18))
    history.ends.append(End(session="s", began=17))
    history.appends[2] = append(3, None, 14)
    history.readings = [
        refused(2, "replay_gap"),
        refused(4, "stream_completed"),
        refused(1, "generation_mismatch"),
        refused(1, "session_not_found"),
        refused(1, "storage_unavailable"),
    ]
    assert check(history) == []


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    asked = append(None, "a", 10)
    told = replace(asked, seq=1, ended=11)
    killed = append(None, "b", 12)
    given_up = GivenUp(session="t", began=1, ended=2)
    for entry in (claim(), asked, told, killed, given_up):
        write_log(path, entry)
    history = History()
    read_log(path, history)
    assert history == History(claims=[claim()], appends=[told, killed], given_up=[given_up])

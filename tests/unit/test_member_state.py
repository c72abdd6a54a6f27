"""A member's side of the protocol, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.errors import CoordinatorError, GroupFailed, JoinRefused, MasterLost, ProtocolError, Superseded
from coordinator.errors import Evicted as EvictedError
from coordinator.member_state import MAX_FAULT_CHARS, MemberState
from coordinator.messages import Accepted, Beat, Evicted, Failed, Go, Reconfigure, Release


def make_state(*, is_formed: bool = False) -> MemberState:
    state = MemberState(silence_s=2.0, redial_s=5.0)
    state.accepted(100.0)
    if is_formed:
        begin(state, 1)
    return state


def begin(state: MemberState, epoch: int) -> None:
    state.take(reconfigure(epoch))
    state.offer(0)
    state.ready(b"")
    state.take(Go(epoch=epoch, blobs=(b"", b"")))


def reconfigure(epoch: int) -> Reconfigure:
    return Reconfigure(epoch=epoch, members=(0, 1), evicted=(), kinds=(), reason="", detect_ms=0, agree_ms=0)


def release(step: int, epoch: int = 1, commands: tuple[str, ...] = ()) -> Release:
    return Release(epoch=epoch, step=step, decode_tokens=(1, 1), prefill_tokens=(0, 0), commands=commands)


def arrive(state: MemberState) -> None:
    state.arrive(decode_tokens=1, prefill_tokens=0)


def test_releases_are_taken_in_order_each_after_an_arrival() -> None:
    state = make_state(is_formed=True)
    arrive(state)
    assert state.next_release() is None
    state.take(release(0))
    state.take(release(1))
    assert state.next_release() == release(0)
    with pytest.raises(AssertionError, match="arrive first"):
        state.next_release()
    arrive(state)
    assert state.next_release() == release(1)
    assert state.step == 2


def test_dones_are_in_order_and_each_step_once() -> None:
    state = make_state(is_formed=True)
    with pytest.raises(AssertionError):
        state.done(0)
    for step in range(2):
        arrive(state)
        state.take(release(step))
        state.next_release()
    assert (state.done(0).step, state.done(1).step) == (0, 1)
    with pytest.raises(AssertionError):
        state.done(1)


def test_a_command_is_wanted_until_a_release_that_was_taken_carries_it() -> None:
    state = make_state(is_formed=True)
    assert state.want("drain") is None
    assert state.arrive(decode_tokens=0, prefill_tokens=0).wants == ("drain",)
    wanted = state.want("sleep")
    assert wanted is not None and wanted.wants == ("drain", "sleep")
    state.take(release(0, commands=("drain",)))
    state.take(reconfigure(2))  # the release was not taken
    state.offer(1)
    state.ready(b"")
    assert state.arrive(decode_tokens=0, prefill_tokens=0).wants == ("drain", "sleep")
    state.take(release(0, epoch=2, commands=("drain", "sleep")))
    state.next_release()
    assert state.arrive(decode_tokens=0, prefill_tokens=0).wants == ()


def test_a_newer_epoch_ends_every_wait_and_is_entered_only_by_being_ready_for_it() -> None:
    state = make_state(is_formed=True)
    arrive(state)
    state.take(release(0))
    state.take(reconfigure(2))
    with pytest.raises(Superseded, match="epoch 2 follows epoch 1"):
        state.next_release()
    assert state.arrive(decode_tokens=1, prefill_tokens=0).epoch == 1
    assert state.fault(0, "cut off").epoch == state.beat(()).epoch == 1
    assert state.offer(1) == reconfigure(2)
    ready = state.ready(b"blob")
    assert (ready.epoch, ready.blob, state.epoch, state.step) == (2, b"blob", 2, 0)
    arrive(state)
    assert state.next_release() is None, "the release of the epoch before is void"


def test_the_newest_of_several_epochs_counts() -> None:
    state = make_state(is_formed=True)
    for epoch in (3, 2, 3):
        state.take(reconfigure(epoch))
    assert state.is_superseded
    assert state.offer(1) == reconfigure(3)
    assert not state.is_superseded and state.offer(3) is None
    state.take(reconfigure(4))
    assert state.is_superseded
    with pytest.raises(Superseded):
        state.ready(b"")
    assert state.epoch == 1
    assert state.offer(1) == reconfigure(4)
    assert state.ready(b"").epoch == 4


def test_an_epoch_whose_evictions_do_not_go_on_from_those_it_was_told_of_is_not_followed() -> None:
    state = make_state(is_formed=True)
    state.take(replace(reconfigure(2), evicted=((3,), (2, 4))))
    state.take(replace(reconfigure(3), evicted=((3,), (2, 4), (5,))))
    assert state.told_epoch == 3
    state.take(replace(reconfigure(4), evicted=((3,), (2,))))
    assert state.told_epoch == 3
    with pytest.raises(GroupFailed, match="the membership store has lost what was committed: epoch 4"):
        state.check()


def test_frames_of_other_epochs_are_ignored() -> None:
    state = make_state(is_formed=True)
    state.take(reconfigure(3))
    state.take(Go(epoch=1, blobs=()))
    state.take(release(0, epoch=1))
    state.offer(1)
    state.ready(b"")
    for epoch in (1, 2, 4):
        state.take(Go(epoch=epoch, blobs=()))
        state.take(release(0, epoch=epoch))
    assert state.go is None
    state.take(Go(epoch=3, blobs=(b"x",)))
    arrive(state)
    assert state.go == Go(epoch=3, blobs=(b"x",)) and state.next_release() is None


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Evicted(epoch=2, reason="it was silent"), EvictedError("it was silent")),
        (Failed(epoch=1, step=0, reason="nobody is left"), GroupFailed("nobody is left")),
    ],
)
def test_the_end_is_final(message: Evicted | Failed, error: CoordinatorError) -> None:
    state = make_state(is_formed=True)
    arrive(state)
    state.take(message)
    state.take(reconfigure(5))
    state.end(MasterLost("later"))
    for wait in (state.next_release, state.check, lambda: state.ready(b"")):
        with pytest.raises(type(error), match=str(error)):
            wait()
    assert not state.is_looking


def test_what_no_master_says_breaks_the_protocol() -> None:
    state = make_state()
    state.take(Beat(epoch=0, step=0, collectives=()))
    with pytest.raises(ProtocolError, match="Accepted is not for a member that was accepted"):
        state.take(Accepted(proof=b""))


def test_a_faults_words_are_bounded() -> None:
    assert len(make_state(is_formed=True).fault(0, "x" * 10_000).what) == MAX_FAULT_CHARS


# The master's loss


def test_without_a_master_no_step_is_taken() -> None:
    state = make_state(is_formed=True)
    arrive(state)
    state.take(release(0))
    state.lose_master("it closed", 101.0)
    assert state.is_looking and state.next_release() is None
    state.accepted(102.0)
    assert state.next_release() is None and not state.is_looking
    state.take(reconfigure(4))
    with pytest.raises(Superseded):
        state.next_release()


def test_a_silent_master_is_lost() -> None:
    state = make_state(is_formed=True)
    for tick in range(8):
        state.tick(100.25 + 0.25 * tick)
    assert state.is_connected
    state.heard(102.0)
    for tick in range(8):
        state.tick(102.25 + 0.25 * tick)
    assert state.is_connected
    state.tick(104.25)
    assert not state.is_connected and state.is_looking


def test_a_master_is_looked_for_no_longer_than_the_limit() -> None:
    state = make_state(is_formed=True)
    state.lose_master("it closed", 100.0)
    for tick in range(20):
        state.tick(100.25 + 0.25 * tick)
    assert state.is_looking
    state.tick(105.25)
    with pytest.raises(MasterLost, match="it closed, and no master was found within 5 s"):
        state.check()


def test_time_in_which_this_member_did_not_run_counts_against_no_master() -> None:
    state = make_state(is_formed=True)
    state.tick(100.25)
    state.tick(3700.0)
    assert state.is_connected
    state.tick(3700.25)
    state.lose_master("it closed", 3700.25)
    state.tick(8000.0)
    assert state.is_looking


def test_a_member_that_was_told_of_no_epoch_does_not_look_for_another_master() -> None:
    state = make_state()
    state.lose_master("it closed", 100.0)
    with pytest.raises(MasterLost, match="it closed"):
        state.check()


@pytest.mark.parametrize(("is_formed", "error"), [(True, EvictedError), (False, JoinRefused)])
def test_who_is_refused_was_evicted_if_it_was_a_member(is_formed: bool, error: type[Exception]) -> None:
    state = make_state(is_formed=is_formed)
    state.refused("dp_rank 1 was evicted")
    with pytest.raises(error, match="dp_rank 1 was evicted"):
        state.check()

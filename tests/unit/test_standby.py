"""When a standby may take the mastership: its judgement, look by look."""

from __future__ import annotations

from coordinator.member import MAX_SILENCE_S
from coordinator.standby import POLL_S, Claim, LeaseWatch, Probe
from coordinator.store import LEASE_S, Record, View

ADDRESS = "10.0.0.1:29500"


class Standby:
    """Looks every POLL_S, by hand."""

    def __init__(self) -> None:
        self.watch = LeaseWatch()
        self.now_s = 100.0

    def looks(
        self,
        *,
        for_s: float = 0.0,
        token: int = 3,
        epoch: int = 7,
        committed_epoch: int | None = None,
        leased: bool = True,
        over: bool = False,
        probe: Probe = Probe.SILENT,
        told_epoch: int = 7,
    ) -> Claim | None:
        """Looks at the same view for a while, at least once; what it concludes at the last look."""
        committed = epoch if committed_epoch is None else committed_epoch
        view = View(
            token=token,
            epoch=epoch,
            record=Record(epoch=committed, members=(0, 1), evicted=(), config_hash="c"),
            address=ADDRESS,
            is_leased=leased,
            is_over=over,
        )
        end_s = self.now_s + for_s
        while True:
            self.now_s += POLL_S
            self.watch.saw(view, probe, told_epoch, self.now_s)
            if self.now_s >= end_s:
                return self.watch.claim(self.now_s)


def settled() -> Standby:
    """One that has watched a living master for long."""
    standby = Standby()
    assert standby.looks(for_s=3 * LEASE_S, probe=Probe.GREETED) is None
    return standby


def test_a_lease_that_ran_out_while_nobody_answered_may_be_taken_at_once() -> None:
    standby = settled()
    assert standby.looks(for_s=LEASE_S) is None
    claim = standby.looks(leased=False)
    assert claim is not None and claim.replaces is None
    assert claim.why == f"the master at {ADDRESS} neither renews its lease nor answers"


def test_nothing_is_taken_from_a_silent_master_whose_lease_stands() -> None:
    assert settled().looks(for_s=10 * LEASE_S) is None


def test_nothing_is_taken_from_a_master_that_serves_its_clock_but_cannot_renew() -> None:
    assert settled().looks(for_s=10 * LEASE_S, leased=False, probe=Probe.GREETED) is None


def test_a_master_that_served_without_a_lease_and_falls_silent_is_replaced_when_its_members_miss_it_too() -> None:
    standby = settled()
    standby.looks(for_s=2 * LEASE_S, leased=False, probe=Probe.GREETED)
    assert standby.looks(for_s=MAX_SILENCE_S - POLL_S, leased=False) is None
    assert standby.looks(leased=False) is not None


def test_an_address_that_refuses_twice_proves_that_the_master_is_dead() -> None:
    standby = settled()
    assert standby.looks(probe=Probe.REFUSED) is None, "a new master takes the lease first, and listens a moment later"
    claim = standby.looks(probe=Probe.REFUSED)
    assert claim == Claim(replaces=3, why=f"nobody listens at {ADDRESS}")


def test_refusals_of_two_masters_prove_nothing_of_either() -> None:
    standby = settled()
    standby.looks(probe=Probe.REFUSED)
    assert standby.looks(probe=Probe.REFUSED, token=4) is None
    standby.looks(probe=Probe.SILENT, token=4)
    assert standby.looks(probe=Probe.REFUSED, token=4) is None


def test_a_store_that_was_away_gives_the_master_one_lease_s_time_to_renew() -> None:
    standby = settled()
    standby.watch.missed()
    assert standby.watch.claim(standby.now_s) is None
    assert standby.looks(for_s=LEASE_S - POLL_S, leased=False) is None
    assert standby.looks(for_s=2 * POLL_S, leased=False) is not None


def test_a_standby_that_was_paused_itself_gives_the_master_one_lease_s_time() -> None:
    standby = settled()
    standby.now_s += 10.0
    assert standby.looks(leased=False) is None
    assert standby.looks(for_s=LEASE_S, leased=False) is not None


def test_a_new_standby_watches_for_one_lease_s_time_before_it_takes_anything() -> None:
    standby = Standby()
    assert standby.looks(for_s=LEASE_S - POLL_S, leased=False) is None
    assert standby.looks(for_s=2 * POLL_S, leased=False) is not None


def test_nothing_is_taken_over_from_a_store_that_has_lost_its_data_until_the_master_has_restored_it() -> None:
    for token, epoch in ((0, 0), (2, 7), (3, 6)):
        standby = settled()
        assert standby.looks(for_s=10 * LEASE_S, token=token, epoch=epoch, leased=False) is None
        assert standby.looks(probe=Probe.REFUSED, token=token, epoch=epoch) is None
        assert (standby.watch.seen_token, standby.watch.seen_epoch) == (3, 7)
        assert standby.looks(for_s=LEASE_S, leased=False) is None, "it is trusted again from its return on"
        assert standby.looks(leased=False) is not None


def test_a_store_that_knows_less_than_this_node_s_members_has_lost_its_data() -> None:
    assert settled().looks(for_s=10 * LEASE_S, leased=False, told_epoch=8) is None


def test_a_store_that_has_handed_an_epoch_out_but_lost_its_membership_is_not_believed() -> None:
    standby = settled()
    assert standby.looks(for_s=10 * LEASE_S, leased=False, committed_epoch=6) is None
    assert standby.looks(for_s=LEASE_S + POLL_S, leased=False) is not None


def test_a_group_that_has_ended_or_has_not_begun_is_nobody_s_to_take_over() -> None:
    assert settled().looks(for_s=10 * LEASE_S, leased=False, over=True, probe=Probe.REFUSED) is None
    assert settled().looks(for_s=10 * LEASE_S, leased=False, told_epoch=0, probe=Probe.REFUSED) is None

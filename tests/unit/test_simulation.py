"""The whole protocol under simulated time, network and faults: invariants hold, and without a rule one breaks."""

from __future__ import annotations

import json
from typing import Final

import pytest

import coordinator.simulation.__main__ as command
from coordinator.simulation import KINDS, simulate
from coordinator.simulation.group import Group
from coordinator.simulation.world import World
from tests.mutants import take_out

NUM_SEEDS: Final = 300
BATCH: Final = 50
NUM_MUTANT_SEEDS: Final = 1000

CLOCK: Final = "coordinator.clock"
EPOCHS: Final = "coordinator.epochs"
STEPS: Final = "coordinator.steps"
VERDICTS: Final = "coordinator.verdicts"
MEMBER: Final = "coordinator.member_state"
STANDBY: Final = "coordinator.standby"
STORE: Final = "coordinator.simulation.stores"  # stands for scripts/*.lua; a protocol test compares the two
ANY: Final = tuple(KINDS)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_every_invariant_holds_after_every_event(first: int) -> None:
    results = [simulate(seed) for seed in range(first, first + BATCH)]
    for result in results:
        assert not result.violation, "\n".join([*result.trace, f"seed {result.seed}: {result.violation}"])
    # And the seeds try something: groups of many sizes that step, lose members and move their master.
    assert {result.size for result in results} >= {1, 2, 3, 4, 8}
    assert sum(result.num_batches for result in results) > 100 * BATCH
    assert sum(result.num_epochs for result in results) > 1.2 * BATCH
    assert sum(result.num_masters for result in results) > 1.1 * BATCH


def test_a_group_of_64_loses_members_and_goes_on() -> None:
    sizes = ((seed, Group(World(seed)).settings.size) for seed in range(10_000))
    largest = (seed for seed, size in sizes if size == 64)
    result = next(result for seed in largest if (result := simulate(seed, ("crash",))).num_epochs > 1)
    assert not result.violation, "\n".join([*result.trace, result.violation])


def test_a_seed_gives_the_same_again() -> None:
    for seed in range(5):
        assert simulate(seed) == simulate(seed)


def test_the_command_sums_up_and_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "3", "--first", "7"]) == 0
    *_, text, last = capsys.readouterr().out.splitlines()
    assert text.startswith("3 seeds, ") and "0 failed" in text
    assert json.loads(last)["seeds"] == 3


def test_a_seed_that_fails_shows_its_trace_and_how_to_run_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_out(monkeypatch, CLOCK, *MUTANTS["not all need to be ready"][1:3])
    assert command.main(["--seeds", "1", "--first", "0"]) == 1
    shown = capsys.readouterr().out
    assert "is master with token 1" in shown
    assert "builds its groups from" in shown
    assert "again: python -m coordinator.simulation --seeds 1 --first 0\n" in shown
    assert json.loads(shown.splitlines()[-1])["failed"] == [0]


# Each mutant is a module with one rule taken out, and the faults among which it is looked for.
MUTANTS: Final[dict[str, tuple[str, str, str, tuple[str, ...]]]] = {
    "frames of other epochs count": (CLOCK, "if message.epoch != epoch or self.phase", "if self.phase", ANY),
    "a loss is not noticed": (
        CLOCK,
        "        if self.phase is not Phase.GATHERING and not has_left:\n",
        "        if False:\n",
        ("crash",),
    ),
    "who was evicted may come again": (
        CLOCK,
        "if reason := self._epochs.departed.get(hello.dp_rank):",
        "if reason := '':",
        ("bring_back",),
    ),
    "silence is not noticed": (
        CLOCK,
        "if mute := verdicts.silent(members, max(settings.progress_deadline_s, verdicts.SILENT_S), now_s):",
        "if mute := None:",
        ("freeze",),
    ),
    "a commit may take for ever": (
        CLOCK,
        "case Phase.COMMITTING if now_s - self._epochs.proposed_s > settings.progress_deadline_s:",
        "case Phase.COMMITTING if False:",
        ("crash", "stop_store"),
    ),
    "a stall is not noticed": (
        CLOCK,
        "            if now_s - steps.progress_s > limit_s:\n                verdict",
        "            if False:\n                verdict",
        ("wedge",),
    ),
    "a fault is not followed up": (CLOCK, "if now_s - self._fault_s > FAULT_WAIT_S:", "if False:", ("flap",)),
    "who reports a fault is to blame": (
        CLOCK,
        "                if not self._fault:\n",
        "                return self._blame(member, message.what, now_s)\n                if not self._fault:\n",
        ("flap",),
    ),
    "not all need to be ready": (CLOCK, "if len(blobs) < len(self.members):", "if False:", ANY),
    "a first step has no more time": (
        CLOCK,
        "(1 if self.committed_step >= 0 else FIRST_STEP_DEADLINES)",
        "0.01",
        ANY,
    ),
    "a new master waits for nobody": (
        CLOCK,
        "return self._end_gathering(now_s) if now_s - self._began_s > REJOIN_S else ()",
        "return self._end_gathering(now_s)",
        ("kill_master",),
    ),
    "a new master waits for all": (
        CLOCK,
        "return self._end_gathering(now_s) if now_s - self._began_s > REJOIN_S else ()",
        "return ()",
        ("kill_master",),
    ),
    "a deposed master speaks on": (
        CLOCK,
        "            self._enter(Phase.DEPOSED)\n",
        "            return ()\n",
        ("freeze_master",),
    ),
    "the master's own pause counts": (
        CLOCK,
        "        if pause_s <= MAX_TICK_S - BEAT_INTERVAL_S:\n",
        "        if True:\n",
        ("freeze_master",),
    ),
    "nobody may come back after a pause": (
        CLOCK,
        "return is_under_way and now_s - self._paused_s < REJOIN_S",
        "return False",
        ("freeze_master",),
    ),
    "the unfit go on": (CLOCK, "if why := self.settings.why_not(members):", "if why := '':", ("crash",)),
    "nobody to blame fails the group": (
        CLOCK,
        "            if self._num_reforms == MAX_REFORMS:",
        "            if True:",
        ("flap",),
    ),
    "told before it is committed": (
        CLOCK,
        "        return (commit,) if commit else ()",
        "        return (commit, *self.committed(commit.epoch, now_s)) if commit else ()",
        ANY,
    ),
    "epochs do not grow": (EPOCHS, "epoch=self.epoch + 1, members", "epoch=self.epoch, members", ANY),
    "two proposals are under way at once": (
        EPOCHS,
        "        if self._proposal is not None:\n            return None\n",
        "        if self._proposal is not None:\n            self._undone += self._untold\n",
        ("crash",),
    ),
    "who is evicted meanwhile stays": (
        EPOCHS,
        "        if self._undone:\n            following",
        "        if False:\n            following",
        ("crash",),
    ),
    "earlier evictions are forgotten": (
        EPOCHS,
        "evicted=self.evicted + event, reason",
        "evicted=event, reason",
        ("crash",),
    ),
    "not all need to arrive": (
        STEPS,
        "if not self._is_open or self._num_arrived < len(self._members):",
        "if not self._is_open:",
        ANY,
    ),
    "arrivals are not used up": (STEPS, "            member.arrival = None\n", "", ANY),
    "late arrivals count": (STEPS, "        if arrive.step < self.step:\n            return ()\n", "", ANY),
    "idle groups step": (
        STEPS,
        " or not self.has_work:\n            return ()",
        ":\n            return ()",
        ANY,
    ),
    "no lead bounds the clock": (STEPS, "self.step - 1 - self.committed >= MAX_LEAD or not", "not", ANY),
    "one Done commits": (STEPS, "if self._num_done[done.step] < len(self._members):", "if False:", ANY),
    "a commit releases nothing": (
        STEPS,
        "            self._carried.popleft()\n        return self._release(now_s)",
        "            self._carried.popleft()\n        return ()",
        ANY,
    ),
    "an epoch goes on with the steps of the last": (
        STEPS,
        "        self.step, self.committed = 0, -1\n        self._num_arrived",
        "        self._num_arrived",
        ("crash",),
    ),
    "arrivals of the last epoch are counted": (
        STEPS,
        "        self._num_arrived = 0\n        self._num_done.clear()",
        "        self._num_done.clear()",
        ("crash",),
    ),
    "commands of a broken epoch are lost": (
        STEPS,
        "[*(name for _, names in self._carried for name in names), *self._commands]",
        "self._commands",
        ("crash",),
    ),
    "collectives are not compared": (
        VERDICTS,
        "behind = [member for member in members if entered[member.dp_rank] == fewest]",
        "behind = list(members)",
        ("slow_down",),
    ),
    "counts are compared while they move": (
        VERDICTS,
        "    if is_moving and now_s - since_s <= 2 * limit_s:\n        return None\n    if is_moving:\n",
        "    if False:\n",
        ("slow_down",),
    ),
    "where nobody is behind, all are to blame": (
        VERDICTS,
        "return Verdict(reason=reason, evidence_s=since_s)\n    behind",
        "return Verdict(blamed=_ranks(late), reason=reason, evidence_s=since_s)\n    behind",
        ("wedge",),
    ),
    "a silent master is waited for": (
        MEMBER,
        "if self.is_connected and silent_s > self._silence_s:",
        "if False:",
        ("freeze_master",),
    ),
    "a master is looked for for ever": (
        MEMBER,
        "elif self.is_looking and now_s - self._lost_s > self._redial_s:",
        "elif False:",
        ("cut",),
    ),
    "an epoch is not begun afresh": (MEMBER, "            self.step, self._done = 0, -1\n", "", ("crash",)),
    "a master that serves is replaced": (
        STANDBY,
        " and now_s - self._greeted_s >= MAX_SILENCE_S:",
        ":",
        ("cut_store",),
    ),
    "nobody takes over from a frozen master": (
        STANDBY,
        "if not view.is_leased and now_s - self._greeted_s >= MAX_SILENCE_S:",
        "if False:",
        ("freeze_master",),
    ),
    "tokens do not grow": (
        STORE,
        "token = max(token, seen_token) + 1",
        "token = max(token, seen_token, 1)",
        ("kill_master",),
    ),
    "a renewal restores nothing": (
        STORE,
        "if record is not None and (self.record is None or self.record.epoch < record.epoch):",
        "if False:",
        ("lose_data_and_master",),
    ),
    "stale masters commit": (
        STORE,
        "        self._check(token, holder)\n        if self.record == record:\n            return\n"
        "        if record.epoch < self.epoch or (self.record is not None and record.epoch <= self.record.epoch):",
        "        if False:",
        ("cut",),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_a_rule_an_invariant_breaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, faults = MUTANTS[name]
    take_out(monkeypatch, module, old, new)
    assert any(simulate(seed, faults).violation for seed in range(NUM_MUTANT_SEEDS))

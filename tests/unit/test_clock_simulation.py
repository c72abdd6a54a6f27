"""Random orders of events against the clock, and clocks that lack a rule, each of which must be noticed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import coordinator.clock
from coordinator.clock import Clock
from tests.clock_events import RandomGroup
from tests.unit import test_clock as rules
from tests.unit import test_clock_steps as step_rules
from tests.unit import test_clock_verdicts as verdict_rules

NUM_SEEDS = 40
NUM_EVENTS = 2000


def run_random_events(clock_class: type[Clock]) -> None:
    """80,000 events; the invariants are checked after each."""
    num_released = num_epochs = 0
    for seed in range(NUM_SEEDS):
        group = RandomGroup(clock_class, seed)
        group.run(NUM_EVENTS)
        num_released += group.total_released
        num_epochs += group.epoch
    assert num_released > 10 * NUM_SEEDS, "the events hardly make a step"
    assert num_epochs > 2 * NUM_SEEDS, "the events hardly make an epoch"


def test_every_invariant_holds_after_every_event_of_many_random_orders() -> None:
    run_random_events(Clock)


# Each mutant is a clock with one rule taken out: where, what is replaced, by what, and who must notice.
ANY = run_random_events
MUTANTS: dict[str, tuple[str, str, str, Callable[[type[Clock]], None]]] = {
    # Steps
    "not all need to arrive": ("steps", "or self._num_arrived < len(self._members):", "or not self._num_arrived:", ANY),
    "arrivals are not used up": ("steps", "            member.arrival = None\n", "", ANY),
    "arrivals are edges": (
        "steps",
        "        member.arrival = arrive\n",
        "        member.arrival = member.arrival or arrive\n",
        ANY,
    ),
    "late arrivals count": ("steps", "if arrive.step < self.step:", "if False:", ANY),
    "idle groups step": (
        "steps",
        "or not self.has_work:\n            return ()",
        "or False:\n            return ()",
        ANY,
    ),
    "no lead bounds the clock": ("steps", "self.step - 1 - self.committed >= MAX_LEAD", "False", ANY),
    "one Done commits": ("steps", "if self._num_done[done.step] < len(self._members):", "if False:", ANY),
    "a commit releases nothing": (
        "steps",
        "            self._carried.popleft()\n        return self._release(now_s)",
        "            self._carried.popleft()\n        return ()",
        ANY,
    ),
    "Dones may be out of order": (
        "steps",
        "if done.step != member.done + 1 or done.step >= self.step:",
        "if False:",
        step_rules.test_a_done_for_a_step_that_was_not_released_breaks_the_protocol,
    ),
    "steps to come may be arrived for": (
        "steps",
        "if arrive.step > self.step or not self._is_open:",
        "if False:",
        step_rules.test_an_arrival_for_a_step_to_come_breaks_the_protocol,
    ),
    "prefills wait for ever": ("steps", "now_s - began_s >= self._prefill_delay_s", "False", ANY),
    "prefills never wait": ("steps", "            len(since_s) == len(arrivals)\n", "            True\n", ANY),
    "all prefills do not suffice": ("steps", "            len(since_s) == len(arrivals)\n", "            False\n", ANY),
    "prefills wait for idle members": (
        "steps",
        "or not any(arrival.decode_tokens for arrival in arrivals)",
        "",
        step_rules.test_prefills_run_at_once_when_nobody_decodes,
    ),
    "each chunk is held": (
        "steps",
        "or any(m.prefilled and m.prefill_since_s is not None for m in self._members)",
        "",
        ANY,
    ),
    "commands are repeated": ("steps", "            self._commands.clear()\n", "", ANY),
    "wants are not heard": ("steps", "*(want for arrival in arrivals for want in arrival.wants)", "", ANY),
    "commands are lost with their epoch": (
        "steps",
        "*(name for _, names in self._carried for name in names), ",
        "",
        step_rules.test_a_command_whose_step_was_cut_off_is_carried_again,
    ),
    "committed commands are carried again": (
        "steps",
        "while self._carried and self._carried[0][0] <= done.step:",
        "while False:",
        step_rules.test_a_command_whose_step_was_cut_off_is_carried_again,
    ),
    "an epoch goes on where the last one stood": ("steps", "        self.step, self.committed = 0, -1\n", "", ANY),
    "arrivals outlive their epoch": ("standing", "self.blob = self.arrival = ", "self.blob = ", ANY),
    "stop does not stop": (
        "clock",
        "        if releases and STOP in releases[0].commands:\n            self._enter(Phase.STOPPING)\n",
        "",
        step_rules.test_after_stop_nothing_is_released_and_leaving_is_no_loss,
    ),
    "leaving early is no loss": (
        "clock",
        "self.phase is Phase.STOPPING and member.done == self.step - 1",
        "self.phase is Phase.STOPPING",
        step_rules.test_who_leaves_before_its_last_step_is_done_was_lost,
    ),
    "steps go on between epochs": (
        "clock",
        "        if phase is not Phase.RUNNING:\n            self._steps.close()\n",
        "",
        step_rules.test_nothing_is_released_between_two_epochs,
    ),
    "a commit is no progress": (
        "steps",
        "        self.committed = done.step\n        self.progress_s = now_s\n",
        "        self.committed = done.step\n",
        verdict_rules.test_each_step_has_the_whole_deadline_from_the_commit_before_it,
    ),
    # Members
    "configurations may differ": (
        "clock",
        "if got != wanted:",
        "if False:",
        rules.test_no_member_has_a_configuration_of_its_own,
    ),
    "a rank may be taken twice": (
        "clock",
        "if first := self._members.get(hello.dp_rank):",
        "if first := None:",
        rules.test_a_rank_is_refused_while_the_first_that_has_it_lives,
    ),
    "the evicted may come back": (
        "clock",
        "if reason := self._epochs.departed.get(hello.dp_rank):",
        "if reason := None:",
        rules.test_an_evicted_member_is_not_heard_any_more,
    ),
    "new processes join a group that runs": (
        "clock",
        "if self._has_stepped and not (hello.epoch and is_known):",
        "if False:",
        rules.test_a_new_master_takes_only_members_of_the_epochs_before,
    ),
    "members of an earlier life are taken": (
        "clock",
        "if hello.epoch and not self._has_stepped:",
        "if False:",
        rules.test_a_new_master_takes_only_members_of_the_epochs_before,
    ),
    "nobody is missed at start-up": (
        "clock",
        "case Phase.GATHERING | Phase.FORMING if now_s - self._began_s > settings.startup_deadline_s:",
        "case Phase.GATHERING | Phase.FORMING if False:",
        rules.test_who_is_missing_at_the_startup_deadline_is_named,
    ),
    "an epoch has no time of its own to form": (
        "clock",
        "            self._began_s = now_s\n        self._members",
        "            pass\n        self._members",
        verdict_rules.test_who_is_not_ready_by_the_startup_deadline_of_a_later_epoch_is_evicted,
    ),
    "steps begin before all are ready": ("clock", "if len(blobs) < len(self.members):", "if False:", ANY),
    "epochs are not looked at": ("clock", "if message.epoch != epoch or", "if", ANY),
    "late frames of an epoch at its end count": (
        "clock",
        " or self.phase in (Phase.GATHERING, Phase.COMMITTING):",
        ":",
        rules.test_late_frames_of_an_epoch_at_its_end_are_ignored,
    ),
    # Epochs
    "members are told before the commit": (
        "clock",
        "        return (commit,) if commit else ()",
        "        return (commit, *self.committed(commit.epoch, now_s)) if commit else ()",
        ANY,
    ),
    "two commits are under way at a time": (
        "epochs",
        "        if self._proposal is not None:\n            return None\n",
        "",
        ANY,
    ),
    "who is lost while a commit is under way stays": (
        "epochs",
        "        if self._undone:\n",
        "        if False:\n",
        ANY,
    ),
    "evictions are forgotten": ("epochs", "evicted=self.evicted + event,", "evicted=event,", ANY),
    "the same epoch begins again": ("epochs", "epoch=self.epoch + 1,", "epoch=self.epoch,", ANY),
    "the evicted are not told": (
        "epochs",
        "gone = [rank for rank in self._untold if rank not in self.members]",
        "gone = []",
        rules.test_a_lost_connection_is_evicted_at_once,
    ),
    "any commit will do": (
        "epochs",
        "if self._proposal is None or self._proposal.epoch != epoch:",
        "if self._proposal is None:",
        rules.test_members_are_told_only_of_what_is_committed,
    ),
    "epochs that members know of do not count": (
        "clock",
        "        self._epochs.rise_above(hello.epoch)\n",
        "",
        rules.test_the_next_epoch_is_above_every_one_that_a_member_was_told_of,
    ),
    "a commit may take for ever": (
        "clock",
        "case Phase.COMMITTING if now_s - self._epochs.proposed_s > settings.progress_deadline_s:",
        "case Phase.COMMITTING if False:",
        rules.test_a_membership_that_cannot_be_committed_fails_the_group,
    ),
    "members that do not fit go on": (
        "clock",
        "if why := self.settings.why_not(members):",
        "if why := None:",
        rules.test_members_that_do_not_fit_do_not_go_on,
    ),
    "a start-up is survived": (
        "clock",
        "if not self._has_stepped or self.phase is Phase.STOPPING:",
        "if self.phase is Phase.STOPPING:",
        rules.test_until_the_first_step_is_committed_a_loss_fails_the_group,
    ),
    "a deposed master goes on": (
        "clock",
        "            self._enter(Phase.DEPOSED)\n",
        "",
        rules.test_a_deposed_master_says_nothing_any_more,
    ),
    "a new master waits for ever": (
        "clock",
        "self._end_gathering(now_s) if now_s - self._began_s > REJOIN_S else ()",
        "()",
        rules.test_a_new_master_evicts_who_does_not_come_within_a_second,
    ),
    "a new master waits for nobody": (
        "clock",
        "self._end_gathering(now_s) if now_s - self._began_s > REJOIN_S else ()",
        "self._end_gathering(now_s)",
        rules.test_a_new_master_evicts_who_does_not_come_within_a_second,
    ),
    # Verdicts
    "a loss is not noticed": (
        "clock",
        "if self.phase is not Phase.GATHERING and not has_left:",
        "if False:",
        rules.test_a_lost_connection_is_evicted_at_once,
    ),
    "silence is not noticed": (
        "verdicts",
        "if late := [member for member in members if now_s - member.beat_s > limit_s]:",
        "if late := []:",
        verdict_rules.test_a_parked_member_is_judged_by_its_beats_alone,
    ),
    "any frame counts as a beat": (
        "clock",
        "        member.heard_s = now_s\n",
        "        member.heard_s = member.beat_s = now_s\n",
        verdict_rules.test_frames_other_than_beats_do_not_speak_for_the_ranks,
    ),
    "a stall is not noticed": (
        "clock",
        "if now_s - steps.progress_s > limit_s:\n                verdict",
        "if False:\n                verdict",
        rules.test_the_first_step_has_the_startup_deadline,
    ),
    "the silent are not looked for": (
        "verdicts",
        "if mute := _mute(late, members, now_s):",
        "if mute := []:",
        verdict_rules.test_a_step_that_is_not_done_blames_who_is_silent,
    ),
    "collectives are not compared": (
        "verdicts",
        "if entered[member.dp_rank] == fewest]",
        "]",
        verdict_rules.test_a_step_that_is_not_done_blames_who_is_furthest_behind_in_collectives,
    ),
    "collectives are compared while they move": (
        "verdicts",
        "is_moving = now_s - max(member.moved_s for member in members) < SETTLED_S",
        "is_moving = False",
        verdict_rules.test_collectives_are_compared_only_when_they_stand_still,
    ),
    "a step may take for ever while its collectives go on": (
        "verdicts",
        "if is_moving and now_s - since_s <= 2 * limit_s:",
        "if is_moving:",
        verdict_rules.test_nobody_is_to_blame_for_a_step_whose_collectives_go_on_for_two_deadlines,
    ),
    "collectives of the last epoch are compared": (
        "clock",
        "if message.epoch == epoch and member.blob is not None:",
        "if True:",
        verdict_rules.test_collectives_of_the_epoch_before_do_not_count,
    ),
    "all are to blame where nobody was heard": (
        "verdicts",
        "    if all(now_s - member.beat_s > SILENT_S for member in members):\n        return []\n",
        "",
        verdict_rules.test_where_no_member_was_heard_none_is_to_blame_for_its_silence,
    ),
    "who waits is to blame": (
        "verdicts",
        "    if fewest == most:\n",
        "    if False:\n",
        verdict_rules.test_a_step_in_which_nobody_is_behind_begins_again_with_the_same_members,
    ),
    "a group begins again for ever": (
        "clock",
        "if self._num_reforms == MAX_REFORMS:",
        "if False:",
        verdict_rules.test_a_group_begins_again_twice_without_a_step_between_and_then_fails,
    ),
    "a step does not count between two beginnings": (
        "clock",
        "self._has_stepped, self._num_reforms = True, 0",
        "self._has_stepped = True",
        verdict_rules.test_a_group_begins_again_twice_without_a_step_between_and_then_fails,
    ),
    "who does not arrive is not noticed": (
        "clock",
        "            if now_s - since_s > limit_s:\n                return self._judge(verdicts.absent",
        "            if False:\n                return self._judge(verdicts.absent",
        verdict_rules.test_a_member_that_does_not_arrive_while_others_have_work_is_evicted,
    ),
    "parked time counts as waiting": (
        "clock",
        "since_s = max(steps.progress_s, steps.work_s)",
        "since_s = steps.progress_s",
        verdict_rules.test_a_member_that_does_not_arrive_while_others_have_work_is_evicted,
    ),
    "all are to blame where nobody arrives": (
        "verdicts",
        "blamed = _ranks(late) if len(late) < len(members) else ()",
        "blamed = _ranks(late)",
        verdict_rules.test_where_nobody_arrives_for_a_command_nobody_is_to_blame,
    ),
    "the first step has no time to compile": (
        "clock",
        "            return self.settings.startup_deadline_s\n",
        "            return self.settings.progress_deadline_s\n",
        rules.test_the_first_step_has_the_startup_deadline,
    ),
    "the first step of a later epoch has no time": (
        "clock",
        "(1 if self.committed_step >= 0 else FIRST_STEP_DEADLINES)",
        "1",
        verdict_rules.test_the_first_step_of_a_later_epoch_has_three_deadlines,
    ),
    "a fault is a verdict": (
        "clock",
        "if now_s - self._fault_s > FAULT_WAIT_S:",
        "if True:",
        verdict_rules.test_a_fault_waits_for_the_end_of_a_connection,
    ),
    "a fault is not noticed": (
        "clock",
        "if now_s - self._fault_s > FAULT_WAIT_S:",
        "if False:",
        verdict_rules.test_a_fault_without_evidence_begins_again_with_the_same_members,
    ),
    "a fault outlives its epoch": (
        "clock",
        '        self._fault = ""\n        logger',
        "        logger",
        verdict_rules.test_a_fault_waits_for_the_end_of_a_connection,
    ),
    "a fault does not look for the silent": (
        "verdicts",
        "if mute := _mute(members, members, now_s):",
        "if mute := []:",
        verdict_rules.test_a_fault_blames_who_has_fallen_silent,
    ),
    "the master's own pause counts": (
        "clock",
        "        if pause_s <= MAX_TICK_S - BEAT_INTERVAL_S:\n",
        "        if True:\n",
        rules.test_time_in_which_the_master_did_not_run_counts_against_nobody,
    ),
    "nobody may come back after a pause": (
        "clock",
        "return is_under_way and now_s - self._paused_s < REJOIN_S",
        "return False",
        rules.test_a_member_that_took_a_paused_master_for_dead_may_come_back,
    ),
    "a pause is never over": (
        "clock",
        "return is_under_way and now_s - self._paused_s < REJOIN_S",
        "return is_under_way and self._paused_s > 0",
        rules.test_a_member_that_was_lost_while_the_master_was_paused_is_evicted_a_second_later,
    ),
}


def mutant(module_name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    """A clock in whose module, or in one that it uses, one text is replaced."""
    original = importlib.import_module(f"coordinator.{module_name}")
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} does not fit {module_name}.py any more"
    module = ModuleType("mutant_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their annotations up
    exec(compile(source.replace(old, new), module.__name__, "exec"), module.__dict__)
    if module_name == "clock":
        mutated: type[Clock] = module.Clock
        return mutated
    monkeypatch.setattr(
        coordinator.clock, "verdicts", module if module_name == "verdicts" else coordinator.clock.verdicts
    )
    for name in ("Steps", "Epochs", "Standing"):
        if name in vars(module) and vars(module)[name].__module__ == module.__name__:
            monkeypatch.setattr(coordinator.clock, name, vars(module)[name])
    for output in ("Commit", "Expel"):  # these are told apart by their class
        if output in vars(module):
            monkeypatch.setattr(module, output, getattr(coordinator.clock, output))
    return Clock


@pytest.mark.parametrize("name", MUTANTS)
def test_a_clock_that_lacks_a_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module_name, old, new, check = MUTANTS[name]
    clock_class = mutant(module_name, old, new, monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        check(clock_class)

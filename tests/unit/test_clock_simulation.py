"""Random orders of events against the clock, and clocks that lack a rule, each of which must be noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import coordinator.clock
from coordinator.clock import Clock
from tests.clock_driver import RandomGroup
from tests.unit import test_clock as rules

NUM_SEEDS = 40
NUM_EVENTS = 2000


def run_random_events(clock_class: type[Clock]) -> None:
    """80,000 events; the invariants are checked after each."""
    num_released = 0
    for seed in range(NUM_SEEDS):
        group = RandomGroup(clock_class, seed)
        group.run(NUM_EVENTS)
        num_released += group.num_released
    assert num_released > 10 * NUM_SEEDS, "the events hardly make a step"


def test_every_invariant_holds_after_every_event_of_many_random_orders() -> None:
    run_random_events(Clock)


# Each mutant is the clock with one rule taken out: what is replaced, by what, and who must notice.
ANY = run_random_events
MUTANTS: dict[str, tuple[str, str, Callable[[type[Clock]], None]]] = {
    "configurations may differ": (
        "if got != wanted:",
        "if False:",
        rules.test_no_member_has_a_configuration_of_its_own,
    ),
    "a rank may be taken twice": (
        "if first := self._members.get(hello.dp_rank):",
        "if first := None:",
        rules.test_a_rank_is_refused_while_the_first_that_has_it_lives,
    ),
    "nobody is missed at start-up": (
        "late = now_s - self.started_s > settings.startup_deadline_s",
        "late = False",
        rules.test_who_is_missing_at_the_startup_deadline_is_named,
    ),
    "not all need to arrive": ("or self._num_arrived < self.settings.size:", "or not self._num_arrived:", ANY),
    "arrivals are not used up": ("            member.arrival = None\n", "", ANY),
    "arrivals are edges": (
        "        member.arrival = arrive\n",
        "        member.arrival = member.arrival or arrive\n",
        ANY,
    ),
    "late arrivals count": ("if arrive.step < self.step:", "if False:", ANY),
    "idle groups step": ("or not self._has_work():\n            return ()", "or False:\n            return ()", ANY),
    "no lead bounds the clock": ("self.step - 1 - self.committed >= MAX_LEAD", "False", ANY),
    "one Done commits": ("if self._num_done[done.step] < self.settings.size:", "if False:", ANY),
    "a commit releases nothing": (
        "        self._progress_s = now_s\n        return self._release(now_s)",
        "        self._progress_s = now_s\n        return ()",
        ANY,
    ),
    "Dones may be out of order": (
        "if done.step != member.done + 1 or done.step >= self.step:",
        "if False:",
        rules.test_a_done_for_a_step_that_was_not_released_breaks_the_protocol,
    ),
    "prefills wait for ever": ("now_s - began_s >= self.settings.prefill_delay_s", "False", ANY),
    "prefills never wait": ("            len(since_s) == self.settings.size\n", "            True\n", ANY),
    "all prefills do not suffice": ("            len(since_s) == self.settings.size\n", "            False\n", ANY),
    "prefills wait for idle members": (
        "or not any(arrival.decode_tokens for arrival in arrivals)",
        "",
        rules.test_prefills_run_at_once_when_nobody_decodes,
    ),
    "each chunk is held": ("or any(m.prefilled and m.prefill_since_s is not None for m in members)", "", ANY),
    "commands are repeated": ("        self._commands.clear()\n", "", ANY),
    "wants are not heard": ("*(want for arrival in arrivals for want in arrival.wants)", "", ANY),
    "stop does not stop": (
        "        if STOP in commands:\n            self.phase = Phase.STOPPING\n",
        "",
        rules.test_after_stop_nothing_is_released_and_leaving_is_no_loss,
    ),
    "leaving early is no loss": (
        "self.phase is Phase.STOPPING and member.done == self.step - 1",
        "self.phase is Phase.STOPPING",
        rules.test_who_leaves_before_its_last_step_is_done_was_lost,
    ),
    "epochs are not looked at": ("if message.epoch != self.epoch:", "if False:", ANY),
    "a loss is not noticed": (
        "if self.phase is not Phase.GATHERING and not has_left:",
        "if False:",
        rules.test_a_lost_connection_fails_the_group_at_once,
    ),
    "silence is not noticed": (
        "if now_s - member.heard_s > settings.progress_deadline_s:",
        "if False:",
        rules.test_a_parked_member_is_judged_by_its_beats_alone,
    ),
    "a stall is not noticed": (
        "if now_s - self._progress_s > limit_s:",
        "if False:",
        rules.test_the_first_step_has_the_startup_deadline,
    ),
    "the silent are not looked for": (
        "if silent := [m for m in late if now_s - m.heard_s > SILENT_S]:",
        "if silent := []:",
        rules.test_a_step_that_is_not_done_names_who_is_silent,
    ),
    "collectives are not compared": (
        "if count == min(entered)]",
        "]",
        rules.test_a_step_that_is_not_done_names_who_is_furthest_behind_in_collectives,
    ),
    "a commit is no progress": (
        "        self.committed = done.step\n        self._progress_s = now_s\n",
        "        self.committed = done.step\n",
        rules.test_each_step_has_the_whole_deadline_from_the_commit_before_it,
    ),
    "who does not arrive is not noticed": (
        "elif now_s - max(self._progress_s, self._work_s) > limit_s:",
        "elif False:",
        rules.test_a_member_that_does_not_arrive_while_others_have_work_is_named,
    ),
    "parked time counts as waiting": (
        "now_s - max(self._progress_s, self._work_s)",
        "now_s - self._progress_s",
        rules.test_a_member_that_does_not_arrive_while_others_have_work_is_named,
    ),
    "the first step has no time to compile": (
        "settings.progress_deadline_s if self.committed >= 0 else settings.startup_deadline_s",
        "settings.progress_deadline_s",
        rules.test_the_first_step_has_the_startup_deadline,
    ),
    "the master's own pause counts": (
        "        if pause_s <= 0:\n",
        "        if True:\n",
        rules.test_time_in_which_the_master_did_not_run_counts_against_nobody,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_clock_that_lacks_a_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, check = MUTANTS[name]
    source = Path(coordinator.clock.__file__).read_text()
    assert source.count(old) == 1, f"the mutant {name!r} does not fit the clock any more"
    module = ModuleType("mutant_clock")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their annotations up
    exec(compile(source.replace(old, new), "mutant_clock", "exec"), module.__dict__)
    with pytest.raises((Exception, pytest.fail.Exception)):
        check(module.Clock)

"""The KV room of one backend, over any sequence of scrapes and requests."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import Exclusion, LoadSample, Need
from gateway.pools.room import Room

CAPACITY = 10_000

usages = st.sampled_from([0.0, 0.79, 0.8, 0.89, 0.9, 1.0]) | st.floats(0, 1)
scrapes = st.builds(
    lambda usage, running, waiting: ("scrape", usage, running, waiting),
    st.none() | usages,
    st.integers(0, 100),
    st.integers(0, 6),
)
requests = st.builds(
    lambda prompt, output, streams, tenant: ("take", prompt, output, streams, tenant),
    st.integers(0, 3000),
    st.integers(0, 1000),
    st.booleans(),
    st.sampled_from("abc"),
)
on_one = st.builds(
    lambda kind, which: (kind, which), st.sampled_from(["read", "end"]), st.integers(0, 20)
)
# Quarters of a second, so that sums of them are exact.
steps = st.lists(
    st.tuples(st.integers(0, 16).map(lambda quarters: quarters / 4), scrapes | requests | on_one),
    max_size=60,
)


def walk(room, steps):
    """Do each step, and yield the time and what it was; `credits` are those made so far."""
    now, credits = 0.0, []
    for pause, (kind, *what) in steps:
        now += pause
        if kind == "scrape":
            usage, running, waiting = what
            room.observe(LoadSample(now, running, waiting, usage, CAPACITY))
        elif kind == "take":
            prompt, output, streams, tenant = what
            credits.append(room.take(prompt, output, streams=streams, tenant=tenant))
        elif credits:
            credit = credits[what[0] % len(credits)]
            room.first_token(credit, now) if kind == "read" else room.give_back(credit)
        yield now, kind, credits


def after(room, steps):
    """Do all the steps; returns when the last one was, and the credits made."""
    done = [*walk(room, steps)]
    return (done[-1][0], done[-1][2]) if done else (0.0, [])


@given(steps)
def test_transitions_are_at_least_a_dwell_apart(steps):
    room, changes, was_open = Room(), [], True
    for now, _, _ in walk(room, steps):
        if room.open is not was_open:
            was_open = room.open
            assert room.changed_at == now
            changes.append(now)
    assert all(later - before >= room.dwell_s for before, later in pairwise(changes))


@given(steps)
def test_a_full_backend_takes_work_up_to_its_resume_ratio_only_unless_it_is_idle(steps):
    room, usage, running, waiting = Room(), None, 0, 0
    last_scrape = -1.0
    for (now, kind, _), (_, step) in zip(walk(room, steps), steps, strict=True):
        if kind == "scrape":
            (_, usage, running, waiting), last_scrape = step, now
        fresh = last_scrape >= 0 and now - last_scrape <= room.stale_s
        idle = room.sequences == 0 and running + waiting == 0
        if fresh and usage is not None and usage >= room.stop_ratio and not idle:
            room_tokens = room.resume_ratio * CAPACITY - room.projection(now).tokens
            assert room.verdict(Need(math.ceil(room_tokens) + 1, 0), now) is not None


@given(steps)
def test_it_opens_again_once_usage_stayed_below_resume_for_the_dwell(steps):
    room = Room()
    now, _ = after(room, steps)
    for second in range(3):  # from the first low scrape to the last: the dwell
        room.observe(LoadSample(now + second, 0, 0, 0.79, CAPACITY))
    assert room.open


@given(steps, st.sampled_from([0.25, 0.03125]))
def test_what_is_known_of_the_pace_makes_it_look_emptier_by_half_of_the_outputs_at_most(
    steps, gap_s
):
    known, unknown = Room(), Room()
    known.peak.calm = False  # else it looks further ahead
    known.writing.wrote(gap_s)
    for (now, _, credits), _ in zip(walk(known, steps), walk(unknown, steps), strict=True):
        if (most := unknown.projection(now).tokens) is not None:
            output_tokens = sum(each.output_tokens for each in credits if each.held)
            assert most - output_tokens / 2 - 1 <= known.projection(now).tokens <= most


@given(steps, st.integers(1, CAPACITY))
def test_whatever_happened_an_idle_backend_takes_what_it_can_hold(steps, need):
    room = Room()
    now, credits = after(room, steps)
    for credit in credits:
        room.give_back(credit)
    room.observe(LoadSample(now, 0, 0, 0.0, CAPACITY))
    assert room.verdict(Need(need, 0), now) is None
    assert room.verdict(Need(CAPACITY + 1, 0), now) is Exclusion.TOO_LARGE


@given(steps)
def test_all_credit_comes_back(steps):
    room = Room()
    now, credits = after(room, steps)
    held = [credit for credit in credits if credit.held]
    assert room.sequences == len(held)
    room.observe(LoadSample(now, 0, 0, None, CAPACITY))  # usage unknown: the whole credit shows
    need = sum(credit.prompt_tokens + credit.output_tokens for credit in held)
    assert sum(room.shares.by_tenant.values()) == need
    assert room.projection(now).tokens == int(room.trust.share * need)
    for tenant in "abc":
        own = [credit for credit in held if credit.tenant == tenant]
        tokens = sum(credit.prompt_tokens + credit.output_tokens for credit in own)
        assert room.shares.by_tenant.get(tenant, 0) == tokens
    for credit in credits:
        room.give_back(credit)
    assert room.sequences == room.projection(now).tokens == 0
    assert room.shares.by_tenant == {}


@given(steps, st.integers(0, 2 * CAPACITY), st.integers(0, 2 * CAPACITY))
def test_what_lets_a_request_in_lets_a_smaller_one_in(steps, one, other):
    room = Room()
    now, _ = after(room, steps)
    if room.verdict(Need(max(one, other), 0), now) is None:
        assert room.verdict(Need(min(one, other), 0), now) is None


@given(steps)
def test_usage_unknown_looks_as_full_as_all_that_is_in_flight_by_what_was_seen_to_be_shared(steps):
    room = Room(capacity_tokens=CAPACITY)
    now, credits = after(room, steps)
    need = sum(c.prompt_tokens + c.output_tokens for c in credits if c.held)
    assert room.projection(now + room.stale_s + 1).tokens == int(room.trust.share * need)


@given(steps)
def test_what_is_unread_is_the_prompts_of_the_streams_in_flight_that_gave_no_token(steps):
    room, unread, made = Room(), {}, 0
    for (_, kind, credits), (_, step) in zip(walk(room, steps), steps, strict=True):
        if kind == "take":
            if step[3]:
                unread[made] = step[1]
            made += 1
        elif kind != "scrape" and credits:
            unread.pop(step[1] % len(credits), None)
        assert room.unread_tokens == sum(unread.values())


@given(steps, st.integers(0, CAPACITY), st.integers(0, 2))
def test_the_quick_look_lets_nothing_in_that_the_close_one_would_not(steps, need, reserves):
    """And refuses nothing by itself: what it does not let in is looked at closely."""
    room = Room()
    now, _ = after(room, steps)
    quick = room.verdict(Need(need, 0), now, reserves=reserves)
    room._clear_until = -math.inf  # no quick look
    close = room.verdict(Need(need, 0), now, reserves=reserves)
    assert quick is close


@given(steps, st.integers(0, CAPACITY))
def test_what_leaves_the_reserves_goes_in_without_them(steps, need):
    room = Room()
    now, _ = after(room, steps)
    if room.verdict(Need(need, 0), now, reserves=2) is None:
        assert room.verdict(Need(need, 0), now, reserves=1) is None
    if room.verdict(Need(need, 0), now, reserves=1) is None:
        assert room.verdict(Need(need, 0), now) is None


@given(steps)
def test_some_tenant_with_work_here_never_holds_much(steps):
    """Else the reserve would be for nobody."""
    room = Room()
    after(room, steps)
    assert not room.shares.by_tenant or not all(map(room.shares.holds_much, room.shares.by_tenant))

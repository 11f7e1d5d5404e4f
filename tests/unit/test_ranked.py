"""Which of several engines behind one server takes a request, and what is known of each."""

from gateway.config.models import PoolConfig
from gateway.core.prefix import Prefix
from gateway.core.types import LoadSample, Need
from gateway.pools.backend import Backend
from gateway.pools.configured import configure
from gateway.prefix.approximate import ApproximateIndex
from gateway.prefix.precise import PreciseIndex
from gateway.prefix.ranked import RankedIndex, by_engine, precise_engines
from gateway.wire.metricspage import parse_metrics


def prompt(key, *, tokens=1000, output=10, takes_rank=True, home=0):
    return Prefix([key], (1,), 1, tokens, output, home=home, takes_rank=takes_rank)


def ranked(count=2):
    return by_engine(None, ApproximateIndex, (0,) * count)


def test_a_prompt_goes_to_the_engine_that_holds_it():
    held = ranked(3)
    ranks = {key: held.sent(prompt(key, home=key)).rank for key in range(6)}
    assert set(ranks.values()) == {0, 1, 2}
    for key, rank in ranks.items():
        assert held.tokens(prompt(key)) == 1000
        assert held.sent(prompt(key)).rank == rank


def test_one_prompt_goes_to_other_engines_when_its_own_has_too_much_to_do():
    held = ranked()
    sent = [held.sent(prompt(1, output=200)) for _ in range(8)]
    assert {each.rank for each in sent} == {0, 1}
    for each in sent:
        held.over(each)
    assert held.sent(prompt(1)).cached_tokens == 1000


def test_a_prompt_that_was_read_is_in_nobody_s_way():
    held = ranked()
    first = held.sent(prompt(1))
    assert held.sent(prompt(1)).rank == 1  # it is done there before the first is read
    held = ranked()
    first = held.sent(prompt(1))
    held.read(first)
    second = held.sent(prompt(1))
    assert second.rank == 0
    for each in (first, second):
        held.over(each)
    assert held.sent(prompt(2, home=0)).rank == 0


def test_what_was_sent_before_the_engines_changed_in_number_counts_nowhere():
    before, held = ranked(3), ranked(2)
    sent = [before.sent(prompt(key, home=key)) for key in range(3)]
    for each in sent:
        held.read(each)
        held.over(each)
        held.unsent(each)
        held.ended(each, 0)
    assert {held.sent(prompt(key, home=key)).rank for key in range(2)} == {0, 1}


def test_a_server_that_began_anew_is_told_no_rank_until_it_has_shown_its_engines():
    """It may have fewer by now: vLLM refuses a rank that it has not."""
    held = ranked(4)
    sent = held.sent(prompt(1, home=3))
    assert sent.rank == 3
    held.over(sent)
    held.forget()
    assert held.sent(prompt(1, home=3)).rank is None
    assert held.tokens(prompt(1, home=3)) == 0
    held.loaded((0, 0, 0, 0))
    assert held.sent(prompt(1, home=3)).rank == 3


def test_requests_of_others_count():
    held = ranked()
    held.loaded((3, 0))
    assert held.sent(prompt(1)).rank == 1
    held.loaded((0, 1))  # ours
    assert held.sent(prompt(2, home=1)).rank == 0
    held = ranked()
    held.over(held.sent(prompt(1)))
    held.loaded((1, 0))  # not ours any more
    assert held.sent(prompt(2)).rank == 1


def test_what_failed_before_it_was_read_is_held_nowhere():
    held = ranked()
    sent = held.sent(prompt(1))
    held.over(sent)
    held.unsent(sent)
    assert held.tokens(prompt(1)) == 0


def test_where_the_engine_cannot_be_named_the_mean_is_expected_and_nothing_noted():
    held = ranked()
    held.over(held.sent(prompt(1)))
    other = prompt(1, takes_rank=False)
    assert held.tokens(other) == 500
    sent = held.sent(other)
    assert (sent.rank, sent.cached_tokens) == (None, 500)
    for tell in (held.over, held.unsent, lambda sent: held.ended(sent, 0)):
        tell(sent)
    assert held.tokens(prompt(1)) == 1000


def test_a_server_whose_engines_change_in_number_is_known_anew():
    one = ApproximateIndex()
    assert by_engine(one, ApproximateIndex, ()) is one
    two = by_engine(one, ApproximateIndex, (0, 0))
    assert by_engine(two, ApproximateIndex, (1, 0)) is two
    assert len(by_engine(two, ApproximateIndex, (0,) * 3).engines) == 3
    assert isinstance(by_engine(two, ApproximateIndex, ()), ApproximateIndex)
    assert by_engine(None, None, (0, 0)) is None
    assert len(precise_engines(by_engine(None, PreciseIndex, (0, 0)))) == 2
    assert precise_engines(two) == []


def test_a_reload_keeps_what_is_known_of_the_engines_and_a_lone_server_learns_of_its_own():
    pool = PoolConfig.model_validate({"backends": ["http://h:1"]})
    backend = Backend("m", "b1", "http://h:1")
    configure(backend, pool, pool.backends[0], None)
    assert backend.prefix_index is None  # the only place there is
    backend.scraped(LoadSample(1.0, 0, 0, 0.0, engines=(0, 0)))
    held = backend.prefix_index
    assert isinstance(held, RankedIndex)
    configure(backend, pool, pool.backends[0], None)
    assert backend.prefix_index is held
    slot = backend.take(1.0, Need(1000, 10, streams=True), prefix=prompt(1))
    assert slot.sent.rank == 0
    backend.taken_back(slot)
    assert held.tokens(prompt(1)) == 0  # nobody saw it read
    slot = backend.take(1.0, Need(1000, 10, streams=True), prefix=prompt(2))
    assert slot.sent.rank == 0  # it has nothing else to do
    backend.first_token(slot, 2.0)
    assert backend.take(2.0, Need(1000, 10, streams=True), prefix=prompt(2)).sent.rank == 0
    off = PoolConfig.model_validate({"backends": ["http://h:1"], "prefix": "off"})
    configure(backend, off, off.backends[0], None)
    backend.scraped(LoadSample(2.0, 0, 0, 0.0, engines=(0, 0)))
    assert backend.prefix_index is None


def test_the_requests_of_each_engine_are_read_where_they_are_the_whole_server():
    def engines(*labels):
        lines = [
            f'vllm:num_requests_{kind}{{engine="{label}",model_name="m"}} {number}.0'
            for number, label in enumerate(labels, start=1)
            for kind in ("running", "waiting")
        ]
        return parse_metrics("\n".join(lines).encode(), 0.0).engines

    assert engines(0, 1) == (2, 4)
    assert engines(1, 0, 2) == (4, 2, 6)
    assert engines(0) == engines(3) == engines(4, 5) == ()


def test_the_cache_of_each_engine_has_its_own_size_though_the_blocks_are_told_in_sum():
    page = "\n".join(
        f'vllm:num_requests_running{{engine="{rank}"}} 0\n'
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="200"}} 1.0'
        for rank in range(2)
    )
    pool = PoolConfig.model_validate({"backends": ["http://h:1"]})
    backend = Backend("m", "b1", "http://h:1")
    configure(backend, pool, pool.backends[0], None)
    backend.scraped(parse_metrics(page.encode(), 1.0))
    assert [each.capacity_tokens for each in backend.prefix_index.engines] == [1600, 1600]

"""Which remedy of a diagnosis is applied, and what is kept of it."""

import json

import pytest

from gateway.config.models import BackendConfig, Config, PoolConfig
from gateway.config.supervision import LaunchConfig, Remedy
from gateway.heal.cure import Cure, cure, merged
from gateway.heal.overrides import FILE, TRIAL_S, Overrides
from gateway.launch.launcher import Changes
from gateway.vllmlog.diagnosis import Diagnosis, Kind, When
from gateway.vllmlog.verdict import Advice as Offered

LAUNCH = LaunchConfig(command=("vllm", "serve", "m"), port=8001)


def pool(*remedies, **settings):
    data = {"backends": ["http://h:1"], "remedies": [each.value for each in remedies], **settings}
    return Config.model_validate({"pools": {"m": data}}).pools["m"]


def offering(*remedies):
    offered = tuple(
        Offered(flag, value, why="so", action=action) for flag, value, action in remedies
    )
    return Diagnosis(Kind.KV_CACHE_TOO_SMALL, When.STARTUP, "too small", remedies=offered)


LENGTH = ("--max-model-len", "8192", Remedy.LOWER_MAX_MODEL_LEN)
SEQS = ("--max-num-seqs", "16", Remedy.LOWER_MAX_NUM_SEQS)
FP8 = ("--kv-cache-dtype", "fp8", Remedy.FP8_KV_CACHE)
RATIO = ("--gpu-memory-utilization", "0.95", Remedy.ADJUST_GPU_MEMORY_UTILIZATION)


def changes(diagnosis, settings, args=None, applied=Changes()):  # noqa: B008 - frozen
    launch = LAUNCH.model_copy(update={"args": args or {}})
    found = cure(diagnosis, settings, launch, applied)
    return None if found is None else (dict(found.changes.args), dict(found.changes.env))


def test_nothing_is_changed_that_policy_does_not_name():
    assert changes(offering(LENGTH, FP8), pool()) is None
    assert changes(offering(LENGTH, FP8), pool(Remedy.FP8_KV_CACHE)) == (
        {"kv-cache-dtype": "fp8"},
        {},
    )


def test_the_order_is_that_of_the_policy():
    both = offering(LENGTH, FP8)
    assert changes(both, pool(Remedy.FP8_KV_CACHE, Remedy.LOWER_MAX_MODEL_LEN))[0] == {
        "kv-cache-dtype": "fp8"
    }
    assert changes(both, pool(Remedy.LOWER_MAX_MODEL_LEN, Remedy.FP8_KV_CACHE))[0] == {
        "max-model-len": 8192
    }


def test_what_is_in_force_already_did_not_help_and_the_next_one_is_taken():
    settings = pool(Remedy.LOWER_MAX_MODEL_LEN, Remedy.FP8_KV_CACHE)
    applied = Changes({"max-model-len": 8192})
    assert changes(offering(LENGTH, FP8), settings, {"max-model-len": 8192}, applied)[0] == {
        "kv-cache-dtype": "fp8"
    }
    for fp8 in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        everything = {"max-model-len": 8192, "kv-cache-dtype": fp8}
        assert changes(offering(LENGTH, FP8), settings, everything) is None


@pytest.mark.parametrize(
    ("in_force", "floor", "applies"),
    [
        ({}, 4096, True),
        ({"max-model-len": "32k"}, 8192, True),
        ({"max-model-len": "32768"}, 8193, False),
        ({"max-model-len": 8192}, 4096, False),
        ({"max-model-len": 4096}, 4096, False),
        ({"max-model-len": "auto"}, 4096, True),
    ],
)
def test_a_window_is_only_lowered_and_never_below_its_floor(in_force, floor, applies):
    settings = pool(Remedy.LOWER_MAX_MODEL_LEN, min_context=floor)
    expected = ({"max-model-len": 8192}, {}) if applies else None
    assert changes(offering(LENGTH), settings, in_force) == expected


def test_max_num_seqs_has_its_floor():
    allowed = (Remedy.LOWER_MAX_NUM_SEQS,)
    assert changes(offering(SEQS), pool(*allowed))[0] == {"max-num-seqs": 16}
    assert changes(offering(SEQS), pool(*allowed, min_num_seqs=17)) is None


@pytest.mark.parametrize("value", [None, "0", "1", "1.2", "-0.5"])
def test_a_ratio_that_makes_no_sense_is_not_applied(value):
    settings = pool(Remedy.ADJUST_GPU_MEMORY_UTILIZATION)
    assert changes(offering((RATIO[0], value, RATIO[2])), settings) is None
    assert changes(offering(RATIO), settings)[0] == {"gpu-memory-utilization": 0.95}


@pytest.mark.parametrize(
    ("configured", "offered", "applies"),
    [
        ({}, "0.74", True),
        ({}, "0.73", False),  # under 0.8 of 0.92, the default
        ({"gpu-memory-utilization": 0.45}, "0.36", True),  # it shares its GPU
        ({"gpu-memory-utilization": "0.45"}, "0.35", False),
    ],
)
def test_a_utilization_has_a_floor_that_counts_from_the_configured_one(
    configured, offered, applies
):
    settings = pool(Remedy.ADJUST_GPU_MEMORY_UTILIZATION)
    offer = offering((RATIO[0], offered, RATIO[2]))
    expected = ({"gpu-memory-utilization": float(offered)}, {}) if applies else None
    assert changes(offer, settings, configured) == expected


def test_remedies_in_a_row_do_not_follow_the_free_memory_down():
    settings, applied = pool(Remedy.ADJUST_GPU_MEMORY_UTILIZATION), Changes()
    for offered in ("0.85", "0.78", "0.71", "0.64", "0.23"):
        offer = offering((RATIO[0], offered, RATIO[2]))
        found = cure(offer, settings, LAUNCH, applied)
        applied = applied if found is None else merged(applied, found.changes)
    assert applied.args == {"gpu-memory-utilization": 0.78}


def test_flags_are_compared_as_vllm_reads_them():
    """`8k` is 8000 to vLLM, so 8192 is no lower window."""
    settings = pool(Remedy.LOWER_MAX_MODEL_LEN)
    assert changes(offering(LENGTH), settings, {"max-model-len": "8k"}) is None
    assert changes(offering(LENGTH), settings, {"max-model-len": "8.5k"}) is not None


def test_what_is_set_by_environment_is_applied_once():
    spawn = ("VLLM_WORKER_MULTIPROC_METHOD", "spawn", Remedy.SPAWN)
    settings = pool(Remedy.SPAWN)
    env = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    assert changes(offering(spawn), settings) == ({}, env)
    assert changes(offering(spawn), settings, {}, Changes(env=env)) is None


def test_advice_for_people_is_never_applied():
    assert changes(offering(("--tensor-parallel-size", "2", None)), pool(*Remedy)) is None


# --- what is kept ---------------------------------------------------------------------------------


def lowered(tokens):
    return Cure(Remedy.LOWER_MAX_MODEL_LEN, Changes({"max-model-len": tokens}), "so")


def test_changes_add_up_and_are_read_again(tmp_path):
    overrides = Overrides(tmp_path / "state")
    overrides.apply("m/b1", LAUNCH, lowered(8192), 1.0)
    eager = Cure(Remedy.ENFORCE_EAGER, Changes({"enforce-eager": True}), "graphs")
    overrides.apply("m/b1", LAUNCH, eager, 2.0)
    overrides.apply("m/b1", LAUNCH, lowered(4096), 3.0)
    again = Overrides(tmp_path / "state").of("m/b1", LAUNCH)
    assert dict(again.changes.args) == {"max-model-len": 4096, "enforce-eager": True}
    assert [each.remedy for each in again.applied] == [
        "lower_max_model_len",
        "enforce_eager",
        "lower_max_model_len",
    ]
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "other",
    [
        {"command": ("vllm", "serve", "n")},
        {"args": {"max-model-len": 1}},
        {"env": {"A": "b"}},
        {"gpus": (1,)},
    ],
)
def test_another_command_line_starts_without_them(tmp_path, other):
    overrides = Overrides(tmp_path)
    overrides.apply("m/b1", LAUNCH, lowered(8192), 1.0)
    assert not overrides.of("m/b1", LAUNCH.model_copy(update=other)).changes
    assert not overrides.of("m/b2", LAUNCH).changes
    assert overrides.of("m/b1", LAUNCH.model_copy(update={"on_exit": "leave"})).changes


def test_the_order_in_which_variables_are_listed_changes_no_command_line(tmp_path):
    one, other = (LAUNCH.model_copy(update={"env": dict.fromkeys(each)}) for each in ("AB", "BA"))
    overrides = Overrides(tmp_path)
    overrides.apply("m/b1", one, lowered(8192), 1.0)
    assert overrides.of("m/b1", other).changes


def configured(tmp_path, *names, launch=LAUNCH):
    backends = [BackendConfig.model_construct(name=name, launch=launch) for name in names]
    pools = {"m": PoolConfig.model_construct(backends=backends)}
    return Config.model_construct(pools=pools, state=tmp_path)


def test_they_go_with_the_command_line_and_do_not_come_back_with_it(tmp_path):
    overrides = Overrides(tmp_path)
    overrides.apply("m/b1", LAUNCH, lowered(8192), 1.0)
    assert overrides.follow(configured(tmp_path, "b1")) == {}
    other = LAUNCH.model_copy(update={"args": {"max-model-len": 1}})
    (gone,) = overrides.follow(configured(tmp_path, "b1", launch=other)).values()
    assert gone.told() == "--max-model-len 8192 (lower_max_model_len)"
    assert overrides.follow(configured(tmp_path, "b1", launch=other)) == {}
    assert not overrides.of("m/b1", LAUNCH).changes
    assert not Overrides(tmp_path).of("m/b1", LAUNCH).changes
    assert json.loads((tmp_path / FILE).read_text()) == {}


def test_they_go_with_the_backend(tmp_path):
    overrides = Overrides(tmp_path)
    for name in ("m/b1", "m/b2"):
        overrides.apply(name, LAUNCH, lowered(8192), 1.0)
    assert list(overrides.follow(configured(tmp_path, "b2"))) == ["m/b1"]
    assert overrides.of("m/b2", LAUNCH).changes


def test_they_are_out_of_force_although_the_file_cannot_be_written(tmp_path, caplog):
    overrides = Overrides(tmp_path / "state")
    overrides.apply("m/b1", LAUNCH, lowered(8192), 1.0)
    (tmp_path / "state" / FILE).unlink()
    (tmp_path / "state").rmdir()
    (tmp_path / "state").write_text("a file where the folder should be")
    assert list(overrides.follow(configured(tmp_path))) == ["m/b1"]
    assert not overrides.of("m/b1", LAUNCH).changes
    assert "cannot save the remedies in force" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", '{"m/b1": 1}', '{"m/b1": {"args": 3}}', "\x00"])
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert not Overrides(tmp_path).of("m/b1", LAUNCH).changes


def test_a_change_is_in_force_although_it_cannot_be_written(tmp_path, caplog):
    (tmp_path / "state").write_text("a file where the folder should be")
    overrides = Overrides(tmp_path / "state")
    overrides.apply("m/b1", LAUNCH, lowered(8192), 1.0)
    assert f"cannot save the remedies in force: {tmp_path / 'state'}" in caplog.text
    assert dict(overrides.of("m/b1", LAUNCH).changes.args) == {"max-model-len": 8192}


def test_the_later_change_wins():
    both = merged(Changes({"a": 1, "b": 1}, {"X": "1"}), Changes({"b": 2}, {"X": "2"}))
    assert (dict(both.args), dict(both.env)) == ({"a": 1, "b": 2}, {"X": "2"})


# --- the configured command line is tried again ---------------------------------------------------


def started(overrides, served_s):
    override = overrides.starting("m/b1", LAUNCH, served_s)
    overrides.began("m/b1", override)
    return dict(override.changes.args)


@pytest.fixture
def overrides(tmp_path):
    overrides = Overrides(tmp_path)
    overrides.apply("m/b1", LAUNCH, lowered(8192), 1.0)
    return overrides


LOWERED = {"max-model-len": 8192}


def test_after_a_healthy_day_the_next_start_is_as_configured(overrides, tmp_path):
    assert started(overrides, TRIAL_S - 1) == LOWERED
    assert started(overrides, TRIAL_S) == {}
    assert Overrides(tmp_path).of("m/b1", LAUNCH).on_trial
    gone = overrides.served("m/b1", LAUNCH)
    assert gone is not None
    assert gone.told() == "--max-model-len 8192 (lower_max_model_len)"
    assert Overrides(tmp_path).kept == {}


def test_a_trial_that_fails_brings_the_remedies_back_and_the_next_one_waits_longer(overrides):
    assert started(overrides, TRIAL_S) == {}
    assert started(overrides, 0.0) == LOWERED  # the trial did not serve
    assert overrides.served("m/b1", LAUNCH) is None
    assert started(overrides, TRIAL_S) == LOWERED
    assert started(overrides, 2 * TRIAL_S) == {}


def test_a_remedy_found_in_a_trial_is_added_to_those_before(overrides):
    assert started(overrides, TRIAL_S) == {}
    after = overrides.apply("m/b1", LAUNCH, EAGER, 2.0)
    assert dict(after.changes.args) == {**LOWERED, "enforce-eager": True}
    assert after.failed_trials == 1


EAGER = Cure(Remedy.ENFORCE_EAGER, Changes({"enforce-eager": True}), "graphs")


def test_a_start_that_comes_to_a_good_end_without_its_remedy_did_not_need_it(overrides, tmp_path):
    gone = overrides.served("m/b1", LAUNCH)
    assert gone is not None
    assert gone.told() == "--max-model-len 8192 (lower_max_model_len)"
    assert Overrides(tmp_path).kept == {}


def test_remedies_that_the_start_had_stay_where_a_later_one_was_not_needed(overrides, tmp_path):
    assert started(overrides, 0.0) == LOWERED
    overrides.apply("m/b1", LAUNCH, EAGER, 2.0)
    again = Overrides(tmp_path)  # another gateway goes on
    gone = again.served("m/b1", LAUNCH)
    assert gone is not None
    assert gone.told() == "--enforce-eager True (enforce_eager)"
    assert started(again, 0.0) == LOWERED
    assert again.served("m/b1", LAUNCH) is None


def test_a_trial_that_serves_after_it_hung_was_a_good_one(overrides):
    assert started(overrides, TRIAL_S) == {}
    overrides.apply("m/b1", LAUNCH, EAGER, 2.0)
    assert overrides.served("m/b1", LAUNCH) is not None
    assert started(overrides, 0.0) == {}


def test_a_start_that_could_not_be_made_is_no_trial(overrides):
    assert started(overrides, 0.0) == LOWERED
    assert overrides.starting("m/b1", LAUNCH, TRIAL_S).on_trial
    assert overrides.served("m/b1", LAUNCH) is None
    assert started(overrides, 0.0) == LOWERED


def test_what_an_operator_drops_while_a_start_is_made_stays_dropped(overrides):
    override = overrides.starting("m/b1", LAUNCH, 0.0)
    overrides.drop("m/b1")
    overrides.began("m/b1", override)
    assert overrides.kept == {}


def test_an_operator_drops_them(overrides, tmp_path):
    assert overrides.drop("m/b1") is not None
    assert overrides.drop("m/b1") is None
    assert started(overrides, 0.0) == {}
    assert Overrides(tmp_path).kept == {}


def test_a_server_without_remedies_has_no_trials(tmp_path):
    overrides = Overrides(tmp_path)
    assert started(overrides, 100 * TRIAL_S) == {}
    assert not overrides.of("m/b1", LAUNCH).on_trial

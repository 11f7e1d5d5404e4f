"""How long starts usually take is known again after a restart of the gateway, for the same start only."""

import logging

import pytest

from gateway.config.models import BackendConfig
from gateway.heal.usual import FILE, UsualTimes
from gateway.launch.launcher import Changes
from gateway.vllmlog.milestones import Stage

NONE = Changes()
TOOK = {Stage.LAUNCHED: 3.004, Stage.LOADING_WEIGHTS: 41.5}


def backend(**more):
    return BackendConfig(name="b1", launch={"command": ["vllm", "serve", "m"], "port": 1} | more)


def test_the_next_gateway_knows_them(tmp_path):
    UsualTimes(tmp_path / "state").learn("m/b1", backend(), NONE, TOOK)
    again = UsualTimes(tmp_path / "state")
    assert again.of("m/b1", backend(), NONE) == {Stage.LAUNCHED: 3.0, Stage.LOADING_WEIGHTS: 41.5}
    assert again.of("m/b2", backend(), NONE) == {}
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600


def test_the_last_good_start_counts(tmp_path):
    usual = UsualTimes(tmp_path)
    usual.learn("m/b1", backend(), NONE, TOOK)
    usual.learn("m/b1", backend(), NONE, {Stage.LAUNCHED: 7.0})
    assert usual.of("m/b1", backend(), NONE) == {Stage.LAUNCHED: 7.0}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (backend(command=["vllm", "serve", "n"]), NONE),
        (backend(args={"max-model-len": 1}), NONE),
        (backend(env={"A": "b"}), NONE),
        (backend(gpus=[1]), NONE),
        (backend(), Changes({"enforce-eager": True})),
        (backend(), Changes(env={"NCCL_P2P_DISABLE": "1"})),
        (BackendConfig(name="b1", url="http://h:1", restart={"systemd": "b1.service"}), NONE),
    ],
)
def test_another_way_to_start_inherits_nothing(tmp_path, config, changes):
    usual = UsualTimes(tmp_path)
    usual.learn("m/b1", backend(), NONE, TOOK)
    assert usual.of("m/b1", config, changes) == {}
    assert usual.of("m/b1", backend(on_exit="leave", port=2), NONE) != {}


@pytest.mark.parametrize(
    "text", ["", "[]", "\x00", '{"m/b1": 1}', '{"m/b1": {"base": 1}}', '{"m/b1": {"took_s": {}}}']
)
def test_a_damaged_file_is_told_counts_as_none_and_is_replaced(tmp_path, caplog, text):
    (tmp_path / FILE).write_text(text)
    with caplog.at_level(logging.WARNING):
        usual = UsualTimes(tmp_path)
    (told,) = caplog.records
    assert str(tmp_path / FILE) in told.getMessage()
    assert usual.of("m/b1", backend(), NONE) == {}
    usual.learn("m/b1", backend(), NONE, TOOK)
    assert UsualTimes(tmp_path).of("m/b1", backend(), NONE) != {}


def test_bytes_that_are_no_text_are_told(tmp_path, caplog):
    (tmp_path / FILE).write_bytes(b'{"\xff": 1}')
    assert UsualTimes(tmp_path).of("m/b1", backend(), NONE) == {}
    assert "cannot read" in caplog.text


def test_stages_and_numbers_of_another_version_are_left_out(tmp_path):
    usual = UsualTimes(tmp_path)
    usual.learn("m/b1", backend(), NONE, TOOK)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"launched": 3', '"launched": -3, "docked": 1'))
    assert UsualTimes(tmp_path).of("m/b1", backend(), NONE) == {Stage.LOADING_WEIGHTS: 41.5}


def test_without_a_file_nothing_is_told(tmp_path, caplog):
    assert UsualTimes(tmp_path).of("m/b1", backend(), NONE) == {}
    assert not caplog.records


def test_times_that_cannot_be_written_are_known_until_the_end(tmp_path, caplog):
    (tmp_path / "state").write_text("a file where the folder should be")
    usual = UsualTimes(tmp_path / "state")
    usual.learn("m/b1", backend(), NONE, TOOK)
    assert usual.of("m/b1", backend(), NONE) != {}
    assert "cannot save" in caplog.text

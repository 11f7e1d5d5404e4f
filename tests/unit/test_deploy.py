"""The files of deploy/ agree with the defaults of the settings."""

import pathlib
import re

from gateway.config.models import ShutdownConfig
from gateway.config.supervision import SupervisionConfig
from gateway.launch.process import longest_stop_s

SYSTEMD = pathlib.Path(__file__).parents[2] / "deploy" / "systemd"


def seconds(unit, name):
    (value,) = re.findall(rf"^{name}=(\d+)$", (SYSTEMD / unit).read_text(), re.MULTILINE)
    return int(value)


def test_systemd_waits_until_requests_and_launched_servers_have_ended():
    longest_s = ShutdownConfig().grace + longest_stop_s(SupervisionConfig().stop_grace)
    assert longest_s < seconds("vllm-gateway.service", "TimeoutStopSec") <= longest_s + 30


def test_a_unit_of_vllm_is_killed_no_later_than_the_gateway_waits_for():
    assert seconds("vllm@.service", "TimeoutStopSec") <= SupervisionConfig().stop_grace

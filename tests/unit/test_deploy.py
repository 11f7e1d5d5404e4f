"""The files of deploy/ agree with the defaults of the settings."""

import pathlib
import re

from gateway.cli.console import Exit
from gateway.config.check import NGINX_BODY_BYTES, check_meaning
from gateway.config.models import Config, ShutdownConfig
from gateway.config.supervision import SupervisionConfig
from gateway.launch.gpus import FREED_S
from gateway.launch.members import KILLED_S, REST_GRACE_S

SYSTEMD = pathlib.Path(__file__).parents[2] / "deploy" / "systemd"


def seconds(unit, name):
    (value,) = re.findall(rf"^{name}=(\d+)$", (SYSTEMD / unit).read_text(), re.MULTILINE)
    return int(value)


def test_systemd_waits_until_requests_and_launched_servers_have_ended():
    grace_s = SupervisionConfig().stop_grace
    stop_s = grace_s + min(grace_s, REST_GRACE_S) + KILLED_S + FREED_S
    longest_s = ShutdownConfig().grace + stop_s
    assert longest_s < seconds("vllm-gateway.service", "TimeoutStopSec") <= longest_s + 30


def test_a_unit_of_vllm_is_killed_no_later_than_the_gateway_waits_for():
    assert seconds("vllm@.service", "TimeoutStopSec") <= SupervisionConfig().stop_grace


def test_a_gateway_whose_settings_cannot_be_used_is_not_started_again():
    assert seconds("vllm-gateway.service", "RestartPreventExitStatus") == Exit.INVALID_CONFIG


def test_check_warns_of_bodies_that_the_shipped_nginx_file_refuses():
    conf = (SYSTEMD.parent / "nginx" / "gateway.conf").read_text()
    (most,) = re.findall(r"client_max_body_size (\d+)m;", conf)
    assert int(most) * 1024**2 == NGINX_BODY_BYTES

    def warned(size):
        settings = {
            "limits": {"max_body": size},
            "pools": {"m": {"backends": ["http://10.0.0.1:8000"]}},
        }
        return "nginx-body" in [
            each.code for each in check_meaning(Config.model_validate(settings))
        ]

    assert not warned("64MiB")
    assert warned("65MiB")

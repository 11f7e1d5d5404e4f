"""The container and Kubernetes files of deploy/ fit the gateway, its settings and each other."""

import functools
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import tomllib

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from gateway.config.load import check_text
from gateway.config.units import parse_duration, parse_size

ROOT = pathlib.Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
MANIFEST = ROOT / "deploy" / "kubernetes" / "vllm-gateway.yaml"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
HEALTH_CHECK = json.loads(re.search(r"^HEALTHCHECK .*\\\n +CMD (.+)$", DOCKERFILE, re.M)[1])
COMPOSE = YAML(typ="safe").load(DOCKER / "compose.yaml")
DOCUMENTS = list(YAML(typ="safe").load_all(MANIFEST))
SECRETS = {
    "GATEWAY_ADMIN_TOKEN": "0123456789abcdef0123456789abcdef",
    "GATEWAY_PEPPER": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
    "VLLM_URL": "http://10.0.0.11:8000",
    "VLLM_KEY": "",
}


def document(kind, name="vllm-gateway"):
    (found,) = [
        each for each in DOCUMENTS if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


POD = document("Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(COMPOSED,) = [COMPOSE["services"]["gateway"]]
SETTINGS = {
    "docker": (DOCKER / "settings" / "gateway.yaml").read_text(),
    "kubernetes": document("ConfigMap")["data"]["gateway.yaml"],
}


def settings_of(name, tmp_path, env=SECRETS):
    return check_text(SETTINGS[name], folder=tmp_path, env=env)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_have_no_finding_once_the_secrets_are_there(name, tmp_path):
    assert settings_of(name, tmp_path).findings == ()


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_secret_is_missing_is_told(name, tmp_path):
    told = " ".join(each.message for each in settings_of(name, tmp_path, env={}).findings)
    assert "GATEWAY_ADMIN_TOKEN" in told


@pytest.mark.parametrize("name", SETTINGS)
def test_both_listeners_are_reachable_from_outside_the_container_and_where_the_files_say(
    name, tmp_path
):
    config = settings_of(name, tmp_path).loaded.config
    ports = [config.listen.port, config.admin.listen.port]
    assert not config.listen.loopback
    assert not config.admin.listen.loopback
    assert re.search(r"^EXPOSE (\d+) (\d+)$", DOCKERFILE, re.M).groups() == tuple(map(str, ports))
    assert [each["containerPort"] for each in CONTAINER["ports"]] == ports
    assert [int(each.rpartition(":")[2]) for each in COMPOSED["ports"]] == ports
    assert f"('127.0.0.1', {ports[1]}, " in " ".join(HEALTH_CHECK)


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers with one status."""

    def __init__(self, *words, status):
        self.status = status
        super().__init__(*words)

    def do_GET(self):
        self.send_response(self.status if self.path == "/livez" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def healthy(port, **env):
    command = [each.replace("9090", str(port)) for each in HEALTH_CHECK[1:]]
    ended = subprocess.run(
        [sys.executable, *command], env=os.environ | env, capture_output=True, check=False
    )
    return ended.returncode == 0


@pytest.mark.parametrize(("status", "well"), [(200, True), (503, False)])
def test_the_health_check_of_the_image_asks_the_gateway_and_no_proxy(status, well):
    answering = functools.partial(Answering, status=status)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answering) as server:
        threading.Thread(target=server.serve_forever).start()
        port = server.server_port
        found = healthy(port), healthy(port, http_proxy="http://127.0.0.1:9", no_proxy="")
        server.shutdown()
    assert found == (well, well)
    assert not healthy(port)  # nobody answers any more


def test_whether_a_pod_lives_is_asked_where_busy_connections_do_not_matter():
    """`test_lifecycle.test_it_lives_while_all_connections_are_at_work` has why."""
    for probe in ("startupProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"] == {"path": "/livez", "port": "admin"}
    assert CONTAINER["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_written_is_written_to_the_one_folder_that_is_writable(name, tmp_path):
    config = settings_of(name, tmp_path).loaded.config
    (folder,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.M)
    assert str(config.state) == folder
    assert config.keys.shared or config.keys.file.is_relative_to(folder)
    assert f"gateway:{folder}" in COMPOSED["volumes"]
    assert "./settings:/etc/vllm-gateway:ro" in COMPOSED["volumes"]
    assert folder in [each["mountPath"] for each in CONTAINER["volumeMounts"]]
    assert COMPOSED["read_only"] is True
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True


def test_containers_are_killed_only_after_running_streams_had_their_time(tmp_path):
    given_s = {
        "docker": parse_duration(COMPOSED["stop_grace_period"]),
        "kubernetes": POD["terminationGracePeriodSeconds"],
    }
    for name, seconds in given_s.items():
        grace_s = settings_of(name, tmp_path).loaded.config.shutdown.grace
        assert grace_s < seconds <= grace_s + 60


def test_a_pod_may_use_as_much_memory_as_bodies_can_take(tmp_path):
    config = settings_of("kubernetes", tmp_path).loaded.config
    limit = parse_size(CONTAINER["resources"]["limits"]["memory"].replace("Gi", "GiB"))
    assert limit >= 3 * config.limits.bodies


def test_the_image_is_built_from_what_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"install --no-cache-dir '\.\[(.*)\]'", DOCKERFILE)
    assert set(extras.split(",")) == set(project["optional-dependencies"]) - {"nvidia"}
    (version,) = re.findall(r"^ARG PYTHON_IMAGE=python:([\d.]+)-slim", DOCKERFILE, re.M)
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    assert list(project["scripts"]) == re.findall(r'^ENTRYPOINT \["(.*)"\]$', DOCKERFILE, re.M)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M)
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text()
    for path in " ".join(copied).split():
        assert (ROOT / path).exists()
        assert f"!{path}\n" in ignored


def test_the_user_of_the_image_is_the_one_that_the_pod_runs_as():
    (number,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.M)
    assert POD["securityContext"]["runAsUser"] == int(number)
    assert f"--uid {number} " in DOCKERFILE


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("place", range(len(DOCUMENTS)), ids=lambda at: DOCUMENTS[at]["kind"])
def test_kubernetes_knows_every_field(place, version):
    kubernetes_validate.validate(DOCUMENTS[place], version, strict=True)


def test_kubernetes_would_refuse_a_field_that_it_does_not_know():
    wrong = document("Deployment") | {"spec": document("Deployment")["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, "1.29", strict=True)


def test_services_and_the_disruption_budget_select_the_pods():
    labels = document("Deployment")["spec"]["template"]["metadata"]["labels"]
    for name in ("vllm-gateway", "vllm-gateway-admin"):
        service = document("Service", name)["spec"]
        assert service["selector"].items() <= labels.items()
        named = {each["name"] for each in CONTAINER["ports"]}
        assert {each["targetPort"] for each in service["ports"]} <= named
    assert document("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels


def test_a_node_can_be_drained_while_no_gateway_is_ready():
    """None is ready while no backend serves, and a budget by itself protects what is not ready, too."""
    budget = document("PodDisruptionBudget")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_prometheus_finds_each_pod_also_one_that_is_not_ready():
    """None is ready while no backend serves (`Process.readiness`), which is when people look."""
    service = document("Service", "vllm-gateway-admin")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    sample = (ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text()
    ((finds,),) = YAML(typ="safe").load(re.search(r"# (dns_sd_configs: .+)", sample)[1]).values()
    assert finds["names"] == ["vllm-gateway-admin.default"]
    assert (finds["type"], finds["port"]) == ("A", service["ports"][0]["port"])


def test_the_account_may_do_what_a_restart_of_a_pod_needs():
    rules = {each["resources"][0]: each["verbs"] for each in document("Role")["rules"]}
    assert rules == {"pods": ["get", "list", "delete"], "pods/log": ["get"]}
    assert document("RoleBinding")["subjects"][0]["name"] == POD["serviceAccountName"]

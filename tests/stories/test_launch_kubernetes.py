"""The launcher of pods and workloads, against a Kubernetes API on a loopback socket."""

import contextlib
import json
import sys

import pytest
import uvloop
from pydantic import ValidationError

from gateway.config.supervision import RestartConfig
from gateway.launch.kubernetes import KubernetesLauncher
from gateway.launch.launcher import Changes, LaunchError, Obstacle, Runs, Seen, Superseded
from tests.stories.fakes import KubeApi, serving, status
from tests.stories.stubs import free_url

PLAIN = Changes()


@contextlib.asynccontextmanager
async def cluster(folder, monkeypatch, api, target="ml/vllm-0"):
    pytest.importorskip("kubernetes_asyncio", reason="the extra `kubernetes` is not installed")
    async with serving(api.app, port=0) as server:
        port = server.servers[0].sockets[0].getsockname()[1]
        named = [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}]
        settings = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": named,
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(settings))
        monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        launcher = KubernetesLauncher(target)
        try:
            yield launcher
        finally:
            await launcher.close()


def test_a_pod_is_deleted_once_and_its_controller_makes_it_anew(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.pod("vllm-0")
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            first = await launcher.look()
            assert first == Seen("uid-1", Runs.RUNNING)
            assert first.began_at == 1767225600.0
            assert await launcher.restart("uid-1", grace_s=7, changes=PLAIN) is None
            assert api.deleted == [("vllm-0", 7)]
            assert await launcher.look() == Seen()
            api.pod("vllm-0")
            assert await launcher.look() == Seen("uid-2", Runs.RUNNING)
            for stale in ("uid-1", None):
                with pytest.raises(Superseded):
                    await launcher.restart(stale, grace_s=7, changes=PLAIN)
            with pytest.raises(LaunchError, match="scale"):
                await launcher.stop("uid-2", grace_s=7)
            assert len(api.deleted) == 1

    uvloop.run(story())


def test_a_pod_without_a_controller_is_not_deleted(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.pod("vllm-0", owned=False)
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            with pytest.raises(LaunchError, match="no controller"):
                await launcher.restart("uid-1", grace_s=7, changes=PLAIN)
            assert api.deleted == []

    uvloop.run(story())


@pytest.mark.parametrize("kind", ["deployment", "statefulset"])
def test_a_workload_is_rolled_out_once(tmp_path, monkeypatch, kind):
    async def story():
        api = KubeApi()
        api.workload(f"{kind}s", "vllm")
        api.pod("a")
        api.pod("other", labels={"app": "db"})
        async with cluster(tmp_path, monkeypatch, api, f"ml/{kind}/vllm") as launcher:
            assert await launcher.look() == Seen("uid-1", Runs.RUNNING)
            # A change of its status in between refuses the first patch; the second one holds.
            api.before_patch = lambda: (
                api.bump(f"{kind}s", "vllm"),
                setattr(api, "before_patch", None),
            )
            assert await launcher.restart("uid-1", grace_s=7, changes=PLAIN) is None
            assert [set(each) for each in api.patched] == [{"kubectl.kubernetes.io/restartedAt"}]
            # The old pod serves until the new one does.
            assert (await launcher.look()).incarnation == "uid-1"
            with pytest.raises(Superseded, match="rollout"):
                await launcher.restart("uid-1", grace_s=7, changes=PLAIN)
            del api.pods["other"]
            api.finish_rollout(f"{kind}s", "vllm")
            assert await launcher.look() == Seen("uid-3", Runs.RUNNING)
            with pytest.raises(Superseded):
                await launcher.restart("uid-1", grace_s=7, changes=PLAIN)
            assert len(api.patched) == 1

    uvloop.run(story())


def test_a_rollout_by_somebody_else_in_between_is_found_out(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.workload("deployments", "vllm")
        api.pod("a")
        async with cluster(tmp_path, monkeypatch, api, "ml/deployment/vllm") as launcher:

            def rolled_out():
                api.bump("deployments", "vllm")
                api.pods.clear()
                api.pod("b")

            api.before_patch = rolled_out
            with pytest.raises(Superseded):
                await launcher.restart("uid-1", grace_s=7, changes=PLAIN)
            assert api.patched == []

    uvloop.run(story())


def test_a_selector_of_every_form_is_asked_for(tmp_path, monkeypatch):
    terms = [
        {"key": "tier", "operator": "In", "values": ["a", "b"]},
        {"key": "zone", "operator": "NotIn", "values": ["c"]},
        {"key": "gpu", "operator": "Exists"},
        {"key": "old", "operator": "DoesNotExist"},
    ]

    async def story():
        api = KubeApi()
        selector = {"matchLabels": {"app": "vllm"}, "matchExpressions": terms}
        api.workload("deployments", "vllm", selector)
        async with cluster(tmp_path, monkeypatch, api, "ml/deployment/vllm") as launcher:
            assert (await launcher.look()).state is Runs.PENDING
            assert api.asked[-1] == "app=vllm,tier in (a,b),zone notin (c),gpu,!old"

    uvloop.run(story())


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([status(running={}, restarts=2)], ("uid-1+2", Runs.RUNNING, None, "")),
        (
            [status(waiting={"reason": "CrashLoopBackOff"}, restarts=1, last={"terminated": {"exitCode": 1}})],
            ("uid-1+1", Runs.PENDING, 1, "CrashLoopBackOff"),
        ),
        (
            [status(terminated={"exitCode": 137, "reason": "OOMKilled"})],
            ("uid-1", Runs.PENDING, 137, "OOMKilled"),
        ),
        (
            [status(waiting={"reason": "ContainerCreating"})],
            ("uid-1", Runs.PENDING, None, "ContainerCreating"),
        ),
        (
            [status(waiting={"reason": "ImagePullBackOff"})],
            ("uid-1", Runs.PENDING, None, "ImagePullBackOff"),
        ),
        ([], ("uid-1", Runs.PENDING, None, "")),
    ],
)  # fmt: skip
def test_states_are_told_as_they_are(tmp_path, monkeypatch, statuses, expected):
    async def story():
        api = KubeApi()
        api.pod("vllm-0")["status"]["containerStatuses"] = statuses
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            seen = await launcher.look()
            assert (seen.incarnation, seen.state, seen.exit_code) == expected[:3]
            assert expected[3] in seen.detail

    uvloop.run(story())


def test_a_pod_that_nobody_restarts_has_ended(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        pod = api.pod("vllm-0")
        pod["status"] = {
            "phase": "Failed",
            "containerStatuses": [status(terminated={"exitCode": 1, "reason": "Error"})],
        }
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            assert await launcher.look() == Seen("uid-1", Runs.ENDED, 1)

    uvloop.run(story())


def test_a_workload_that_is_scaled_to_zero_is_absent(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.workload("deployments", "vllm")
        async with cluster(tmp_path, monkeypatch, api, "ml/deployment/vllm") as launcher:
            assert (await launcher.look()).state is Runs.PENDING
            api.workloads["deployments", "vllm"]["spec"]["replicas"] = 0
            assert (await launcher.look()).state is Runs.ABSENT

    uvloop.run(story())


def test_a_slow_image_then_a_crash_that_the_kubelet_restarts_are_its_own_business(
    tmp_path, monkeypatch
):
    async def story():
        api = KubeApi()
        api.pod("vllm-0", waits="ContainerCreating")
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            shown = []

            async def look():
                seen = await launcher.look()
                shown.append((seen.incarnation, seen.state, seen.exit_code, seen.own_restarts))

            await look()
            api.kubelet("vllm-0", waits="ImagePullBackOff")
            await look()
            api.kubelet("vllm-0")
            await look()
            api.kubelet("vllm-0", ended=1, waits="CrashLoopBackOff")
            await look()
            api.kubelet("vllm-0")
            await look()
            assert shown == [
                ("uid-1", Runs.PENDING, None, 0),
                ("uid-1", Runs.PENDING, None, 0),
                ("uid-1", Runs.RUNNING, None, 0),
                ("uid-1", Runs.PENDING, 1, 0),
                ("uid-1+1", Runs.RUNNING, None, 1),
            ]

    uvloop.run(story())


def test_a_sidecar_is_not_the_server(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        pod = api.pod("vllm-0")
        pod["status"]["containerStatuses"] = [
            status(name="sidecar", running={}, restarts=4),
            status(waiting={"reason": "CrashLoopBackOff"}),
        ]
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            seen = await launcher.look()
            assert (seen.incarnation, seen.state) == ("uid-1", Runs.PENDING)

    uvloop.run(story())


def test_scaling_a_workload_makes_no_other_server_of_it(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.workload("deployments", "vllm", replicas=2)
        api.pod("a")
        api.pod("b")
        async with cluster(tmp_path, monkeypatch, api, "ml/deployment/vllm") as launcher:
            assert await launcher.look() == Seen("r1", Runs.RUNNING)
            api.workload("deployments", "vllm", replicas=3)
            api.pod("c", waits="ContainerCreating")
            seen = await launcher.look()
            assert (seen.incarnation, seen.state) == ("r1", Runs.RUNNING)
            api.workload("deployments", "vllm", replicas=2)
            del api.pods["a"], api.pods["c"]
            api.pod("d")
            api.kubelet("b", ended=1, waits="CrashLoopBackOff")
            seen = await launcher.look()
            assert (seen.incarnation, seen.state) == ("r1", Runs.RUNNING)

    uvloop.run(story())


def test_a_pod_that_was_evicted_is_not_what_its_workload_is(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.workload("deployments", "vllm")
        api.pod("a")["status"] = {"phase": "Failed", "reason": "Evicted"}
        async with cluster(tmp_path, monkeypatch, api, "ml/deployment/vllm") as launcher:
            assert (await launcher.look()).state is Runs.PENDING
            api.pod("b", waits="ContainerCreating")
            assert (await launcher.look()).incarnation == "uid-2"

    uvloop.run(story())


def test_restarts_by_the_kubelet_are_counted(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.pod("vllm-0")["status"]["containerStatuses"] = [status(running={}, restarts=2)]
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            assert (await launcher.look()).own_restarts == 2

    uvloop.run(story())


def test_a_pod_that_waits_for_a_node_or_is_being_deleted_says_so(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        pod = api.pod("vllm-0")
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            seen = await launcher.look()
            assert (seen.state, seen.detail) == (Runs.PENDING, "vllm-0 is being deleted")
            del pod["metadata"]["deletionTimestamp"]
            said = "0/3 nodes: Insufficient nvidia.com/gpu"
            pod["status"] = {
                "conditions": [{"type": "PodScheduled", "status": "False", "message": said}]
            }
            assert "Insufficient nvidia.com/gpu" in (await launcher.look()).detail

    uvloop.run(story())


def test_its_log_is_the_main_containers_of_the_newest_pod(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.workload("deployments", "vllm")
        api.pod("old")
        api.pod("new")
        api.logs = {
            "new/vllm": "".join(f"line {n}\n" for n in range(12_000)),
            "new/sidecar": "side\n",
        }
        async with cluster(tmp_path, monkeypatch, api, "ml/deployment/vllm") as launcher:
            text = await launcher.log(10**6)
            assert text.startswith("line 2000\n")
            assert await launcher.log(6) == "11999\n"
            named = {"kubectl.kubernetes.io/default-container": "sidecar"}
            api.pods["new"]["metadata"]["annotations"] = named
            assert await launcher.log(100) == "side\n"
            api.pods.clear()
            assert await launcher.log(100) == ""

    uvloop.run(story())


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        (403, "Forbidden", "role that may get, list and delete pods.* and patch deployments"),
        (401, "Unauthorized", "401"),
        (404, "NotFound", "kubectl get deployments -n ml"),
        (500, "InternalError", "answered 500"),
    ],
)
def test_refusals_say_what_to_do(tmp_path, monkeypatch, code, reason, says):
    async def story():
        api = KubeApi()
        api.refusal = (code, reason)
        async with cluster(tmp_path, monkeypatch, api, "ml/deployment/vllm") as launcher:
            with pytest.raises(LaunchError, match=says):
                await launcher.look()
            with pytest.raises(LaunchError, match="manifest"):
                await launcher.restart(None, grace_s=1, changes=Changes({"seed": 1}))

    uvloop.run(story())


def test_a_token_that_ended_is_read_anew_and_is_no_missing_role(tmp_path, monkeypatch):
    async def story():
        api = KubeApi()
        api.pod("vllm-0")
        async with cluster(tmp_path, monkeypatch, api) as launcher:
            seen = await launcher.look()
            written = tmp_path / "kubeconfig"
            written.write_text(written.read_text().replace('"t"', '"another"'))
            api.refusal = (401, "Unauthorized")
            with pytest.raises(LaunchError, match="does not accept the gateway's token") as refused:
                await launcher.look()
            assert refused.value.obstacle is Obstacle.TRANSIENT
            api.refusal = None
            assert await launcher.look() == seen
            assert api.tokens[0] == "Bearer t"
            assert api.tokens[-1] == "Bearer another"

    uvloop.run(story())


def test_an_api_server_that_went_away_is_told(tmp_path, monkeypatch):
    async def story():
        async with cluster(tmp_path, monkeypatch, KubeApi()) as launcher:
            assert await launcher.look() == Seen()
            text = (tmp_path / "kubeconfig").read_text()
            settings = json.loads(text)
            settings["clusters"][0]["cluster"]["server"] = free_url()
            (tmp_path / "kubeconfig").write_text(json.dumps(settings))
            other = KubernetesLauncher("ml/vllm-0")
            with pytest.raises(LaunchError, match="cannot be reached"):
                await other.look()
            await other.close()

    uvloop.run(story())


def test_no_way_into_a_cluster_is_told(tmp_path, monkeypatch):
    pytest.importorskip("kubernetes_asyncio", reason="the extra `kubernetes` is not installed")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LaunchError, match="cannot find a cluster"):
        uvloop.run(KubernetesLauncher("ml/vllm-0").look())


def test_the_missing_library_is_told(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kubernetes_asyncio")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)  # as if it were not installed
    with pytest.raises(LaunchError, match=r"vllm-gateway\[kubernetes\]"):
        uvloop.run(KubernetesLauncher("ml/vllm-0").look())


@pytest.mark.parametrize("target", ["a", "a/b/c", "a/node/b", "a/../b", "A/b", "a/b?x", "", "/b"])
def test_only_names_of_objects_reach_a_path(target):
    with pytest.raises(ValidationError):
        RestartConfig(kubernetes=target)

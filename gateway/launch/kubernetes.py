"""A server in Kubernetes: one pod, or the pods of a deployment or a stateful set.

A pod is deleted, and its controller makes a new one. A deployment or stateful set is restarted as by
`kubectl rollout restart`, with an annotation of its template. The incarnation is the pod's UID;
a `+n` counts the kubelet's restarts inside the pod, each of which is a new process. A workload of
several replicas is named by its revision. Needs the extra `kubernetes`, and a role that may get, list
and delete pods, read their log, and get and patch the workload.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from gateway.core.aio import InTime
from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Obstacle,
    Seen,
    Superseded,
    check_order,
)
from gateway.launch.pods import (
    is_rolling_out,
    main_container,
    newest,
    replicas,
    seen_pod,
    seen_workload,
    selector_text,
)

_CALL_S: Final = 30.0
# Enough for the tracebacks of some hundred requests that died; the cause stands above them.
_LOG_LINES: Final = 10_000
_TRIES: Final = 3  # a workload's status changes often, and a patch of an older version is refused
_RESTARTED_AT: Final = "kubectl.kubernetes.io/restartedAt"
_MERGE: Final = "application/strategic-merge-patch+json"
_NOT_FOUND, _CONFLICT, _INVALID = 404, 409, 422
_UNAUTHORIZED, _FORBIDDEN = 401, 403


@dataclass(frozen=True, slots=True)
class Target:
    """What is restarted."""

    namespace: str
    kind: str  # pod, deployment, statefulset
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class KubernetesLauncher:
    """Restarts one pod or workload, whose name the settings have found valid: it stands in paths."""

    launches = False

    def __init__(self, target: str) -> None:
        namespace, *kind, name = target.split("/")
        self.target = Target(namespace, kind[0] if kind else "pod", name)
        self._client: Any = None
        self._former: Any = None  # whose token was not accepted; calls may still be under way
        self._library: Any = None
        self._broken: Any = OSError  # the connection errors of the library's HTTP client
        self._lock = asyncio.Lock()

    async def look(self) -> Seen:
        """Return what runs; a workload is RUNNING while any pod runs that is not being deleted."""
        async with self._api() as api:
            if self.target.kind != "pod":
                return await self._look_at(api, await self._workload(api, "read"))
            pods = await self._pods(api)
        return seen_pod(pods[0]) if pods else Seen()

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        """Have a new pod made, and return None: it comes when there is room for it.

        Raises:
            Superseded: another incarnation runs, or came between looking and acting.
            LaunchError: the API server refused, or a pod has no controller to make it anew.
        """
        changes.refuse(f"{self.target}: its command line is in its manifest; change it there")
        async with self._api() as api:
            if self.target.kind == "pod":
                await self._delete(api, expected, grace_s)
            else:
                await self._roll_out(api, expected)
        return None

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        """Refuse: a controller would make a new pod, and the number of pods is its owner's decision."""
        raise LaunchError(
            f"{self.target} is kept running by Kubernetes; to stop it, scale its workload down",
            Obstacle.CANNOT_HELP,
        )

    async def log(self, max_bytes: int) -> str:
        """Return the end of the newest pod's log; of its main container, where it has several."""
        async with self._api() as api:
            pods = await self._pods(api)
            if not pods or max_bytes <= 0:
                return ""
            pod = newest(pods)
            text = await self._core(api).read_namespaced_pod_log(
                pod.metadata.name,
                self.target.namespace,
                container=main_container(pod),
                tail_lines=_LOG_LINES,
            )
        return str(text).encode()[-max_bytes:].decode(errors="ignore")

    async def close(self) -> None:
        """Close the connections to the API server."""
        clients, self._former, self._client = (self._former, self._client), None, None
        for each in clients:
            if each is not None:
                await each.close()

    # --- calls to the API -------------------------------------------------------------------------

    async def _delete(self, api: Any, expected: Incarnation | None, grace_s: float) -> None:
        pods = await self._pods(api)
        check_order(str(self.target), seen_pod(pods[0]) if pods else Seen(), expected)
        if not pods:
            raise LaunchError(f"there is no {self.target}, and no controller has recreated it")
        (pod,) = pods
        if not any(owner.controller for owner in pod.metadata.owner_references or ()):
            raise LaunchError(
                f"{self.target} has no controller that would recreate it; put it into a"
                " deployment or stateful set",
                Obstacle.CANNOT_HELP,
            )
        options = self._library.V1DeleteOptions(
            grace_period_seconds=round(grace_s),
            preconditions=self._library.V1Preconditions(uid=pod.metadata.uid),
        )
        await self._core(api).delete_namespaced_pod(
            self.target.name, self.target.namespace, body=options
        )

    async def _roll_out(self, api: Any, expected: Incarnation | None) -> None:
        for tries_left in reversed(range(_TRIES)):
            workload = await self._workload(api, "read")
            check_order(str(self.target), await self._look_at(api, workload), expected)
            if is_rolling_out(workload):
                raise Superseded(f"{self.target}: a rollout goes on; nothing was done")
            at = datetime.now(UTC).isoformat(timespec="seconds")
            patch = {
                "metadata": {"resourceVersion": workload.metadata.resource_version},
                "spec": {"template": {"metadata": {"annotations": {_RESTARTED_AT: at}}}},
            }
            try:
                await self._workload(api, "patch", body=patch, _content_type=_MERGE)
                return
            except self._library.ApiException as error:
                if error.status != _CONFLICT or not tries_left:
                    raise

    async def _look_at(self, api: Any, workload: Any) -> Seen:
        return seen_workload(await self._pods(api, workload), replicas(workload))

    async def _pods(self, api: Any, workload: Any = None) -> list[Any]:
        core, namespace = self._core(api), self.target.namespace
        if self.target.kind == "pod":
            try:
                return [await core.read_namespaced_pod(self.target.name, namespace)]
            except self._library.ApiException as error:
                if error.status != _NOT_FOUND:
                    raise
                return []  # deleted, and the controller has not made a new one yet
        workload = workload or await self._workload(api, "read")
        listed = await core.list_namespaced_pod(
            namespace, label_selector=selector_text(workload.spec.selector)
        )
        return list(listed.items)

    async def _workload(self, api: Any, verb: str, **more: Any) -> Any:
        kind = {"deployment": "deployment", "statefulset": "stateful_set"}[self.target.kind]
        call = getattr(self._library.AppsV1Api(api), f"{verb}_namespaced_{kind}")
        return await call(self.target.name, self.target.namespace, **more)

    def _core(self, api: Any) -> Any:
        return self._library.CoreV1Api(api)

    @asynccontextmanager
    async def _api(self) -> AsyncIterator[Any]:
        """Yield the client, and turn its errors into messages for people."""
        async with self._lock:
            if self._client is None:
                await self._open()
        library, client = self._library, self._client
        try:
            async with InTime(_CALL_S):
                yield client
        except TimeoutError as error:
            raise LaunchError(
                f"the Kubernetes API did not answer for {self.target} within {_CALL_S:.0f} s"
            ) from error
        except library.ApiException as error:
            if error.status == _CONFLICT:
                raise Superseded(
                    f"{self.target} was changed or recreated in the meantime"
                ) from error
            if error.status == _UNAUTHORIZED:
                await self._leave(client)
            hopeless = error.status in (_FORBIDDEN, _NOT_FOUND, _INVALID)
            raise LaunchError(
                f"{self.target}: {_refusal(error, self.target)}",
                Obstacle.CANNOT_HELP if hopeless else Obstacle.TRANSIENT,
            ) from error
        except (self._broken, OSError) as error:
            raise LaunchError(
                f"the Kubernetes API cannot be reached for {self.target}: {error}"
            ) from error

    async def _leave(self, client: Any) -> None:
        """Have the next call read the kubeconfig anew: a token ended, and that may have another."""
        if self._client is client:
            former, self._former, self._client = self._former, client, None
            if former is not None:
                await former.close()

    async def _open(self) -> None:
        try:
            self._library = importlib.import_module("kubernetes_asyncio.client")
            settings: Any = importlib.import_module("kubernetes_asyncio.config")
            self._broken = importlib.import_module("aiohttp").ClientError
        except ImportError as error:
            raise LaunchError(
                f"{self.target}: kubernetes-asyncio is not installed;"
                " `pip install 'vllm-gateway[kubernetes]'`",
                Obstacle.CANNOT_HELP,
            ) from error
        configuration = self._library.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ:
                settings.load_incluster_config(client_configuration=configuration)
            else:
                await settings.load_kube_config(
                    config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration
                )
        except (settings.ConfigException, OSError) as error:
            raise LaunchError(
                f"{self.target}: cannot find a cluster ({error}). In a pod, mount its service"
                " account token; elsewhere, set KUBECONFIG to the file that `kubectl` uses",
                Obstacle.CANNOT_HELP,
            ) from error
        self._client = self._library.ApiClient(configuration)


def _refusal(error: Any, target: Target) -> str:
    if error.status == _UNAUTHORIZED:
        return "the cluster does not accept the gateway's token (401): it ended, or is of another cluster"
    if error.status == _FORBIDDEN:
        verbs = "get, list and delete pods, read pods/log"
        if target.kind != "pod":
            verbs += f", get and patch {target.kind}s"
        return f"the cluster refuses the gateway's account ({error.status}); it needs a role that may {verbs}"
    if error.status == _NOT_FOUND:
        return f"there is no such {target.kind}; `kubectl get {target.kind}s -n {target.namespace}`"
    return f"the Kubernetes API answered {error.status} {error.reason}"

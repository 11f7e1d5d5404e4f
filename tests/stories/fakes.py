"""Service managers that speak the real protocols and hold real state: Docker, Kubernetes; a journal."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route


@contextlib.asynccontextmanager
async def serving(app: Starlette, **where: Any) -> AsyncIterator[uvicorn.Server]:
    """Serve an application until the end of the block; `where` is `uds=` or `port=`."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, **where))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    try:
        yield server
    finally:
        await server.shutdown()


# --- Docker ---------------------------------------------------------------------------------------


@dataclass
class Container:
    id: str
    running: bool = True
    starts: int = 1
    restarts: int = 0  # by its restart policy
    tty: bool = False
    exit_code: int = 0
    logs: list[tuple[int, bytes]] = field(default_factory=list)  # stream, text
    state: dict[str, Any] = field(default_factory=dict)  # what a test adds
    events: list[dict[str, Any]] = field(default_factory=list)  # since its last start

    def inspect(self, name: str) -> dict[str, Any]:
        started = f"2026-01-01T00:00:{self.starts:02}.123456789Z"
        state = {
            "Status": "running" if self.running else "exited",
            "Running": self.running,
            "Paused": False,
            "Restarting": False,
            "OOMKilled": False,
            "Dead": False,
            "Pid": 4711 if self.running else 0,
            "ExitCode": 0 if self.running else self.exit_code,
            "Error": "",
            "StartedAt": started if self.starts else "0001-01-01T00:00:00Z",
            "FinishedAt": "0001-01-01T00:00:00Z",
        }
        config = {"Tty": self.tty, "Image": "vllm/vllm-openai"}
        return {
            "Id": self.id,
            "Name": f"/{name}",
            "RestartCount": self.restarts,
            "State": state | self.state,
            "Config": config,
        }


def stop_events() -> list[dict[str, Any]]:
    """What `docker stop` leaves in the daemon's events."""
    return [
        {"Type": "container", "Action": "kill", "Actor": {"Attributes": {"signal": "15"}}},
        {"Type": "container", "Action": "stop", "Actor": {"Attributes": {"image": "vllm"}}},
    ]


class DockerEngine:
    """A Docker daemon: https://docs.docker.com/reference/api/engine/"""

    def __init__(self, newest: str = "1.47", oldest: str = "1.24") -> None:
        self.newest, self.oldest = newest, oldest
        self.containers: dict[str, Container] = {}
        self.orders: list[tuple[str, str, str]] = []  # verb, container, t
        self.refusal: tuple[int, str] | None = None
        self.on_inspect: Any = None
        self.app = Starlette(
            routes=[
                Route("/version", self._version),
                Route("/{version}/containers/{name}/json", self._inspect),
                Route("/{version}/events", self._events),
                Route("/{version}/containers/{name}/logs", self._logs),
                Route("/{version}/containers/{name}/{verb}", self._order, methods=["POST"]),
            ]
        )

    def make(self, name: str, **more: Any) -> Container:
        number = f"{len(self.orders) + len(self.containers) + 1:064x}"
        self.containers[name] = Container(number[::-1], **more)
        return self.containers[name]

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"ApiVersion": self.newest, "MinAPIVersion": self.oldest})

    def _refused(self, request: Request) -> Response | None:
        def number(text: str) -> tuple[int, ...]:
            return tuple(map(int, text.split(".")))

        asked = request.path_params["version"].removeprefix("v")
        if number(asked) > number(self.newest):
            says = (
                f"client version {asked} is too new. Maximum supported API version is {self.newest}"
            )
            return JSONResponse({"message": says}, 400)
        if number(asked) < number(self.oldest):
            says = (
                f"client version {asked} is too old. Minimum supported API version is {self.oldest}"
            )
            return JSONResponse({"message": says}, 400)
        if self._find(request) is None:
            says = f"No such container: {request.path_params['name']}"
            return JSONResponse({"message": says}, 404)
        return None

    def _find(self, request: Request) -> tuple[str, Container] | None:
        wanted = request.path_params["name"]
        for name, container in self.containers.items():
            if wanted == name or container.id.startswith(wanted):
                return name, container
        return None

    async def _inspect(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        name, container = self._find(request)
        told = container.inspect(name)
        if self.on_inspect is not None:
            self.on_inspect()
        return JSONResponse(told)

    async def _events(self, request: Request) -> Response:
        wanted = json.loads(request.query_params["filters"])
        assert float(request.query_params["since"]) <= float(request.query_params["until"])
        found = [
            event
            for container in self.containers.values()
            for event in container.events
            if container.id in wanted["container"] and event["Action"] in wanted["event"]
        ]
        return PlainTextResponse("".join(json.dumps(each) + "\n" for each in found))

    async def _logs(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        _, container = self._find(request)
        if container.tty:
            body = b"".join(text for _, text in container.logs)
            return Response(body, media_type="application/vnd.docker.raw-stream")
        body = b"".join(
            struct.pack(">BxxxL", stream, len(text)) + text for stream, text in container.logs
        )
        return Response(body, media_type="application/vnd.docker.multiplexed-stream")

    async def _order(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        if self.refusal is not None:
            status, says = self.refusal
            return JSONResponse({"message": says}, status)
        name, container = self._find(request)
        verb = request.path_params["verb"]
        self.orders.append((verb, request.path_params["name"], request.query_params.get("t", "")))
        if verb == "stop" and not container.running:
            return Response(status_code=304)
        container.events = [] if verb == "restart" else stop_events()
        if verb == "restart":
            container.starts += 1
        container.running = verb == "restart"
        container.exit_code = 143
        return Response(status_code=204)


# --- Kubernetes -----------------------------------------------------------------------------------

STARTED = "2026-01-01T00:00:00Z"


class KubeApi:
    """An API server with pods, deployments and stateful sets of one namespace."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.workloads: dict[tuple[str, str], dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.deleted: list[tuple[str, Any]] = []
        self.patched: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.refusal: tuple[int, str] | None = None
        self.before_patch: Any = None
        self.revision = 1
        self._uids = itertools.count(1)
        core, apps = "/api/v1/namespaces/{ns}/pods", "/apis/apps/v1/namespaces/{ns}/{kind}/{name}"
        self.app = Starlette(
            routes=[
                Route(core, self._list),
                Route(core + "/{name}", self._read),
                Route(core + "/{name}", self._delete, methods=["DELETE"]),
                Route(core + "/{name}/log", self._log),
                Route(apps, self._workload),
                Route(apps, self._patch, methods=["PATCH"]),
            ]
        )

    def pod(
        self, name: str, *, owned: bool = True, labels: Any = None, waits: str = ""
    ) -> dict[str, Any]:
        """Make a pod of the newest revision: it runs, or its container waits for this reason."""
        owner = {
            "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "vllm", "uid": "o", "controller": True,
        }  # fmt: skip
        uid = f"uid-{next(self._uids)}"
        self.pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "ml",
                "uid": uid,
                "labels": (labels or {"app": "vllm"}) | {"pod-template-hash": f"r{self.revision}"},
                "creationTimestamp": f"2026-01-01T00:00:{int(uid[4:]):02}Z",
                "ownerReferences": [owner] if owned else [],
            },
            "spec": {"containers": [{"name": "vllm"}, {"name": "sidecar"}]},
        }
        self.kubelet(name, waits=waits)
        return self.pods[name]

    def kubelet(self, name: str, *, waits: str = "", ended: int | None = None) -> None:
        """Have the kubelet run a pod's container, or wait; `ended`: how it ended just now."""
        pod = self.pods[name]
        before = pod.get("status", {}).get("containerStatuses", [{}])[0]
        last, restarts = before.get("lastState", {}), before.get("restartCount", 0)
        if ended is not None:
            reason = "OOMKilled" if ended == 137 else "Error"
            last = {"terminated": {"exitCode": ended, "reason": reason}}
        elif last and before["state"].get("waiting") and not waits:
            restarts += 1
        state = {"waiting": {"reason": waits}} if waits else {"running": {"startedAt": STARTED}}
        shown = status(restarts=restarts, last=last, **state)
        phase = "Running" if last or not waits else "Pending"
        pod["status"] = {"phase": phase, "containerStatuses": [shown]}

    def finish_rollout(self, kind: str, name: str) -> None:
        """Have the newest pods run and the older ones go, as a controller does one by one."""
        newest = f"r{self.revision}"
        for each in [*self.pods]:
            if self.pods[each]["metadata"]["labels"]["pod-template-hash"] == newest:
                self.kubelet(each)
            else:
                del self.pods[each]
        count = len(self.pods)
        self.workloads[kind, name]["status"] = {
            "observedGeneration": self.revision, "replicas": count, "updatedReplicas": count,
        }  # fmt: skip

    def workload(self, kind: str, name: str, selector: Any = None, replicas: int = 1) -> None:
        self.workloads[kind, name] = {
            "metadata": {
                "name": name,
                "namespace": "ml",
                "resourceVersion": "1",
                "generation": self.revision,
            },
            "status": {
                "observedGeneration": self.revision,
                "replicas": replicas,
                "updatedReplicas": replicas,
            },
            "spec": {
                "replicas": replicas,
                "selector": selector or {"matchLabels": {"app": "vllm"}},
                "serviceName": "vllm",
                "template": {"metadata": {}, "spec": {"containers": [{"name": "vllm"}]}},
            },
        }

    def bump(self, kind: str, name: str) -> None:
        meta = self.workloads[kind, name]["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)

    def _refused(self, request: Request, there: bool) -> Response | None:
        self.asked.append(f"{request.method} {request.url.path}")
        self.tokens.append(request.headers.get("authorization", ""))
        if self.refusal is not None:
            return failure(*self.refusal)
        return None if there else failure(404, "NotFound")

    async def _list(self, request: Request) -> Response:
        if refused := self._refused(request, True):
            return refused
        wanted = request.query_params["labelSelector"]
        self.asked.append(wanted)
        terms = dict(term.split("=") for term in wanted.split(",") if "=" in term)
        found = [
            each for each in self.pods.values()
            if terms.items() <= each["metadata"]["labels"].items()
        ]  # fmt: skip
        return JSONResponse({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found})

    async def _read(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._refused(request, name in self.pods) or JSONResponse(self.pods[name])

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        if refused := self._refused(request, name in self.pods):
            return refused
        options = await request.json()
        if options["preconditions"]["uid"] != self.pods[name]["metadata"]["uid"]:
            return failure(409, "Conflict")
        self.deleted.append((name, options["gracePeriodSeconds"]))
        return JSONResponse(self.pods.pop(name))

    async def _log(self, request: Request) -> Response:
        name = request.path_params["name"]
        if refused := self._refused(request, name in self.pods):
            return refused
        if "container" not in request.query_params:
            return failure(400, "BadRequest")  # a container name must be specified
        key = f"{name}/{request.query_params['container']}"
        lines = self.logs.get(key, "").splitlines(keepends=True)
        return PlainTextResponse("".join(lines[-int(request.query_params["tailLines"]) :]))

    async def _workload(self, request: Request) -> Response:
        key = request.path_params["kind"], request.path_params["name"]
        return self._refused(request, key in self.workloads) or JSONResponse(self.workloads[key])

    async def _patch(self, request: Request) -> Response:
        key = request.path_params["kind"], request.path_params["name"]
        if refused := self._refused(request, key in self.workloads):
            return refused
        if self.before_patch is not None:
            self.before_patch()
        body = await request.json()
        assert request.headers["content-type"] == "application/strategic-merge-patch+json"
        found = self.workloads[key]
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return failure(409, "Conflict")
        self.patched.append(body["spec"]["template"]["metadata"]["annotations"])
        self.bump(*key)
        self.revision += 1
        found["metadata"]["generation"] = self.revision
        wanted = found["spec"]["selector"].get("matchLabels", {})
        mine = [
            name for name, pod in self.pods.items()
            if wanted.items() <= pod["metadata"]["labels"].items()
        ]  # fmt: skip
        for name in mine:  # the older ones go once these run
            self.pod(f"{name}x", labels=dict(wanted), waits="ContainerCreating")
        found["status"] = {
            "observedGeneration": self.revision, "replicas": 2 * len(mine),
            "updatedReplicas": len(mine),
        }  # fmt: skip
        return JSONResponse(found)


def status(*, restarts: int = 0, name: str = "vllm", last: Any = None, **state: Any) -> dict:
    return {
        "name": name, "ready": True, "restartCount": restarts, "image": "vllm", "imageID": "sha256:0",
        "state": state, "lastState": last or {},
    }  # fmt: skip


def failure(code: int, reason: str) -> Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "code": code,
    }
    return JSONResponse(body, code)


# --- journald --------------------------------------------------------------------------------------

JOURNALCTL = """
import pathlib, sys
folder = pathlib.Path(__file__).parent.parent
(invocation,) = [w.partition("=")[2] for w in sys.argv if w.startswith("_SYSTEMD_INVOCATION_ID=")]
assert "-u" in sys.argv and "cat" in sys.argv
path = folder / f"journal-{invocation}"
count = int(sys.argv[sys.argv.index("-n") + 1])
print("".join(path.read_text().splitlines(keepends=True)[-count:]) if path.exists() else "", end="")
"""


def install_journalctl(folder: pathlib.Path) -> pathlib.Path:
    """Write a stub of journalctl; return the folder to put on PATH."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "journalctl").write_text(f"#!{sys.executable}\n{JOURNALCTL}")
    (programs / "journalctl").chmod(0o755)
    return programs

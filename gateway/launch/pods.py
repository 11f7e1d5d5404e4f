"""Read the status that Kubernetes keeps of the pods of a workload. Pure.

https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.launch.launcher import Incarnation, Runs, Seen

_OVER: Final = frozenset({"Failed", "Succeeded"})  # phases: evicted, or not to be restarted
_OOM_KILLED: Final = "OOMKilled"
_MAIN_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
# Labels that differ between the pods of one rollout and those of the next.
_REVISIONS: Final = ("pod-template-hash", "controller-revision-hash")


def seen_pod(pod: Any) -> Seen:
    """Return the state of one pod; its incarnation is its uid and its restarts."""
    restarts = _restarts(pod)
    state = _runs(pod)
    return Seen(
        incarnation=Incarnation(f"{pod.metadata.uid}+{restarts}" if restarts else pod.metadata.uid),
        state=state,
        exit_code=None if state is Runs.RUNNING else _exit_code(pod),
        detail=_oddity(pod),
        oom_killed=True if state is not Runs.RUNNING and _was_oom_killed(pod) else None,
        own_restarts=restarts,
        began_at=_began_at(pod),
    )


def seen_workload(pods: Sequence[Any], wanted: int) -> Seen:
    """Return the common state of the pods of a deployment or stateful set; `wanted`: its replicas.

    The incarnation of one replica is that of its pod. That of several is their revision: the controller decides
    which pods there are, and a rollout replaces them all. During a rollout, the oldest pods count.
    """
    mine = sorted(
        (pod for pod in pods if pod.status.phase not in _OVER),
        key=lambda pod: (str(pod.metadata.creation_timestamp), pod.metadata.uid),
    )
    staying = [pod for pod in mine if pod.metadata.deletion_timestamp is None]
    if wanted == 0 and not any(_runs(pod) is Runs.RUNNING for pod in staying):
        return Seen(detail="it is scaled to zero")
    if not mine:
        return Seen(state=Runs.PENDING, detail="its controller has not made a pod yet")
    named = staying or mine
    each_seen = [seen_pod(pod) for pod in named]
    running = [seen for seen in each_seen if seen.running]
    told = (running or each_seen)[0]
    odd = next((seen.detail for seen in each_seen if seen.detail), "")
    incarnation = each_seen[0].incarnation
    if wanted > 1 and (revision := _revision(named[0])):
        incarnation = Incarnation(revision)
    return Seen(
        incarnation=incarnation,
        state=told.state,
        exit_code=told.exit_code,
        detail=odd,
        oom_killed=told.oom_killed,
        own_restarts=sum(seen.own_restarts for seen in each_seen),
        began_at=told.began_at,
    )


def is_rolling_out(workload: Any) -> bool:
    """Return whether its controller has not seen the last change yet, or still has pods of an older one."""
    status, asked = workload.status, workload.metadata.generation
    if status is None:
        return False
    if None not in (asked, status.observed_generation) and status.observed_generation < asked:
        return True
    return (status.replicas or 0) > (status.updated_replicas or 0)


def replicas(workload: Any) -> int:
    """Return how many pods it should have; the default of Kubernetes is one."""
    wanted = workload.spec.replicas
    return 1 if wanted is None else int(wanted)


def newest(pods: Sequence[Any]) -> Any:
    """Return the pod that was made last."""
    return max(pods, key=lambda pod: str(pod.metadata.creation_timestamp))


def main_container(pod: Any) -> str:
    """Return the name of the container whose log is the pod's."""
    named = (pod.metadata.annotations or {}).get(_MAIN_CONTAINER)
    return str(named or pod.spec.containers[0].name)


def selector_text(selector: Any) -> str:
    """Return a workload's selector in the form that a list of pods takes."""
    terms = [f"{key}={value}" for key, value in (selector.match_labels or {}).items()]
    for each in selector.match_expressions or ():
        values = f"({','.join(each.values or ())})"
        match each.operator:
            case "In":
                terms.append(f"{each.key} in {values}")
            case "NotIn":
                terms.append(f"{each.key} notin {values}")
            case "Exists":
                terms.append(each.key)
            case _:
                terms.append(f"!{each.key}")
    return ",".join(terms)


# --- one pod --------------------------------------------------------------------------------------


def _runs(pod: Any) -> Runs:
    """Return the state of a pod. The kubelet restarts its containers, unless the pod says otherwise."""
    if pod.metadata.deletion_timestamp is not None:
        return Runs.PENDING
    if pod.status.phase in _OVER:
        return Runs.ENDED
    container = _main_status(pod)
    runs = container is not None and container.state is not None and container.state.running
    return Runs.RUNNING if runs else Runs.PENDING


def _main_status(pod: Any) -> Any:
    """Return the status of the main container; None until the kubelet reports one."""
    name = main_container(pod)
    return next((each for each in pod.status.container_statuses or () if each.name == name), None)


def _began_at(pod: Any) -> float | None:
    """Return when its main container began, in seconds since the epoch; None: it does not run."""
    container = _main_status(pod)
    running = container.state.running if container is not None and container.state else None
    at = running.started_at if running is not None else None
    return None if at is None else float(at.timestamp())


def _restarts(pod: Any) -> int:
    container = _main_status(pod)
    return 0 if container is None else int(container.restart_count or 0)


def _revision(pod: Any) -> str:
    labels = pod.metadata.labels or {}
    return next((labels[name] for name in _REVISIONS if name in labels), "")


def _ends(pod: Any) -> list[Any]:
    """Return how the main container ended, the last time first."""
    container = _main_status(pod)
    states = () if container is None else (container.state, container.last_state)
    return [state.terminated for state in states if state is not None and state.terminated]


def _exit_code(pod: Any) -> int | None:
    return next((int(end.exit_code) for end in _ends(pod)), None)


def _was_oom_killed(pod: Any) -> bool:
    return next((end.reason == _OOM_KILLED for end in _ends(pod)), False)


def _oddity(pod: Any) -> str:
    name = pod.metadata.name
    if pod.metadata.deletion_timestamp is not None:
        return f"{name} is being deleted"
    container = _main_status(pod)
    if _runs(pod) is not Runs.RUNNING and _was_oom_killed(pod):
        return f"{name}: the kernel killed it: out of host memory ({_OOM_KILLED})"
    waiting = container.state.waiting if container is not None and container.state else None
    if waiting is not None:
        why = f": {waiting.message}" if waiting.message else ""
        return f"{name} waits: {waiting.reason}{why}"[:300]
    if pod.status.phase in _OVER and pod.status.reason:
        return f"{name}: {pod.status.reason}: {pod.status.message or ''}".rstrip(": ")[:300]
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{name} has no node: {condition.message or condition.reason}"[:300]
    return ""

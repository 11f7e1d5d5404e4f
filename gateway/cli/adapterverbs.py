"""The verbs of LoRA adapters: where each is, and what an operator wants of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gateway.cli.console import ask_all, print_list
from gateway.cli.operating import Backend, Reason, give_order
from gateway.cli.verbs import LOCAL, AsTable, Server, Token, group

adapters_app = group("Show where LoRA adapters are, or order them loaded or unloaded.")

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="The adapter's model name.")]


@adapters_app.command("list", epilog="Example: vllm-gateway adapters list --adapter sql")
def adapters_list(
    adapter: Annotated[str | None, typer.Option(help="Only this adapter.")] = None,
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Show on which backends each adapter is, where it is being loaded, and why not elsewhere."""
    told = ask_all(server, "/admin/v1/adapters", token)
    rows = [each for each in told.get("data", []) if adapter in (None, each["adapter"])]
    print_list({**told, "data": rows}, output, _row, empty="no adapters")


@adapters_app.command("load", epilog="Example: vllm-gateway adapters load qwen3-8b/b1 sql")
def adapters_load(  # noqa: PLR0913 - the options of a verb
    backend: Backend,
    adapter: Adapter,
    path: Annotated[
        str | None, typer.Option(help="Path on the backend. Default: as configured.")
    ] = None,
    reason: Reason = "",
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Load an adapter on a backend and keep it there, whatever the settings say.

    Exit code 5: nobody said where it is, or no request could reach it.
    """
    order: dict[str, object] = {"adapter": adapter, "path": path, "reason": reason}
    give_order(server, token, f"{backend}/adapters:load", order, output)


@adapters_app.command("unload", epilog="Example: vllm-gateway adapters unload qwen3-8b/b1 sql")
def adapters_unload(
    backend: Backend,
    adapter: Adapter,
    reason: Reason = "",
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """Unload an adapter from a backend once its requests have ended, and keep it out."""
    order: dict[str, object] = {"adapter": adapter, "reason": reason}
    give_order(server, token, f"{backend}/adapters:unload", order, output)


@adapters_app.command("release", epilog="Example: vllm-gateway adapters release qwen3-8b/b1 sql")
def adapters_release(
    backend: Backend,
    adapter: Adapter,
    server: Server = LOCAL,
    token: Token = "",
    output: AsTable = "table",
) -> None:
    """End an order: the settings decide again."""
    give_order(server, token, f"{backend}/adapters:release", {"adapter": adapter}, output)


def _row(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "adapter": told["adapter"],
        "backend": told["backend_id"],
        "state": told["state"].replace("_", " "),
        "loaded by": told["loaded_by"],
        "wanted by": told["wanted_by"],
        "ours": told["in_flight"],
        "path": told["path"],
        "": told["detail"],
    }

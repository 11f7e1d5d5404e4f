"""The verbs that need no GPU: a simulated vLLM server, and a demo of the gateway in front of three."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.console import Exit, VerbError, hint_if_taken


def demo(
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Send requests to it continuously.")
    ] = False,
    fault: Annotated[
        str | None, typer.Option(help="Inject this fault into one backend, such as stall_after:5.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Public port; 0 picks a free one.")
    ] = 8080,
    admin_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Admin port; 0 picks a free one.")
    ] = 9090,
) -> None:
    """Run a gateway with three simulated vLLM backends on loopback. No GPU needed."""
    if fault is not None:
        _known_faults([fault])
    import asyncio

    import uvloop

    from gateway.cli.demo import demo as run

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(port, admin_port, traffic=traffic, fault=fault))


def sim(  # noqa: PLR0913 - the options of a verb
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    uds: Annotated[
        str | None, typer.Option(help="UNIX socket to listen on, instead of a port.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "sim",
    adapter: Annotated[
        list[str] | None, typer.Option(help="Name of a LoRA adapter. Repeatable.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=1, help="Context window, in tokens.")] = 8192,
    fault: Annotated[list[str] | None, typer.Option(help="A fault to inject. Repeatable.")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key that the server requires.")] = None,
) -> None:
    """Run one simulated vLLM server."""
    from gateway.sim.config import SimConfig
    from gateway.sim.server import run

    if (port is None) == (uds is None):
        raise VerbError("use exactly one of --port and --uds", code=Exit.USAGE)
    smallest = SimConfig()
    config = SimConfig(
        model=model,
        adapters=tuple(adapter or ()),
        max_model_len=max_model_len,
        host=host,
        port=port or 0,
        uds=uds,
        api_key=api_key,
        num_blocks=max(smallest.num_blocks, 4 * max_model_len // smallest.block_size),
    )
    _known_faults(fault or [])
    with hint_if_taken("end what listens there, or take a free port with --port 0"):
        run(config, fault or [])


def _known_faults(texts: list[str]) -> None:
    from gateway.sim.faults import Fault

    try:
        for text in texts:
            Fault.parse(text)
    except ValueError as error:
        raise VerbError(str(error), code=Exit.USAGE) from error

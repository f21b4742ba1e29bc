"""A port, the application on it, and an orderly end.

The port is open before the model is loaded, and /health says so. Ctrl-C ends the requests in
flight with an error after the round in progress, so that nobody waits for a long answer to finish;
a second one ends at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from dspark.errors import ResourceError
from dspark.server.app import Settings, create_app
from dspark.server.worker import Model, Worker

GRACE = 5
"""Seconds that open connections have to end."""


class _Server(uvicorn.Server):
    """uvicorn, with the engine stopped as soon as a signal arrives."""

    worker: Worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.worker.stop()
        super().handle_exit(sig, frame)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ResourceError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, proto)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
        except OSError:
            found.close()
            raise
    except OSError as e:
        raise ResourceError(
            f"cannot listen on {host} port {port} ({e.strerror or e}): choose another --host or"
            " --port"
        ) from e
    return found


def serve(
    load: Callable[[], Model],
    settings: Settings,
    listener: socket.socket,
    *,
    on_ready: Callable[[Model], None] = lambda model: None,
) -> None:
    """Answer until a signal comes; raises what `load` raised if it did."""
    with listener:
        app = create_app(load, settings)
        config = uvicorn.Config(
            app,
            log_config=None,
            timeout_graceful_shutdown=GRACE,
            lifespan="on",
            server_header=False,
        )
        server = _Server(config)
        worker = server.worker = app.state.worker

        def failed() -> None:
            server.should_exit = True

        worker.on_ready, worker.on_failure = on_ready, failed
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            server.run(sockets=[listener])
    if worker.failure is not None:
        raise worker.failure

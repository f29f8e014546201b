"""A server in a process of its own: where it may listen, and whether it answers."""

import socket

import httpx


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def answers(address: str) -> bool:
    """Whether the server at an address like http://127.0.0.1:8000 has loaded its model."""
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False

"""A model's server that costs nothing: `python model_server.py SOCKET NAME BYTES [FILE] [FAULT]`, for tests of what
starts, asks and ends such servers.

It is loaded once the file is there. With a fault it ends then, and says it. A request's `hold` names a file without
which it is not answered, and whose name with `.arrived` is there once the request is; `crash` ends the process."""

import asyncio
import json
import os
import signal
import sys

path, name, nbytes, awaited, fault = [*sys.argv[1:], *("", "")][:5]
running = 0
ending = asyncio.Event()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global running
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-l")), 0)
    asked = json.loads(await reader.readexactly(length) or b"{}")
    where = head.split()[1]
    running += 1
    try:
        if where.startswith("/health") and awaited and not os.path.exists(awaited):
            send(writer, 503, {"status": "loading", "progress": {"what": "packing", "done": 1, "total": 2}})
        elif where.startswith("/api/") and asked.get("stream") is True:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n")
            await held(asked, reader)
            writer.write(json.dumps({"message": {"role": "assistant"}, "response": "", "done": True}).encode() + b"\n")
        elif asked.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            writer.write(b"data: begun\n\n")
            await held(asked, reader)
            writer.write(b"data: [DONE]\n\n")
        else:
            await held(asked, reader)
            send(
                writer, 418 if asked.get("refuse") else 200, {"by": name, "asked": asked, "where": where, "head": head}
            )
        await writer.drain()
    finally:
        running -= 1
        writer.close()


def send(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n".encode())
    writer.write(b"Connection: close\r\n\r\n" + body)


async def held(asked: dict, reader: asyncio.StreamReader) -> None:
    if asked.get("crash"):
        os._exit(3)
    if "hold" in asked:
        open(asked["hold"] + ".arrived", "w").close()
    while "hold" in asked and not os.path.exists(asked["hold"]):
        if reader.at_eof():  # the client has left
            raise ConnectionResetError
        await asyncio.sleep(0.01)


async def main() -> None:
    while fault and awaited and not os.path.exists(awaited):
        await asyncio.sleep(0.01)
    if fault:
        print(f"tiermoe: {fault}", file=sys.stderr)
        sys.exit(2)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    server = await asyncio.start_unix_server(answer, path)
    await ending.wait()
    server.close()
    while running:
        await asyncio.sleep(0.01)


asyncio.run(main())

"""A TCP proxy that harms what the target answers: `python proxy.py LISTEN TARGET FLIP_FILE`.

While FLIP_FILE exists, one bit of the byte that stands at the offset written in it is flipped on every
connection.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

PIECE_BYTES = 1 << 16


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def flipped(piece: bytes, start: int, flip_file: Path) -> bytes:
    """`piece`, which begins at offset `start` of its connection."""
    try:
        at = int(flip_file.read_text()) - start
    except FileNotFoundError:
        return piece
    if not 0 <= at < len(piece):
        return piece
    return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flip_file: Path | None) -> None:
    passed = 0
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece if flip_file is None else flipped(piece, passed, flip_file))
        await writer.drain()
        passed += len(piece)
    writer.write_eof()


async def main(listen: str, target: str, flip_file: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind_reader, behind_writer = await asyncio.open_connection(*address(target))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(relay(reader, behind_writer, None))
                    group.create_task(relay(behind_reader, writer, flip_file))
            finally:
                behind_writer.close()
        except (OSError, ExceptionGroup):
            pass  # one side went away: the other one is told by the close
        finally:
            writer.close()

    server = await asyncio.start_server(serve, *address(listen))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))

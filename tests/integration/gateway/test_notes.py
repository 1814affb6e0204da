"""What a gateway tells of a shard that serves mixed only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

NOTE = "This TGI is not one that the overlay was tested with."


async def test_info_and_status_say_why_a_shard_serves_mixed_only(house: Any) -> None:
    view = house.decode.view()
    unhooked = replace(
        view, fingerprint=replace(view.fingerprint, attention="flashdecoding-ipex"), hooked=False, note=NOTE
    )
    house.queue.set_shards([unhooked])
    info = (await house.http.get("/info")).json()
    assert info["notes"] == [f"{view.shard} serves mixed only: {NOTE}"]
    assert info["model_id"] == "fake"
    (shown,) = (await house.http.get("/admin/status")).json()["shards"]
    assert (shown["engine"], shown["hooked"], shown["note"]) == ("TGI", False, NOTE)


async def test_info_has_no_notes_where_all_is_well(house: Any) -> None:
    assert "notes" not in (await house.http.get("/info")).json()
    shards = (await house.http.get("/admin/status")).json()["shards"]
    assert {shard["engine"] for shard in shards} == {"embedded"}

"""Servers that the overlay does not hook: they serve as stock TGI does, and say why."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.embedded.shard.seam import Stopping
from orchestrator.embedded.tgi.model import ModelLimits
from tests.tgi.pair import Member, Models, arena_folder, member, told
from tests.tgi.prompts import prompt_of, tokenizer_of
from tests.tgi.servers import ServerFailedError, ServerPlan, Servers
from tests.tgi.stepping import Slots, answers, warm
from tgi_patches.contract import SPEC_VARIABLE, STRICT_VARIABLE, PutTag, new_handle
from tgi_patches.report import read_report, report_path

LIMITS = ModelLimits(max_input_tokens=200, max_total_tokens=256, max_batch_prefill_tokens=256)
STOPPING = Stopping(6, ignore_eos_token=True)
CHANGED = "FlashCausalLMBatch.from_tokenized differ"


@pytest.fixture
def folder() -> Iterator[Path]:
    with arena_folder() as made:
        yield made


@pytest.fixture(scope="module")
def other_tgi(tgi_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed server, of which one hooked function has another source."""
    command = "import text_generation_server as t, os; print(os.path.dirname(t.__file__))"
    found = subprocess.run(
        [str(tgi_python), "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    parent = tmp_path_factory.mktemp("other-tgi")
    package = parent / "text_generation_server"
    shutil.copytree(found.stdout.strip(), package, ignore=shutil.ignore_patterns("__pycache__"))
    module = package / "models" / "flash_causal_lm.py"
    source = module.read_text()
    at = source.index("speculate = get_speculate()", source.index("def from_tokenized"))
    module.write_text(f"{source[:at]}_ = 'another version'\n        {source[at:]}")
    return parent


async def assert_serves_as_stock(server: Member, servers: Servers, python: Path) -> None:
    """Also a request with a handle, which an unhooked server takes for an unknown adapter."""
    tokenizer = tokenizer_of(server.server.plan.model)
    plan = replace(server.server.plan, overlay=False, env={})
    with servers.own(plan) as stock:
        async with warm(server.server, python, LIMITS) as hooked, warm(stock, python, LIMITS) as plain:
            prompt = prompt_of(tokenizer, "the river and the stone")
            models = Models(None, hooked, hooked, plain, Slots(await plain.info()))  # type: ignore[arg-type]
            for adapter in ("", str(PutTag(new_handle()))):
                asked = replace(models.ask(prompt, STOPPING), adapter_id=adapter)
                steps = (await answers(hooked, [asked]))[asked.id]
                assert told(steps) == told(await models.colocated(replace(asked, adapter_id="")))


async def test_another_tgi_is_not_hooked_and_says_so_in_log_and_report(
    other_tgi: Path, servers: Servers, tiny: Path, folder: Path, tgi_python: Path
) -> None:
    plan = ServerPlan(tiny, env={"PYTHONPATH": path_with(other_tgi)})
    with member(servers, plan, "unknown", folder, arena_bytes=1 << 20) as server:
        await assert_serves_as_stock(server, servers, tgi_python)
        report = server.report
        assert (report.hooked, report.armed, report.model_class) == (False, False, "FlashCausalLM")
        assert CHANGED in report.note
        lines = [line for line in server.server.log().splitlines() if "overlay_not_hooked" in line]
        assert len(lines) == 1
        assert CHANGED in lines[0]


def test_strict_makes_another_tgi_refuse_to_start_with_exit_code_2(
    other_tgi: Path, servers: Servers, tiny: Path, folder: Path
) -> None:
    plan = ServerPlan(tiny, env={"PYTHONPATH": path_with(other_tgi), STRICT_VARIABLE: "1"})
    with (
        pytest.raises(ServerFailedError, match=rf"(?s)ended with code 2.*{CHANGED}"),
        member(servers, plan, "strict", folder),
    ):
        pass


async def test_strict_lets_the_known_tgi_start(servers: Servers, tiny: Path, folder: Path) -> None:
    with member(servers, ServerPlan(tiny, env={STRICT_VARIABLE: "1"}), "strict", folder) as server:
        assert server.report.hooked


async def test_paged_attention_is_refused_in_a_sentence(
    servers: Servers, tiny: Path, folder: Path, tgi_python: Path
) -> None:
    with member(servers, ServerPlan(tiny, attention="paged"), "paged", folder, arena_bytes=1 << 20) as server:
        await assert_serves_as_stock(server, servers, tgi_python)
        assert not server.report.hooked
        assert "paged attention" in server.report.note


async def test_an_arena_that_cannot_be_opened_leaves_the_server_unhooked(
    servers: Servers, tiny: Path, folder: Path, tgi_python: Path
) -> None:
    with member(servers, ServerPlan(tiny), "tiny-ring", folder, arena_bytes=100) as server:
        await assert_serves_as_stock(server, servers, tgi_python)
        assert not server.report.hooked
        assert "at least" in server.report.note


def test_a_broken_spec_leaves_a_stock_server_and_a_line_in_its_log(servers: Servers, tiny: Path) -> None:
    plan = ServerPlan(tiny, overlay=True, env={SPEC_VARIABLE: "{}"})
    with servers.own(plan) as server:
        assert "The shard's spec is not usable" in server.log()
    with pytest.raises(ServerFailedError, match=r"(?s)code 2.*spec is not usable"):
        servers.own(replace(plan, env={**plan.env, STRICT_VARIABLE: "1"})).__enter__()


def test_without_a_spec_the_entry_point_is_stock_tgi(servers: Servers, tiny: Path, folder: Path) -> None:
    with servers.own(ServerPlan(tiny, overlay=True)) as server:
        assert "overlay" not in server.log()
    assert read_report(report_path(folder, "tests", "any", 0)) is None


def path_with(other: Path) -> str:
    """The changed server before everything else; the plan's own folders follow."""
    from tests.tgi.servers import ROOT, STAND_IN

    return ":".join(map(str, (other, STAND_IN, ROOT)))

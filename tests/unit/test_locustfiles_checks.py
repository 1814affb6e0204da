"""Options of the load generator that cannot work are one sentence."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from locustfiles.tgi_load.checks import KEY_VARIABLE, LoadError, api_key, checked, weights
from orchestrator.bootstrap import ROOT

GOOD = {
    "slo_ttft_ms": 1000.0,
    "slo_tpot_ms": 100.0,
    "length_scale": 1.0,
    "max_answer_tokens": 1024,
    "burst_period_s": 60.0,
    "burst_length_s": 10.0,
    "burst_base_users": 1,
    "day_length_s": 240.0,
    "ramp_step_users": 2,
    "ramp_step_s": 20.0,
    "connect_timeout_s": 10.0,
    "idle_timeout_s": 120.0,
    "think_s": 1.0,
    "weights": "chat=6,code=3,long=1",
}


def test_the_defaults_pass() -> None:
    checked(Namespace(**GOOD))
    checked(Namespace(**GOOD | {"think_s": 0, "burst_length_s": 60.0, "burst_base_users": 0}))


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("slo_ttft_ms", 0, "--slo-ttft-ms must be above 0"),
        ("length_scale", -1, "--length-scale must be above 0"),
        ("ramp_step_users", 0, "--ramp-step-users must be above 0"),
        ("idle_timeout_s", float("nan"), "--idle-timeout-s must be above 0"),
        ("think_s", -0.1, "--think-s and --burst-base-users must be 0 or more"),
        ("burst_length_s", 61.0, "--burst-length-s must be between 0 and --burst-period-s"),
        ("weights", "chat", "is not like chat=6,code=3,long=1"),
    ],
)
def test_what_cannot_work_is_named(name: str, value: Any, named: str) -> None:
    with pytest.raises(LoadError, match=named):
        checked(Namespace(**GOOD | {name: value}))


def test_weights_are_read_and_what_is_not_named_has_none() -> None:
    assert weights("chat=6,code=3,long=1") == {"chat": 6, "code": 3, "long": 1}
    assert weights(" long=2 ") == {"chat": 0, "code": 0, "long": 2}
    for text in ("", "chat=0", "chat=-1", "chat=1.5", "poem=1", "chat"):
        with pytest.raises(LoadError):
            weights(text)


def test_the_key_comes_from_the_file_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text("from-the-file\n")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert api_key(Namespace(api_key_file="")) is None
    monkeypatch.setenv(KEY_VARIABLE, "from-the-environment")
    assert api_key(Namespace(api_key_file="")) == "from-the-environment"
    assert api_key(Namespace(api_key_file=str(path))) == "from-the-file"
    for text in ("", "two\nlines", "schlüssel"):
        path.write_text(text)
        with pytest.raises(LoadError, match="--api-key-file"):
            api_key(Namespace(api_key_file=str(path)))
    with pytest.raises(LoadError, match="cannot be read"):
        api_key(Namespace(api_key_file=str(tmp_path / "none")))


def test_every_option_is_documented() -> None:
    source = (ROOT / "locustfiles" / "tgi_load" / "options.py").read_text(encoding="utf-8")
    options = set(re.findall(r'"(--[a-z-]+)"', source))
    assert len(options) >= 20
    page = (ROOT / "docs" / "load.md").read_text(encoding="utf-8")
    assert {option for option in options if f"`{option}`" not in page} == set()

"""Rules of models: how they are written, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.config.load import load_config, redacted, to_toml
from eventlm.config.model_rules import ModelRules, check_model_rules
from eventlm.errors import UsageError


def test_specs_and_tables_mean_the_same(tmp_path: Path) -> None:
    specs = ["org/llama3:8b:fallback=small,fallback_after_ms=2000", "b:canary=c,canary_percent=2.5"]
    config = load_config(None, {"models": specs})
    assert config.models == {
        "org/llama3:8b": ModelRules(fallback="small", fallback_after_ms=2000),
        "b": ModelRules(canary="c", canary_percent=2.5),
    }
    assert config.models["b"].canary_ppm == 25_000
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml").models == config.models
    assert redacted(config)["models"]["b"]["canary"] == "c"
    assert "models" not in redacted(load_config(None))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a", "write NAME:KEY=VALUE,..."),
        ("a:canary=b", "canary_percent, above 0, need each other"),
        ("a:shadow_percent=1", "shadow_percent, above 0, need each other"),
        ("a:fallback_after_ms=5", "need a fallback"),
        ("a:canary=b,canary_percent=101", "canary_percent=101"),
        ("a:falback=b", "did you mean fallback?"),
    ],
)
def test_mistakes_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(None, {"models": [spec]})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "rules", "message"),
    [
        ("x", ModelRules(fallback="b"), "[models.x]: this server has no model 'x'; it has a, b"),
        ("a", ModelRules(fallback="x"), "[models.a]: fallback = 'x': this server has no such model; it has a, b"),
        ("a", ModelRules(shadow="a", shadow_percent=1.0), "[models.a]: shadow = 'a' is the model itself"),
        ("a", ModelRules(fallback="b", fallback_class="gold"), "[models.a]: there is no service class 'gold'"),
    ],
)
def test_names_must_be_the_server_s(name: str, rules: ModelRules, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_model_rules({name: rules}, ["a", "b"], ["silver"])
    assert str(caught.value).startswith(message)
    check_model_rules({"a": ModelRules(fallback="b", fallback_class="silver")}, ["a", "b"], ["silver"])

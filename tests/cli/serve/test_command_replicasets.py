"""`eventlm serve` with several replicasets: real processes, two tiny models, the openai client, and the trace."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.events import Arrived, Header, Launched
from tests.checkpoints import make_checkpoint
from tests.cli.conftest import RunHere, StartServer
from tests.http_exchange import Reply
from tests.serving import fake_text, run_command

SMALL = (
    "small:model=fake,served_model_name=other,replicas=2,max_model_len=64,block_size=8,policy=edf,router=round_robin"
)


def labels_of(metrics: Reply, name: str) -> list[str]:
    return [line for line in metrics.data.decode().splitlines() if line.startswith(name + "{")]


def test_each_of_two_checkpoints_answers_for_itself(
    start_server: StartServer, run_here: RunHere, tmp_path: Path
) -> None:
    first = make_checkpoint(tmp_path / "first", seed=1)
    second = make_checkpoint(tmp_path / "second", family="qwen3", num_layers=3, max_position_embeddings=128, seed=2)
    common = ["--kv-memory", "8MiB", "--threads", "1"]
    fields = {"prompt": "Every step of every request", "max_tokens": 12, "temperature": 0}

    def text_of(client: openai.OpenAI, model: str) -> str:
        return client.completions.create(model=model, **fields).choices[0].text  # type: ignore[arg-type]

    server = start_server(str(second), *common)
    alone = text_of(server.client(), "second")
    server.stop()
    server = start_server(str(first), *common, "--record-tokens", "--replicaset", f"b:model={second}")
    client = server.client()
    assert [(each.id, each.max_model_len) for each in client.models.list().data] == [("first", 512), ("second", 128)]  # type: ignore[attr-defined]
    assert text_of(client, "second") == alone != text_of(client, "first")
    assert text_of(client, "second") == alone
    for model in ("second", "first"):
        reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        assert reply.model == model
    with pytest.raises(openai.NotFoundError, match="'third' does not exist"):
        text_of(client, "third")
    with pytest.raises(openai.BadRequestError, match="128 tokens"):
        client.completions.create(model="second", prompt="hi", max_tokens=400)
    assert client.completions.create(model="first", prompt="hi", max_tokens=140).usage is not None
    trace = server.stop_and_verify()
    [header] = trace.of(Header)
    assert [each.name for each in header.sets] == ["main", "b"]
    assert len({each.model_fingerprint for each in header.sets}) == 2
    assert header.sets[1].host["attention_backend"] == header.host["attention_backend"]
    replay_in_every_way(str(server.trace), run_here)


def replay_in_every_way(trace: str, run_here: RunHere) -> None:
    """The run again on both models, under a change to one, from a point of it, and as a workload."""

    def run(*arguments: str) -> dict[str, Any]:
        code, output, errors = run_here(*arguments, "--json")
        assert code == 0, errors
        return dict(json.loads(output))

    executed = run("replay", trace, "--execute")
    assert executed["num_tokens"] > 60
    assert (executed["mismatches"], executed["host_differences"]) == ([], [])
    found = run("replay", trace, "--replicaset", "b:replicas=2,policy=lrs")
    assert found["null_test"]["num_decisions"] > 50
    assert [each["core"]["models"] for each in found["replicasets"]] == [["first"], ["second"]]
    branched = run("branch", trace, "--at", "0.1s", "--replicaset", "b:policy=edf", "--draws", "1")
    assert branched["null_test"]["num_decisions"] > 0
    simulated = run("simulate", trace, "--cost-model", trace, "--replicaset", "b:replicas=3")
    assert [each["num_replicas"] for each in simulated["summary"]["replicasets"]] == [1, 3]
    code, _, errors = run_here("replay", trace, "--execute", "--model", "first")
    assert (code, errors.count("\n")) == (2, 1)
    assert "give --replicaset NAME:model=first" in errors
    code, _, errors = run_here("replay", trace, "--execute", "--replicaset", "b:model=/nowhere")
    assert (code, errors.count("\n")) == (2, 1)
    assert "error: replicaset b: --model /nowhere: no such folder" in errors


def test_limits_metrics_and_replicas_are_each_sets_own(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--replicaset", SMALL)
    for seed in range(4):
        for model in ("fake", "other"):
            assert server.complete(model=model, seed=seed).json()["choices"][0]["text"] == fake_text(seed, 8)
    metrics = server.request("GET", "/metrics")
    found = labels_of(metrics, "vllm:generation_tokens_total")
    assert [line.partition(" ")[0] for line in found] == [
        'vllm:generation_tokens_total{engine="0",model_name="fake"}',
        'vllm:generation_tokens_total{engine="1",model_name="other"}',
        'vllm:generation_tokens_total{engine="2",model_name="other"}',
    ]
    assert [float(line.split()[1]) for line in found] == [32, 16, 16]
    assert [
        f'block_size="{size}"' in line
        for size, line in zip((16, 8, 8), labels_of(metrics, "vllm:cache_config_info"), strict=True)
    ] == [True] * 3
    assert server.complete(model="other", max_tokens=100).status == 400
    assert server.request("GET", "/health").json() == {"status": "ready"}
    trace = server.stop_and_verify()
    assert Counter(each.replicaset for each in trace.of(Arrived)) == {0: 4, 1: 4}
    assert {each.replica for each in trace.of(Launched)} == {0, 1, 2}
    shown = run_command("trace", "info", str(server.trace), cwd=server.folder).stdout
    assert "other" in shown
    assert run_command("explain", str(server.trace), "--slowest", "2", cwd=server.folder).returncode == 0


@pytest.mark.parametrize("dead", ["fake", "other"])
def test_a_set_without_a_worker_is_missed_by_its_own_requests_alone(start_server: StartServer, dead: str) -> None:
    live = {"fake": "other", "other": "fake"}[dead]
    flags = [] if dead == "other" else ["--fake", "die_ppm=1000000"]
    spec = f"small:model=fake,served_model_name=other,fake=die_ppm={1_000_000 if dead == 'other' else 0}"
    flags += ["--max-restarts", "1", "--max-losses", "0"]
    server = start_server("--model", "fake", *flags, "--replicaset", spec)
    reply = server.complete(model=dead)
    assert (reply.status, live in reply.json()["error"]["message"]) == (503, False)
    again = server.complete(model=dead)
    assert again.status == 503
    assert f"No worker of the model '{dead}' is left" in again.json()["error"]["message"]
    for seed in range(3):
        assert server.complete(model=live, seed=seed).json()["choices"][0]["text"] == fake_text(seed, 8)
    health = server.request("GET", "/health")
    assert (health.status, health.json()) == (200, {"status": "ready", "unavailable": [dead]})
    server.stop_and_verify()


def test_front_ends_know_all_models(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--replicaset", SMALL, "--api-servers", "1")
    for model in ("fake", "other"):
        assert server.complete(model=model, seed=3).json()["choices"][0]["text"] == fake_text(3, 8)
    assert server.complete(model="other", max_tokens=100).status == 400
    assert server.complete(model="neither").status == 404
    server.stop_and_verify()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicaset", "a:model=fake"], "main and a both serve 'fake'"),
        (["--replicaset", "a:model=fake,mdel=1"], "unknown key 'mdel'; did you mean model?"),
        (
            ["--replicaset", "a:model=fake,served_model_name=x", "--replicaset", "a:model=fake"],
            "two replicasets are called a",
        ),
        (["--replicaset", "a:model=fake,served_model_name=x,replicas=1024"], "up to 1,024"),
        (["--replicaset", "a:model=/nowhere"], "error: replicaset a: --model /nowhere: no such folder"),
        (
            ["--replicaset", "a:served_model_name=x,kv_parallel_size=2,kv_shard_tokens=100"],
            "error: replicaset a: --kv-shard-tokens 100 is no multiple of --block-size 16",
        ),
    ],
)
def test_mistakes_are_one_line(run_here: RunHere, flags: list[str], message: str) -> None:
    code, _, error = run_here("serve", "--model", "fake", "--num-blocks", "100", *flags)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1

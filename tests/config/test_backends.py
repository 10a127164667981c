"""Specs of backends: what they mean, and mistakes in one line that shows no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.config.backends import BackendSpec, DnsBackends, FileBackends, parse_backend, read_backends_file
from eventlm.errors import UsageError

KEY = "s3cr3t"
ENVIRONMENT = {"OTHER_KEY": f" {KEY}\n", "EMPTY": ""}


def error_of(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_backend(text, environment=ENVIRONMENT)
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_url_with_all_that_can_be_said() -> None:
    text = f"http://Host:8000/v1/, key={KEY} ,kind=vllm,model=a/b,max_concurrency=64,weight=0.5,verify=false"
    assert parse_backend(text) == BackendSpec(
        url="http://host:8000", key=KEY, kind="vllm", model="a/b", max_concurrency=64, weight=0.5, verify=False
    )
    assert parse_backend("https://api.example.com/openai/v1") == BackendSpec(url="https://api.example.com/openai")


def test_a_name_whose_addresses_are_backends() -> None:
    spec = parse_backend("dns:llm.internal:8000,max_concurrency=8")
    assert spec == DnsBackends("llm.internal", 8000, BackendSpec(url="", max_concurrency=8))
    assert spec.at("10.0.0.2") == BackendSpec(url="http://10.0.0.2:8000", max_concurrency=8)
    assert spec.at("fd00::2").url == "http://[fd00::2]:8000"


def test_a_file_of_specs(tmp_path: Path) -> None:
    path = tmp_path / "backends"
    path.write_text("# ours\nhttp://a:1\n\nhttp://b:2,weight=3,kind=sglang # the large one\n")
    spec = parse_backend(f"file:{path},kind=vllm")
    assert spec == FileBackends(str(path), BackendSpec(url="", kind="vllm"))
    assert read_backends_file(spec) == [
        BackendSpec(url="http://a:1", kind="vllm"),
        BackendSpec(url="http://b:2", kind="sglang", weight=3.0),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"http://a:1,key={KEY},quick=1", "line 2: http://a:1,key=***,quick=1: unknown key 'quick'"),
        (f"dns:h:1,key={KEY}", "line 2: dns:h:1,key=***: a file lists URLs"),
        ("http://b:2/v1", "line 2: http://b:2 appears twice"),
    ],
)
def test_a_mistake_in_a_file_has_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "backends"
    path.write_text(f"http://b:2\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_backends_file(FileBackends(str(path), BackendSpec(url="")))
    assert f"{path}, {message}" in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=f"^--backend file:{path}: cannot read it: {reason}$"):
            read_backends_file(FileBackends(str(path), BackendSpec(url="")))


def test_a_key_comes_from_a_variable_or_a_file_as_well(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    for text in (f"key={KEY}", "key_env=OTHER_KEY", f"key_file={path}"):
        spec = parse_backend(f"http://h:1,{text}", environment=ENVIRONMENT)
        assert spec == BackendSpec(url="http://h:1", key=KEY)
        assert KEY not in repr(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it must be a URL such as http://10.0.0.2:8000, dns:HOST:PORT or file:PATH"),
        ("10.0.0.2:8000", "--backend 10.0.0.2:8000: it must be a URL"),
        ("ftp://h:1", "it must be a URL"),
        ("http://h:x", "this is no URL"),
        ("http://h h:1", "a URL has no spaces"),
        (f"http://me:{KEY}@h:1", "--backend http://***@h:1: a URL has no user here"),
        (f"http://h:1?key={KEY}", "leave out what comes after ?"),
        (f"http://h:1,{KEY}", "--backend http://h:1,***: after the address come KEY=VALUE"),
        ("http://h:1,c2VjcmV0==", "--backend http://h:1,***: after the address come KEY=VALUE"),
        ("http://h:1,kind=", "after the address come KEY=VALUE"),
        (f"http://h:1,keyy={KEY}", "unknown key 'keyy'; known: key, key_env"),
        ("http://h:1,kind=tgi", "kind=tgi: must be one of vllm, sglang, llamacpp, ollama, openai, eventlm"),
        ("http://h:1,max_concurrency=0", "max_concurrency=0: must be an integer from 1"),
        ("http://h:1,max_concurrency=many", "max_concurrency=many: must be an integer from 1 to 1000000"),
        ("http://h:1,weight=0", "weight=0: must be a number above 0 and up to 1000000"),
        ("http://h:1,weight=nan", "weight=nan: must be a number above 0"),
        ("http://h:1,verify=maybe", "verify=maybe: must be true or false"),
        ("http://h:1,weight=1,weight=2", "it gives weight twice"),
        (f"http://h:1,key={KEY},key_env=OTHER_KEY", "it gives key and key_env; one is enough"),
        ("http://h:1,key_env=EMPTY", "the variable EMPTY is not set"),
        ("http://h:1,key_file=/nowhere/key", "cannot read /nowhere/key: No such file or directory"),
        ("http://h:1,key=***", "*** stands for a key that is not shown"),
        (f"http://h:1,key={KEY} {KEY}", "its key has characters that HTTP does not allow"),
        ("https://h:1,ca_file=/nowhere/ca", "cannot read /nowhere/ca: No such file or directory"),
        ("https://h:1,ca_file=/dev/null,verify=false", "with verify=false no certificate is checked"),
        ("http://h:1,ca_file=/dev/null", "ca_file is for a server with TLS"),
        ("dns:h", "it must be dns:HOST:PORT, such as dns:llm.internal:8000"),
        ("dns:http://h:1", "it must be dns:HOST:PORT"),
        ("file:", "it names no file"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    assert message in error_of(text)

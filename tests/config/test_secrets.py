"""What is secret is replaced, and nothing else."""

from __future__ import annotations

import pytest

from eventlm.config.secrets import hide, hide_keys, hide_keys_of


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1,kind=vllm,weight=0.5", "http://h:1,kind=vllm,weight=0.5"),
        ("http://h:1,key=s3,kind=vllm", "http://h:1,key=***,kind=vllm"),
        ("http://h:1, api_key = s3", "http://h:1, api_key =***"),
        ("http://h:1,keyy=s3", "http://h:1,keyy=***"),
        ("http://h:1,key_env=K,key_file=/k", "http://h:1,key_env=K,key_file=/k"),
        ("http://h:1,s3", "http://h:1,***"),
        ("http://h:1,c2VjcmV0,kind=vllm", "http://h:1,***,kind=vllm"),
        ("http://h:1,c2VjcmV0=", "http://h:1,***"),
        ("http://h:1,secrets==", "http://h:1,***"),
        ("http://h:1,model=", "http://h:1,model="),
        ("http://me:s3@h:1/v1", "http://***@h:1/v1"),
        ("http://h:1?key=s3", "http://h:1?***"),
        ("http://h:1?a=b&key=s3,kind=vllm", "http://h:1?***,kind=vllm"),
        ("small:backend=http://h:1,key=s3,replicas=2", "small:backend=http://h:1,key=***,replicas=2"),
        ("small:key=s3", "small:key=***"),
        ("small:predictor=1,2,3,model=m", "small:predictor=1,2,3,model=m"),
        ("key=s3", "key=***"),
    ],
)
def test_keys_of_a_spec_are_hidden(spec: str, shown: str) -> None:
    assert hide_keys(spec) == shown
    assert hide_keys_of([spec]) == [shown]


def test_values_that_are_secret_as_a_whole() -> None:
    assert (hide("s3"), hide(3), hide(""), hide_keys_of({"key": "s3"})) == ("***", "***", "", "***")

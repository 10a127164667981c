"""The objects have the fields that the official client's types have."""

from __future__ import annotations

from typing import Any, get_args

import openai.types as official
import pytest
from openai.types import batch_error, batch_request_counts, batch_usage
from openai.types.batch import Errors

from eventlm.server.batches.objects import (
    BatchError,
    BatchErrors,
    BatchInputTokens,
    BatchObject,
    BatchOutputTokens,
    BatchStatus,
    BatchUsage,
    FileDeleted,
    FileObject,
    FilePurpose,
    RequestCounts,
)

PAIRS = [
    (FileObject, official.FileObject),
    (FileDeleted, official.FileDeleted),
    (BatchError, batch_error.BatchError),
    (BatchErrors, Errors),
    (RequestCounts, batch_request_counts.BatchRequestCounts),
    (BatchUsage, batch_usage.BatchUsage),
    (BatchInputTokens, batch_usage.InputTokensDetails),
    (BatchOutputTokens, batch_usage.OutputTokensDetails),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda each: each.__name__)
def test_the_fields_are_those_of_the_official_types(ours: Any, theirs: Any) -> None:
    assert set(ours.__struct_fields__) == set(theirs.model_fields)


def test_a_batch_lacks_only_the_model_since_each_line_names_its_own() -> None:
    assert set(official.Batch.model_fields) - set(BatchObject.__struct_fields__) == {"model"}
    assert set(BatchObject.__struct_fields__) <= set(official.Batch.model_fields)


def test_statuses_and_purposes_are_official_ones() -> None:
    assert get_args(BatchStatus) == get_args(official.Batch.model_fields["status"].annotation)
    assert set(get_args(FilePurpose)) <= set(get_args(official.FileObject.model_fields["purpose"].annotation))

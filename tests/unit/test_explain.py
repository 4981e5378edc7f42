"""What a bad HTTP request is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tierkv_server.admin import schema
from tierkv_server.admin.explain import explain

_SORTS = "is one of: hits, last_used, nbytes, tokens"
_TIERS = "is one of: disk, host, shared"


@pytest.mark.parametrize(
    "takes, values, words",
    [
        (schema.ListQuery, {"sort": "x"}, f"'x' is not possible for $.sort; it {_SORTS}"),
        (schema.ListQuery, {"tier": ["disk", "gpu"]}, f"'gpu' is not possible for $.tier[1]; it {_TIERS}"),
        (schema.EvictBody, {"tiers": ["gpu"]}, f"'gpu' is not possible for $.tiers[0]; it {_TIERS}"),
        (schema.ListQuery, {"ns": "zz"}, "$.ns has to be hexadecimal digits, as 'tierkv ls' and 'tierkv ns' show them"),
        (schema.LocateBody, {"keys": {"zz": []}}, "a name in $.keys has to be 32 hexadecimal digits"),
        (schema.ListQuery, {"limit": "0"}, "Expected `int` >= 1 - at `$.limit`"),
        (schema.ListQuery, {"ns": 5}, "Expected `str`, got `int` - at `$.ns`"),
    ],
)
def test_a_word_that_is_none_of_several_is_told_which(takes: Any, values: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(values, takes, strict=False)
    assert explain(caught.value, takes) == words


def test_other_errors_are_what_they_are() -> None:
    assert explain(ValueError("odd"), schema.ListQuery) == "odd"
    assert explain(ValueError("Invalid enum value 'x' - at `$.nope.sort`"), schema.ListQuery).startswith("Invalid enum")

"""No secret is in what is written for others."""

import pytest

from jaxlm.config import config_files
from jaxlm.host.redact import redact, redact_url


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/path", "s3://bucket/path"),
        ("/a/path?x=1", "/a/path?x=1"),
        ("s3://key:s3cret@host:9000/bucket?token=s3cret&x=s3cret#s3cret", "s3://***@host:9000/bucket?token=***&x=***"),
        ("see https://me@host/a, or not", "see https://***@host/a, or not"),
        ("HF_TOKEN=s3cret python x.py --steps=5", "HF_TOKEN=*** python x.py --steps=5"),
        ("stop --api-key s3cret --pod 7", "stop --api-key *** --pod 7"),
        ('curl -H "Authorization: Bearer s3cret" host', 'curl -H "Authorization: *** ***" host'),
        ('{"password": "s3cret"}', '{"password": "***"}'),
        ("http://[half", "http://***"),
        ("the tokens are 5; key findings: none", "the tokens are 5; key findings: none"),
        ("", ""),
        (
            ["jaxlm", "--config.notify.urls", "('slack://s3cret/a/b',)", "--token=s3cret", "--secret", "s3cret", "y"],
            ["jaxlm", "--config.notify.urls", "('slack://***',)", "--token=***", "--secret", "***", "y"],
        ),
        *((c, c) for c in (config_files.load(name).to_dict() for name in ("base", "quickstart", "gpuburnout_1b"))),
    ],
)
def test_secrets_in_text_are_hidden(text, shown):
    assert redact(text) == shown
    assert redact(redact(text)) == redact(text)


def test_secrets_are_hidden_by_name_and_nothing_else_is():
    urls = ("https://hooks.example.org/T/s3cret?x=1", "tgram://s3cret/a")
    asked = {
        "notify": {"urls": urls, "heartbeat_url": "http://a/s3cret"},
        "hub": dict.fromkeys(("api_key", "access_key_id", "HF_TOKEN", "client-secret"), "s3cret") | {"password": ""},
        "data": {"text_key": "text", "tokenizer": "bpe", "block_tokens": 8192, "prompts": ("a: b", "tokens = 5")},
        "keys": [1, 2.5, None, True],
    }
    found = redact(asked)
    assert "s3cret" not in repr(found)
    assert found["notify"]["urls"] == ("https://hooks.example.org/***", "tgram://***")
    assert found["notify"]["heartbeat_url"] == "http://a/***"
    assert found["hub"] == dict.fromkeys(asked["hub"], "***") | {"password": ""}
    assert {key: found[key] for key in ("data", "keys")} == {key: asked[key] for key in ("data", "keys")}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:pass@word@bucket/a", "s3://***@bucket/a"),
        (
            "https://u@host:80/a?X-Amz-Signature=abc&b=&token#fragment",
            "https://***@host:80/a?X-Amz-Signature=***&b=***&***",
        ),
        ("/runs/a?b@c", "/runs/a?b@c"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert redact_url(url) == shown

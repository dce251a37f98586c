"""Passwords in whatever is printed or recorded."""

import pytest

from data_pipeline.foundation.secrets import masked, masked_code, masked_values, without_login


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:hunter2@example.org/x", "https://me:***@example.org/x"),
        ("mysql+pymysql://me:h@nt/er:2@db:3306/mlflow", "mysql+pymysql://me:***@db:3306/mlflow"),
        ("https://:hunter2@example.org", "https://:***@example.org"),
        ('{"a": "ftp://u:p1@a/b", "c": "ftp://u:p2@d"}', '{"a": "ftp://u:***@a/b", "c": "ftp://u:***@d"}'),
        ("https://example.org/x?user=me&password=hunter2&y=1", "https://example.org/x?user=me&password=***&y=1"),
        ("https://me@example.org:8080/a", "https://me@example.org:8080/a"),
        ("http://127.0.0.1:5000/", "http://127.0.0.1:5000/"),
        ("sqlite:////home/me/runs/mlflow.db", "sqlite:////home/me/runs/mlflow.db"),
        ("s3://bucket/corpora", "s3://bucket/corpora"),
        ("a: b@c", "a: b@c"),
    ],
)
def test_passwords_in_urls_are_hidden_and_nothing_else_is(text, shown):
    assert masked(text) == shown
    assert masked(shown) == shown


def test_settings_are_hidden_at_any_depth_and_keep_their_types():
    settings = {"a": [{"uri": "https://me:hunter2@host"}, 3, None, 0.5], "b": True}
    assert masked_values(settings) == {"a": [{"uri": "https://me:***@host"}, 3, None, 0.5], "b": True}


def test_a_link_needs_no_login():
    assert without_login("https://me:***@host:80/a@b") == "https://host:80/a@b"
    assert without_login("https://host/a@b") == "https://host/a@b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('+api_key = "abc123def"', '+api_key = "***"'),
        ("-HF_TOKEN=abc123def # old", "-HF_TOKEN=*** # old"),
        ('+  "password": "hunter2!",', '+  "password": "***",'),
        ("+login(hf_abcdefghijklmnopqrst)", "+login(***)"),
        ("+key: AKIAIOSFODNN7EXAMPLE", "+key: ***"),
        ("+uri: https://me:hunter2@host", "+uri: https://me:***@host"),
        ("-----BEGIN RSA PRIVATE KEY-----\n+MIIEow\n-----END", "-----BEGIN RSA PRIVATE KEY-----***-----END"),
        ("+tokens = 512 * 2048000", "+tokens = 512 * 2048000"),
        ("+max_new_tokens: 128", "+max_new_tokens: 128"),
        ("+    tokenizer = load(directory)", "+    tokenizer = load(directory)"),
    ],
)
def test_what_looks_like_a_secret_in_code_is_hidden(text, shown):
    assert masked_code(text) == shown
    assert masked_code(shown) == shown

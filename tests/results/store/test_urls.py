"""Credentials in a URL are refused, and shown nowhere."""

import pytest

from fp4dse.dse import ConfigError
from fp4dse.dse.program.urls import HIDDEN, redacted, refuse_credentials
from fp4dse.results.store.remote import RemotePath, locate
from fp4dse.sweeps.stores import home

SECRET = "wJalr/XUtn+FEMI"
WITH = [
    f"s3://AKIAEXAMPLE:{SECRET}@bucket/folder",
    f"s3://{SECRET.replace('/', '')}@bucket/folder",
    f"https://user:{SECRET}@host/folder",
    f"hdfs://user:{SECRET}@host:8020/folder",
    f"s3://bucket/folder?region=us-east-1&secret_key={SECRET}",
    f"s3://bucket/folder?access_key={SECRET}&region=us-east-1",
    f"s3://bucket/folder?session_token={SECRET}",
    f"s3://bucket/folder?AWS_SECRET_ACCESS_KEY={SECRET}",
    f"https://host/folder?X-Amz-Signature={SECRET}",
    f"abfs://container/folder?sig={SECRET}",
    f"s3://bucket/folder?endpoint_override=http://user:{SECRET}@host:9000",
    f"s3://bucket/folder?password={SECRET}",
]
WITHOUT = [
    "s3://bucket/folder",
    "s3://bucket/folder@2/store:old",
    "s3://bucket/folder?endpoint_override=host:9000&scheme=http&region=us-east-1",
    "gs://anonymous@bucket/folder",
    "hdfs://namenode:8020/runs/a@b",
    "abfs://container/folder?credential_kind=default&blob_storage_authority=.blob.local",
    "runs/all/store",
    "memory://keys/tokens?scheme=x",
]


@pytest.mark.parametrize("url", WITH)
def test_a_url_with_credentials_is_refused_without_repeating_them(url):
    with pytest.raises(ConfigError, match=r"store: .*without credentials: set AWS_ACCESS_KEY_ID and") as caught:
        locate(url)
    assert SECRET not in str(caught.value)
    assert SECRET.replace("/", "") not in str(caught.value)


def test_percent_encoding_hides_nothing_from_the_check():
    with pytest.raises(ConfigError) as caught:
        refuse_credentials(f"s3://bucket/folder?secret%5Fkey={SECRET}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", WITHOUT)
def test_other_urls_are_as_they_were(url):
    refuse_credentials(url)
    assert redacted(url) == url


@pytest.mark.parametrize("url", WITH)
def test_wherever_a_url_is_shown_or_names_a_folder_its_secrets_are_hidden(url):
    place = RemotePath(url, "bucket/folder") / "inbox"
    for shown in (str(place), repr(place), str(home(place)), redacted(f"cannot reach '{url}' (HTTP status 500)")):
        assert SECRET not in shown
        assert "XUtn" not in shown
    assert HIDDEN in str(place)
    assert redacted(f"{url} {url}").count(HIDDEN) == 2 * redacted(url).count(HIDDEN)

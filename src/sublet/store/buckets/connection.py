"""Connections to a bucket, as the environment describes them.

Rules of this file:
- Credentials and endpoints are read here and nowhere else: they are the cloud's own variables, whose names
  users know from its other tools, and variables for one bucket alone. They are never settings of sublet,
  which are shown.
- The library that speaks to buckets is optional.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from sublet.core.errors import Misconfigured, MissingExtra
from sublet.settings import variable

#: The library reads these from the environment, but forgets them when it is given any option.
_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate", "proxy_excludes")
VARIABLE_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
#: What can be set for one bucket: the end of its variable, and the library's name for it.
_OWN = {
    "s3": {
        "REGION": "region",
        "ENDPOINT_URL": "endpoint",
        "ACCESS_KEY_ID": "access_key_id",
        "SECRET_ACCESS_KEY": "secret_access_key",
        "SESSION_TOKEN": "session_token",
    },
    "gs": {"SERVICE_ACCOUNT": "service_account"},
    "az": {
        "STORAGE_ACCOUNT_NAME": "account_name",
        "STORAGE_ACCOUNT_KEY": "account_key",
        "STORAGE_SAS_TOKEN": "sas_key",
    },
}


@dataclass(frozen=True, slots=True)
class BucketTimeouts:
    request_seconds: float = 60.0
    patience_seconds: float = 120.0  # for one object, all attempts together
    connect_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class BucketConnection:
    """A bucket as the client library sees it."""

    where: str
    library: Any
    errors: Any
    store: Any
    quick_store: Any  # the same bucket with short limits, to ask whether it is there


def connect(scheme: str, bucket: str, prefix: str, limits: BucketTimeouts) -> BucketConnection:
    try:
        library, errors = import_module("obstore"), import_module("obstore.exceptions")
    except ImportError:
        raise MissingExtra(
            f"{scheme}:// needs the package obstore, which is not installed",
            remedy="pip install 'sublet[bucket]'",
        ) from None
    where = _where(scheme, bucket)
    quick = replace(limits, request_seconds=limits.connect_seconds)
    try:
        store, quick_store = (open_store(scheme, bucket, prefix, times) for times in (limits, quick))
    except Exception as e:  # whatever the library thinks of the settings; its words may quote them
        raise Misconfigured(
            f"the settings for {where} are not usable ({type(e).__name__})",
            remedy=f"check the variables that begin with {VARIABLE_PREFIXES[scheme]}_",
        ) from None
    return BucketConnection(where, library, errors, store, quick_store)


def open_store(scheme: str, bucket: str, prefix: str, limits: BucketTimeouts) -> Any:
    stores = import_module("obstore.store")
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=limits.request_seconds),
        "connect_timeout": timedelta(seconds=limits.connect_seconds),
    }
    for key in _OPTIONS:
        value = os.environ.get(f"{VARIABLE_PREFIXES[scheme]}_{key.upper()}")
        if value:
            options[key] = value.lower() in ("1", "true", "yes", "on") if key.startswith("allow_") else value
    own = own_settings(scheme, bucket)
    # Retried here: the client does not repeat a create, and cannot know whose bytes are there when it does.
    common = {
        "prefix": prefix or None,
        "client_options": options,
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=limits.patience_seconds)},
    }
    common |= own
    if scheme == "s3":
        more: dict[str, Any] = {"disable_bulk_delete": True}  # not every server has it
        if "AWS_CHECKSUM_ALGORITHM" not in os.environ:
            more["checksum_algorithm"] = "SHA256"
        return stores.S3Store(bucket, **common, **more)
    if scheme == "gs":
        return stores.GCSStore(bucket, **common)
    return stores.AzureStore(bucket, **common)


def variable_name(bucket: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", bucket.upper())


def own_settings(scheme: str, bucket: str) -> dict[str, str]:
    """What the environment says of this bucket alone, such as `SUBLET_BUCKET_EU_CHECKPOINTS_REGION` for the
    bucket eu-checkpoints. Buckets in several regions, or on several servers, need it."""
    name = variable_name(bucket)
    found = {}
    for word, key in _OWN[scheme].items():
        value = variable(f"BUCKET_{name}_{word}")
        if value:
            found[key] = value
    return found


def _where(scheme: str, bucket: str) -> str:
    """The bucket, and the server when it is not the cloud's own. No user, no key."""
    own = own_settings(scheme, bucket)
    if scheme == "az":
        account = own.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        bucket += f" of {account}" if account else ""
    kinds = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
    }
    endpoint = own.get("endpoint") or next((os.environ[k] for k in kinds[scheme] if os.environ.get(k)), "")
    host = endpoint and urlsplit(endpoint).netloc.rpartition("@")[2]
    return f"{scheme} bucket {bucket}" + (f" at {host}" if host else "")
